"""Folders of pretrained models: what must lie in them, and how models, tokenizers and image processors are loaded."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from sfumato.config.file_checks import read_json_object
from sfumato.config.open_mappings import JsonObject
from sfumato.config.paths import check_weights, hub_hint
from sfumato.config.trust import load_pretrained
from sfumato.errors import ConfigError
from sfumato.parallel.weights import refuse_not_finite
from sfumato.rewards import base

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

load_once = functools.partial(base.load_once, lock=threading.RLock())
"""Models are loaded one after the other, whichever rewards ask for them."""

NetworkT = TypeVar("NetworkT")
ModuleT = TypeVar("ModuleT", bound=nn.Module)


class Network:
    """Base of networks that score. Whoever calls one holds its ``lock``."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.lock = threading.Lock()
        self.device = device
        self.dtype = dtype


def pick_device(name: str) -> torch.device:
    """The device of a name; ``auto`` is the GPU of this process, or the CPU where there is none.

    Raises ConfigError when there is no such GPU.
    """
    num_gpus = torch.cuda.device_count()
    if name == "auto":
        # the current device of torch is one per thread, and rewards run in threads of their own
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        return torch.device("cuda", local_rank % num_gpus) if num_gpus else torch.device("cpu")
    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= num_gpus:
        raise ConfigError(f"device {name}: torch finds {num_gpus} GPUs; take auto or cpu")
    return device


def loader_of(network: Callable[[Path, torch.device, torch.dtype], NetworkT]) -> Callable[[str, str, str], NetworkT]:
    """A loader that builds ``network`` from a folder and the names of a device and a type, once per process."""
    return load_once(lambda folder, device, dtype: network(Path(folder), pick_device(device), DTYPES[dtype]))


def check_folder(folder: Path, *names: str) -> None:
    """Raises ConfigError unless the folder holds these files. ``a|b`` asks for one of several."""
    if not folder.is_dir():
        where = hub_hint(folder) or ": models are read from local folders, not from a hub"
        raise ConfigError(f"model_path {folder} is not a folder{where}")
    for name in names:
        choices = name.split("|")
        if not any(any(folder.glob(choice)) for choice in choices):
            pickled = next((path for kind in ("*.bin", "*.pt", "*.pth") for path in folder.glob(kind)), None)
            if pickled is not None and any(choice.endswith(".safetensors") for choice in choices):
                target = "model.safetensors" if "*" in name else choices[0]
                raise ConfigError(
                    f"model_path {folder} has {pickled.name}, but only safetensors files are read: "
                    f"python -m sfumato.rewards.convert weights {pickled} {folder / target}"
                )
            raise ConfigError(f"model_path {folder} has no {' or '.join(choices)}")


def read_json(path: Path) -> JsonObject:
    """A JSON mapping. Raises ConfigError when the file is broken or holds something else."""
    try:
        return read_json_object(path)
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error


def check_model_type(folder: Path, allowed: tuple[str, ...]) -> str:
    """The ``model_type`` in ``config.json``. Raises ConfigError when it is not in ``allowed``."""
    check_folder(folder, "config.json")
    model_type = str(read_json(folder / "config.json").get("model_type"))
    if model_type not in allowed:
        raise ConfigError(
            f"model_path {folder} holds a model of type {model_type!r}, but this reward needs {' or '.join(allowed)}"
        )
    return model_type


def find_architecture(folder: Path, kinds: Iterable[str], needed: str) -> str:
    """The first of these kinds of models, such as SequenceClassification, that ``config.json`` names.

    Raises ConfigError for a model of another kind, with the words ``needed``.
    """
    check_folder(folder, "config.json")
    names = [str(name) for name in read_json(folder / "config.json").get("architectures") or []]
    kind = next((kind for kind in kinds if any(name.endswith(f"For{kind}") for name in names)), None)
    if kind is None:
        raise ConfigError(f"model_path {folder} holds {', '.join(names) or 'no named architecture'}, but {needed}")
    return kind


def load_model(
    auto_class: type[_BaseAutoModelClass] | type[PreTrainedModel],
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    **options: Any,
) -> PreTrainedModel:
    """A transformers model of a folder with safetensors files, frozen and in evaluation mode.

    Args:
        auto_class: such as ``transformers.AutoModel``.
        folder: with ``config.json`` and weights.
        dtype: of the weights.
        device: where they go.
        options: further arguments of ``from_pretrained``.

    Raises:
        ConfigError: no or broken files, weights of another model, or such that are not finite.
    """
    # first, since these messages say what to do about the files; transformers' errors would not
    check_weights(folder, "model_path")
    check_folder(folder, "config.json", "*.safetensors")
    try:
        model, report = load_pretrained(
            auto_class, folder, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"model_path {folder}: transformers cannot load it: {error}") from error
    # transformers only warns of weights that the files lack, and makes random ones
    _refuse_keys(folder, {kind: report.get(kind) or () for kind in ("missing_keys", "mismatched_keys")})
    refuse_not_finite(model, folder)
    return model.eval().requires_grad_(False).to(device)


def load_processor(
    auto_class: Any,
    folder: Path,
    name: str,
    files: str = "preprocessor_config.json|processor_config.json",
    **options: Any,
) -> Any:
    """What prepares the inputs of a folder's model, by one of transformers' classes. Raises ConfigError.

    Args:
        auto_class: such as ``transformers.AutoImageProcessor``.
        folder: of the model.
        name: how messages call it.
        files: one of these must be there, as of ``check_folder``.
        options: further arguments of ``from_pretrained``.
    """
    check_folder(folder, files)
    try:
        return load_pretrained(auto_class, folder, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"model_path {folder}: transformers cannot load its {name}: {error}") from error


def load_image_processor(folder: Path) -> Any:
    """The image processor of a folder, on Pillow, so that torchvision is not needed. Raises ConfigError."""
    from transformers import AutoImageProcessor

    return load_processor(AutoImageProcessor, folder, "image processor", backend="pil")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer of a folder. Raises ConfigError."""
    from transformers import AutoTokenizer

    files = "tokenizer.json|vocab.txt|vocab.json|tokenizer.model|spiece.model"
    return load_processor(AutoTokenizer, folder, "tokenizer", files)


def load_chat_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """As ``load_tokenizer``. Raises ConfigError for a tokenizer without a chat template, too."""
    tokenizer = load_tokenizer(folder)
    if not tokenizer.chat_template:
        raise ConfigError(f"model_path {folder}: the tokenizer has no chat template: add chat_template.jinja")
    return tokenizer


class CutTexts:
    """Says once of a network that it does not read texts to their end. The caller holds the network's lock."""

    def __init__(self) -> None:
        self._note = ""
        self._is_said = False

    def look(self, tokenizer: PreTrainedTokenizerFast, texts: Sequence[str], limit: int) -> None:
        """Looks for a text of more than ``limit`` tokens, until there was one."""
        if self._note:
            return
        for text, tokens in zip(texts, tokenizer(list(texts), verbose=False).input_ids, strict=True):
            if len(tokens) > limit:
                self._note = (
                    f"its model reads the first {limit} tokens of a prompt; longer ones are cut, the first of which "
                    f"begins with {text[:60]!r}"
                )
                return

    def take_notes(self) -> list[str]:
        """The line about it, the first time."""
        if not self._note or self._is_said:
            return []
        self._is_said = True
        return [self._note]


def iterate_tensors(folder: Path, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of one safetensors file, one at a time. Raises ConfigError when it is missing or broken."""
    check_folder(folder, name)
    try:
        with safe_open(folder / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  (it is no mapping)
                yield key, file.get_tensor(key)
    except (SafetensorError, OSError) as error:
        raise ConfigError(f"{folder / name} is no readable safetensors file: {error}") from error


def assign_tensors(module: ModuleT, tensors: Mapping[str, torch.Tensor], folder: Path) -> ModuleT:
    """The module with exactly these weights, frozen. Raises ConfigError when names or shapes differ, or one is NaN."""
    expected = {name: tensor.shape for name, tensor in module.state_dict().items()}
    shared = expected.keys() & tensors.keys()
    _refuse_keys(
        folder,
        {
            "missing_keys": expected.keys() - tensors.keys(),
            "unexpected_keys": tensors.keys() - expected.keys(),
            "mismatched_keys": {name for name in shared if expected[name] != tensors[name].shape},
        },
    )
    module.load_state_dict(tensors, assign=True)
    refuse_not_finite(module, folder)
    return module.eval().requires_grad_(False)


def _refuse_keys(folder: Path, kinds: Mapping[str, Iterable[object]]) -> None:
    """Raises ConfigError for the first kind with keys, such as ``missing_keys``, and names three of them."""
    for kind, keys in kinds.items():
        wrong = sorted(map(str, keys))
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise ConfigError(f"model_path {folder}: {kind.replace('_', ' ')}: {', '.join(wrong[:3])}{more}")
