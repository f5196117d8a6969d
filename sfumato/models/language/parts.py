"""Parts of a language model from a transformers folder, or a description: module, configuration, tokenizer."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from sfumato.config.load import read_yaml, suggest
from sfumato.config.paths import check_weights, refuse_other_layout
from sfumato.config.text import LanguageModelConfig
from sfumato.config.trust import load_pretrained, make_from_config
from sfumato.data.text.answer_end import facts_of
from sfumato.errors import ConfigError, MissingDependencyError
from sfumato.models.language.hf_config import attention_by_part, can_set_attention
from sfumato.models.language.packed_attention import ATTENTION, register_packed_attention
from sfumato.models.language.source_folder import (
    dequantizing,
    forget_what_is_not_exported,
    refuse_loss_terms,
    refuse_other_head,
)
from sfumato.models.lora import refuse_adapter
from sfumato.parallel.shards import trainable_parameters
from sfumato.parallel.weights import build_on_meta, refuse_not_finite

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "no": None}

SEES_CODES = ("emu3", "chameleon")
"""Models that see images as codes of a tokenizer that is a part of them."""

OTHER_KEYS = {"model_type", "torch_dtype", "rope_theta", "rope_scaling", "head_dim", "_name_or_path", "auto_map"}
OTHER_KEYS |= {"bos_token_id", "eos_token_id", "vision_start_token_id", "vision_end_token_id", "audio_end_token_id"}
OTHER_KEYS |= {"global_head_dim", "num_global_key_value_heads"}
"""Keys of config.json files that some configurations' classes have no field for."""

HEAR = ("qwen2_audio",)
"""transformers' model types that hear, and see nothing."""


def is_unified(described: Any, sees: bool) -> bool:
    """Whether a model that transformers describes is one over text and codes of images (``omni/unified.py``). Janus,
    where it sees and does not draw, is a model with an encoder like others."""
    if described.model_type == "janus":
        return not sees
    is_whole = sees or getattr(described, "vocabulary_map", None) is not None
    return is_whole and described.model_type in SEES_CODES


def freeze(module: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    """Leaves weights as they are whose names contain one of these expressions. Returns their names.

    Raises:
        ConfigError: when an expression takes no trained weight, or none is left.
    """
    frozen: set[str] = set()
    for index, pattern in enumerate(patterns):
        taken = {name: weight for name, weight in trainable_parameters(module).items() if re.search(pattern, name)}
        frozen |= taken.keys()
        if not taken:
            names = ", ".join(list(trainable_parameters(module))[:3])
            raise ConfigError(
                f"model.freeze.{index}: {pattern!r} takes no trained weight; there are {names}, ...: correct the "
                "expression, or leave it out"
            )
        for weight in taken.values():
            weight.requires_grad_(False)
    if patterns and not trainable_parameters(module):
        raise ConfigError("model.freeze leaves nothing to train")
    return frozenset(frozen)


def build_module(
    config: LanguageModelConfig,
    train: Any,
    described: Any,
    auto_class: Any,
    train_base: bool,
    finish: Callable[[nn.Module], None] = lambda module: None,
    other_keys: Mapping[str, tuple[str, ...]] = MappingProxyType({}),
) -> tuple[nn.Module, Callable[[], nn.Module]]:
    """transformers' module of a folder or a description, where ``train.init_device`` says.

    Args:
        config, train: as for ``build_language_model``.
        described: what ``read_model_config`` read.
        auto_class: such as ``transformers.AutoModelForCausalLM``.
        train_base: whether its weights are trained: then they are float32, else of ``config.dtype``.
        finish: what is done to a module that was just made or loaded, on meta perhaps.
        other_keys: beginnings of names of weights that a folder may lack (``missing_keys``), or hold though the module
            has no place for them (``unexpected_keys``).

    Returns:
        The module, and what makes one with random weights.

    Raises:
        ConfigError: as ``build_language_model``.
    """
    if train.init_device == "meta" and config.config_path is not None and config.lora is not None:
        raise ConfigError(
            "train.init_device meta draws no random weights under adapters: with model.config_path take cpu"
        )
    dtype = torch.float32 if train_base else DTYPES[config.dtype]
    attention, source = _attention(config, described, auto_class), source_of(config)
    quantization = {} if source is None else dequantizing(described, source, train.init_device)

    def make() -> nn.Module:
        plain = copy.deepcopy(described)
        forget_what_is_not_exported(plain)
        module = _make(auto_class, plain, attention, dtype, config.trust_remote_code)
        finish(module)
        return module

    if train.init_device == "meta":
        return build_on_meta(make), make
    if source is None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(train.seed)
            return make(), make
    with torch.random.fork_rng(devices=[]):  # weights that the folder lacks are drawn before they are given others
        module = _load(
            auto_class, source, described, attention, dtype, config.trust_remote_code, other_keys, quantization
        )
    forget_what_is_not_exported(module.config)
    finish(module)
    if train_base:
        _leave_frozen(module, make)
    return module, make


def _leave_frozen(module: nn.Module, make: Callable[[], nn.Module]) -> None:
    """Weights that transformers makes without gradients, such as positions of sines, remain so: it gives all weights
    gradients that it loads."""
    for name, weight in build_on_meta(make).named_parameters():
        if not weight.requires_grad:
            module.get_parameter(name).requires_grad_(False)


def source_of(config: LanguageModelConfig) -> Path | None:
    """The folder that weights come from; None where they are drawn."""
    return None if config.model_path is None else Path(config.model_path)


def where_described(config: LanguageModelConfig) -> str:
    """Where a model's configuration stands, for messages."""
    return str(config.config_path or f"model.model_path {config.model_path}: config.json")


def check_vocabulary(module: nn.Module, tokenizer: Any) -> None:
    """Raises ConfigError when a tokenizer has more tokens than the model knows."""
    size = module.get_input_embeddings().num_embeddings
    if len(tokenizer) > size:
        raise ConfigError(
            f"the tokenizer has {len(tokenizer)} tokens, the model's vocabulary {size}: they do not match"
        )


def read_model_config(config: LanguageModelConfig, sees: bool = False) -> Any:
    """The transformers configuration of a folder or a description, with ``sees`` of a model that sees images.

    Raises ConfigError.
    """
    described = _read_model_config(config, sees)
    refuse_loss_terms(described, where_described(config))
    known = (*SEES_CODES, *HEAR)
    if sees and getattr(described, "vision_config", None) is None and described.model_type not in known:
        raise ConfigError(
            f"data.data_type with images: a model of type {described.model_type} sees none, and of those that hear "
            f"alone {' and '.join(HEAR)} is supported: take one that does, or a data.data_type without images "
            "(conversation, prompts)"
        )
    return described


def _read_model_config(config: LanguageModelConfig, sees: bool) -> Any:
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
            refuse_adapter(folder)
            refuse_other_layout(str(config.model_path))
            raise ConfigError(
                f"model.model_path {folder} is not a model folder: {folder / 'config.json'} does not exist. Give a "
                "folder that transformers' save_pretrained wrote"
            )
        check_weights(folder)
        try:
            found = load_pretrained(AutoConfig, folder, trust_remote_code=config.trust_remote_code)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"model.model_path {folder}: transformers cannot read config.json: {error}") from error
        refuse_other_head(folder, found)
        if sees and hasattr(found, "thinker_config"):  # a whole omni model: what speaks is left behind
            found = found.thinker_config
        if not sees and found.model_type in HEAR:
            raise ConfigError(
                f"model.model_path {folder}: {found.model_type} is a model that hears: take data.data_type "
                "media_conversation in tasks/train_text.py, which takes rows without audio, too"
            )
        if (
            not sees
            and found.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
            and found.model_type not in names
            and not is_unified(found, False)
        ):
            raise ConfigError(
                f"model.model_path {folder}: {found.model_type} is a model that sees images: take data.data_type "
                "image_conversation in tasks/train_text.py, which takes rows without images, too"
            )
        return found
    fields = read_yaml(config.config_path)
    where, kind = config.config_path, fields.get("model_type")
    if kind not in names:
        raise ConfigError(f"{where}: model_type{suggest(str(kind), sorted(names))}"[:600])
    cls = CONFIG_MAPPING[kind]
    check_keys(cls, fields, str(where))
    try:
        return cls(**{name: value for name, value in fields.items() if name != "model_type"})
    except Exception as error:  # transformers raises kinds of its own for values that it refuses
        raise ConfigError(f"{where}: transformers refuses it: {error}") from error


def check_keys(cls: Any, fields: dict[str, Any], where: str) -> None:
    """Raises ConfigError for a key that a configuration, or one inside it, does not know."""
    from transformers import CONFIG_MAPPING, AutoConfig

    known = {field.name for field in dataclasses.fields(cls)} | set(cls.attribute_map) | OTHER_KEYS
    wrong = [str(key) for key in fields if key not in known]
    if wrong:
        raise ConfigError(f"{where}: {wrong[0]}: unknown key{suggest(wrong[0], sorted(known))}")
    for name, part in cls.sub_configs.items():
        inside = fields.get(name)
        if isinstance(inside, dict):
            kind = inside.get("model_type")
            if part is AutoConfig and kind not in CONFIG_MAPPING:
                raise ConfigError(f"{where}: {name}.model_type: unknown model_type {kind!r}")
            check_keys(CONFIG_MAPPING[kind] if part is AutoConfig else part, inside, f"{where}: {name}")


def build_tokenizer(config: LanguageModelConfig) -> Any:
    """The tokenizer, with a padding token. Raises ConfigError when there is none in the folder."""
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
        raise ConfigError(f"{option} {folder}: transformers finds no tokenizer there: {error}") from error
    if isinstance(tokenizer.model_max_length, bool) or not isinstance(tokenizer.model_max_length, int | float):
        raise ConfigError(f"{option} {folder}: model_max_length {tokenizer.model_max_length!r:.100} is no number")
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"{option} {folder}: the tokenizer has no eos_token: nothing would end a text")
    facts = facts_of(tokenizer)
    facts.model_folder = source_of(config)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token, facts.is_pad_added = tokenizer.eos_token, True
    return tokenizer


def _make(auto_class: Any, described: Any, attention: str, dtype: torch.dtype, trust: bool) -> nn.Module:
    try:
        by_part = attention_by_part(described, attention, auto_class._model_mapping.get(type(described), None))
        return make_from_config(
            auto_class, described, attn_implementation=by_part, dtype=dtype, trust_remote_code=trust
        )
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
    described: Any,
    attention: str,
    dtype: torch.dtype,
    trust: bool,
    other_keys: Mapping[str, tuple[str, ...]],
    quantization: dict[str, Any],
) -> nn.Module:
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
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        name = "packed" if attention == ATTENTION else attention
        is_attention = attention != "eager" and ("attention" in str(error) or attention in str(error))
        remedy = f" with model.attention {name}, set it to eager" if is_attention else ""
        raise ConfigError(f"model.model_path {folder}: transformers cannot load it{remedy}: {error}") from error
    shapes = sorted(report.get("mismatched_keys") or ())
    if shapes:
        name, stored, wanted = shapes[0]
        more = f", and {len(shapes) - 1} more weights differ" if len(shapes) > 1 else ""
        raise ConfigError(
            f"model.model_path {folder}: {name} is {list(stored)} in the safetensors files, but {list(wanted)} by "
            f"config.json{more}: the two are not of one model; copy both from the same place"
        )
    for kind in ("missing_keys", "unexpected_keys"):
        wrong = sorted(key for key in map(str, report.get(kind) or ()) if not key.startswith(other_keys.get(kind, ())))
        if wrong:
            more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
            raise ConfigError(f"model.model_path {folder}: {kind.replace('_', ' ')}: {', '.join(wrong[:3])}{more}")
    refuse_not_finite(module, folder)
    return module


def _attention(config: LanguageModelConfig, described: Any, auto_class: Any) -> str:
    """transformers' name of the attention; a model with an attention of its own has none but that."""
    if config.attention == "packed":
        known = auto_class._model_mapping.get(type(described), None)
        if known is None or can_set_attention(known):
            return register_packed_attention()
        return "sdpa" if known._supports_sdpa else "eager"
    if config.attention == "flash_attention_2":
        from transformers.utils import is_flash_attn_2_available

        if not is_flash_attn_2_available():
            raise MissingDependencyError(
                "model.attention flash_attention_2 needs a CUDA GPU and the package flash-attn: "
                "pip install flash-attn --no-build-isolation; or take packed, which needs neither"
            )
    return config.attention


BYTES = "bytes"
"""What ``model.tokenizer_path`` says for it."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def build_byte_tokenizer() -> Any:
    """A transformers tokenizer of 259 tokens: the special ones, then the bytes. Its chat template is ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *symbols])}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token=SPECIAL[0], pad_token=SPECIAL[0], additional_special_tokens=SPECIAL[1:]
    )
    tokenizer.chat_template = files("sfumato.data.text").joinpath("templates/chatml.jinja").read_text(encoding="utf-8")
    return tokenizer
