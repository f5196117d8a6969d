"""Tensor parallelism: ranks share each matrix (Megatron-LM, arXiv 1909.08053), and activations between the matrices.

The styles of a plan are those of transformers' ``base_model_tp_plan``, listed in ``STYLES``; a style may be followed by
``:n`` (the number of equal blocks of a fused matrix) and by ``?`` (the pattern need not match).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, cast

import torch.distributed as dist
from torch import nn

from sfumato.errors import ConfigError
from sfumato.parallel import tensor_styles as styles
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.plan import ParallelPlan, compile_pattern, find_blocks
from sfumato.parallel.shards import trainable_parameters
from sfumato.parallel.tensor_sequence import share_sequence
from sfumato.parallel.tensor_styles import Cutter

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def _plan_error(problem: str) -> ConfigError:
    """An error of a plan, with the remedy of who did not write it: plans of language models are transformers'."""
    return ConfigError(f"plan of tensor parallelism: {problem}; or set train.tensor_parallel_size to 1")


@dataclass(frozen=True)
class Style:
    """The style that a plan gives a module or parameter."""

    kind: str
    blocks: int = 1
    """Equal blocks of a fused matrix."""

    @classmethod
    def parse(cls, text: str, pattern: str) -> Style:
        """Reads ``kind`` or ``kind:blocks``."""
        kind, _, blocks = text.partition(":")
        if kind not in STYLES or (blocks and not blocks.isdigit()):
            names = ", ".join(sorted(STYLES))
            raise _plan_error(f"{pattern!r} has the unknown style {text!r}; known: {names}")
        return cls(kind, int(blocks) if blocks else STYLES[kind].blocks)

    @property
    def meaning(self) -> Meaning:
        """Its entry in ``STYLES``."""
        return STYLES[self.kind]


def apply_tensor_parallel(module: nn.Module, mesh: Mesh, plan: ParallelPlan, sequence_parallel: bool) -> None:
    """Shares the matrices of a model among tensor-parallel ranks.

    Weights become DTensors on ``mesh.device_mesh("tp")``, cut from the whole weights of each rank, which may be on the
    meta device; other weights stay plain and whole, with equal gradients on all ranks. Trainable ones are first made
    equal to those of the first rank. Inputs and outputs of modules stay plain tensors, and whole outside of groups of
    cut layers.

    Args:
        module: an unmodified transformers or diffusers model; LoRA adapters may be in it. Changed in place.
        mesh: the ranks.
        plan: its ``tensor`` styles.
        sequence_parallel: share the activations between the blocks' groups of layers too (arXiv 2205.05198): norms and
            residuals run on this rank's part of the sequence, which need not divide; hidden states recorded between
            blocks are such parts. Language models only.

    Raises:
        ConfigError: for a style that is not known, a pattern that matches nothing, heads or matrices that do not
            divide, and models for which sequence parallelism is not correct.
    """
    if not plan.tensor:
        raise ConfigError(
            f"{type(module).__name__} has no plan for tensor parallelism: set train.tensor_parallel_size to 1"
        )
    if sequence_parallel and plan.sequence:
        raise ConfigError(
            f"train.sequence_parallel is for language models; in {type(module).__name__} text and image parts of a "
            "sequence are cut apart: set it to false, or share the sequence by train.ulysses_parallel_size"
        )
    lists = {name.rpartition(".")[0] for name in find_blocks(module, plan)}
    if sequence_parallel and len(lists) > 1:
        raise ConfigError(
            f"train.sequence_parallel is for models whose blocks are one list of layers; {type(module).__name__} has "
            f"{len(lists)}: set it to false"
        )
    cutter = Cutter(module, mesh.device_mesh("tp"))
    module_styles = match_plan(module, plan.tensor)
    _match_tied_embeddings(module, module_styles)
    blocks = find_blocks(module, plan)
    groups = _find_groups(blocks, module_styles) if sequence_parallel else {}
    _check_heads(module, module_styles, cutter.ranks.size)
    _check_owners(module, module_styles)
    for parameter in trainable_parameters(module).values():  # each rank may have drawn its own at random
        if not parameter.is_meta:
            dist.broadcast(parameter.data, group=mesh.group("tp"), group_src=0)

    block_prefixes = tuple(f"{name}." for name in blocks)
    partial_prefixes = tuple(f"{name}." for name, is_partial in groups.items() if is_partial)
    handled: set[nn.Module] = set()
    for name, style in module_styles.items():
        handled |= _apply(
            style, _Site(module, name, cutter, name.startswith(partial_prefixes), name.startswith(block_prefixes))
        )
    _reduce_heads(module, module_styles, cutter.ranks.size)
    if sequence_parallel:
        share_sequence(module, blocks, groups, handled, cutter.ranks)


def match_plan(module: nn.Module, plan: Mapping[str, str]) -> dict[str, Style]:
    """The style of each module, or bare parameter, by its name.

    Args:
        module: the model.
        plan: patterns, where ``*`` stands for a number, with styles.

    Raises:
        ConfigError: for an unknown style, or a pattern that matches nothing and does not end in ``?``.
    """
    names = [*dict(module.named_modules()), *dict(module.named_parameters())]
    module_styles: dict[str, Style] = {}
    for pattern, text in plan.items():
        style = Style.parse(text.removesuffix("?"), pattern)
        matching = [*filter(compile_pattern(pattern), names)]
        if not matching and not text.endswith("?"):
            raise _plan_error(
                f"{pattern!r} ({text}) matches nothing in {type(module).__name__}; "
                "correct the name, or end the style with ? if not every model has it"
            )
        module_styles |= dict.fromkeys(matching, style)
    return module_styles


def _match_tied_embeddings(module: nn.Module, module_styles: dict[str, Style]) -> None:
    """Adds a style for an embedding whose weight is tied to a cut head: both share one parameter."""
    heads = {
        id(getattr(_base_layer(module.get_submodule(name)), "weight", None))
        for name, style in module_styles.items()
        if style.meaning.cuts == "outputs" and not _is_parameter(module, name)
    }
    for name, submodule in module.named_modules():
        if isinstance(submodule, nn.Embedding) and id(submodule.weight) in heads and name not in module_styles:
            module_styles[name] = Style("embedding_rowwise")


def _check_heads(module: nn.Module, module_styles: Mapping[str, Style], size: int) -> None:
    """Raises ConfigError when tensor-parallel ranks cannot share the attention heads evenly."""
    for name, style in module_styles.items():
        if style.kind != "colwise" or _is_parameter(module, name):
            continue
        parent = _parent_module(module, name)
        layer = _base_layer(module.get_submodule(name))
        counts = [getattr(parent, "heads", None), getattr(parent, "num_heads", None)]
        width = getattr(parent, "head_dim", None)
        if isinstance(width, int) and not getattr(layer, "out_features", 0) % width:
            counts.append(cast("int", layer.out_features) // width)
        for heads in counts:
            if isinstance(heads, int) and heads % size:
                raise ConfigError(
                    f"{name} has {heads} heads, which train.tensor_parallel_size {size} ranks cannot share "
                    f"({heads} / {size} = {heads / size:g}): take a divisor of {heads}"
                )


def _check_owners(module: nn.Module, module_styles: Mapping[str, Style]) -> None:
    """Raises ConfigError for a cut bare parameter whose module does not compute with this rank's shards."""
    for name, style in module_styles.items():
        if style.meaning.cuts and _is_parameter(module, name):
            owner = name.rpartition(".")[0]
            if owner not in module_styles or module_styles[owner].kind not in ("moe_tp_experts", "local_params"):
                raise _plan_error(
                    f"{name} is a bare parameter ({style.kind}); its module {owner} needs "
                    "the style moe_tp_experts or local_params"
                )


@dataclass(frozen=True)
class _Site:
    """Where a style is applied."""

    module: nn.Module
    """The model."""
    name: str
    """The module or parameter in it."""
    cutter: Cutter
    in_partial_group: bool
    """Whether it is in a partial group of layers, see ``_find_groups``."""
    in_block: bool
    """Whether it is in a block, where shards must be of equal size."""


def _apply(style: Style, site: _Site) -> set[nn.Module]:
    """Applies a style.

    Returns:
        The modules whose parameters are handled: ``share_sequence`` need not sum their gradients.
    """
    if _is_parameter(site.module, site.name):
        owner, _, key = site.name.rpartition(".")
        dims = site.module.get_parameter(site.name).ndim
        dim = max(dims - 2, 0) if style.meaning.cuts == "outputs" else dims - 1
        site.cutter.cut(site.module.get_submodule(owner), key, dim, owner, style.blocks)
        return set()
    target = site.module.get_submodule(site.name)
    meaning = style.meaning
    if meaning.cuts:
        return _apply_linear(target, style, site)
    if meaning.layer is not None:
        _check_type(target, meaning.layer, site.name, style.kind)
    return meaning.apply(target, site) if meaning.apply else set()


def _apply_linear(module: nn.Module, style: Style, site: _Site) -> set[nn.Module]:
    """Cuts a linear layer and, of each adapter's two matrices, the one at the side that is cut.

    The second matrix of an adapter has the layer's outputs, the first one its inputs; the other stays whole.
    """
    layer, firsts, seconds = _linear_parts(module, site.name, style.kind)
    cutter = site.cutter
    blocks = style.blocks
    is_whole = style.meaning.is_whole
    settings = {"tp_ranks": cutter.ranks, "tp_parts": site.in_partial_group}
    if style.meaning.cuts == "inputs":
        for linear in (layer, *firsts):
            cutter.cut(linear, "weight", 1, site.name, blocks)
            styles.change_class(linear, styles.Rowwise, tp_whole_input=is_whole, **settings)
        return {layer, *firsts}
    even = site.in_block and not is_whole
    for linear in (layer, *seconds):
        if blocks == 1 or linear is layer:
            cutter.cut(linear, "weight", 0, site.name, blocks, even)
        if blocks == 1:
            cutter.cut(linear, "bias", 0, site.name, even=even)
        styles.change_class(linear, styles.Colwise, tp_joined=is_whole, tp_blocks=blocks, **settings)
    return {layer, *seconds}


def _linear_parts(module: nn.Module, name: str, kind: str) -> tuple[nn.Linear, list[nn.Linear], list[nn.Linear]]:
    """A linear layer, and the first and second matrices of its LoRA adapters."""
    layer = cast("nn.Linear", _base_layer(module))
    _check_type(layer, nn.Linear, name, kind)
    if layer is module:
        return layer, [], []
    lora_prefixes = ("base_layer.", "lora_A.", "lora_B.")
    other_parameters = [
        parameter_name
        for parameter_name, _ in module.named_parameters()
        if not parameter_name.startswith(lora_prefixes)
    ]
    if other_parameters or getattr(module, "lora_variant", None) or not hasattr(module, "lora_A"):
        raise ConfigError(
            f"{name}: tensor parallelism cuts plain LoRA adapters only, not {type(module).__name__} with "
            f"{', '.join(other_parameters) or 'a variant of LoRA'}: set train.tensor_parallel_size to 1 or take plain "
            "LoRA"
        )
    firsts = list(cast("Mapping[str, nn.Linear]", module.lora_A).values())
    seconds = list(cast("Mapping[str, nn.Linear]", module.lora_B).values())
    return layer, firsts, seconds


def _check_type(module: nn.Module, expected: type[nn.Module], name: str, kind: str) -> None:
    if not isinstance(module, expected):
        raise _plan_error(
            f"{name} is a {type(module).__name__}, but the style {kind} is for torch.nn.{expected.__name__}"
        )


def _reduce_heads(module: nn.Module, module_styles: Mapping[str, Style], size: int) -> None:
    """Sets the numbers of heads and features that diffusers' attention reshapes by to those of one rank."""
    parents = {
        _parent_module(module, name)
        for name, style in module_styles.items()
        if style.kind == "colwise" and not _is_parameter(module, name)
    }
    for parent in parents:
        keys = ("heads", "inner_dim") if isinstance(getattr(parent, "heads", None), int) else ()
        if hasattr(parent, "processor"):  # some have other names in diffusers; transformers has no processors
            keys = (*keys, "num_heads", "num_kv_heads", "kv_heads")
        for key in keys:
            if isinstance(getattr(parent, key, None), int):
                setattr(parent, key, getattr(parent, key) // size)


def _base_layer(module: nn.Module) -> nn.Module:
    """The layer that an adapter wraps, or the module itself."""
    return getattr(module, "base_layer", module)


def _parent_module(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _is_parameter(module: nn.Module, name: str) -> bool:
    """Whether a name is that of a parameter, not of a module."""
    owner, _, key = name.rpartition(".")
    return key in module.get_submodule(owner)._parameters


def _apply_role(role: type[nn.Module], dim: int | None = None, even: bool = True) -> _Apply:
    """A function that gives a module a role of ``tensor_styles`` and cuts its weight along ``dim``, if one is given."""

    def apply(module: nn.Module, site: _Site) -> set[nn.Module]:
        if dim is not None:
            site.cutter.cut(module, "weight", dim, site.name, even=even)
        styles.change_class(module, role, tp_ranks=site.cutter.ranks)
        return set() if dim is None else {module}

    return apply


def _apply_norm(module: nn.Module, site: _Site) -> set[nn.Module]:
    is_diffusers = type(module).__name__ == "RMSNorm" and hasattr(module, "dim")
    if not is_diffusers or getattr(module, "bias", None) is not None:
        _check_type(module, nn.RMSNorm, site.name, "norm_across_heads")
    return _apply_role(styles.NormAcrossHeads, 0)(module, site)


def _apply_summed(module: nn.Module, site: _Site) -> set[nn.Module]:
    owners = {owner for owner in module.modules() if owner._parameters}
    for owner in owners:
        styles.change_class(owner, styles.Summed, tp_ranks=site.cutter.ranks)
    return owners


def _apply_latent(module: nn.Module, site: _Site) -> set[nn.Module]:
    if not site.in_partial_group:
        config = cast("PreTrainedModel", site.module).config.get_text_config()
        if not hasattr(config, "qk_rope_head_dim"):
            raise _plan_error(f"{site.name}: mla_kv_a_proj needs qk_rope_head_dim in the model's configuration")
        width = config.qk_rope_head_dim
        styles.change_class(module, styles.LatentKeyValue, tp_ranks=site.cutter.ranks, tp_rotary=width)
    return set()


def _apply_experts(module: nn.Module, site: _Site) -> set[nn.Module]:
    if hasattr(module, "base_layer"):
        raise ConfigError(
            f"{site.name}: tensor parallelism cannot cut experts with adapters: leave model.lora.target_parameters "
            "empty, or set train.tensor_parallel_size to 1"
        )
    return _apply_role(styles.Experts)(module, site)


def _apply_local(module: nn.Module, site: _Site) -> set[nn.Module]:
    if site.in_partial_group:
        styles.change_class(module, styles.Summed, tp_ranks=site.cutter.ranks)
        return {module}
    return _apply_role(styles.Local)(module, site)


_Apply = Callable[[nn.Module, _Site], set[nn.Module]]
"""Changes a module in place. Returns the modules whose parameters are handled, as ``_apply``."""


@dataclass(frozen=True)
class Meaning:
    """The effect of a style: it cuts a linear layer or bare parameter, or applies a function to a module."""

    cuts: Literal["", "outputs", "inputs"] = ""
    is_whole: bool = False
    """Whether outputs are gathered after the layer, or inputs come whole; otherwise both are cut outside, too."""
    blocks: int = 1
    """Equal blocks of a fused matrix where the plan does not say."""
    leaves_sums: bool = False
    """Whether it can leave all sums over ranks to the ends of its group of layers, see ``_find_groups``."""
    layer: type[nn.Module] | None = None
    """The class of module that it is restricted to."""
    apply: _Apply | None = None
    """Applied where nothing is cut."""


STYLES: dict[str, Meaning] = {
    # Linear layers and bare parameters. Logits of a cut head stay cut; ``token_log_probs`` supports such a head.
    "colwise": Meaning("outputs", leaves_sums=True),
    "packed_colwise": Meaning("outputs", blocks=2, leaves_sums=True),
    "colwise_gather_output": Meaning("outputs", is_whole=True),
    "colwise_rep": Meaning("outputs", is_whole=True),
    "rowwise": Meaning("inputs", leaves_sums=True),
    "packed_rowwise": Meaning("inputs", blocks=2, leaves_sums=True),
    "rowwise_split_input": Meaning("inputs", is_whole=True),
    "rowwise_rep": Meaning("inputs", is_whole=True),
    # Embeddings whose vocabulary, or features, are cut.
    "embedding_rowwise": Meaning(layer=nn.Embedding, apply=_apply_role(styles.EmbeddingRowwise, 0, even=False)),
    "embedding_colwise": Meaning(layer=nn.Embedding, apply=_apply_role(styles.EmbeddingColwise, 1)),
    # A norm over the features of all heads.
    "norm_across_heads": Meaning(apply=_apply_norm, leaves_sums=True),
    # Whole weights that are used on cut heads.
    "replicated_with_grad_allreduce": Meaning(apply=_apply_summed, leaves_sums=True),
    # The latent projection of multi-head latent attention.
    "mla_kv_a_proj": Meaning(apply=_apply_latent, leaves_sums=True),
    # Experts whose parameters are cut; experts without weights.
    "moe_tp_experts": Meaning(apply=_apply_experts),
    "moe_identity_expert": Meaning(apply=_apply_role(styles.IdentityExpert)),
    # A module that uses a bare parameter which is cut.
    "local_params": Meaning(apply=_apply_local, leaves_sums=True),
    # Outputs that are summed; nothing; a block that returns several views of one tensor.
    "all_reduce": Meaning(apply=_apply_role(styles.AllReduced)),
    "replicate": Meaning(leaves_sums=True),
    "separate_outputs": Meaning(apply=_apply_role(styles.SeparateOutputs)),
    # A module without weights whose outputs are for all heads.
    "cut_heads": Meaning(apply=_apply_role(styles.CutHeads)),
}


def _find_groups(blocks: Mapping[str, nn.Module], module_styles: Mapping[str, Style]) -> dict[str, bool]:
    """The groups of layers that need the whole sequence, by name, and whether each is partial.

    A group is a child of a block (attention, feed-forward). It is partial if all its styles can leave their sums to its
    ends: it has a gather before it and a reduce-scatter after it. Others, such as mixtures of experts whose router must
    see whole gradients, run as without sequence parallelism: a gather before them, and each rank keeps its part of the
    output.
    """
    groups = {}
    for name, block in blocks.items():
        if block._parameters:
            raise ConfigError(
                f"train.sequence_parallel: block {name} has parameters of its own ({', '.join(block._parameters)}), "
                "which would be used on a part of the sequence: set it to false"
            )
        for child, submodule in block.named_children():
            meanings = [
                style.meaning for key, style in module_styles.items() if f"{key}.".startswith(f"{name}.{child}.")
            ]
            if any(True for _ in submodule.parameters()) and (
                meanings or not type(submodule).__name__.endswith("Norm")
            ):
                sums = any(meaning.cuts == "inputs" for meaning in meanings)
                groups[f"{name}.{child}"] = sums and all(meaning.leaves_sums for meaning in meanings)
    return groups
