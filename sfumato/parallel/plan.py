"""What the engine must know of a model: its blocks, and where tensors are cut. Data, no code."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import nn

from sfumato.errors import ConfigError


@dataclass(frozen=True)
class Split:
    """Cut a tensor along the sequence where it enters (or leaves) a module."""

    dim: int
    """Sequence dimension."""
    output: bool = False
    """Cut what the module returns instead of what it is given."""


@dataclass(frozen=True)
class Gather:
    """Join the parts of a sequence in what a module returns."""

    dim: int
    """Sequence dimension."""


@dataclass(frozen=True)
class ParallelPlan:
    """How one kind of model is parallelised. Patterns are module names with ``*`` for a layer number."""

    blocks: tuple[str, ...]
    """Class names of the repeated blocks: units of sharding, recomputation and compilation."""
    tensor: Mapping[str, str] = field(default_factory=dict)
    """Style of each linear layer under tensor parallelism: see ``sfumato.parallel.tensor``."""
    sequence: Mapping[str, Mapping[str | int, Split] | Gather] = field(default_factory=dict)
    """Diffusion transformers: inputs by name, or outputs by position, that are cut along the sequence; and the module
    whose output is joined again."""
    replicated_context: tuple[str, ...] = ()
    """Attention modules whose keys and values come from a whole, uncut text: cross-attention, and what runs before the
    sequence is cut."""
    parts: tuple[str, ...] = ()
    """Submodules that are models of their own, called one without the other; patterns are names inside of each."""
    decoder: str = ""
    """The language model in a model that sees, which puts embeddings of images among those of tokens; it is called with
    whole rows, and they are cut where its language model begins."""


def matcher(pattern: str) -> Callable[[str], object]:
    """Whether a name fits a pattern of a plan, where ``*`` stands for a number."""
    return re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch


def find_blocks(module: nn.Module, plan: ParallelPlan) -> dict[str, nn.Module]:
    """The repeated blocks by name, in order; what contains others, as an encoder its layers, is none.

    Raises:
        ConfigError: when there are none.
    """
    matching = {
        name: submodule for name, submodule in module.named_modules() if type(submodule).__name__ in plan.blocks
    }
    if not matching:
        raise ConfigError(f"{type(module).__name__} has no block of class {' or '.join(plan.blocks) or '(none given)'}")
    containers = {name for name in matching if any(inner.startswith(f"{name}.") for inner in matching)}
    return {name: block for name, block in matching.items() if name not in containers}


def reads_whole(name: str, block: nn.Module, whole: set[str]) -> bool:
    """Whether all attention of a block, by ``processor``, is among the names ``whole``: it runs before any cut."""
    owners = {
        f"{name}.{key}" for key, submodule in block.named_modules() if getattr(submodule, "processor", None) is not None
    }
    return bool(owners) and owners <= whole


STYLES_OF = {"qwen3_vl_text": "qwen3"}
"""Language models whose configuration in transformers has no tensor-parallel styles, and the one with the same layers
that has."""


QUERIES = "layers.*.self_attn.q_proj"
NORMS_OF_HEADS = dict.fromkeys(
    ("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm"), "replicated_with_grad_allreduce"
)
"""Whole norms of heads that are cut, which some configurations in transformers leave out (Qwen3-VL-MoE, Qwen3-Omni):
without them each rank would learn from its own heads alone."""


PASSED_BY = "vqmodel"
"""The image tokenizer within models that draw, which no forward pass calls: nothing would gather its blocks."""


def language_plan(module: nn.Module) -> ParallelPlan:
    """The plan that a transformers language model carries itself.

    Its tensor-parallel styles stand in ``_tp_plan`` of the model and ``base_model_tp_plan`` of its configuration; its
    blocks in ``_no_split_modules``, or else they are the members of its largest list of modules. Of a model that sees
    they are those of its language model: encoders stay whole.
    """
    config = module.config.get_text_config()
    decoder = ""
    if config is not module.config:
        decoder = next(name for name, submodule in module.named_modules() if submodule is module.get_decoder())
    prefix = decoder or module.base_model_prefix
    kind = type(config)
    if decoder and not config.base_model_tp_plan and config.model_type in STYLES_OF:
        from transformers import CONFIG_MAPPING

        kind = CONFIG_MAPPING[STYLES_OF[config.model_type]]
    layer_styles = dict(kind.base_model_tp_plan or {})
    layer_styles = {
        name: style for name, style in NORMS_OF_HEADS.items() if layer_styles.get(QUERIES) == "colwise"
    } | layer_styles
    tensor = {f"{prefix}.{name}": style for name, style in layer_styles.items()}
    head = type(module)._tp_plan or {}
    # they are for every model of the class: one without dense layers, say, has no mlp.gate_proj
    styles = {name: f"{style}?" for name, style in (tensor | dict(head)).items()}
    called = {type(child).__name__ for name, child in module.named_modules() if PASSED_BY not in name.split(".")}
    blocks = tuple(name for name in module._no_split_modules or () if name in called) or _largest_list(module)
    if decoder:
        blocks = _whole_layers(module, blocks, decoder)
    return ParallelPlan(blocks=blocks, tensor=styles, decoder=decoder)


def _whole_layers(module: nn.Module, blocks: tuple[str, ...], decoder: str) -> tuple[str, ...]:
    """Class names of blocks; of an encoder's layers, where a part of them is named, theirs.

    transformers names the attention alone of SmolVLM's and Qwen2-Audio's encoders.
    """
    modules = dict(module.named_modules())
    class_names = dict.fromkeys(blocks)
    for name, submodule in modules.items():
        layer, _, _ = name.rpartition(".")
        if type(submodule).__name__ not in blocks or not layer or name.startswith(f"{decoder}."):
            continue
        if isinstance(modules[layer.rpartition(".")[0]], nn.ModuleList):
            class_names.pop(type(submodule).__name__, None)
            class_names[type(modules[layer]).__name__] = None
    return tuple(class_names)


def _largest_list(module: nn.Module) -> tuple[str, ...]:
    """Class names of the members of the list of modules that holds the most weights."""
    lists = [submodule for submodule in module.modules() if isinstance(submodule, nn.ModuleList)]
    sizes = [sum(parameter.numel() for parameter in members.parameters()) for members in lists]
    if not lists:
        return ()
    return tuple(dict.fromkeys(type(member).__name__ for member in lists[sizes.index(max(sizes))]))
