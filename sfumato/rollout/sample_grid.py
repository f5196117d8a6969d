"""The sample grids of supervised and preference training: fixed prompts, always from the same latents."""

from __future__ import annotations

import numpy as np

from sfumato.config.dit import SampleConfig, TrainDitConfig
from sfumato.data.encoded import Dataset
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.rollout.diffusion import sample_images
from sfumato.tracking.samples import SampleRecord


def choose_grid(config: SampleConfig, dataset: Dataset, takes_image: bool) -> tuple[list[str], list[np.ndarray] | None]:
    """Prompts of the grid, and their source images if the model takes them."""
    if not takes_image:
        return config.prompts or dataset.example_captions(config.num_prompts), None
    edits = dataset.example_edits(len(config.prompts) or config.num_prompts)
    return config.prompts or [caption for caption, _ in edits], [source for _, source in edits]


def draw_grid(
    model: DiffusionModel, prompts: list[str], sources: list[np.ndarray] | None, config: TrainDitConfig, step: int
) -> list[SampleRecord]:
    """One sample per prompt, always from the same latents."""
    damage: list[str] = []
    images = sample_images(
        model,
        model.encode_prompts(prompts, images=sources),
        sample_ids=list(range(len(prompts))),
        size=(config.data.height, config.data.width, config.data.num_frames),
        num_steps=config.sample.num_inference_steps,
        guidance_scale=config.sample.guidance_scale,
        seed=config.train.seed,
        micro_batch_size=config.train.micro_batch_size,
        damage=damage,
    )
    common = {"kind": "eval", "seed": config.train.seed, "policy_version": step}
    return [
        SampleRecord(content=image, prompt=prompt, source=source, sample_id=index, damage=wrong, **common)
        for index, (image, prompt, source, wrong) in enumerate(
            zip(images, prompts, sources or [None] * len(images), damage, strict=True)
        )
    ]
