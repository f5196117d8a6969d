"""Prompts for RL of pictures, perhaps with source images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from sfumato.config.sections import GlyphConfig
from sfumato.data.files.row_table import FiledRows
from sfumato.data.files.rows import open_rows, text_field
from sfumato.data.images.source_images import (
    check_source_images,
    count_source_images,
    find_source_images,
    read_source_images,
)
from sfumato.data.media.kinds import File
from sfumato.data.shared_rows import shared_line
from sfumato.data.synthetic.glyphs import caption_of, held_out_words, source_image, training_words
from sfumato.errors import DataError

if TYPE_CHECKING:
    from sfumato.config.rl import PromptDataConfig


@dataclass(frozen=True)
class Prompt:
    """A prompt, with the metadata that its rewards are given."""

    text: str
    metadata: dict[str, object]
    where: str
    """File and row, for messages."""
    source: FileSource | GlyphSource | None = None
    """The image that is edited or animated."""

    def check_source(self, height: int, width: int) -> None:
        """Checks that the source image exists, by the head of its file, and fits the size it is brought to.

        Args:
            height, width: of the size.

        Raises:
            DataError: when it is missing, broken or does not fit; it names file and row.
        """
        if self.source is None:
            raise DataError(
                f"{self.where}: no source image, which this model needs with every prompt: give its path, or its "
                "bytes, in the column that data.source_image_key names"
            )
        self.source.check(height, width)

    def source_image(self, height: int, width: int) -> np.ndarray:
        """The source image, read anew at every call: uint8 ``[height, width, 3]``; of several ``[S, height, ...]``.

        Raises as ``check_source``.
        """
        if self.source is None:
            self.check_source(height, width)
        assert self.source is not None  # otherwise check_source has raised
        return self.source.read(height, width)


@dataclass(frozen=True)
class FileSource:
    """The source images in a column of a row."""

    rows: FiledRows
    index: int
    key: str
    limit: int = 1
    """Most images, ``data.max_source_images``."""

    def check(self, height: int, width: int) -> None:
        """Looks at the heads of the files."""
        check_source_images(self.files(), height, width, self.rows.describe(self.index))

    def read(self, height: int, width: int) -> np.ndarray:
        """Scales the shorter side and cuts the rest: uint8 ``[height, width, 3]``, of several ``[S, ...]``."""
        return read_source_images(self.files(), height, width, "center", self.rows.describe(self.index))

    def files(self) -> list[File]:
        """Where the images are. Raises DataError when one is not there, or there are too many."""
        where = self.rows.describe(self.index)
        folder = self.rows.folder(self.index)
        return find_source_images(self.rows[self.index], self.key, folder, where, self.limit)

    def count(self) -> int:
        """Number of source images that the row names."""
        return count_source_images(self.rows[self.index], self.key)


@dataclass(frozen=True)
class GlyphSource:
    """A rendered word that is to become another one."""

    word: str
    config: GlyphConfig

    def check(self, height: int, width: int) -> None:
        """Accepts any size: the image is made in code."""

    def read(self, height: int, width: int) -> np.ndarray:
        """Renders the word: uint8 ``[height, width, 3]``."""
        return source_image(self.word, self.config, height, width)


def load_prompts(config: PromptDataConfig, split: str, limit: int | None = None) -> list[Prompt]:
    """All prompts of a split.

    Args:
        config: the data section.
        split: "train" or "eval".
        limit: only the first so many.

    Raises:
        DataError: when a file or row is missing or broken, or there are fewer than ``limit`` rows.
    """
    if config.data_type == "glyphs":
        words = training_words(config.glyphs) if split == "train" else held_out_words(config.glyphs, limit or 64)
        return [_glyph_prompt(word, config.glyphs) for word in words[:limit]]
    option = f"data.{split}_path"
    rows = open_rows(str(getattr(config, f"{split}_path")), config.prompt_key, option, split == "eval")
    if limit is not None and len(rows) < limit:
        raise DataError(f"{option}: has {len(rows)} rows, but {limit} are asked for (eval.num_prompts)")
    prompts = []
    for index in range(len(rows) if limit is None else limit):
        row = rows[index]
        where = rows.describe(index)
        prompt_columns = {config.prompt_key, config.source_image_key}
        metadata = {key: value for key, value in row.items() if key not in prompt_columns}
        text = text_field(row, config.prompt_key, where)
        has_source = row.get(config.source_image_key) is not None
        source = FileSource(rows, index, config.source_image_key, config.max_source_images) if has_source else None
        prompts.append(Prompt(text, metadata, where, source))
    return prompts


def _glyph_prompt(word: str, config: GlyphConfig) -> Prompt:
    return Prompt(caption_of(word, config), {"target": word}, f"glyph word {word!r}", GlyphSource(word, config))


def describe_shared_prompts(prompts: Sequence[Prompt], eval_prompts: Sequence[Prompt]) -> list[str]:
    """A line about evaluation prompts that are training prompts, too; none if there are none.

    Prompts with source images are not compared, since the same words may stand for edits of other images.
    """
    trained: dict[str, str] = {}
    for prompt in prompts:
        if not isinstance(prompt.source, FileSource):
            trained.setdefault(prompt.text, prompt.where)
    shared = [
        (prompt.where, trained[prompt.text])
        for prompt in eval_prompts
        if prompt.text in trained and not isinstance(prompt.source, FileSource)
    ]
    return shared_line(shared, len(eval_prompts))


def check_source_counts(prompts: Sequence[Prompt], problem_of: Callable[[int], str]) -> None:
    """Checks that all prompts have equally many source images, since several prompts are learned from together.

    Args:
        prompts: to check.
        problem_of: says what is wrong with a number of source images; empty if nothing is.

    Raises:
        DataError: names file and row.
    """
    first: dict[int, str] = {}
    for prompt in prompts:
        if isinstance(prompt.source, FileSource):
            first.setdefault(prompt.source.count(), prompt.where)
    if len(first) > 1:
        counts = ", ".join(f"{count} ({where})" for count, where in sorted(first.items()))
        raise DataError(
            f"numbers of source images differ: {counts}; in RL all prompts, those of the evaluation too, need the same "
            "number: split them into runs"
        )
    for count, where in first.items():
        if problem := problem_of(count):
            raise DataError(f"{where}: {problem}")
