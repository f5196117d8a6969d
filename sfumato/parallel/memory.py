"""Less memory and more speed for the repeated blocks: recomputation, activations in CPU memory, compilation.

Only the ``forward`` of each block is replaced, on the instance: parameter names, classes and hooks stay as they are, so
the hooks of FSDP, tensor and sequence parallelism around a block run once, outside of the recomputation.
"""

from __future__ import annotations

import copy
import inspect
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from sfumato.config.open_mappings import Keywords
from sfumato.config.parallel import ParallelConfig
from sfumato.errors import ConfigError
from sfumato.parallel.compiling import compiler_problem, first_paragraph
from sfumato.parallel.kernels import in_packed_attention
from sfumato.parallel.precision import forward_converted, is_converting
from sfumato.parallel.shards import local_shard

LOGGER = logging.getLogger(__name__)

if TYPE_CHECKING:
    from torch._ops import OpOverload
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement
    from torch.utils._python_dispatch import TorchDispatchMode

    from sfumato.parallel.mesh import Mesh

    _DTensorLayout = tuple[DeviceMesh, tuple[Placement, ...], torch.Size, tuple[int, ...]]
    _Packed = Tensor | tuple["_HostCopy", _DTensorLayout | None]
    """A saved tensor that stays, or its copy, and how to make a DTensor of it again."""

ATTENTION = frozenset(
    {
        "aten::_scaled_dot_product_flash_attention",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_efficient_attention",
        "aten::_scaled_dot_product_cudnn_attention",
        "aten::_scaled_dot_product_fused_attention_overrideable",
        "aten::_flash_attention_forward",
        "aten::_efficient_attention_forward",
        "aten::_cudnn_attention_forward",
        "torch_attn::_varlen_attn",
        "flash_attn::_flash_attn_forward",
        "flash_attn::_flash_attn_varlen_forward",
        "flash_attn_3::_flash_attn_forward",
        "flash_attn_3::fwd",
        "flex_attention",
    }
)
"""Operations whose results ``selective`` keeps."""

COMMUNICATION = frozenset(
    {
        "_c10d_functional::all_gather_into_tensor",
        "_c10d_functional::all_reduce",
        "_c10d_functional::all_to_all_single",
        "_c10d_functional::reduce_scatter_tensor",
        "_dtensor::shard_dim_alltoall",
    }
)
"""Collectives whose results ``selective`` keeps, so that they are not sent twice."""

MATMUL = frozenset(
    {
        "aten::mm",
        "aten::addmm",
        "aten::bmm",
        "aten::baddbmm",
        "aten::linear",
        "aten::_grouped_mm",
        "aten::_scaled_mm",
        "aten::_scaled_grouped_mm",
    }
)
"""Matrix products; ``selective`` keeps every second one."""

CACHES = ("cache", "past_key_values", "past_key_value", "layer_past")
"""Arguments through which a block writes keys and values to a cache."""

MIN_OFFLOAD_BYTES = 256 * 2**10
"""Smaller tensors stay: a copy of them takes longer to start than to run."""

ROW_PADDING = 16
"""Elements to a multiple of which torch pads the rows of masks."""

INDICES = (torch.int32, torch.int64)
"""Types of tensors that stay: the host remembers the values of position ids by the tensor on the device."""

RECOMPILE_LIMIT = 32
"""Number of variants of blocks that are compiled; more of them run uncompiled, with torch's warning."""

KEEPS_EFFECTS = "skip_fwd_side_effects_in_bwd_under_checkpoint"
"""Setting of the compiler that lets recomputed functions change attributes."""


def apply_memory_savings(
    module: nn.Module,
    config: ParallelConfig,
    blocks: Mapping[str, nn.Module],
    backend: str = "inductor",
    *,
    device: str = "cpu",
    graph_breaks: bool = False,
    mesh: Mesh | None = None,
) -> None:
    """Makes blocks recompute, offload and compile as configured; changes them in place.

    From inside out: recomputation (non-reentrant, arXiv 1604.06174; random numbers are drawn again as they were),
    ``torch.compile`` around it, and activation offload around both. FSDP comes afterwards. Without gradients a
    block runs as it was.

    ``compile`` treats sizes as fixed until a second size comes and then compiles once more for any size, so packed
    rows of unequal lengths cost two compilations of each kind of block. Calls with a cache of keys and values, which
    grows with each call, run uncompiled.

    Args:
        module: the model, after tensor, expert and sequence parallelism.
        config: ``activation_checkpointing``, ``enable_activation_offload``, ``compile``.
        blocks: its repeated blocks by name.
        backend: of ``torch.compile``.
        device: type of device on which the blocks will run; the configuration may compile for some types only.
        graph_breaks: whether something inside of the blocks is not compiled. Recomputation then stands around the
            compiled parts, and ``selective`` keeps attention only.
        mesh: the ranks, all of which must call this; where the compiler does not work on one of them, none compiles.

    Raises:
        ConfigError: when a block recomputes already or its forward has been replaced, or settings exclude each other.
    """
    mode = config.activation_checkpointing
    if config.enable_activation_offload and mode == "selective":
        raise ConfigError(
            "train.enable_activation_offload cannot reach what train.activation_checkpointing selective keeps: "
            "take full (block inputs go to CPU memory) or none (all activations do)"
        )
    for name, submodule in module.named_modules():
        if mode != "none" and getattr(submodule, "gradient_checkpointing", False):
            raise ConfigError(
                f"{name or type(module).__name__} checkpoints gradients itself, so that train.activation_checkpointing "
                f"{mode} would recompute twice: call disable_gradient_checkpointing() (diffusers) or "
                "gradient_checkpointing_disable() (transformers) on the model"
            )
    for name, block in blocks.items():
        replaced = vars(block).get("forward")
        if replaced is not None and not is_converting(replaced):
            raise ConfigError(
                f"the forward of {name} has been replaced already (a cache, a hook of diffusers?): remove that, or set "
                "train.activation_checkpointing none, train.enable_activation_offload false and train.compile false"
            )
    offload = ActivationOffload() if config.enable_activation_offload else None
    compiles = config.compiles(device) and _compiler_works(device, backend, mesh)
    for block in blocks.values():
        block.forward = BlockForward(block, mode, backend if compiles else None, offload, graph_breaks)


def _compiler_works(device: str, backend: str, mesh: Mesh | None) -> bool:
    """Whether the compiler works on all ranks; if not, rank 0 says why. Blocks are then the same on all of them."""
    problem = compiler_problem(device, backend)
    problem = problem if mesh is None else mesh.first_problem(problem)
    if problem is not None and (mesh is None or mesh.is_first):
        LOGGER.warning(problem)
    return problem is None


class BlockForward:
    """A callable in the place of one block's ``forward``.

    The original function becomes the block's attribute ``class_forward``.
    """

    def __init__(
        self,
        block: nn.Module,
        mode: str,
        backend: str | None,
        offload: ActivationOffload | None,
        graph_breaks: bool = False,
    ) -> None:
        self.block = block
        self.mode = mode
        self.backend = backend
        self.offload = offload
        self.graph_breaks = graph_breaks
        is_converted = is_converting(vars(block).get("forward"))
        # An attribute, since the compiler cannot look ``forward`` up in every class.
        vars(block)["class_forward"] = forward_converted if is_converted else type(block).forward
        self.uncompiled = MethodType(FORWARDS[mode], block)
        self.run = self.uncompiled
        if backend is not None and graph_breaks and mode != "none":
            # Of a recomputed function the compiler compiles all or nothing. So where a part is not compiled, the
            # recomputation stands around the compiled block, which then has a graph for each of the other parts.
            compiled = _compile(MethodType(_run_block, block), backend)
            self.run = partial(_run_recomputed, block, compiled, AROUND_COMPILED[mode])
        elif backend is not None:
            self.run = _compile(self.uncompiled, backend)

    def __call__(self, *args: object, **kwargs: object) -> object:
        if self.backend is not None and any(kwargs.get(name) is not None for name in CACHES):
            return self.uncompiled(*args, **kwargs)
        if self.offload is None or not torch.is_grad_enabled():
            return self.run(*args, **kwargs)
        with self.offload.hold(self.block):
            return self.run(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, object]) -> BlockForward:
        block = copy.deepcopy(self.block, memo)
        return BlockForward(block, self.mode, self.backend, self.offload, self.graph_breaks)


def _compile(run: Callable[..., object], backend: str) -> Callable[..., object]:
    """A compiled function, which raises ConfigError where the compiler cannot compile it."""
    compiled = torch.compile(run, backend=backend, **cast("Keywords", _compile_settings()))
    from torch._dynamo.exc import TorchDynamoException  # takes seconds; ``torch.compile`` has just loaded it

    def call(*args: object, **kwargs: object) -> object:
        try:
            return compiled(*args, **kwargs)
        except TorchDynamoException as error:
            block = type(cast("MethodType", run).__self__).__name__
            reason = first_paragraph(error)
            raise ConfigError(f"torch.compile cannot compile {block} ({reason}): set train.compile to false") from error

    return call


def _compile_settings() -> dict[str, int]:
    """Arguments of ``torch.compile`` that raise its limit of recompilations.

    All blocks share one cache, which holds each kind of block with and without gradients, of fixed and of any size.
    """
    if hasattr(torch._dynamo.config, KEEPS_EFFECTS):
        # Layers of ``compute_in`` convert their weights and take the converted ones away again; else the compiler would
        # refuse to recompute them.
        setattr(torch._dynamo.config, KEEPS_EFFECTS, True)
    if "recompile_limit" in inspect.signature(torch.compile).parameters:
        return {"recompile_limit": RECOMPILE_LIMIT}
    settings = torch._dynamo.config  # torch 2.11 has one limit for the whole process, 8 by default
    settings.recompile_limit = max(settings.recompile_limit, RECOMPILE_LIMIT)
    return {}


def _run_block(block: nn.Module, *args: object, **kwargs: object) -> object:
    return block.class_forward(block, *args, **kwargs)  # pyright: ignore[reportCallIssue]


def _recompute_all(block: nn.Module, *args: object, **kwargs: object) -> object:
    return _run_recomputed(block, None, RECOMPUTATIONS["full"], *args, **kwargs)


def _recompute_selectively(block: nn.Module, *args: object, **kwargs: object) -> object:
    return _run_recomputed(block, None, RECOMPUTATIONS["selective"], *args, **kwargs)


FORWARDS: dict[str, Callable[..., object]] = {
    "none": _run_block,
    "full": _recompute_all,
    "selective": _recompute_selectively,
}
"""The forward of a block for each ``activation_checkpointing``."""


def _run_recomputed(
    block: nn.Module,
    compiled: Callable[..., object] | None,
    settings: Keywords,
    /,
    *args: object,
    **kwargs: object,
) -> object:
    """Runs a block under non-reentrant checkpointing.

    Args:
        block: the block.
        compiled: its compiled forward; None for the plain one.
        settings: arguments of torch's ``checkpoint``.
        args, kwargs: of the block.
    """
    run = partial(block.class_forward, block) if compiled is None else compiled  # pyright: ignore[reportArgumentType]
    if not torch.is_grad_enabled():
        return run(*args, **kwargs)
    for name in CACHES:
        if kwargs.get(name) is not None:
            raise ConfigError(
                f"{type(block).__name__} would write its keys and values into the cache {name} again when "
                "train.activation_checkpointing recomputes it: call the model with use_cache=False"
            )
    names = tuple(kwargs)
    count = len(args)

    def forward(*values: object) -> object:
        named = dict(zip(names, values[count:], strict=True))
        return run(*values[:count], **named)

    # ``checkpoint`` saves tensors that it gets by position for the backward pass, where offload sees them, but holds
    # those that it gets by name. So all go by position.
    return checkpoint(forward, *args, *kwargs.values(), use_reentrant=False, **settings)


def _selective_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """The contexts of one checkpointed call, of its forward pass and its recomputation.

    They save attention, collectives and every second matrix product.
    """
    # Counted apart for the forward pass and the recomputation, so that both take the same products.
    counts = {False: 0, True: 0}

    def policy(
        context: SelectiveCheckpointContext, operation: OpOverload, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        name = operation.name().partition(".")[0]
        if name in ATTENTION or name in COMMUNICATION:
            return CheckpointPolicy.MUST_SAVE
        if name in MATMUL:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2:
                return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def _attention_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """As ``_selective_contexts`` around a compiled block: they save attention that is not compiled, and nothing else.

    Of what is compiled nothing can be saved, since the compiler uses memory again as soon as its own code is done.
    """

    def policy(
        context: SelectiveCheckpointContext, operation: OpOverload, *args: object, **kwargs: object
    ) -> CheckpointPolicy:
        is_attention = operation.name().partition(".")[0] in ATTENTION and in_packed_attention()
        return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


RECOMPUTATIONS: dict[str, dict[str, object]] = {"full": {}, "selective": {"context_fn": _selective_contexts}}
"""Arguments of torch's ``checkpoint`` for each ``activation_checkpointing``."""

AROUND_COMPILED: dict[str, dict[str, object]] = {"full": {}, "selective": {"context_fn": _attention_contexts}}
"""The same where ``checkpoint`` stands around a compiled block."""


class ActivationOffload:
    """Keeps tensors that autograd saves inside blocks in pinned CPU memory until the backward pass needs them.

    Copies run on a stream of their own beside the computation; while one block's backward pass runs, the activations
    of the block before it come back. Neither direction runs ahead of the computation by more than two blocks, which
    bounds the memory of copies under way. A tensor that several operations save is copied once. Weights, also those
    that autocast has converted, indices such as position ids, and tensors below ``min_bytes`` stay where they are.
    """

    def __init__(self, min_bytes: int = MIN_OFFLOAD_BYTES, stay: tuple[str, ...] = ("cpu", "meta")) -> None:
        """
        Args:
            min_bytes: size from which tensors are moved.
            stay: types of devices whose tensors are not moved.
        """
        self.min_bytes = min_bytes
        self.stay = stay
        self._streams: dict[torch.device, torch.Stream] = {}
        self._under_way: deque[torch.Event] = deque()
        """Events at the ends of the copies of the last blocks."""
        self._last: weakref.ref[_Call] | None = None
        """The call before, without keeping it alive."""

    @contextmanager
    def hold(self, block: nn.Module) -> Iterator[None]:
        """While it lasts, tensors that autograd saves are moved, except the weights of the block."""
        while len(self._under_way) > 1:  # copies run at most two blocks behind the computation
            self._under_way.popleft().synchronize()
        call = _Call(block, self._last)
        self._last = weakref.ref(call)
        with torch.autograd.graph.saved_tensors_hooks(partial(self._pack, call), _unpack):
            yield
        if call.copies:
            self._under_way.append(_event_on(call.stream, call.device))

    def moves(self, tensor: Tensor, weights: set[int]) -> bool:
        """Whether a saved plain tensor goes to CPU memory; ``weights`` are the storages of the block's weights."""
        return (
            tensor.layout == torch.strided
            and tensor.device.type not in self.stay
            and tensor.nbytes >= self.min_bytes
            and tensor.dtype not in INDICES
            and tensor.untyped_storage()._cdata not in weights
            and not is_converted_weight(tensor)
        )

    def _pack(self, call: _Call, tensor: Tensor) -> _Packed:
        shard = local_shard(tensor.detach()) if isinstance(tensor, DTensor) else tensor
        if type(shard) not in (Tensor, nn.Parameter) or not self.moves(shard, call.weights):
            # An operation's result that a hook returned as it is would hold itself. What has no gradient comes back as
            # the same object, by which attention remembers where documents begin.
            return tensor.detach() if tensor.requires_grad else tensor
        if shard.device not in self._streams:
            self._streams[shard.device] = torch.get_device_module(shard.device).Stream()
        host_copy = call.copy_of(shard.detach(), self._streams[shard.device])
        if not isinstance(tensor, DTensor):
            return host_copy, None
        return host_copy, (tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride())


class _Call:
    """The copies of one call of a block. It lives as long as one of its copies does."""

    def __init__(self, block: nn.Module, previous: weakref.ref[_Call] | None) -> None:
        values = (
            value
            for submodule in block.modules()
            for value in (*submodule._parameters.values(), *vars(submodule).values())
        )
        self.weights = {storage_of(value) for value in values if isinstance(value, Tensor)}
        """Storages of the block's weights; gathered ones of fsdp1 are plain attributes."""
        self.copies: dict[tuple[object, ...], tuple[StorageWeakRef, weakref.ref[_HostCopy]]] = {}
        self.stream: torch.Stream | None = None
        """The stream of the copies; None before the first."""
        self.device: torch.device | None = None
        self._previous = previous
        self._awaited = False

    def copy_of(self, tensor: Tensor, stream: torch.Stream) -> _HostCopy:
        """The copy of a tensor; the same one if the tensor has not changed since it was made."""
        storage = tensor.untyped_storage()
        key = (storage._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version)
        entry = self.copies.get(key)
        host_copy = entry[1]() if entry else None
        if host_copy is None:
            self.stream = stream
            self.device = tensor.device
            host_copy = _HostCopy(tensor, stream, self)
            # The storage's address is part of the key. A weak reference keeps it from being reused for another storage.
            self.copies[key] = (StorageWeakRef(storage), weakref.ref(host_copy))
        return host_copy

    def bring_back(self) -> None:
        """Prefetches: when the first copy of this call is needed, starts its copies back and those of the call before.

        The host waits for this call's. Later calls of this method do nothing.
        """
        if self._awaited:
            return
        self._awaited = True
        saved_copies = [saved for _, reference in self.copies.values() if (saved := reference()) is not None]
        for host_copy in saved_copies:
            host_copy.fetch()
        arrived = _event_on(self.stream, self.device)
        previous = self._previous() if self._previous else None
        if previous is not None and previous.device == self.device:
            cast("torch.Stream", self.stream).wait_stream(
                torch.get_device_module(self.device).current_stream(self.device)
            )
            # In the order in which the backward pass needs them.
            for _, reference in reversed(previous.copies.values()):
                saved = reference()
                if saved is not None:
                    saved.fetch()
        arrived.synchronize()


def _without_repeats(tensor: Tensor) -> Tensor:
    """One entry of each dimension that repeats one, as of a mask that all heads share."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


def _has_padded_rows(tensor: Tensor) -> bool:
    """Whether rows stand further apart than they are long, by less than ``ROW_PADDING`` elements.

    torch pads the masks of its attention so, and its backward kernel refuses a mask whose rows are not aligned.
    """
    if tensor.ndim < 2 or tensor.stride(-1) != 1 or tensor.shape[-2] == 1:
        return False
    return 0 < tensor.stride(-2) - tensor.shape[-1] < ROW_PADDING


class _HostCopy:
    """A copy of a tensor in pinned CPU memory, which can be copied back to the tensor's device."""

    def __init__(self, tensor: Tensor, stream: torch.Stream, call: _Call) -> None:
        self.device = tensor.device
        self.stream = stream
        self.call = call
        self._back: Tensor | None = None
        self._ready: torch.Event | None = None
        self._shape = tensor.shape
        tensor = _without_repeats(tensor)
        self._strides = tensor.stride() if _has_padded_rows(tensor) else None
        backend = torch.get_device_module(self.device)
        stream.wait_stream(backend.current_stream(self.device))  # the tensor may still be computed
        with backend.stream(stream):
            self._host = torch.empty_like(tensor, device="cpu", pin_memory=not tensor.is_cpu)
            self._host.copy_(tensor, non_blocking=True)
        if not tensor.is_cpu:
            tensor.record_stream(stream)  # its memory is not reused before the copy is over

    def fetch(self) -> None:
        """Starts the copy back."""
        if self._back is None:
            with torch.get_device_module(self.device).stream(self.stream):
                if self._strides is None:
                    back = torch.empty_like(self._host, device=self.device)
                else:
                    back = torch.empty_strided(
                        self._host.shape, self._strides, dtype=self._host.dtype, device=self.device
                    )
                self._back = back.copy_(self._host, non_blocking=True).expand(self._shape)
            self._ready = _event_on(self.stream, self.device)

    def get_on_device(self) -> Tensor:
        """The tensor on its device, for the stream that computes."""
        self.call.bring_back()
        self.fetch()
        current = torch.get_device_module(self.device).current_stream(self.device)
        current.wait_event(self._ready)
        back = cast("Tensor", self._back)  # ``fetch`` has set it
        if not back.is_cpu:
            back.record_stream(current)
        return back


def _unpack(packed: _Packed) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    host_copy, layout = packed
    if layout is None:
        return host_copy.get_on_device()
    mesh, placements, shape, stride = layout
    return DTensor.from_local(host_copy.get_on_device(), mesh, placements, run_check=False, shape=shape, stride=stride)


def _event_on(stream: torch.Stream | None, device: torch.device | None) -> torch.Event:
    """An event of the device's backend that is recorded on a stream now."""
    event = torch.get_device_module(device).Event()
    event.record(stream)
    return event


def storage_of(tensor: Tensor) -> int:
    """Address of the storage of a tensor, or of this rank's shard of a DTensor."""
    return local_shard(tensor.detach()).untyped_storage()._cdata


def is_converted_weight(tensor: Tensor) -> bool:
    """Whether this tensor, or the tensor that it is a view of, is autocast's conversion of a leaf such as a weight."""
    base = cast("Tensor", tensor._base) if tensor._is_view() else tensor
    node = base.grad_fn
    return node is not None and node.name() == "ToCopyBackward0" and hasattr(node.next_functions[0][0], "variable")
