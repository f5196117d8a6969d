"""Aspect ratio buckets: which size each row of a dataset of images is brought to, and the rows of one size alone."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
import torch

from sfumato.config.image_data import ImageDataConfig
from sfumato.config.writing import replace_file
from sfumato.data.files.file_digests import signature_of
from sfumato.data.files.stored import BROKEN_ARRAY, digest_of, make_cache_folder
from sfumato.data.images.image_text import ImageTextDataset, PairDataset, nearest_size
from sfumato.data.media.kinds import VERSION, File
from sfumato.data.media.pictures import Picture, read_size
from sfumato.data.synthetic.glyphs import GlyphDataset
from sfumato.errors import DataError
from sfumato.parallel.mesh import Mesh, range_of_rank

HEADS = 16
"""Threads that read heads of image files."""

BLOCK = 1024
"""Rows whose files are looked up before the threads read their heads."""

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
    source_counts: list[int] | None = None
    """Number of source images of the rows of each bucket; None where no row has more than one."""

    @property
    def digest(self) -> str:
        """Identifies which row is in which bucket."""
        kinds = self.sizes if self.source_counts is None else [self.sizes, self.source_counts]
        content = json.dumps(kinds).encode() + np.ascontiguousarray(self.numbers, "<i2").tobytes()
        return hashlib.blake2b(content, digest_size=16).hexdigest()

    def describe(self) -> str:
        """How many images have which size, the most frequent ones first."""
        counts = np.bincount(self.numbers, minlength=len(self.sizes))
        order = sorted(np.flatnonzero(counts).tolist(), key=lambda number: (-counts[number], number))
        named = [f"{self._describe_bucket(number)}: {counts[number]:,}" for number in order[:SHOWN]]
        more = f", and {len(order) - SHOWN} further sizes" if len(order) > SHOWN else ""
        return f"{len(self.numbers):,} rows in {len(order)} buckets (height x width): {', '.join(named)}{more}"

    def _describe_bucket(self, number: int) -> str:
        height, width = self.sizes[number]
        if self.source_counts is None:
            return f"{height} x {width}"
        return f"{height} x {width} from {self.source_counts[number]} source image(s)"


class OneSize:
    """The rows of a dataset that are in one bucket. Indices of its methods are those within the bucket, from 0 on."""

    def __init__(self, dataset: Sized, size: tuple[int, int], indices: np.ndarray, num_sources: int = 1) -> None:
        """
        Args:
            dataset: all rows.
            size: height and width in pixels.
            indices: the rows of the bucket, int64 ``[n]``.
            num_sources: source images of each of them.
        """
        self.dataset = dataset
        self.indices = indices
        self.size = (*size, dataset.size[2])
        self.num_sources = num_sources
        self.is_paired = dataset.is_paired

    def __len__(self) -> int:
        return len(self.indices)

    def describe(self, index: int) -> str:
        """File and row, for messages."""
        return self.dataset.describe(int(self.indices[index]))

    def caption(self, index: int) -> str:
        """As ``ImageTextDataset.caption``."""
        return self.dataset.caption(int(self.indices[index]))

    def files(self, index: int, with_source: bool = False) -> list[File]:
        """As ``ImageTextDataset.files``."""
        return self.dataset.files(int(self.indices[index]), with_source)

    def count_sources(self, index: int) -> int:
        """As ``ImageTextDataset.count_sources``."""
        return self.dataset.count_sources(int(self.indices[index]))

    def tables(self) -> list[Path]:
        """As ``ImageTextDataset.tables``."""
        return self.dataset.tables()

    def paths(self, index: int) -> list[str]:
        """As ``ImageTextDataset.paths``."""
        return self.dataset.paths(int(self.indices[index]))

    @property
    def settings(self) -> list[object]:
        """As ``ImageTextDataset.settings``."""
        return self.dataset.settings

    def pixels(self, index: int) -> torch.Tensor:
        """As ``ImageTextDataset.pixels``. Raises as ``picture``."""
        return self.picture(index).pixels

    def picture(self, index: int) -> Picture:
        """As ``ImageTextDataset.picture``. Raises DataError also when the image now belongs to another bucket."""
        picture = self.dataset.picture(int(self.indices[index]))
        if tuple(picture.pixels.shape[-2:]) != self.size[:2]:
            raise DataError(
                f"{self.describe(index)}: the image has another size than when it was sorted into a bucket: start the "
                "run again"
            )
        return picture

    def source(self, index: int, pixels: torch.Tensor) -> np.ndarray:
        """As ``ImageTextDataset.source``. Raises DataError also when the row now has more or fewer source images."""
        if self.count_sources(index) not in (0, self.num_sources):
            raise DataError(
                f"{self.describe(index)}: the row has another number of source images than when it was sorted into a "
                "bucket: start the run again"
            )
        return self.dataset.source(int(self.indices[index]), pixels)

    def fingerprint(self) -> str:
        """Identifies the rows of the bucket."""
        rows = np.ascontiguousarray(self.indices, "<i8").tobytes()
        several = [self.num_sources] if self.num_sources > 1 else []
        digest = hashlib.blake2b(rows, digest_size=16).hexdigest()
        return json.dumps([self.dataset.fingerprint(), self.size, digest, *several])


def sort_into_buckets(
    dataset: Sized | GlyphDataset, config: ImageDataConfig, mesh: Mesh, say: Callable[[str], None]
) -> Buckets | None:
    """Assigns each row to a bucket, by the size in the head of its image; of a pair, the image of ``chosen_key``.

    Where rows may have several source images, those of a bucket have equally many, too.

    Every rank must call it; each reads a part of the heads. With ``data.cache_dir`` the sizes are saved there, by the
    fingerprint of the data. A row whose image is broken goes to the bucket nearest to height x width, and is reported
    when it is read.

    Args:
        dataset: of images or pairs.
        config: the data section.
        mesh: the ranks.
        say: is told how many rows are in which bucket.

    Returns:
        None where neither ``data.buckets`` nor several source images tell rows apart.
    """
    buckets = None if config.buckets is None else _sort_by_size(dataset, config, mesh)
    if config.max_source_images > 1:
        buckets = _split_by_sources(dataset, config, buckets)
    if buckets is not None:
        say(buckets.describe())
    return buckets


def _split_by_sources(dataset: Sized | GlyphDataset, config: ImageDataConfig, buckets: Buckets | None) -> Buckets:
    """Splits buckets, or rows of one size, by the number of their source images.

    A row that cannot be read, or that has too many or no source images, goes to those with one, and is reported when
    it is read.
    """
    assert not isinstance(dataset, GlyphDataset)  # the data section checks it

    def count(index: int) -> int:
        try:
            number = dataset.count_sources(index)
        except DataError:
            return 1
        if number == 0 and config.num_frames > 1:
            return config.max_source_images  # frames of its own
        return number if 1 <= number <= config.max_source_images else 1

    if buckets is None:
        buckets = Buckets([(config.height, config.width)], np.zeros(len(dataset), np.int16))
    counts = np.array([count(index) for index in range(len(dataset))], np.int16)
    kinds, numbers = np.unique(np.stack([buckets.numbers, counts]), axis=1, return_inverse=True)
    sizes = [buckets.sizes[number] for number in kinds[0].tolist()]
    return Buckets(sizes, numbers.reshape(-1).astype(np.int16), kinds[1].tolist())


def _sort_by_size(dataset: Sized | GlyphDataset, config: ImageDataConfig, mesh: Mesh) -> Buckets:
    """The buckets of the sizes of images, as ``sort_into_buckets`` says."""
    assert not isinstance(dataset, GlyphDataset)  # the data section checks that buckets are of image files
    cache_path = None
    if config.cache_dir is not None:
        cache_path = Path(config.cache_dir) / f"sizes_{digest_of([VERSION, dataset.fingerprint()])}.npz"
    sizes = mesh.first(_load_sizes(cache_path, len(dataset)) if mesh.is_first else None, "world")
    if sizes is None:
        started = time.time_ns()
        indices = range_of_rank(len(dataset), mesh.rank, mesh.size)
        parts = mesh.gather(read_sizes(dataset, indices), "world")
        sizes = np.concatenate([part_sizes for part_sizes, _ in parts])
        if cache_path is not None and mesh.is_first:
            paths = [path for _, listed in parts for path in listed]
            _save_sizes(cache_path, sizes, paths, *signature_of(paths, started))
    distinct, row_of_distinct = np.unique(sizes, axis=0, return_inverse=True)
    known_sizes = cast(
        "list[tuple[int, int]]", [size if size[0] else (config.height, config.width) for size in distinct.tolist()]
    )
    numbers = np.array([nearest_size(*size, config.sizes) for size in known_sizes], np.int16)
    return Buckets(config.sizes, numbers[row_of_distinct.reshape(-1)])


def read_sizes(dataset: Sized, indices: Sequence[int]) -> tuple[np.ndarray, list[str]]:
    """Reads the sizes of the images of some rows from the heads of their files.

    Args:
        dataset: of images or pairs.
        indices: of its rows.

    Returns:
        Height and width, int32 ``[n, 2]``, 0 where an image is broken; and the paths of the files, of those too that
        were missing, since the sizes are valid only while these stay as they are.
    """

    def read(place: tuple[File, str] | None) -> tuple[int, int]:
        try:
            return (0, 0) if place is None else read_size(*place)
        except DataError:
            return 0, 0

    def find(index: int) -> tuple[File, str] | None:
        try:
            file = dataset.file(index)
        except DataError:
            paths.extend(dataset.paths(index))
            return None
        paths.extend([str(file)] if isinstance(file, Path) else [])
        return file, dataset.describe(index)

    paths: list[str] = []
    sizes: list[tuple[int, int]] = []
    with ThreadPoolExecutor(HEADS) as pool:
        for start in range(0, len(indices), BLOCK):  # rows are read in this thread: tables need not be thread-safe
            sizes += pool.map(read, [find(index) for index in indices[start : start + BLOCK]])
    return np.array(sizes, np.int32).reshape(-1, 2), paths


def _load_sizes(cache_path: Path | None, count: int) -> np.ndarray | None:
    """The saved sizes, int32 ``[count, 2]``; None where there are none, they are damaged, or a file has changed."""
    if cache_path is None or not cache_path.is_file():
        return None
    try:
        with np.load(cache_path, allow_pickle=False) as content:
            sizes = content["sizes"]
            manifest = content["said"].tobytes().decode("utf-8", "surrogateescape")
        signature, paths = json.loads(manifest)
    except (*BROKEN_ARRAY, TypeError, RecursionError):
        return None  # a damaged cache counts as missing: the heads are read again
    stayed = sizes.shape == (count, 2) and sizes.dtype == np.int32 and signature == signature_of(paths)[0]
    return sizes if stayed else None


def _save_sizes(cache_path: Path, sizes: np.ndarray, paths: list[str], signature: str, is_settled: bool) -> None:
    """Saves sizes atomically.

    Args:
        cache_path: the file.
        sizes: int32 ``[N, 2]``.
        paths: the files that the sizes were read from.
        signature: of these files.
        is_settled: whether the signature can be trusted; otherwise none is saved, which no files will match.

    Raises:
        DataError: when the file cannot be written.
    """
    manifest = json.dumps([signature if is_settled else "", paths]).encode("utf-8", "surrogateescape")
    make_cache_folder(cache_path.parent)
    try:
        with replace_file(cache_path) as file:
            np.savez(file, sizes=sizes, said=np.frombuffer(manifest, np.uint8))
    except OSError as error:
        raise DataError(f"data.cache_dir: {cache_path} cannot be written: {error.strerror}") from error
