"""Counts the bytes that autograd saves for the backward pass, by running a model on tensors without memory.

The model runs on torch's fake tensors: they have shapes, dtypes and views, and autograd saves what it always does, but
they have no values. Each storage that is saved is counted once, in the block that saves it first. Of equal blocks only
some are run, since the others save the same: a model of 61 layers has two or three kinds of blocks.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from transformers import DynamicCache

from sfumato.parallel.memory import (
    ATTENTION,
    COMMUNICATION,
    MATMUL,
    RECOMPILE_LIMIT,
    is_converted_weight,
    storage_of,
)
from sfumato.parallel.shards import local_shard

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.utils._pytree import TreeSpec
    from torch.utils.hooks import RemovableHandle

STAND_IN = "sfumato_stand_in"
"""Name, in transformers, of the attention that replaces the real one."""


@dataclass
class BlockBytes:
    """Bytes that one block saves in each mode of ``train.activation_checkpointing``."""

    none: int = 0
    selective: int = 0
    full: int = 0
    """The inputs of the block alone."""
    copies: int = 0
    """Weights in autocast's precision, which are saved besides."""


@dataclass
class SavedBytes:
    """Bytes that a micro-batch saves until its backward pass."""

    blocks: list[BlockBytes] = field(default_factory=list)
    """Bytes of each block, in order."""
    before: int = 0
    """Saved before the first block: the embedding."""
    after: int = 0
    """Saved after the last block: the last norm, logits, the loss."""
    copies: int = 0
    """Weights in autocast's precision, within and outside of blocks, which are saved besides."""

    def bytes_by_block(self, mode: str) -> list[int]:
        """Bytes of each block in a mode of ``train.activation_checkpointing``."""
        return [getattr(block, mode) for block in self.blocks]


def count_saved(
    module: nn.Module, blocks: Mapping[str, nn.Module], run: Callable[[], object], compiled: bool = False
) -> SavedBytes:
    """Runs a forward pass and counts what autograd saves. Call it inside ``FakeTensorMode``, after ``make_fake``.

    Of equal blocks two are run.

    Args:
        module: the model; its weights do not count.
        blocks: its repeated blocks, in the order in which they run.
        run: runs the forward pass with the loss.
        compiled: count what compiled blocks save, without recomputation: ``selective`` is not counted then.
    """
    counter = _Counter(module, len(blocks))
    hooks = [hook for index, block in enumerate(blocks.values()) for hook in counter.watch(block, index)]
    try:
        with ExitStack() as stack:
            pack = counter.pack
            if compiled:
                stack.enter_context(compile_without_code(blocks))
                pack = cast("Callable[[Tensor], Tensor]", torch.compiler.disable(pack))
            stack.enter_context(run_some(blocks, counter.block_left, counter.block_repeats))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(pack, lambda packed: packed))
            if not compiled:  # under a mode that watches operations nothing is compiled
                stack.enter_context(counter)
            run()
    finally:
        for hook in hooks:
            hook.remove()
    return counter.saved


@contextmanager
def compile_without_code(blocks: Mapping[str, nn.Module]) -> Iterator[None]:
    """Inside, blocks are compiled as far as their graphs, which are divided into forward and backward passes as torch's
    compiler divides them: by a minimum cut of what is saved and what is computed again. No code is generated.

    What cannot be compiled without values runs as it is, and so saves more.
    """
    import torch._dynamo
    from functorch.compile import min_cut_rematerialization_partition, nop
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.decomposition import select_decomp_table

    backend = aot_autograd(
        fw_compiler=nop,
        bw_compiler=nop,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table(),
    )
    replaced_forwards = {block: vars(block).get("forward") for block in blocks.values()}
    with (
        torch._dynamo.config.patch(suppress_errors=True, recompile_limit=RECOMPILE_LIMIT),
        warnings.catch_warnings(action="ignore", category=UserWarning),  # of the compiler, which a run shows itself
    ):
        for block in blocks.values():
            block.forward = torch.compile(block.forward, backend=backend, dynamic=False)
        try:
            yield
        finally:
            for block, forward in replaced_forwards.items():
                del block.forward
                if forward is not None:
                    block.forward = forward
            torch._dynamo.reset()


class _CountingCache(DynamicCache):
    """A cache that counts the bytes of the keys and values that layers put into it."""

    def __init__(self) -> None:
        super().__init__()
        self.block_bytes = 0
        """Bytes since the last block."""
        self.total = 0
        """Bytes of all blocks, those that are not run included."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        self.block_bytes += key_states.nbytes + value_states.nbytes
        return super().update(key_states, value_states, *args, **options)


@torch.no_grad()
def count_cached(module: nn.Module, blocks: Mapping[str, nn.Module], run: Callable[[DynamicCache], object]) -> int:
    """Runs a forward pass and counts the bytes of keys and values that layers put into a cache of transformers.

    Call it inside ``FakeTensorMode``, after ``make_fake``. Of equal blocks two are run.

    Args:
        module, blocks: as for ``count_saved``.
        run: runs the forward pass with a cache.
    """
    cache = _CountingCache()

    def ran(_index: int, _outputs: list[Tensor]) -> int:
        num_bytes = cache.block_bytes
        cache.block_bytes = 0
        cache.total += num_bytes
        return num_bytes

    def repeated(_index: int, _outputs: list[Tensor], num_bytes: int) -> None:
        cache.total += num_bytes

    with run_some(blocks, ran, repeated), _Counter(module, len(blocks)):
        run(cache)
    return cache.total


def make_fake(module: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Replaces the weights of a module by fake ones on the CPU, which take no memory. Call it in ``FakeTensorMode``.

    Args:
        module: the module, with weights on any device or on meta.
        dtype: the dtype of all weights, as fsdp gathers them; None keeps that of each weight.
    """
    fake_of_parameter: dict[int, nn.Parameter] = {}  # by id, so that tied weights stay tied
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
    """Registers, in transformers, an attention that saves the tensors that flash attention saves, without scores.

    Args:
        on_gpu: whether the run is on a GPU; on CPUs torch's kernel needs keys and values repeated for each query head.
        scores: save the matrix of scores, too, as eager attention does.

    Returns:
        The name of the attention.
    """
    from transformers import AttentionInterface, AttentionMaskInterface

    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, None]:
        if torch.is_autocast_enabled("cpu"):
            dtype = torch.get_autocast_dtype("cpu")
            query = query.to(dtype)
            key = key.to(dtype)
            value = value.to(dtype)
        times = query.shape[1] // key.shape[1]
        if not on_gpu and times > 1:
            key = key.repeat_interleave(times, 1)
            value = value.repeat_interleave(times, 1)
        value_width = value.shape[-1]
        if not scores:  # the kernels need one width for all
            value = functional.pad(value, (0, query.shape[-1] - value_width))
        # contiguous, as transformers' own functions return it: some models take a view of it
        return _StandIn.apply(query, key, value, scores)[..., :value_width].transpose(1, 2).contiguous(), None

    AttentionInterface.register(STAND_IN, attention)
    AttentionMaskInterface.register(STAND_IN, lambda *args, **kwargs: None)
    return STAND_IN


class _StandIn(torch.autograd.Function):
    """Saves query, key, value, result and the log-sum-exp of the scores, without computing any values."""

    @staticmethod
    def forward(ctx: FunctionCtx, query: Tensor, key: Tensor, value: Tensor, scores: bool) -> Tensor:
        out = query.new_empty(*query.shape[:3], value.shape[-1])
        lse = query.new_empty(query.shape[:3], dtype=torch.float32)
        if scores:
            matrix = query.new_empty(*query.shape[:3], key.shape[2])
            ctx.save_for_backward(query, key, value, matrix.float(), matrix)
        else:
            ctx.save_for_backward(query, key, value, out, lse)
        if (counter := _Counter.active) is not None:
            counter.add_saved(out.nbytes + lse.nbytes)
        return out

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> tuple[None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise NotImplementedError("it stands in for an attention in forward passes only")


class _Counter(TorchDispatchMode):
    """Counts the storages that autograd saves, by block, and the results that selective checkpointing keeps."""

    active: _Counter | None = None
    """The counter that is entered; ``_StandIn`` reports to it."""

    def __init__(self, module: nn.Module, num_blocks: int) -> None:
        super().__init__()
        self.saved = SavedBytes([BlockBytes() for _ in range(num_blocks)])
        self._seen: dict[int, Tensor | None] = {storage_of(parameter): None for parameter in module.parameters()}
        self._inputs: dict[int, Tensor] = {}  # inputs of blocks, by storage
        self._block: int | None = None
        self._products = 0
        self._is_over = False

    def __enter__(self) -> _Counter:
        _Counter.active = self
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        _Counter.active = None
        super().__exit__(*exception)

    def watch(self, block: nn.Module, index: int) -> list[RemovableHandle]:
        """Registers hooks that note when a block begins and ends, and count its inputs."""

        def enter(module: nn.Module, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
            self._block = index
            self._products = 0
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, Tensor) and storage_of(leaf) not in self._inputs:
                    self._inputs[storage_of(leaf)] = leaf  # a reference, so that the address is not reused
                    self.saved.blocks[index].full += leaf.untyped_storage().nbytes()

        def leave(module: nn.Module, args: tuple[object, ...], output: object) -> None:
            self._block = None
            self._is_over = index == len(self.saved.blocks) - 1
            # Selective checkpointing keeps the inputs, and the results that ``keep`` counted.
            self.saved.blocks[index].selective += self.saved.blocks[index].full

        return [block.register_forward_pre_hook(enter, with_kwargs=True), block.register_forward_hook(leave)]

    def pack(self, tensor: Tensor) -> Tensor:
        """Counts a tensor that autograd saves."""
        plain = local_shard(tensor.detach())
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

    def block_left(self, index: int, outputs: list[Tensor]) -> tuple[BlockBytes, list[bool]]:
        """What a block has saved, and for each of its outputs whether that is among it."""
        return replace(self.saved.blocks[index]), [storage_of(tensor) in self._seen for tensor in outputs]

    def block_repeats(self, index: int, outputs: list[Tensor], saved_by_equal: tuple[BlockBytes, list[bool]]) -> None:
        """Counts for a block that is not run what an equal one has saved. Its inputs were counted by the hook."""
        block = self.saved.blocks[index]
        equal, are_saved = saved_by_equal
        block.none = equal.none
        block.selective = equal.selective
        block.copies = equal.copies
        self.saved.copies += equal.copies
        self._seen |= {
            storage_of(tensor): tensor for tensor, is_saved in zip(outputs, are_saved, strict=True) if is_saved
        }

    def add_saved(self, num_bytes: int) -> None:
        """Counts a result that selective checkpointing keeps, of the block that is running."""
        if self._block is not None:
            self.saved.blocks[self._block].selective += num_bytes

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[Any, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        if func is torch.ops.aten._grouped_mm.default:  # torch knows the shape of its result for bf16 only
            result = args[0].new_empty(len(args[0]), args[1].shape[-1])
        else:
            result = func(*args, **(kwargs or {}))
        name = func.name().partition(".")[0]
        # Selective checkpointing keeps the results of attention, communication, and every second matrix product.
        if name in MATMUL:
            self._products += 1
        if name in ATTENTION or name in COMMUNICATION or (name in MATMUL and self._products % 2):
            self.add_saved(sum(leaf.nbytes for leaf in tree_leaves(result) if isinstance(leaf, Tensor)))
        return result


def fake_autocast(dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Autocast for fake tensors, which are on the CPU; None leaves it off."""
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


NUMBERS = ("layer_idx", "layer_index", "layer_id", "layer_number", "block_idx")
"""Names of attributes that number the layers, and do not change what a layer computes."""

RUNS = 2
"""Number of equal blocks that are run: the first may also make tensors that the others share; the second is like all
that follow."""


class _BlockKind:
    """Equal blocks with inputs of the same kind."""

    def __init__(self) -> None:
        self.runs = 0
        """Number of blocks that were run."""
        self.result: object = None
        """What ``ran`` of ``run_some`` returned for the last one."""
        self.outputs: list[object] = []
        """Leaves of its output, an input being represented by its position among the inputs."""
        self.nested: TreeSpec | None = None
        """Structure of its output."""
        self.can_repeat = False
        """Whether the output of another block can be made without running it."""

    def remember(self, inputs: Sequence[object], output: object) -> list[Tensor]:
        """Records the output of a block that was run, and returns the tensors in it that are not inputs."""
        self.runs += 1
        leaves, self.nested = tree_flatten(output)
        places = {id(leaf): place for place, leaf in enumerate(inputs) if isinstance(leaf, Tensor)}
        self.outputs = [places.get(id(leaf), leaf) for leaf in leaves]
        input_storages = {storage_of(leaf) for leaf in inputs if isinstance(leaf, Tensor)}
        new_tensors = [leaf for leaf in self.outputs if isinstance(leaf, Tensor)]
        # A view of an input cannot be made anew without running the block.
        self.can_repeat = not any(storage_of(tensor) in input_storages for tensor in new_tensors)
        return new_tensors

    def repeat(self, inputs: Sequence[object]) -> tuple[object, list[Tensor]]:
        """Makes the output of a block that is not run. Returns it, and the tensors in it that are not inputs."""
        leaves: list[object] = []
        new_tensors: list[Tensor] = []
        for leaf in self.outputs:
            if isinstance(leaf, Tensor):
                stand_in = torch.empty_like(leaf).requires_grad_(leaf.requires_grad)
                # A clone has a gradient function, like the tensor that it replaces.
                new_tensors.append(stand_in.clone() if leaf.requires_grad else stand_in)
                leaves.append(new_tensors[-1])
            else:
                leaves.append(inputs[leaf] if isinstance(leaf, int) and not isinstance(leaf, bool) else leaf)
        assert self.nested is not None
        return tree_unflatten(leaves, self.nested), new_tensors


@contextmanager
def run_some(
    blocks: Mapping[str, nn.Module],
    ran: Callable[[int, list[Tensor]], object],
    repeated: Callable[[int, list[Tensor], Any], None],
) -> Iterator[None]:
    """Inside, a block is not run if ``RUNS`` equal blocks were run before, with inputs of the same kind.

    Its outputs are then new tensors of the same shapes. Blocks are equal when classes and settings, and the shapes of
    weights, are equal.

    Args:
        blocks: blocks by name, in the order in which they run.
        ran: called after a block was run, with its number and the tensors that it made. Its result is passed to
            ``repeated``.
        repeated: called for a block that is not run, with its number, the tensors that replace those it would have
            made, and the result of ``ran`` for the last equal block.
    """
    kinds: dict[tuple[object, ...], _BlockKind] = {}

    def watched(index: int, settings: object, forward: Callable[..., object]) -> Callable[..., object]:
        def run(*args: object, **kwargs: object) -> object:
            inputs, nested = tree_flatten((args, kwargs))
            kind = kinds.setdefault((settings, str(nested), tuple(map(_describe_input, inputs))), _BlockKind())
            if kind.can_repeat and kind.runs >= RUNS:
                output, new_tensors = kind.repeat(inputs)
                repeated(index, new_tensors, kind.result)
                return output
            output = forward(*args, **kwargs)
            kind.result = ran(index, kind.remember(inputs, output))
            return output

        return run

    # A ``forward`` that was set on the instance must come back afterwards; else the class has it.
    replaced_forwards = {block: vars(block)["forward"] for block in blocks.values() if "forward" in vars(block)}
    for index, block in enumerate(blocks.values()):
        block.forward = watched(index, _block_key(block), block.forward)
    try:
        yield
    finally:
        for block in blocks.values():
            del block.forward
            if block in replaced_forwards:
                block.forward = replaced_forwards[block]


def _block_key(block: nn.Module) -> tuple[object, ...]:
    """What equal blocks have in common: classes, plain attributes, shapes of weights and buffers."""
    submodules: list[tuple[str, type[nn.Module], str]] = []
    for name, submodule in block.named_modules():
        plain = {
            key: value
            for key, value in vars(submodule).items()
            if key not in NUMBERS and isinstance(value, (bool, int, float, str, tuple, type(None)))
        }
        submodules.append((name, type(submodule), repr(sorted(plain.items()))))
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return (*submodules, *((name, _describe_input(tensor)) for name, tensor in tensors))


def _describe_input(value: object) -> object:
    """A key of an input: of a tensor everything but its values, of other objects their value or identity."""
    if isinstance(value, Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else id(value)
