"""The driver's side of weight synchronisation: which function runs in which role, and when."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sfumato.errors import ConfigError, WeightSyncError
from sfumato.runtime.roles import Future, Role
from sfumato.runtime.weight_sync import receiver, sender
from sfumato.runtime.weight_sync.sender import Handshake, Sent
from sfumato.runtime.weight_sync.transports import Settings, sending_side

SYNC = "sync"
"""Kind of work in the timeline."""

SHARED = "shared"
"""What a report calls the transport when the sampler is the actor."""

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.0005, 0.01
"""Between two looks at calls that run."""

LOOK_S = 1.0
"""Between two looks whether the actor lives, while the sampler alone works."""

GRACE_S = 5.0
"""In which one side must follow the other that has failed; it is not waited for any longer."""


@dataclass(frozen=True)
class SyncReport:
    """What a transfer was."""

    version: int
    transport: str
    num_tensors: int
    """Number of tensors that were sent."""
    num_bytes: int
    """Bytes of one copy of them."""
    num_verified: int
    """Number of tensors whose checksums are taken, and compared when the version is applied."""
    seconds: float
    """Seconds from the begin until all ranks had loaded it; the first time without connecting."""


@dataclass(frozen=True)
class Rescoring:
    """Fixed tokens, by whose log-probs a receiver is verified that fuses or quantises its weights."""

    tokens: torch.Tensor
    """int64 ``[N, T]``."""
    tolerance: float
    """Largest difference between the log-probs of actor and sampler, in nats."""


class Rescored:
    """A version that is being applied, whose result is compared by this process."""

    def __init__(self, applying: Future, sent: Sent, tolerance: float) -> None:
        self.applying, self.sent, self.tolerance = applying, sent, tolerance

    def done(self) -> bool:
        """Whether it has been applied."""
        return self.applying.done()

    def result(self) -> None:
        """Raises WeightSyncError when the sampler gives the tokens other log-probs than the actor did."""
        log_probs, expected = self.applying.result(), self.sent.log_probs
        if log_probs.shape != expected.shape:
            difference = f"have shape {tuple(log_probs.shape)} instead of {tuple(expected.shape)}"
        else:
            differences = (log_probs - expected).abs().nan_to_num(torch.inf)
            if differences.max() <= self.tolerance:
                return
            sequence, token = divmod(int(differences.argmax()), differences.shape[1])
            difference = (
                f"differ by up to {differences.max():.3g} nats, {self.tolerance:g} are allowed (sequence {sequence}, "
                f"token {token + 1}: {log_probs[sequence, token]:.6g} instead of {expected[sequence, token]:.6g})"
            )
        raise WeightSyncError(
            f"version {self.sent.version}: the log-probs of fixed tokens in the sampler's engine and in the actor "
            f"{difference}: the engine does not have the weights that were sent. Look at how it fuses, casts or quantises "
            "them, whether both were built from one model, and whether it keeps values of the weights before"
        )


class WeightSync:
    """Brings weights from an actor role to a sampler role.

    A version is transferred while the sampler generates, then applied in the sampler's order: between two calls. Only
    trainable parameters travel. At the first version since the roles were connected all weights are verified, later
    those that travel.
    """

    def __init__(
        self,
        actor: Role,
        sampler: Role,
        transport: str = "auto",
        bucket_mb: float = 256,
        folder: Path | None = None,
        timeout_s: float = 600.0,
        grace_s: float = GRACE_S,
        rescoring: Rescoring | None = None,
    ) -> None:
        """Nothing is opened before the first transfer.

        Args:
            actor: its state is a ``SendingState``.
            sampler: its state is a ``ReceivingState``; the actor itself if they share the weights.
            transport: auto, local (within a process), broadcast, ipc or files.
            bucket_mb: most MiB that are gathered and sent at a time.
            folder: the run folder, for files.
            timeout_s: longest wait of one side for the other.
            grace_s: how long to wait for the other side when one has failed: until it is known whether it is lost.
            rescoring: how a receiver is verified that says that it rescores; none other needs it.
        """
        self.actor, self.sampler, self.grace_s = actor, sampler, grace_s
        self.settings = Settings(transport, int(bucket_mb * 2**20), folder, timeout_s)
        self._handshake: Handshake | None = None
        self.rescoring = rescoring
        self._tokens: torch.Tensor | None = None
        """The fixed tokens, once it is known that the receiver rescores them."""
        self._is_first = True
        self._sent: Sent | None = None
        self._applying: Future | None = None

    @property
    def transport(self) -> str | None:
        """The one that was chosen; None before the roles are connected."""
        return SHARED if self.actor is self.sampler else self._handshake and self._handshake.transport

    def connect(self, version: int) -> None:
        """Opens the way, with the version that will be sent first. ``transfer`` does it by itself.

        Raises:
            ConfigError: when the models differ or the transport cannot work.
            WeightSyncError: when a process does not come.
        """
        wanted = self.sampler.call(receiver.describe).result()
        if wanted.rescores and self.rescoring is None:
            raise ConfigError(
                "the sampler's engine is verified by fixed tokens, and WeightSync was given none: rescoring"
            )
        handshake = self.actor.call(sender.open_sending, version, wanted, self.settings).result()
        self._while_actor_lives(self.sampler.call(receiver.open_receiving, handshake))
        if sending_side(handshake.transport).streams:
            joining = self.sampler.call_concurrently(receiver.join_receiving)
            self._both(self.actor.call(sender.join_sending), joining)
        self._handshake, self._is_first, self._sent, self._applying = handshake, True, None, None
        self._tokens = self.rescoring.tokens if wanted.rescores else None

    def transfer(self, version: int) -> SyncReport:
        """Sends a version, and waits until every process of the sampler has it in staging memory.

        Versions rise from one to the next. One that is being applied is waited for.

        Raises:
            ConfigError, WeightSyncError: see ``connect``, ``send`` and ``receive``. Call ``reconnect`` before the next.
        """
        if self.actor is self.sampler:
            return SyncReport(version, SHARED, 0, 0, 0, 0.0)
        if self._applying is not None:
            self._applying.result()
            self._applying = None
        if self._handshake is None:
            self.connect(version)
        started = time.perf_counter()
        self._sent = None
        arguments = sender.send, version, self._is_first, self._tokens
        if sending_side(self._handshake.transport).streams:
            receiving = self.sampler.call_concurrently(receiver.receive, version, None, kind=SYNC)
            sent, _ = self._both(self.actor.call(*arguments, kind=SYNC), receiving)
        else:
            sent, delivery = self.actor.call(*arguments, kind=SYNC).result()
            self.sampler.call_concurrently(receiver.receive, version, delivery, kind=SYNC).result()
            self.actor.call(sender.release, version).result()
        seconds = time.perf_counter() - started
        self._sent, self._is_first = sent, False
        items = [item for bucket in self._handshake.buckets for item in bucket.items]
        num_bytes = sum(item.num_bytes for item in items)
        return SyncReport(version, self._handshake.transport, len(items), num_bytes, len(sent.checksums), seconds)

    def apply(self, version: int) -> Future:
        """Queues a transferred version in the sampler's order. The future raises WeightSyncError if it is not whole.

        Raises:
            WeightSyncError: when it was not transferred.
        """
        if self.actor is self.sampler:
            return self.sampler.call(receiver.set_version, version)
        if self._sent is None or self._sent.version != version:
            last_transfer = f"the last was {self._sent.version}" if self._sent else "none was"
            raise WeightSyncError(
                f"version {version} was not transferred to the sampler ({last_transfer}), so it cannot be applied"
            )
        self._applying = self.sampler.call(receiver.apply, self._sent, self._tokens, kind=SYNC)
        if self._tokens is not None:
            self._applying = Rescored(self._applying, self._sent, self.rescoring.tolerance)
        return self._applying

    def publish(self, version: int) -> SyncReport:
        """Transfers and applies a version, and waits for both."""
        report = self.transfer(version)
        self.apply(version).result()
        self._applying = None
        return report

    def reconnect(self) -> None:
        """After a role was started anew, or a transfer failed: the next transfer opens a new way and verifies all."""
        self.close()

    def close(self) -> None:
        """Closes the way on both sides. A role that has gone raises what it raises."""
        if self._handshake is not None:
            self._handshake, self._sent, self._applying = None, None, None
            self.actor.call(sender.close_way).result()  # first: it frees receivers that still wait
            self.sampler.call(sender.close_way).result()

    def _while_actor_lives(self, call: Future) -> Any:
        """The result of a call of the sampler, which may wait for the actor though that has nothing to do meanwhile."""
        last_look = time.monotonic()
        while not call.done():
            if time.monotonic() - last_look > LOOK_S:
                self.actor.call_concurrently(sender.is_there).result()
                last_look = time.monotonic()
            time.sleep(LONGEST_PAUSE_S)
        return call.result()

    def _both(self, sending: Future, receiving: Future) -> Any:
        """Waits for two sides that work together, and returns what the sender gave.

        A side that fails does not leave the other waiting; of two errors the one is raised that is no consequence.
        """
        pause_s, deadline = SHORTEST_PAUSE_S, None
        while not (sending.done() and receiving.done()) and (deadline is None or time.monotonic() < deadline):
            if deadline is None and (_errors_of(sending) or _errors_of(receiving)):
                deadline = time.monotonic() + self.grace_s
                self.actor.call_concurrently(sender.abort_sending).result()
            time.sleep(pause_s)
            pause_s = min(pause_s * 1.5, LONGEST_PAUSE_S)
        errors = _errors_of(sending) + _errors_of(receiving)
        if errors:
            raise next((error for error in errors if not isinstance(error, WeightSyncError)), errors[0])
        return sending.result()


def _errors_of(call: Future) -> list[Exception]:
    if call.done():
        try:
            call.result()
        except Exception as error:
            return [error]
    return []
