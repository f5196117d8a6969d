"""The work that a document takes, by which micro-batches are balanced."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from sfumato.data.media.vision import Vision

ATTENTION_LENGTH = 24_576
"""Tokens of a document at which attention costs as much as everything else: 12 x a hidden width of 2048."""


def default_cost(length: int) -> float:
    """Work of a document of ``length`` tokens, in units of the work of one token without attention."""
    return length + length**2 / ATTENTION_LENGTH


class MediaCost(NamedTuple):
    """Work of the encoders of a model with images or sound, in the units of ``default_cost``."""

    vision: Vision
    """Makes the tensors of the media in a batch."""
    of_images: Callable[[np.ndarray], float]
    """Work of the images of a document, from its ``MediaRefs.shapes``."""
