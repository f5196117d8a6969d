"""scikit-learn's handwritten digits: 1,797 scans of 8 x 8 pixels, a share of them held out. Nothing is downloaded."""

from __future__ import annotations

import hashlib
from functools import cache
from typing import Any, cast

import numpy as np
from PIL import Image

from sfumato.data.media.pictures import as_png
from sfumato.errors import DataError, MissingDependencyError

EDGE = 32
"""Width and height of a scan when it is shown."""


@cache
def scans_of(held_out: float, is_held_out: bool) -> np.ndarray:
    """Indices of the held-out scans, or of the scans for training: int64 ``[n]``.

    Args:
        held_out: share of all scans that training never shows; whether a scan is held out depends on its index alone.
        is_held_out: whether to return the held-out scans.

    Raises:
        DataError: when no scan is left.
        MissingDependencyError: without scikit-learn.
    """
    digests = (hashlib.blake2b(f"digits/{scan}".encode(), digest_size=8) for scan in range(len(_load()[1])))
    fractions = np.array([int.from_bytes(digest.digest(), "big") / 2**64 for digest in digests])
    scans = np.flatnonzero((fractions < held_out) == is_held_out)
    if not len(scans):
        raise DataError(f"data.synthetic.held_out {held_out} leaves no handwritten digits: bring it closer to 0.5")
    return scans


def label_scan(scan: int) -> str:
    """The digit that a scan shows, ``0`` to ``9``. Raises MissingDependencyError without scikit-learn."""
    return str(_load()[1][scan])


def draw_digits(scans: list[int]) -> bytes:
    """A PNG file of scans side by side, black on white, each ``EDGE`` pixels wide and high."""
    grey = np.concatenate([_load()[0][scan] for scan in scans], axis=1)  # 0 to 16
    image = Image.fromarray((255 - grey * 255 / 16).round().astype(np.uint8))
    return as_png(image.resize((EDGE * len(scans), EDGE), Image.Resampling.BILINEAR).convert("RGB"))


@cache
def _load() -> tuple[np.ndarray, np.ndarray]:
    """The scans, float64 ``[1797, 8, 8]`` from 0 (white) to 16, and their digits, int64 ``[1797]``."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise MissingDependencyError(
            f"data.synthetic.problem digits shows scans that lie in scikit-learn, which is not installed ({error}): "
            "pip install 'sfumato[digits]'"
        ) from error
    dataset = cast("Any", load_digits())  # annotated as a tuple, too
    return dataset.images, dataset.target
