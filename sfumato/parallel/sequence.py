"""Sequence parallelism of whole models: cuts sequences, distributes every attention, and fails when one bypasses it.

transformers models get their attention from a registry, which is a public extension point, and the models' code stays
as it is. Language models hold head-tail parts of packed rows, and position ids tell where documents begin. With Ulysses
alone a rank has whole rows of some heads, so that the model's attention of one process computes windows, soft caps and
sinks. Diffusion transformers: ``diffusion_sequence.py``.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, cast

from torch import Tensor, nn
from torch.nn import functional
from torch.utils.weak import WeakIdKeyDictionary

from sfumato.config.open_mappings import Keywords
from sfumato.errors import ConfigError
from sfumato.parallel.attention import (
    Schedule,
    causal_schedule,
    check_heads,
    sequence_attention,
    shard_embeddings,
)
from sfumato.parallel.kernels import packed_causal
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.packed_rows import head_tail_chunks
from sfumato.parallel.plan import ParallelPlan
from sfumato.parallel.positions import document_bounds, lengths_between, whole_positions
from sfumato.parallel.row_attention import CHANGES, OFF, SEQUENCE_PARALLELISM, WINDOWS, RowAttention, window_for_mask
from sfumato.parallel.sequence_state import SequenceState

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

ATTENTION = "sfumato_sequence_parallel"
"""Name of the attention in transformers' registries, and of the attribute by which attention modules find the state
that they share (``_LanguageSequence``)."""


def apply_sequence_parallel(module: nn.Module, mesh: Mesh, plan: ParallelPlan) -> None:
    """Makes a model compute on this rank's part of each sequence; changes it in place.

    A transformers model is called with parts from ``shard_sequence``; a multimodal one with whole rows, and each rank
    returns the logits of its part. A diffusers model is called with whole inputs and returns whole outputs. Gradients
    must be summed over the ranks that share the sequence, as everywhere.

    Args:
        module: an unmodified transformers or diffusers model, after tensor parallelism.
        mesh: the ranks, with a process group.
        plan: the blocks; for diffusion transformers the cuts, and which attention reads a whole text.

    Raises:
        ConfigError: when heads do not divide, or the model has attention of a kind that cannot be shared. Attention
            that bypasses registry and processors is found in the first forward pass.
    """
    if plan.sequence:
        from sfumato.parallel.diffusion_sequence import DiffusionSequence  # other modalities do without it

        shared = DiffusionSequence(module, mesh, plan)
    elif hasattr(module, "set_attn_implementation"):
        shared = _LanguageSequence(module.get_submodule(plan.decoder), mesh, plan)
    else:
        raise ConfigError(f"{type(module).__name__} is no transformers model: give its plan a sequence, or {OFF}")
    shared.plug_in()


class _LanguageSequence(SequenceState):
    """A causal transformers model. Every rank holds the parts of ``shard_sequence``."""

    seam = "calls transformers' AttentionInterface"

    def __init__(self, module: nn.Module, mesh: Mesh, plan: ParallelPlan) -> None:
        super().__init__(module, mesh, plan)
        # By the tensor of position ids; an entry goes when the batch does.
        self._schedules = WeakIdKeyDictionary()
        self._signature = inspect.signature(module.forward)
        self.of_rows: RowAttention | None = None
        """The model's attention of one process; None where no rank has whole rows."""
        self._whole: Tensor | None = None
        """Position ids [B or 1, S] of the whole rows of a multimodal model."""

    def plug_in(self) -> None:
        """Registers the attention, switches the model to it and refuses unsupported models."""
        from transformers import AttentionInterface, AttentionMaskInterface

        model = cast("PreTrainedModel", self.module)
        config = model.config.get_text_config()
        if self.groups.ring_size == 1:
            self.of_rows = RowAttention.find(cast("str", config._attn_implementation))
        self._check_config(config)
        settings = (*CHANGES, "sliding_window")
        AttentionInterface.register(ATTENTION, packed_causal(_language_attention, SEQUENCE_PARALLELISM, OFF, settings))
        AttentionMaskInterface.register(ATTENTION, window_for_mask)
        model.set_attn_implementation(ATTENTION)
        if config._attn_implementation != ATTENTION:
            raise ConfigError(f"{self.name} does not let its attention be replaced: {OFF}")
        for block in self.blocks.values():
            for submodule in block.modules():
                setattr(submodule, ATTENTION, self)
        if self.plan.decoder:
            self.module.register_forward_pre_hook(self._cut, with_kwargs=True)
        self.module.register_forward_pre_hook(self._start, with_kwargs=True)
        self.module.register_forward_hook(self._finish)

    def _check_config(self, config: PreTrainedConfig) -> None:
        # A configuration whose layers differ in heads has no number of heads of its own.
        layers = config.per_layer_config if getattr(config, "is_heterogeneous", False) else [config]
        heads = {getattr(layer, "num_attention_heads", None) for layer in layers} - {None}
        if not heads:
            raise ConfigError(f"{self.name} has no attention, whose heads or keys ranks could share: {OFF}")
        for num_heads in heads:
            check_heads(self.name, cast("int", num_heads) // self.mesh.layout.tp, self.groups.ulysses_size)
        window = getattr(config, "sliding_window", None) is not None
        kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
        unsupported = sorted(set(kinds) - ({"full_attention"} if self.of_rows is None else {"full_attention", WINDOWS}))
        if unsupported:
            remedy = f"{OFF}, or take train.ulysses_parallel_size alone, with model.attention packed"
            raise ConfigError(
                f"{self.name} has {', '.join(unsupported)}, unknown to {SEQUENCE_PARALLELISM}: "
                f"{remedy if unsupported == [WINDOWS] else OFF}"
            )
        if getattr(config, "attention_dropout", 0.0):
            raise ConfigError(
                f"{self.name} has attention_dropout {config.attention_dropout}, which cannot be shared among ranks: "
                "set it to 0 in the model's config.json"
            )

    def _cut(
        self, module: nn.Module, args: tuple[object, ...], kwargs: Keywords
    ) -> tuple[tuple[object, ...], Keywords]:
        """Hook before the language model inside a multimodal one: cuts its inputs, which hold images and text."""
        if args or kwargs.get("inputs_embeds") is None or kwargs.get("position_ids") is None:
            raise ConfigError(f"{self.name} is not given inputs_embeds and position_ids by name: {OFF}")
        if kwargs.get("attention_mask") is not None:
            raise ConfigError(
                f"{self.name} is given a mask by the model around it, unknown to {SEQUENCE_PARALLELISM}: {OFF}"
            )
        positions = kwargs["position_ids"]
        self._whole = positions if positions.ndim == 2 else positions[0]
        return args, kwargs | shard_embeddings(kwargs, self.mesh)

    def _start(self, module: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        if (self._signature.bind_partial(*args, **kwargs).arguments | kwargs).get("position_ids") is None:
            raise ConfigError(f"{self.name} was called without position_ids: cut the batch with shard_sequence")

    def _finish(self, module: nn.Module, args: object, output: object) -> None:
        if not self.checked:
            self.check()

    def schedule(self, position_ids: Tensor) -> tuple[Schedule, Tensor]:
        """The schedule for this rank's position ids [B or 1, S], and the position ids of whole rows.

        Computed once for all layers of a forward pass, which share the tensor of position ids; ranks exchange it where
        it is not known otherwise.
        """
        layout = self._schedules.get(position_ids)
        if layout is None:
            row_positions = whole_positions(position_ids) if self._whole is None else self._whole
            row_positions = self._join_positions(position_ids) if row_positions is None else row_positions
            layout = causal_schedule(self.groups, _document_lengths(row_positions)), row_positions
            self._schedules[position_ids] = layout
        return layout

    def _join_positions(self, position_ids: Tensor) -> Tensor:
        """Position ids [B or 1, S of all ranks] of whole rows, exchanged among the ranks."""
        lengths = [rank_lengths[0] for rank_lengths in self.gather_lengths(position_ids.shape[1])]
        chunks = head_tail_chunks(sum(lengths), self.groups.size)
        pairs = [(chunks[rank], chunks[-1 - rank]) for rank in range(len(lengths))]
        if lengths != [len(head) + len(tail) for head, tail in pairs]:
            raise ConfigError(f"{self.name}: ranks hold {lengths} tokens, which is no cut of shard_sequence")
        padded = functional.pad(position_ids, (0, max(lengths) - position_ids.shape[1]))
        joined = position_ids.new_empty(position_ids.shape[0], sum(lengths))
        for part, (head, tail) in zip(self.gather(padded), pairs, strict=True):
            joined[:, head.start : head.stop] = part[:, : len(head)]
            joined[:, tail.start : tail.stop] = part[:, len(head) : len(head) + len(tail)]
        return joined


def _document_lengths(position_ids: Tensor) -> list[list[int]]:
    """Lengths of documents by row. A document begins where a position is not the previous one plus 1."""
    return [lengths_between(bounds) for bounds in document_bounds(position_ids)]


def _language_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    position_ids: Tensor,
    scale: float,
    pattern: int | None,
    softcap: float | None,
    s_aux: Tensor | None,
    sliding_window: int | None,
) -> Tensor:
    """Attention of this rank's tokens over those of all ranks, for ``packed_causal``; ``pattern`` is a window."""
    shared: _LanguageSequence | None = vars(module).get(ATTENTION)
    if shared is None:
        name = type(module).__name__
        raise ConfigError(f"{name} is not in a block of its model's plan ({ATTENTION}): add its block to the plan")
    shared.called.add(module)
    schedule, row_positions = shared.schedule(position_ids)
    changes = {"softcap": softcap, "s_aux": s_aux, "sliding_window": sliding_window if pattern is None else pattern}
    active = [name for name, change in changes.items() if change is not None]
    if not active:
        # Contiguous, as transformers' own functions return it: some models take a view of it.
        return sequence_attention(query, key, value, schedule, scale).transpose(1, 2).contiguous()
    if shared.of_rows is None or pattern != changes["sliding_window"]:
        raise ConfigError(f"{type(module).__name__} uses {', '.join(active)}, unknown to {SEQUENCE_PARALLELISM}: {OFF}")
    return shared.of_rows(module, (query, key, value), schedule, row_positions, scale, pattern, softcap, s_aux)
