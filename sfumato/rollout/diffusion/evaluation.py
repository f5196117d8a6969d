"""Images that show what a model draws: for held-out prompts, or those of a grid, always from the same latents."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol, cast

import numpy as np
import torch

from sfumato.algorithms.dynamics import EulerODE
from sfumato.data.images.prompts import Prompt
from sfumato.data.images.source_images import group_by_sources, side_by_side
from sfumato.errors import ConfigError, NonFiniteError
from sfumato.models.diffusion.base import Conditioning, DiffusionModel
from sfumato.rewards.base import Sample
from sfumato.rollout.batch import EvalStats
from sfumato.rollout.diffusion.monitors import VelocityNorms
from sfumato.rollout.diffusion.policy import encode_prompts
from sfumato.rollout.diffusion.step_cache import StepCache
from sfumato.rollout.diffusion.trajectories import sample_trajectories
from sfumato.rollout.diffusion.trajectory_sampler import Content, decode_samples, sample_of
from sfumato.tracking.samples import SampleRecord

if TYPE_CHECKING:
    from sfumato.config.diffusion_rl import DiffusionRLConfig
    from sfumato.config.dit import SampleConfig, TrainDitConfig
    from sfumato.data.images.image_text import ImageTextDataset, PairDataset
    from sfumato.data.synthetic.glyphs import GlyphDataset


class HasStep(Protocol):
    """The state of a run, as far as it names a sample's policy."""

    step: int
    """Finished steps."""


class _DrawsEvaluations(Protocol):
    """The state of a role that draws evaluations."""

    model: DiffusionModel

    @property
    def updates(self) -> int: ...

    def evaluated(self) -> AbstractContextManager[DiffusionModel]: ...


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
) -> list[Content]:
    """Draws images deterministically from their first latents, for evaluation.

    Args:
        model, conditioning, sample_ids, size, num_steps, guidance_scale, seed, observe: as ``sample_trajectories``.
        micro_batch_size: how many samples are denoised together.
        cache: leaves out denoising steps; the first image is also drawn without it, to compare.
        damage: a list to which a text is appended for each image: what is wrong with it, or nothing.

    Returns:
        uint8 ``[H, W, 3]`` each; videos ``[F, H, W, 3]``; or sounds.

    Raises:
        NonFiniteError: when an image is not finite before it is rounded, and ``damage`` is not given.
    """

    def draw(part: slice, observe: Callable[[torch.Tensor], object] | None = observe) -> list[tuple[Content, str]]:
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
        marked_images = [marked for part in parts for marked in draw(part)]
    else:
        # not observed: it is drawn once more below, and would be counted twice
        exact = cache.measure(lambda: cast(np.ndarray, draw(slice(0, 1), observe=None)[0][0]))
        with cache.active():
            marked_images = [marked for part in parts for marked in draw(part)]
        cache.compare(exact, marked_images[0][0])  # pyright: ignore[reportArgumentType]  (images: no sound has a cache)
    problems = [problem for _, problem in marked_images]
    if damage is None and any(problems):
        raise NonFiniteError(f"{sum(map(bool, problems))} of {len(problems)} samples: {next(filter(None, problems))}")
    if damage is not None:
        damage.extend(problems)
    return [image for image, _ in marked_images]


def sample_evaluation(
    model: DiffusionModel, prompts: Sequence[Prompt], ids: Sequence[int], config: DiffusionRLConfig
) -> tuple[list[Sample], EvalStats]:
    """Draws one image, or video, per prompt, deterministically from its first latent.

    Args:
        model: the policy.
        prompts: B prompts.
        ids: B numbers that key the latents; they become the samples' group ids.
        config: has steps, guidance and seed of the evaluation, and the size of the rollout.

    Returns:
        B samples; and as metrics the norm of each sample's velocities, and with a step cache the share of steps that it
        left out and the error of the images.

    Raises:
        ConfigError: when ``eval.step_cache`` does not fit the model.
    """
    rollout = config.rollout
    evaluation = config.eval
    guidance = rollout.guidance_scale if evaluation.guidance_scale is None else evaluation.guidance_scale
    conditioning, sources = encode_prompts(model, prompts, rollout.size, guidance != 1.0)
    norms = VelocityNorms(evaluation.num_inference_steps)
    cache = None
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
    samples = [
        sample_of(prompt, image, group_id, source, problem, model.frame_rate)
        for prompt, image, group_id, source, problem in zip(
            prompts, images, ids, sources or [None] * len(images), damage, strict=True
        )
    ]
    return samples, EvalStats({"eval/velocity/rms": norms.per_sample()}, {} if cache is None else cache.metrics())


def choose_grid(
    config: SampleConfig, dataset: ImageTextDataset | GlyphDataset | PairDataset, takes_image: bool
) -> tuple[list[str], list[np.ndarray] | None]:
    """The prompts of the grid, from the configuration or the data, and their source images if the model takes some."""
    if not takes_image:
        return config.prompts or dataset.example_captions(config.num_prompts), None
    edits = dataset.example_edits(len(config.prompts) or config.num_prompts)
    return config.prompts or [caption for caption, _ in edits], [source for _, source in edits]


def draw_grid(
    model: DiffusionModel,
    prompts: list[str],
    sources: list[np.ndarray] | None,
    config: TrainDitConfig,
    state: HasStep,
    kind: Literal["eval", "watched"] = "eval",
) -> list[SampleRecord]:
    """Records of one sample per prompt of the grid, always from the same latents. ``state`` has the finished steps."""
    drawn: dict[int, tuple[Content, str]] = {}
    for positions in group_by_sources(sources, len(prompts)):
        damage: list[str] = []
        images = sample_images(
            model,
            model.encode_prompts(
                [prompts[position] for position in positions],
                images=None if sources is None else [sources[position] for position in positions],
            ),
            sample_ids=positions,
            size=config.data.size,
            num_steps=config.sample.num_inference_steps,
            guidance_scale=config.sample.guidance_scale,
            seed=config.train.seed,
            micro_batch_size=config.train.micro_batch_size,
            damage=damage,
        )
        drawn |= dict(zip(positions, zip(images, damage, strict=True), strict=True))
    return [
        SampleRecord(
            content=drawn[index][0],
            kind=kind,
            prompt=prompt,
            seed=config.train.seed,
            sample_id=index,
            policy_version=state.step,
            source=None if sources is None else side_by_side(sources[index]),
            damage=drawn[index][1],
            frame_rate=model.frame_rate,
        )
        for index, prompt in enumerate(prompts)
    ]


def draw_watched(
    model: DiffusionModel, config: TrainDitConfig, state: HasStep, prompts: list[str]
) -> list[SampleRecord]:
    """Records of one sample for each watched prompt, drawn as the grid is.

    Raises:
        ConfigError: as ``check_embeddable``.
    """
    check_embeddable(model, prompts)
    return draw_grid(model, prompts, None, config, state, kind="watched")


def draw_watched_prompts(actor: _DrawsEvaluations, prompts: list[str], config: DiffusionRLConfig) -> list[SampleRecord]:
    """Records of one sample for each watched prompt, drawn as an evaluation draws, and not scored.

    Raises:
        ConfigError: as ``check_embeddable``.
    """
    check_embeddable(actor.model, prompts)
    with actor.evaluated() as model:
        ids = list(range(len(prompts)))
        samples, _ = sample_evaluation(model, [Prompt(prompt, {}, "watched") for prompt in prompts], ids, config)
    return [
        SampleRecord(
            content=sample.content,
            kind="watched",
            prompt=sample.prompt,
            seed=config.eval.seed,
            sample_id=index,
            policy_version=actor.updates,
            damage=sample.damage,
            frame_rate=sample.frame_rate,
        )
        for index, sample in enumerate(samples)
    ]


def check_embeddable(model: DiffusionModel, prompts: Sequence[str]) -> None:
    """Raises ConfigError where the model cannot draw texts that are not in its data."""
    if model.takes_image:
        raise ConfigError("this model draws from a source image, which a text does not have")
    if model.encoders_freed and not all(model.is_embedded(prompt) for prompt in prompts):
        raise ConfigError("model.keep_encoders is false, so that only prompts of the data can be drawn")
