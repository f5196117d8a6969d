"""Run folders for tests of the studio, written by the classes that runs write them with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from sfumato.tracking.json_lines import JsonLines
from sfumato.tracking.samples import SampleRecord, save_samples

HOST = "http://localhost:8765"
TOKEN = "a token of twenty two"
PROMPTS = ("a red bird", "a <b>blue</b> bird & more", 'say "<script>alert(1)</script>"')


def write_run(folder: Path, steps: int = 12, evaluate_every: int = 4, total: int = 20, config: str = "") -> Path:
    """A run of RL on pictures with evaluations, training samples, two rewards and a metric that stays flat."""
    folder.mkdir(parents=True, exist_ok=True)
    reward = "reward:\n  rewards:\n  - {type: sharp, weight: 1.0}\n  - {type: small, evaluation_only: true}\n"
    text = config or f"train:\n  max_steps: {total}\neval:\n  num_prompts: {len(PROMPTS)}\n{reward}"
    (folder / "config.yaml").write_text(text)
    environment = {"run_id": folder.name, "task": "rl_diffusion", "date": "2026-11-25", "total_steps": total}
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "log.txt").write_text("the first line\nstep 3: reward failed: sharp: timed out (2 of 8 samples)\n")
    write_steps(folder, 1, steps, evaluate_every)
    return folder


def write_steps(folder: Path, first: int, last: int, evaluate_every: int = 4) -> None:
    """Goes on with a run from one step to another, as a run that resumes does."""
    metrics = JsonLines(folder / "metrics.jsonl", first - 1 if first > 1 else None)
    timings = JsonLines(folder / "timings.jsonl", first - 1 if first > 1 else None)
    for step in range(first, last + 1):
        is_evaluated = step % evaluate_every == 0
        line = {"step": step, "reward/total": step / 10, "lr": 1e-4, "loss": 1 / step, "policy/kl": 0.01 * step}
        evaluated = {"eval/reward/total": step / 20, "eval/reward/sharp": step / 20, "eval/reward/small": -step / 50}
        metrics.write(line | (evaluated if is_evaluated else {}))
        timings.write({"step": step, "time/step_s": 0.5})
        if is_evaluated or step == 1:
            save_samples(folder, step, [*eval_records(step), *train_records(step)])
    metrics.close()
    timings.close()


def picture(value: int) -> np.ndarray:
    """A small picture of one colour and a black edge: uint8 ``[16, 16, 3]``."""
    pixels = np.full((16, 16, 3), value % 256, np.uint8)
    pixels[0] = 0
    return pixels


def eval_records(step: int) -> list[SampleRecord]:
    """Samples of an evaluation: the first rises, the second stays, the third falls."""
    totals = [step / 20, 0.5, 1 - step / 20]
    return [
        SampleRecord(
            picture(10 * step + number), "eval", prompt, 7, number, {"sharp": total, "small": 1 - total}, total
        )
        for number, (prompt, total) in enumerate(zip(PROMPTS, totals, strict=True))
    ]


def train_records(step: int) -> list[SampleRecord]:
    """Two groups of three samples."""
    return [
        SampleRecord(
            *(picture(step + 3 * number), "train", PROMPTS[number // 3], 42, number),
            rewards={"sharp": number / 6},
            total=number / 6,
            advantage=float(number % 3 - 1),
        )
        for number in range(6)
    ]


def add_decisions(folder: Path, step: int) -> None:
    """Writes into the rows of a step what RL adds to them: the group, and what each denoising step taught."""
    path = folder / "samples" / f"step_{step:06d}" / "samples.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        if row["kind"] == "train":
            row |= {"group_id": row["sample_id"] // 3, "group_mean": 0.25, "group_std": 0.125, "is_trained": True}
            row |= {"trained_steps": [1, 3], "log_ratio": [0.0, 0.02], "clipped": [False, True]}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
