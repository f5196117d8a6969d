"""Low-rank adapters through peft: adding them, merging them into plain weights, and saving them as peft does."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sfumato.config.sections import LoraConfig
from sfumato.errors import ConfigError
from sfumato.models.adapter_variants import merge_variant, never_skip, variant_config
from sfumato.parallel.expert_modules import has_experts
from sfumato.parallel.plan import find_blocks, language_plan
from sfumato.parallel.shards import gather_whole, local_shard, plain_name, shard_of
from sfumato.parallel.weights import real_stand_ins

if TYPE_CHECKING:
    from peft import PeftConfig
    from peft.tuners.lora import LoraLayer
    from transformers import PreTrainedModel

ADAPTER = "default"
"""The name that peft gives to an adapter."""

ROUTERS = ("gate", "router", "shared_expert_gate", "indexer")
"""Names of the linear layers, or of the modules around them, that choose and weight experts, or choose the keys that
attention looks at (DeepSeek-V3.2)."""

FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors", "adapter_config.json")
"""Names of the files of adapters, by diffusers and by peft."""

EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names that peft applies to the experts of a mixture-of-experts model, not to its dense layers and shared experts."""


MAMBA = ("mamba", "mamba2", "falcon_mamba", "falcon_h1", "nemotron_h", "bamba", "granitemoehybrid", "zamba2")
"""transformers' model types in which fused kernels read the weight of ``out_proj`` itself, past an adapter. In the
first five peft refuses one there."""


def add_lora(module: nn.Module, config: LoraConfig, default_targets: Sequence[str], seed: int) -> None:
    """Injects trainable float32 adapters into a diffusers or transformers model; its own weights stay frozen.

    Args:
        module: the plain model. Its weights may be on meta: the adapters then become real, with the values that they
            would have otherwise. Call ``start_magnitudes`` once the weights are read.
        config: rank, alpha, variant, targets.
        default_targets: names of layers that get adapters when the configuration names none.
        seed: of the adapters' initial values.

    Raises:
        ConfigError: when a target matches nothing, is no linear layer, or cannot be combined with other settings.
    """
    from peft import LoraConfig as PeftLoraConfig

    if not hasattr(module, "add_adapter"):
        raise ConfigError(f"model.lora: the class {type(module).__name__} takes no adapters: leave model.lora out")
    targets = list(default_targets) if config.target_modules is None else config.target_modules
    _check_targets(module, targets, config)
    if config.is_merged and not config.changes_weights:
        _add(module, variant_config(config, targets, module), seed)
        never_skip([layer for _, layer in _adapted_layers(module)], ADAPTER)
        return
    adapter = PeftLoraConfig(
        task_type="CAUSAL_LM" if type(module).__name__.endswith("ForCausalLM") else None,
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]  (peft divides it: any number will do)
        lora_dropout=config.dropout,
        use_rslora=config.variant == "rslora",
        use_dora=config.variant == "dora",
        target_modules=targets,
        target_parameters=config.target_parameters or None,
        init_lora_weights=_initial_weights(module, config),
    )
    _add(module, adapter, seed)
    # peft may have turned names of linear layers into names of experts, which was not asked for
    added_parameters = set(adapter.target_parameters or ()) - set(config.target_parameters)
    if added_parameters:
        raise ConfigError(
            f"model.lora.target_modules: in {type(module).__name__} peft takes {', '.join(EXPERTS[:3])} for the "
            "experts, not for dense layers: name only attention there, and experts in model.lora.target_parameters: "
            f"{', '.join(_experts_of(module))}"
        )
    start_magnitudes(module)


def _initial_weights(module: nn.Module, config: LoraConfig) -> bool | Literal["gaussian", "pissa"]:
    """peft's name of how adapters start. On meta, where only shapes count, there are no singular values to take."""
    if config.changes_weights and not any(parameter.is_meta for parameter in module.parameters()):
        return "pissa"
    return "gaussian" if config.init_weights == "gaussian" else True


def _add(module: nn.Module, adapter: PeftConfig, seed: int) -> None:
    """Injects float32 adapters. Raises ConfigError where peft cannot."""
    # adapters depend on the seed alone, on meta as elsewhere, and the run's generator does not move
    with torch.random.fork_rng(devices=[]), real_stand_ins(module):
        torch.manual_seed(seed)
        try:
            inject_adapter(module, adapter, ADAPTER)
        except ValueError as error:
            raise ConfigError(f"model.lora: peft cannot add it to {type(module).__name__}: {error}") from error
    # trained in float32, whatever the dtype of the frozen weights
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)


def inject_adapter(module: nn.Module, adapter: PeftConfig, name: str) -> None:
    """Adds an adapter to a diffusers or transformers model, which trains that adapter alone from then on.

    It does what ``add_adapter`` of transformers does, by the same function of peft. That method has a bound of its own
    besides: in transformers 5.24 it refuses each peft before 0.22, though it calls nothing that these lack.

    Raises:
        ValueError: where peft cannot.
    """
    from peft import inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer
    from transformers import PreTrainedModel

    if not isinstance(module, PreTrainedModel):
        cast("PreTrainedModel", module).add_adapter(adapter, name)  # diffusers' method of the same name
        return
    adapter.base_model_name_or_path = module.name_or_path
    inject_adapter_in_model(adapter, module, name)
    module._hf_peft_config_loaded = True
    for layer in module.modules():
        if isinstance(layer, BaseTunerLayer):
            layer.set_adapter(name)


def remove_adapters(module: nn.Module) -> None:
    """Takes all adapters of a transformers model out of it, whatever peft is installed: see ``inject_adapter``."""
    from peft import PeftType
    from peft.functional import delete_adapter

    configurations: dict[str, PeftConfig] = getattr(module, "peft_config", {})
    for name, config in configurations.items():
        kind = PeftType(config.peft_type)
        delete_adapter(module, adapter_name=name, prefix=f"{kind.value.lower()}_")
    configurations.clear()


def refuse_adapter(folder: Path) -> None:
    """Raises ConfigError when a folder that should hold a model holds only adapters."""
    if any((folder / name).is_file() for name in FILES) or any(map(_holds_adapters, folder.glob("*.safetensors"))):
        raise ConfigError(
            f"model.model_path {folder} holds adapters (LoRA), not the model that they belong to: write a whole model "
            "with `sfumato export RUN OUT --merge`, RUN being the folder of the run that made them, and give OUT"
        )


def is_adapter_name(name: str) -> bool:
    """Whether a weight belongs to an adapter, by its name."""
    return re.search(r"\.(lora_|lokr_|hada_|oft_R\.)", name) is not None


def _holds_adapters(file: Path) -> bool:
    """Whether a file holds low-rank adapters, by the names of its tensors."""
    try:
        with safe_open(file, framework="pt") as opened:
            return any(is_adapter_name(name) for name in opened.keys())  # noqa: SIM118  (it is no mapping)
    except (SafetensorError, OSError):
        return False


def language_targets(module: nn.Module) -> list[str]:
    """Names of the layers of a transformers language model that get adapters when the configuration names none.

    These are all linear layers of its decoder's blocks but routers and what Mamba reads without calling the layer; in a
    mixture-of-experts model only those of attention, since peft has no way to name its dense layers and shared
    experts. Layers whose short names belong to other submodules, too, such as routers or layers of an encoder, are
    named in full.
    """
    # Mamba multiplies by the weight of dt_proj itself, without the adapter that merging would add
    left_out = ("dt_proj", *(EXPERTS if has_experts(module) else ()))
    if cast("PreTrainedModel", module).config.get_text_config().model_type in MAMBA:
        left_out += ("out_proj",)
    decoder = cast("PreTrainedModel", module).get_decoder()
    if isinstance(decoder, nn.Linear):  # ModernBERT calls its output layer so
        decoder = cast("PreTrainedModel", module).base_model
    # without the encoder of a model that sees
    decoder_modules = {id(submodule) for submodule in decoder.modules()}
    short_names = {
        f"{start}.{name}": _last_part(name)
        for start, block in find_blocks(module, language_plan(module)).items()
        if id(block) in decoder_modules
        for name, submodule in block.named_modules()
        if _is_linear(submodule) and set(ROUTERS).isdisjoint(name.split("."))
    }
    ambiguous = {_last_part(name) for name, _ in module.named_modules() if name not in short_names}
    targets = dict.fromkeys(
        name if short_name in ambiguous else short_name
        for name, short_name in short_names.items()
        if short_name not in left_out
    )
    return [*targets]


def _is_linear(module: nn.Module) -> bool:
    """Whether a layer multiplies its whole input by one matrix, as its adapter would. DeepSeek-V4 has layers of torch's
    class that multiply each part of the input by a part of the matrix."""
    return isinstance(module, nn.Linear) and not hasattr(module, "n_groups")


def _last_part(name: str) -> str:
    """The part of a name after its last dot."""
    return name.rpartition(".")[2]


@torch.no_grad()
def start_magnitudes(module: nn.Module) -> None:
    """Sets DoRA's magnitudes to the norms of the weights' rows, so that the model computes what it does without
    adapters.

    Where the weights are on meta, magnitudes are NaN until this is called again. Every rank must call it.
    """
    for _, layer in _adapted_layers(module):
        if not getattr(layer, "lora_magnitude_vector", None):
            continue
        magnitude = cast("Tensor", layer.lora_magnitude_vector[ADAPTER].weight)
        weight = cast("Tensor", layer.get_base_layer().weight)
        if weight.is_meta:
            magnitude.fill_(torch.nan)
        else:
            norms = torch.linalg.vector_norm(gather_whole(weight.detach()).float(), dim=1)
            local_shard(magnitude).copy_(shard_of(norms, magnitude))


@torch.no_grad()
def merge_adapters(module: nn.Module, weights: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Merges adapters into weights: a plain model with these computes what the model with adapters does.

    Each weight is computed in float32 and cast back to its own dtype.

    Args:
        module: a model with all adapted layers, such as one on meta; with pipeline parallelism a stage is not enough.
        weights: whole weights by the names of the module with adapters, on any device. The dictionary is emptied one by
            one, so that no weight is held twice. None takes the weights of the module, which stay.

    Returns:
        The weights by the names of the plain model.
    """
    weights = dict(module.state_dict()) if weights is None else weights
    wrapped_names = {_without_wrappers(name): name for name in weights if not is_adapter_name(name)}
    merged: dict[str, Tensor] = {}
    for name, layer in _adapted_layers(module):
        if not hasattr(layer, "lora_A"):
            keys = [key for key in cast("nn.Module", layer).state_dict() if not key.startswith("base_layer.")]
            tensors = {key: weights.pop(f"{name}.{key}").float() for key in keys}
            plain = f"{_without_wrappers(name)}.weight"
            weight = weights.pop(wrapped_names[plain])
            merged[plain] = merge_variant(layer, ADAPTER, weight.float(), tensors).to(weight.dtype)
            continue
        adapter_parts = [weights.pop(f"{name}.{key}").float() for key in _adapter_keys(layer)]
        # peft wraps a layer, or, for experts, the module whose parameter has the adapter
        plain = f"{_without_wrappers(name)}.{getattr(layer, 'parameter_name', 'weight')}"
        weight = weights.pop(wrapped_names[plain])
        merged[plain] = _merge_weight(layer, weight.float(), *adapter_parts).to(weight.dtype)
    while weights:
        name, weight = weights.popitem()
        merged[_without_wrappers(name)] = weight
    return merged


def adapter_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Selects the adapters among whole weights, by the names that peft reads.

    Magnitudes of DoRA are called ``lora_magnitude_vector.weight``: peft reads that as well as its own name, which has
    no ``.weight``; transformers reads only the former.

    Args:
        module: the model with adapters, as ``parallelize`` returned it.
        weights: whole weights by the names of the module, adapters included.
    """
    from peft.utils import get_peft_model_state_dict

    owner = cast("Any", _configured_submodule(module))
    adapters = get_peft_model_state_dict(owner, dict(weights), ADAPTER, save_embedding_layers=False)
    names = {name: f"{name}.weight" if name.endswith("lora_magnitude_vector") else name for name in adapters}
    return {f"base_model.model.{names[name]}": weight.contiguous() for name, weight in adapters.items()}


def save_adapter(module: nn.Module, weights: Mapping[str, Tensor], folder: Path, base: str | None = None) -> None:
    """Writes the adapters of a transformers model as ``PeftModel.from_pretrained(base, folder)`` reads them.

    Args:
        module: the model with adapters, as ``parallelize`` returned it.
        weights: as for ``adapter_weights``.
        folder: where to write; it must exist.
        base: folder of the model without adapters. With it ``AutoModelForCausalLM.from_pretrained(folder)`` loads both.
    """
    config: PeftConfig = cast("Any", _configured_submodule(module)).peft_config[ADAPTER]
    previous_base = config.base_model_name_or_path
    config.base_model_name_or_path = base or previous_base or None
    config.save_pretrained(folder)  # pyright: ignore[reportArgumentType]  (any path will do)
    config.base_model_name_or_path = previous_base  # the configuration is the module's own
    save_file(adapter_weights(module, weights), folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _check_targets(module: nn.Module, targets: Sequence[str], config: LoraConfig) -> None:
    """Raises ConfigError as ``add_lora`` does, before peft changes anything."""
    name = type(module).__name__
    if not targets and not config.target_parameters:
        raise ConfigError("model.lora: both target_modules and target_parameters are empty: name what gets adapters")
    modules = dict(module.named_modules())
    for target in targets:
        matched = [submodule for key, submodule in modules.items() if key == target or key.endswith(f".{target}")]
        not_linear = [submodule for submodule in matched if not _is_linear(submodule)]
        if not matched or not_linear:
            linear = sorted({_after_layer_number(key) for key, submodule in modules.items() if _is_linear(submodule)})
            reason = f"is a {type(not_linear[0]).__name__}, no linear layer" if not_linear else "matches no layer"
            raise ConfigError(
                f"model.lora.target_modules: {target!r} {reason} of {name}; there are {', '.join(linear)}"
            )
        if any(submodule.weight is _embedding_of(module) for submodule in matched):
            raise ConfigError(
                f"model.lora.target_modules: {target!r} of {name} is tied to the embedding (tie_word_embeddings), "
                "which an adapter on one of both would part: leave it out, or untie them in the folder (lm_head.weight "
                "as a weight of its own, and tie_word_embeddings false in config.json)"
            )
    experts = _experts_of(module)
    for target in config.target_parameters:
        if not any(weight_name == target or weight_name.endswith(f".{target}") for weight_name in experts):
            remedy = f"there are {', '.join(experts)}" if experts else "it has no such weights: leave it empty"
            raise ConfigError(f"model.lora.target_parameters: {target!r} holds no experts of {name}; {remedy}")
    for field, is_set in (("dropout", config.dropout > 0), ("variant dora", config.variant == "dora")):
        if is_set and config.target_parameters:
            raise ConfigError(
                f"model.lora.{field} and model.lora.target_parameters do not go together, since peft adds the adapters "
                "of experts to their weights: leave one of the two out"
            )


def _embedding_of(module: nn.Module) -> nn.Parameter | None:
    """The weight of a transformers model's input embedding; None for other modules."""
    embedding = (
        cast("PreTrainedModel", module).get_input_embeddings() if hasattr(module, "get_input_embeddings") else None
    )
    return getattr(embedding, "weight", None)


def _experts_of(module: nn.Module) -> list[str]:
    """Names of the weights of experts, which have three dimensions, without the number of the layer: such as
    mlp.experts.down_proj."""
    names = {_without_wrappers(name) for name, parameter in module.named_parameters() if parameter.ndim == 3}
    return sorted({_after_layer_number(name) for name in names})


def _after_layer_number(name: str) -> str:
    """The part of a name after its last component that is a number; the whole name where none is."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts[:-1]) if part.isdigit()]
    return ".".join(parts[numbers[-1] + 1 :]) if numbers else name


def _adapted_layers(module: nn.Module) -> Iterator[tuple[str, LoraLayer]]:
    """The layers with adapters, by their names without what wrapping for parallelism adds."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for name, submodule in module.named_modules():
        if isinstance(submodule, BaseTunerLayer):
            yield plain_name(f"{name}.").removesuffix("."), cast("LoraLayer", submodule)


def _adapter_keys(layer: LoraLayer) -> list[str]:
    """Names of the adapter's weights within a layer: down, up, and with DoRA the magnitude."""
    keys = [f"lora_A.{ADAPTER}.weight", f"lora_B.{ADAPTER}.weight"]
    return keys + [f"lora_magnitude_vector.{ADAPTER}.weight"] * bool(getattr(layer, "lora_magnitude_vector", None))


def _merge_weight(layer: Any, weight: Tensor, down: Tensor, up: Tensor, magnitude: Tensor | None = None) -> Tensor:
    """The weight with its adapter added.

    Args:
        layer: peft's layer, with the scaling.
        weight: ``[out, in]``, or of experts ``[experts, out, in]`` or ``[experts, in, out]``.
        down: ``[rank, in]``, of experts ``[experts * rank, in]``.
        up: ``[out, rank]``, of experts ``[out, rank * experts]``.
        magnitude: of DoRA ``[out]``, not of experts.
    """
    if weight.ndim == 2:
        # DoRA: the merged weight's direction, with each row scaled to its magnitude
        weight = torch.addmm(weight, up, down, alpha=layer.scaling[ADAPTER])
        return weight if magnitude is None else weight * (magnitude / weight.norm(dim=1))[:, None]
    # peft stacks the experts in the dimension of the rank, expert first in ``down`` and last in ``up``
    down = down.unflatten(0, (layer.num_experts, -1))
    up = up.unflatten(1, (-1, layer.num_experts)).permute(2, 0, 1)
    is_transposed = getattr(layer.get_base_layer(), "is_transposed", False)
    return torch.baddbmm(weight, *((down.mT, up.mT) if is_transposed else (up, down)), alpha=layer.scaling[ADAPTER])


def _without_wrappers(name: str) -> str:
    """The name of a module or weight in the model without adapters."""
    return re.sub(r"(\.base_layer)+(?=\.|$)", "", name)


def _configured_submodule(module: nn.Module) -> nn.Module:
    """The submodule that holds peft's configuration: ``parallelize`` may have wrapped it."""
    return next(submodule for submodule in module.modules() if getattr(submodule, "peft_config", None))
