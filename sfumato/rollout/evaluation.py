"""What the policy makes of held-out prompts, always from the same latents."""

from __future__ import annotations

from collections.abc import Sequence

from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.data.prompts import Prompt
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.rewards.base import Sample
from sfumato.rollout.batch import sample_of
from sfumato.rollout.diffusion import sample_images
from sfumato.rollout.monitors import VelocityNorms
from sfumato.rollout.prompts import encode_prompts
from sfumato.rollout.step_cache import StepCache


def sample_evaluation(
    model: DiffusionModel, prompts: Sequence[Prompt], ids: Sequence[int], config: DiffusionRLConfig
) -> tuple[list[Sample], list[float], dict[str, float]]:
    """One image, or video, per prompt, without noise after the first latent.

    Args:
        model: the policy.
        prompts: B prompts.
        ids: B numbers, which key the latents, and are the samples' group ids.
        config: steps, guidance and seed of the evaluation, size of the rollout.

    Returns:
        B samples, the norm of each one's velocities, and what leaving out steps saved and cost, where it is configured.

    Raises:
        ConfigError: when ``eval.step_cache`` does not fit the model.
    """
    rollout, evaluation = config.rollout, config.eval
    guidance = rollout.guidance_scale if evaluation.guidance_scale is None else evaluation.guidance_scale
    conditioning, sources = encode_prompts(model, prompts, rollout.size, guidance != 1.0)
    norms, cache = VelocityNorms(evaluation.num_inference_steps), None
    if evaluation.step_cache > 0:
        cache = StepCache(model, evaluation.step_cache, evaluation.num_inference_steps)
    damage: list[str] = []
    images = sample_images(
        model,
        conditioning,
        ids,
        size=rollout.size,
        num_steps=evaluation.num_inference_steps,
        guidance_scale=guidance,
        seed=evaluation.seed,
        micro_batch_size=rollout.micro_batch_size,
        observe=norms,
        cache=cache,
        damage=damage,
    )
    drawn = zip(prompts, images, ids, sources or [None] * len(images), damage, strict=True)
    return [sample_of(*each) for each in drawn], norms.per_sample(), {} if cache is None else cache.metrics()
