"""The actor's side of weight synchronisation: opening a connection to the sampler, and sending versions over it."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from sfumato.errors import ConfigError, NonFiniteError, WeightSyncError
from sfumato.parallel.finite import gather_names, list_first, not_finite
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import Shards, all_parameters, persistent_buffers, trainable_parameters
from sfumato.runtime.weight_sync.buckets import Bucket, Source, plan_buckets
from sfumato.runtime.weight_sync.checksum import NAMED, Spec, add_up, local_checksums
from sfumato.runtime.weight_sync.places import Place, places_of
from sfumato.runtime.weight_sync.transports import Ends, Sending, Settings, choose, sending_side

if TYPE_CHECKING:
    from sfumato.runtime.weight_sync.receiver import ReceivingState


class SendingState(Protocol):
    """The state of a role that sends weights."""

    mesh: Mesh
    sync: Sender | None
    """Set by this module alone: the ``Sender``, or None."""

    def rescore(self, module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probs of fixed tokens by the module that is sent; needed only if the receiving engine rescores.

        Args:
            module: as inside ``sent_weights``.
            tokens: int64 ``[N, T]``.

        Returns:
            float32 ``[N, T - 1]``, of each token but the first, on the CPU.
        """
        ...

    def rescore_rounded(self, module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """As ``rescore``, with each layer's result off by up to half a unit in the last place of the coarsest precision
        that actor or engine computes in. Needed only if the tolerance is measured (``Rescoring``)."""
        ...

    def sent_weights(self, version: int) -> AbstractContextManager[nn.Module]:
        """Yields the module; inside the block its trainable parameters are the weights to be sent, on every rank."""
        ...


@dataclass(frozen=True)
class Description:
    """What the sampler tells the actor before the first version."""

    specs: dict[str, Spec]
    """Shapes and dtypes of the whole tensors that it wants, by the names of the plain module."""
    places: list[Place]
    """Where its ranks are."""
    rescores: bool = False
    """Whether it is verified by rescoring fixed tokens, instead of by checksums of all its tensors."""
    takers: tuple[int, ...] | None = None
    """For each of its ranks the one that takes the weights for it; None: each takes its own."""


@dataclass(frozen=True)
class Handshake:
    """What the actor tells the sampler before the first version."""

    transport: str
    settings: Settings
    buckets: tuple[Bucket, ...]
    access: Any
    """What the transport's receiving side needs to find the sending one."""
    takers: tuple[int, ...] | None = None
    """See ``Description``."""


@dataclass(frozen=True)
class Sent:
    """What the receivers of a version are verified by."""

    version: int
    checksums: dict[str, int]
    """Checksums of whole tensors: those that were sent, and at the first version all others, too."""
    log_probs: torch.Tensor | None = None
    """float32 ``[N, T - 1]``: of the fixed tokens, where the receiver rescores them."""
    rounded: torch.Tensor | None = None
    """The same as rounding moves them, where the tolerance is measured."""

    def __reduce__(self) -> tuple[object, ...]:
        # Eight bytes for each checksum: the length of a pickled integer depends on its value, and the bytes that pass
        # through the driver are counted.
        sums = b"".join(value.to_bytes(8, "little") for value in self.checksums.values())
        return _sent_again, (self.version, tuple(self.checksums), sums, self.log_probs, self.rounded)


def _sent_again(version: int, names: tuple[str, ...], sums: bytes, *log_probs: torch.Tensor | None) -> Sent:
    """Unpickles a ``Sent``."""
    values = {name: int.from_bytes(sums[8 * at : 8 * at + 8], "little") for at, name in enumerate(names)}
    return Sent(version, values, *log_probs)


@dataclass
class Sender:
    """The open connection, in the state of each process of the actor."""

    transport: Sending
    specs: dict[str, Spec]
    sent_names: tuple[str, ...]


def open_sending(state: SendingState, version: int, wanted: Description, settings: Settings) -> Handshake:
    """Plans the buckets and chooses the transport. Runs in every process of the actor; the driver uses the first one's
    handshake.

    Raises:
        ConfigError: when the sampler's model is another one, nothing is trained, or the transport cannot work.
    """
    close_way(state)
    mesh = state.mesh
    refuse_stages(mesh, "actor")
    with state.sent_weights(version) as module:
        shapes = dict(Shards(module, mesh, all_parameters(module)).shapes)
        shapes |= {name: tensor.shape for name, tensor in persistent_buffers(module).items()}
        trained = tuple(trainable_parameters(module))
    _check_same(
        {name: tuple(shape) for name, shape in shapes.items()},
        wanted.specs,
        needed=trained if wanted.rescores else tuple(shapes),
    )
    if not trained:
        raise ConfigError("the actor has no trainable parameter, so there are no weights to send to the sampler")
    ends = Ends(places_of(mesh), wanted.places, wanted.takers)
    kind = choose(settings.transport, ends)
    buckets = plan_buckets({name: wanted.specs[name] for name in trained}, settings.bucket_bytes)
    transport = sending_side(kind)(settings, mesh, buckets, ends)
    state.sync = Sender(transport, wanted.specs, trained)
    return Handshake(kind, settings, buckets, transport.access(), wanted.takers)


def join_sending(state: SendingState) -> None:
    """Waits for the sampler's processes, which run ``join_receiving`` at the same time."""
    _build_sender(state).transport.join()


def send(
    state: SendingState,
    version: int,
    everything: bool,
    tokens: torch.Tensor | None = None,
    is_measured: bool = False,
) -> tuple[Sent, object]:
    """Sends the trainable parameters. Runs in every process of the actor.

    Args:
        state: of this process.
        version: of the weights.
        everything: whether checksums of the tensors that are not sent are taken as well.
        tokens: int64 ``[N, T]``, by which a receiver that rescores is verified.
        is_measured: whether the distance that it may have is measured, too.

    Returns:
        What receivers are verified by, and what the transport delivers to them through the driver.

    Raises:
        NonFiniteError: when a weight is not finite.
        WeightSyncError: when the ranks' copies differ, or a receiver died; the connection is then closed.
    """
    sender = _build_sender(state)
    mesh = state.mesh
    try:
        with state.sent_weights(version) as module:
            source = Source(module, mesh)
            names = list(source.parameters) if everything and tokens is None else sender.sent_names
            buffers = persistent_buffers(module) if everything and tokens is None else {}
            parameters = {name: source.parameters[name] for name in names}
            # All ranks raise, or none: one that left alone would keep the others waiting in the next collective.
            bad = gather_names(not_finite(parameters), mesh)
            if bad:
                raise NonFiniteError(
                    f"weights of version {version} in the actor are NaN or infinite: {list_first(bad)}. They were not "
                    "sent"
                )
            sums = local_checksums(source.shards, mesh.device, parameters, buffers, sender.specs)
            ranks = mesh.gather(sums, over="world")
            shapes = {name: sender.specs[name].shape for name in (*names, *buffers)}
            totals = add_up(ranks, shapes, f"weights of version {version} in the actor")
            log_probs = None if tokens is None else state.rescore(module, tokens)
            rounded = None if tokens is None or not is_measured else state.rescore_rounded(module, tokens)
            delivery = sender.transport.send(version, source)
    except BaseException:
        close_way(state)  # so that receivers fail at once instead of after their timeout
        raise
    return Sent(version, totals, log_probs, rounded), delivery


def release(state: SendingState, version: int) -> None:
    """Frees what was kept for the receivers of a version, after all have loaded it."""
    _build_sender(state).transport.release(version)


def is_there(state: SendingState) -> None:
    """Does nothing. The call fails if a process of the role has died, which is its purpose."""
    del state


def abort_sending(state: SendingState) -> None:
    """Makes a call fail that waits for receivers, one of which is lost. Runs in another thread than that call."""
    sender = getattr(state, "sync", None)
    if isinstance(sender, Sender):
        sender.transport.abort()


def close_way(state: SendingState | ReceivingState) -> None:
    """Closes this process's end of the connection, if it is open; a version that was not applied is dropped."""
    end = getattr(state, "sync", None)
    if end is not None:
        end.transport.close()
        state.sync = None


def refuse_stages(mesh: Mesh, role: str) -> None:
    """Raises ConfigError for pipeline parallelism."""
    if mesh.layout.pp > 1:
        raise ConfigError(
            f"weights cannot be synchronised with a pipeline of stages ({role}): set pipeline_parallel_size to 1"
        )


def _build_sender(state: SendingState) -> Sender:
    sender = getattr(state, "sync", None)
    if not isinstance(sender, Sender):
        raise WeightSyncError("the actor is not connected with the sampler (any more): WeightSync.reconnect() first")
    return sender


def _check_same(shapes: dict[str, tuple[int, ...]], wanted: dict[str, Spec], needed: tuple[str, ...]) -> None:
    """Compares the models of both sides.

    Args:
        shapes: of the actor's tensors.
        wanted: the sampler's tensors.
        needed: names that the sampler must have; it may lack others.

    Raises:
        ConfigError: when tensors are missing on a side, or shapes differ.
    """
    problems: list[str] = []
    for names, other, text in ((needed, wanted, "the sampler lacks"), (wanted, shapes, "the actor lacks")):
        lacking = [name for name in names if name not in other]
        if lacking:
            problems.append(f"{text} {list_first(lacking)}")
    problems += [
        f"{name} has shape {shape} in the actor and {wanted[name].shape} in the sampler"
        for name, shape in shapes.items()
        if name in wanted and shape != wanted[name].shape
    ][:NAMED]
    if problems:
        raise ConfigError(
            f"actor and sampler have different models: {'; '.join(problems)}; build both from the same model section"
        )
