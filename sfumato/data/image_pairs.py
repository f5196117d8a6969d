"""Pairs of a better and a worse image or video for one prompt, read at random and checked row by row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from sfumato.config.image_data import ImageDataConfig, ImageTextDataConfig, PairDataConfig
from sfumato.data.glyphs import GlyphPairs
from sfumato.data.image_text import ImageTextDataset
from sfumato.data.rows import open_rows
from sfumato.errors import DataError


class PairDataset:
    """Pairs from a file or folder, resized to one size; ties are left out."""

    is_paired: ClassVar[bool] = True

    def __init__(self, config: PairDataConfig, option: str, limit: int | None = None) -> None:
        """Opens the source.

        Args:
            config: the data section.
            option: which of its fields holds the path: train_path or eval_path.
            limit: most pairs that are used, from the beginning; None uses all.

        Raises:
            DataError: when it is missing, empty, or holds nothing but ties.
        """
        self.config = config
        self.size = (config.height, config.width, config.num_frames)
        path = Path(getattr(config, option))
        listed = path / "metadata.jsonl"
        rows = open_rows(listed if listed.is_file() else path, config.text_key, f"data.{option}")
        shared = {name: getattr(config, name) for name in ImageDataConfig.model_fields}
        shared |= {"data_type": "image_text", "train_path": str(path)}
        keys = (config.chosen_key, config.rejected_key)
        self.sides = [ImageTextDataset(ImageTextDataConfig(**shared, image_key=key), rows) for key in keys]
        self.labels = [1] * len(rows) if config.label_key is None else rows.column(config.label_key)
        self.indices = [index for index, label in enumerate(self.labels) if not _is_tie(label)][:limit]
        """Rows that are no ties; a broken one is named when it is read."""
        self.num_ties = sum(map(_is_tie, self.labels))
        if not self.indices:
            raise DataError(f"data.{option}: {path} holds nothing but ties in column {config.label_key!r}")

    def __len__(self) -> int:
        return len(self.indices)

    def describe(self, index: int) -> str:
        """File and row, for messages."""
        return self.sides[0].describe(self.indices[index])

    def caption(self, index: int) -> str:
        """Prompt of a pair. Raises DataError that names the row."""
        return self.sides[0].caption(self.indices[index])

    def pixels(self, index: int) -> torch.Tensor:
        """Both images, the better one first: uint8 ``[2, 3, height, width]``; videos ``[2, 3, frames, height, width]``.

        Raises DataError that names the row.
        """
        row = self.indices[index]
        label, where = self.labels[row], self.describe(index)
        if isinstance(label, DataError):
            raise label
        if label not in (0, 1):
            raise DataError(f"{where}: column {self.config.label_key!r} must be a number, not {label!r}")
        images = [side.pixels(row) for side in (self.sides if label else self.sides[::-1])]
        if torch.equal(*images):
            raise DataError(f"{where}: both images are the same")
        return torch.stack(images)

    def source(self, index: int, pixels: torch.Tensor) -> np.ndarray:
        """The image that both are made from, as ``ImageTextDataset`` has it; of videos the better one's first frame."""
        return self.sides[0].source(self.indices[index], pixels[0])

    def has_source(self, index: int) -> bool:
        """Whether the row has a source image of its own."""
        return self.sides[0].has_source(self.indices[index])

    def example_captions(self, count: int) -> list[str]:
        """As of ``ImageTextDataset``."""
        return self.sides[0].example_captions(count)

    def example_edits(self, count: int) -> list[tuple[str, np.ndarray]]:
        """As of ``ImageTextDataset``."""
        return self.sides[0].example_edits(count)

    def fingerprint(self) -> str:
        """Identifies the pairs, for caches, as ``ImageTextDataset`` does."""
        return json.dumps(["pairs", *(side.fingerprint() for side in self.sides), self.config.label_key, len(self)])


def open_image_pairs(config: PairDataConfig, seed: int, say: Callable[[str], None]) -> PairDataset | GlyphPairs:
    """The pairs to train on.

    Args:
        config: the data section.
        seed: of words that are rendered.
        say: is told how many ties there are.

    Raises:
        DataError: when the source is missing, empty, or holds nothing but ties.
    """
    if config.data_type == "glyphs":
        return GlyphPairs(config.glyphs, config.height, config.width, seed, config.num_frames)
    dataset = PairDataset(config, "train_path")
    if dataset.num_ties:
        say(f"{dataset.num_ties} of {len(dataset.labels)} rows of {config.train_path} are ties and are left out")
    return dataset


def open_held_out_pairs(config: PairDataConfig, seed: int, num_rows: int) -> PairDataset | GlyphPairs | None:
    """The first ``num_rows`` pairs to evaluate on; None when there are none. Raises as ``open_image_pairs``."""
    if config.data_type == "glyphs":
        glyphs = config.glyphs.model_copy(update={"num_images": num_rows})
        return GlyphPairs(glyphs, config.height, config.width, seed, config.num_frames, held_out=True)
    return None if config.eval_path is None else PairDataset(config, "eval_path", limit=num_rows)


def _is_tie(label: Any) -> bool:
    return label is None or (isinstance(label, float | int) and label not in (0, 1))
