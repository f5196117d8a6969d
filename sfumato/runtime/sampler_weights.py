"""The weights of the sampler: which version an iteration needs, and whose turn it is on shared GPUs."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from sfumato.errors import RoleLostError
from sfumato.runtime.roles import Future, Roles, label_calls

if TYPE_CHECKING:
    from sfumato.runtime.states import Actor, Sampler


class SamplerWeights:
    """Brings versions of the actor's weights to the sampler, in the order of what it draws."""

    def __init__(
        self, roles: Roles, *, total_steps: int, max_staleness: int, takes_turns: bool, log: Callable[[str], None]
    ) -> None:
        """Args as of ``RolloutStream``; ``takes_turns``: actor and sampler use the same GPUs in turns."""
        self.roles = roles
        self.total_steps = total_steps
        self.max_staleness = max_staleness
        self.log = log
        self.takes_turns = takes_turns
        self.is_samplers_turn = not takes_turns
        self.actor_version = 0
        """Version of the actor's weights."""
        self.sampler_version: int | None = None
        """Version that the sampler was last told to apply: it draws whatever it is given now by that."""
        self.applied: Future | None = None
        """The call that applies a version, until its result was looked at."""
        self._transferred: int | None = None  # newest version in the sampler's staging memory, maybe not applied

    def prepare(self, step: int) -> bool:
        """Has the sampler apply the weights that draw an iteration; False if the actor does not have them yet."""
        if self.roles.weights is None:
            self.sampler_version = self.actor_version
            return step <= self.actor_version
        if self.max_staleness <= 1:  # the version is fixed, so that results do not depend on timing
            version = max(step - self.max_staleness, 0)
        else:  # the newest version that the sampler has already, unless that is too old
            version = self.actor_version if self._transferred is None else self._transferred
            if step - version > self.max_staleness:
                version = self.actor_version
        if version > self.actor_version or step - version > self.max_staleness:
            return False
        self._take(version, step)
        return True

    def _take(self, version: int, step: int) -> None:
        """Has the sampler apply a version that the actor has, for iteration ``step``.

        A version that was transferred ahead must be applied first, even if a newer one is wanted.
        """
        while version != self.sampler_version:
            if self._transferred in (None, self.sampler_version):
                self._transfer(version)
            with label_calls(self.roles.driver.record, step + 1, self._transferred):
                self.applied = self.roles.weights.apply(self._transferred)
            self.sampler_version = self._transferred

    def take_newest(self) -> None:
        """Has the sampler apply the actor's current weights and take its turn; waits until it has."""
        if not self.is_samplers_turn:
            self.begin_turn(self.actor_version)
        self._take(self.actor_version, self.actor_version)
        self.check_applied(wait=True)

    def send_newest(self, next_step: int) -> bool:
        """Sends the actor's new weights ahead, if an iteration from ``next_step`` on will be drawn by them. Returns
        whether it did."""
        if (
            self.roles.weights is None
            or self._transferred != self.sampler_version
            or self._transferred == self.actor_version
        ):
            return False
        # With turns, both roles' weights would be on the GPUs while the actor evaluates or saves.
        if self.takes_turns or self.applied is not None:
            return False
        # The first iteration that can be drawn by these weights: none are sent that nothing is drawn by.
        used_from = self.actor_version + self.max_staleness if self.max_staleness <= 1 else self.actor_version + 1
        if max(used_from, next_step) >= self.total_steps:
            return False
        self._transfer(self.actor_version)
        return True

    def _transfer(self, version: int) -> None:
        with label_calls(self.roles.driver.record, self.actor_version + 1, version):
            self.roles.weights.transfer(version)
        self._transferred = version

    def check_applied(self, wait: bool = False) -> None:
        """Looks whether the sampler has applied its weights, or waits for it.

        Raises:
            WeightSyncError: when they are not the weights that were sent.
        """
        if self.applied is not None and (wait or self.applied.done()):
            applied = self.applied
            self.applied = None
            applied.result()

    def begin_turn(self, step: int) -> None:
        """Has the actor free the GPUs for the sampler, once the sampler has its weights. Raises RoleLostError."""
        is_prepared = self.prepare(step)
        assert is_prepared, f"iteration {step} is asked for, and the actor's newest weights are {self.actor_version}"
        self.check_applied(wait=True)
        self.roles.actor.call(offload_state).result()
        self.is_samplers_turn = True

    def end_turn(self) -> None:
        """Has the sampler free the GPUs for the actor. Raises RoleLostError."""
        if self.is_samplers_turn:
            self.roles.sampler.call(offload_state).result()
            self.is_samplers_turn = False

    def reconnect(self) -> None:
        """Closes the connection and forgets the sampler's versions: the next transfer connects anew.

        Needed before an older version is sent, since versions only rise within a connection, and for a replaced
        sampler, which has no weights.
        """
        self.roles.weights.reconnect()
        self._transferred = self.applied = self.sampler_version = None

    def replace_sampler(self) -> None:
        """Gives the sampler new processes, and again if these are lost, too.

        Raises:
            RoleLostError: after too many restarts, or when another role is lost.
        """
        while True:
            cast("Any", self.roles.sampler).restart()  # only a sampler on Ray is ever lost
            try:
                self.reconnect()
                break
            except RoleLostError as lost:
                if lost.role != self.roles.sampler.name:
                    raise
                self.log(str(lost))
        self.is_samplers_turn = not self.takes_turns


def offload_state(state: Actor | Sampler) -> None:
    """Runs in a role's processes: frees the device for another role."""
    state.offload()
