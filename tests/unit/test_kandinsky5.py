"""What Kandinsky 5 refuses, the positions of its sizes, what it reads of a source image, and how it decodes videos from
a first frame."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from sfumato.errors import ConfigError
from sfumato.models.diffusion.families.kandinsky5_image import Kandinsky5ImageToImage
from sfumato.models.diffusion.families.kandinsky5_video import Kandinsky5Video
from sfumato.models.diffusion.families.kandinsky5_video_image import Kandinsky5ImageToVideo
from tests.tiny_families import tiny_kandinsky5_image, tiny_kandinsky5_video, tiny_kandinsky5_video_image


def build(**transformer: Any) -> Kandinsky5Video:
    pytest.importorskip("torchvision")
    description = tiny_kandinsky5_video()
    description["transformer"] |= transformer
    return Kandinsky5Video(Kandinsky5Video.build(description, 0), max_sequence_length=24)


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
    model = Kandinsky5ImageToVideo(
        Kandinsky5ImageToVideo.build(tiny_kandinsky5_video_image(), 0), max_sequence_length=24
    )
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


def test_a_source_image_is_read_in_half_its_size_behind_the_prompt() -> None:
    pytest.importorskip("torchvision")
    model = Kandinsky5ImageToImage(Kandinsky5ImageToImage.build(tiny_kandinsky5_image(), 0), 24)
    image = np.random.default_rng(3).integers(0, 256, (112, 224, 3), np.uint8)
    num_image_tokens = (56 // 28) * (112 // 28)
    short, long = (int(model.embed_edit(prompt, image)["prompt_mask"].sum()) for prompt in ("a", "abcde"))
    assert long == short + 4
    assert model.embed_edit("a", image)["prompt_mask"].shape == (1, 24 + num_image_tokens)
    longest = "b" * (24 + num_image_tokens - short + 1)
    assert model.embed_edit(longest, image)["prompt_mask"].all()
    with pytest.raises(ConfigError, match="this prompt takes 25 tokens, and one that goes with an image cannot be cut"):
        model.embed_edit(longest + "b", image)
    read = len(model.pipeline.tokenizer.tokenizer(model.prompt_as_read("abcde"))["input_ids"])
    assert read == len("abcde") + 3, "with the tokens around the image and the end of the turn"
