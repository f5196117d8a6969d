"""The rollout stream: order, overlap of scoring with generation, versions, staleness, memory, lost samplers, errors."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from sfumato.errors import ConfigError, RoleLostError, ValuesLostError
from sfumato.rewards.scoring.scores import Scores
from sfumato.runtime.roles import Driver, LocalHandle, LocalRole, Record, Roles, ThreadRole
from sfumato.runtime.stream import RolloutStream, StreamBatch


@dataclass(frozen=True)
class Request:
    """A sample that is to be made."""

    sample_id: int
    group_id: int


class Log:
    """What happened, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.scoring = threading.Event()
        self.version = 0


def requests_of(step: int, rank: int, num_data_ranks: int) -> list[Request]:
    """Six samples in three groups; the iteration is told by what is generated."""
    groups = range(3)[rank::num_data_ranks] if num_data_ranks == 1 else range(3)[rank : rank + 1 + (rank == 1)]
    return [Request(2 * group + member, group) for group in groups for member in range(2)]


def generate(log: Log, requests: list[Request], iteration: int, version: int) -> tuple:
    log.events.append(f"generate {10 * iteration + requests[0].sample_id}")
    return ("kept", iteration, version, [request.sample_id for request in requests]), (
        iteration,
        [request.sample_id for request in requests],
    )


def scores_of(ids: list[int]) -> Scores:
    values = np.array([100.0 + sample_id for sample_id in ids])
    return Scores(total=values, level=values, components={"r": values})


def score(log: Log, seen: tuple) -> Scores:
    log.events.append(f"score {10 * seen[0] + seen[1][0]}")
    return scores_of(seen[1])


def make(
    log: Log, generate: Callable[..., Any] = generate, score: Callable[..., Any] = score, threads: int = 1, **more: Any
) -> RolloutStream:
    actor = LocalRole(log)
    roles = Roles(actor=actor, sampler=actor, scorer=ThreadRole(log, "scorer", threads))
    return stream_of(roles, generate, score, **more)


def stream_of(roles: Roles, generate: Callable[..., Any] = generate, score: Callable[..., Any] = score, **more: Any):
    settings = {"total_steps": 3, "micro_batch_size": 2, "log": lambda _: None} | more
    return RolloutStream(roles, requests_of, generate, score, **settings)


def first(stream: RolloutStream) -> StreamBatch:
    """The first iteration."""
    return next(stream.steps())[1]


def kept_of(batch: StreamBatch) -> list[tuple]:
    return [rollout.fetch() for rollout in batch.rank_batches[0].rollouts]


@pytest.mark.parametrize("with_reward", [True, False])
def test_iterations_come_in_order_with_their_own_scores(with_reward: bool) -> None:
    stream = make(Log(), with_reward=with_reward)
    seen = []
    for step, batch in stream.steps(from_step=1):
        assert kept_of(batch) == [("kept", step, step, [k, k + 1]) for k in (0, 2, 4)], "made by the newest policy"
        assert list(batch.rank_batches[0].sample_ids) == list(range(6)) and batch.group_ids == [0, 0, 1, 1, 2, 2]
        assert batch.scores.total.tolist() == [100, 101, 102, 103, 104, 105]
        assert batch.versions == [step] * 6 and batch.staleness(step) == {"staleness/mean": 0.0, "staleness/max": 0.0}
        stream.publish(version=step + 1)
        seen.append(step)
    assert seen == [1, 2]


def test_scoring_runs_while_the_next_micro_batch_is_generated() -> None:
    log = Log()

    def generate_and_look(log: Log, requests: list[Request], iteration: int, version: int) -> tuple:
        if requests[0].sample_id > 0:
            assert log.scoring.wait(5), "the first micro-batch is not being scored while the second is generated"
        return generate(log, requests, iteration, version)

    def slow_score(log: Log, seen: tuple) -> Scores:
        log.scoring.set()
        return score(log, seen)

    first(make(log, generate_and_look, slow_score))


def test_without_overlap_scoring_waits_for_the_last_micro_batch() -> None:
    log = Log()
    first(make(log, with_reward=False))
    assert log.events[:3] == ["generate 0", "generate 2", "generate 4"]


def test_the_time_that_scoring_adds_is_measured() -> None:
    def slow(log: Log, seen: tuple) -> Scores:
        time.sleep(0.1)
        return score(log, seen)

    batch = first(make(Log(), score=slow))
    assert 0.2 < batch.wait_s < 1.0
    assert batch.generate_s < 0.1


def test_generation_waits_for_scoring_when_too_much_is_pending_and_the_wait_is_counted() -> None:
    log, free = Log(), threading.Semaphore(0)

    def generate_and_free(log: Log, requests: list[Request], iteration: int, version: int) -> tuple:
        if requests[0].sample_id == 2:  # the first is being scored, this one is the second that is allowed
            threading.Timer(0.3, lambda: free.release(3)).start()
        return generate(log, requests, iteration, version)

    def held_score(log: Log, seen: tuple) -> Scores:
        assert free.acquire(timeout=10)
        return score(log, seen)

    batch = first(make(log, generate_and_free, held_score, max_pending=2))
    assert log.events.index("score 0") < log.events.index("generate 4"), "two were pending"
    assert batch.scores.total.tolist() == [100, 101, 102, 103, 104, 105]
    assert batch.wait_s > 0.2 > batch.generate_s


def test_several_threads_score_at_the_same_time_and_results_keep_their_order() -> None:
    together = threading.Barrier(3)

    def meet(log: Log, seen: tuple) -> Scores:
        together.wait(10)
        time.sleep(0.1 * (4 - seen[1][0]))  # the first is ready last
        return score(log, seen)

    log = Log()
    assert first(make(log, score=meet, threads=3)).scores.total.tolist() == [100, 101, 102, 103, 104, 105]
    assert [event for event in log.events if event.startswith("score")] == ["score 4", "score 2", "score 0"]


@pytest.mark.parametrize("error", [ValueError("a row without target"), TimeoutError("engine")])
def test_an_error_of_scoring_rises_in_the_task(error: Exception) -> None:
    def broken(log: Log, seen: tuple) -> Scores:
        raise error

    with pytest.raises(type(error), match=str(error)):
        first(make(Log(), score=broken))


def test_an_error_of_generation_rises_where_it_happens() -> None:
    def broken(*_: object) -> None:
        raise KeyError("boom")

    with pytest.raises(KeyError) as caught:
        first(make(Log(), broken))
    assert caught.traceback[-1].name == "broken", "the stack trace leads to the line"


class Carrier:
    """Weights that are a number: the actor's version."""

    def __init__(self, sampler: Any) -> None:
        self.sampler, self.events = sampler, []
        self.staged: set[int] = set()

    def transfer(self, version: int) -> None:
        assert not self.staged, "the one before is applied first"
        self.events.append(f"transfer {version}")
        self.staged.add(version)

    def apply(self, version: int) -> Any:
        self.staged.remove(version)

        def take(log: Log) -> None:
            log.version = version

        return self.sampler.call(take)

    def reconnect(self) -> None:
        self.events.append("reconnect")
        self.staged.clear()


def apart(**more: Any) -> tuple[RolloutStream, Carrier, Log]:
    """A stream whose sampler has weights of its own."""
    log = Log()
    sampler = LocalRole(log, "sampler")
    weights = Carrier(sampler)
    roles = Roles(actor=LocalRole(Log()), sampler=sampler, scorer=ThreadRole(log, "scorer"), weights=weights)

    def checked(log: Log, requests: list[Request], iteration: int, version: int) -> tuple:
        assert log.version == version, "the sampler has the weights that the samples are tagged with"
        return generate(log, requests, iteration, version)

    return stream_of(roles, checked, **more), weights, log


@pytest.mark.parametrize(
    ("staleness", "start", "made_by"),
    [(0, 0, [0, 1, 2, 3]), (1, 0, [0, 0, 1, 2]), (0, 2, [2, 3]), (1, 2, [1, 2]), (2, 0, [0, 0, 0, 1])],
)
def test_which_version_makes_an_iteration(staleness: int, start: int, made_by: list[int]) -> None:
    stream, weights, _ = apart(max_staleness=staleness, total_steps=4)
    seen = []
    for step, batch in stream.steps(from_step=start):
        seen.append(batch.versions[0])
        assert len(set(batch.versions)) == 1
        assert batch.staleness(step)["staleness/max"] <= staleness
        stream.publish(version=step + 1)
    assert seen == made_by
    used = [f"transfer {fromkey}" for fromkey in dict.fromkeys(made_by)]
    assert [event for event in weights.events if event in used] == used, "each is sent once, in order"
    assert "transfer 4" not in weights.events, "nothing is made by the last weights"


def test_weights_are_on_their_way_as_soon_as_they_are_published() -> None:
    stream, weights, _ = apart()
    labels, transfer = [], weights.transfer
    weights.transfer = lambda version: (transfer(version), labels.append(stream.roles.driver.record.label))
    next(stream.steps())
    stream.publish(version=1)
    assert weights.events[-1] == "transfer 1", "before the next iteration is asked for"
    assert [(label.step, label.version) for label in labels] == [(1, 0), (2, 1)], "in the timeline of the next step"


def test_with_a_lag_of_one_the_next_iteration_is_begun_before_the_update() -> None:
    stream, _, log = apart(max_staleness=1)
    for step, _ in stream.steps():
        if step < 2:
            assert f"generate {10 * (step + 1)}" in log.events
        assert f"generate {10 * (step + 2)}" not in log.events
        stream.publish(version=step + 1)


@dataclass
class SlowHandle:
    """A value that is there when it is let go."""

    value: Any
    seconds: float = 0.0
    nbytes: int = 0
    is_done: bool = False
    error: Exception | None = None
    is_lost: bool = False

    def done(self) -> bool:
        return self.is_done

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def fetch(self) -> Any:
        return self.value


@dataclass
class QueuedRole(LocalRole):
    """A sampler that ends its calls when the driver waits, in order, and may be lost."""

    state: Any
    name: str = "sampler"
    queue: list = field(default_factory=list)
    restarts: int = 0
    size: int = 0
    num_data_ranks: int = 1

    def __post_init__(self) -> None:
        super().__init__(self.state, self.name)
        self.data_ranks, self.num_data_ranks = range(2), 2

    def call(self, function: Callable[..., Any], *args: Any, kind: str = "other") -> Any:
        self.queue.append(partial(function, self.state, *args))
        return DoneFuture()

    def map_remote(
        self, function: Callable[..., Any], parts: list, *args: Any, num_values: int = 1, kind: str = "other"
    ) -> list:
        results = [tuple(SlowHandle(None, nbytes=self.size) for _ in range(2 if part else 0)) for part in parts]

        def work() -> None:
            for part, handles in zip(parts, results, strict=True):
                for handle, value in zip(handles, function(self.state, part, *args) if part else (), strict=True):
                    handle.value, handle.is_done = value, True

        work.handles = [handle for handles in results for handle in handles]
        self.queue.append(work)
        return results

    def lose(self) -> None:
        for call in self.queue:
            for handle in getattr(call, "handles", ()):
                handle.is_done, handle.error = True, RoleLostError("sampler", [0], "killed")
        self.queue.clear()

    def restart(self) -> None:
        self.restarts += 1
        if self.restarts > 1:
            raise RoleLostError(self.name, [0], "replaced once already")
        self.state.version = None


class DoneFuture:
    def done(self) -> bool:
        return True

    def result(self) -> None:
        return None


class PumpingDriver(Driver):
    """Ends one of the sampler's calls at each wait."""

    def __init__(self, sampler: QueuedRole) -> None:
        super().__init__()
        self.sampler, self.longest_queue = sampler, 0

    def wait(self, pending: Iterable[Any]) -> None:
        self.longest_queue = max(self.longest_queue, sum(hasattr(call, "handles") for call in self.sampler.queue))
        if self.sampler.queue:
            self.sampler.queue.pop(0)()
        else:
            super().wait(pending)


class KeptScorer(ThreadRole):
    """Sees the values of slow handles."""

    def submit(self, function: Callable[..., Any], *args: Any, kind: str = "other") -> Any:
        if any(handle.is_lost for handle in args):
            return FailedFuture(ValuesLostError("sampler", (), "its machine is gone"))
        return super().submit(function, *(LocalHandle(handle.fetch()) for handle in args), kind=kind)


@dataclass
class FailedFuture:
    error: Exception

    def done(self) -> bool:
        return True

    def result(self) -> None:
        raise self.error


class FarActor(LocalRole):
    """Takes values from another machine."""

    def prefetch(self, parts: list) -> Any:
        if any(handle.is_lost for part in parts for handle in part):
            return FailedFuture(ValuesLostError("sampler", (), "its machine is gone"))
        return super().prefetch(parts)


def queued(**more: Any) -> tuple[RolloutStream, QueuedRole, PumpingDriver, Carrier]:
    """A stream whose sampler has two data-parallel ranks, which work when the driver waits."""
    sampler = QueuedRole(Log())
    driver, weights = PumpingDriver(sampler), Carrier(sampler)
    roles = Roles(
        actor=FarActor(Log()), sampler=sampler, scorer=KeptScorer(Log(), "scorer"), weights=weights, driver=driver
    )

    def checked(log: Log, requests: list[Request], iteration: int, version: int) -> tuple:
        assert log.version == version
        return generate(log, requests, iteration, version)

    return stream_of(roles, checked, **more), sampler, driver, weights


@pytest.mark.parametrize("asked_after", [{1}, {2, 3}, {1, 2, 3, 4}])
@pytest.mark.parametrize(("staleness", "offload"), [(0, False), (0, True), (1, False)])
def test_drawing_by_the_newest_weights_in_between_changes_nothing_that_is_learned_from(
    staleness: int, asked_after: set[int], offload: bool
) -> None:
    """As evaluations on request do after a step, while the next iteration may not be begun."""

    def learned_from(asked_after: set[int]) -> list[Any]:
        stream, sampler, _, weights = queued(max_staleness=staleness, total_steps=4, offload=offload, max_queued=1)
        for role in (stream.roles.actor, sampler):
            role.state.offload = lambda: None

        def draw() -> int:
            while sampler.queue:  # its calls come first
                sampler.queue.pop(0)()
            return sampler.state.version

        learned = []
        for step, batch in stream.steps():
            learned.append((kept_of(batch), batch.versions, batch.scores.total.tolist()))
            stream.publish(version=step + 1)
            for _ in range(step + 1 if step + 1 in asked_after else 0):
                assert stream.with_latest_weights(draw) == step + 1
        versions = [int(event.split()[1]) for event in weights.events]
        assert versions == sorted(set(versions)), "a connection sends no older weights"
        return learned

    assert learned_from(asked_after) == learned_from(set())


def test_data_parallel_ranks_of_the_sampler_and_of_the_actor_may_differ() -> None:
    stream, _, driver, _ = queued()
    batch = first(stream)
    assert [rollout[3] for rollout in kept_of(batch)] == [[0, 1], [2, 3], [4, 5]]
    assert list(batch.rank_batches[0].sample_ids) == list(range(6))
    assert batch.scores.total.tolist() == [100, 101, 102, 103, 104, 105]
    assert driver.longest_queue <= 2, "the sampler is given no more than it needs"


@pytest.mark.parametrize("max_queued", [1, 2, 3])
def test_how_much_the_sampler_is_given_at_a_time_is_a_setting(max_queued: int) -> None:
    stream, _, driver, _ = queued(max_queued=max_queued, micro_batch_size=1)
    assert len(first(stream).group_ids) == 6 and driver.longest_queue == max_queued


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("lost_at", [0, 1, 2, 3, 4, 5])
def test_a_sampler_that_is_lost_makes_again_what_it_had_not_finished(staleness: int, lost_at: int) -> None:
    stream, sampler, driver, weights = queued(max_staleness=staleness)
    waits = iter(range(100))
    wait = driver.wait

    def wait_or_lose(pending: Iterable[Any]) -> None:
        if next(waits) == lost_at:
            sampler.lose()
        wait(pending)

    driver.wait = wait_or_lose
    for step, batch in stream.steps():
        assert [rollout[1] for rollout in kept_of(batch)] == [step] * 3
        assert batch.staleness(step)["staleness/max"] <= staleness
        if staleness <= 1:
            assert batch.versions == [max(step - staleness, 0)] * 6
        stream.publish(version=step + 1)
    assert sampler.restarts <= 1 and weights.events.count("reconnect") == sampler.restarts
    assert lost_at > 0 or sampler.restarts == 1


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("lost_at", range(8))
@pytest.mark.parametrize("and_its_process", [False, True])
def test_samples_that_are_lost_with_their_machine_are_drawn_again(
    staleness: int, lost_at: int, and_its_process: bool
) -> None:
    """By the weights that drew them, whether they had been scored or not; they are not scored twice."""
    stream, sampler, driver, weights = queued(max_staleness=staleness, total_steps=4)
    waits, wait, lost = itertools.count(), driver.wait, []

    def wait_and_lose(pending: Iterable[Any]) -> None:
        if next(waits) == lost_at:
            for round_ in stream.in_flight.rounds:
                if round_.is_generated:
                    lost.append(round_)
                    for handle in round_.handles:
                        handle.is_lost, handle.value = True, None
            if and_its_process:
                sampler.lose()
        wait(pending)

    driver.wait = wait_and_lose
    for step, batch in stream.steps():
        rollouts = kept_of(batch)
        assert [rollout[1] for rollout in rollouts] == [step] * 3
        assert [rollout[3] for rollout in rollouts] == [[0, 1], [2, 3], [4, 5]]
        assert [version for rollout in rollouts for version in [rollout[2]] * 2] == batch.versions
        assert batch.scores.total.tolist() == [100, 101, 102, 103, 104, 105]
        assert batch.staleness(step)["staleness/max"] <= staleness
        if staleness <= 1:
            assert batch.versions == [max(step - staleness, 0)] * 6
        stream.publish(version=step + 1)
    assert sampler.restarts <= int(and_its_process), "a sampler that lives is not replaced"
    if staleness <= 1:
        scored = [event for event in stream.roles.scorer.state.events if event.startswith("score")]
        assert len(scored) == len(set(scored)) == 12
    assert lost or lost_at != 2, "the first micro-batch had been drawn"
    assert not lost or weights.events.count("reconnect") >= 1


def test_a_sampler_that_is_lost_while_it_draws_lost_samples_again() -> None:
    stream, sampler, driver, weights = queued(max_staleness=1)
    wait, lost, again = driver.wait, [], []

    def wait_and_lose(pending: Iterable[Any]) -> None:
        if weights.events.count("reconnect") == 1 and not again:
            again.append(True)
            sampler.lose()
        elif not lost:
            lost.extend(
                handle for round_ in stream.in_flight.rounds if round_.is_being_scored for handle in round_.handles
            )
            for handle in lost:
                handle.is_lost, handle.value = True, None
        wait(pending)

    driver.wait = wait_and_lose
    for step, batch in stream.steps():
        assert [rollout[1:3] for rollout in kept_of(batch)] == [(step, max(step - 1, 0))] * 3
        stream.publish(version=step + 1)
    assert lost and again and sampler.restarts == 1


def test_a_sampler_that_is_lost_too_often_ends_the_run() -> None:
    stream, sampler, driver, _ = queued()
    driver.wait = lambda _: sampler.lose()
    with pytest.raises(RoleLostError, match="role sampler, rank 0: replaced once already"):
        first(stream)
    assert sampler.restarts == 2


def test_samples_on_their_way_are_bounded_by_the_memory_for_them() -> None:
    stream, sampler, driver, _ = queued(max_staleness=2, total_steps=3)
    sampler.size, driver.store_bytes = 100, 2200  # three of four values of 100 bytes in a round; an iteration is 600
    for step, _ in stream.steps():
        begun = {round_.step for round_ in stream.in_flight.rounds if round_.is_begun}
        assert begun <= {step + 1}, "two iterations and the next would not fit"
        stream.publish(version=step + 1)


def test_an_iteration_that_never_fits_is_refused() -> None:
    stream, sampler, driver, _ = queued(micro_batch_size=1)
    sampler.size, driver.store_bytes = 100, 900
    with pytest.raises(ConfigError, match="object store"):
        first(stream)


def test_roles_return_futures_and_close() -> None:
    thread = ThreadRole(5, "scorer")
    names = [LocalRole(5).call(lambda state, x: (state, x, threading.current_thread().name), 1).result()]
    names.append(thread.submit(lambda state, x: (state, x, threading.current_thread().name), 2).result())
    assert names[0] == (5, 1, "MainThread")
    assert names[1][:2] == (5, 2) and names[1][2].startswith("scorer")
    thread.close()
    with pytest.raises(RuntimeError):
        thread.call(lambda state: None)


def test_functions_see_the_values_of_handles() -> None:
    role = LocalRole(1)
    ((handle, other),) = role.map_remote(lambda state, part: (state + part, "b"), [2], num_values=2)
    assert role.map(lambda state, part: part, [([handle], (other, 4))]).result() == ([3], ("b", 4))
    assert role.map_remote(lambda state, part: part, [None]) == [()]


def test_what_roles_did_is_noted_with_its_step_and_the_kind_of_the_work() -> None:
    log, record = Log(), Record()
    actor = LocalRole(log, record=record)
    scorer = ThreadRole(log, "scorer", record=record)
    first(stream_of(Roles(actor=actor, sampler=actor, scorer=scorer, driver=Driver(record))))
    actor.map(lambda state, part: None, [1], kind="update")
    actor.call(lambda state: None)
    scorer.close()
    events = record.pop_events()
    done = [
        (event.role, event.kind, event.step, event.version) for event in sorted(events, key=lambda event: event.kind)
    ]
    assert done[:3] == [("actor", "generate", 1, 0)] * 3 and done[4:7] == [("scorer", "score", 1, 0)] * 3
    assert [kind for _, kind, _, _ in done] == ["generate"] * 3 + ["other"] + ["score"] * 3 + ["update"]
    assert all(event.end >= event.start for event in events)


def test_finished_work_is_saved_when_rewards_fail_but_not_by_an_actor_that_is_lost() -> None:
    saved: list[str] = []
    roles = make(Log()).roles
    for error, times in ((RoleLostError("scorer", [1], "killed"), 1), (RoleLostError("actor", [0], "killed"), 1)):
        with pytest.raises(RoleLostError), roles.rescuing(lambda _: saved.append("saved")):
            raise error
        assert len(saved) == times


@dataclass
class EndsBetweenLooks:
    """A call that has not ended when it is looked at first, and has when it is looked at again."""

    value: Any
    looks: int = 0

    def done(self) -> bool:
        self.looks += 1
        return self.looks > 1

    def result(self) -> Any:
        return self.value


class OddScorer(LocalRole):
    def submit(self, function: Callable[..., Any], *args: Any, kind: str = "other") -> Any:
        return EndsBetweenLooks(self.call(function, *args, kind=kind).result())


def test_what_ends_between_two_looks_is_no_standstill() -> None:
    actor = LocalRole(Log())
    stream = stream_of(Roles(actor=actor, sampler=actor, scorer=OddScorer(Log(), "scorer")), max_pending=1)
    assert len(first(stream).scores.total) == 6
