"""The policy of an RL run of diffusion models before training: its model, its embedded prompts, its operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from sfumato.data.images.prompts import Prompt, check_source_counts
from sfumato.errors import ConfigError
from sfumato.models.diffusion.base import Conditioning, DiffusionModel, set_output, set_source_images
from sfumato.models.diffusion.flops import denoiser_flops
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.parallel.mesh import Mesh

if TYPE_CHECKING:
    from sfumato.config.diffusion_rl import DiffusionRLConfig

    class _HasModel(Protocol):
        """The part of an actor (``runtime/states.py``, on a floor above this one) that is needed here."""

        model: DiffusionModel


READ_TOGETHER = 64
"""How many source images are in memory at a time while prompts are embedded in advance."""


def build_policy(config: DiffusionRLConfig, mesh: Mesh, say: Callable[[str], None]) -> DiffusionModel:
    """Loads the model for images or videos of the rollout's size.

    It is in evaluation mode, without dropout: rollout and replay must compute the same function.

    Args:
        config: of the task.
        mesh: its device is where the model computes.
        say: shows the user a line.

    Raises:
        ConfigError: when the model cannot make images or videos of that size, or a reward does not suit them.
    """
    precision = config.train.mixed_precision
    seed = config.train.seed
    model = build_diffusion_model(config.model, mesh.device, precision, seed, config.train.init_device)
    model.say = say
    set_output(model, config.rollout.size, "rollout")
    set_source_images(model, config.data.max_source_images)
    check_rewards(model, config)
    if config.rollout.guidance_scale_2 is not None:
        model.set_second_guidance(config.rollout.guidance_scale_2)
    scale = config.rollout.guidance_scale
    if scale > 1 and model.default_guidance == 1:
        say(f"rollout.guidance_scale is {scale:g}; diffusers draws this {model.pipeline_class} without guidance: 1")
    model.denoiser.eval()
    return model


def check_rewards(model: DiffusionModel, config: DiffusionRLConfig) -> None:
    """Raises ConfigError for rewards that hear, of a model whose videos have no sound, and for those that compare with
    one source image where there may be several."""
    for number, reward in enumerate(config.reward.rewards):
        if reward.compares_source and config.data.max_source_images > 1:
            raise ConfigError(
                f"reward.rewards.{number}: {reward.type} compares with one source image, and data.max_source_images "
                f"is {config.data.max_source_images}: remove one of them"
            )
        if config.modality == "image" and not model.makes_video_with_sound and not reward.scores("image"):
            raise ConfigError(
                f"reward.rewards.{number}: {reward.type} scores sounds, and {model.pipeline_class} makes none: "
                "remove it"
            )


def encode_prompts(
    model: DiffusionModel, prompts: Sequence[Prompt], size: tuple[int, ...], with_negative: bool
) -> tuple[Conditioning, list[np.ndarray] | None]:
    """Embeds B prompts.

    Args:
        model: has the text encoders.
        prompts: B prompts.
        size: height and width to which source images are resized, and of videos the number of frames.
        with_negative: whether the empty prompt is embedded, too, for guidance.

    Returns:
        Conditioning of B rows, and the B source images, uint8 ``[H, W, 3]``, or of several for each prompt
        ``[S, H, W, 3]``; None in their place for a model that takes none.

    Raises:
        DataError: when a source image is missing or broken; names file and row.
    """
    images = [prompt.source_image(*size[:2]) for prompt in prompts] if model.takes_image else None
    return model.encode_prompts([prompt.text for prompt in prompts], with_negative, images), images


def prepare_prompts(model: DiffusionModel, prompts: Sequence[Prompt], config: DiffusionRLConfig) -> None:
    """Checks the source images of all prompts of a run; embeds all prompts in advance unless text encoders stay loaded.

    Raises:
        DataError: when a source image is missing or broken; names file and row.
    """
    height, width, _ = config.rollout.size
    for prompt in prompts if model.takes_image else ():
        prompt.check_source(height, width)
    if model.takes_image:
        check_source_counts(prompts, model.source_problem)
    if model.image_family is not None and not model.takes_image and any(prompt.source for prompt in prompts):
        model.say("the prompts' source images are not read: model.from_images true makes samples from them")
    if config.model.keep_encoders:
        return
    for start in range(0, len(prompts), READ_TOGETHER):
        chunk = prompts[start : start + READ_TOGETHER]
        images = [prompt.source_image(height, width) for prompt in chunk] if model.takes_image else None
        model.remember_prompts([prompt.text for prompt in chunk], images)
    model.free_encoders()


@dataclass(frozen=True)
class Costs:
    """Operations of the denoiser in drawing and learning; what is recomputed to save memory does not count."""

    sample: int
    """To draw one sample: a forward pass for each denoising step and guidance branch."""
    row: int
    """To learn from one row, which is a sample at one trained step or noise level: a forward and a backward pass of
    each guidance branch of the trained policy, and a forward pass of each branch of the policies that it is compared
    with."""

    def flops(self, samples: int, rows: float) -> dict[str, float]:
        """Operations of an iteration, by its parts: those that draw ``samples``, and those that learn from ``rows``."""
        return {"generate": float(samples * self.sample), "update": rows * self.row}


def count_costs(actor: _HasModel, config: DiffusionRLConfig) -> Costs:
    """The costs of a configured run, whose ``actor`` has the model.

    Text encoders, autoencoder and rewards are left out. Two things count though they are not computed: a policy whose
    weights equal the trained one's at that time, and the adapter (about 1 %) where the reference is the model without
    it.
    """
    rollout = config.rollout
    algorithm = config.algorithm
    model = actor.model
    forward, training = denoiser_flops(model, *rollout.size[:2])  # of one sample and guidance branch

    def branches(scale: float) -> int:
        return 1 if scale == 1.0 or model.embeds_guidance else 2

    trained_scale = config.trained_guidance_scale
    row = branches(trained_scale) * training
    for policy in algorithm.compared:
        scale = algorithm.reference_guidance_scale if policy == "reference" else None
        row += branches(trained_scale if scale is None else scale) * forward
    return Costs(rollout.num_inference_steps * branches(rollout.guidance_scale) * forward, row)
