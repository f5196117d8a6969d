"""The simulation of the pipeline against closed forms, and its bounds."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from sfumato.errors import ConfigError, DataError
from sfumato.tracking.json_lines import JsonLines
from sfumato.tracking.timeline import Event
from tests.tiny import ROOT


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script, whose neighbour is found as when it is run."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import pipeline_model

    return pipeline_model


def run(model: ModuleType, phases: object, pools: tuple[int, int, int], strategy: object, **options: object):
    return model.Pipeline(phases, model.Pools(*pools), strategy, options.pop("iterations", 24), **options).run()


def test_without_overlap_an_iteration_is_the_sum_of_its_phases(model: ModuleType) -> None:
    phases = model.Phases(generate_s=2.0, score_s=3.0, update_s=5.0, switch_s=0.25, micro_batches=4)
    result = run(model, phases, (1, 0, 1), model.SYNC)
    assert result.seconds == pytest.approx(4 * 2 + 4 * 3 + 5 + 0.25)
    assert result.utilisation["utilisation/actor"] == pytest.approx((8 + 5 + 0.25) / 25.25)
    assert result.utilisation["utilisation/scorer"] == pytest.approx(12 / 25.25)
    assert result.staleness_max == 0


@pytest.mark.parametrize(("score_s", "rollout"), [(1.0, 4 * 2 + 1), (3.0, 2 + 4 * 3)])
def test_rewards_during_rollout_leave_one_call_of_the_faster(model: ModuleType, score_s: float, rollout: float) -> None:
    phases = model.Phases(generate_s=2.0, score_s=score_s, update_s=5.0, micro_batches=4)
    assert run(model, phases, (1, 0, 1), model.SYNC_REWARD).seconds == pytest.approx(rollout + 5.0)


@pytest.mark.parametrize(("generate_s", "update_s"), [(2.0, 5.0), (2.0, 40.0), (3.0, 24.0)])
def test_one_step_off_is_the_longer_of_generation_and_update(
    model: ModuleType, generate_s: float, update_s: float
) -> None:
    phases = model.Phases(generate_s, score_s=0.1, update_s=update_s, sync_s=0.5, micro_batches=8)
    result = run(model, phases, (1, 1, 8), model.ONE_STEP_OFF)
    assert result.seconds == pytest.approx(max(8 * generate_s, update_s) + 0.5)
    assert (result.staleness_mean, result.staleness_max) == (1.0, 1)


def test_own_pools_without_staleness_take_turns(model: ModuleType) -> None:
    phases = model.Phases(generate_s=2.0, score_s=1.0, update_s=12.0, sync_s=0.5, micro_batches=8)
    result = run(model, phases, (2, 4, 4), model.STRATEGIES[2])
    assert result.seconds == pytest.approx(2 * 2 + 1 + 12 / 2 + 0.5)
    assert result.utilisation["utilisation/sampler"] == pytest.approx((4 + 0.5) / 11.5)


@pytest.mark.parametrize(("staleness", "latency"), [(1, 30.0), (2, 90.0), (4, 90.0), (4, 4.0)])
def test_a_latency_is_paid_once_in_as_many_versions_as_may_lie_between(
    model: ModuleType, staleness: int, latency: float
) -> None:
    phases = model.Phases(generate_s=2.0, score_s=latency, update_s=10.0, sync_s=0.5, micro_batches=4)
    strategy = replace(model.FULLY_ASYNC, max_staleness=staleness)
    result = run(model, phases, (1, 1, 99), strategy, iterations=60)
    round_trip = 4 * 2 + latency + 10 + 0.5
    assert result.seconds == pytest.approx(max(10.5, round_trip / (staleness + 1)), rel=0.03)
    assert result.seconds == pytest.approx(model.estimate_s(phases, model.Pools(1, 1, 99), strategy), rel=0.03)


def test_the_formula_is_never_above_the_simulation_and_near_it(model: ModuleType) -> None:
    for strategy in model.STRATEGIES:
        for pools in (model.Pools(4, 4, 8), model.Pools(2, 6, 8), model.Pools(6, 2, 4)):
            for score_s in (0.1, 0.5, 2.0):
                phases = model.Phases(0.5, score_s, update_s=12.0, sync_s=0.1, micro_batches=24)
                result = run(model, phases, (pools.actors, pools.samplers, pools.scorers), strategy)
                ratio = result.seconds / model.estimate_s(phases, pools, strategy)
                assert 0.99 < ratio < 1.2, (strategy, pools, score_s, ratio)


@pytest.mark.parametrize("noise", ["none", "lognormal:0.8", "tail:0.1:10"])
@pytest.mark.parametrize("staleness", [0, 1, 2, 5])
def test_no_sample_is_older_than_the_bound_and_no_role_is_busier_than_it_can_be(
    model: ModuleType, noise: str, staleness: int
) -> None:
    phases = model.Phases(generate_s=1.0, score_s=0.7, update_s=9.0, sync_s=0.3, micro_batches=12)
    strategy = replace(model.FULLY_ASYNC, max_staleness=staleness)
    result = run(model, phases, (2, 3, 2), strategy, factor=model.stragglers(noise))
    assert 0 <= result.staleness_mean <= result.staleness_max <= staleness
    assert result.staleness_max == staleness or staleness > 2
    assert all(0 < share <= 1 + 1e-9 for share in result.utilisation.values())
    for role, rank in {(event.role, event.rank) for event in result.events}:
        mine = sorted(
            (event for event in result.events if (event.role, event.rank) == (role, rank)), key=lambda e: e.start
        )
        ends = [event.end for event in mine]
        assert all(after.start >= end - 1e-9 for after, end in zip(mine[1:], ends, strict=False)), (role, rank)


def test_the_same_draws_for_every_strategy_and_a_mean_of_one(model: ModuleType) -> None:
    for text in ("lognormal:0.5", "tail:0.1:5"):
        factor, again = model.stragglers(text), model.stragglers(text)
        draws = [factor("generate", 3, index) for index in range(4000)]
        assert draws == [again("generate", 3, index) for index in range(4000)]
        assert sum(draws) / 4000 == pytest.approx(1.0, abs=0.05) and max(draws) > 2
    for text in ("lognormal", "lognormal:x", "tail:2:3", "often"):
        with pytest.raises(ConfigError, match="lognormal:SIGMA"):
            model.stragglers(text)


def test_an_update_on_more_processes_keeps_its_share_of_speed(model: ModuleType) -> None:
    phases = model.Phases(1.0, 1.0, update_s=8.0, update_processes=2, efficiency=0.9)
    assert phases.update_on(2) == 8.0
    assert phases.update_on(8) == pytest.approx(8.0 / 4 / 0.9**2)
    assert phases.times(4).update_s == 32.0 and phases.times(4).micro_batches == 24


def write_timeline(folder: Path) -> None:
    with closing(JsonLines(folder / "timeline.jsonl")) as file:
        for step in range(1, 5):
            slow = 10.0 if step == 1 else 1.0  # the first step warms up
            events = [Event("sampler", rank, "generate", 0.0, 2.0 * slow, step, 0) for rank in (0, 1, 0)]
            events += [Event("actor", rank, "update", 5.0, 5.0 + 6.0 * slow, step) for rank in (0, 1)]
            events += [Event("run", 0, "step", 0.0, 99.0, step)]
            for event in events:
                file.write({name: value for name, value in vars(event).items() if value is not None})


def test_phases_come_from_the_timeline_then_the_timings_then_the_flags(model: ModuleType, tmp_path: Path) -> None:
    write_timeline(tmp_path)
    with pytest.raises(DataError, match="give --score"):
        model.measured(tmp_path, {})
    lines = [{"step": step, "time/scoring_s": 1.5, "time/update_s": 77.0} for step in (1, 2, 3)]
    (tmp_path / "timings.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = model.measured(tmp_path, {"sync_s": 0.25})
    assert result == model.Phases(2.0, 0.5, 6.0, sync_s=0.25, micro_batches=3, update_processes=2)
    (tmp_path / "timeline.jsonl").unlink()
    with pytest.raises(DataError, match="--micro-batches"):
        model.measured(tmp_path, {})
    assert model.measured(tmp_path, {"micro_batches": 2, "generate_s": 1.0}).update_s == 77.0


def test_the_script_prints_its_assumptions_and_a_table_and_draws(tmp_path: Path) -> None:
    flags = "--generate 0.5 --score 0.2 --update 2 --sync 0.1 --micro-batches 4 --workers 1 4 --iterations 6"
    script = [sys.executable, str(ROOT / "benchmarks/pipeline_model.py"), *flags.split()]
    done = subprocess.run(script, capture_output=True, text=True, check=True)
    assert "Assumptions:" in done.stdout and "Simulated from: Phases(generate_s=0.5" in done.stdout
    rows = [line for line in done.stdout.splitlines() if line.startswith(("| 1 ", "| 4 "))]
    assert len(rows) == 2 + 5, "own pools need two workers"
    assert "| 4 | one-step-off | 2 + 2 |" in done.stdout


def test_timelines_of_all_strategies_stand_in_one_picture(model: ModuleType, tmp_path: Path) -> None:
    phases = model.Phases(0.5, 0.2, 2.0, sync_s=0.1, micro_batches=4)
    model.draw_timelines(phases, 4, 2, model.no_stragglers, tmp_path / "all.svg")
    svg = (tmp_path / "all.svg").read_text()
    assert svg.startswith("<svg") and "prefers-color-scheme:dark" in svg
    assert all(strategy.name in svg for strategy in model.STRATEGIES)


def _event(role: str, rank: int, start: float, end: float, kind: str = "update") -> Event:
    return Event(role, rank, kind, start, end, 1)


def test_utilisation_is_clipped_and_counts_idle_processes(model: ModuleType) -> None:
    utilisation = sys.modules[model.Pipeline.__module__].utilisation
    events = [
        _event("actor", 0, -5.0, 2.0),
        _event("actor", 0, 1.0, 4.0, "save"),  # beside the first
        _event("actor", 1, 20.0, 30.0),  # not in this stretch: idle
        _event("scorer", 0, 9.0, 99.0, "score"),
        Event("run", 0, "step", 0.0, 10.0, 1),
    ]
    assert utilisation(events, 0.0, 10.0) == {"utilisation/actor": 0.2, "utilisation/scorer": 0.1}
    assert utilisation(events, 0.0, 10.0, {"actor": 4, "scorer": 1})["utilisation/actor"] == 0.1
    with pytest.raises(ValueError, match="after the start"):
        utilisation(events, 3.0, 3.0)
