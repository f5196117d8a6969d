"""The parts of a language model, from a transformers folder or a description: configuration, module, tokenizer."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from torch import nn

from sfumato.config.paths import check_weights, refuse_other_layout
from sfumato.config.text import LanguageModelConfig
from sfumato.config.trust import load_pretrained, make_from_config
from sfumato.config.yaml_text import read_yaml
from sfumato.data.text.answer_end import facts_of
from sfumato.errors import ConfigError, MissingDependencyError, suggest
from sfumato.models.language.hf_config import attend_in_segments, attention_by_part, can_set_attention
from sfumato.models.language.packed_attention import ATTENTION, register_packed_attention
from sfumato.models.language.source_folder import (
    dequantization_arguments,
    forget_what_is_not_exported,
    keep_float32,
    refuse_loss_terms,
    refuse_other_outputs,
    resolve_tied_head,
)
from sfumato.parallel.shards import trainable_parameters
from sfumato.parallel.weights import build_on_meta, refuse_not_finite

if TYPE_CHECKING:
    from types import SimpleNamespace

    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast
    from transformers.utils.quantization_config import QuantizationConfigMixin

    from sfumato.config.sections import TrainConfig

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "no": None}

SEES_CODES = ("emu3", "chameleon")
"""transformers' model types that see images as codes, made by an image tokenizer that is a part of the model."""

OTHER_KEYS = {"model_type", "torch_dtype", "rope_theta", "rope_scaling", "head_dim", "_name_or_path", "auto_map"}
OTHER_KEYS |= {"bos_token_id", "eos_token_id", "vision_start_token_id", "vision_end_token_id", "audio_end_token_id"}
OTHER_KEYS |= {"global_head_dim", "num_global_key_value_heads", "vision_use_head"}
"""Keys that occur in config.json files although some configuration classes have no field for them."""

HEAR = ("qwen2_audio",)
"""transformers' model types that hear but do not see."""


def is_unified(described: PreTrainedConfig | SimpleNamespace, sees: bool) -> bool:
    """Whether a model is one over both text and codes of images (``omni/unified.py``).

    Janus counts as one only for data without images: where it sees, it uses an encoder like other models.

    Args:
        described: transformers' configuration, or another object with the fields of config.json.
        sees: whether the data has images.
    """
    if described.model_type == "janus":
        return not sees
    has_image_codes = sees or getattr(described, "vocabulary_map", None) is not None
    return has_image_codes and described.model_type in SEES_CODES


def names_without_gradients(module: nn.Module) -> frozenset[str]:
    """Names of the trained weights that no gradient reaches: those of indexers, of which sparse attention uses nothing
    but the keys that they choose. DeepSeek-V3.2 (arXiv 2512.02556) trains them by a loss of their own, which
    transformers does not have."""
    indexers = tuple(
        f"{name}." for name, submodule in module.named_modules() if type(submodule).__name__.endswith("Indexer")
    )
    return frozenset(name for name in trainable_parameters(module) if name.startswith(indexers))


def freeze(module: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    """Freezes the weights whose names contain a match of one of these regular expressions, and those that no gradient
    reaches, which weight decay alone would change. Returns their names.

    Raises:
        ConfigError: when an expression matches no trained weight, or nothing is left to train.
    """
    frozen = {*names_without_gradients(module)}
    for name in frozen:
        module.get_parameter(name).requires_grad_(False)
    for index, pattern in enumerate(patterns):
        matched = {name: weight for name, weight in trainable_parameters(module).items() if re.search(pattern, name)}
        frozen |= matched.keys()
        if not matched:
            names = ", ".join(list(trainable_parameters(module))[:3])
            raise ConfigError(
                f"model.freeze.{index}: {pattern!r} takes no trained weight; there are {names}, ...: correct the "
                "expression, or leave it out"
            )
        for weight in matched.values():
            weight.requires_grad_(False)
    if patterns and not trainable_parameters(module):
        raise ConfigError("model.freeze leaves nothing to train")
    return frozenset(frozen)


def build_module(
    config: LanguageModelConfig,
    train: TrainConfig,
    described: PreTrainedConfig,
    auto_class: object,
    train_base: bool,
    finish: Callable[[PreTrainedModel], None] = lambda module: None,
    other_keys: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> tuple[PreTrainedModel, Callable[[], PreTrainedModel]]:
    """Builds transformers' module of a folder or a description, on ``train.init_device``.

    Args:
        config, train: as for ``build_language_model``.
        described: the configuration that ``read_model_config`` returned.
        auto_class: such as ``transformers.AutoModelForCausalLM``, or an object with the same methods.
        train_base: whether the module's own weights are trained: they are then float32, else of ``config.dtype``.
        finish: called with each module after it was made or loaded; its weights may be on meta.
        other_keys: prefixes of the names of weights that are allowed to be missing in the folder (``missing_keys``), or
            to have no place in the module (``unexpected_keys``).

    Returns:
        The module, and a function that makes one with random weights.

    Raises:
        ConfigError: as ``build_language_model``.
    """
    if train.init_device == "meta" and config.config_path is not None and config.lora is not None:
        raise ConfigError(
            "train.init_device meta draws no random weights under adapters: with model.config_path take cpu"
        )
    dtype = torch.float32 if train_base else DTYPES[config.dtype]
    attention = _choose_attention(config, described, auto_class)
    source = source_of(config)
    quantization = {} if source is None else dequantization_arguments(described, source, train.init_device)

    def make() -> PreTrainedModel:
        exported_config = copy.deepcopy(described)
        forget_what_is_not_exported(exported_config)
        module = _make(auto_class, exported_config, attention, dtype, config.trust_remote_code)
        finish(module)
        return module

    if train.init_device == "meta":
        module = cast("PreTrainedModel", build_on_meta(make))
        keep_float32(module, dtype)
        return module, make
    if source is None:
        from sfumato.parallel.random_weights import build_with_random_weights

        # random weights depend on the run's seed alone, not on what has been drawn before
        return cast("PreTrainedModel", build_with_random_weights(make, train.seed)), make
    # transformers draws weights that the folder lacks before ``finish`` sets them: the run's generator must not move
    with torch.random.fork_rng(devices=[]):
        module = _load(
            auto_class, source, described, attention, dtype, config.trust_remote_code, other_keys, quantization
        )
    forget_what_is_not_exported(module.config)
    finish(module)
    if train_base:
        _leave_frozen(module, make)
    return module, make


def _leave_frozen(module: nn.Module, make: Callable[[], nn.Module]) -> None:
    """Freezes the weights that transformers makes without gradients, such as sinusoidal positions.

    It gives gradients to all weights that it loads, whatever the module's class says.
    """
    for name, weight in build_on_meta(make).named_parameters():
        if not weight.requires_grad:
            module.get_parameter(name).requires_grad_(False)


def source_of(config: LanguageModelConfig) -> Path | None:
    """The folder from which weights are loaded; None where they are drawn."""
    return None if config.model_path is None else Path(config.model_path)


def where_described(config: LanguageModelConfig) -> str:
    """The file that describes a model, for messages."""
    return str(config.config_path or f"model.model_path {config.model_path}: config.json")


def check_vocabulary(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError when a tokenizer has more tokens than the model has embeddings."""
    size = cast("nn.Embedding", module.get_input_embeddings()).num_embeddings
    if len(tokenizer) > size:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocabulary {size}: take the tokenizer that came "
            f"with the model, or give the model rows for new tokens, vocab_size {len(tokenizer)} of a description or "
            f"transformers' resize_token_embeddings({len(tokenizer)}) of a folder"
        )


def read_model_config(config: LanguageModelConfig, sees: bool = False) -> PreTrainedConfig:
    """Reads transformers' configuration of a folder or a description.

    Args:
        config: the model section.
        sees: whether the model must see images, or hear.

    Raises:
        ConfigError: when it is missing or broken, of an unknown kind, or of a model that does not fit the data.
    """
    described = _read_model_config(config, sees)
    refuse_loss_terms(described, where_described(config))
    refuse_other_outputs(described, where_described(config))
    without_vision_config = (*SEES_CODES, *HEAR)
    if sees and getattr(described, "vision_config", None) is None and described.model_type not in without_vision_config:
        raise ConfigError(
            f"data.data_type with images: a model of type {described.model_type} has no encoder of images "
            f"(vision_config), and of those that hear alone {' and '.join(HEAR)} is supported: take one that has, or a "
            "data.data_type without images (conversation, prompts)"
        )
    return described


def _read_model_config(config: LanguageModelConfig, sees: bool) -> PreTrainedConfig:
    """``read_model_config`` without the checks that hold for folders and descriptions alike."""
    from transformers import CONFIG_MAPPING, AutoConfig
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    names = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES if sees else MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    if config.config_path is None:
        folder = Path(str(config.model_path))
        if not (folder / "config.json").is_file():
            from sfumato.models.lora import refuse_adapter

            # both have a better message for a folder of another kind
            refuse_adapter(folder)
            refuse_other_layout(str(config.model_path))
            raise ConfigError(
                f"model.model_path {folder} is not a model folder: {folder / 'config.json'} does not exist. Give a "
                "folder that transformers' save_pretrained wrote"
            )
        if (folder / "adapter_config.json").is_file():
            raise ConfigError(
                f"model.model_path {folder} holds adapters (adapter_config.json) beside the model, which transformers "
                "would add to it: move them to a folder of their own, or give a folder into which they are merged"
            )
        check_weights(folder)
        try:
            described = load_pretrained(AutoConfig, folder, trust_remote_code=config.trust_remote_code)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"model.model_path {folder}: transformers cannot read config.json: {error}") from error
        resolve_tied_head(folder, described)
        if sees and hasattr(described, "thinker_config"):  # of a whole omni model, whose speaking part is left out
            described = described.thinker_config
        if not sees and described.model_type in HEAR:
            raise ConfigError(
                f"model.model_path {folder}: {described.model_type} is a model that hears: take data.data_type "
                "media_conversation in tasks/train_text.py, which takes rows without audio, too"
            )
        if (
            not sees
            and described.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
            and described.model_type not in names
            and not is_unified(described, False)
        ):
            raise ConfigError(
                f"model.model_path {folder}: {described.model_type} is a model that sees images: take data.data_type "
                "image_conversation in tasks/train_text.py, which takes rows without images, too"
            )
        return described
    fields = read_yaml(config.config_path)
    where = config.config_path
    kind = fields.get("model_type")
    if kind not in names:
        raise ConfigError(f"{where}: model_type{suggest(str(kind), sorted(names))}"[:600])
    cls = CONFIG_MAPPING[cast("str", kind)]
    # transformers keeps unknown keys as attributes: a misspelt one would go unnoticed
    check_keys(cls, fields, str(where))
    try:
        return cls(**{name: value for name, value in fields.items() if name != "model_type"})
    except Exception as error:  # transformers raises kinds of its own for values that it refuses
        raise ConfigError(f"{where}: transformers refuses it: {error}") from error


def check_keys(cls: Any, fields: Mapping[str, object], where: str) -> None:
    """Checks the keys of a description, and of the configurations inside it, against transformers' classes.

    A config.json that transformers has written may have keys of other versions, or of a model's own code, such as
    ``ep_size`` of DeepSeek-V3: ``describe_other_keys`` names them for the log.

    Args:
        cls: transformers' class of the configuration, a dataclass.
        fields: the description.
        where: the file, for the message.

    Raises:
        ConfigError: for a key that the class has no field for in a file that somebody has written.
    """
    unknown_keys = find_unknown_keys(cls, fields, where)
    if unknown_keys and "transformers_version" not in fields:
        path, valid_keys = next(iter(unknown_keys.items()))
        prefix, _, key = path.rpartition(".")
        place = f"{where}: {prefix}" if prefix else where
        raise ConfigError(f"{place}: {key}: unknown key{suggest(key, valid_keys)}")


def find_unknown_keys(cls: Any, fields: Mapping[str, object], where: str) -> dict[str, list[str]]:
    """The keys of a description that transformers' classes have no field for, as paths (``text_config.layers``), each
    with those that are valid in its place. Arguments as for ``check_keys``.

    Raises:
        ConfigError: for a ``model_type`` of a configuration inside it that transformers does not have.
    """
    from transformers import CONFIG_MAPPING, AutoConfig

    valid_keys = {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map) | OTHER_KEYS
    unknown_keys = {str(key): sorted(valid_keys) for key in fields if key not in valid_keys}
    for name, part in cls.sub_configs.items():
        part_fields = fields.get(name)
        if isinstance(part_fields, dict):
            kind = part_fields.get("model_type")
            if part is AutoConfig and kind not in CONFIG_MAPPING:
                raise ConfigError(f"{where}: {name}.model_type: unknown model_type {kind!r}")
            part_cls = CONFIG_MAPPING[cast("str", kind)] if part is AutoConfig else part
            inner = find_unknown_keys(part_cls, part_fields, f"{where}: {name}")
            unknown_keys |= {f"{name}.{key}": valid for key, valid in inner.items()}
    return unknown_keys


def describe_other_keys(config: LanguageModelConfig) -> tuple[str, ...]:
    """The line for the log about keys of a published config.json that are no fields of transformers' class."""
    from transformers import CONFIG_MAPPING

    if config.config_path is None:
        return ()
    fields = read_yaml(config.config_path)
    names = find_unknown_keys(CONFIG_MAPPING[cast("str", fields["model_type"])], fields, str(config.config_path))
    if not names:
        return ()
    return (
        f"{config.config_path}: transformers' class has no field for {', '.join(names)}: read as in a model's folder",
    )


def build_tokenizer(config: LanguageModelConfig) -> PreTrainedTokenizerBase:
    """Loads or makes the tokenizer; one without a padding token gets the end of texts as one, which its facts record.

    Raises:
        ConfigError: when the folder holds no tokenizer, or one that names no end of texts.
    """
    from transformers import AutoTokenizer

    if config.tokenizer_path == BYTES:
        return build_byte_tokenizer()
    folder = Path(str(config.tokenizer_path or config.model_path))
    option = "model.tokenizer_path" if config.tokenizer_path else "model.model_path"
    if not folder.is_dir():
        refuse_other_layout(str(folder), option)
        raise ConfigError(f"{option}: {folder} does not exist")
    try:
        tokenizer = load_pretrained(AutoTokenizer, folder, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if find_spec("sentencepiece") is None and any(folder.glob("*.model")):
            remedy = "its file ends in .model, which the package sentencepiece reads: pip install sentencepiece"
        else:
            remedy = str(error)
        raise ConfigError(f"{option} {folder}: transformers finds no tokenizer there: {remedy}") from error
    # its JSON may hold anything there, which transformers first compares with the length of some text of the run
    if isinstance(tokenizer.model_max_length, bool) or not isinstance(tokenizer.model_max_length, int | float):
        raise ConfigError(f"{option} {folder}: model_max_length {tokenizer.model_max_length!r:.100} is no number")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{option} {folder}: the tokenizer has no eos_token: nothing would end a text")
    facts = facts_of(tokenizer)
    facts.model_folder = source_of(config)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
        facts.is_pad_added = True
    return tokenizer


def refuse_other_tokens(option: str, tokenizer: PreTrainedTokenizerBase, policy: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError when a model that reads a policy's tokens has another token in the place of one of these.

    Args:
        option: the setting that names the model, and its folder, for the message.
        tokenizer: the model's; it may have more tokens.
        policy: the policy's.
    """
    if not policy.get_vocab().items() <= tokenizer.get_vocab().items():
        raise ConfigError(
            f"{option}: its tokenizer has other tokens than the policy's, so what it says of them means nothing: take "
            "a model of the same tokenizer"
        )


def _make(
    auto_class: Any, described: PreTrainedConfig, attention: str, dtype: torch.dtype | None, trust: bool
) -> PreTrainedModel:
    """Makes transformers' module with random weights. Raises ConfigError when it does not support the attention."""
    try:
        by_part = attention_by_part(described, attention, auto_class._model_mapping.get(type(described), None))
        module = make_from_config(
            auto_class, described, attn_implementation=by_part, dtype=dtype, trust_remote_code=trust
        )
        attend_in_segments(module)
        return module
    except (ValueError, KeyError) as error:
        if attention == "eager":
            raise ConfigError(f"transformers cannot make this {described.model_type}: {error}") from error
        name = "packed" if attention == ATTENTION else attention
        raise ConfigError(
            f"transformers cannot make this {described.model_type} with model.attention {name}: set it to eager"
        ) from error


def _load(
    auto_class: Any,
    folder: Path,
    described: PreTrainedConfig,
    attention: str,
    dtype: torch.dtype | None,
    trust: bool,
    other_keys: Mapping[str, tuple[str, ...]],
    quantization: Mapping[str, QuantizationConfigMixin],
) -> PreTrainedModel:
    """Loads transformers' module with the weights of a folder.

    Raises:
        ConfigError: when it cannot be loaded, or its weights are not exactly those of the module, or not finite.
    """
    try:
        module, report = load_pretrained(
            auto_class,
            folder,
            config=copy.deepcopy(described),
            attn_implementation=attention_by_part(
                described, attention, auto_class._model_mapping.get(type(described), None)
            ),
            dtype=dtype,
            trust_remote_code=trust,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with names and shapes
            **quantization,
        )
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        name = "packed" if attention == ATTENTION else attention
        is_attention = attention != "eager" and ("attention" in str(error) or attention in str(error))
        remedy = f" with model.attention {name}, set it to eager" if is_attention else ""
        raise ConfigError(f"model.model_path {folder}: transformers cannot load it{remedy}: {error}") from error
    shapes = cast("list[tuple[str, torch.Size, torch.Size]]", sorted(report.get("mismatched_keys") or ()))
    if shapes:
        name, stored, configured = shapes[0]
        rest = f", and {len(shapes) - 1} more weights differ" if len(shapes) > 1 else ""
        raise ConfigError(
            f"model.model_path {folder}: {name} is {list(stored)} in the safetensors files, but {list(configured)} by "
            f"config.json{rest}: the two are not of one model; copy both from the same place"
        )
    # transformers only warns of weights that it draws because the folder lacks them, or does not use
    for kind in ("missing_keys", "unexpected_keys"):
        wrong = sorted(key for key in map(str, report.get(kind) or ()) if not key.startswith(other_keys.get(kind, ())))
        if wrong:
            rest = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise ConfigError(f"model.model_path {folder}: {kind.replace('_', ' ')}: {', '.join(wrong[:3])}{rest}")
    refuse_not_finite(module, folder)
    attend_in_segments(module)
    return module


def check_auto_class(auto_class: Any, described: PreTrainedConfig, config: LanguageModelConfig) -> None:
    """Raises ConfigError where transformers has no such class for a model; its own error would list all that it has."""
    if config.trust_remote_code or auto_class._model_mapping.get(type(described), None) is not None:
        return
    raise ConfigError(
        f"{where_described(config)}: transformers' {auto_class.__name__} knows no {described.model_type}: take a model "
        "that it makes; for one that sees or hears a data.data_type such as media_conversation; or, where Python code "
        "lies in the folder, set model.trust_remote_code"
    )


def _choose_attention(config: LanguageModelConfig, described: PreTrainedConfig, auto_class: Any) -> str:
    """transformers' name of the attention that is configured.

    In the place of ``packed``, a model that does not use transformers' attention interface gets sdpa or eager.

    Raises:
        MissingDependencyError: when flash attention is configured, but not installed.
    """
    if config.attention == "packed":
        cls = auto_class._model_mapping.get(type(described), None)
        if cls is None or can_set_attention(cls):
            return register_packed_attention()
        return "sdpa" if cls._supports_sdpa else "eager"
    if config.attention.startswith("flash_attention_"):
        check_flash_attention(config.attention)
    return config.attention


def check_flash_attention(attention: str) -> None:
    """Raises MissingDependencyError where a version of FlashAttention is neither installed nor can be loaded.

    transformers takes it from the package of that name, or by the package kernels from the Hub or its cache.
    """
    from transformers.utils import import_utils

    version = attention.removeprefix("flash_attention_")
    is_installed = getattr(import_utils, f"is_flash_attn_{version}_available", lambda: False)()
    # without a GPU transformers does not ask the package kernels
    if not is_installed and (find_spec("kernels") is None or not torch.cuda.is_available()):
        raise MissingDependencyError(
            f"model.attention {attention} needs a CUDA GPU and {FLASH_PACKAGES[version]}; or pip install kernels, "
            "which loads compiled code from the Hub; or take packed, which needs neither"
        )


FLASH_PACKAGES = {
    "2": "the package flash-attn: pip install flash-attn --no-build-isolation",
    "3": "the package flash-attn-3, built from the folder hopper of the flash-attention repository",
    "4": "the package flash-attn-4: pip install flash-attn-4",
}
"""What has each version of FlashAttention."""

BYTES = "bytes"
"""The value of ``model.tokenizer_path`` for the tokenizer of bytes."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def build_byte_tokenizer() -> PreTrainedTokenizerFast:
    """Makes a transformers tokenizer of 259 tokens: the special ones, then the bytes. Its chat template is ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *symbols])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=SPECIAL[0], pad_token=SPECIAL[0], additional_special_tokens=SPECIAL[1:]
    )
    tokenizer.chat_template = files("sfumato.data.text").joinpath("templates/chatml.jinja").read_text(encoding="utf-8")
    return tokenizer
