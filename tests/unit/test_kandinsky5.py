"""What Kandinsky 5 for videos refuses, and the positions of its sizes."""

from __future__ import annotations

from typing import Any

import pytest

from sfumato.errors import ConfigError
from sfumato.models.diffusion.families.kandinsky5_video import Kandinsky5Video
from tests.tiny_families import tiny_kandinsky5_video


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
