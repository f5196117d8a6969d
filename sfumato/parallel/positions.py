"""Where documents of packed rows begin, from position ids that are kept on the host: no wait for the device."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from sfumato.algorithms.device import on_host

_whole_rows: WeakIdKeyDictionary = WeakIdKeyDictionary()
"""Position ids of whole rows by a rank's part of them."""


def remember_whole(part: Tensor, whole: Tensor) -> None:
    """Remembers the position ids ``[B, T]`` of whole rows for ``part``, this rank's part of them, while it lives."""
    _whole_rows[part] = whole


def whole_positions(part: Tensor) -> Tensor | None:
    """The position ids of whole rows that were remembered for ``part``; None where none were."""
    return _whole_rows.get(part)


def document_bounds(position_ids: Tensor, chunk: int | None = None) -> list[list[int]]:
    """For each row of position ids ``[B, T]``, the first token of each document, followed by T.

    A document begins where a position is not the one before plus 1, or with ``chunk`` a multiple of that.
    """
    position_ids = on_host(position_ids)
    starts = position_ids.diff(dim=1, prepend=position_ids[:, :1]) != 1
    if chunk is not None:
        starts |= position_ids % chunk == 0
    return [[*row.nonzero().flatten().tolist(), position_ids.shape[1]] for row in starts]


def lengths_between(bounds: list[int]) -> list[int]:
    """Lengths of the documents of a row, from its bounds as of ``document_bounds``."""
    return [stop - start for start, stop in pairwise(bounds)]
