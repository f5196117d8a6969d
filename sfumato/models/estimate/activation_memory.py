"""How many bytes wait for the backward pass, found out by running a model on tensors without memory.

The model runs whole, on torch's fake tensors: shapes, dtypes, views and what autograd saves are real, numbers are not.
What is saved is counted once for each storage, block by block. Of equal blocks only some run, since what the others
save is known from these: a model of 61 layers has two or three kinds of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers import DynamicCache

from sfumato.parallel.memory import ATTENTION, COMMUNICATION, MATMUL, is_converted_weight, storage_of
from sfumato.parallel.shards import local

STAND_IN = "sfumato_stand_in"
"""Name of the attention that takes the place of the real one."""


@dataclass
class BlockBytes:
    """What one block keeps in each mode of ``train.activation_checkpointing``."""

    none: int = 0
    selective: int = 0
    full: int = 0
    """The inputs of the block."""
    copies: int = 0
    """Weights that autocast has converted and that wait too."""


@dataclass
class SavedBytes:
    """What a micro-batch keeps until its backward pass."""

    blocks: list[BlockBytes] = field(default_factory=list)
    """Bytes of each block, in order."""
    before: int = 0
    """Saved before the first block: the embedding."""
    after: int = 0
    """Saved after the last block: the last norm, logits, the loss."""
    copies: int = 0
    """Weights that autocast has converted and that wait too, those outside of blocks included."""

    def kept(self, mode: str) -> list[int]:
        """Bytes of each block in a mode."""
        return [getattr(block, mode) for block in self.blocks]


def count_saved(module: nn.Module, blocks: Mapping[str, nn.Module], run: Callable[[], Any]) -> SavedBytes:
    """Runs a forward pass and counts what autograd saves. Inside ``FakeTensorMode``, after ``make_fake``.

    Of equal blocks two are run.

    Args:
        module: what holds the weights, which do not count.
        blocks: its repeated blocks, in the order in which they run.
        run: the forward pass with the loss.
    """
    counter = _Counter(module, len(blocks))
    hooks = [hook for index, block in enumerate(blocks.values()) for hook in counter.watch(block, index)]
    try:
        with (
            run_some(blocks, counter.record_block, counter.repeat_block),
            torch.autograd.graph.saved_tensors_hooks(counter.pack, lambda packed: packed),
            counter,
        ):
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return counter.saved


class _Recorded(DynamicCache):
    """Keys and values that layers hand over, by their bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.since, self.total = 0, 0

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> Any:
        self.since += key_states.nbytes + value_states.nbytes
        return super().update(key_states, value_states, *args, **options)


@torch.no_grad()
def count_cached(module: nn.Module, blocks: Mapping[str, nn.Module], run: Callable[[Any], Any]) -> int:
    """Runs a forward pass and counts the keys and values that layers hand to a cache of transformers, in bytes.

    Inside ``FakeTensorMode``, after ``make_fake``. Of equal blocks two are run.

    Args:
        module, blocks: as for ``count_saved``.
        run: the forward pass, with the cache that it is given.
    """
    cache = _Recorded()

    def ran(_index: int, _outputs: list[Tensor]) -> int:
        num_bytes, cache.since = cache.since, 0
        cache.total += num_bytes
        return num_bytes

    def repeated(_index: int, _outputs: list[Tensor], num_bytes: int) -> None:
        cache.total += num_bytes

    with run_some(blocks, ran, repeated), _Counter(module, len(blocks)):
        run(cache)
    return cache.total


def make_fake(module: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Gives a module weights without memory that look as if they lay on the CPU. Inside ``FakeTensorMode``.

    Args:
        module: with weights on meta or anywhere.
        dtype: of all weights, as fsdp gathers them; None keeps theirs.
    """
    fake_of_parameter: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None:
                if id(parameter) not in fake_of_parameter:
                    empty = torch.empty(parameter.shape, dtype=dtype or parameter.dtype)
                    fake_of_parameter[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                owner._parameters[key] = fake_of_parameter[id(parameter)]
        for key, buffer in owner._buffers.items():
            if buffer is not None and buffer.is_meta:
                owner._buffers[key] = torch.empty(buffer.shape, dtype=buffer.dtype)


def register_stand_in(on_gpu: bool, scores: bool) -> str:
    """Makes an attention known to transformers that saves what flash attention does: no score matrix.

    Args:
        on_gpu: false repeats keys and values to as many heads as queries, as torch's kernel for CPUs needs.
        scores: keep the scores: eager attention.

    Returns:
        Its name.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, None]:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        times = query.shape[1] // key.shape[1]
        if not on_gpu and times > 1:
            key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
        value_width = value.shape[-1]
        if not scores:  # the kernels want one width
            value = functional.pad(value, (0, query.shape[-1] - value_width))
        return _StandIn.apply(query, key, value, scores)[..., :value_width].transpose(1, 2), None

    AttentionInterface.register(STAND_IN, attention)
    AttentionMaskInterface.register(STAND_IN, lambda *args, **kwargs: None)
    return STAND_IN


class _StandIn(torch.autograd.Function):
    """Saves query, key, value, result and the log-sum-exp of the scores; of the numbers it computes none."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, scores: bool) -> Tensor:
        out = query.new_empty(*query.shape[:3], value.shape[-1])
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        if scores:
            matrix = query.new_empty(*query.shape[:3], key.shape[2])
            ctx.save_for_backward(query, key, value, matrix.float(), matrix)
        else:
            ctx.save_for_backward(query, key, value, out, lse)
        if (counter := _Counter.active) is not None:
            counter.keep(out.nbytes + lse.nbytes)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, ...]:
        raise NotImplementedError("it stands in for an attention in forward passes only")


class _Counter(TorchDispatchMode):
    """Counts saved storages by block, and the results that selective recomputation keeps."""

    active: _Counter | None = None

    def __init__(self, module: nn.Module, num_blocks: int) -> None:
        super().__init__()
        self.saved = SavedBytes([BlockBytes() for _ in range(num_blocks)])
        self._seen = {storage_of(parameter): None for parameter in module.parameters()}
        self._inputs: dict[int, Tensor] = {}
        self._block: int | None = None
        self._products = 0
        self._is_over = False

    def __enter__(self) -> _Counter:
        _Counter.active = self
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        _Counter.active = None
        super().__exit__(*exception)

    def watch(self, block: nn.Module, index: int) -> list[Any]:
        """Hooks that say when a block runs."""

        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self._block, self._products = index, 0
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and storage_of(leaf) not in self._inputs:
                    self._inputs[storage_of(leaf)] = leaf  # kept, so that no other storage gets its address
                    self.saved.blocks[index].full += leaf.untyped_storage().nbytes()

        def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._block, self._is_over = None, index == len(self.saved.blocks) - 1
            self.saved.blocks[index].selective += self.saved.blocks[index].full

        return [block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)]

    def pack(self, tensor: Tensor) -> Tensor:
        """Called by autograd for each tensor that it saves."""
        plain = local(tensor.detach())
        if (storage := storage_of(plain)) in self._seen:
            return plain
        self._seen[storage] = plain
        num_bytes = plain.untyped_storage().nbytes()
        if is_converted_weight(tensor):
            self.saved.copies += num_bytes
            if self._block is not None:
                self.saved.blocks[self._block].copies += num_bytes
        elif self._block is not None:
            self.saved.blocks[self._block].none += num_bytes
        elif self._is_over:
            self.saved.after += num_bytes
        else:
            self.saved.before += num_bytes
        return plain

    def record_block(self, index: int, outputs: list[Tensor]) -> tuple[BlockBytes, list[bool]]:
        """What a block has saved, and of which tensors that it returns it has saved the storage."""
        return replace(self.saved.blocks[index]), [storage_of(tensor) in self._seen for tensor in outputs]

    def repeat_block(self, index: int, outputs: list[Tensor], saved_by_equal: tuple[BlockBytes, list[bool]]) -> None:
        """Counts for a block what an equal one has saved; what it was given is counted already."""
        block, (equal, are_saved) = self.saved.blocks[index], saved_by_equal
        block.none, block.selective, block.copies = equal.none, equal.selective, equal.copies
        self.saved.copies += equal.copies
        self._seen |= {
            storage_of(tensor): tensor for tensor, is_saved in zip(outputs, are_saved, strict=True) if is_saved
        }

    def keep(self, num_bytes: int) -> None:
        """Counts what selective recomputation keeps of this block."""
        if self._block is not None:
            self.saved.blocks[self._block].selective += num_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._grouped_mm.default:  # torch knows the shape of its result for bf16 only
            result = args[0].new_empty(len(args[0]), args[1].shape[-1])
        else:
            result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        if name in MATMUL:
            self._products += 1
        if name in ATTENTION or name in COMMUNICATION or (name in MATMUL and self._products % 2):
            self.keep(sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, Tensor)))
        return result


def autocast(dtype: torch.dtype | None) -> Any:
    """Autocast of fake tensors."""
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


NUMBERS = ("layer_idx", "layer_index", "layer_id", "layer_number", "block_idx")
"""Names of attributes that tell one layer from another without changing what it does."""

RUNS = 2
"""Blocks of a kind that run: the first also makes what the others share, the second is as all that follow."""


class _Kind:
    """Blocks that are equal, with inputs of the same kind."""

    def __init__(self) -> None:
        self.runs, self.result = 0, None
        """How many have run, and what the last one left."""
        self.outputs: list[Any] = []
        self.nested, self.can_repeat = None, False

    def remember(self, inputs: list[Any], output: Any) -> list[Tensor]:
        """Keeps what a block that ran has returned; gives its tensors."""
        self.runs += 1
        leaves, self.nested = tree_flatten(output)
        places = {id(leaf): place for place, leaf in enumerate(inputs) if isinstance(leaf, Tensor)}
        self.outputs = [places.get(id(leaf), leaf) for leaf in leaves]
        input_storages = {storage_of(leaf) for leaf in inputs if isinstance(leaf, Tensor)}
        new_tensors = [leaf for leaf in self.outputs if isinstance(leaf, Tensor)]
        self.can_repeat = not any(storage_of(tensor) in input_storages for tensor in new_tensors)  # a view of an input
        return new_tensors

    def repeat(self, inputs: list[Any]) -> tuple[Any, list[Tensor]]:
        """The same for a block that does not run: what it returns, and the tensors of it that are new."""
        leaves: list[Any] = []
        new_tensors: list[Tensor] = []
        for leaf in self.outputs:
            if isinstance(leaf, Tensor):
                stand_in = torch.empty_like(leaf).requires_grad_(leaf.requires_grad)
                new_tensors.append(
                    stand_in.clone() if leaf.requires_grad else stand_in
                )  # with a gradient function, as what it stands for
                leaves.append(new_tensors[-1])
            else:
                leaves.append(inputs[leaf] if isinstance(leaf, int) and not isinstance(leaf, bool) else leaf)
        return tree_unflatten(leaves, self.nested), new_tensors


@contextmanager
def run_some(
    blocks: Mapping[str, nn.Module],
    ran: Callable[[int, list[Tensor]], Any],
    repeated: Callable[[int, list[Tensor], Any], None],
) -> Iterator[None]:
    """Inside, a block is not run when ``RUNS`` blocks equal to it have, with inputs of the same kind.

    Its results are then new tensors of the same shapes. Blocks are equal when their classes, weights and settings are.

    Args:
        blocks: by name, in the order in which they run.
        ran: called after a block has run, with its number and the tensors that it made; returns what is to be known of
            it.
        repeated: called instead for a block that does not run, with its number, the tensors in the place of those that
            it would have made, and what ``ran`` returned for the last one equal to it.
    """
    kinds: dict[Any, _Kind] = {}

    def watched(index: int, settings: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            inputs, nested = tree_flatten((args, kwargs))
            kind = kinds.setdefault((settings, str(nested), tuple(map(_describe_input, inputs))), _Kind())
            if kind.can_repeat and kind.runs >= RUNS:
                output, new_tensors = kind.repeat(inputs)
                repeated(index, new_tensors, kind.result)
                return output
            output = forward(*args, **kwargs)
            kind.result = ran(index, kind.remember(inputs, output))
            return output

        return run

    replaced_forwards = {block: vars(block)["forward"] for block in blocks.values() if "forward" in vars(block)}
    for index, block in enumerate(blocks.values()):
        block.forward = watched(index, _settings(block), block.forward)
    try:
        yield
    finally:
        for block in blocks.values():
            del block.forward
            if block in replaced_forwards:
                block.forward = replaced_forwards[block]


def _settings(block: nn.Module) -> tuple[Any, ...]:
    """What makes two blocks equal: classes, plain attributes, shapes of weights and buffers."""
    submodules: list[Any] = []
    for name, submodule in block.named_modules():
        plain = {
            key: value
            for key, value in vars(submodule).items()
            if key not in NUMBERS and isinstance(value, (bool, int, float, str, tuple, type(None)))
        }
        submodules.append((name, type(submodule), repr(sorted(plain.items()))))
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return (*submodules, *((name, _describe_input(tensor)) for name, tensor in tensors))


def _describe_input(value: Any) -> Any:
    """What matters of an input: of a tensor all but its numbers."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else id(value)
