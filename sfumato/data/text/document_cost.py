"""Work that a document makes, by which micro-batches are made equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from sfumato.data.media.vision import Vision

ATTENTION_LENGTH = 24_576
"""Tokens of a document at which attention costs as much as everything else: 12 x a hidden width of 2048."""


def default_cost(length: int) -> float:
    """Work that a document of so many tokens makes, in units of that of a token without attention."""
    return length + length**2 / ATTENTION_LENGTH


class SightedCost(NamedTuple):
    """Work of a model that sees, in the units of the cost of documents."""

    vision: Vision
    """What makes batches."""
    of_images: Callable[[np.ndarray], float]
    """Work that images of these ``Images.shapes`` make."""
