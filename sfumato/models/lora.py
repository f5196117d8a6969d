"""Low-rank adapters through peft: added, merged into plain weights, and saved as peft saves them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from sfumato.config.sections import LoraConfig
from sfumato.errors import ConfigError
from sfumato.parallel.expert import has_experts
from sfumato.parallel.plan import find_blocks, language_plan
from sfumato.parallel.shards import local, plain_name, shard_of, whole
from sfumato.parallel.weights import real_stand_ins

ADAPTER = "default"
"""The name that peft gives to an adapter."""

ROUTERS = ("gate", "router", "shared_expert_gate")
"""Linear layers that weigh experts."""

FILES = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors", "adapter_config.json")
"""What diffusers and peft call the files of adapters."""

EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""Names by which peft means the experts of a mixture-of-experts model, not its dense layers and shared experts."""


def add_lora(module: nn.Module, config: LoraConfig, default_targets: Sequence[str], seed: int) -> None:
    """Injects trainable float32 adapters into a diffusers or transformers model; its own weights stay frozen.

    Args:
        module: the plain model. Its weights may be on meta: the adapters become real with the same values. Then call
            ``start_magnitudes`` when the weights are there.
        config: rank, alpha, variant, targets.
        default_targets: layer names that are taken when the configuration names none.
        seed: seed of the adapters' initialisation.

    Raises:
        ConfigError: when a target matches nothing, is no linear layer, or does not go together with other settings.
    """
    from peft import LoraConfig as PeftLoraConfig

    targets = list(default_targets) if config.target_modules is None else config.target_modules
    _check_targets(module, targets, config)
    adapter = PeftLoraConfig(
        task_type="CAUSAL_LM" if type(module).__name__.endswith("ForCausalLM") else None,
        r=config.rank,
        lora_alpha=config.alpha,
        lora_dropout=config.dropout,
        use_rslora=config.variant == "rslora",
        use_dora=config.variant == "dora",
        target_modules=targets,
        target_parameters=config.target_parameters or None,
        init_lora_weights="gaussian" if config.init_weights == "gaussian" else True,
    )
    with torch.random.fork_rng(devices=[]), real_stand_ins(module):
        torch.manual_seed(seed)
        try:
            module.add_adapter(adapter, ADAPTER)
        except ValueError as error:
            raise ConfigError(f"model.lora: peft cannot add it to {type(module).__name__}: {error}") from error
    changed = set(adapter.target_parameters or ()) - set(config.target_parameters)
    if changed:
        raise ConfigError(
            f"model.lora.target_modules: in {type(module).__name__} peft takes {', '.join(EXPERTS[:3])} for the "
            "experts, not for dense layers: name only attention there, and experts in model.lora.target_parameters: "
            f"{', '.join(_experts_of(module))}"
        )
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    start_magnitudes(module)


def refuse_adapter(folder: Path) -> None:
    """Raises ConfigError when a folder that should hold a model holds adapters alone."""
    if any((folder / name).is_file() for name in FILES) or any(map(_holds_adapters, folder.glob("*.safetensors"))):
        raise ConfigError(
            f"model.model_path {folder} holds adapters (LoRA), not the model that they belong to: write a whole model "
            "with `sfumato export RUN OUT --merge`, RUN being the folder of the run that made them, and give OUT"
        )


def _holds_adapters(file: Path) -> bool:
    """Whether a file holds low-rank adapters, by the names of its tensors."""
    try:
        with safe_open(file, framework="pt") as opened:
            return any(".lora_" in name for name in opened.keys())  # noqa: SIM118  (it is no mapping)
    except (SafetensorError, OSError):
        return False


def language_targets(module: nn.Module) -> list[str]:
    """Names of the layers of a transformers language model that get adapters when the configuration names none.

    All linear layers of its blocks but routers; in a mixture-of-experts model those of attention alone, since peft has
    no way to name its dense layers and shared experts. Where an encoder calls other things so (Gemma 4) they are named
    in full.
    """
    left_out = ROUTERS + EXPERTS if has_experts(module) else ROUTERS
    inside = {id(submodule) for submodule in module.get_decoder().modules()}  # without the encoder of a model that sees
    found = {
        f"{start}.{name}": _last_part(name)
        for start, block in find_blocks(module, language_plan(module)).items()
        if id(block) in inside
        for name, submodule in block.named_modules()
        if isinstance(submodule, nn.Linear)
    }
    others = {_last_part(name) for name, each in module.named_modules() if not isinstance(each, nn.Linear)}
    names = dict.fromkeys(name if last in others else last for name, last in found.items() if last not in left_out)
    return [*names]


def _last_part(name: str) -> str:
    return name.rpartition(".")[2]


@torch.no_grad()
def start_magnitudes(module: nn.Module) -> None:
    """Gives DoRA's magnitudes the norms of the weights' rows, at which the model is what it was without adapters.

    Where the weights are on meta they become NaN until this is called again. Every rank must call it.
    """
    for _, layer in _layers(module):
        if not getattr(layer, "lora_magnitude_vector", None):
            continue
        magnitude, weight = layer.lora_magnitude_vector[ADAPTER].weight, layer.get_base_layer().weight
        if weight.is_meta:
            magnitude.fill_(torch.nan)
        else:
            norms = torch.linalg.vector_norm(whole(weight.detach()).float(), dim=1)
            local(magnitude).copy_(shard_of(norms, magnitude))


@torch.no_grad()
def merge_adapters(module: nn.Module, weights: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """The weights of the model without adapters that computes what the model with adapters does.

    Each is computed in float32 and cast to the dtype of the weight.

    Args:
        module: a model with all adapted layers, such as one on meta; with pipeline parallelism a stage is not enough.
        weights: whole weights by the names of the module with adapters, on any device; emptied one by one, so that
            nothing is held twice. None takes those of the module, which stay.

    Returns:
        By the names of the plain model.
    """
    weights = dict(module.state_dict()) if weights is None else weights
    stored = {_without_wrappers(name): name for name in weights if ".lora_" not in name}
    merged = {}
    for name, layer in _layers(module):
        parts = [weights.pop(f"{name}.{key}").float() for key in _keys_of(layer)]
        plain = f"{_without_wrappers(name)}.{getattr(layer, 'parameter_name', 'weight')}"
        weight = weights.pop(stored[plain])
        merged[plain] = _merged(layer, weight.float(), *parts).to(weight.dtype)
    while weights:
        name, weight = weights.popitem()
        merged[_without_wrappers(name)] = weight
    return merged


def adapter_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The adapters among whole weights, by names that peft reads.

    Magnitudes of DoRA are called ``lora_magnitude_vector.weight``, which peft reads like its own name without
    ``.weight``, and transformers instead of it.

    Args:
        module: the model with adapters, as ``parallelize`` returned it.
        weights: whole weights by the names of the module, adapters included.
    """
    from peft.utils import get_peft_model_state_dict

    owner = _configured(module)
    found = get_peft_model_state_dict(owner, dict(weights), ADAPTER, save_embedding_layers=False)
    names = {name: f"{name}.weight" if name.endswith("lora_magnitude_vector") else name for name in found}
    return {f"base_model.model.{names[name]}": weight.contiguous() for name, weight in found.items()}


def save_adapter(module: nn.Module, weights: Mapping[str, Tensor], folder: Path, base: str | None = None) -> None:
    """Writes the adapters of a transformers model as ``PeftModel.from_pretrained(base, folder)`` reads them.

    Args:
        module: the model with adapters, as ``parallelize`` returned it.
        weights: as for ``adapter_weights``.
        folder: where to; it must exist.
        base: folder of the model without adapters. With it ``AutoModelForCausalLM.from_pretrained(folder)`` loads both.
    """
    config: Any = _configured(module).peft_config[ADAPTER]
    known = config.base_model_name_or_path
    config.base_model_name_or_path = base or known or None
    config.save_pretrained(folder)
    config.base_model_name_or_path = known
    save_file(adapter_weights(module, weights), folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _check_targets(module: nn.Module, targets: Sequence[str], config: LoraConfig) -> None:
    name = type(module).__name__
    if not targets and not config.target_parameters:
        raise ConfigError("model.lora: both target_modules and target_parameters are empty: name what gets adapters")
    modules = dict(module.named_modules())
    for target in targets:
        found = [submodule for key, submodule in modules.items() if key == target or key.endswith(f".{target}")]
        others = [submodule for submodule in found if not isinstance(submodule, nn.Linear)]
        if not found or others:
            linear = sorted({_last(key) for key, submodule in modules.items() if isinstance(submodule, nn.Linear)})
            what = f"is a {type(others[0]).__name__}, no linear layer" if others else "matches no layer"
            raise ConfigError(f"model.lora.target_modules: {target!r} {what} of {name}; there are {', '.join(linear)}")
        if any(submodule.weight is _embedding_of(module) for submodule in found):
            raise ConfigError(
                f"model.lora.target_modules: {target!r} of {name} is tied to the embedding (tie_word_embeddings), "
                "which an adapter on one of both would part: leave it out, or untie them in the folder (lm_head.weight "
                "as a weight of its own, and tie_word_embeddings false in config.json)"
            )
    experts = _experts_of(module)
    for target in config.target_parameters:
        if not any(weight_name == target or weight_name.endswith(f".{target}") for weight_name in experts):
            there = f"there are {', '.join(experts)}" if experts else "it has no such weights: leave it empty"
            raise ConfigError(f"model.lora.target_parameters: {target!r} holds no experts of {name}; {there}")
    for field, is_set in (("dropout", config.dropout > 0), ("variant dora", config.variant == "dora")):
        if is_set and config.target_parameters:
            raise ConfigError(
                f"model.lora.{field} and model.lora.target_parameters do not go together, since peft adds the adapters "
                "of experts to their weights: leave one of the two out"
            )


def _embedding_of(module: nn.Module) -> nn.Parameter | None:
    """The weight of a transformers model's input embedding; None for other modules."""
    embedding = module.get_input_embeddings() if hasattr(module, "get_input_embeddings") else None
    return getattr(embedding, "weight", None)


def _experts_of(module: nn.Module) -> list[str]:
    """Names of three-dimensional weights, such as mlp.experts.down_proj, without the number of the layer."""
    names = {_without_wrappers(name) for name, parameter in module.named_parameters() if parameter.ndim == 3}
    return sorted({_last(name) for name in names})


def _last(name: str) -> str:
    """A name from behind its last number that stands alone."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts[:-1]) if part.isdigit()]
    return ".".join(parts[numbers[-1] + 1 :]) if numbers else name


def _layers(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Layers with adapters, by plain name."""
    from peft.tuners.lora import LoraLayer

    for name, submodule in module.named_modules():
        if isinstance(submodule, LoraLayer):
            yield plain_name(f"{name}.").removesuffix("."), submodule


def _keys_of(layer: nn.Module) -> list[str]:
    """Names of the adapter's weights in a layer with adapters."""
    keys = [f"lora_A.{ADAPTER}.weight", f"lora_B.{ADAPTER}.weight"]
    return keys + [f"lora_magnitude_vector.{ADAPTER}.weight"] * bool(getattr(layer, "lora_magnitude_vector", None))


def _merged(layer: Any, weight: Tensor, down: Tensor, up: Tensor, magnitude: Tensor | None = None) -> Tensor:
    """Weight [out, in], or of experts [experts, out, in] or [experts, in, out], with its adapter."""
    if weight.ndim == 2:
        weight = torch.addmm(weight, up, down, alpha=layer.scaling[ADAPTER])
        return weight if magnitude is None else weight * (magnitude / weight.norm(dim=1))[:, None]
    down = down.unflatten(0, (layer.num_experts, -1))
    up = up.unflatten(1, (-1, layer.num_experts)).permute(2, 0, 1)
    is_transposed = getattr(layer.get_base_layer(), "is_transposed", False)
    return torch.baddbmm(weight, *((down.mT, up.mT) if is_transposed else (up, down)), alpha=layer.scaling[ADAPTER])


def _without_wrappers(name: str) -> str:
    """A weight's name in the model without adapters."""
    return re.sub(r"(\.base_layer)+(?=\.|$)", "", name)


def _configured(module: nn.Module) -> nn.Module:
    """The part of a module that knows its adapters' configuration."""
    return next(submodule for submodule in module.modules() if getattr(submodule, "peft_config", None))
