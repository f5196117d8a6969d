"""Description of a model for parallelisation: its blocks, and where tensors are cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

from torch import nn

from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class Split:
    """Cut a tensor along the sequence where it enters (or leaves) a module."""

    dim: int
    """Sequence dimension."""
    output: bool = False
    """Cut an output of the module instead of an input."""
    may_lack: bool = False
    """Whether a tensor with fewer dimensions, whose values are those of all tokens, is left whole."""
    parts: tuple[str, ...] = ()
    """For a tensor that joins several sequences: the earlier cuts of these, ``module.input``, in order. Each part is
    cut as they are; what is behind them is this rank's already."""


@dataclass(frozen=True)
class Gather:
    """Join the ranks' parts of a sequence in the output of a module."""

    dim: int
    """Sequence dimension."""
    is_cut_again: bool = False
    """Whether a later ``Split`` cuts what is left of the sequence, so that ranks' gradients differ and are summed."""


Cuts = Mapping[str | int, Split]
"""Inputs by name, or outputs by position, of a module."""


@dataclass(frozen=True)
class ParallelPlan:
    """How one kind of model is parallelised. Patterns are module names with ``*`` for a layer number; in ``sequence``
    ``-1`` at the end stands for the last layer."""

    blocks: tuple[str, ...]
    """Class names of the repeated blocks: units of sharding, recomputation and compilation."""
    tensor: Mapping[str, str] = field(default_factory=dict)
    """Style of each linear layer under tensor parallelism: see ``sfumato.parallel.tensor``."""
    sequence: Mapping[str, Cuts | Gather | tuple[Cuts, Gather]] = field(default_factory=dict)
    """For diffusion transformers, by module pattern: inputs and outputs that are cut along the sequence, ``Gather`` for
    the module whose output is joined again, or both."""
    replicated_context: tuple[str, ...] = ()
    """Attention modules whose keys and values come from a whole, uncut text: cross-attention, and attention that runs
    before the sequence is cut."""
    masks: Literal["keys", "pairs", "whole"] = "keys"
    """The attention masks of a diffusion transformer under sequence parallelism. ``keys`` are bools of this rank's
    keys. ``pairs``, of this rank's queries and keys, are 1 or true where both are no padding; numbers are added to the
    scores. ``whole``, of any kind, are not cut; the sequence must be one stream in its order, and not a ring's."""
    parts: tuple[str, ...] = ()
    """Names of submodules that are separate models, called independently; patterns are names inside of each."""
    decoder: str = ""
    """Name of the language model inside a multimodal model, which puts embeddings of images among those of tokens. The
    whole model is called with whole rows, which are cut where the language model begins."""
    graph_breaks: bool = False
    """Whether blocks compute something that is not compiled, such as the attention of packed rows."""


def compile_pattern(pattern: str) -> Callable[[str], object]:
    """A function that tells whether a name matches a pattern of a plan, where ``*`` stands for a number."""
    return re.compile(re.escape(pattern).replace(r"\*", r"\d+")).fullmatch


def find_modules(module: nn.Module, pattern: str) -> dict[str, nn.Module]:
    """The modules by name that a pattern of ``ParallelPlan.sequence`` or ``replicated_context`` names; none are {}."""
    is_last = pattern.endswith(".-1")
    fits = compile_pattern(f"{pattern.removesuffix('-1')}*" if is_last else pattern)
    matching = {name: submodule for name, submodule in module.named_modules() if fits(name)}
    return dict([*matching.items()][-1:]) if is_last else matching


def find_blocks(module: nn.Module, plan: ParallelPlan) -> dict[str, nn.Module]:
    """The repeated blocks by name, in order. A module that contains blocks, as an encoder its layers, is not one.

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
    """Whether a block runs before the sequence is cut: all its attention modules are among the names ``whole``.

    Attention modules are recognised by their ``processor``.
    """
    owners = {
        f"{name}.{key}" for key, submodule in block.named_modules() if getattr(submodule, "processor", None) is not None
    }
    return bool(owners) and owners <= whole


STYLES_OF = {"qwen3_vl_text": "qwen3"}
"""Model types whose configuration in transformers lacks tensor-parallel styles, and a type with equal layers that has
them."""


QUERIES = "layers.*.self_attn.q_proj"
NORMS_OF_HEADS = dict.fromkeys(
    ("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm"), "replicated_with_grad_allreduce"
)
"""Styles of the norms of queries and keys, which some configurations in transformers leave out (Qwen3-VL-MoE,
Qwen3-Omni): their weights are whole, but each rank sees only its own heads, so gradients must be summed."""


PASSED_BY = "vqmodel"
"""The image tokenizer inside models that generate images. No forward pass calls it, so fsdp must not treat its layers
as blocks: nothing would gather them."""


def language_plan(module: nn.Module) -> ParallelPlan:
    """The plan of a transformers language model, from what its classes declare.

    Its tensor-parallel styles are in ``_tp_plan`` of the model and ``base_model_tp_plan`` of its configuration; its
    blocks in ``_no_split_modules``, or else they are the members of its largest list of modules. Of a multimodal model
    the styles are those of its language model: encoders stay whole.
    """
    model = cast("PreTrainedModel", module)
    config = model.config.get_text_config()
    decoder = ""
    if config is not model.config:
        decoder = next(name for name, submodule in module.named_modules() if submodule is model.get_decoder())
    prefix = decoder or model.base_model_prefix
    kind = type(config)
    if decoder and not config.base_model_tp_plan and config.model_type in STYLES_OF:
        from transformers import CONFIG_MAPPING

        kind = CONFIG_MAPPING[STYLES_OF[config.model_type]]
    layer_styles = dict(kind.base_model_tp_plan or {})
    layer_styles = {
        name: style for name, style in NORMS_OF_HEADS.items() if layer_styles.get(QUERIES) == "colwise"
    } | layer_styles
    tensor = {f"{prefix}.{name}": style for name, style in layer_styles.items()}
    head = type(model)._tp_plan or {}
    # The styles are for every model of the class and need not all match ("?"): one without dense layers has no
    # mlp.gate_proj.
    styles = {name: f"{style}?" for name, style in (tensor | dict(head)).items()}
    called = {type(child).__name__ for name, child in module.named_modules() if PASSED_BY not in name.split(".")}
    blocks = tuple(name for name in model._no_split_modules or () if name in called) or _largest_list(module)
    if decoder:
        blocks = _whole_layers(module, blocks, decoder)
    return ParallelPlan(blocks=blocks, tensor=styles, decoder=decoder)


def _whole_layers(module: nn.Module, blocks: tuple[str, ...], decoder: str) -> tuple[str, ...]:
    """Class names of blocks, in which a part of an encoder's layer is replaced by the whole layer.

    For the encoders of SmolVLM and Qwen2-Audio transformers names only the attention inside of a layer.
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
