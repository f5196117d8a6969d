"""The sampler's side of weight synchronisation: versions are received while it generates, and applied between calls."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import ClassVar, Protocol, TypeVar, cast

import torch
from torch import nn

from sfumato.errors import RoleLostError, WeightSyncError
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import Shards, all_parameters, local_shard, persistent_buffers
from sfumato.runtime.weight_sync.checksum import Checksums, Spec, compare, local_checksums
from sfumato.runtime.weight_sync.places import first_of_each_machine, places_of
from sfumato.runtime.weight_sync.sender import Description, Handshake, Sent, close_way, refuse_stages
from sfumato.runtime.weight_sync.transports import Bystander, Receiving, receiving_side


class Receiver(Protocol):
    """Takes the weights in a process of the sampler: a sharded module, or an inference engine."""

    rescores: bool
    """Whether it fuses or quantises its weights and is verified by rescoring fixed tokens. Otherwise it holds plain
    tensors, and is verified by their checksums."""
    shards: Shards | None
    """How its tensors are divided over the role's ranks, if it wants only its shards; None to get whole tensors."""
    takes_for_machine: bool
    """Whether what one rank has loaded can be used by all ranks on its machine: then one of them is sent weights."""

    def describe(self) -> dict[str, Spec]:
        """Shapes and dtypes of the whole, unfused tensors that it wants, by the actor's names: all tensors of the
        model, or if it rescores at least all trained ones."""
        ...

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Takes the trained tensors of a version. It runs beside the role's calls, so it must not use the role's
        process group.

        Args:
            tensors: names and plain tensors in the wanted dtypes. Shards stay valid until the version is applied; a
                whole tensor is valid only until the next one is asked for, so it must be fused, quantised or copied at
                once.
            version: of the actor's weights.
        """
        ...

    def place(self) -> str:
        """Where the other ranks of the machine find what was loaded; used if it takes for its machine."""
        ...

    def load_from(self, place: str) -> None:
        """In the place of ``load``, on a rank whose weights another rank has loaded."""
        ...

    def apply(self, version: int) -> None:
        """Uses the loaded version from now on. Runs between two calls of the role."""
        ...

    def checksums(self, names: Iterable[str]) -> Checksums:
        """Checksums of what this rank holds of these tensors now; used if it does not rescore."""
        ...

    def rescore(self, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probs of fixed tokens by the current weights; used if it rescores.

        Args:
            tokens: int64 ``[N, T]``.

        Returns:
            float32 ``[N, T - 1]``, of each token but the first, on the CPU.
        """
        ...


class ReceivingState(Protocol):
    """The state of a role that receives weights. Besides these attributes it has ``engine``, which is a ``Receiver`` or
    has one as ``receiver``; or, if ``engine`` is None, ``received_module``, whose shards are replaced."""

    mesh: Mesh
    version: int
    """Version of the weights in use; set when one is applied."""
    sync: ReceivingEnd | None
    """Set by this module alone: the ``ReceivingEnd``, or None."""


class MeshReceiver:
    """``Receiver`` for a module as ``parallelize`` returned it: keeps the new shards, and copies them when applied."""

    rescores: ClassVar[bool] = False
    takes_for_machine: ClassVar[bool] = False

    def __init__(self, state: ReceivingState) -> None:
        """Must run in the main thread of every process: fsdp1 asks the other ranks for the sizes of their shards."""
        self.state = state
        self.mesh = state.mesh
        self.shards = Shards(self.module, self.mesh, all_parameters(self.module))
        self.staged: dict[str, torch.Tensor] = {}
        self.applied: dict[str, nn.Parameter] = {}
        """The module's parameters, from ``apply`` to ``checksums``: looking for them takes longer than adapters' sums.
        """

    @property
    def module(self) -> nn.Module:
        """The state's module; it is brought onto the device if it was offloaded."""
        return self.state.received_module  # type: ignore[attr-defined]

    def describe(self) -> dict[str, Spec]:
        """Shapes and dtypes of all parameters and persistent buffers."""
        module = self.module
        parameters = all_parameters(module)
        buffers = persistent_buffers(module)
        specs = {name: Spec(tuple(self.shards.shapes[name]), tensor.dtype) for name, tensor in parameters.items()}
        return specs | {name: Spec(tuple(tensor.shape), tensor.dtype) for name, tensor in buffers.items()}

    def load(self, tensors: Iterator[tuple[str, torch.Tensor]], version: int) -> None:
        """Keeps the shards; the module is not touched."""
        del version
        self.staged = dict(tensors)

    def apply(self, version: int) -> None:
        """Copies the kept shards into the module."""
        del version
        self.applied = all_parameters(self.module)
        for name, shard in self.staged.items():
            place = local_shard(self.applied[name])
            place.copy_(shard.reshape(place.shape))
        self.staged = {}

    def checksums(self, names: Iterable[str]) -> Checksums:
        """Checksums of the module's parameters and buffers of these names, after ``apply``."""
        wanted = set(names)
        parameters = {name: tensor for name, tensor in self.applied.items() if name in wanted}
        self.applied = {}
        buffers: dict[str, torch.Tensor] = {}
        if len(parameters) < len(wanted):
            buffers = {name: tensor for name, tensor in persistent_buffers(self.module).items() if name in wanted}
        return local_checksums(self.shards, self.mesh.device, parameters, buffers)


class ReceivingEnd:
    """The open connection with the receiver of the weights, in the state of each process of the sampler."""

    def __init__(self, state: ReceivingState, handshake: Handshake) -> None:
        """Must run in the main thread, as ``MeshReceiver``."""
        self.mesh = state.mesh
        self.receiver = receiver_of(state)
        self.sent_names = {item.name for bucket in handshake.buckets for item in bucket.items}
        self.takers = handshake.takers or tuple(range(self.mesh.size))
        self.takes = self.takers[self.mesh.rank] == self.mesh.rank
        self.transport: Receiving = Bystander()
        if self.takes:
            kind = receiving_side(handshake.transport)
            shards = self.receiver.shards
            self.transport = kind(handshake.access, handshake.settings, self.mesh, handshake.buckets, shards)
        self.transport.hand_over_to(self._load)
        self.specs = {name: spec.shape for name, spec in self.receiver.describe().items()}
        on_gpu = self.mesh.device.type == "cuda"
        # Copies run beside what the main thread computes. One stream for all versions: the allocator reuses freed
        # memory only in the stream that it was allocated for.
        self.stream = torch.cuda.Stream(self.mesh.device) if on_gpu else None
        self.staged: int | None = None
        """The version that was received but not applied yet."""
        self.last: int | None = None
        """The newest version that was received."""
        self.reused: dict[str, torch.Tensor] = {}
        """Memory of the shards of the version before, which the next is copied into, see ``_keep``."""

    def receive(self, version: int, delivery: object) -> None:
        """Has the receiver load a version. The role's process group is not used."""
        if not self.transport.hands_over:
            self._load(version, self.transport.receive_tensors(version, delivery))

    @torch.no_grad()
    def _load(self, version: int, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
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
            # What is handed over is gathered in between, in the stream of the weights.
            beside = self.stream is not None and not self.transport.hands_over
            with torch.cuda.stream(self.stream) if beside else nullcontext():
                if self.takes:
                    self.receiver.load(self._received_tensors(version, tensors), version)
            if self.stream is not None:
                # ``apply`` reads the tensors in another stream, which does not wait for this one.
                self.stream.synchronize()
            self.staged = self.last = version
        except BaseException:
            self.transport.give_up()
            raise

    def _received_tensors(
        self, version: int, tensors: Iterator[tuple[str, torch.Tensor]]
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Names and tensors from the transport, cut into shards if the receiver wants these."""
        shards = None if self.transport.gives_shards else self.receiver.shards
        for name, tensor in tensors:
            if name not in self.sent_names:
                raise WeightSyncError(f"version {version}: {name} was sent but not announced")
            yield name, tensor if shards is None else self._keep(name, shards.shard(name, tensor))

    def _keep(self, name: str, shard: torch.Tensor) -> torch.Tensor:
        """A copy of a shard, which outlives the bucket that the shard is a view of.

        On a CPU it is in the memory of the version before, which was applied: to allocate there takes several times as
        long as to copy. On a GPU the allocator caches memory, which others can use meanwhile.
        """
        if name in self.reused:
            return self.reused[name].copy_(shard)
        copied = shard.clone()
        if self.mesh.device.type == "cpu":
            self.reused[name] = copied
        return copied

    def find_loaded(self, problem: str) -> str:
        """Tells ranks whose weights another one has loaded where these are. All ranks must call it.

        Args:
            problem: why the version cannot be applied here; empty if it can.

        Returns:
            The problem, or that of the rank that takes the weights for this one.
        """
        if self.takers == tuple(range(self.mesh.size)):
            return problem
        places = self.mesh.gather("" if problem or not self.takes else self.receiver.place(), over="world")
        taker = self.takers[self.mesh.rank]
        if not problem and not places[taker]:
            return f"the sampler's rank {taker}, which takes weights for the others on its machine, has none"
        if not problem and not self.takes:
            self.receiver.load_from(places[taker])
        return problem

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
    """The receiver of a state: its engine's, or one of its module."""
    engine = getattr(state, "engine", None)
    receiver: Receiver | None = getattr(engine, "receiver", engine)
    # ``MeshReceiver`` has no ``rescore``, which is called only if ``rescores`` is true.
    return cast("Receiver", MeshReceiver(state)) if receiver is None else receiver


def describe(state: ReceivingState) -> Description:
    """Describes what the sampler wants. Runs in every process of the sampler.

    Raises:
        ConfigError: with pipeline parallelism.
    """
    refuse_stages(state.mesh, "sampler")
    receiver = receiver_of(state)
    places = places_of(state.mesh)
    takers = first_of_each_machine(places) if receiver.takes_for_machine else None
    return Description(receiver.describe(), places, receiver.rescores, takers)


def open_receiving(state: ReceivingState, handshake: Handshake) -> None:
    """Opens the receiving end. Runs in the main thread of every process of the sampler."""
    close_way(state)
    state.sync = ReceivingEnd(state, handshake)


def join_receiving(state: ReceivingState) -> None:
    """Waits for the actor, which runs ``join_sending`` at the same time. May run in any thread."""
    _end(state).transport.join()


def draw_tokens(state: ReceivingState, beginnings: Sequence[Sequence[int]]) -> torch.Tensor:
    """Fixed tokens ``[N, T]`` that go on from these beginnings, as the first rank's ``engine`` draws them."""
    _onload_engine(state)
    tokens = state.engine.draw_tokens(beginnings)  # type: ignore[attr-defined]
    return state.mesh.gather(tokens, over="world")[0]  # ranks that share a batch must score the same


def receive(state: ReceivingState, version: int, delivery: object) -> None:
    """Loads a version. Runs in every process of the sampler, in any thread.

    Raises:
        WeightSyncError: when that version or a later one was received before, or the actor is lost.
    """
    _end(state).receive(version, delivery)


@torch.no_grad()
def apply(state: ReceivingState, sent: Sent, tokens: torch.Tensor | None = None) -> list[torch.Tensor] | None:
    """Takes a received version into use. Runs in the main thread of every process.

    Args:
        state: of this process.
        sent: the version, with the checksums by which the weights are verified.
        tokens: int64 ``[N, T]``, for a receiver that rescores.

    Returns:
        Log-probs of the tokens, float32 ``[N, T - 1]`` by each rank's receiver, if receivers rescore, else None.

    Raises:
        Exception: what a receiver raised, on its rank.
        WeightSyncError: on every rank, when some rank has not received the version, or weights differ from the actor's.
        RoleLostError: on the other ranks, when a receiver's engine was lost for good.
    """
    end = _end(state)
    problem = end.find_loaded(end.problem(sent.version))
    sums: Checksums = {}
    failure: Exception | None = None
    if not problem:
        try:
            _onload_engine(state)
            end.receiver.apply(sent.version)
            end.staged = None
            sums = {} if end.receiver.rescores else end.receiver.checksums(sent.checksums)
        except Exception as error:  # raised below
            failure = error
    ranks = _gather_or_raise(end, (problem, sums), failure, "take its weights")
    if problems := [text for text, _ in ranks if text]:
        raise WeightSyncError(f"{problems[0]}: transfer a version before it is applied")
    if not end.receiver.rescores:
        end.verify(sent, [checksums for _, checksums in ranks])
    state.version = sent.version
    if not end.receiver.rescores:
        return None
    assert tokens is not None, "WeightSync gives tokens to a receiver that rescores"
    return _rescore_all(end, tokens)


def _rescore_all(end: ReceivingEnd, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Log-probs of the tokens by the receiver of every rank: each has an engine of its own, any of which may be wrong.

    Raises:
        Exception: what a receiver raised, on its rank.
        WeightSyncError, RoleLostError: on the others.
    """
    log_probs: torch.Tensor | None = None
    failure: Exception | None = None
    try:
        log_probs = end.receiver.rescore(tokens)
    except Exception as error:  # raised below
        failure = error
    return [
        scored for scored in _gather_or_raise(end, log_probs, failure, "score the fixed tokens") if scored is not None
    ]


Value = TypeVar("Value")


def _gather_or_raise(end: ReceivingEnd, value: Value, failure: Exception | None, doing: str) -> list[Value]:
    """Gathers a value of every rank before any rank raises: one that left alone would keep the others waiting.

    Args:
        end: of this rank.
        value: plain values.
        failure: what this rank is to raise.
        doing: what an engine could not do, for the other ranks.

    Raises:
        Exception: ``failure``.
        RoleLostError: on the other ranks, for an engine that was lost.
        WeightSyncError: on the other ranks, for any other failure.
    """
    text = "" if failure is None else str(failure)
    ranks = end.mesh.gather((value, text, isinstance(failure, RoleLostError)), over="world")
    if failure is not None:
        raise failure
    for _, text, is_lost in ranks:
        if is_lost:
            raise RoleLostError("engine", (), f"of another rank: {text}")
        if text:
            raise WeightSyncError(f"another rank's engine could not {doing}: {text}")
    return [value for value, _, _ in ranks]


def _onload_engine(state: ReceivingState) -> None:
    """Brings an engine that has given its memory away back: one that sleeps neither loads weights nor draws."""
    onload = getattr(state, "onload", None)
    if onload is not None and getattr(state, "engine", None) is not None:
        onload()


def set_version(state: ReceivingState, version: int) -> None:
    """Sets the version of a sampler that is the actor, which has the weights already."""
    state.version = version


def _end(state: ReceivingState) -> ReceivingEnd:
    end = getattr(state, "sync", None)
    if not isinstance(end, ReceivingEnd):
        raise WeightSyncError("the sampler is not connected with the actor (any more): WeightSync.reconnect() first")
    return end
