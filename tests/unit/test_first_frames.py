"""Videos of several frames, most from a first one, against diffusers' pipelines. Wan's stand in ``test_wan.py``."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import diffusers
import numpy as np
import pytest
import torch
import yaml
from PIL import Image

from sfumato.algorithms.dynamics import EulerODE
from sfumato.algorithms.noise import keyed_normal
from sfumato.config.sections import ModelConfig
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.rollout.diffusion.trajectories import sample_trajectories
from tests.family_rows import ROWS, SEED, STEPS, wake

FRAMES = 5


@pytest.mark.parametrize("name", ["hunyuan_video15_image", "cogvideox_image", "kandinsky5_video"])
def test_a_video_equals_that_of_the_pipeline(name: str, tmp_path: Path) -> None:
    row = ROWS[name]
    if row.needs:
        pytest.importorskip(row.needs)
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(row.describe()))
    config = ModelConfig(config_path=str(tmp_path / "tiny.yaml"), max_sequence_length=row.tokens)
    model = build_diffusion_model(config)
    wake(model)
    model.frames = FRAMES
    model.save_pipeline(tmp_path / "pipe")
    images = [np.random.default_rng(3).integers(0, 256, (*row.size, 3), dtype=np.uint8)] if model.takes_image else None
    shape = model.latent_shape(*row.size, FRAMES)
    assert shape[1] == 2
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
