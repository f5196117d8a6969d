"""The timeline: what is counted as busy, what a resumed run keeps, and what the report shows of it."""

from __future__ import annotations

import json
import random
import re
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch
from matplotlib.figure import Figure

from sfumato.errors import DataError
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.charts import LIGHT, MAX_BARS, MAX_RANKS, choose_stretch, draw_rows, stand_in, timeline_svg
from sfumato.tracking.json_lines import JsonLines, read_jsonl
from sfumato.tracking.report import write_report
from sfumato.tracking.run import Run
from sfumato.tracking.timeline import Event, Timeline, read_events, step_windows, union_seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeline that is made now begins at second 0."""
    monkeypatch.setattr("sfumato.tracking.timeline.time.time", lambda: 0.0)


def event(role: str, rank: int, start: float, end: float, kind: str = "generate", step: int = 1, version=None) -> Event:
    return Event(role, rank, kind, start, end, step, version)


def test_an_event_does_not_end_before_it_starts() -> None:
    with pytest.raises(ValueError, match="sampler 3"):
        event("sampler", 3, 2.0, 1.0)
    with pytest.raises(ValueError, match="ends before"):
        event("sampler", 3, 2.0, float("nan"))


def test_overlaps_count_once() -> None:
    assert union_seconds([]) == 0.0
    assert union_seconds([(5, 6), (0, 2), (1, 3), (1.5, 1.6)]) == 4.0


def test_a_call_that_outlasts_its_step_is_credited_later_and_no_second_is_lost(tmp_path: Path, clock: None) -> None:
    timeline = Timeline(tmp_path)
    timeline.add([event("actor", 0, -3.0, 1.0), event("actor", 0, 0.5, 2.0)])  # what was before the run is not counted
    assert timeline.end_step(1, now=4.0) == {"utilisation/actor": 0.5}
    assert timeline.end_step(2, now=8.0) == {"utilisation/actor": 0.0}, "the long call is not known yet"
    timeline.add([event("actor", 0, 1.0, 11.0)])  # its first second has been counted
    assert timeline.end_step(3, now=12.0) == {"utilisation/actor": 1.0}
    assert timeline.end_step(4, now=20.0) == {"utilisation/actor": 5.0 / 8}, "9 new seconds, of which a step holds 4"
    assert timeline.end_step(5, now=24.0) == {"utilisation/actor": 0.0}
    timeline.close()
    assert step_windows(read_events(tmp_path))[3] == (8.0, 12.0)


def test_processes_count_from_when_they_are_seen(tmp_path: Path, clock: None) -> None:
    timeline = Timeline(tmp_path)
    timeline.add([event("actor", 0, -9.0, -1.0), event("scorer", 2, 0.0, 2.0)])
    assert timeline.end_step(1, now=2.0) == {"utilisation/actor": 0.0, "utilisation/scorer": 1.0}
    timeline.add([event("actor", 1, 2.0, 4.0)])
    assert timeline.end_step(2, now=4.0) == {"utilisation/actor": 0.5, "utilisation/scorer": 0.0}


def test_seconds_of_travelling_weights_are_those_of_the_process_that_took_longest(tmp_path: Path, clock: None) -> None:
    timeline = Timeline(tmp_path)
    timeline.add([event("actor", 0, 0.0, 3.0, "sync"), event("actor", 0, 4.0, 5.0, "update")])
    timeline.add([event("sampler", 1, 0.5, 3.0, "sync"), event("sampler", 1, 3.0, 4.5, "sync")])
    assert timeline.end_step(1, now=8.0)["time/sync_s"] == 4.0, "the sampler's, not the sum over processes"
    timeline.add([event("actor", 0, 8.0, 9.0, "update")])
    assert "time/sync_s" not in timeline.end_step(2, now=16.0), "no weights were sent"


def test_credited_seconds_add_up_to_the_busy_ones(tmp_path: Path, clock: None) -> None:
    rng = random.Random(0)
    timeline, events, credited, at = Timeline(tmp_path), [], 0.0, 0.0
    timeline.add([event("actor", rank, -2.0, -1.0) for rank in range(2)])
    for step in range(1, 40):
        now = at + rng.uniform(0.5, 3.0)
        new = [
            event("actor", rng.randrange(2), max(0.0, end - rng.uniform(0, 5)), end)
            for end in (rng.uniform(at, now) for _ in range(rng.randrange(4)))
        ]
        timeline.add(new)
        events += new
        share = timeline.end_step(step, now).get("utilisation/actor", 0.0)
        assert 0.0 <= share <= 1.0
        credited, at = credited + share * 2 * (now - at), now
    for step in range(40, 60):
        credited, at = credited + timeline.end_step(step, at + 10.0)["utilisation/actor"] * 20.0, at + 10.0
    busy = sum(union_seconds((span.start, span.end) for span in events if span.rank == rank) for rank in range(2))
    assert credited == pytest.approx(busy, rel=1e-9) and busy > 20


def test_a_run_without_events_has_no_timeline(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    assert timeline.end_step(1) == {}
    timeline.close()
    assert list(tmp_path.iterdir()) == [] and read_events(tmp_path) == []


def test_a_resumed_run_drops_what_it_repeats_and_reads_back_what_it_wrote(tmp_path: Path) -> None:
    first = [event("sampler", 1, step + 0.125, step + 0.5, step=step, version=step - 1) for step in range(1, 5)]
    timeline = Timeline(tmp_path)
    timeline.add(first)
    timeline.close()
    with (tmp_path / "timeline.jsonl").open("a") as file:
        file.write('{"role": "samp')
    assert read_events(tmp_path) == first, "a torn last line is what a crash leaves"
    resumed, again = Timeline(tmp_path, keep_until_step=2), event("scorer", 0, 9.0, 9.5, "score", step=3)
    resumed.add([again])
    resumed.close()
    assert read_events(tmp_path) == [*first[:2], again]


def test_events_may_come_from_several_threads(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)

    def feed(rank: int) -> None:
        for number in range(200):
            timeline.add([event("scorer", rank, number, number + 1, "score")])

    threads = [threading.Thread(target=feed, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    timeline.close()
    assert len(read_events(tmp_path)) == 800


def test_a_run_writes_what_its_roles_did_beside_its_timings(tmp_path: Path) -> None:
    for from_step in (0, 2):
        run = Run(tmp_path, "test", Mesh(Layout(), torch.device("cpu")))
        run.begin(4, from_step, [])
        for step in range(from_step + 1, 5):
            began = time.time()
            time.sleep(0.02)
            run.add_events([event("actor", 0, began, time.time(), "update", step)], {})
            run.log(step, {"loss": 0.5}, show={})
        run.close()
    work = [event for event in read_events(tmp_path) if event.role == "actor"]
    assert [event.step for event in work] == [1, 2, 3, 4], "the resumed run dropped the steps that it repeated"
    windows = step_windows(read_events(tmp_path))
    assert windows[1][1] == windows[2][0] and windows[3][1] == windows[4][0], "steps follow each other"
    lines = read_jsonl(tmp_path / "timings.jsonl")
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        start, end = windows[line["step"]]
        worked = [
            (max(span.start, start), min(span.end, end)) for span in work if span.start < end and span.end > start
        ]
        busy = union_seconds(worked) / (end - start)
        assert line["utilisation/actor"] == pytest.approx(busy, abs=1e-3) and 0.0 < busy <= 1.0


def test_only_the_newest_part_of_a_long_file_is_read(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path)
    timeline.add([event("actor", 0, number, number + 1, step=number) for number in range(100)])
    timeline.close()
    some = read_events(tmp_path, tail_bytes=500)
    assert 1 < len(some) < 10 and some == read_events(tmp_path, tail_bytes=None)[-len(some) :]


@pytest.mark.parametrize(
    "broken",
    ["{", "[1]", '{"role": "actor"}', '{"role": "a", "rank": 0, "kind": "b", "start": 2, "end": 1, "step": 1}', "7"],
)
def test_a_broken_line_is_named(tmp_path: Path, broken: str) -> None:
    good = json.dumps({"role": "a", "rank": 0, "kind": "b", "start": 0, "end": 1, "step": 1})
    (tmp_path / "timeline.jsonl").write_text(f"{good}\n{broken}\n{good}\n")
    with pytest.raises(DataError, match=r"timeline\.jsonl.*is no event"):
        read_events(tmp_path)


def fill(folder: Path, steps: int = 6, samplers: int = 2, calls: int = 4) -> list[Event]:
    """A one-step-off run of ten seconds a step: an actor that also saves, samplers, a scorer."""
    events = []
    for step in range(1, steps + 1):
        start = 10.0 * step
        events.append(event("actor", 0, start + 1, start + 9, "update", step))
        events.append(event("actor", 0, start + 2, start + 4, "save", step))
        for rank in range(samplers):
            for call in range(calls):
                at = start + 10 * call / calls
                events.append(event("sampler", rank, at, at + 9.9 / calls, "generate", step + 1, step - 1))
        events.append(event("scorer", 0, start + 3, start + 3.0001, "score", step + 1))
        events.append(event("scorer", 0, start + 5, start + 6, "odd", step + 1))
        events.append(Event("run", 0, "step", start, start + 10, step))
    with closing(JsonLines(folder / "timeline.jsonl")) as file:
        for added in events:
            file.write({name: value for name, value in vars(added).items() if value is not None})
    return events


def test_a_picture_shows_the_last_steps_of_every_process(tmp_path: Path) -> None:
    stretch = choose_stretch(fill(tmp_path))
    assert stretch is not None
    assert (stretch.start, stretch.end) == (30.0, 70.0) and list(stretch.ends) == [3, 4, 5, 6]
    assert list(stretch.rows) == [("actor", 0), ("sampler", 0), ("sampler", 1), ("scorer", 0)]
    assert {span.step for span in stretch.rows["actor", 0]} == {3, 4, 5, 6}


def test_many_calls_make_it_shorter_and_many_processes_are_sampled(tmp_path: Path) -> None:
    stretch = choose_stretch(fill(tmp_path, calls=MAX_BARS // 6))
    assert stretch is not None and list(stretch.ends) == [5, 6]
    stretch = choose_stretch(fill(tmp_path, calls=MAX_BARS))
    assert stretch is not None and list(stretch.ends) == [6], "one step is shown however much it holds"
    stretch = choose_stretch(fill(tmp_path, samplers=100))
    assert stretch is not None and stretch.left_out == {"sampler": (MAX_RANKS, 100)}
    ranks = [rank for role, rank in stretch.rows if role == "sampler"]
    assert len(ranks) == MAX_RANKS and ranks[0] == 0 and ranks[-1] == 99


def test_nothing_to_show_is_none() -> None:
    assert choose_stretch([]) is None
    assert choose_stretch([Event("run", 0, "step", 0.0, 1.0, 1)]) is None
    assert choose_stretch([event("actor", 0, 0.0, 1.0)]) is None, "no step has ended"


def bars(svg: str, kind: str) -> int:
    """How many bars have the colour of a kind, its entry in the legend left out."""
    return sum(drawn.count("M") for drawn in re.findall(rf'd="([^"]*)"[^>]*fill: var\(--{kind}\)', svg)) - 1


def test_bars_have_the_colours_of_their_kinds(tmp_path: Path) -> None:
    stretch = choose_stretch(fill(tmp_path), max_steps=2)
    assert stretch is not None
    svg = timeline_svg(stretch, "t-")
    counts = {kind: bars(svg, kind) for kind in ("update", "save", "score", "other")}
    assert counts == {"update": 2, "save": 2, "score": 2, "other": 2}
    assert "var(--sync)" not in svg, "a kind that did not happen is not in the legend"
    assert not any(stand_in(name) in svg for name in LIGHT)
    assert 'aria-label="what each process did in steps 5 to 6"' in svg


def test_calls_beside_each_other_share_the_height_of_their_row(tmp_path: Path) -> None:
    stretch = choose_stretch(fill(tmp_path), max_steps=1)
    assert stretch is not None
    results = []
    axes = Figure().add_subplot()
    draw_rows(axes, stretch)
    for bar in (corners for patch in axes.patches for corners in patch.get_path().to_polygons()):
        (left, top), (right, bottom) = bar.min(0).round(3), bar.max(0).round(3)
        results.append((round(bottom - top, 3), left, right))
    assert sorted(results)[:2] == [(0.4, 1.0, 9.0), (0.4, 2.0, 4.0)], "the actor's update, and its save meanwhile"
    assert {height for height, _, _ in sorted(results)[2:]} == {0.8}, "all other calls have their row for themselves"


def test_calls_too_short_to_be_seen_become_one_bar(tmp_path: Path) -> None:
    few, many = (choose_stretch(fill(tmp_path, steps=1, calls=calls)) for calls in (10, 4000))
    assert few is not None and many is not None
    assert bars(timeline_svg(few, ""), "generate") > 19
    assert bars(timeline_svg(many, ""), "generate") < 1400


def test_the_report_shows_the_timeline_and_its_curves_in_a_place_of_their_own(tmp_path: Path) -> None:
    with closing(JsonLines(tmp_path / "metrics.jsonl")) as metrics:
        metrics.write({"step": 1, "loss": 0.5, "staleness/mean": 0.75, "staleness/max": 1})
    page = write_report(tmp_path).read_text()
    assert page.count('data-metric="staleness/mean"') == 1 and 'class="timeline"' not in page
    fill(tmp_path, samplers=20)
    with closing(JsonLines(tmp_path / "timings.jsonl")) as timings:
        timings.write({"step": 1, "utilisation/actor": 0.5})
    page = write_report(tmp_path).read_text()
    section = page.split("What each role did")[1].split("<section>")[0]
    assert page.count('class="timeline"') == 1 and "8 of 20 sampler rows" in section
    for name in ("utilisation/actor", "staleness/mean", "staleness/max"):
        assert f'data-metric="{name}"' in section and page.count(f'data-metric="{name}"') == 1
    ids = [part.split('"')[0] for part in page.split(' id="')[1:]]
    assert len(ids) == len(set(ids)) > 0


def test_a_report_of_a_run_without_roles_has_no_such_place(tmp_path: Path) -> None:
    with closing(JsonLines(tmp_path / "metrics.jsonl")) as metrics:
        metrics.write({"step": 1, "loss": 0.5})
    assert "What each role did" not in write_report(tmp_path).read_text()
