"""Signs of reward hacking are found in series that show them, and not in noise."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.json_lines import Series, series_of
from sfumato.tracking.report import write_report
from sfumato.tracking.reward_hacking import measure_change, signs_of_hacking
from sfumato.tracking.run import Run

WATCHED, HELD_OUT, VELOCITY = "eval/reward/tesseract", "eval/reward/total", "eval/velocity/rms"


def run_of(watched: np.ndarray, held_out: np.ndarray | None = None, noise: float = 0.01, seed: int = 0) -> Series:
    """Evaluations every 10 iterations; the optimised reward rises from 0.2 to 0.9."""
    rng = np.random.default_rng(seed)
    last = 10 * (len(watched) - 1)
    rising = np.linspace(0.2, 0.9, last + 1)
    held_out = rising[::10] if held_out is None else held_out
    return {
        "reward/total": {step: rising[step] + rng.normal(scale=0.05) for step in range(1, last + 1)},
        "reward/ocr": {step: rising[step] for step in range(1, last + 1)},
        "eval/reward/ocr": dict(zip(range(0, last + 1, 10), held_out, strict=True)),
        HELD_OUT: {10 * k: value + rng.normal(scale=noise) for k, value in enumerate(held_out)},
        WATCHED: {10 * k: value + rng.normal(scale=noise) for k, value in enumerate(watched)},
    }


def names(metrics: Series) -> list[str]:
    return [sign.metric for sign in signs_of_hacking(metrics)]


RISE_AND_FALL = np.concatenate([np.linspace(0.3, 0.5, 8), np.linspace(0.5, 0.3, 12)])


def test_a_watched_reward_that_falls_while_the_optimised_one_rises() -> None:
    (sign,) = signs_of_hacking(run_of(RISE_AND_FALL))
    assert sign.metric == WATCHED
    assert sign.text.startswith("reward/total rose by 0.2") and f"while {WATCHED} fell by 0.1" in sign.text
    assert any(f"since step {step}," in sign.text for step in (70, 80, 90))


def test_a_held_out_reward_that_falls_while_training_rises() -> None:
    assert names(run_of(np.linspace(0.3, 0.5, 20), held_out=RISE_AND_FALL)) == [HELD_OUT]


def test_no_sign_without_a_gap() -> None:
    rising = np.linspace(0.3, 0.5, 20)
    assert names(run_of(rising)) == []
    both_fall = run_of(RISE_AND_FALL)
    both_fall["reward/total"] = {step: 1 - value for step, value in both_fall["reward/total"].items()}
    assert names(both_fall) == [], "the optimised reward falls, too"
    assert names(run_of(RISE_AND_FALL[:12])) == [], "too few evaluations since the best one"
    assert names(run_of(RISE_AND_FALL, noise=0.2)) == [], "the fall drowns in noise"
    assert names({}) == [] and names({HELD_OUT: {0: 0.5}}) == []
    optimised_too = run_of(RISE_AND_FALL)
    optimised_too["reward/tesseract"] = optimised_too["reward/total"]
    assert names(optimised_too) == [], "components of the total are not judged by themselves"


def test_noise_alone_is_hardly_ever_a_sign() -> None:
    """Looked at after each of sixty evaluations, while the optimised reward rises all the time."""
    alarms = 0
    for seed in range(40):
        series = np.random.default_rng(1000 + seed).normal(scale=0.05, size=60)
        metrics = run_of(series, noise=0.0)
        for count in range(6, 61):
            seen = {name: {s: v for s, v in points.items() if s < 10 * count} for name, points in metrics.items()}
            alarms += WATCHED in names({name: seen[name] for name in ("reward/total", WATCHED)})
            if WATCHED in names(seen):
                break
    assert alarms <= 2


def test_change_has_the_standard_error_of_its_noise() -> None:
    rng = np.random.default_rng(0)
    results = [measure_change(0.1 * np.arange(12) + rng.normal(size=12)) for _ in range(2000)]
    changes, errors = np.array(results).T
    assert changes.mean() == pytest.approx(0.8, abs=0.05), "between the means of the first and the last four"
    assert np.sqrt(np.square(errors).mean()) == pytest.approx(changes.std(), rel=0.05)


def test_velocities_that_grow_and_samples_that_look_alike() -> None:
    metrics = {VELOCITY: {0: 2.0, 10: 2.09}, "diversity/pixels": dict.fromkeys(range(1, 21), 0.2)}
    assert names(metrics) == []
    metrics[VELOCITY][20] = 2.3
    metrics["diversity/pixels"] |= dict.fromkeys(range(21, 26), 0.08)
    velocity, diversity = signs_of_hacking(metrics)
    assert velocity.text == f"{VELOCITY} is 15 % above the first evaluation's"
    assert diversity.text == "diversity/pixels fell from 0.2 to 0.08: samples of a prompt look alike"
    metrics[VELOCITY][20] = None
    assert names(metrics) == ["diversity/pixels"]


def write_metrics(folder: Path, metrics: Series) -> None:
    steps = sorted({step for points in metrics.values() for step in points})
    lines = [{"step": step} | {n: p[step] for n, p in metrics.items() if step in p} for step in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_report_shows_signs_with_their_curves(tmp_path: Path) -> None:
    metrics = run_of(RISE_AND_FALL)
    write_metrics(tmp_path, metrics)
    assert "Signs of reward hacking" not in write_report(tmp_path).read_text(), "nothing of it was measured"
    metrics |= {
        "diversity/pixels": dict.fromkeys(range(1, 191), 0.2),
        "advantage/groups_without_spread": dict.fromkeys(range(1, 191), 0.1),
        VELOCITY: {0: 2.0, 190: 2.5},
    }
    write_metrics(tmp_path, metrics)
    page = write_report(tmp_path).read_text()
    section = page[page.index("Signs of reward hacking") : page.index("<h2>Curves")]
    for name in (WATCHED, VELOCITY, "diversity/pixels", "advantage/groups_without_spread"):
        assert f'data-metric="{name}"' in section
    assert f'data-sign="{WATCHED}"' in section and f'data-sign="{VELOCITY}"' in section
    assert "relative to the first</small><span>1.25</span>" in section
    curves = page[page.index("<h2>Curves") :]
    assert 'data-metric="diversity/pixels"' not in curves and f'data-metric="{HELD_OUT}"' in curves
    assert section.count("<svg") == 4


def test_a_run_says_each_sign_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    run = Run(tmp_path, "test", Mesh(Layout(), torch.device("cpu")))
    run.begin(300, 0, [])
    for record in sorted(
        (
            {"step": step, name: value}
            for name, points in run_of(RISE_AND_FALL).items()
            for step, value in points.items()
        ),
        key=lambda record: record["step"],
    ):
        run._metrics.write(record)
    run.say_signs_of_hacking()
    run.say_signs_of_hacking()
    run.close()
    assert (tmp_path / "log.txt").read_text().count("sign of reward hacking: reward/total rose") == 1
    assert series_of([{"step": 1, "a": True, "b": 2}, {"step": 1, "b": 3}]) == {"b": {1: 3}}
