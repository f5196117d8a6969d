"""Offloading of a role's tensors: roles that share a GPU move what a phase does not need to CPU memory.

Tensors that are offloaded stay the same objects. Their *storages* become empty while a copy is in CPU memory, as FSDP
does with weights that it has gathered. So it does not matter who else refers to them: DTensors and the flat pieces that
FSDP gathers from, tied weights, adapters, the optimiser. CUDA graphs, and handles that another process has opened (CUDA
IPC), are not covered: end them before their weights are offloaded.

The order of one iteration of an actor and a sampler that are two processes on one GPU; each line waits for the one
before it, so that never more than one of them needs room:

    actor    before_generation(sampled_here=False, keep=["parameters"])     gradients, optimiser off
    sampler  onload("parameters")                                           both have weights: publish
    actor    offload("parameters")
    sampler  generates; then offload(*parts)
    actor    before_update(), forward and backward passes                   gradients are made
    actor    before_step(), optimizer.step()                                when activations have gone

In one process (the sampler is the actor) it is ``before_generation(sampled_here=True)``, then the last two lines.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from sfumato.errors import OffloadedError
from sfumato.parallel.shards import all_parameters

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

PARAMETERS, OPTIMIZER = "parameters", "optimizer"


@dataclass(frozen=True)
class _Away:
    """A storage on the device, which is empty while offloaded, and its content in CPU memory."""

    storage: torch.UntypedStorage
    content: torch.Tensor


class RoleMemory:
    """The tensors of a role in named parts, each on the device or in CPU memory.

    Parts are ``parameters`` (with buffers), ``optimizer`` (its state), and others that are given. Gradients are dropped
    instead of moved, since a backward pass makes them anew. No pass may be running when something is moved.
    """

    def __init__(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        others: Mapping[str, Callable[[], Iterable[torch.Tensor]]] | None = None,
        *,
        device: torch.device,
    ) -> None:
        """Nothing is moved yet.

        Args:
            module: what is trained or sampled, plain or under data parallelism.
            optimizer: of its parameters, if it is trained.
            others: further parts, such as averages or a frozen reference, as functions that list their tensors.
            device: where the role computes. Tensors elsewhere (counters of AdamW, offloaded FSDP) stay where they are,
                as does memory that torch has not allocated and so cannot free (mapped files, another process's).
        """
        self.module = module
        self.optimizer = optimizer
        self.device = torch.device(device)
        self._parts: dict[str, Callable[[], Iterable[torch.Tensor]]] = {PARAMETERS: self._iterate_weights}
        if optimizer is not None:
            self._parts[OPTIMIZER] = lambda: _state_tensors(optimizer)
        self._parts |= others or {}
        self._away: dict[str, list[_Away]] = {}
        self._guards: dict[str, list[RemovableHandle]] = {}

    @property
    def parts(self) -> list[str]:
        """Names of all parts."""
        return list(self._parts)

    @property
    def away(self) -> list[str]:
        """Names of the parts that are in CPU memory."""
        return [name for name in self._parts if name in self._away]

    def before_generation(self, sampled_here: bool, keep: Iterable[str] = ()) -> int:
        """Keeps what sampling needs: weights if this role samples, else nothing. Gradients are dropped first.

        Args:
            sampled_here: this process draws the samples, by these weights.
            keep: other parts that sampling needs (an averaged policy).

        Returns:
            Bytes that were freed, gradients not counted.
        """
        self.drop_gradients()
        staying = {*keep, *([PARAMETERS] if sampled_here else [])}
        return self.offload(*(name for name in self._parts if name not in staying))

    def before_update(self) -> int:
        """Brings back what forward and backward passes need: all but the optimiser's state. Returns the bytes.

        Another role on the device must have freed it before.
        """
        return self.onload(*(name for name in self._parts if name != OPTIMIZER))

    def before_step(self) -> int:
        """Brings back the optimiser's state, after activations were freed. Returns the bytes; 0 if it was there."""
        return self.onload(OPTIMIZER) if OPTIMIZER in self._parts else 0

    def drop_gradients(self) -> None:
        """Frees gradients; the optimiser must have used them."""
        if PARAMETERS not in self._away:
            all_parameters(self.module)  # for its effect: weights that FSDP has gathered are freed
        self.module.zero_grad(set_to_none=True)

    def offload(self, *parts: str) -> int:
        """Copies parts to CPU memory and frees them on the device, for other processes too.

        Args:
            parts: names; parts that are in CPU memory already stay there.

        Returns:
            Bytes freed on the device.

        Raises:
            KeyError: when there is no such part.
        """
        leaving: dict[str, list[torch.UntypedStorage]] = {}
        # Storages of other parts, such as tied weights, are moved once.
        seen = {part.storage._cdata for away in self._away.values() for part in away}
        for name in parts:
            tensors = self._parts[name]()
            if name not in self._away and name not in leaving:
                leaving[name] = list(_iterate_storages(tensors, self.device, seen))
        copies = {name: [_copy_of(storage) for storage in storages] for name, storages in leaving.items()}
        self._synchronize()  # before anything is freed: copies may still run, perhaps in several streams
        freed = 0
        for name, away in copies.items():
            self._away[name] = away
            self._guards[name] = self._guard_hooks(name)
            for part in away:
                freed += part.storage.nbytes()
                part.storage.resize_(0)
        if freed and self.device.type == "cuda":
            torch.cuda.empty_cache()  # once, at the end: other processes cannot use memory that torch caches
        return freed

    def onload(self, *parts: str) -> int:
        """Brings parts back to the device, bit by bit as they were.

        Args:
            parts: names; parts that are on the device already stay there.

        Returns:
            Bytes that were brought back.

        Raises:
            KeyError: when there is no such part.
            torch.OutOfMemoryError: when the device has no room; the part that did not fit is still offloaded.
        """
        brought = 0
        for name in parts:
            self._parts[name]  # raises KeyError for an unknown part
            away = self._away.get(name, [])
            for part in away:
                part.storage.resize_(part.content.numel())
                _bytes_of(part.storage).copy_(part.content, non_blocking=True)
                brought += part.content.numel()
            self._synchronize()  # the copies in CPU memory, which are freed next, may still be read
            for guard in self._guards.pop(name, []):
                guard.remove()
            self._away.pop(name, None)
        return brought

    def _iterate_weights(self) -> Iterator[torch.Tensor]:
        yield from all_parameters(self.module).values()
        yield from self.module.buffers()

    def _guard_hooks(self, name: str) -> list[RemovableHandle]:
        """Registers hooks that raise OffloadedError before a pass, a step or a save could read empty storages, which
        would crash the process or give wrong results."""

        def refuse(*_: object, **__: object) -> NoReturn:
            raise OffloadedError(f"part {name!r} of a role is in CPU memory: call onload({name!r}) of its memory first")

        if name == PARAMETERS:
            # Before the hooks of FSDP, which would gather from the empty storages.
            guards = [self.module.register_forward_pre_hook(refuse, prepend=True)]
            guards.append(self.module.register_state_dict_pre_hook(refuse))
            return guards + ([self.optimizer.register_step_pre_hook(refuse)] if self.optimizer else [])
        if name == OPTIMIZER:
            assert self.optimizer is not None
            hooks = (self.optimizer.register_step_pre_hook, self.optimizer.register_state_dict_pre_hook)
            return [hook(refuse) for hook in hooks]
        return []

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for state in optimizer.state.values():
        yield from (value for value in state.values() if isinstance(value, torch.Tensor))


def _iterate_storages(
    tensors: Iterable[torch.Tensor], device: torch.device, seen: set[int]
) -> Iterator[torch.UntypedStorage]:
    """The non-empty storages of tensors on a device, each once.

    Args:
        tensors: plain tensors, or wrappers such as DTensors.
        device: tensors on other devices are skipped.
        seen: addresses of storages to skip, to which those that are yielded are added.
    """
    for plain in (inner for tensor in tensors for inner in _plain_tensors(tensor)):
        storage = plain.untyped_storage()
        if plain.device.type != device.type or not storage.nbytes() or not storage.resizable():
            continue
        # Not by the address of the memory, which is 0 for every storage that is empty.
        if storage._cdata in seen:
            continue
        seen.add(storage._cdata)
        yield storage


def _plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The plain tensors within a tensor: the shard of a DTensor, codes and scales of compressed state, or itself."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    names, _ = tensor.__tensor_flatten__()
    for inner in (getattr(tensor, name) for name in names):
        if isinstance(inner, torch.Tensor):  # a DTensor also lists its mesh
            yield from _plain_tensors(inner)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """A storage as uint8 ``[bytes]``, without a copy."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),))  # pyright: ignore[reportCallIssue, reportArgumentType]


def _copy_of(storage: torch.UntypedStorage) -> _Away:
    """Copies a storage to CPU memory, pinned if it comes from a GPU, so that copies run at the speed of the bus."""
    content = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return _Away(storage, content.copy_(_bytes_of(storage), non_blocking=True))
