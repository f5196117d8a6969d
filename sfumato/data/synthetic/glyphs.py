"""Rendered words with captions: a task that needs no download and can be verified by OCR.

The source image of an edit shows another word; in a video the word moves from left to right.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from sfumato.algorithms.noise import keyed_generator
from sfumato.config.sections import GlyphConfig
from sfumato.data.media.pictures import Picture
from sfumato.errors import ConfigError, DataError

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont, ImageFont

MOST_DRAWS = 10_000
"""Random words that are tried before an error says that there are none of the wanted kind."""


class GlyphDataset:
    """Images of single words, black on white; image i is a function of (seed, i).

    A share of the words (``config.held_out``, a tenth by default, chosen by a hash of the word alone) never appears;
    with ``held_out`` only these words do.
    """

    is_paired: ClassVar[bool] = False
    """Whether a row holds two images, the preferred one first."""

    def __init__(
        self, config: GlyphConfig, height: int, width: int, seed: int, num_frames: int = 1, held_out: bool = False
    ) -> None:
        self.config = config
        self.seed = seed
        self.held_out = held_out
        self.size = (height, width, num_frames)

    def __len__(self) -> int:
        return self.config.num_images

    def caption(self, index: int) -> str:
        """Caption of image ``index``."""
        return caption_of(self._word(index)[0], self.config)

    def pixels(self, index: int) -> torch.Tensor:
        """Image ``index``: uint8 ``[3, height, width]``; a video of several frames: ``[3, frames, height, width]``."""
        word, generator = self._word(index)
        return self._render([word], generator)[0]

    def picture(self, index: int) -> Picture:
        """Image ``index`` with its framing, as ``ImageTextDataset.picture`` gives it.

        Words are rendered at the size of the image, so that nothing is cut off: the framing is the size and the offset
        (0, 0).
        """
        pixels = self.pixels(index)
        framing = torch.tensor([*self.size[:2], 0, 0], dtype=torch.int32)
        return Picture(pixels, framing.expand(2, 4) if self.is_paired else framing)

    def source(self, index: int, pixels: torch.Tensor) -> np.ndarray:
        """Source of the edit to image ``index``, uint8 ``[height, width, 3]``.

        Args:
            index: of the image.
            pixels: of the image, or of the video, whose first frame is its source; an image's source is another word.
        """
        if pixels.ndim == 4:
            return pixels[:, 0].permute(1, 2, 0).numpy()
        return source_image(self._word(index)[0], self.config, *self.size[:2])

    def describe(self, index: int) -> str:
        """Where the row comes from, for messages."""
        return f"glyph image {index} ({self._word(index)[0]!r})"

    def example_captions(self, count: int) -> list[str]:
        """Captions of ``count`` held-out words, for sample grids."""
        return [caption_of(word, self.config) for word in held_out_words(self.config, count)]

    def example_edits(self, count: int) -> list[tuple[str, np.ndarray]]:
        """Captions of ``count`` held-out words with the sources of their edits, uint8 ``[H, W, 3]``."""
        words = held_out_words(self.config, count)
        return [(caption_of(word, self.config), source_image(word, self.config, *self.size[:2])) for word in words]

    def fingerprint(self) -> str:
        """Identifies the images, for caches."""
        size = "x".join(map(str, self.size))
        return f"{self.config.model_dump_json()}|{size}|{self.seed}"

    def _word(self, index: int) -> tuple[str, torch.Generator]:
        generator = keyed_generator(self.seed, "glyph", index)
        # The generator is returned, too: the rendering goes on with it after the word.
        return self._draw(generator), generator

    def _draw(self, generator: torch.Generator, other_than: str = "") -> str:
        for _ in range(MOST_DRAWS):
            word = _draw_word(generator, self.config)
            if is_held_out(word, self.config) == self.held_out and word != other_than:
                return word
        kind = "held-out" if self.held_out else "training"
        few = f"fewer than {2 if other_than else 1} {kind} words"
        raise ConfigError(f"data.glyphs: there are {few}; change held_out, length or characters")

    def _render(self, words: list[str], generator: torch.Generator) -> torch.Tensor:
        """Renders words in one font size and at one place: uint8 ``[N, 3, height, width]``.

        Videos are ``[N, 3, frames, height, width]``.
        """
        font = default_font(self.config.font_sizes[_draw_integer(generator, 0, len(self.config.font_sizes) - 1)])
        x, y = (_draw_integer(generator, -self.config.jitter, self.config.jitter) for _ in range(2))
        height, width, num_frames = self.size
        if num_frames == 1:
            return torch.stack([render_word(word, font, height, width, [x, y]) for word in words])
        shifts = [[x + round(offset), y] for offset in np.linspace(-width / 8, width / 8, num_frames)]
        videos = [[render_word(word, font, height, width, shift) for shift in shifts] for word in words]
        return torch.stack([torch.stack(frames, dim=1) for frames in videos])


class GlyphPairs(GlyphDataset):
    """Pairs of images or videos for one caption: the word that it names, and another one in the same size and place."""

    is_paired: ClassVar[bool] = True

    def pixels(self, index: int) -> torch.Tensor:
        """Pair ``index``, the word that the caption names first: uint8 ``[2, ...]``, each as in ``GlyphDataset``."""
        word, generator = self._word(index)
        wrong = self._draw(keyed_generator(self.seed, "wrong glyph", index), other_than=word)
        return self._render([word, wrong], generator)

    def source(self, index: int, pixels: torch.Tensor) -> np.ndarray:
        """Source of the edit to both images, uint8 ``[height, width, 3]``, as in ``GlyphDataset``.

        For videos it is the first frame of the video that the caption names.
        """
        return super().source(index, pixels[0])

    def fingerprint(self) -> str:
        """Identifies the images, for caches."""
        return f"pairs|{super().fingerprint()}|{self.held_out}"


def render_word(word: str, font: FreeTypeFont | ImageFont, height: int, width: int, shift: list[int]) -> torch.Tensor:
    """Draws a word in black on white: uint8 ``[3, height, width]``.

    ``shift`` moves it from the centre: pixels to the right and down.
    """
    from PIL import Image, ImageDraw

    image = Image.new("L", (width, height), 255)
    draw = ImageDraw.Draw(image)
    x_min, y_min, x_max, y_max = draw.textbbox((0, 0), word, font=font)
    x = (width - (x_max - x_min)) / 2 - x_min + shift[0]
    y = (height - (y_max - y_min)) / 2 - y_min + shift[1]
    draw.text((x, y), word, font=font, fill=0)
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


@functools.cache
def default_font(size: int) -> FreeTypeFont | ImageFont:
    """The font that comes with Pillow, so that no file is needed."""
    from PIL import ImageFont

    return ImageFont.load_default(size)


def source_image(word: str, config: GlyphConfig, height: int, width: int) -> np.ndarray:
    """An image of another word, from which an edit to ``word`` starts: uint8 ``[height, width, 3]``.

    Raises DataError when the characters make no other word.
    """
    if len(set(config.characters)) < 2:
        raise DataError(
            f"data.glyphs.characters {config.characters!r} make no other word to start an edit from: add some"
        )
    generator = keyed_generator(0, f"glyph source {word}")
    other = word
    while other == word:
        other = _draw_word(generator, config)
    pixels = render_word(other, default_font(config.font_sizes[0]), height, width, [0, 0])
    return pixels.permute(1, 2, 0).contiguous().numpy()


def caption_of(word: str, config: GlyphConfig) -> str:
    """The caption of a word."""
    return config.template.format(word=word)


def is_held_out(word: str, config: GlyphConfig) -> bool:
    """Whether training never shows this word: a function of the word and the held-out share, so all runs agree."""
    digest = hashlib.blake2b(word.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64 < config.held_out


def training_words(config: GlyphConfig) -> list[str]:
    """All words that may be shown, in a fixed order. Raises DataError when there are more than 50,000."""
    count = len(config.characters) ** config.length
    if count > 50_000:
        raise DataError(f"there are {count} words of {config.length} characters; listing them stops at 50000")
    words = map("".join, itertools.product(config.characters, repeat=config.length))
    return [word for word in words if not is_held_out(word, config)]


def held_out_words(config: GlyphConfig, count: int) -> list[str]:
    """The first ``count`` held-out words of a fixed random order. Raises DataError if there are fewer."""
    generator = keyed_generator(0, "held out words")
    words: dict[str, None] = {}
    for _ in range(1000 * count):
        word = _draw_word(generator, config)
        if is_held_out(word, config):
            words[word] = None
            if len(words) == count:
                return list(words)
    raise DataError(f"there are fewer than {count} held-out words: lower the number or raise data.glyphs.held_out")


def _draw_word(generator: torch.Generator, config: GlyphConfig) -> str:
    return "".join(
        config.characters[_draw_integer(generator, 0, len(config.characters) - 1)] for _ in range(config.length)
    )


def _draw_integer(generator: torch.Generator, low: int, high: int) -> int:
    """Draws an integer from ``low`` to ``high``, both included."""
    return int(torch.randint(low, high + 1, (), generator=generator))
