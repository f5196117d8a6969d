"""Files and folders that a configuration names: what may stand in a field, be read as a file, and hold weights."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from sfumato.config.file_checks import file_problem, read_json_object
from sfumato.config.open_mappings import JsonObject
from sfumato.errors import ConfigError

LONGEST_NAME = 255
LONGEST_PATH = 4095
"""Bytes of a name and of a whole path that Linux takes."""


VARIABLE = re.compile(r"\$(\{[^}]+\}|\([^)]+\)|[A-Za-z_]\w*)")
"""An environment variable as shells write it, what a command prints (``$(date)``), and values as OmegaConf names them
(``${oc.env:HOME}``)."""


def check_path(path: str) -> str:
    """The path with the home folder in the place of a leading ``~``.

    Raises:
        ValueError: when there can be no such path.
    """
    if not path.strip():
        raise ValueError("a path must not be empty")
    if path.strip() == "None" and not os.path.exists(path):
        raise ValueError("None would be a path of this name: write null for no path")
    if (variable := VARIABLE.search(path)) and not os.path.exists(path):
        raise ValueError(
            f"{variable[0]} would be a part of the path, since variables are not replaced here: write it "
            "out, or give the path on the command line, where the shell replaces them"
        )
    if any(ord(letter) < 32 or 0xD800 <= ord(letter) < 0xE000 for letter in path):
        raise ValueError("a path must not hold control characters, such as line breaks")
    longest = max(len(part.encode()) for part in path.split("/"))
    if longest > LONGEST_NAME or len(path.encode()) > LONGEST_PATH:
        raise ValueError(
            f"a path of {len(path.encode())} bytes with a name of {longest}: file systems take {LONGEST_PATH} and "
            f"{LONGEST_NAME}"
        )
    return os.path.expanduser(path.lstrip()) if path.lstrip().startswith("~") else path


def refuse_run_among_data(data: object, train: object) -> None:
    """Raises ConfigError where the run folder is the folder of the data, to which its samples and lines would belong.

    Args:
        data, train: sections of a configuration, which may lack train_path and output_dir.
    """
    path, output_dir = getattr(data, "train_path", None), getattr(train, "output_dir", None)
    if not (isinstance(path, str) and isinstance(output_dir, str) and os.path.isdir(path)):
        return
    if os.path.realpath(path) == os.path.realpath(output_dir):
        raise ConfigError(
            f"train.output_dir {output_dir} is the folder of data.train_path, where the run's own pictures and lines "
            "would be read as data: name another one"
        )


def check_paths(paths: str) -> str:
    """``check_path`` of several paths with commas between them."""
    return ",".join(check_path(part) for part in paths.split(","))


FilePath = Annotated[str, AfterValidator(check_path)]
"""The type of a field that names a file or folder."""

FilePaths = Annotated[str, AfterValidator(check_paths)]
"""The type of a field that names several, with commas between them."""


HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
"""Form of a model's name on the hub: an owner and a name."""


def find_model_folder(name: str) -> str:
    """The folder of a model: the path itself, or for a name on the hub the snapshot in the local hub cache.

    The snapshot's path holds its revision, so that a run's resolved configuration names it. Nothing is downloaded; a
    name that the cache lacks stays as it is.
    """
    path = check_path(name)
    if HUB_NAME.fullmatch(path) is None or Path(path).exists():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return str(snapshot_download(path, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError):
        return path


ModelPath = Annotated[str, AfterValidator(find_model_folder)]
"""The type of a field that names the folder of a model, or its name on the hub."""


CHECKPOINT_NAME = re.compile(r"global_step_(\d+)")
ADAPTER_FILES = ("adapter_config.json", "pytorch_lora_weights.safetensors")
"""Files of which a folder of exported adapters has one: that of peft, or of diffusers."""
EXPORTED = ("model_index.json", "config.json", *ADAPTER_FILES)
"""Files of which a folder of exported weights has one."""


def find_checkpoint(name: str) -> str:
    """The folder of a checkpoint: the path itself, or of a run folder its newest complete checkpoint.

    The path then holds the step, so that a run's resolved configuration names what it went on from.

    Raises:
        ValueError: when the run has saved nothing, or the folder holds checkpoints or exported weights.
    """
    path = check_path(name)
    if path in ("auto", "new"):
        return path
    folder = Path(path)
    checkpoints = folder / "checkpoints"
    if checkpoints.is_dir():
        steps = [int(match[1]) for entry in checkpoints.iterdir() if (match := CHECKPOINT_NAME.fullmatch(entry.name))]
        if not steps:
            raise ValueError(f"{checkpoints} is empty: the run has saved nothing")
        return str(checkpoints / f"global_step_{max(steps)}")
    if folder.is_dir() and any(CHECKPOINT_NAME.fullmatch(entry.name) for entry in folder.iterdir()):
        raise ValueError(
            f"{path} holds checkpoints: name one of them, or its run folder {folder.parent} to take the newest"
        )
    if not (folder / "manifest.json").exists() and any((folder / file).is_file() for file in EXPORTED):
        raise ValueError(
            f"{path} holds exported weights and no state to go on from: name the run folder, or begin a new run from "
            f"the weights with model.model_path {path}"
        )
    return str(folder)  # without the slash at the end that shells write: ranks compare names


CheckpointPath = Annotated[str, AfterValidator(find_checkpoint)]
"""The type of a field that names a checkpoint, or a run folder for its newest one."""


def refuse_other_layout(name: str, option: str = "model.model_path") -> None:
    """Raises ConfigError for a path that holds a model in a form that is not read, or a name that is not cached."""
    path = Path(name)
    if path.is_file():
        raise ConfigError(
            f"{option} {path} is a file, not a model folder: give the folder that holds config.json and safetensors "
            "files, or make one with transformers' from_pretrained (gguf_file=... for GGUF) and save_pretrained"
        )
    layouts = {
        "params.json": "Mistral's or Meta's own layout",
        "consolidated.safetensors": "Mistral's own layout",
        "original/params.json": "Meta's own layout in original/",
        "*.gguf": "GGUF files",
    }
    for pattern, layout in layouts.items():
        if path.is_dir() and any(path.glob(pattern)):
            raise ConfigError(
                f"{option} {path} holds {layout}, and no config.json: take the model in transformers' layout "
                "(config.json, model.safetensors), or convert it with transformers"
            )
    if hint := hub_hint(name):
        raise ConfigError(f"{option} {name} is not a model folder{hint}")


def refuse_missing_model(folder: Path, option: str) -> None:
    """Raises ConfigError for a name on the hub that the local hub cache does not hold."""
    if hint := hub_hint(folder):
        raise ConfigError(f"{option} {folder} is not a model folder{hint}")


def hub_hint(name: str | Path) -> str:
    """The end of a message about a model that is not there: how to fetch it from the hub.

    Empty for a folder that exists, and for a text that is no name on the hub.
    """
    if HUB_NAME.fullmatch(str(name)) is None or Path(name).exists():
        return ""
    return f", and not in the local hub cache. If it is a name on the hub: hf download {name}"


OTHER_WEIGHTS = ("*.bin.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.msgpack", "*.h5")
"""Names of weights that are pickles, which may run a program, or that nothing here reads."""


def check_pipeline(folder: Path, index: JsonObject) -> None:
    """Looks at every part of a diffusers pipeline before any is loaded.

    Args:
        folder: with ``model_index.json``.
        index: library and class of each part, or two times None.

    Raises:
        ConfigError: when a part brings Python code, or weights other than safetensors.
    """
    for name, value in index.items():
        if value == [None, None]:
            continue
        code = folder / name / f"{value[0]}.py"
        if code.exists():
            raise ConfigError(
                f"model.model_path {folder}: {code} is Python code that the pipeline would run: remove it, and name a "
                "class of diffusers or transformers in model_index.json"
            )
        if value[1].startswith("Auto"):
            _refuse_automatic(folder / name, value[1])
        check_weights(folder / name)


def _refuse_automatic(folder: Path, class_name: str) -> None:
    """Raises ConfigError when a folder's JSON names code in ``auto_map``, which an Auto class would run."""
    for path in sorted(folder.glob("*.json")):
        if file_problem(path, 2**28) is None and b"auto_map" in path.read_bytes():
            raise ConfigError(
                f"model.model_path: {path} names Python code (auto_map) that {class_name} would run: name a class of "
                "diffusers or transformers in model_index.json"
            )


def check_weights(folder: Path, option: str = "model.model_path") -> None:
    """Looks at the weights in one model's folder; one that holds none passes.

    Args:
        folder: of the model.
        option: the configuration field that led to it, for messages.

    Raises:
        ConfigError: when they are not safetensors files that lie in the folder.
    """
    if not folder.is_dir():
        return
    for path in sorted(folder.glob("*.safetensors")):
        if problem := file_problem(path):
            raise ConfigError(f"{option}: {path} {problem}")
    for index in sorted(folder.glob("*.safetensors.index.json")):
        _check_index(index, option)
    others = [path for pattern in OTHER_WEIGHTS for path in sorted(folder.glob(pattern))]
    if others and not any(folder.glob("*.safetensors")):
        stem = others[0].name.split(".")[0]
        target = folder / f"{'model' if stem == 'pytorch_model' else stem}.safetensors"
        raise ConfigError(
            f"{option}: {others[0]} is not read, since it may run a program; only safetensors files are: take those of "
            f"the model, or make them: python -m sfumato.rewards.convert weights {others[0]} {target}"
        )


def _check_index(index: Path, option: str) -> None:
    """Raises ConfigError unless an index names safetensors files beside itself, and no paths elsewhere."""
    try:
        names = set(read_json_object(index)["weight_map"].values())
        wrong = sorted(str(path) for path in names if Path(path).name != path or not path.endswith(".safetensors"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{option}: {index} is not an index of weights: {error!r}; fetch it again") from error
    if wrong:
        raise ConfigError(f"{option}: {index} names {wrong[0]!r}, which is no safetensors file beside it")
