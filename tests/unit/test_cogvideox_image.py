"""Learned positions of CogVideoX 5B image to video fit one size alone."""

from __future__ import annotations

import numpy as np
import pytest

from sfumato.errors import ConfigError
from sfumato.models.diffusion.families.cogvideox_image import CogVideoXImageToVideo
from tests.tiny_families import tiny_cogvideox_image


def test_other_sizes_than_that_of_learned_positions_are_refused() -> None:
    description = tiny_cogvideox_image()
    description["transformer"] |= {"use_learned_positional_embeddings": True}
    model = CogVideoXImageToVideo(CogVideoXImageToVideo.build(description, 0), max_sequence_length=7)
    assert model.latent_shape(32, 32, 5) == (4, 2, 8, 8)
    with pytest.raises(ValueError, match=r"height 16 and width 32: .* makes 32 x 32 pixels alone"):
        model.latent_shape(16, 32, 5)
    # a picture of another size still identifies the encoders
    assert model.embed_edit("a", np.zeros((16, 16, 3), np.uint8))["image_latents"].shape == (1, 4, 1, 4, 4)
    assert model.frame_rate == 8.0
    model.denoiser.register_to_config(patch_size_t=2)  # as of 1.5
    model.check_components()
    assert model.frame_rate == 16.0


@pytest.mark.parametrize(
    "changes", [{"use_learned_positional_embeddings": True}, {"use_rotary_positional_embeddings": False}]
)
def test_prompts_of_another_length_than_that_of_the_positions_are_refused(changes: dict[str, bool]) -> None:
    description = tiny_cogvideox_image()
    description["transformer"] |= changes
    pipeline = CogVideoXImageToVideo.build(description, 0)
    with pytest.raises(ConfigError, match=r"max_sequence_length 8: .* positions for 7 tokens"):
        CogVideoXImageToVideo(pipeline, max_sequence_length=8)
