"""What the sampler's processes do: they take versions aside while they generate, and apply them between two calls."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from sfumato.errors import WeightSyncError
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import Shards, all_parameters, local
from sfumato.parallel.weights import persistent_buffers
from sfumato.runtime.weight_sync.checksum import Spec, compare, local_checksums
from sfumato.runtime.weight_sync.places import places_of
from sfumato.runtime.weight_sync.sender import Description, Offer, Sent, refuse_stages
from sfumato.runtime.weight_sync.transports import receiving_side


class ReceivingState(Protocol):
    """The state of a role that receives weights."""

    mesh: Mesh
    received_module: nn.Module
    version: int
    """Of the weights that the module has; set when one is applied."""
    sync: Any
    """Left to this module."""


class Receiver:
    """Kept in the state of each process of the sampler."""

    def __init__(self, state: ReceivingState, offer: Offer) -> None:
        """In the main thread: fsdp1 asks the other ranks how long their shards are."""
        self.mesh = state.mesh
        self.sent_names = {item.name for bucket in offer.buckets for item in bucket.items}
        parameters = all_parameters(state.received_module)
        self.shards = Shards(state.received_module, self.mesh, parameters)
        kind = receiving_side(offer.transport)
        self.transport = kind(offer.access, offer.settings, self.mesh, offer.buckets, self.shards)
        on_gpu = self.mesh.device.type == "cuda"
        # Beside what the main thread computes; one for all versions, since freed memory stays with its stream.
        self.stream = torch.cuda.Stream(self.mesh.device) if on_gpu else None
        self.staged: tuple[int, dict[str, torch.Tensor]] | None = None
        """A version that was received and not applied yet: this rank's shards."""
        self.last: int | None = None
        """The newest version that was received."""

    @torch.no_grad()
    def receive(self, version: int, ticket: Any) -> None:
        """Keeps this rank's shards. The module is not touched, and the role's process group not used."""
        if self.staged is not None:
            raise WeightSyncError(
                f"version {version} came to the sampler's rank {self.mesh.rank} before version {self.staged[0]} was "
                "applied: call WeightSync.apply for each transfer"
            )
        if self.last is not None and version <= self.last:
            raise WeightSyncError(
                f"version {version} came to the sampler's rank {self.mesh.rank} after version {self.last} "
                "had come: each must be larger than the one before; WeightSync.reconnect() begins anew"
            )
        try:
            self.staged, self.last = (version, self._take(version, ticket)), version
        except BaseException:
            self.transport.give_up()
            raise

    def _take(self, version: int, ticket: Any) -> dict[str, torch.Tensor]:
        on_gpu, stream = self.stream is not None, self.stream
        staged: dict[str, torch.Tensor] = {}
        with torch.cuda.stream(stream) if on_gpu else nullcontext():
            for name, tensor in self.transport.take(version, ticket):
                if name not in self.sent_names:
                    raise WeightSyncError(f"version {version}: {name} came, which nobody has announced")
                staged[name] = tensor if self.transport.gives_shards else self.shards.shard(name, tensor).clone()
        if stream is not None:
            stream.synchronize()
        return staged

    def problem(self, version: int) -> str:
        """Why a version cannot be applied; empty if it can."""
        if self.staged is None or self.staged[0] != version:
            applied = self.staged is None and version == self.last
            has = "was applied already" if applied else "was never received"
            return f"version {version} {has} by the sampler's rank {self.mesh.rank}"
        return ""


def describe(state: ReceivingState) -> Description:
    """What the sampler wants. In every process of the sampler.

    Raises:
        ConfigError: with pipeline parallelism.
    """
    refuse_stages(state.mesh, "sampler")
    module = state.received_module
    parameters = all_parameters(module)
    shapes = Shards(module, state.mesh, parameters).shapes
    specs = {name: Spec(tuple(shapes[name]), each.dtype) for name, each in parameters.items()}
    specs |= {name: Spec(tuple(each.shape), each.dtype) for name, each in persistent_buffers(module).items()}
    return Description(specs, places_of(state.mesh))


def open_receiving(state: ReceivingState, offer: Offer) -> None:
    """Makes ready to receive. In every process of the sampler, in its main thread."""
    close_receiving(state)
    state.sync = Receiver(state, offer)


def join_receiving(state: ReceivingState) -> None:
    """Waits for the actor, which runs ``join_sending`` at the same time. In any thread."""
    _receiver(state).transport.join()


def receive(state: ReceivingState, version: int, ticket: Any) -> None:
    """Takes a version into staging memory. In every process of the sampler, in any thread.

    Raises:
        WeightSyncError: when it has come before, or the actor has gone.
    """
    _receiver(state).receive(version, ticket)


@torch.no_grad()
def apply(state: ReceivingState, sent: Sent) -> None:
    """Puts a received version into the module and verifies the module. In every process, in its main thread.

    Raises:
        WeightSyncError: on every rank, when it was not received by all, or weights are not what the actor has.
    """
    receiver, module, mesh = _receiver(state), state.received_module, state.mesh
    problem = receiver.problem(sent.version)
    parameters = all_parameters(module)
    sums = {}
    if not problem:
        for name, shard in receiver.staged[1].items():
            place = local(parameters[name])
            place.copy_(shard.reshape(place.shape))
        receiver.staged = None
        buffers = {name: each for name, each in persistent_buffers(module).items() if name in sent.checksums}
        checked = {name: each for name, each in parameters.items() if name in sent.checksums}
        sums = local_checksums(module, mesh, checked, buffers)
        shapes = {name: tuple(receiver.shards.shapes[name]) for name in checked}
        shapes |= {name: tuple(each.shape) for name, each in buffers.items()}
    ranks = mesh.gather((problem, sums), over="world")
    problems = [each for each, _ in ranks if each]
    if problems:
        raise WeightSyncError(f"{problems[0]}: transfer a version before it is applied")
    _verify(sent, [each for _, each in ranks], shapes, receiver.sent_names)
    state.version = sent.version


def _verify(sent: Sent, ranks: list[Any], shapes: dict[str, tuple[int, ...]], sent_names: set[str]) -> None:
    where = f"weights of version {sent.version} in the sampler"
    compare(ranks, {name: each for name, each in sent.checksums.items() if name in sent_names}, shapes, where)
    compare(
        ranks,
        {name: each for name, each in sent.checksums.items() if name not in sent_names},
        shapes,
        f"weights in the sampler that are not trained, compared with the actor's at version {sent.version}",
        "The sampler was built with other base weights than the actor: give both the same model.model_path, with the "
        "same files on all machines",
    )


def close_receiving(state: ReceivingState) -> None:
    """Closes the way from the actor, if there is one; what was received and not applied is dropped."""
    receiver = getattr(state, "sync", None)
    if isinstance(receiver, Receiver):
        receiver.transport.close()
        state.sync = None


def set_version(state: ReceivingState, version: int) -> None:
    """Of a sampler that is the actor: the weights are there already."""
    state.version = version


def _receiver(state: ReceivingState) -> Receiver:
    receiver = getattr(state, "sync", None)
    if not isinstance(receiver, Receiver):
        raise WeightSyncError("the sampler is not connected with the actor (any more): WeightSync.reconnect() first")
    return receiver
