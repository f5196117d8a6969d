"""Features of a language model's folder that training must follow, leave out, or refuse.

These are quantised weights, layers for multi-token prediction, terms of the loss, noise of routers, output layers
beside a tied embedding, and weights that stay float32 among others of half precision.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from sfumato.config.file_checks import read_json_object
from sfumato.errors import ConfigError
from sfumato.parallel.weight_files import convert_names, open_weights

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel
    from transformers.utils.quantization_config import QuantizationConfigMixin

DEQUANTIZED = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}
"""Quantisation methods whose weights transformers can dequantise on every device, and its class for each."""

FURTHER_LAYERS = ("num_nextn_predict_layers", "num_mtp_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Fields that count layers for multi-token prediction, which transformers' causal models leave out."""

LOSS_TERMS = ("z_loss_coefficient",)
"""Fields for weights of terms that transformers' causal models add to the cross entropy when they are given labels; the
auxiliary loss of routers is not among them (``router_loss.py``)."""

JITTER = {
    "router_jitter_noise": ("mixtral", "minimax", "minimax_m2"),
    "input_jitter_noise": ("phimoe",),
    "moe_jitter_eps": ("dbrx", "dbrx_ffn"),
}
"""Fields for the amount of noise that routers draw in training, and the model types that use them."""

HEADS = ("lm_head.weight", "embed_out.weight")
"""Ends of the names of output layers."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight")
"""Ends of the names of embeddings of tokens."""
COMPARED_ROWS = 64
"""Number of rows, at the beginning and at the end, that are compared to tell two matrices apart."""


def quantization_method(config: PreTrainedConfig) -> str | None:
    """How the weights of a folder are quantised, by transformers' configuration; None where they are not."""
    settings = getattr(config, "quantization_config", None) or getattr(
        config.get_text_config(), "quantization_config", None
    )
    # MLX writes one of these, or both, in settings that name no method
    for part in (getattr(config, "quantization", None), settings):
        if isinstance(part, dict) and {"bits", "group_size"} <= part.keys() and "quant_method" not in part:
            return "MLX"
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    # older files of bitsandbytes name no method, either
    if method is None and isinstance(settings, dict) and ("load_in_4bit" in settings or "load_in_8bit" in settings):
        return "bitsandbytes"
    return str(getattr(method, "value", method))  # a member of an enumeration, or its name


def dequantization_arguments(
    config: PreTrainedConfig, folder: Path, init_device: str
) -> dict[str, QuantizationConfigMixin]:
    """The arguments of ``from_pretrained`` that dequantise a folder's weights; none where these are not quantised.

    Args:
        config: transformers' configuration of the folder.
        folder: its path, for messages.
        init_device: ``train.init_device``.

    Raises:
        ConfigError: for weights that cannot be trained; the message says what to take instead.
    """
    method = quantization_method(config)
    if method is None:
        return {}
    if method not in DEQUANTIZED:
        raise ConfigError(
            f"model.model_path {folder}: its weights are quantised by {method}, in which nothing can be trained here: "
            "take the folder of the same model that is not quantised, or one of "
            f"{' or '.join(DEQUANTIZED)}, which are turned into plain weights"
        )
    if init_device == "meta":
        raise ConfigError(
            f"model.model_path {folder}: its weights are quantised by {method}, which train.init_device meta cannot "
            "read part by part: set it to cpu, or give a folder of plain weights (load it with transformers, and "
            "save_pretrained)"
        )
    import transformers

    return {"quantization_config": getattr(transformers, DEQUANTIZED[method])(dequantize=True)}


def forget_what_is_not_exported(config: PreTrainedConfig) -> None:
    """Removes from transformers' configuration, in place, what an export does not have: quantisation, layers for
    multi-token prediction, and the location of code."""
    # of a model with several parts, whose text has a configuration of its own, both; the same one only once
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        if getattr(part, "quantization_config", None) is not None:
            del part.quantization_config  # pyright: ignore[reportAttributeAccessIssue]  (set by its __init__)
        if getattr(part, "auto_map", None):
            # transformers writes it again beside the code, where a class is not its own
            del part.auto_map  # pyright: ignore[reportAttributeAccessIssue]
        for name in FURTHER_LAYERS:
            if getattr(part, name, None):
                setattr(part, name, 0)


def describe_left_out(config: PreTrainedConfig, cls: type[PreTrainedModel] | None) -> tuple[str, ...]:
    """Lines for the log about features of the folder that the run's export does not have.

    Args:
        config: transformers' configuration of the folder.
        cls: transformers' class of the model that is trained, where it is known.
    """
    lines: list[str] = []
    if cls is not None and cls.config_class is not None and not isinstance(config, cls.config_class):
        encoders = [name for name in config.sub_configs if name != "text_config" and getattr(config, name, None)]
        if encoders:
            lines.append(
                f"of the model's parts {', '.join(encoders)} is neither trained nor exported: the export is the "
                f"language model alone ({cls.__name__}), which engines may not serve; to keep the whole model take "
                "data.data_type image_conversation or image_prompts, which take rows without images, too"
            )
    method = quantization_method(config)
    if method is not None:
        lines.append(f"the model's weights are quantised by {method}: they are trained, and exported, as plain numbers")
    if getattr(config, "auto_map", None) and type(config).__module__.startswith("transformers."):
        lines.append(
            "config.json names Python code (auto_map), which transformers' own class stands in for: the export has "
            "neither the name nor the files"
        )
    text = config.get_text_config()
    counted = [f"{name} {getattr(text, name)}" for name in FURTHER_LAYERS if getattr(text, name, None)]
    if counted:
        lines.append(
            f"the model's layers for further tokens ({', '.join(counted)}) are neither trained nor exported: the "
            "export counts none"
        )
    return tuple(lines)


def refuse_loss_terms(config: PreTrainedConfig, where: str) -> None:
    """Refuses a configuration that asks for a term of the loss that is not computed here.

    Args:
        config: transformers' configuration.
        where: its file, for the message.

    Raises:
        ConfigError: when it asks for one.
    """
    text = config.get_text_config()
    for name in LOSS_TERMS:
        value = getattr(text, name, None) or 0.0
        if value:
            raise ConfigError(
                f"{where}: {name} {value:g} adds a term to the loss in transformers, which is not computed here: set "
                f"{name} to 0"
            )


def refuse_other_outputs(config: PreTrainedConfig, where: str) -> None:
    """Refuses a configuration that asks transformers for other outputs than logits by name.

    With ``output_attentions`` transformers writes no configuration beside an attention other than eager: the export
    would fail, after all of the training.

    Args:
        config: transformers' configuration.
        where: its file, for the message.

    Raises:
        ConfigError: when it does.
    """
    for part in (config, config.get_text_config()):
        for name, read in (("output_attentions", False), ("return_dict", True)):
            if getattr(part, name, read) != read:
                raise ConfigError(
                    f"{where}: {name} {str(not read).lower()} changes what transformers' model returns, and nothing "
                    f"here reads that: set {name} to {str(read).lower()}"
                )


def describe_jitter(config: PreTrainedConfig) -> str | None:
    """A warning that a run's probe will refuse a configuration, since routers draw noise in training; None where they
    draw none."""
    text = config.get_text_config()
    for part in (text, getattr(text, "ffn_config", None)):
        for name, kinds in JITTER.items():
            value = getattr(part, name, None)
            if value and text.model_type in kinds:
                return (
                    f"{name} {value:g}: routers draw noise in training, which depends on how documents are packed and "
                    f"shared; the run's probe stops there: set {name} to 0 in the model's configuration"
                )
    return None


def resolve_tied_head(folder: Path, config: PreTrainedConfig) -> None:
    """Settles whether a model's output layer is its embedding, where the folder holds another matrix for it.

    Where config.json says nothing, and transformers' class ties the two by default (Mistral 3, InternVL), they are
    untied, as by ``from_pretrained``. Models on meta do not see the weights and would lose the output layer.

    Args:
        folder: of the model.
        config: transformers' configuration of the folder; its ``tie_word_embeddings`` may be changed.

    Raises:
        ConfigError: when config.json ties them and the two matrices differ.
    """
    if not getattr(config, "tie_word_embeddings", False):
        return
    path_of = find_matrices(folder, (*HEADS, *EMBEDDINGS))
    heads = [name for name in path_of if name.endswith(HEADS)]
    embeddings = [name for name in path_of if name.endswith(EMBEDDINGS)]
    if len(heads) != 1 or len(embeddings) != 1:
        return  # several parts have their own, of which the class knows the pairs
    head, embedding = heads[0], embeddings[0]
    with torch.device("cpu"):  # the numbers, where models are made without memory, too
        is_equal = torch.equal(_read_end_rows(path_of[head], head), _read_end_rows(path_of[embedding], embedding))
    if is_equal:
        return
    if "tie_word_embeddings" not in read_json_object(folder / "config.json"):
        config.tie_word_embeddings = False  # pyright: ignore[reportAttributeAccessIssue]  (a field of its class)
        return
    raise ConfigError(
        f"model.model_path {folder}: config.json says tie_word_embeddings true, but {head} in {path_of[head].name} "
        f"is another matrix than {embedding}: set tie_word_embeddings to false if the two were trained apart, or "
        f"remove {head}"
    )


def find_matrices(folder: Path, ends: tuple[str, ...]) -> dict[str, Path]:
    """The file of each tensor of a folder whose name ends so; none where a file is broken, which reading reports."""
    path_of: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as file:
                path_of |= {name: path for name in file.keys() if name.endswith(ends)}  # noqa: SIM118
        except (SafetensorError, OSError):
            return {}
    return path_of


def _read_end_rows(path: Path, name: str) -> Tensor:
    """The first and the last rows of a matrix in a file, ``[2 * COMPARED_ROWS, H]``."""
    with safe_open(path, framework="pt") as file:
        rows = file.get_slice(name)
        return torch.cat([rows[:COMPARED_ROWS], rows[-COMPARED_ROWS:]])


def keep_float32(module: PreTrainedModel, dtype: torch.dtype | None) -> None:
    """Gives float32 to the weights and buffers that transformers loads in it beside others in half precision.

    Among them is the bias that chooses the experts of DeepSeek-V3: in bfloat16 its values near 7 would be 1/32 apart.

    Args:
        module: on meta; weights that are read into it take its dtypes. Changed in place.
        dtype: of the other weights.
    """
    parts = [] if dtype is None else [*module._get_dtype_plan(dtype)]
    pattern = re.compile(rf"(^|\.)({'|'.join(parts)})($|\.)")
    for prefix, owner in module.named_modules() if parts else ():
        for name, weight in owner._parameters.items():
            if weight is not None and weight.dtype == dtype and pattern.search(f"{prefix}.{name}"):
                owner._parameters[name] = nn.Parameter(weight.float(), weight.requires_grad)
        for name, buffer in owner._buffers.items():
            if buffer is not None and buffer.dtype == dtype and pattern.search(f"{prefix}.{name}"):
                owner._buffers[name] = buffer.float()


def float32_names(module: nn.Module, folder: Path | None) -> set[str]:
    """Names of the weights and buffers that stay float32 in an export whose other weights have half precision.

    Where some tensors of the folder have half precision, these are the tensors that it holds as float32. For tensors
    that it does not hold, and without such a folder, transformers' class decides, which keeps for example the bias that
    chooses the experts of DeepSeek-V3 in float32.

    Args:
        module: the plain module; its weights may be on meta.
        folder: the folder that was trained, which may be gone by now; None where weights were drawn.
    """
    tensors = {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}
    # transformers matches these names of modules against whole components of a weight's name
    kinds = ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict")
    patterns = {re.compile(rf"(^|\.){part}($|\.)") for kind in kinds for part in getattr(module, kind, None) or ()}
    by_class = {name for name in tensors if any(pattern.search(name) for pattern in patterns)}
    if folder is None or not any(folder.glob("*.safetensors")):
        return by_class
    with open_weights(folder) as stored:
        dtypes = {name: tensor.dtype for name, tensor in stored.items()}
        # a folder that is float32 throughout says nothing of what must stay so
        if not {torch.bfloat16, torch.float16} & {*dtypes.values()}:
            return by_class
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        with suppress(ConfigError):  # two tensors of one name, which reading the weights reports
            # names of the module that differ from those in the files; equal ones are in ``dtypes`` already
            readable = convert_names(stored, module, shapes, skip_others=True)
            dtypes |= {name: tensor.dtype for name, tensor in readable.items()}
    stored_names = tensors.keys() & dtypes.keys()
    return (by_class - stored_names) | {name for name in stored_names if dtypes[name] == torch.float32}
