"""What is in flight, and what a person who waits for a call is told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sfumato.runtime.cluster.process import Arguments, CallPart, RayFuture
from sfumato.runtime.roles import Driver, LocalHandle, Record
from sfumato.runtime.rounds import InFlight, Iteration, Round, Unit


@pytest.mark.parametrize(("nbytes", "has_room"), [(50, True), (51, False)])
def test_the_memory_for_samples_may_be_filled_to_its_last_byte(nbytes: int, has_room: bool) -> None:
    driver = Driver()
    driver.store_bytes = 200
    in_flight = InFlight(driver, max_queued=2, max_pending=8, store_fraction=0.5)
    drawn = Round(0, [Unit([], made=(LocalHandle("samples", nbytes=nbytes),))])
    in_flight.iterations.append(Iteration(0, [drawn]))
    assert in_flight.to_score(with_reward=True) is drawn, "by which it knows how large a round is"
    assert in_flight.has_room(is_needed=False) == has_room, "for as much again"


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_groups_that_are_added_are_all_drawn_and_ranks_take_turns(num_ranks: int) -> None:
    iteration = Iteration(0, [])
    for number in range(4):
        iteration.add([[f"{number} {place}"] for place in range(number)], num_ranks)
    expected = [[f"{number} {place}"] for number in range(4) for place in range(number)]
    assert [unit.requests for unit in iteration.units] == expected == iteration.added
    drawn_by = [rank for round_ in iteration.rounds for rank, unit in enumerate(round_.by_rank) if unit is not None]
    assert drawn_by == [number % num_ranks for number in range(6)]


@pytest.mark.parametrize(
    ("replies", "text"),
    [
        ([(None, None), (None, None)], "it waits for its arguments"),
        (
            [("reference", 3.0), ("reference", None)],
            "ranks 0 have run it for 3 s; ranks 1 have not begun or not said so",
        ),
        ([(None, 3.0), ("reference", 2.0)], "ranks 1 have run it for 2 s"),
        ([(None, None), ("reference", None)], "ranks 1 have not begun or not said so"),
    ],
)
def test_who_waits_is_told_what_each_process_does(replies: list[tuple], text: str) -> None:
    parts = [CallPart(SimpleNamespace(rank=rank), Arguments((b"", []), []), ships=rank == 0) for rank in range(2)]
    for part, reply in zip(parts, replies, strict=True):
        part.reference, part.running_s = reply
    call = RayFuture(SimpleNamespace(record=Record()), "sampler", None, parts)
    assert call.state() == text
