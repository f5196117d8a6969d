"""The weights that the sampler draws by: which version an iteration needs, and whose turn it is on common GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sfumato.errors import RoleLostError
from sfumato.runtime.roles import Future, Roles, labelled


class SamplerWeights:
    """Brings versions of the actor's weights to the sampler, in the order of what it draws."""

    def __init__(
        self, roles: Roles, *, total_steps: int, max_staleness: int, takes_turns: bool, log: Callable[[str], None]
    ) -> None:
        """Args as of ``RolloutStream``; ``takes_turns``: actor and sampler use the same GPUs in turns."""
        self.roles, self.total_steps, self.max_staleness, self.log = roles, total_steps, max_staleness, log
        self.takes_turns = takes_turns
        self.is_samplers_turn = not takes_turns
        self.actor_version = 0
        """Version of the actor's weights."""
        self.sampler_version: int | None = None
        """Version that the sampler was told to take last, by which it draws what it is given now."""
        self.applied: Future | None = None
        """Call by which the sampler takes a version, until it is known how that went."""
        self._transferred: int | None = None

    def prepare(self, step: int) -> bool:
        """Has the sampler take the weights that draw an iteration; False if they are not there yet."""
        if self.roles.weights is None:
            self.sampler_version = self.actor_version
            return step <= self.actor_version
        if self.max_staleness <= 1:
            version = max(step - self.max_staleness, 0)
        else:
            version = self.actor_version if self._transferred is None else self._transferred
            if step - version > self.max_staleness:
                version = self.actor_version
        if version > self.actor_version or step - version > self.max_staleness:
            return False
        self._take(version, step)
        return True

    def _take(self, version: int, step: int) -> None:
        """Has the sampler take a version that the actor has, for an iteration."""
        while version != self.sampler_version:
            if self._transferred in (None, self.sampler_version):
                self._transfer(version)
            with labelled(self.roles.driver.record, step + 1, self._transferred):
                self.applied = self.roles.weights.apply(self._transferred)
            self.sampler_version = self._transferred

    def take_newest(self) -> None:
        """Has the sampler take the actor's weights of now, whatever it draws next, and its turn. Waits for it."""
        if not self.is_samplers_turn:
            self.begin_turn(self.actor_version)
        self._take(self.actor_version, self.actor_version)
        self.check_applied(wait=True)

    def send_newest(self, next_step: int) -> bool:
        """Sends weights as soon as they are there, if an iteration from ``next_step`` on will be made by them."""
        if (
            self.roles.weights is None
            or self._transferred != self.sampler_version
            or self._transferred == self.actor_version
        ):
            return False
        if self.takes_turns or self.applied is not None:  # both would be on the GPUs while the actor evaluates, saves
            return False
        used_from = self.actor_version + self.max_staleness if self.max_staleness <= 1 else self.actor_version + 1
        if max(used_from, next_step) >= self.total_steps:
            return False
        self._transfer(self.actor_version)
        return True

    def _transfer(self, version: int) -> None:
        with labelled(self.roles.driver.record, self.actor_version + 1, version):
            self.roles.weights.transfer(version)
        self._transferred = version

    def check_applied(self, wait: bool = False) -> None:
        """Looks, or waits, whether the sampler has taken its weights. Raises WeightSyncError if they are others."""
        if self.applied is not None and (wait or self.applied.done()):
            applied, self.applied = self.applied, None
            applied.result()

    def begin_turn(self, step: int) -> None:
        """Has the actor leave the GPUs to the sampler, once that has its weights. Raises RoleLostError."""
        while not self.prepare(step):
            pass
        self.check_applied(wait=True)
        self.roles.actor.call(rest).result()
        self.is_samplers_turn = True

    def end_turn(self) -> None:
        """Has the sampler leave the GPUs to the actor. Raises RoleLostError."""
        if self.is_samplers_turn:
            self.roles.sampler.call(rest).result()
            self.is_samplers_turn = False

    def reconnect(self) -> None:
        """Begins anew: versions only rise while the way is open, and a sampler that was replaced has none."""
        self.roles.weights.reconnect()
        self._transferred = self.applied = self.sampler_version = None

    def replace_sampler(self) -> None:
        """Gives the sampler new processes, again if these are lost, too. Raises RoleLostError when it was too often."""
        while True:
            self.roles.sampler.restart()
            try:
                self.reconnect()
                break
            except RoleLostError as lost:
                if lost.role != self.roles.sampler.name:
                    raise
                self.log(str(lost))
        self.is_samplers_turn = not self.takes_turns


def rest(state: Any) -> None:
    """In a role's processes: leaves the device to another role."""
    state.rest()
