"""Pairs of the evaluation that are trained on, too."""

from __future__ import annotations

import contextlib
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, cast

from sfumato.data.images.image_text import PairDataset
from sfumato.data.shared_rows import shared_line
from sfumato.errors import DataError

if TYPE_CHECKING:
    from sfumato.data.files.row_table import FileTable


def describe_shared_pairs(dataset: object, held_out: object) -> list[str]:
    """A line about pairs of the evaluation that are trained on, too; none if there are none.

    Pairs are the same where caption and images are, whichever image is in which column. Files are compared by their
    paths, and images within a table by their content; only pairs whose caption occurs in both are read.

    Args:
        dataset, held_out: what ``open_image_pairs`` and ``open_held_out_pairs`` return. Glyphs are never shared.
    """
    if not isinstance(dataset, PairDataset) or not isinstance(held_out, PairDataset):
        return []
    held_out_captions = _index_captions(held_out)
    rows_by_pair: dict[tuple[object, frozenset[bytes]], list[int]] = {}
    trained: dict[tuple[object, frozenset[bytes]], int] = {}
    for caption, rows in _index_captions(dataset).items():
        for index in held_out_captions.get(caption, []):
            with contextlib.suppress(DataError):  # a broken row is named where it is used
                rows_by_pair.setdefault((caption, _digest_pair(held_out, index)), []).append(index)
        for index in rows if caption in held_out_captions else []:
            with contextlib.suppress(DataError):
                trained.setdefault((caption, _digest_pair(dataset, index)), index)
    shared = [
        (held_out.describe(index), dataset.describe(trained[pair]))
        for pair, rows in rows_by_pair.items()
        if pair in trained
        for index in rows
    ]
    return shared_line(shared, len(held_out))


def _index_captions(dataset: PairDataset) -> dict[object, list[int]]:
    """The pairs that have a caption, by caption; those of broken rows are left out."""
    rows = cast("FileTable", dataset.sides[0].rows)  # of a file, or several
    captions = rows.column(dataset.config.text_key)
    indices: dict[object, list[int]] = {}
    for index, row in enumerate(dataset.indices):
        if isinstance(captions[row], str):
            indices.setdefault(captions[row], []).append(index)
    return indices


def _digest_pair(dataset: PairDataset, index: int) -> frozenset[bytes]:
    """Digests of the files of a pair, without an order. Raises DataError when one is missing."""
    files = [file for side in dataset.sides for file in side.files(dataset.indices[index])]
    contents = [file if isinstance(file, bytes) else str(Path(file).resolve()).encode() for file in files]
    return frozenset(hashlib.blake2b(content, digest_size=16).digest() for content in contents)
