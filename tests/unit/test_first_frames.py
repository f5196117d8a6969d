"""Videos of several frames, most from a first one, against diffusers' pipelines. Wan's stand in ``test_wan.py``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from sfumato.algorithms.dynamics import EulerODE
from sfumato.algorithms.noise import keyed_normal
from sfumato.config.sections import ModelConfig
from sfumato.models.diffusion.load import build_diffusion_model, find_families
from sfumato.rollout.diffusion.trajectories import sample_trajectories
from tests.family_rows import ROWS, SEED, STEPS, copied, wake

FRAMES = 5


@pytest.mark.parametrize("name", ["hunyuan_video15_image", "cogvideox_image", "ltx2_image", "kandinsky5_video"])
def test_a_video_equals_that_of_the_pipeline(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    if row.needs:
        pytest.importorskip(row.needs)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(row.describe()))
    config = ModelConfig(
        config_path=str(tmp_path / "tiny.yaml"), max_sequence_length=row.tokens, from_images=row.from_images
    )
    model = build_diffusion_model(config)
    wake(model)
    model.frames = FRAMES
    model.save_pipeline(tmp_path / "pipe")
    images = [np.random.default_rng(3).integers(0, 256, (*row.size, 3), dtype=np.uint8)] if model.takes_image else None
    shape = model.latent_shape(*row.size, FRAMES)
    assert len(shape) == 2 or shape[1] == 2  # latent frames, or tokens of video and sound
    latents = sample_trajectories(
        model,
        model.encode_prompts(["write AB"], images=images),
        [0],
        dynamics=EulerODE(),
        trained_steps=(),
        size=(*row.size, FRAMES),
        num_steps=STEPS,
        guidance_scale=row.scales[-1],
        seed=SEED,
        iteration=0,
    )[0]
    pipeline = getattr(diffusers, model.pipeline_class).from_pretrained(tmp_path / "pipe")
    pipeline.set_progress_bar_config(disable=True)
    noise = keyed_normal(shape, SEED, "latent", 0, [0])
    frames = replace(row, latent_shape=shape)
    pictures = images and [Image.fromarray(image) for image in images]
    frames.call(frames, pipeline, ["write AB"], noise, row.scales[-1], pictures)
    assert latents.std() > 0.1
    torch.testing.assert_close(latents, pipeline.last_latents, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["ltx2_image", "kandinsky5_video_image"])
def test_a_model_learns_what_is_behind_the_given_frame(name: str) -> None:
    """Loss and gradients are those of the network called as diffusers' pipeline calls it, the given frame left out."""
    row = ROWS[name]
    if row.needs:
        pytest.importorskip(row.needs)
    description = row.describe()
    family = find_families()[description["pipeline"]]
    family = family.with_images() if row.from_images else family
    model = family(family.build(description, 0), max_sequence_length=row.tokens)
    wake(model)
    model.frames = max(FRAMES, row.frames)
    model.pipeline.set_progress_bar_config(disable=True)
    image = np.random.default_rng(3).integers(0, 256, (*row.size, 3), dtype=np.uint8)
    conditioning = model.encode_prompts(["write AB"], images=[image])
    shape = model.latent_shape(*row.size, model.frames)
    noise, target = (keyed_normal(shape, SEED, purpose, 0, [0]) for purpose in ("latent", "target"))
    calls: list[dict[str, Any]] = []
    hook = model.denoiser.register_forward_pre_hook(
        lambda _, args, kwargs: calls.append(copied(kwargs)), with_kwargs=True
    )
    row.call(row, model.pipeline, ["write AB"], noise, 1.0, [Image.fromarray(image)])
    hook.remove()
    model.denoiser.requires_grad_(True).train()
    first_sigma = model.sigmas(STEPS, shape)[:1]
    frame = conditioning.tensors.get("image_tokens", conditioning.tensors.get("image_latents"))
    num_first = frame.shape[2]

    def learn(velocity: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        model.denoiser.zero_grad()
        loss = (velocity - target)[:, :, num_first:].square().mean()
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.denoiser.named_parameters()}
        return loss, {name: gradient for name, gradient in gradients.items() if gradient is not None}

    outputs = model.denoiser(**{**calls[0], "return_dict": False})
    output = torch.cat(outputs, dim=1) if isinstance(outputs, tuple) else outputs  # parts: of video and sound
    expected = learn(row.velocity(output, shape))
    velocity = model.predict_velocity(noise, first_sigma, conditioning)
    torch.testing.assert_close(noise[:, :, :num_first] - first_sigma * velocity[:, :, :num_first], frame)
    loss, gradients = learn(velocity)
    torch.testing.assert_close(loss, expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(gradients, expected[1], atol=1e-4, rtol=1e-3)
    assert len(gradients) == len(list(model.denoiser.parameters()))
