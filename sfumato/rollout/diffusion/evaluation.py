"""Pictures that show a model: of held-out prompts, or of a grid's, always from the same latents."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from sfumato.algorithms.dynamics import EulerODE
from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.config.dit import SampleConfig, TrainDitConfig
from sfumato.data.images.prompts import Prompt
from sfumato.errors import NonFiniteError
from sfumato.models.diffusion.base import Conditioning, DiffusionModel
from sfumato.models.diffusion.encoded import Dataset
from sfumato.rewards.base import Sample
from sfumato.rollout.batch import Drawn
from sfumato.rollout.diffusion.monitors import VelocityNorms
from sfumato.rollout.diffusion.policy import encode_prompts
from sfumato.rollout.diffusion.step_cache import StepCache
from sfumato.rollout.diffusion.trajectories import sample_trajectories
from sfumato.rollout.diffusion.trajectory_sampler import decode_samples, sample_of
from sfumato.tracking.samples import SampleRecord


def sample_images(
    model: DiffusionModel,
    conditioning: Conditioning,
    sample_ids: Sequence[int],
    *,
    size: tuple[int, ...],
    num_steps: int,
    guidance_scale: float,
    seed: int,
    micro_batch_size: int,
    observe: Callable[[torch.Tensor], object] | None = None,
    cache: StepCache | None = None,
    damage: list[str] | None = None,
) -> list[np.ndarray]:
    """Images without noise after the first latent, for evaluation: uint8 ``[H, W, 3]`` each; videos ``[F, H, W, 3]``.

    Args are those of ``sample_trajectories``; ``micro_batch_size`` samples are denoised together. With a ``cache``
    denoising steps are left out, and the first image is also made without it, to compare. To ``damage`` is appended
    what is wrong with each image, empty where nothing is.

    Raises:
        NonFiniteError: when an image is not finite before it is rounded, and ``damage`` is not given.
    """

    def draw(part: slice, observe: Callable[[torch.Tensor], object] | None = observe) -> list[tuple[np.ndarray, str]]:
        with model.evaluating():
            latents, _ = sample_trajectories(
                model,
                conditioning.rows(part),
                sample_ids[part],
                dynamics=EulerODE(),
                trained_steps=(),
                size=size,
                num_steps=num_steps,
                guidance_scale=guidance_scale,
                seed=seed,
                iteration=0,
                observe=observe,
            )
        return decode_samples(model, latents)

    parts = [slice(start, start + micro_batch_size) for start in range(0, len(sample_ids), micro_batch_size)]
    if cache is None:
        drawn = [picture for part in parts for picture in draw(part)]
    else:
        exact = cache.measured(lambda: draw(slice(0, 1), observe=None)[0][0])
        with cache.active():
            drawn = [picture for part in parts for picture in draw(part)]
        cache.compare(exact, drawn[0][0])
    wrong = [what for _, what in drawn]
    if damage is None and any(wrong):
        raise NonFiniteError(f"{sum(map(bool, wrong))} of {len(wrong)} samples: {next(filter(None, wrong))}")
    if damage is not None:
        damage.extend(wrong)
    return [image for image, _ in drawn]


def sample_evaluation(
    model: DiffusionModel, prompts: Sequence[Prompt], ids: Sequence[int], config: DiffusionRLConfig
) -> tuple[list[Sample], Drawn]:
    """One image, or video, per prompt, without noise after the first latent.

    Args:
        model: the policy.
        prompts: B prompts.
        ids: B numbers, which key the latents, and are the samples' group ids.
        config: steps, guidance and seed of the evaluation, size of the rollout.

    Returns:
        B samples, and the norm of each one's velocities, and what leaving out steps saved and cost.

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
    measured = Drawn({"eval/velocity/rms": norms.per_sample()}, {} if cache is None else cache.metrics())
    return [sample_of(*sample) for sample in drawn], measured


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
