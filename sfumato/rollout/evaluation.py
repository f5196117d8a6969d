"""What the policy makes of held-out prompts, always from the same latents."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.data.prompts import Prompt
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.rollout.diffusion import sample_images


def sample_evaluation(
    model: DiffusionModel, prompts: Sequence[Prompt], ids: Sequence[int], config: DiffusionRLConfig
) -> list[np.ndarray]:
    """One image per prompt, without noise after the first latent.

    Args:
        model: the policy.
        prompts: B prompts.
        ids: B numbers, which key the latents.
        config: steps, guidance and seed of the evaluation, size of the rollout.

    Returns:
        B images, uint8 ``[H, W, 3]``.
    """
    rollout, evaluation = config.rollout, config.eval
    guidance = rollout.guidance_scale if evaluation.guidance_scale is None else evaluation.guidance_scale
    return sample_images(
        model,
        model.encode_prompts([each.text for each in prompts], guidance != 1.0),
        ids,
        size=(rollout.height, rollout.width),
        num_steps=evaluation.num_inference_steps,
        guidance_scale=guidance,
        seed=evaluation.seed,
        micro_batch_size=rollout.micro_batch_size,
    )
