"""What the sampler's processes do: they take versions aside while they generate, and apply them between two calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from sfumato.errors import WeightSyncError
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import Shards, all_parameters, local
from sfumato.parallel.weights import persistent_buffers
from sfumato.runtime.weight_sync.checksum import Checksums, Spec, compare, local_checksums
from sfumato.runtime.weight_sync.places import places_of
from sfumato.runtime.weight_sync.sender import Description, Handshake, Sent, close_way, refuse_stages
from sfumato.runtime.weight_sync.transports import receiving_side


class Receiver(Protocol):
    """What takes weights in a process of the sampler: a module that is cut into shards, or an inference engine."""

    rescores: bool
    """Whether it fuses or quantises its weights and is verified by rescoring fixed tokens. Otherwise it holds plain
    tensors, and is verified by their checksums."""
    shards: Shards | None
    """How its tensors are cut over the role's ranks, if it wants its shards only; None to be given whole tensors."""

    def describe(self) -> dict[str, Spec]:
        """The tensors that it wants, whole and not fused, by the names that the actor has for them: all that it has,
        or at least all that are trained where it rescores."""
        ...

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Takes the trained tensors of a version, beside the calls of the role: it must not use its process group.

        Args:
            tensors: names and plain tensors in the dtypes that it wants. Its shards are its own until it has applied
                the version; a whole tensor is valid until the next one is asked for, so it is fused, quantised or
                copied at once.
            version: of the actor.
        """
        ...

    def apply(self, version: int) -> None:
        """Draws by the loaded version from now on. Between two calls of the role."""
        ...

    def checksums(self, names: Iterable[str]) -> Checksums:
        """Checksums of what this rank holds of these tensors now, where it does not rescore."""
        ...

    def rescore(self, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probs of fixed tokens by what it holds now, where it rescores.

        Args:
            tokens: int64 ``[N, T]``.

        Returns:
            float32 ``[N, T - 1]``, of each token but the first, on the CPU.
        """
        ...


class ReceivingState(Protocol):
    """The state of a role that receives weights. It has ``engine``, which is a ``Receiver`` or has one as ``receiver``,
    or where that is None ``received_module``, a module of which the shards are replaced."""

    mesh: Mesh
    version: int
    """Version of the weights that it draws by; set when one is applied."""
    sync: Any
    """Left to this module."""


class MeshReceiver:
    """A module as ``parallelize`` returned it: takes its shards aside and copies them into place."""

    rescores: ClassVar[bool] = False

    def __init__(self, state: ReceivingState) -> None:
        """In the main thread: fsdp1 asks the other ranks how long their shards are."""
        self.state, self.mesh = state, state.mesh
        self.shards = Shards(self.module, self.mesh, all_parameters(self.module))
        self.staged: dict[str, torch.Tensor] = {}

    @property
    def module(self) -> nn.Module:
        """The state's module, which it brings onto the device if it had left that to another role."""
        return self.state.received_module  # type: ignore[attr-defined]

    def describe(self) -> dict[str, Spec]:
        """All parameters and persistent buffers."""
        module = self.module
        parameters, buffers = all_parameters(module), persistent_buffers(module)
        specs = {name: Spec(tuple(self.shards.shapes[name]), tensor.dtype) for name, tensor in parameters.items()}
        return specs | {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in buffers.items()}

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Keeps the shards; the module is not touched."""
        del version
        self.staged = dict(tensors)

    def apply(self, version: int) -> None:
        """Puts the shards into the module."""
        del version
        parameters = all_parameters(self.module)
        for name, shard in self.staged.items():
            place = local(parameters[name])
            place.copy_(shard.reshape(place.shape))
        self.staged = {}

    def checksums(self, names: Iterable[str]) -> Checksums:
        """Checksums of the module's parameters and buffers of these names. Every rank must call it."""
        module, wanted = self.module, set(names)
        parameters = {name: tensor for name, tensor in all_parameters(module).items() if name in wanted}
        buffers = {name: tensor for name, tensor in persistent_buffers(module).items() if name in wanted}
        return local_checksums(module, self.mesh, parameters, buffers)


class ReceivingEnd:
    """The way from the actor and what takes the weights; kept in the state of each process of the sampler."""

    def __init__(self, state: ReceivingState, handshake: Handshake) -> None:
        """In the main thread, as ``MeshReceiver``."""
        self.mesh, self.receiver = state.mesh, receiver_of(state)
        self.sent_names = {item.name for bucket in handshake.buckets for item in bucket.items}
        kind = receiving_side(handshake.transport)
        shards = self.receiver.shards
        self.transport = kind(handshake.access, handshake.settings, self.mesh, handshake.buckets, shards)
        self.specs = {name: spec.shape for name, spec in self.receiver.describe().items()}
        on_gpu = self.mesh.device.type == "cuda"
        # Beside what the main thread computes; one for all versions, since freed memory stays with its stream.
        self.stream = torch.cuda.Stream(self.mesh.device) if on_gpu else None
        self.staged: int | None = None
        """A version that was received and not applied yet."""
        self.last: int | None = None
        """The newest version that was received."""

    @torch.no_grad()
    def receive(self, version: int, delivery: Any) -> None:
        """Has the receiver load a version. The role's process group is not used."""
        if self.staged is not None:
            raise WeightSyncError(
                f"version {version} came to the sampler's rank {self.mesh.rank} before version {self.staged} was "
                "applied: call WeightSync.apply for each transfer"
            )
        if self.last is not None and version <= self.last:
            raise WeightSyncError(
                f"version {version} came to the sampler's rank {self.mesh.rank} after version {self.last} "
                "had come: each must be larger than the one before; WeightSync.reconnect() begins anew"
            )
        try:
            with torch.cuda.stream(self.stream) if self.stream is not None else nullcontext():
                self.receiver.load(self._tensors(version, delivery), version)
            if self.stream is not None:
                self.stream.synchronize()
            self.staged = self.last = version
        except BaseException:
            self.transport.give_up()
            raise

    def _tensors(self, version: int, delivery: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """What the transport brings, cut where the receiver wants shards."""
        shards = None if self.transport.gives_shards else self.receiver.shards
        for name, tensor in self.transport.take(version, delivery):
            if name not in self.sent_names:
                raise WeightSyncError(f"version {version}: {name} came, which nobody has announced")
            yield name, tensor if shards is None else shards.shard(name, tensor).clone()

    def problem(self, version: int) -> str:
        """Why a version cannot be applied; empty if it can."""
        if self.staged != version:
            applied = self.staged is None and version == self.last
            has = "was applied already" if applied else "was never received"
            return f"version {version} {has} by the sampler's rank {self.mesh.rank}"
        return ""

    def verify(self, sent: Sent, ranks: list[Checksums]) -> None:
        """Compares the checksums of all ranks with what was sent. Raises WeightSyncError on every rank."""
        sums = {name: value for name, value in sent.checksums.items() if name in self.sent_names}
        compare(ranks, sums, self.specs, f"weights of version {sent.version} in the sampler")
        compare(
            ranks,
            {name: value for name, value in sent.checksums.items() if name not in self.sent_names},
            self.specs,
            f"weights in the sampler that are not trained, compared with the actor's at version {sent.version}",
            "The sampler was built with other base weights than the actor: give both the same model.model_path, with "
            "the same files on all machines",
        )


def receiver_of(state: ReceivingState) -> Receiver:
    """What takes the weights in a process."""
    engine = getattr(state, "engine", None)
    receiver: Receiver | None = getattr(engine, "receiver", engine)
    return MeshReceiver(state) if receiver is None else receiver


def describe(state: ReceivingState) -> Description:
    """What the sampler wants. In every process of the sampler.

    Raises:
        ConfigError: with pipeline parallelism.
    """
    refuse_stages(state.mesh, "sampler")
    receiver = receiver_of(state)
    return Description(receiver.describe(), places_of(state.mesh), receiver.rescores)


def open_receiving(state: ReceivingState, handshake: Handshake) -> None:
    """Makes ready to receive. In every process of the sampler, in its main thread."""
    close_way(state)
    state.sync = ReceivingEnd(state, handshake)


def join_receiving(state: ReceivingState) -> None:
    """Waits for the actor, which runs ``join_sending`` at the same time. In any thread."""
    _end(state).transport.join()


def receive(state: ReceivingState, version: int, delivery: Any) -> None:
    """Loads a version. In every process of the sampler, in any thread.

    Raises:
        WeightSyncError: when it has come before, or the actor has gone.
    """
    _end(state).receive(version, delivery)


@torch.no_grad()
def apply(state: ReceivingState, sent: Sent, tokens: torch.Tensor | None = None) -> torch.Tensor | None:
    """Takes a received version into use. In every process, in its main thread.

    Args:
        state: of this process.
        sent: the version, with checksums that what is held is verified by.
        tokens: int64 ``[N, T]``, for a receiver that rescores.

    Returns:
        float32 ``[N, T - 1]``: log-probs of the tokens where the receiver rescores.

    Raises:
        WeightSyncError: on every rank, when it was not received by all, or weights are not what the actor has.
    """
    end = _end(state)
    problem, sums = end.problem(sent.version), {}
    if not problem:
        end.receiver.apply(sent.version)
        end.staged = None
        sums = {} if end.receiver.rescores else end.receiver.checksums(sent.checksums)
    ranks = end.mesh.gather((problem, sums), over="world")
    if problems := [text for text, _ in ranks if text]:
        raise WeightSyncError(f"{problems[0]}: transfer a version before it is applied")
    if not end.receiver.rescores:
        end.verify(sent, [checksums for _, checksums in ranks])
    state.version = sent.version
    return end.receiver.rescore(tokens) if end.receiver.rescores else None


def set_version(state: ReceivingState, version: int) -> None:
    """Notes the version of a sampler that is the actor: the weights are there already."""
    state.version = version


def _end(state: ReceivingState) -> ReceivingEnd:
    end = getattr(state, "sync", None)
    if not isinstance(end, ReceivingEnd):
        raise WeightSyncError("the sampler is not connected with the actor (any more): WeightSync.reconnect() first")
    return end
