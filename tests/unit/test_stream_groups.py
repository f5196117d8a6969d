"""Groups as units of the rollout stream: delivered as they finish, more of them asked for; and turns on common GPUs."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import pytest

from sfumato.rewards.scoring.scores import Scores
from sfumato.runtime.rounds import ScoredGroup
from sfumato.runtime.stream import RolloutStream
from tests.unit.test_stream import Log, Request, apart, generate, kept_of, make, queued, scores_of

WANTED = 4


def is_useful(group: ScoredGroup) -> bool:
    """Of every three groups that were asked for, one has rewards that are all equal."""
    return group.requests[0].group_id % 3 != 1


def until_enough(iteration: int, scored: Sequence[ScoredGroup], num_requested: int, shown: list) -> list[list[Request]]:
    """Dynamic sampling: groups are asked for until enough of them teach something."""
    shown.append((iteration, [group.requests[0].group_id for group in scored], num_requested))
    assert [group.scores.total.tolist() for group in scored] == [
        [100.0 + request.sample_id for request in group.requests] for group in scored
    ]
    useful = sum(map(is_useful, scored))
    lacking = WANTED - useful - (num_requested - len(scored))
    ids = range(num_requested, num_requested + max(lacking, 0))
    return [[Request(2 * group + member, group) for member in range(2)] for group in ids]


def drawn_by(stream: RolloutStream) -> list[tuple]:
    """What each iteration holds."""
    results = []
    for step, batch in stream.steps():
        assert batch.scores.total.tolist() == [100.0 + number for number in range(len(batch.group_ids))]
        assert sorted(batch.rank_batches[0].sample_ids) == list(range(len(batch.group_ids)))
        assert sorted(sample for unit in kept_of(batch) for sample in unit[3]) == list(range(len(batch.group_ids)))
        results.append((step, batch.group_ids, batch.versions, batch.rank_batches[0].sample_ids))
        stream.publish(version=step + 1)
    return results


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("seed", range(3))
def test_more_groups_are_drawn_while_an_iteration_is_under_way(staleness: int, seed: int) -> None:
    """Whatever finishes first: the requests, and the versions that draw them, are the same."""
    chance, shown = random.Random(seed), []

    def score_some_time(log: Log, seen: tuple) -> Scores:
        time.sleep(chance.uniform(0, 0.02))
        return scores_of(seen[1])

    more = partial(until_enough, shown=shown)
    stream, _, log = apart(max_staleness=staleness, micro_batch_size=1, more_groups=more, max_pending=4)
    stream.score = score_some_time
    result = drawn_by(stream)
    groups = [group for group in range(6) for _ in range(2)]
    assert [(drawn[0], drawn[1]) for drawn in result] == [(step, groups) for step in range(3)]
    assert [drawn[2] for drawn in result] == [[max(step - staleness, 0)] * 12 for step in range(3)]
    assert [event for event in log.events if event.startswith("generate")] == [
        f"generate {10 * step + sample}" for step in range(3) for sample in range(0, 12, 2)
    ], "each group by itself, in order"
    # three of four are planned, so that one more is asked for at once; groups 1 and 4 teach nothing
    told = [(1, 3), (2, 4), (3, 5), (4, 5), (5, 5), (6, 6)]
    assert [(step, len(groups), number) for step, groups, number in shown] == [
        (step, *numbers) for step in range(3) for numbers in told
    ]
    assert all(entry[1] == list(range(len(entry[1]))) for entry in shown)


def test_groups_are_delivered_while_others_are_drawn() -> None:
    events: list[str] = []

    def more(iteration: int, scored: Sequence[ScoredGroup], num_requested: int) -> list:
        events.append(f"shown {scored[-1].requests[0].group_id}")
        return []

    stream = make(Log(), more_groups=more, max_pending=1)
    stream.generate = lambda log, requests, *rest: (
        events.append(f"draw {requests[0].group_id}"),
        generate(log, requests, *rest),
    )[1]
    next(stream.steps())
    assert events == ["draw 0", "shown 0", "draw 1", "shown 1", "draw 2", "shown 2"]


@pytest.mark.parametrize("lost_at", range(9))
def test_what_is_asked_for_survives_a_lost_sampler_with_two_ranks(lost_at: int) -> None:
    def collected(lost_at: int | None) -> tuple[list, list, int]:
        shown: list = []
        stream, sampler, driver, _ = queued(max_staleness=1, more_groups=partial(until_enough, shown=shown))
        waits, wait = itertools.count(), driver.wait

        def wait_or_lose(pending: Iterable[Any]) -> None:
            if next(waits) == lost_at:
                sampler.lose()
            wait(pending)

        driver.wait = wait_or_lose
        return drawn_by(stream), shown, sampler.restarts

    undisturbed, shown, _ = collected(None)
    assert [len(groups) for _, groups, _, _ in undisturbed] == [12, 12, 12]
    result, shown_again, restarts = collected(lost_at)
    assert (result, shown_again) == (undisturbed, shown) and restarts <= 1
    assert restarts == 1 or lost_at > 0


@pytest.mark.parametrize("staleness", [0, 1])
def test_the_sampler_draws_in_its_turn_only(staleness: int) -> None:
    stream, weights, log = apart(offload=True, max_staleness=staleness, total_steps=4)
    turns = log.events
    for role, name in ((stream.roles.actor, "actor"), (stream.roles.sampler, "sampler")):
        role.state.offload = partial(turns.append, f"{name} rests")
    for step, _ in stream.steps():
        assert turns[0] == "actor rests" and turns[-1] == "sampler rests", "it has left before anybody learns"
        drawn = {int(event.split()[1]) // 10 for event in turns if event.startswith("generate")}
        first = step + staleness * (step > 0)
        assert drawn == {index for index in range(first, step + staleness + 1) if index < 4}
        assert turns.count("sampler rests") == turns.count("actor rests") == 1
        turns.clear()
        sent = list(weights.events)
        stream.publish(version=step + 1)
        assert weights.events == sent and not turns, "nothing begins in the actor's turn"


def test_turns_without_published_weights_are_an_error_and_no_endless_wait() -> None:
    stream, _, log = apart(offload=True, total_steps=2)
    for role, name in ((stream.roles.actor, "actor"), (stream.roles.sampler, "sampler")):
        role.state.offload = partial(log.events.append, f"{name} rests")
    steps = stream.steps()
    next(steps)
    with pytest.raises(AssertionError, match="iteration 1 is asked for, and the actor's newest weights are 0"):
        next(steps)
