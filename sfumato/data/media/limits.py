"""Fields that formats of text and of prompts share, which limit the size of their images and videos."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from sfumato.data.media.vision import MediaProcessor


@dataclass(frozen=True)
class ImageLimits:
    """Limits of images."""

    media: ClassVar[tuple[str, ...]] = ("image",)
    """Kinds of media that rows may have, as far as the model takes them."""

    min_pixels: int | None = None
    """Smaller images are scaled up to so many pixels; null: the model's own limit."""
    max_pixels: int | None = None
    """Larger images are scaled down to so many pixels; null: the model's own limit."""

    def __post_init__(self) -> None:
        self._refuse_below_1("min_pixels", "max_pixels")

    def _refuse_below_1(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, not {value}")

    def limited(self, reader: MediaProcessor) -> MediaProcessor:
        """A reader that scales images as these fields say. Raises ConfigError when the model's processor cannot."""
        reader.check_sees()
        return reader.limited(self.min_pixels, self.max_pixels)


@dataclass(frozen=True)
class MediaLimits(ImageLimits):
    """Limits of images and videos, for formats that allow audio, too."""

    media: ClassVar[tuple[str, ...]] = ("image", "video", "audio")

    fps: float | None = None
    """Frames that are taken of each second of a video; null: the model's own number."""
    min_frames: int | None = None
    """Fewest frames of a video; null: the model's own number."""
    max_frames: int | None = None
    """Most frames of a video; null: the model's own number."""
    video_min_pixels: int | None = None
    """Smaller videos are scaled up to so many pixels, of each frame (Qwen2-VL, Qwen2.5-VL) or of all together
    (Qwen3-VL); null: the model's own limit."""
    video_max_pixels: int | None = None
    """Larger videos are scaled down to so many pixels, counted likewise; null: the model's own limit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse_below_1("min_frames", "max_frames", "video_min_pixels", "video_max_pixels")
        if self.fps is not None and not 0 < self.fps < math.inf:
            raise ValueError(f"fps must be above 0, not {self.fps}")
        if self.max_frames == 1:
            raise ValueError("max_frames must be at least 2: the models take two frames at a time")

    def limited(self, reader: MediaProcessor) -> MediaProcessor:
        """A reader that takes videos and audio, too. Raises ConfigError when the model's processor cannot."""
        return reader.limited(self.min_pixels, self.max_pixels).with_media(
            fps=self.fps,
            min_frames=self.min_frames,
            max_frames=self.max_frames,
            min_pixels=self.video_min_pixels,
            max_pixels=self.video_max_pixels,
        )
