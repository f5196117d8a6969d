"""What Kandinsky 5 for videos refuses, the positions of its sizes, and how it decodes videos from a first frame."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sfumato.errors import ConfigError
from sfumato.models.diffusion.families.kandinsky5_video import Kandinsky5Video
from sfumato.models.diffusion.families.kandinsky5_video_image import Kandinsky5ImageToVideo
from tests.tiny_families import tiny_kandinsky5_video, tiny_kandinsky5_video_image


def build(**transformer: Any) -> Kandinsky5Video:
    pytest.importorskip("torchvision")
    description = tiny_kandinsky5_video()
    description["transformer"] |= transformer
    return Kandinsky5Video(Kandinsky5Video.build(description, 0), 24)


def test_block_sparse_attention_is_refused() -> None:
    with pytest.raises(ConfigError, match="attention_type nabla"):
        build(attention_type="nabla")


def test_sizes_beyond_the_positions_are_refused() -> None:
    model = build()
    assert model.latent_shape(32, 16 * 128, 509) == (4, 128, 4, 256)
    with pytest.raises(ValueError, match="may be 2048 pixels at most"):
        model.latent_shape(32, 16 * 129)
    with pytest.raises(ValueError, match="positions for 128 latent frames"):
        model.latent_shape(32, 32, 513)
    with pytest.raises(ValueError, match="1 more than a multiple of 4"):
        model.latent_shape(32, 32, 4)


def test_first_latent_frames_are_adjusted_as_in_the_pipeline() -> None:
    pytest.importorskip("torchvision")
    model = Kandinsky5ImageToVideo(Kandinsky5ImageToVideo.build(tiny_kandinsky5_video_image(), 0), 24)
    vae = model.pipeline.vae
    latents = torch.randn(2, *model.latent_shape(16, 16, 41), generator=torch.Generator().manual_seed(6))
    latents[:, :, 9:] += 5  # behind those that the pipeline looks at
    with torch.no_grad():
        pixels = model.latents_to_pixels(latents)
        for video, decoded in zip(latents.permute(0, 2, 3, 4, 1), pixels, strict=True):
            adjusted = model.pipeline.normalize_first_frame(video[None])
            assert (adjusted - video)[:, :4].abs().max() > 0.01
            expected = vae.decode(adjusted.permute(0, 4, 1, 2, 3) / vae.config.scaling_factor).sample[0]
            torch.testing.assert_close(decoded, expected.transpose(0, 1), atol=1e-4, rtol=1e-4)
        short = latents[:, :, :4]  # there the pipeline divides by nothing
        expected = vae.decode(short / vae.config.scaling_factor).sample
        torch.testing.assert_close(model.latents_to_pixels(short), expected.transpose(1, 2))
