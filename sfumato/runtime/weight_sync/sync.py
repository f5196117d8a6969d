"""The driver's side of weight synchronisation: which function runs in which role, and when."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from sfumato.errors import ConfigError, WeightSyncError
from sfumato.runtime.roles import Future, Role
from sfumato.runtime.weight_sync import receiver, sender
from sfumato.runtime.weight_sync.fixed_tokens import Rescoring
from sfumato.runtime.weight_sync.rescoring import Rescored
from sfumato.runtime.weight_sync.sender import Handshake, Sent
from sfumato.runtime.weight_sync.transports import Settings, sending_side
from sfumato.tracking.timeline import SYNC

SHARED = "shared"
"""Name of the transport in reports when the sampler is the actor."""

SHORTEST_PAUSE_S, LONGEST_PAUSE_S = 0.0005, 0.01
"""Pauses between two checks of running calls, in seconds."""

LOOK_S = 1.0
"""Seconds between two checks whether the actor lives, while only the sampler works."""

GRACE_S = 5.0
"""Seconds in which one side must end after the other has failed; it is not waited for any longer."""


@dataclass(frozen=True)
class SyncReport:
    """What was sent in a transfer."""

    version: int
    transport: str
    num_tensors: int
    """Number of tensors that were sent."""
    num_bytes: int
    """Bytes of one copy of them."""
    num_verified: int
    """Number of tensors whose checksums are taken, and compared when the version is applied."""
    seconds: float
    """Seconds from the beginning until all ranks had loaded it, without those of connecting."""


class WeightSync:
    """Brings weights from an actor role to a sampler role.

    A version is transferred while the sampler generates, and applied in the order of the sampler's calls, between two
    of them. Only trainable parameters are sent. The first version after the roles were connected verifies all weights,
    later ones those that are sent.
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
        """The connection is opened by the first transfer.

        Args:
            actor: its state is a ``SendingState``.
            sampler: its state is a ``ReceivingState``; the actor itself if they share the weights.
            transport: auto, local (within a process), broadcast, ipc or files.
            bucket_mb: most MiB that are gathered and sent at a time.
            folder: the run folder, for files.
            timeout_s: longest wait of one side for the other.
            grace_s: how long to wait for the other side when one has failed: until it is known whether it is lost.
            rescoring: how a receiver whose ``rescores`` is true is verified; others do not need it.
        """
        self.actor = actor
        self.sampler = sampler
        self.grace_s = grace_s
        self.settings = Settings(transport, int(bucket_mb * 2**20), folder, timeout_s)
        self._handshake: Handshake | None = None
        self.rescoring = rescoring
        self._tokens: torch.Tensor | None = None
        """The fixed tokens, once connected with a receiver that rescores."""
        self._rescored: Rescored | None = None
        """The last version that was applied to such a receiver since it was connected."""
        self._is_first = True
        self._sent: Sent | None = None
        self._applying: Future | None = None

    @property
    def transport(self) -> str | None:
        """Name of the chosen transport; None before the roles are connected."""
        return SHARED if self.actor is self.sampler else self._handshake and self._handshake.transport

    def connect(self, version: int) -> None:
        """Opens the connection, for ``version`` as the first one. ``transfer`` does it by itself.

        Raises:
            ConfigError: when the models differ or the transport cannot work.
            WeightSyncError: when a process does not join.
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
        self._handshake = handshake
        self._is_first = True
        self._sent = None
        self._applying = None
        self._rescored = None
        self._tokens = self._fixed_tokens(cast("Rescoring", self.rescoring)) if wanted.rescores else None

    def transfer(self, version: int) -> SyncReport:
        """Sends a version, and waits until every process of the sampler has it in staging memory.

        Each version must be larger than the one before. If one is still being applied, that is waited for first.

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
        assert self._handshake is not None
        started = time.perf_counter()
        self._sent = None
        is_measured = self.rescoring is not None and self.rescoring.tolerance is None
        arguments = sender.send, version, self._is_first, self._tokens, is_measured
        if sending_side(self._handshake.transport).streams:  # both sides take part at the same time
            receiving = self.sampler.call_concurrently(receiver.receive, version, None, kind=SYNC)
            sent, _ = self._both(self.actor.call(*arguments, kind=SYNC), receiving)
        else:
            sent, delivery = self.actor.call(*arguments, kind=SYNC).result()
            self.sampler.call_concurrently(receiver.receive, version, delivery, kind=SYNC).result()
            self.actor.call(sender.release, version).result()
        seconds = time.perf_counter() - started
        self._sent = sent
        self._is_first = False
        items = [item for bucket in self._handshake.buckets for item in bucket.items]
        num_bytes = sum(item.num_bytes for item in items)
        return SyncReport(version, self._handshake.transport, len(items), num_bytes, len(sent.checksums), seconds)

    def apply(self, version: int) -> Future:
        """Queues the application of a transferred version among the sampler's calls.

        Returns:
            A future, which raises WeightSyncError when the weights are not those that were sent.

        Raises:
            WeightSyncError: when the version was not transferred.
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
            assert self.rescoring is not None
            before = None if self._rescored is None else self._rescored.scores
            first = before if self._rescored is None or self._rescored.first is None else self._rescored.first
            self._rescored = Rescored(self._applying, self._sent, self.rescoring.tolerance, before, first)
            self._applying = self._rescored
        return self._applying

    def publish(self, version: int) -> SyncReport:
        """Transfers and applies a version, and waits for both."""
        report = self.transfer(version)
        self.apply(version).result()
        self._applying = None
        return report

    def reconnect(self) -> None:
        """Call it after a role was restarted or a transfer failed: the next transfer connects anew and verifies all."""
        self.close()

    def close(self) -> None:
        """Closes the connection on both sides. Errors of a lost role are raised."""
        if self._handshake is not None:
            self._handshake = None
            self._sent = None
            self._applying = None
            self.actor.call(sender.close_way).result()  # first: it frees receivers that still wait
            self.sampler.call(sender.close_way).result()

    def _fixed_tokens(self, rescoring: Rescoring) -> torch.Tensor:
        """The tokens that both sides score, drawn by the sampler's engine where beginnings were given."""
        if isinstance(rescoring.tokens, torch.Tensor):
            return rescoring.tokens
        return self.sampler.call(receiver.draw_tokens, rescoring.tokens).result()

    def _while_actor_lives(self, call: Future) -> Any:
        """Waits for a call of the sampler that needs a living actor, and returns its result.

        The actor has no call meanwhile whose failure would be noticed, so it is asked now and then.
        """
        last_look = time.monotonic()
        while not call.done():
            if time.monotonic() - last_look > LOOK_S:
                self.actor.call_concurrently(sender.is_there).result()
                last_look = time.monotonic()
            time.sleep(LONGEST_PAUSE_S)
        return call.result()

    def _both(self, sending: Future, receiving: Future) -> Any:
        """Waits for the calls of two sides that work together, and returns the sender's result.

        When a side fails, the other is aborted. Of two errors the cause is raised: a WeightSyncError usually follows
        from the other side's error.
        """
        pause_s = SHORTEST_PAUSE_S
        deadline = None
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
    """The error of a call that has ended with one; else nothing."""
    if call.done():
        try:
            call.result()
        except Exception as error:
            return [error]
    return []
