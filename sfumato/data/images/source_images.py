"""The source images of a row, which its image or video is made from: one, or a list of several."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sfumato.data.files.file_columns import find_file
from sfumato.data.media.kinds import File
from sfumato.data.media.pictures import check_fit, check_image, fit_image, read_image, read_size
from sfumato.errors import DataError


def count_source_images(row: dict[str, object], key: str) -> int:
    """Number of source images in a column of a row; an empty list counts as none."""
    value = row.get(key)
    if isinstance(value, list):
        return len(value)
    return 0 if value is None else 1


def find_source_images(row: dict[str, object], key: str, root: Path, where: str, limit: int) -> list[File]:
    """The files of a row's source images, or their contents.

    Args:
        row: its column is an image as of ``find_file``, or a list of them.
        key: name of the column.
        root: folder that paths are relative to.
        where: file and row, for messages.
        limit: most images, ``data.max_source_images``.

    Raises:
        DataError: when an image is missing, or there are too many.
    """
    value = row.get(key)
    if not isinstance(value, list):
        return [find_file(row, key, root, where)]
    if not value:
        raise DataError(f"{where}: column {key!r} is an empty list: give at least one source image")
    if len(value) > limit:
        raise DataError(
            f"{where}: column {key!r} holds {len(value)} source images: at most {limit} are read "
            "(data.max_source_images)"
        )
    return [
        find_file({**row, key: image}, key, root, f"{where}, source image {number}")
        for number, image in enumerate(value, start=1)
    ]


def read_source_images(files: Sequence[File], height: int, width: int, crop: str, where: str) -> np.ndarray:
    """Reads source images and brings all of them to one size.

    Args:
        files: S images.
        height, width: of the result, in pixels.
        crop: ``data.crop``.
        where: file and row, for messages.

    Returns:
        uint8 ``[height, width, 3]`` of one image, ``[S, height, width, 3]`` of several.

    Raises:
        DataError: when one is broken or does not fit.
    """
    pictures = []
    for file in files:
        image = read_image(file, where)
        check_fit((image.height, image.width), height, width, crop, where)
        pictures.append(fit_image(image, height, width, crop))
    return pictures[0] if len(pictures) == 1 else np.stack(pictures)


def check_source_images(files: Sequence[File], height: int, width: int, where: str) -> None:
    """Looks at the heads of source images that are cropped. Raises as ``read_source_images``."""
    for file in files:
        check_image(file, where)
        check_fit(read_size(file, where), height, width, "center", where)


def group_by_sources(sources: Sequence[np.ndarray] | None, count: int) -> list[list[int]]:
    """Positions of ``count`` prompts, those together whose source images are equally many."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for position in range(count):
        groups.setdefault(() if sources is None else sources[position].shape, []).append(position)
    return [*groups.values()]


def side_by_side(source: np.ndarray | None) -> np.ndarray | None:
    """Source images as one picture, uint8 ``[H, W, 3]``: several, ``[S, H, W, 3]``, from left to right."""
    return source if source is None or source.ndim == 3 else np.concatenate([*source], axis=1)
