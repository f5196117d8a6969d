"""Images of several sizes (aspect ratio buckets): which size each row has, and the rows of one size by themselves."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from sfumato.config.image_data import ImageDataConfig
from sfumato.data.image_text import ImageTextDataset, PairDataset, nearest_size
from sfumato.data.pictures import File, Picture, read_size
from sfumato.data.stored import digest_of, make_cache_folder
from sfumato.errors import DataError
from sfumato.parallel.mesh import Mesh, range_of_rank

HEADS = 16
"""Heads of image files that are read at a time."""

BLOCK = 1024
"""Files that are looked for before their heads are read."""

SHOWN = 12
"""Buckets that the log names."""

Sized = ImageTextDataset | PairDataset


@dataclass(frozen=True)
class Buckets:
    """Which rows of a dataset have which size."""

    sizes: list[tuple[int, int]]
    """Height and width in pixels of each bucket."""
    numbers: np.ndarray
    """int16 ``[N]``: the bucket of each row."""

    @property
    def digest(self) -> str:
        """Identifies which row is in which bucket."""
        content = json.dumps(self.sizes).encode() + np.ascontiguousarray(self.numbers, "<i2").tobytes()
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    def describe(self) -> str:
        """How many images have which size, the most frequent ones first."""
        counts = np.bincount(self.numbers, minlength=len(self.sizes))
        order = sorted(np.flatnonzero(counts).tolist(), key=lambda number: (-counts[number], number))
        named = ["{} x {}: {:,}".format(*self.sizes[number], counts[number]) for number in order[:SHOWN]]
        more = f", and {len(order) - SHOWN} further sizes" if len(order) > SHOWN else ""
        return f"{len(self.numbers):,} rows in {len(order)} buckets (height x width): {', '.join(named)}{more}"


class OneSize:
    """The rows of a dataset that are in one bucket, by their own numbers from 0 on."""

    def __init__(self, dataset: Sized, size: tuple[int, int], indices: np.ndarray) -> None:
        self.dataset, self.indices = dataset, indices
        self.size = (*size, 1)
        self.is_paired = dataset.is_paired

    def __len__(self) -> int:
        return len(self.indices)

    def describe(self, index: int) -> str:
        """File and row, for messages."""
        return self.dataset.describe(int(self.indices[index]))

    def caption(self, index: int) -> str:
        """As of the dataset."""
        return self.dataset.caption(int(self.indices[index]))

    def pixels(self, index: int) -> torch.Tensor:
        """As of the dataset. Raises as ``picture``."""
        return self.picture(index).pixels

    def picture(self, index: int) -> Picture:
        """As of the dataset. Raises DataError also when the image is of another bucket than before the run."""
        found = self.dataset.picture(int(self.indices[index]))
        if tuple(found.pixels.shape[-2:]) != self.size[:2]:
            raise DataError(
                f"{self.describe(index)}: the image has another size than when it was sorted into a bucket: start the "
                "run again, and where data.cache_dir has sizes of images, remove that file"
            )
        return found

    def source(self, index: int, pixels: torch.Tensor) -> np.ndarray:
        """As of the dataset."""
        return self.dataset.source(int(self.indices[index]), pixels)

    def fingerprint(self) -> str:
        """Identifies the images, for caches: a bucket whose rows stay the same keeps its cache."""
        rows = np.ascontiguousarray(self.indices, "<i8").tobytes()
        return json.dumps([self.dataset.fingerprint(), self.size, hashlib.blake2b(rows, digest_size=16).hexdigest()])


def sort_into_buckets(
    dataset: Sized, config: ImageDataConfig, mesh: Mesh, say: Callable[[str], None]
) -> Buckets | None:
    """Which bucket each row is in, by the head of its image; of a pair by ``chosen_key``'s. Every rank must call it.

    Ranks share the heads out. With ``data.cache_dir`` what was found is kept there, by the fingerprint of the data.
    A row whose image is broken is in the bucket nearest to height x width, and is named when it is read.

    Args:
        dataset: its rows.
        config: the data section.
        mesh: the ranks.
        say: is told how many rows there are in which bucket.

    Returns:
        None without ``data.buckets``.
    """
    if config.buckets is None:
        return None
    kept = None
    if config.cache_dir is not None:
        kept = Path(config.cache_dir) / f"sizes_{digest_of([dataset.fingerprint()])}.npy"
    found = mesh.first(_load(kept, len(dataset)) if mesh.is_first else None, "world")
    if found is None:
        own = range_of_rank(len(dataset), mesh.rank, mesh.size)
        found = np.concatenate(mesh.gather(read_sizes(dataset, own), "world"))
        if kept is not None and mesh.is_first:
            _keep(kept, found)
    distinct, place = np.unique(found, axis=0, return_inverse=True)
    given = [size if size[0] else (config.height, config.width) for size in distinct.tolist()]
    numbers = np.array([nearest_size(*size, config.sizes) for size in given], np.int16)
    buckets = Buckets(config.sizes, numbers[place.reshape(-1)])
    say(buckets.describe())
    return buckets


def read_sizes(dataset: Sized, indices: Sequence[int]) -> np.ndarray:
    """Height and width of the images of some rows, by the heads of their files: int32 ``[n, 2]``, 0 of broken ones."""

    def read(place: tuple[File, str] | None) -> tuple[int, int]:
        try:
            return (0, 0) if place is None else read_size(*place)
        except DataError:
            return 0, 0

    def find(index: int) -> tuple[File, str] | None:
        try:
            return dataset.file(index), dataset.describe(index)
        except DataError:
            return None

    found: list[tuple[int, int]] = []
    with ThreadPoolExecutor(HEADS) as pool:
        for start in range(0, len(indices), BLOCK):  # rows are found here, since a table need not know threads
            found += pool.map(read, [find(index) for index in indices[start : start + BLOCK]])
    return np.array(found, np.int32).reshape(-1, 2)


def _load(kept: Path | None, count: int) -> np.ndarray | None:
    """Sizes that were found before."""
    if kept is None or not kept.is_file():
        return None
    try:
        found = np.load(kept, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        return None  # what is damaged is read again
    return found if found.shape == (count, 2) and found.dtype == np.int32 else None


def _keep(kept: Path, sizes: np.ndarray) -> None:
    """Writes sizes whole or not at all. Raises DataError when there is no room."""
    make_cache_folder(kept.parent)
    part = kept.with_suffix(f".tmp{os.getpid()}")
    try:
        with part.open("wb") as file:
            np.save(file, sizes)
        part.replace(kept)
    except OSError as error:
        part.unlink(missing_ok=True)
        raise DataError(f"data.cache_dir: {kept} cannot be written: {error.strerror}") from error
