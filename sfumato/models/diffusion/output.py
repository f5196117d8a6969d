"""What a run makes: the size of its images, or the size and the frames of its videos."""

from __future__ import annotations

from sfumato.errors import ConfigError
from sfumato.models.diffusion.base import DiffusionModel


def set_output(model: DiffusionModel, size: tuple[int, int, int], section: str) -> None:
    """Tells a model what it is to make, before anything is embedded.

    Args:
        model: takes note of the number of frames.
        size: height and width in pixels, and frames; 1 is an image.
        section: of the configuration, for messages.

    Raises:
        ConfigError: when the model cannot make it.
    """
    try:
        model.latent_shape(*size)
    except ValueError as error:
        height, width, frames = size
        raise ConfigError(
            f"{section}.height {height}, {section}.width {width}, {section}.num_frames {frames}: "
            f"{model.pipeline_class} cannot make that: {error}"
        ) from error
    model.frames = size[2]
