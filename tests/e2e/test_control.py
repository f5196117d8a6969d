"""Requests to runs of real tasks: what they do, and that they change no bit of what is trained."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from sfumato.config.load import merge
from sfumato.errors import PreemptedError
from sfumato.tracking.atomic_folders import list_checkpoints
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.samples import read_samples
from tests.control_requests import answers, scripted, write_all
from tests.faults.test_kill_at_random import tiny_autoencoder_config
from tests.tiny import (
    run_task_here,
    tiny_dit_config,
    tiny_dit_dpo_config,
    tiny_rl_config,
    tiny_text_config,
    tiny_text_rl_config,
    weights_in,
)

RARELY = {"eval": {"every_steps": 100}}
SHORT = {"train": {"max_steps": 4}}
EMA = {"train": {"ema_decay": 0.9}}
TASKS: dict[str, tuple[str, Callable[[Path], dict[str, Any]], set[str]]] = {
    "train_dit": ("train_dit", partial(tiny_dit_config, **EMA), {"sample"}),
    "train_dit_dpo": ("train_dit_dpo", partial(tiny_dit_dpo_config, **RARELY), {"sample", "evaluate"}),
    "train_autoencoder": ("train_autoencoder", tiny_autoencoder_config, set()),
    "train_text": ("train_text", partial(tiny_text_config, **merge(RARELY, EMA)), {"sample", "evaluate"}),
    "train_text_dpo": (
        "train_text_dpo",
        partial(tiny_text_config, **merge(RARELY, {"data": {"data_type": "preference"}})),
        {"evaluate"},
    ),
    "rl_diffusion": ("rl_diffusion", partial(tiny_rl_config, **RARELY), {"sample", "evaluate"}),
    "rl_diffusion_forward": ("rl_diffusion_forward", partial(tiny_rl_config, **RARELY), {"sample", "evaluate"}),
    # so large a rate that two steps change what is drawn
    "rl_text": (
        "rl_text",
        partial(tiny_text_rl_config, **merge(RARELY, {"train": {"lr": 3e-2}})),
        {"sample", "evaluate"},
    ),
}


def assert_same_training(plain: Path, asked: Path) -> None:
    assert (plain / "metrics.jsonl").read_bytes() == (asked / "metrics.jsonl").read_bytes()
    assert weights_in(plain / "hf_ckpt") == weights_in(asked / "hf_ckpt")


# other tasks call the same lines; tests/dist/test_control_ranks.py asks RL of pictures in every run of the tests
@pytest.mark.exact
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "train_text" else pytest.mark.slow) for name in TASKS]
)
def test_requests_change_no_bit(tmp_path: Path, name: str) -> None:
    task, config, abilities = TASKS[name]
    settings = merge(config(tmp_path), SHORT)
    if task == "rl_diffusion_forward":
        settings = {**settings, "algorithm": {"recipe": "diffusion_nft", "timesteps": {"num": 2}}}
    plain = run_task_here(task, settings)
    asked_settings = merge(settings, {"train": {"output_dir": str(tmp_path / "asked")}})
    with scripted({1: ["sample", "save", "evaluate", "pause"], 3: ["evaluate", "save", "sample"]}):
        asked = run_task_here(task, asked_settings)

    assert_same_training(plain, asked)
    assert not (plain / "control.jsonl").exists()
    result = {command: "done" if command in abilities else "refused" for command in ("sample", "evaluate")}
    assert answers(asked) == [
        (1, "sample", result["sample"]),
        (1, "save", "done"),
        (1, "evaluate", result["evaluate"]),
        (1, "pause", "done"),
        (1, "resume", "done"),
        (3, "evaluate", result["evaluate"]),
        (3, "save", "done"),
        (3, "sample", result["sample"]),
    ]
    assert {1, 3} <= set(list_checkpoints(asked / "checkpoints"))
    assert not list_checkpoints(plain / "checkpoints").keys() & {1, 3}
    if "evaluate" in abilities:
        lines = [line for line in read_jsonl(asked / "control.jsonl") if line["command"] == "evaluate"]
        assert all(line["metrics"] for line in lines) and lines[0]["metrics"] != lines[1]["metrics"]
    if "sample" in abilities:
        assert {1, 3} <= read_samples(asked).keys()


def test_metrics_of_a_request_are_those_of_the_run(tmp_path: Path) -> None:
    """What is evaluated on request after a step that the run evaluates itself has the same numbers."""
    with scripted({2: ["evaluate"]}):
        folder = run_task_here("rl_text", tiny_text_rl_config(tmp_path))
    (answer,) = read_jsonl(folder / "control.jsonl")
    line = next(line for line in read_jsonl(folder / "metrics.jsonl") if line["step"] == 2)
    assert answer["metrics"] and answer["metrics"].items() <= line.items()
    assert {row["kind"] for row in read_samples(folder)[2]} == {"eval", "train"}, "what the run had saved stays"


@pytest.mark.exact
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("train_dit", marks=pytest.mark.slow),
        pytest.param("rl_diffusion", marks=pytest.mark.slow),
        "rl_text",
    ],
)
def test_watched_prompts_are_drawn_with_every_sampling(tmp_path: Path, name: str) -> None:
    task, config, _ = TASKS[name]
    often = {"sample": {"every_steps": 2}} if name == "train_dit" else {"eval": {"every_steps": 2}}
    settings = merge(merge(config(tmp_path), SHORT), often)
    plain = run_task_here(task, settings)
    watched = tmp_path / "asked" / "control" / "watched_prompts.txt"
    watched.parent.mkdir(parents=True)
    watched.write_text('write "AB"\n\n# a remark\nwrite "BA"\n', encoding="utf-8")
    with scripted({1: ["sample"]}):
        asked = run_task_here(task, merge(settings, {"train": {"output_dir": str(tmp_path / "asked")}}))
    assert_same_training(plain, asked)
    drawn = {
        step: [row["prompt"] for row in rows if row["kind"] == "watched"] for step, rows in read_samples(asked).items()
    }
    prompts = ['write "AB"', 'write "BA"']
    assert {step: drawn[step] for step in (1, 2, 4)} == {1: prompts, 2: prompts, 4: prompts}
    assert answers(asked)[0] == (1, "watched_prompts", "done")


def test_stop_saves_and_a_resume_goes_on(tmp_path: Path) -> None:
    settings = merge(tiny_dit_config(tmp_path), SHORT)
    plain = run_task_here("train_dit", settings)
    asked = merge(settings, {"train": {"output_dir": str(tmp_path / "asked")}})
    with scripted({2: ["stop"]}), pytest.raises(PreemptedError, match="by request after step 2"):
        run_task_here("train_dit", asked)
    folder = tmp_path / "asked"
    assert answers(folder) == [(2, "stop", "done")]
    assert list(list_checkpoints(folder / "checkpoints")) == [2]
    write_all(folder, 0, ["stop"])  # of the run that has ended: the next one must not obey it
    run_task_here("train_dit", merge(asked, {"train": {"load_checkpoint_path": "auto"}}))
    assert_same_training(plain, folder)
    assert answers(folder) == [(2, "stop", "done"), (0, "stop", "refused")]


def test_saved_samples_say_what_the_update_made_of_them(tmp_path: Path) -> None:
    """Of a diffusion run with two optimiser steps in an iteration, of which the first has log-ratios of exactly 0."""
    folder = run_task_here("rl_diffusion", merge(tiny_rl_config(tmp_path), {"train": {"max_steps": 1}}))
    rows = [row for row in read_samples(folder)[1] if row["kind"] == "train"]
    groups = {row["group_id"]: [other for other in rows if other["group_id"] == row["group_id"]] for row in rows}
    assert len(groups) == 2 and all(len(group) == 4 for group in groups.values())
    for group in groups.values():
        totals = [row["total"] for row in group]
        assert group[0]["group_mean"] == pytest.approx(sum(totals) / 4)
        assert sum(row["advantage"] for row in group) == pytest.approx(0, abs=1e-5)
    trained = [row for row in rows if row["is_trained"]]
    assert trained and all(len(row["log_ratio"]) == len(row["clipped"]) == len(row["trained_steps"]) for row in trained)
    ratios = [row["log_ratio"] for row in trained]
    assert any(set(ratio) == {0.0} for ratio in ratios) and any(value for ratio in ratios for value in ratio)


def test_saved_answers_say_what_the_update_made_of_their_tokens(tmp_path: Path) -> None:
    settings = merge(tiny_text_rl_config(tmp_path), {"train": {"max_steps": 1, "global_batch_size": 8, "lr": 1e-2}})
    folder = run_task_here("rl_text", settings)
    rows = [row for row in read_samples(folder)[1] if row["kind"] == "train"]
    trained = [row for row in rows if row["is_trained"]]
    assert trained
    assert all(len(row["log_ratio"]) == len(row["clipped"]) == len(row["token_ids"]) for row in trained)
    assert {row["finish_reason"] for row in rows} <= {"stop", "length"}
    assert any(value for row in trained for value in row["log_ratio"])
