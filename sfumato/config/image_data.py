"""The section data of tasks that learn from given images or videos."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from sfumato.config.base import Section, refuse_needless
from sfumato.config.paths import FilePath
from sfumato.config.row_limit import RowLimit
from sfumato.config.sections import (
    MAX_SECONDS,
    MAX_SIDE,
    MOST_SOURCE_IMAGES,
    GlyphConfig,
    check_size,
    sound_size,
)

Side = Annotated[int, Field(ge=8, le=MAX_SIDE)]
Size = Annotated[list[Side], Field(min_length=2, max_length=2)]

MASK = ("mask_key", "mask_outside", "invert_mask")
"""Fields of masks."""

SOURCES = ("source_image_key", "max_source_images")
"""Fields of source images."""

MOST_BUCKETS = 1000
"""Most sizes of images."""


def sizes_of_area(height: int, width: int, step: int) -> list[tuple[int, int]]:
    """Heights and widths that are multiples of ``step``, of the area of ``height x width`` at most.

    One for each side from half to twice the root of the area, and its mirror, so ratios are from 1:4 to 4:1: the sizes
    of NovelAI's aspect ratio bucketing, as kohya's scripts make them. None when the area holds no such size.
    """
    area = height * width
    edge = math.isqrt(area)
    sizes: set[tuple[int, int]] = {(edge // step * step, edge // step * step)} if edge >= step else set()
    # sides from half of the edge to twice as much; for each the longest other side that stays within the area
    for side in range(-(-edge // (2 * step)) * step, 2 * edge + 1, step):
        other = area // side // step * step
        if 2 * other >= edge:
            sizes |= {(side, other), (other, side)}
    return sorted(sizes)


class ImageDataConfig(Section):
    """Images or videos for captions: what all tasks that train on given ones share."""

    data_type: Literal["image_text", "glyphs"] = "image_text"
    """image_text reads train_path; glyphs renders words in code."""
    train_path: FilePath | None = None
    """A .jsonl or .parquet file, or a folder of images with captions in metadata.jsonl or in .txt files beside them."""
    source_image_key: str = "source_image"
    """Column of the image that is edited or animated, if the model takes one; default of a video: its first frame. A
    list holds several images."""
    max_source_images: int = Field(1, ge=1, le=MOST_SOURCE_IMAGES)
    """Most source images of a row; more than 1 for models that take several; 2 of a video are its first and last
    frame."""
    text_key: str = "text"
    """Column of the caption."""
    glyphs: GlyphConfig = GlyphConfig()  # pyright: ignore[reportCallIssue]
    """Words to render when data_type is glyphs."""
    height: int = Field(512, ge=8, le=MAX_SIDE)
    """Height of the training images in pixels."""
    width: int = Field(512, ge=8, le=MAX_SIDE)
    """Width of the training images in pixels."""
    buckets: Annotated[int, Field(ge=8, le=MAX_SIDE)] | list[Size] | None = None
    """Sizes of images; each is brought to that whose aspect ratio is nearest to its own. A number: multiples of so
    many pixels whose area is that of height x width at most; a list: [height, width] of each; null: height x width."""
    num_frames: int = Field(1, ge=1)
    """Frames that are taken of each video, at even distances; 1 reads images."""
    crop: Literal["center", "none"] = "center"
    """center scales the shorter side and cuts the rest; none stretches the image."""
    max_bad_rows: RowLimit = 0
    """Broken rows that are left out, each named in the log, before the run stops; 0 stops at the first. A number below
    1, or `1%`, is a share of the rows."""
    cache_dir: FilePath | None = None
    """Folder for latents and text embeddings, computed once before training; null encodes online."""

    @field_validator("buckets", mode="wrap")
    @classmethod
    def _are_sizes(cls, value: object, check: Callable[[object], object]) -> object:
        try:
            return check(value)
        except ValidationError as error:
            raise ValueError(
                f"must be a number of pixels, or a list of [height, width] such as [[512, 512], [448, 576]], of 8 to "
                f"{MAX_SIDE} pixels each, not {value!r}"
            ) from error

    @model_validator(mode="after")
    def _has_source(self) -> ImageDataConfig:
        if self.data_type != "glyphs" and self.train_path is None:
            raise ValueError(f"data.train_path is required when data.data_type is {self.data_type}")
        if self.data_type == "glyphs" and self.train_path is not None:
            raise ValueError("data.train_path has no meaning when data.data_type is glyphs: remove one of them")
        check_size("data", self.height, self.width, self.num_frames)
        if self.max_source_images > 1 and self.data_type == "glyphs":
            raise ValueError("data.max_source_images: words that are rendered have one source image: leave it out")
        if self.max_source_images > 2 and self.num_frames > 1:
            raise ValueError(
                f"data.max_source_images {self.max_source_images}: a video starts from its first frame, or from its "
                "first and last one: set it to 1 or 2"
            )
        if self.buckets is not None:
            self._check_buckets()
        return self

    @property
    def size(self) -> tuple[int, int, int]:
        """Height, width and frames of a sample; of a sound see ``sound_size``."""
        return self.height, self.width, self.num_frames

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Height and width that images are brought to; without buckets one."""
        if self.buckets is None:
            return [(self.height, self.width)]
        if isinstance(self.buckets, int):
            return sizes_of_area(self.height, self.width, self.buckets)
        return [(height, width) for height, width in self.buckets]

    def _check_buckets(self) -> None:
        """Raises ValueError for buckets that cannot be meant."""
        if self.data_type == "glyphs" or self.num_frames > 1:
            setting = "data.data_type glyphs" if self.data_type == "glyphs" else f"data.num_frames {self.num_frames}"
            raise ValueError(f"data.buckets are for images of many sizes, and not for {setting}: remove one of them")
        sizes = self.sizes
        if not sizes or len(sizes) > MOST_BUCKETS:
            why = "no size" if not sizes else f"{len(sizes)} sizes, more than {MOST_BUCKETS}"
            raise ValueError(
                f"data.buckets {self.buckets} gives {why} (data.height {self.height} x data.width {self.width})"
            )
        if len(set(sizes)) < len(sizes):
            raise ValueError(f"data.buckets: a size is given twice: {[list(size) for size in sizes]}")
        for height, width in sizes:
            check_size("data.buckets: data", height, width, 1)


class ImageTextDataConfig(ImageDataConfig):
    """Images, videos or sounds with captions."""

    data_type: Literal["image_text", "sound_text", "video_sound_text", "glyphs"] = "image_text"
    """image_text reads images or videos of train_path; sound_text reads sounds; video_sound_text reads videos with the
    sound that they have; glyphs renders words in code."""
    image_key: str = "image"
    """Column of the image, or of the video: a path relative to the file, or in parquet the bytes."""
    mask_key: str | None = None
    """Column of a mask, a picture as large as the image that is white where the loss counts; null: it counts
    everywhere."""
    mask_outside: float = Field(0.0, ge=0, lt=1)
    """Weight of the loss where the mask is black; 0 trains inside of it alone."""
    invert_mask: bool = False
    """Whether black is inside."""
    sound_key: str = "audio"
    """Column of the sound: a path relative to the file, or in parquet the bytes; a video without it has its own."""
    seconds: float | None = Field(None, gt=0, le=MAX_SECONDS)
    """Length of the sounds that are trained on: longer ones are cut, shorter ones filled up with silence."""

    @model_validator(mode="after")
    def _sound_fits(self) -> ImageTextDataConfig:
        if self.data_type == "sound_text":
            if self.seconds is None:
                raise ValueError("data.seconds is required when data.data_type is sound_text")
            names = (
                "image_key",
                *SOURCES,
                "height",
                "width",
                "buckets",
                "num_frames",
                "crop",
                "glyphs",
                *MASK,
            )
            refuse_needless(self, "data", names, "on sounds (data.data_type sound_text): remove it")
        elif self.data_type == "video_sound_text":
            if self.num_frames < 2:
                raise ValueError(
                    "data.num_frames: the frames of a video are required for data.data_type video_sound_text"
                )
            names = ("seconds", *SOURCES, "buckets", "glyphs", *MASK)
            refuse_needless(self, "data", names, "on videos with sound (data.data_type video_sound_text): remove it")
        else:
            why = f"with data.data_type {self.data_type}: remove it, or set data.data_type sound_text"
            refuse_needless(self, "data", ("seconds", "sound_key"), why)
        if self.data_type == "glyphs":
            refuse_needless(self, "data", MASK, "on words that are rendered (data.data_type glyphs): remove it")
        elif self.mask_key is None:
            refuse_needless(self, "data", MASK[1:], "without data.mask_key, the column of masks")
        return self

    @property
    def size(self) -> tuple[int, int, int]:
        """As of ``ImageDataConfig``."""
        return super().size if self.seconds is None else sound_size(self.seconds)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """As of ``ImageDataConfig``; of sounds one."""
        return super().sizes if self.seconds is None else [self.size[:2]]

    def refuse_sound(self, what: str) -> None:
        """Raises ValueError where images are needed."""
        if self.data_type in ("sound_text", "video_sound_text"):
            raise ValueError(f"data.data_type {self.data_type}: {what} is trained on images: take image_text")


class PairDataConfig(ImageDataConfig):
    """Pairs of a better and a worse image for one prompt."""

    data_type: Literal["pairs", "glyphs"] = "pairs"
    """pairs reads train_path; glyphs renders words in code: that of the prompt, and another one as the worse image."""
    train_path: FilePath | None = None
    """A .jsonl or .parquet file, a folder of them, or a folder with metadata.jsonl."""
    eval_path: FilePath | None = None
    """Held-out pairs, like train_path; null evaluates nothing (glyphs: pairs of held-out words)."""
    text_key: str = "prompt"
    """Column of the prompt."""
    chosen_key: str = "chosen"
    """Column of the better image: a path relative to the file, or in parquet the bytes."""
    rejected_key: str = "rejected"
    """Column of the worse image."""
    label_key: str | None = None
    """Column that says which is which: 1 leaves them so, 0 makes rejected_key's image the better one, and rows with
    any other number are ties, which are left out. null: all are so."""

    @model_validator(mode="after")
    def _fits(self) -> PairDataConfig:
        if self.data_type == "glyphs" and self.eval_path is not None:
            raise ValueError("data.eval_path has no meaning when data.data_type is glyphs: remove one of them")
        if self.chosen_key == self.rejected_key:
            raise ValueError(f"data.chosen_key and data.rejected_key are both {self.chosen_key!r}")
        return self
