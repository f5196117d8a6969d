"""Sequence parallelism of diffusion transformers: cut and joined where their plan says.

diffusers' attention modules call torch's attention from a processor, which is a public extension point; the models'
code stays as it is.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from sfumato.config.open_mappings import Keywords
from sfumato.errors import ConfigError
from sfumato.parallel.attention import (
    Schedule,
    attention_of_rows,
    check_heads,
    full_schedule,
    sequence_attention,
)
from sfumato.parallel.mesh import Mesh, range_of_rank
from sfumato.parallel.packed_rows import SIZES
from sfumato.parallel.plan import Cuts, Gather, ParallelPlan, Split, find_modules, reads_whole
from sfumato.parallel.row_attention import OFF
from sfumato.parallel.sequence_state import SequenceState


class DiffusionSequence(SequenceState):
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
        if self.plan.masks == "whole" and self.groups.ring_size > 1:
            raise ConfigError(
                f"{self.name} has attention masks that differ from query to query, unknown to a ring: set "
                "train.context_parallel_size to 1 and take train.ulysses_parallel_size"
            )
        self.module.register_forward_pre_hook(self._start)
        for pattern, cuts in self.plan.sequence.items():
            for name, target in self._find_modules(pattern).items():
                self._install_hook(name, target, cuts)
        replicated = {name for pattern in self.plan.replicated_context for name in self._find_modules(pattern)}
        for name, submodule in self.module.named_modules():
            if getattr(submodule, "processor", None) is not None:
                self._wrap(name, submodule, name in replicated)
        self.blocks = {name: block for name, block in self.blocks.items() if not reads_whole(name, block, replicated)}
        self._check_attention()
        # Also after an error: the guard of ``_start`` would stay on for all that runs later.
        self.module.register_forward_hook(self._finish, always_call=True)

    def _find_modules(self, pattern: str) -> dict[str, nn.Module]:
        matching = find_modules(self.module, pattern)
        if not matching:
            raise ConfigError(f"{self.name} has no module {pattern!r}, which its plan for sequence parallelism names")
        return matching

    def _install_hook(self, name: str, target: nn.Module, cuts: Cuts | Gather | tuple[Cuts, Gather]) -> None:
        if isinstance(cuts, tuple):
            for cut in cuts:
                self._install_hook(name, target, cut)
            return
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
        # Arguments stay positional or by name, as another hook may expect them.
        names = [*signature.parameters][: len(args)]
        values: Keywords = {**dict(zip(names, args, strict=False)), **kwargs}
        for key, cut in cuts.items():
            value = values.get(key)
            if value is not None and not (cut.may_lack and value.ndim <= cut.dim):
                values[key] = self._cut(f"{name}.{key}", value, cut)
        return (*(values[key] for key in names), *args[len(names) :]), {key: values[key] for key in kwargs}

    def _cut_outputs(
        self, name: str, cuts: Mapping[int, Split], module: nn.Module, args: object, output: Any
    ) -> object:
        parts = [output] if isinstance(output, Tensor) else list(output)
        for index, cut in cuts.items():
            parts[index] = self._cut(f"{name}.{index}", parts[index], cut)
        return parts[0] if isinstance(output, Tensor) else tuple(parts)

    def _cut(self, place: str, value: Any, cut: Split) -> Any:
        """This rank's slice of a tensor, or of each tensor in a tuple or list, as a ``Split`` says."""
        if not cut.parts:
            return self._slice_value(place, value, cut.dim)
        lengths = [self.cut[part] for part in cut.parts]
        *whole, rest = value.split([*lengths, value.shape[cut.dim] - sum(lengths)], dim=cut.dim)
        parts = [self._slice_value(f"{place}.{index}", part, cut.dim) for index, part in enumerate(whole)]
        return torch.cat([*parts, rest], dim=cut.dim)

    def _slice_value(self, place: str, value: Any, dim: int) -> Any:
        """This rank's slice of a tensor along ``dim``, or of each tensor in a tuple or list."""
        if isinstance(value, tuple | list):
            return type(value)(self._slice_value(f"{place}.{index}", member, dim) for index, member in enumerate(value))
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
        shard_lengths = [rank_lengths[0] for rank_lengths in lengths]
        return _Join.apply(output, gather.dim, shard_lengths, self, gather.is_cut_again)

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
        mask = None if attn_mask is None else attn_mask[(None,) * (4 - attn_mask.ndim)]
        is_whole = mask is not None and self.plan.masks == "whole"
        key_mask = None if mask is None or self.plan.masks != "keys" else self._key_mask(name, mask, key.shape[2])
        lengths = self.agree(f"{name}, call {call}", query.shape[2], key.shape[2])
        all_lengths = tuple(zip(*lengths, strict=True))
        if all_lengths not in self._schedules:
            self._schedules[all_lengths] = full_schedule(self.groups, *all_lengths)
        schedule = self._schedules[all_lengths]
        self.called.add(module)
        if mask is None or key_mask is not None:
            return sequence_attention(query, key, value, schedule, scale, key_mask)
        attend = self._attend_with_whole_mask if is_whole else self._attend_to_pairs
        return attend(name, (query, key, value), schedule, scale, mask)

    def _attend_with_whole_mask(
        self, name: str, inputs: tuple[Tensor, Tensor, Tensor], schedule: Schedule, scale: float | None, mask: Tensor
    ) -> Tensor:
        """Attention with a mask [B or 1, H or 1, S or 1, S] of the whole sequence; each rank has all tokens."""
        num_tokens = sum(run.length for run in schedule.query_order)
        if schedule.query_order != schedule.key_order or mask.shape[3] != num_tokens:
            raise ConfigError(
                f"{self.name}: {name} has an attn_mask {list(mask.shape)}, which is not that of its {num_tokens} "
                f"tokens and as many keys: {OFF}"
            )

        def attend_rows(query: Tensor, key: Tensor, value: Tensor, heads: slice) -> Tensor:
            head_mask = mask if mask.shape[1] == 1 else mask[:, heads]
            is_grouped = query.shape[1] != key.shape[1]
            return _whole_attention(0, query, key, value, attn_mask=head_mask, scale=scale, enable_gqa=is_grouped)

        return attention_of_rows(attend_rows, *inputs, schedule)

    def _attend_to_pairs(
        self, name: str, inputs: tuple[Tensor, Tensor, Tensor], schedule: Schedule, scale: float | None, mask: Tensor
    ) -> Tensor:
        """Attention with a mask [B or 1, 1, S, Sk] of this rank's tokens that is a product of one of queries and one of
        keys. Where a query is masked the result is 0, as that of torch's attention."""
        queries, keys = mask.amax(3), mask.amax(2)
        problem = (
            f"{self.name}: {name} has an attn_mask {list(mask.shape)} of {mask.dtype} that is not 1 where queries and "
            f"keys are no padding and 0 elsewhere: {OFF}"
        )
        if mask.shape[1] > 1:
            raise ConfigError(problem)
        # Each mask is looked at: without padding it is a product, whatever the model makes of the padding of others.
        is_product = (mask == queries[..., None] * keys[:, :, None]).all()
        if self.checked and is_product.is_cuda:
            # the host does not wait for the device, which ends the run
            torch._assert_async(is_product, problem)  # pyright: ignore[reportPrivateImportUsage]
        elif not is_product:
            raise ConfigError(problem)
        if mask.dtype != torch.bool:
            return sequence_attention(*inputs, schedule, scale, score_factors=(queries[:, 0], keys[:, 0]))
        out = sequence_attention(*inputs, schedule, scale, keys[:, 0])
        return out.masked_fill(~queries[..., None], 0)

    def _key_mask(self, name: str, mask: Tensor, num_keys: int) -> Tensor:
        """The mask of keys [B or 1, Sk], of an attention mask [B or 1, 1, 1, Sk] that is the same for all queries.

        Raises:
            ConfigError: when it differs between queries or heads, is not of bools, or not of this rank's keys.
        """
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
    sum_over: dist.ProcessGroup | None


class _Join(torch.autograd.Function):
    """Joins the sequence on every rank. Each takes its slice of the gradient, which all have as they compute the same
    loss from it; where the sequence is cut again, gradients of ranks are summed before."""

    @staticmethod
    def forward(
        ctx: _JoinContext, shard: Tensor, dim: int, lengths: list[int], shared: SequenceState, is_cut_again: bool
    ) -> Tensor:
        ctx.sum_over = shared.group if is_cut_again else None
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
    def backward(ctx: _JoinContext, grad: Tensor) -> tuple[Tensor, None, None, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        if ctx.sum_over is not None:
            grad = grad.clone(memory_format=torch.contiguous_format)  # others may read the gradient that came in
            dist.all_reduce(grad, group=ctx.sum_over)
        return grad.narrow(ctx.dim, ctx.start, ctx.length), None, None, None, None


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
