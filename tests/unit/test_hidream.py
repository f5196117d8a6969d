"""HiDream's experts, which compute in training what they do in evaluation, and its pictures that are no squares."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from sfumato.algorithms.dynamics import EulerODE
from sfumato.algorithms.noise import keyed_normal
from sfumato.errors import ConfigError
from sfumato.models.diffusion.families.hidream import HiDream
from sfumato.models.diffusion.flops import denoiser_flops
from sfumato.rollout.diffusion.trajectories import sample_trajectories
from tests.family_rows import ROWS, SEED, STEPS, wake
from tests.tiny_families import tiny_hidream


def build(**transformer: Any) -> HiDream:
    description = tiny_hidream()
    description["transformer"] |= transformer
    model = HiDream(HiDream.build(description, 0), max_sequence_length=ROWS["hidream"].tokens)
    model.denoiser.requires_grad_(True)
    wake(model)
    return model


@pytest.mark.parametrize("size", [(16, 16), (16, 24)])
def test_training_and_evaluation_mode_give_one_velocity(size: tuple[int, int]) -> None:
    model = build()
    conditioning = model.encode_prompts(["a", "b c"])
    latents = keyed_normal(model.latent_shape(*size), 1, "latent", 0, range(2))

    def velocity() -> torch.Tensor:
        return model.predict_velocity(latents, torch.tensor([0.9, 0.3]), conditioning)

    model.denoiser.train()
    learned_from = velocity()
    with model.evaluating():
        sampled = velocity()
    torch.testing.assert_close(sampled, learned_from, atol=1e-5, rtol=1e-5)
    assert sampled.requires_grad


def test_a_wide_picture_is_that_of_the_pipeline() -> None:
    row = replace(ROWS["hidream"], size=(16, 24), latent_shape=(4, 8, 12))
    model, prompts = build(), ["a", "b c"]
    latents, _ = sample_trajectories(
        model,
        model.encode_prompts(prompts),
        [0, 1],
        dynamics=EulerODE(),
        trained_steps=(),
        iteration=0,
        size=row.size,
        num_steps=STEPS,
        guidance_scale=3.5,
        seed=SEED,
    )
    model.pipeline.set_progress_bar_config(disable=True)
    row.call(row, model.pipeline, prompts, keyed_normal(row.latent_shape, SEED, "latent", 0, range(2)), 3.5, None)
    torch.testing.assert_close(latents, model.pipeline.last_latents, atol=1e-4, rtol=1e-4)


def test_a_picture_with_more_tokens_than_there_are_positions_is_refused() -> None:
    model = build()
    assert model.latent_shape(16, 128) == (4, 8, 64)
    assert model.latent_shape(96, 96) == (4, 48, 48)  # squares are not filled up
    with pytest.raises(ValueError, match="may be 128 pixels at most"):
        model.latent_shape(16, 132)


def test_each_token_counts_for_the_experts_that_it_activates() -> None:
    def operations(num_experts: int, num_activated: int) -> int:
        model = build(num_routed_experts=num_experts, num_activated_experts=num_activated)
        return denoiser_flops(model, 16, 16).training

    few = operations(4, 2)
    assert few < operations(8, 2) < 1.01 * few  # a larger router alone
    assert operations(4, 4) > 1.2 * few


def test_a_network_without_gradients_of_experts_is_refused() -> None:
    with pytest.raises(ConfigError, match="force_inference_output have no gradient"):
        build(force_inference_output=True)
