"""Roles of an RL run, in this process.

A role holds a state and runs the functions it is given on it: ``call`` with the same arguments everywhere, ``map``
with a batch of which each data-parallel rank of the role gets its share. Both return futures. Here a role is one
process, so a share is the whole batch; roles on separate pools of processes offer the same interface.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol


class Role(Protocol):
    """A state, and the place where functions run on it."""

    def call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """``function(state, *args)`` in every process of the role."""
        ...

    def map(self, function: Callable[..., Any], batch: Any, *args: Any) -> Future[Any]:
        """``function(state, share_of_batch, *args)`` in every process of the role."""
        ...

    def close(self) -> None:
        """Ends what the role started."""
        ...


class LocalRole:
    """A role in this very thread: the call has finished when it returns, and errors rise where they happen."""

    def __init__(self, state: Any) -> None:
        self.state = state

    def call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Runs the function now."""
        future: Future[Any] = Future()
        future.set_result(function(self.state, *args))
        return future

    def map(self, function: Callable[..., Any], batch: Any, *args: Any) -> Future[Any]:
        """Runs the function on the whole batch now."""
        return self.call(function, batch, *args)

    def close(self) -> None:
        """Nothing was started."""


class ThreadRole:
    """A role in other threads of this process, which begin its calls in order."""

    def __init__(self, state: Any, name: str, num_threads: int = 1) -> None:
        self.state = state
        self._executor = ThreadPoolExecutor(max_workers=num_threads, thread_name_prefix=name)

    def call(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        """Queues the function; an error rises in the future's ``result``."""
        return self._executor.submit(function, self.state, *args)

    def map(self, function: Callable[..., Any], batch: Any, *args: Any) -> Future[Any]:
        """Queues the function on the whole batch."""
        return self.call(function, batch, *args)

    def close(self) -> None:
        """Drops calls that have not begun and ends the threads."""
        self._executor.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class Roles:
    """The roles of a run."""

    actor: Role
    """Trains the policy."""
    sampler: Role
    """Draws samples from it; the actor itself when they share weights."""
    scorer: Role
    """Scores samples."""

    def close(self) -> None:
        """Ends all roles."""
        for role in {id(each): each for each in (self.actor, self.sampler, self.scorer)}.values():
            role.close()


def launch_roles(actor: Callable[[], Any], scorer: Callable[[], Any], num_scorers: int = 1) -> Roles:
    """Builds the roles in this process: the sampler is the actor, the scorer has threads of its own.

    Args:
        actor: makes the state of the actor.
        scorer: makes the state of the scorer; first, since a missing engine should be known before a model is loaded.
        num_scorers: threads of the scorer, which share its state.
    """
    scorer_role = ThreadRole(scorer(), "scorer", num_scorers)
    actor_role = LocalRole(actor())
    return Roles(actor=actor_role, sampler=actor_role, scorer=scorer_role)
