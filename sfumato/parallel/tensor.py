"""Tensor parallelism: ranks share each matrix (Megatron-LM, arXiv 1909.08053), and activations between the matrices.

The styles of a plan are those of transformers' ``base_model_tp_plan``; a style may be followed by ``:n`` (the number of
equal blocks of a fused matrix) and by ``?`` (the pattern need not match):

=============================================  ======================================================================
``colwise``, ``packed_colwise``                linear layer, or bare parameter, whose outputs are cut. For the head:
                                               logits stay cut, see ``sfumato.parallel.vocabulary``
``colwise_gather_output`` (``colwise_rep``)    the same, and the outputs are gathered
``rowwise``, ``packed_rowwise``                linear layer, or bare parameter, whose inputs are cut; outputs are summed
``rowwise_split_input`` (``rowwise_rep``)      the same for whole inputs
``embedding_rowwise``, ``embedding_colwise``   embedding whose vocabulary, or features, are cut
``replicated_with_grad_allreduce``             whole weights used on cut heads
``norm_across_heads``                          ``nn.RMSNorm`` over the features of all heads
``mla_kv_a_proj``                              latent projection of multi-head latent attention
``moe_tp_experts``, ``moe_identity_expert``    experts whose parameters are cut; experts without weights
``local_params``                               module that uses a bare parameter which is cut
``all_reduce``, ``replicate``                  outputs that are summed; nothing
``separate_outputs``                           block that returns several views of one tensor
=============================================  ======================================================================
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from sfumato.errors import ConfigError
from sfumato.parallel import tensor_styles as styles
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.plan import ParallelPlan, find_blocks
from sfumato.parallel.shards import trainable_parameters
from sfumato.parallel.tensor_styles import Cutter, Ranks

COLWISE = {"colwise", "packed_colwise", "colwise_gather_output", "colwise_rep"}
ROWWISE = {"rowwise", "packed_rowwise", "rowwise_split_input", "rowwise_rep"}
OTHERS = {
    "embedding_rowwise",
    "embedding_colwise",
    "replicated_with_grad_allreduce",
    "norm_across_heads",
    "mla_kv_a_proj",
    "moe_tp_experts",
    "moe_identity_expert",
    "local_params",
    "all_reduce",
    "separate_outputs",
    "replicate",
}
PARTIAL = {
    "colwise",
    "packed_colwise",
    "rowwise",
    "packed_rowwise",
    "replicated_with_grad_allreduce",
    "norm_across_heads",
    "mla_kv_a_proj",
    "local_params",
    "replicate",
}
"""Styles that can leave all sums to the ends of the group of layers they stand in."""


@dataclass(frozen=True)
class Style:
    """What a plan says of one module or parameter."""

    kind: str
    blocks: int = 1
    """Equal blocks of a fused matrix."""

    @classmethod
    def of(cls, text: str, pattern: str) -> Style:
        """Reads ``kind`` or ``kind:blocks``."""
        kind, _, blocks = text.partition(":")
        if kind not in COLWISE | ROWWISE | OTHERS or (blocks and not blocks.isdigit()):
            known = ", ".join(sorted(COLWISE | ROWWISE | OTHERS))
            raise ConfigError(f"plan of tensor parallelism: {pattern!r} has the unknown style {text!r}; known: {known}")
        return cls(kind, int(blocks) if blocks else 2 if kind.startswith("packed") else 1)


def apply_tensor_parallel(module: nn.Module, mesh: Mesh, plan: ParallelPlan, sequence_parallel: bool) -> None:
    """Shares the matrices of a model among tensor-parallel ranks.

    Weights become DTensors on ``mesh.device_mesh("tp")``, cut from what each rank has, which may be on the meta device;
    other weights stay plain and whole, with equal gradients on all ranks. Trainable ones are first made equal to those
    of the first rank. What modules take and return stays plain, and, outside of groups of cut layers, whole.

    Args:
        module: an unmodified transformers or diffusers model; LoRA adapters may be in it. Changed in place.
        mesh: the ranks.
        plan: its ``tensor`` styles.
        sequence_parallel: share the activations between the blocks' groups of layers too (arXiv 2205.05198): norms and
            residuals run on this rank's part of the sequence, which need not divide; hidden states recorded between
            blocks are such parts. Language models only.

    Raises:
        ConfigError: for a style that is not known, a pattern that matches nothing, heads or matrices that do not
            divide, and models for which sequence parallelism is not right.
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
    found = match_plan(module, plan.tensor)
    _match_tied_embeddings(module, found)
    blocks = find_blocks(module, plan)
    groups = _groups(blocks, found) if sequence_parallel else {}
    _check_heads(module, found, cutter.ranks.size)
    _check_owners(module, found)
    _make_equal(module, mesh)

    inside = tuple(f"{name}." for name in blocks)
    parts = tuple(f"{name}." for name, is_partial in groups.items() if is_partial)
    handled: set[nn.Module] = set()
    for name, style in found.items():
        handled |= _apply(module, name, style, cutter, parts=name.startswith(parts), inside=name.startswith(inside))
    _reduce_heads(module, found, cutter.ranks.size)
    if sequence_parallel:
        _share_sequence(module, blocks, groups, handled, cutter.ranks)


def fsdp_placement(parameter: nn.Parameter, ranks: int) -> Shard | None:
    """Along which dimension fsdp2 cuts a weight further, for its ``shard_placement_fn``: None leaves the choice to it.

    Pieces of fused matrices and of vocabularies that do not divide cannot be cut again along the same dimension: there
    would be no DTensor placement to say where they lie.

    Args:
        parameter: after ``apply_tensor_parallel``.
        ranks: over which fsdp2 cuts.

    Raises:
        ConfigError: when the other dimension does not divide either.
    """
    if not isinstance(parameter, DTensor) or parameter.ndim == 1:
        return None
    placement, size = parameter.placements[-1], parameter.device_mesh.size(-1)
    if placement.is_replicate() or placement.dim != 0:
        return None
    if getattr(placement, "split_factor", 1) == 1 and not parameter.shape[0] % size:
        return None
    if parameter.shape[1] % ranks:
        raise ConfigError(
            f"a weight of shape {tuple(parameter.shape)} lies in uneven or several pieces on {size} tensor-parallel "
            f"ranks, so that fsdp2 must cut its dimension 1, which its {ranks} ranks do not divide "
            f"({parameter.shape[1]} / {ranks} = {parameter.shape[1] / ranks:g}): change train.tensor_parallel_size or "
            "train.data_parallel_replicate_size"
        )
    return Shard(1)


def match_plan(module: nn.Module, plan: Mapping[str, str]) -> dict[str, Style]:
    """The style of each module, or bare parameter, by its name.

    Args:
        module: the model.
        plan: patterns, where ``*`` stands for a number, with styles.

    Raises:
        ConfigError: for an unknown style, or a pattern that matches nothing and does not end in ``?``.
    """
    names = [*dict(module.named_modules()), *dict(module.named_parameters())]
    found: dict[str, Style] = {}
    for pattern, text in plan.items():
        style = Style.of(text.removesuffix("?"), pattern)
        expression = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        matching = [name for name in names if expression.fullmatch(name)]
        if not matching and not text.endswith("?"):
            raise ConfigError(
                f"plan of tensor parallelism: {pattern!r} ({text}) matches nothing in {type(module).__name__}; "
                "correct the name, or end the style with ? if not every model has it"
            )
        found |= dict.fromkeys(matching, style)
    return found


def _match_tied_embeddings(module: nn.Module, found: dict[str, Style]) -> None:
    """An embedding whose weight is that of a cut head is cut too."""
    heads = {
        id(getattr(_base(module.get_submodule(name)), "weight", None))
        for name, style in found.items()
        if style.kind in COLWISE and not _is_parameter(module, name)
    }
    for name, each in module.named_modules():
        if isinstance(each, nn.Embedding) and id(each.weight) in heads and name not in found:
            found[name] = Style("embedding_rowwise")


def _check_heads(module: nn.Module, found: Mapping[str, Style], size: int) -> None:
    for name, style in found.items():
        if style.kind != "colwise" or _is_parameter(module, name):
            continue
        parent, layer = _parent(module, name), _base(module.get_submodule(name))
        counts = [getattr(parent, "heads", None), getattr(parent, "num_heads", None)]
        width = getattr(parent, "head_dim", None)
        if isinstance(width, int) and not getattr(layer, "out_features", 0) % width:
            counts.append(layer.out_features // width)
        for heads in counts:
            if isinstance(heads, int) and heads % size:
                raise ConfigError(
                    f"{name} has {heads} heads, which train.tensor_parallel_size {size} ranks cannot share "
                    f"({heads} / {size} = {heads / size:g}): take a divisor of {heads}"
                )


def _check_owners(module: nn.Module, found: Mapping[str, Style]) -> None:
    for name, style in found.items():
        if style.kind in COLWISE | ROWWISE and _is_parameter(module, name):
            owner = name.rpartition(".")[0]
            if owner not in found or found[owner].kind not in ("moe_tp_experts", "local_params"):
                raise ConfigError(
                    f"plan of tensor parallelism: {name} is a bare parameter ({style.kind}); its module {owner} needs "
                    "the style moe_tp_experts or local_params"
                )


def _make_equal(module: nn.Module, mesh: Mesh) -> None:
    """Gives every tensor-parallel rank the trainable weights of the first: they may have been drawn at random."""
    for each in trainable_parameters(module).values():
        if not each.is_meta:
            dist.broadcast(each.data, group=mesh.group("tp"), group_src=0)


def _apply(module: nn.Module, name: str, style: Style, cutter: Cutter, parts: bool, inside: bool) -> set[nn.Module]:
    """Applies a style. Returns the modules whose parameters it has taken care of.

    Args:
        module: the model.
        name: the module or parameter in it.
        style: its style.
        cutter: cuts the weights.
        parts: whether it stands in a partial group.
        inside: whether it stands in a block, where pieces must be equal.
    """
    kind, ranks = style.kind, cutter.ranks
    if _is_parameter(module, name):
        _cut_parameter(module, name, style, cutter)
        return set()
    each = module.get_submodule(name)
    if kind in COLWISE | ROWWISE:
        return _apply_linear(each, name, style, cutter, parts, inside)
    if kind == "replicated_with_grad_allreduce":
        owners = {owner for owner in each.modules() if owner._parameters}
        for owner in owners:
            styles.become(owner, styles.Summed, tp_ranks=ranks)
        return owners
    if kind in ("embedding_rowwise", "embedding_colwise", "norm_across_heads"):
        wanted = nn.RMSNorm if kind == "norm_across_heads" else nn.Embedding
        _check_type(each, wanted, name, kind)
        getattr(styles, f"make_{kind}")(each, cutter, name)
        return {each}
    if kind == "mla_kv_a_proj":
        if not parts:
            styles.become(each, styles.LatentKeyValue, tp_ranks=ranks, tp_rotary=_rotary_width(module, name))
    elif kind == "moe_tp_experts":
        _check_experts(each, name)
        styles.become(each, styles.Experts, tp_ranks=ranks)
    elif kind == "local_params":
        if parts:
            styles.become(each, styles.Summed, tp_ranks=ranks)
            return {each}
        styles.become(each, styles.Local)
    elif kind == "moe_identity_expert":
        styles.become(each, styles.IdentityExpert, tp_ranks=ranks)
    elif kind == "all_reduce":
        styles.become(each, styles.AllReduced, tp_ranks=ranks)
    elif kind == "separate_outputs":
        styles.become(each, styles.SeparateOutputs)
    return set()


def _apply_linear(
    module: nn.Module, name: str, style: Style, cutter: Cutter, parts: bool, inside: bool
) -> set[nn.Module]:
    """Cuts a linear layer and its adapters: of an adapter's two matrices the one at the cut side."""
    layer, firsts, seconds = _linear_parts(module, name, style.kind)
    if style.kind in COLWISE:
        joined = style.kind in ("colwise_gather_output", "colwise_rep")
        settings = {"parts": parts, "even": inside and not joined, "joined": joined, "blocks": style.blocks}
        for each in (layer, *seconds):
            styles.make_colwise(each, cutter, name, adapter=each is not layer, **settings)
        return {layer, *seconds}
    whole_input = style.kind in ("rowwise_split_input", "rowwise_rep")
    for each in (layer, *firsts):
        styles.make_rowwise(each, cutter, name, parts=parts, whole_input=whole_input, blocks=style.blocks)
    return {layer, *firsts}


def _linear_parts(module: nn.Module, name: str, kind: str) -> tuple[nn.Linear, list[nn.Linear], list[nn.Linear]]:
    """A linear layer, and the first and second matrices of its LoRA adapters."""
    layer = _base(module)
    _check_type(layer, nn.Linear, name, kind)
    if layer is module:
        return layer, [], []
    known = ("base_layer.", "lora_A.", "lora_B.")
    others = [each for each, _ in module.named_parameters() if not each.startswith(known)]
    if others or getattr(module, "lora_variant", None) or not hasattr(module, "lora_A"):
        raise ConfigError(
            f"{name}: tensor parallelism cuts plain LoRA adapters only, not {type(module).__name__} with "
            f"{', '.join(others) or 'a variant of LoRA'}: set train.tensor_parallel_size to 1 or take plain LoRA"
        )
    return layer, list(module.lora_A.values()), list(module.lora_B.values())


def _cut_parameter(module: nn.Module, name: str, style: Style, cutter: Cutter) -> None:
    owner, _, own = name.rpartition(".")
    dims = module.get_parameter(name).ndim
    dim = max(dims - 2, 0) if style.kind in COLWISE else dims - 1
    cutter.cut(module.get_submodule(owner), own, dim, owner, style.blocks)


def _check_type(module: nn.Module, wanted: type[nn.Module], name: str, kind: str) -> None:
    if not isinstance(module, wanted):
        raise ConfigError(
            f"plan of tensor parallelism: {name} is a {type(module).__name__}, but the style {kind} is for "
            f"torch.nn.{wanted.__name__}"
        )


def _check_experts(experts: nn.Module, name: str) -> None:
    if hasattr(experts, "base_layer"):
        raise ConfigError(
            f"{name}: tensor parallelism cannot cut experts with adapters: leave model.lora.target_parameters empty, "
            "or set train.tensor_parallel_size to 1"
        )


def _rotary_width(module: nn.Module, name: str) -> int:
    config = module.config.get_text_config()
    if not hasattr(config, "qk_rope_head_dim"):
        raise ConfigError(f"{name}: the style mla_kv_a_proj needs qk_rope_head_dim in the model's configuration")
    return config.qk_rope_head_dim


def _reduce_heads(module: nn.Module, found: Mapping[str, Style], size: int) -> None:
    """diffusers' attention divides features by its number of heads, or inner_dim by it; it has this rank's now."""
    parents = {
        _parent(module, name)
        for name, style in found.items()
        if style.kind == "colwise" and not _is_parameter(module, name)
    }
    for each in parents:
        for key in ("heads", "inner_dim"):
            if isinstance(getattr(each, "heads", None), int) and isinstance(getattr(each, key, None), int):
                setattr(each, key, getattr(each, key) // size)


def _base(module: nn.Module) -> nn.Module:
    """The layer below an adapter."""
    return getattr(module, "base_layer", module)


def _parent(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _is_parameter(module: nn.Module, name: str) -> bool:
    owner, _, own = name.rpartition(".")
    return own in module.get_submodule(owner)._parameters


class Sequence:
    """The sequence that the model is working on, and what ranks do with their parts of it."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.length = 0
        """Tokens of all ranks together."""

    def enter(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Before the first block: keeps this rank's part of the hidden states."""
        del block
        hidden, args, kwargs = _take_input(args, kwargs)
        self.length = hidden.shape[1]
        return (styles.cut(hidden, 1, self.ranks), *args), kwargs

    def leave(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """After the last block: joins the parts."""
        del block, args
        return _on_output(lambda hidden: styles.gather(hidden, 1, self.length, self.ranks), output)


class SequenceGroup(nn.Module):
    """A group of layers that runs on the whole sequence and returns this rank's part."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        sequence, ranks = self.tp_sequence, self.tp_sequence.ranks
        # read anew in each block: before it is recomputed other sequences may have passed
        if kwargs.get("position_ids") is not None:
            sequence.length = kwargs["position_ids"].shape[-1]
        elif kwargs.get("position_embeddings") is not None:
            sequence.length = kwargs["position_embeddings"][0].shape[-2]
        hidden, args, kwargs = _take_input(args, kwargs)
        output = super().forward(styles.gather(hidden, 1, sequence.length, ranks, self.tp_sums), *args, **kwargs)
        keep = styles.scatter if self.tp_sums else styles.cut
        shape = (len(hidden), sequence.length, -1)  # some mixtures of experts return the tokens of all rows in one
        return _on_output(lambda each: keep(each.reshape(shape), 1, ranks), output)


def _take_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]:
    """The hidden states, a layer's first input, and the other inputs."""
    if args:
        return args[0], args[1:], kwargs
    return kwargs["hidden_states"], args, {name: each for name, each in kwargs.items() if name != "hidden_states"}


def _on_output(change: Callable[[torch.Tensor], torch.Tensor], output: Any) -> Any:
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def _groups(blocks: Mapping[str, nn.Module], found: Mapping[str, Style]) -> dict[str, bool]:
    """The groups of layers in each block that need the whole sequence, and whether they are partial.

    A group is a child of a block (attention, feed-forward). One whose styles all can leave their sums to its ends is
    partial: a gather before it, a reduce-scatter after it. Others, such as mixtures of experts whose router must see
    whole gradients, run as without sequence parallelism: a gather before them, and each rank keeps its part.
    """
    groups = {}
    for name, block in blocks.items():
        if block._parameters:
            raise ConfigError(
                f"train.sequence_parallel: block {name} has parameters of its own ({', '.join(block._parameters)}), "
                "which would be used on a part of the sequence: set it to false"
            )
        for child, each in block.named_children():
            kinds = {style.kind for key, style in found.items() if f"{key}.".startswith(f"{name}.{child}.")}
            if any(True for _ in each.parameters()) and (kinds or not _is_norm(each)):
                cuts = {"rowwise", "packed_rowwise"} & kinds
                groups[f"{name}.{child}"] = bool(cuts) and kinds <= PARTIAL
    return groups


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Norm")


def _share_sequence(
    module: nn.Module, blocks: Mapping[str, nn.Module], groups: dict[str, bool], handled: set[nn.Module], ranks: Ranks
) -> None:
    """Cuts the sequence where the first block begins and joins it after the last, and around each group of layers."""
    sequence = Sequence(ranks)
    for name, block in blocks.items():
        for child, each in block.named_children():
            is_partial = groups.get(f"{name}.{child}")
            if is_partial is not False:
                for owner in each.modules():
                    if owner._parameters and owner not in handled:
                        styles.become(owner, styles.Summed, tp_ranks=ranks)
            if is_partial is not None:
                styles.become(each, SequenceGroup, tp_sequence=sequence, tp_sums=is_partial)
    ordered = list(blocks.values())
    ordered[0].register_forward_pre_hook(sequence.enter, with_kwargs=True)
    ordered[-1].register_forward_hook(sequence.leave)
