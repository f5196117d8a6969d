"""A saved picture or video of a run, drawn again with the micro-batch that it was drawn in."""

from __future__ import annotations

from typing import cast

import torch

from sfumato.config.diffusion_rl import DiffusionRLConfig, ForwardRLConfig, TrajectoryRLConfig
from sfumato.data.images.prompts import Prompt, load_prompts
from sfumato.data.prompt_loader import PromptLoader
from sfumato.errors import DataError
from sfumato.evaluation.options import GenerationOptions
from sfumato.evaluation.pictures import PictureModel, picture_models, picture_prompts
from sfumato.evaluation.recorded import RecordedSample, Redrawn
from sfumato.evaluation.redraw_units import check_prompt, evaluated_rows, place_of, training_unit
from sfumato.evaluation.sources import ModelSource
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.rollout.diffusion.final_samples import sample_final
from sfumato.rollout.diffusion.trajectories import sample_trajectories
from sfumato.rollout.diffusion.trajectory_sampler import EncodedRequests, ReplayData


def redraw_picture(recorded: RecordedSample, source: ModelSource, options: GenerationOptions) -> Redrawn:
    """Draws a picture again.

    Args:
        recorded: the sample.
        source: the weights.
        options: have the device and the sample's seed.

    Raises:
        DataError: when the run's data has other prompts now.
        UserError: as loading weights and data does.
    """
    ((_, model),) = picture_models([source], options)
    if recorded.kind == "train":
        return _redraw_training(recorded, model.model)
    return _redraw_evaluation(recorded, model, source)


def _redraw_evaluation(recorded: RecordedSample, model: PictureModel, source: ModelSource) -> Redrawn:
    if recorded.kind == "watched":
        prompts = [Prompt(str(row["prompt"]), {}, "watched") for row in recorded.siblings]
        rows = [cast(int, row["sample_id"]) for row in recorded.siblings]
        if rows != list(range(len(rows))):
            raise DataError(f"{recorded}: other watched prompts of this step are missing, which were drawn with it")
    else:
        prompts = picture_prompts([source], None)
        rows = evaluated_rows(recorded, len(prompts))
        check_prompt(recorded, prompts[recorded.sample_id].text)
    settings = model.settings
    # with a step cache the steps that are left out are chosen for all samples together
    size = len(rows) if settings.step_cache > 0 else settings.micro_batch_size
    start = place_of(rows, recorded) // size * size
    ids = rows[start : start + size]
    samples = model.draw([prompts[row] for row in ids], ids)
    return Redrawn(samples[place_of(ids, recorded)], how=_describe_micro_batch(len(ids)))


def _redraw_training(recorded: RecordedSample, model: DiffusionModel) -> Redrawn:
    config = recorded.run.config
    assert isinstance(config, DiffusionRLConfig)
    prompts = load_prompts(config.data, "train")
    loader = PromptLoader(len(prompts), config.rollout.num_prompts, config.rollout.n, config.train.seed)
    requests = training_unit(recorded, loader)
    place = place_of([request.sample_id for request in requests], recorded)
    check_prompt(recorded, prompts[requests[place].prompt_id].text)
    encoded = EncodedRequests(model, requests, prompts, config)
    latents, replay_data = _draw_training(model, encoded, config, recorded.step - 1)
    _, samples = encoded.rollout(latents, replay_data, recorded.policy_version)
    return Redrawn(samples[place], how=_describe_micro_batch(len(requests)))


def _draw_training(
    model: DiffusionModel, encoded: EncodedRequests, config: DiffusionRLConfig, iteration: int
) -> tuple[torch.Tensor, ReplayData]:
    """Draws as ``generate`` of the run's task does."""
    rollout = config.rollout
    if isinstance(config, TrajectoryRLConfig):
        algorithm = config.algorithm
        latents, trajectories = sample_trajectories(
            model,
            encoded.conditioning,
            encoded.sample_ids,
            dynamics=algorithm.dynamics,
            trained_steps=algorithm.window.steps(rollout.num_inference_steps, config.train.seed, iteration),
            latent_ids=encoded.group_ids if config.rollout.same_latent else None,
            size=rollout.size,
            num_steps=rollout.num_inference_steps,
            guidance_scale=rollout.guidance_scale,
            seed=config.train.seed,
            iteration=iteration,
        )
        assert trajectories is not None
        return latents, trajectories
    assert isinstance(config, ForwardRLConfig)
    algorithm = config.algorithm
    final_samples = sample_final(
        model,
        encoded.conditioning,
        encoded.sample_ids,
        encoded.group_ids,
        solver=algorithm.solver,
        timesteps=algorithm.timesteps,
        shared_noise=algorithm.objective.shared_noise,
        size=rollout.size,
        num_steps=rollout.num_inference_steps,
        guidance_scale=rollout.guidance_scale,
        seed=config.train.seed,
        iteration=iteration,
    )
    return final_samples.latents, final_samples


def _describe_micro_batch(count: int) -> str:
    return f"drawn with the {count} samples of its micro-batch, as the run did" if count > 1 else ""
