"""Sequence parallelism of whole models: cuts sequences, distributes every attention, and fails when one bypasses it.

transformers models get their attention from a registry, diffusers' attention modules call torch's from a processor;
both are public extension points, and the models' code stays as it is. Language models hold head-tail parts of packed
rows, and position ids tell where documents begin. With Ulysses alone a rank has whole rows of some heads, so that the
model's attention of one process computes windows, soft caps and sinks. Diffusion transformers are cut and joined where
their plan says.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from sfumato.config.open_mappings import Keywords
from sfumato.errors import ConfigError
from sfumato.parallel.attention import (
    SIZES,
    Schedule,
    SequenceGroups,
    causal_schedule,
    check_heads,
    full_schedule,
    head_tail_chunks,
    sequence_attention,
    shard_embeddings,
)
from sfumato.parallel.kernels import packed_causal
from sfumato.parallel.mesh import Mesh, range_of_rank
from sfumato.parallel.plan import Gather, ParallelPlan, Split, find_blocks, matcher, reads_whole
from sfumato.parallel.positions import document_bounds, lengths_between, whole_positions
from sfumato.parallel.row_attention import CHANGES, OFF, UNKNOWN_TO, WINDOWS, RowAttention, window_for_mask

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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
        shared = _DiffusionSequence(module, mesh, plan)
    elif hasattr(module, "set_attn_implementation"):
        shared = _LanguageSequence(module.get_submodule(plan.decoder), mesh, plan)
    else:
        raise ConfigError(f"{type(module).__name__} is no transformers model: give its plan a sequence, or {OFF}")
    shared.plug_in()


class _Sequence:
    """State that the attention modules of one model share."""

    seam: str
    """How attention must be called so that it can be replaced, for messages."""

    def __init__(self, module: nn.Module, mesh: Mesh, plan: ParallelPlan) -> None:
        self.module = module
        self.mesh = mesh
        self.plan = plan
        self.name = type(module).__name__
        self.groups = SequenceGroups.of(mesh)
        self.group = mesh.group("cp")
        self.blocks = find_blocks(module, plan)
        self.called: set[nn.Module] = set()
        """Attention modules that have used the distributed attention."""
        self.checked = False
        """Whether the first forward pass has shown that every block used it."""

    def __deepcopy__(self, memo: dict[int, object]) -> _Sequence:
        raise ConfigError(f"{self.name} cannot be copied after it has been made sequence parallel: copy it before")

    def check(self) -> None:
        """After the first forward pass: raises ConfigError when a block did not call the distributed attention."""
        missing = [name for name, block in self.blocks.items() if self.called.isdisjoint(block.modules())]
        if missing:
            raise ConfigError(
                f"{self.name}: {', '.join(missing[:3])} ran without the distributed attention, so its tokens saw only "
                f"those of their own rank. Sequence parallelism needs attention that {self.seam}: {OFF}"
            )
        self.checked = True

    def gather(self, values: Tensor) -> list[Tensor]:
        """The tensor, of one shape, of every rank that shares the sequence."""
        gathered = [torch.empty_like(values) for _ in range(self.groups.size)]
        dist.all_gather(gathered, values.contiguous(), group=self.group)
        return gathered

    def gather_lengths(self, *lengths: int) -> list[tuple[int, ...]]:
        """The lengths of every rank, in rank order."""
        gathered = self.gather(torch.tensor(lengths, device=self.mesh.device))
        return [tuple(rank_lengths.tolist()) for rank_lengths in gathered]


class _LanguageSequence(_Sequence):
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
            self.of_rows = RowAttention.of(cast("str", config._attn_implementation))
        self._check_config(config)
        settings = (*CHANGES, "sliding_window")
        AttentionInterface.register(ATTENTION, packed_causal(_language_attention, UNKNOWN_TO, OFF, settings))
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

    def _check_config(self, config: Any) -> None:
        if not hasattr(config, "num_attention_heads"):
            raise ConfigError(f"{self.name} has no attention, whose heads or keys ranks could share: {OFF}")
        check_heads(self.name, config.num_attention_heads // self.mesh.layout.tp, self.groups.ulysses_size)
        window = getattr(config, "sliding_window", None) is not None
        kinds = getattr(config, "layer_types", None) or ["sliding_attention" if window else "full_attention"]
        unsupported = sorted(set(kinds) - ({"full_attention"} if self.of_rows is None else {"full_attention", WINDOWS}))
        if unsupported:
            remedy = f"{OFF}, or take train.ulysses_parallel_size alone, with model.attention packed"
            raise ConfigError(
                f"{self.name} has {', '.join(unsupported)}, unknown to {UNKNOWN_TO}: "
                f"{remedy if unsupported == [WINDOWS] else OFF}"
            )
        if getattr(config, "attention_dropout", 0.0):
            raise ConfigError(
                f"{self.name} has attention_dropout {config.attention_dropout}, which cannot be shared among ranks: "
                "set it to 0 in the model's config.json"
            )

    def _cut(self, module: nn.Module, args: tuple[Any, ...], kwargs: Keywords) -> tuple[tuple[Any, ...], Keywords]:
        """Hook before the language model inside a multimodal one: cuts its inputs, which hold images and text."""
        if args or kwargs.get("inputs_embeds") is None or kwargs.get("position_ids") is None:
            raise ConfigError(f"{self.name} is not given inputs_embeds and position_ids by name: {OFF}")
        if kwargs.get("attention_mask") is not None:
            raise ConfigError(f"{self.name} is given a mask by the model around it, unknown to {UNKNOWN_TO}: {OFF}")
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
            layout = causal_schedule(self.groups, _documents(row_positions)), row_positions
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


def _documents(position_ids: Tensor) -> list[list[int]]:
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
        return sequence_attention(query, key, value, schedule, scale).transpose(1, 2)
    if shared.of_rows is None or pattern != changes["sliding_window"]:
        raise ConfigError(f"{type(module).__name__} uses {', '.join(active)}, unknown to {UNKNOWN_TO}: {OFF}")
    return shared.of_rows(module, (query, key, value), schedule, row_positions, scale, pattern, softcap, s_aux)


class _DiffusionSequence(_Sequence):
    """A diffusion transformer, cut and joined by its plan."""

    seam = "calls torch's scaled_dot_product_attention from a processor"

    def __init__(self, module: nn.Module, mesh: Mesh, plan: ParallelPlan) -> None:
        super().__init__(module, mesh, plan)
        self.cut: dict[str, int] = {}
        """Whole lengths of the tensors that this forward pass has cut, by the place of the cut."""
        self._open = False
        self._guard: _Redirect | None = None
        self._lengths_by_cut: dict[str, dict[tuple[tuple[str, int], ...], list[tuple[int, ...]]]] = {}
        self._schedules: dict[tuple[tuple[int, ...], ...], Schedule] = {}

    def plug_in(self) -> None:
        """Registers hooks that cut and join the sequence, and wraps the processors."""
        self.module.register_forward_pre_hook(self._start)
        for pattern, cuts in self.plan.sequence.items():
            for name, target in self._find_modules(pattern).items():
                self._plant(name, target, cuts)
        replicated = {name for pattern in self.plan.replicated_context for name in self._find_modules(pattern)}
        for name, submodule in self.module.named_modules():
            if getattr(submodule, "processor", None) is not None:
                self._wrap(name, submodule, name in replicated)
        self.blocks = {name: block for name, block in self.blocks.items() if not reads_whole(name, block, replicated)}
        self._check_attention()
        # Also after an error: the guard of ``_start`` would stay on for all that runs later.
        self.module.register_forward_hook(self._finish, always_call=True)

    def _find_modules(self, pattern: str) -> dict[str, nn.Module]:
        fits = matcher(pattern)
        matching = {name: submodule for name, submodule in self.module.named_modules() if fits(name)}
        if not matching:
            raise ConfigError(f"{self.name} has no module {pattern!r}, which its plan for sequence parallelism names")
        return matching

    def _plant(self, name: str, target: nn.Module, cuts: Mapping[str | int, Split] | Gather) -> None:
        if isinstance(cuts, Gather):
            target.register_forward_hook(partial(self._join, name, cuts))
            return
        inputs = cast("dict[str, Split]", {key: cut for key, cut in cuts.items() if not cut.output})
        outputs = cast("dict[int, Split]", {key: cut for key, cut in cuts.items() if cut.output})
        signature = inspect.signature(target.forward)  # before recomputation and compilation replace it
        unknown = set(inputs) - set(signature.parameters)
        if unknown:
            raise ConfigError(f"{self.name}: {name or 'the model'} has no input {', '.join(map(str, unknown))} to cut")
        if inputs:
            target.register_forward_pre_hook(partial(self._cut_inputs, name, inputs, signature), with_kwargs=True)
        if outputs:
            target.register_forward_hook(partial(self._cut_outputs, name, outputs))

    def _cut_inputs(
        self,
        name: str,
        cuts: Mapping[str, Split],
        signature: inspect.Signature,
        _: nn.Module,
        args: tuple[object, ...],
        kwargs: Mapping[str, object],
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        bound = signature.bind(*args, **kwargs)
        for key, cut in cuts.items():
            value = bound.arguments.get(key)
            if value is not None and not (cut.may_lack and value.ndim <= cut.dim):
                bound.arguments[key] = self._part(f"{name}.{key}", value, cut.dim)
        return bound.args, bound.kwargs

    def _cut_outputs(self, name: str, cuts: Mapping[int, Split], module: nn.Module, args: object, output: Any) -> Any:
        parts = [output] if isinstance(output, Tensor) else list(output)
        for index, cut in cuts.items():
            parts[index] = self._part(f"{name}.{index}", parts[index], cut.dim)
        return parts[0] if isinstance(output, Tensor) else tuple(parts)

    def _part(self, place: str, value: Any, dim: int) -> Any:
        """This rank's slice of a tensor along ``dim``, or of each tensor in a tuple or list."""
        if isinstance(value, tuple | list):
            return type(value)(self._part(f"{place}.{index}", member, dim) for index, member in enumerate(value))
        total = value.shape[dim]
        size = self.groups.size
        rank = self.groups.rank
        if total < size:
            raise ConfigError(f"{self.name}: {total} tokens at {place} cannot be shared by {size} ranks: {SIZES}")
        self.cut[place] = total
        self._open = True
        tokens = range_of_rank(total, rank, size)
        return value.narrow(dim, tokens.start, len(tokens)).contiguous()

    def _join(self, name: str, gather: Gather, module: nn.Module, args: object, output: object) -> Tensor:
        if not isinstance(output, Tensor):
            raise ConfigError(f"{self.name}: {name} returns {type(output).__name__}; only a tensor can be joined")
        lengths = self.agree(name, output.shape[gather.dim])
        self._open = False
        return _Join.apply(output, gather.dim, [rank_lengths[0] for rank_lengths in lengths], self)

    def _wrap(self, name: str, module: nn.Module, whole: bool) -> None:
        if isinstance(module.processor, nn.Module):
            kind = type(module.processor).__name__
            raise ConfigError(
                f"{self.name}: the processor {kind} of {name} has weights of its own: remove it, or {OFF}"
            )
        heads = getattr(module, "heads", None)
        if isinstance(heads, int) and not whole:
            check_heads(f"{self.name}: {name}", heads, self.groups.ulysses_size)
        attention = cast(
            "Callable[..., Tensor]",
            _whole_attention if whole else torch.compiler.disable(partial(self._attention, name, module)),
        )
        cast("Any", module).set_processor(
            RedirectedProcessor(cast("Callable[..., object]", module.processor), attention, name)
        )

    def _check_attention(self) -> None:
        """Raises ConfigError for attention in a block that has no processor; it is recognised by its class name."""
        for block_name, block in self.blocks.items():
            owned = {
                part for submodule in block.modules() if hasattr(submodule, "processor") for part in submodule.modules()
            }
            for name, submodule in block.named_modules():
                kind = type(submodule).__name__
                inner = any(hasattr(part, "processor") for part in submodule.modules())
                if re.search(r"Attention|Attn", kind) and submodule not in owned and not inner:
                    where = f"{self.name}: {block_name}.{name} is a {kind} without processor"
                    raise ConfigError(f"{where}; sequence parallelism needs attention that {self.seam}: {OFF}")

    def _start(self, module: nn.Module, args: object) -> None:
        self.cut = {}
        self._open = False
        if not self.checked:
            # Until ``_finish``, catches calls of torch's attention that do not come from a wrapped processor.
            self._guard = _Redirect(self._unwrapped_attention)
            self._guard.__enter__()

    def _finish(self, module: nn.Module, args: object, output: object) -> None:
        guard = self._guard
        self._guard = None
        if guard is not None:
            guard.__exit__(None, None, None)
        if not self.checked and output is not None:
            self.check()

    def _unwrapped_attention(self, call: int, *args: Any, **kwargs: Any) -> Tensor:
        if self._open:
            raise ConfigError(
                f"{self.name} calls scaled_dot_product_attention outside of a processor while its sequence is cut, so "
                f"tokens would see only those of their own rank: {OFF}"
            )
        return functional.scaled_dot_product_attention(*args, **kwargs)

    def _attention(
        self,
        name: str,
        module: nn.Module,
        call: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        """Replaces torch's function, with the same arguments, for this rank's tokens; ``call`` numbers calls of one
        processor."""
        where = f"{self.name}: {name}"
        if dropout_p or is_causal:
            feature = "dropout" if dropout_p else "is_causal"
            raise ConfigError(f"{where} uses {feature}, unknown to sequence parallelism: {OFF}")
        if not self.cut:
            raise ConfigError(f"{where} ran before the sequence was cut: name it in replicated_context of the plan")
        mask = None if attn_mask is None else self._key_mask(name, attn_mask, key.shape[2])
        lengths = self.agree(f"{name}, call {call}", query.shape[2], key.shape[2])
        all_lengths = tuple(zip(*lengths, strict=True))
        if all_lengths not in self._schedules:
            self._schedules[all_lengths] = full_schedule(self.groups, *all_lengths)
        self.called.add(module)
        return sequence_attention(query, key, value, self._schedules[all_lengths], scale, mask)

    def _key_mask(self, name: str, mask: Tensor, num_keys: int) -> Tensor:
        """The mask of keys [B or 1, Sk], of an attention mask that is the same for all queries and heads.

        Raises:
            ConfigError: when it differs between queries or heads, is not of bools, or not of this rank's keys.
        """
        mask = mask[(None,) * (4 - mask.ndim)]
        same = all(size == 1 or stride == 0 for size, stride in zip(mask.shape[1:3], mask.stride()[1:3], strict=True))
        if mask.dtype != torch.bool or not same or mask.shape[3] != num_keys:
            raise ConfigError(
                f"{self.name}: {name} has an attn_mask {list(mask.shape)} of {mask.dtype}; sequence parallelism "
                f"honours bool masks [B, 1, 1, {num_keys}] of this rank's keys only: {OFF}"
            )
        return mask[:, 0, 0]

    def agree(self, place: str, *lengths: int) -> list[tuple[int, ...]]:
        """These lengths on every rank. Exchanged once for each combination of cuts, since it costs a synchronisation.

        Recomputation in the backward pass may follow the forward pass of another batch, so ``cut`` cannot be relied on
        there. Where all earlier exchanges at this place had one result, that is taken; else ranks exchange again, which
        all of them do, since they know the same results.
        """
        lengths_by_cut = self._lengths_by_cut.setdefault(place, {})
        if torch._C._current_graph_task_id() == -1:  # not within a backward pass
            key = tuple(self.cut.items())
            if key not in lengths_by_cut:
                lengths_by_cut[key] = self.gather_lengths(*lengths)
            agreed = lengths_by_cut[key]
        else:
            answers = list(lengths_by_cut.values())
            is_unanimous = bool(answers) and all(answer == answers[0] for answer in answers)
            agreed = answers[0] if is_unanimous else self.gather_lengths(*lengths)
        if agreed[self.groups.rank] != lengths:
            raise RuntimeError(f"{place}: lengths {lengths} where {agreed[self.groups.rank]} were agreed on")
        return agreed


class _JoinContext(FunctionCtx):
    """What ``_Join`` keeps for its backward pass."""

    dim: int
    start: int
    length: int


class _Join(torch.autograd.Function):
    """Joins the sequence on every rank. All compute the same loss from it, so each takes its slice of the gradient."""

    @staticmethod
    def forward(ctx: _JoinContext, shard: Tensor, dim: int, lengths: list[int], shared: _Sequence) -> Tensor:
        ctx.dim = dim
        ctx.start = sum(lengths[: shared.groups.rank])
        ctx.length = shard.shape[dim]
        moved = shard.movedim(dim, 0)
        # Collectives want one shape on all ranks.
        padded_shard = moved.new_zeros(max(lengths), *moved.shape[1:])
        padded_shard[: len(moved)] = moved
        parts = zip(shared.gather(padded_shard), lengths, strict=True)
        return torch.cat([padded[:length].movedim(0, dim) for padded, length in parts], dim=dim)

    @staticmethod
    def backward(ctx: _JoinContext, grad: Tensor) -> tuple[Tensor, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return grad.narrow(ctx.dim, ctx.start, ctx.length), None, None, None


def _whole_attention(call: int, *args: Any, **kwargs: Any) -> Tensor:
    """torch's attention, bypassing the redirection: keys and values are whole on every rank."""
    with torch._C.DisableTorchFunction():
        return functional.scaled_dot_product_attention(*args, **kwargs)


class _Redirect(TorchFunctionMode):
    """While active, calls of torch's attention go to another function, with the number of the call as argument."""

    def __init__(self, attention: Callable[..., Tensor]) -> None:
        super().__init__()
        self.attention = attention
        self.num_calls = 0

    def __torch_function__(
        self,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        if function is functional.scaled_dot_product_attention:
            self.num_calls += 1
            return self.attention(self.num_calls, *args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


class RedirectedProcessor:
    """Runs an attention module's own processor with another function in place of torch's attention."""

    def __init__(self, processor: Callable[..., object], attention: Callable[..., Tensor], name: str) -> None:
        self.processor = processor
        self.attention = attention
        self.name = name

        def run(*args: object, **kwargs: object) -> object:
            return type(self).__call__(self, *args, **kwargs)

        # diffusers looks at the signature of ``processor.__call__`` and passes only the arguments that are in it.
        run.__signature__ = inspect.signature(processor)  # pyright: ignore[reportFunctionMemberAccess]
        self.__dict__["__call__"] = run

    def __getattr__(self, name: str) -> Any:
        if name == "processor":  # not set yet while a copy is made: ``getattr`` below would recurse for ever
            raise AttributeError(name)
        return getattr(self.processor, name)

    def __call__(self, *args: object, **kwargs: object) -> object:
        redirect = _Redirect(self.attention)
        with redirect:
            output = self.processor(*args, **kwargs)
        if not redirect.num_calls:
            raise ConfigError(
                f"{type(self.processor).__name__} of {self.name} does not call torch's scaled_dot_product_attention, "
                f"so tokens would see only those of their own rank: take diffusers' native attention backend, or {OFF}"
            )
        return output
