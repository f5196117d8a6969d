"""Prompts, with their source images where a model takes them, as conditioning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.data.prompts import Prompt
from sfumato.models.diffusion.base import Conditioning, DiffusionModel

READ_TOGETHER = 64
"""Source images that are in memory at a time while prompts are embedded in advance."""


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
    images = [each.source_image(*size[:2]) for each in prompts] if model.takes_image else None
    return model.encode_prompts([each.text for each in prompts], with_negative, images), images


def remember_prompts(model: DiffusionModel, prompts: Sequence[Prompt], size: tuple[int, ...]) -> None:
    """Embeds all prompts in advance. Args and errors are those of ``encode_prompts``."""
    for start in range(0, len(prompts), READ_TOGETHER):
        part = prompts[start : start + READ_TOGETHER]
        images = [each.source_image(*size[:2]) for each in part] if model.takes_image else None
        model.remember_prompts([each.text for each in part], images)


def check_source_images(model: DiffusionModel, prompts: Sequence[Prompt]) -> None:
    """Looks for the source images, where a model takes them. Raises DataError that names file and row."""
    for each in prompts if model.takes_image else ():
        each.check_source()


def prepare_prompts(model: DiffusionModel, prompts: Sequence[Prompt], config: DiffusionRLConfig) -> None:
    """Looks at what every prompt of a run needs, and embeds them all where the text encoders are not kept."""
    check_source_images(model, prompts)
    if not config.model.keep_encoders:
        remember_prompts(model, prompts, config.rollout.size)
        model.free_encoders()
