"""Diversity within groups and velocity norms are what their formulas say, for images and videos, on any ranks."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from sfumato.rollout.diffusion.monitors import VelocityNorms, latent_distance, pixel_distance, velocity_norms
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.run import Run
from tests.tiny import run_task_here, tiny_rl_config

RNG = np.random.default_rng(3)


@pytest.mark.parametrize("shape", [(8, 12, 3), (5, 8, 8, 3)], ids=["image", "video"])
@pytest.mark.parametrize("count", [2, 5])
def test_pixels_differ_by_the_mean_over_all_pairs(shape: tuple[int, ...], count: int) -> None:
    samples = list(RNG.integers(0, 256, (count, *shape), dtype=np.uint8))
    pairs = [np.abs(a.astype(float) - b).mean() / 255 for a, b in combinations(samples, 2)]
    assert pixel_distance(samples) == pytest.approx(np.mean(pairs), rel=1e-12)


def test_pixels_are_averaged_down_and_frames_left_out() -> None:
    checkers = np.indices((64, 64)).sum(axis=0) % 2 * 255
    checkers = np.repeat(checkers[..., None], 3, axis=-1).astype(np.uint8)
    assert pixel_distance([checkers, 255 - checkers]) == 0, "2x2 pixels have one mean"
    black, white = np.zeros((33, 50, 70, 3), np.uint8), np.full((33, 50, 70, 3), 255, np.uint8)
    assert pixel_distance([black, black]) == 0
    assert pixel_distance([black, white]) == pytest.approx(1)
    late = black.copy()
    late[-1] = 255
    assert pixel_distance([black, late]) == pytest.approx(1 / 8), "the last frame is one of eight"


def test_latents_differ_by_their_directions() -> None:
    latents = torch.randn(4, 2, 3, 3, generator=torch.Generator().manual_seed(1))
    cosines = [torch.cosine_similarity(a.flatten(), b.flatten(), dim=0) for a, b in combinations(latents, 2)]
    assert latent_distance(latents) == pytest.approx(1 - float(torch.stack(cosines).mean()), abs=1e-6)
    assert latent_distance(latents[:1].repeat(3, 1, 1, 1)) == pytest.approx(0, abs=1e-6)
    assert latent_distance(torch.stack([latents[0], 7 * latents[0]])) == pytest.approx(0, abs=1e-6)
    assert latent_distance(torch.eye(4)) == 1


def test_velocity_norms_are_sums_over_rows() -> None:
    velocity = torch.stack([torch.full((2, 2), 3.0), torch.full((2, 2), -4.0)]).requires_grad_()
    result = velocity_norms(velocity, torch.stack([torch.full((2, 2), 1.5), torch.full((2, 2), 4.0)]))
    assert result == {"velocity/rms": 7, "velocity/norm_ratio": 3}
    assert not any(value.requires_grad for value in result.values())
    assert velocity_norms(velocity, None).keys() == {"velocity/rms"}


def test_norms_of_micro_batches_belong_to_their_samples() -> None:
    watch = VelocityNorms(num_steps=2)
    for velocity in ([[3.0], [1.0]], [[4.0], [1.0]], [[2.0]], [[2.0]]):  # two samples, then one, two steps each
        watch(torch.tensor(velocity))
    assert watch.per_sample() == pytest.approx([12.5**0.5, 1, 2])


def test_a_run_logs_what_its_samples_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups over several micro-batches; before the first update every ratio is that of a policy to itself."""
    monkeypatch.setattr(Run, "write_report", lambda run, **_: None)
    config = tiny_rl_config(
        tmp_path,
        rollout={"micro_batch_size": 3},
        algorithm={"kl": {"type": "velocity_mse", "coef": 0.1}, "self_check": False},
        model={"lora": {"rank": 4, "alpha": 8}},
        train={"max_steps": 2, "global_batch_size": None, "lr": 1.0e-2},
        eval={"every_steps": 2, "num_prompts": 2},
    )
    first, once, twice = read_jsonl(run_task_here("rl_diffusion", config) / "metrics.jsonl")
    assert 0 < once["diversity/pixels"] < 0.5 and 0.5 < once["diversity/latents"] < 1.2
    assert once["velocity/norm_ratio"] == 1 != twice["velocity/norm_ratio"]
    assert once["velocity/rms"] > 0
    assert first["eval/velocity/rms"] > 0 and first["eval/velocity/rms"] != twice["eval/velocity/rms"]
