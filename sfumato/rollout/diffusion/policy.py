"""The policy of an RL run of diffusion models, as it is before training: model, embedded prompts, operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.data.images.prompts import Prompt
from sfumato.models.diffusion.base import Conditioning, DiffusionModel, set_output
from sfumato.models.diffusion.flops import denoiser_flops
from sfumato.models.diffusion.load import build_diffusion_model
from sfumato.parallel.mesh import Mesh

READ_TOGETHER = 64
"""Source images that are in memory at a time while prompts are embedded in advance."""


def build_policy(config: DiffusionRLConfig, mesh: Mesh, say: Callable[[str], None]) -> DiffusionModel:
    """Loads the model and tells it what it makes. Rollout and replay must be one function, so it never drops out.

    Args:
        config: of the task.
        mesh: its device is where the model computes.
        say: shows a line to the user.

    Raises:
        ConfigError: when the model cannot make images or videos of that size.
    """
    precision, seed = config.train.mixed_precision, config.train.seed
    model = build_diffusion_model(config.model, mesh.device, precision, seed, config.train.init_device)
    model.say = say
    set_output(model, config.rollout.size, "rollout")
    if config.rollout.guidance_scale_2 is not None:
        model.set_second_guidance(config.rollout.guidance_scale_2)
    model.denoiser.eval()
    return model


def encode_prompts(
    model: DiffusionModel, prompts: Sequence[Prompt], size: tuple[int, ...], with_negative: bool
) -> tuple[Conditioning, list[np.ndarray] | None]:
    """Conditioning of B prompts.

    Args:
        model: embeds them.
        prompts: B prompts.
        size: height and width, to which source images are brought.
        with_negative: add the empty prompt.

    Returns:
        Conditioning of B rows, and the B source images, uint8 ``[H, W, 3]``; None for a model that takes none.

    Raises:
        DataError: when a source image is missing or broken; names file and row.
    """
    images = [prompt.source_image(*size[:2]) for prompt in prompts] if model.takes_image else None
    return model.encode_prompts([prompt.text for prompt in prompts], with_negative, images), images


def prepare_prompts(model: DiffusionModel, prompts: Sequence[Prompt], config: DiffusionRLConfig) -> None:
    """Looks at what every prompt of a run needs, and embeds them all where the text encoders are not kept.

    Raises:
        DataError: when a source image is missing or broken; names file and row.
    """
    height, width = config.rollout.height, config.rollout.width
    for prompt in prompts if model.takes_image else ():
        prompt.check_source(height, width)
    if config.model.keep_encoders:
        return
    for start in range(0, len(prompts), READ_TOGETHER):
        part = prompts[start : start + READ_TOGETHER]
        images = [prompt.source_image(height, width) for prompt in part] if model.takes_image else None
        model.remember_prompts([prompt.text for prompt in part], images)
    model.free_encoders()


@dataclass(frozen=True)
class Costs:
    """Operations of the denoiser that drawing and learning take, without what is computed twice to save memory."""

    sample: int
    """Operations that draw one sample: a forward pass for each denoising step and guidance branch."""
    row: int
    """Operations that learn from one row, a sample at one trained step or noise level: a forward and a backward pass
    for each branch of the trained policy, and a forward pass for each of every policy that it is compared with."""

    def flops(self, samples: int, rows: float) -> dict[str, float]:
        """Operations of an iteration by the part of it."""
        return {"generate": float(samples * self.sample), "update": rows * self.row}


def count_costs(actor: Any, config: DiffusionRLConfig) -> Costs:
    """The costs of a configured run, whose ``actor`` has the model.

    Text encoders, autoencoder and rewards are left out. Counted though not computed are a policy that just then has the
    trained one's weights, and the adapter (about 1 %) where the reference is the model without it.
    """
    rollout, algorithm, model = config.rollout, config.algorithm, actor.model
    forward, training = denoiser_flops(model, rollout.height, rollout.width)

    def branches(scale: float) -> int:
        return 1 if scale == 1.0 or model.embeds_guidance else 2

    own = config.trained_guidance_scale
    row = branches(own) * training
    for policy in algorithm.compared:
        scale = algorithm.reference_guidance_scale if policy == "reference" else None
        row += branches(own if scale is None else scale) * forward
    return Costs(rollout.num_inference_steps * branches(rollout.guidance_scale) * forward, row)
