"""Rewards per second in a thread, in processes and through a server, and how much of scoring generation hides.

    python benchmarks/rewards.py [--samples 192] [--repeats 3] [--workers 2] [--steps 3] [--model PIPELINE]

The same pictures, in batches of 24, go through every way of scoring them in turn, so that a slow minute of the machine
slows all of them; the values are compared first. The server runs on this machine; its clients are threads of one
process, each with a batch on its way. Then three iterations of ``configs/quickstart/rl.yaml`` with and without overlap,
by default on a model with random weights, which costs what a trained one costs.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import yaml

from sfumato.config.sections import GlyphConfig
from sfumato.data.synthetic.glyphs import caption_of, source_image, training_words
from sfumato.rewards.base import Reward, Sample
from sfumato.rewards.ocr import OcrReward
from sfumato.rewards.pixels import JpegIncompressibility
from sfumato.rewards.remote import RemoteReward
from sfumato.rewards.scoring.scorer import Scorer
from sfumato.rewards.scoring.scores import Scores
from sfumato.runtime.roles import ThreadRole
from sfumato.tracking.json_lines import read_jsonl

ROOT = Path(__file__).parents[1]
BATCH = 24
REWARDS = {"ocr": OcrReward(detect=False), "jpeg_incompressibility": JpegIncompressibility()}


def pictures(name: str, count: int) -> list[Sample]:
    """Rendered words of 32 pixels for OCR; pictures of 256 pixels with soft noise for JPEG."""
    if name == "ocr":
        config = GlyphConfig(font_sizes=[13, 14], jitter=1)
        return [
            Sample(image=source_image(word, config, 32, 32), prompt=caption_of(word, config), group_id=0)
            for word in training_words(config)[:count]
        ]
    rng = np.random.default_rng(0)
    coarse = rng.integers(0, 256, (count, 32, 32, 3), np.uint8)
    return [Sample(image=picture.repeat(8, 0).repeat(8, 1), prompt="", group_id=0) for picture in coarse]


class Way:
    """One way of scoring: a scorer, and the number of batches that are scored at the same time."""

    def __init__(self, reward: Reward, concurrency: int) -> None:
        self.scorer = Scorer([reward])
        self.scorer.prepare()
        self.role = ThreadRole(self.scorer, "scorer", concurrency)

    def score(self, samples: list[Sample]) -> np.ndarray:
        """Values, float64 [B]."""
        parts = [samples[at : at + BATCH] for at in range(0, len(samples), BATCH)]
        scores = Scores.cat([future.result() for future in [self.role.call(Scorer.score, part) for part in parts]])
        assert not scores.failures, scores.failures
        return scores.total

    def rate(self, samples: list[Sample]) -> float:
        """Samples a second."""
        started = time.perf_counter()
        self.score(samples)
        return len(samples) / (time.perf_counter() - started)


def start_server(folder: Path) -> tuple[subprocess.Popen[str], str]:
    """A reward server in a process of its own, and its address."""
    path = folder / "server.yaml"
    path.write_text(yaml.safe_dump({"rewards": [{"type": "ocr", "detect": False}, {"type": "jpeg_incompressibility"}]}))
    command = [sys.executable, "-m", "sfumato.rewards.server", str(path), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    line = process.stdout.readline()  # type: ignore[union-attr]
    return process, line.split()[-1]


def measure_rates(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """For each reward and way the samples a second and the ratio to one thread: medians over the repeats."""
    process, url = start_server(folder)
    results: dict[str, dict[str, dict[str, float]]] = {}
    try:
        for name, reward in REWARDS.items():
            remote = RemoteReward(base_urls=(url,), reward=name, allow_private=True)
            ways: dict[str, Callable[[], Way]] = {
                "thread": lambda reward=reward: Way(reward, 1),
                f"{options.workers} processes": lambda reward=reward: Way(
                    dataclasses.replace(reward, process=True), options.workers
                ),
                "server, 1 client": lambda remote=remote: Way(remote, 1),
                "server, 8 clients": lambda remote=remote: Way(remote, 8),
            }
            results[name] = compare(
                {way: build() for way, build in ways.items()}, pictures(name, options.samples), options
            )
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
    return results


def compare(ways: dict[str, Way], samples: list[Sample], options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """All ways in turn on the same samples."""
    values = {name: way.score(samples) for name, way in ways.items()}  # also starts every process
    first = next(iter(values.values()))
    assert all(value.tobytes() == first.tobytes() for value in values.values()), "the ways differ"
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, way in ways.items():
            rates[name].append(way.rate(samples))
    base = rates[next(iter(ways))]
    for way in ways.values():
        way.role.close()
        way.scorer.close()
    return {
        name: {
            "samples_per_s": statistics.median(rate),
            "ratio": statistics.median(here / there for here, there in zip(rate, base, strict=True)),
        }
        for name, rate in rates.items()
    }


def measure_overlap(options: argparse.Namespace, folder: Path) -> dict[str, dict[str, float]]:
    """Medians over the iterations of the quickstart's RL with and without overlap."""
    model = ["--model.model_path", "null", "--model.config_path", "configs/quickstart/tiny_sd3.yaml"]
    if options.model:
        model = ["--model.model_path", options.model]
    results = {}
    for with_reward in ("true", "false"):
        output = folder / f"run_{with_reward}"
        command = [sys.executable, "tasks/rl_diffusion.py", "configs/quickstart/rl.yaml", *model]
        command += [
            "--train.output_dir",
            str(output),
            "--train.max_steps",
            str(options.steps),
            "--eval.num_prompts",
            "2",
        ]
        command += ["--train.save_steps", "0", "--algorithm.drop_no_spread", "false"]
        command += ["--rollout.with_reward", with_reward, "--train.trackers", "[]"]
        subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
        lines = read_jsonl(output / "timings.jsonl")[1:]
        names = ["time/generate_s", "time/scoring_s", "time/wait_for_rewards_s", "scoring/hidden_share"]
        results[with_reward] = {name: statistics.median(line[name] for line in lines) for name in names}
        results[with_reward]["rollout_s"] = statistics.median(
            line["time/generate_s"] + line["time/wait_for_rewards_s"] for line in lines
        )
    results["ratio of rollouts"] = {"true / false": results["true"]["rollout_s"] / results["false"]["rollout_s"]}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--model", help="pipeline folder; random weights of its size when it is left out")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = {"rates": measure_rates(options, Path(folder)), "overlap": measure_overlap(options, Path(folder))}
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
