"""Where documents of packed rows begin, as the host knows it: attention need not ask the device for it."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from sfumato.algorithms.device import on_host

_whole_rows: WeakIdKeyDictionary = WeakIdKeyDictionary()


def remember_whole(part: Tensor, whole: Tensor) -> None:
    """Keeps the position ids ``[B, T]`` of whole rows, of which ``part`` is a rank's part."""
    _whole_rows[part] = whole


def whole_positions(part: Tensor) -> Tensor | None:
    """Those of whole rows, where they are known."""
    return _whole_rows.get(part)


def document_bounds(position_ids: Tensor, chunk: int | None = None) -> list[list[int]]:
    """Of each row of position ids ``[B, T]`` the first token of each document, and at the end T.

    A document begins where a position is not the one before plus 1, or with ``chunk`` a multiple of that.
    """
    position_ids = on_host(position_ids)
    starts = position_ids.diff(dim=1, prepend=position_ids[:, :1]) != 1
    if chunk is not None:
        starts |= position_ids % chunk == 0
    return [[*row.nonzero().flatten().tolist(), position_ids.shape[1]] for row in starts]


def lengths_between(bounds: list[int]) -> list[int]:
    """Lengths of the documents of a row."""
    return [stop - start for start, stop in pairwise(bounds)]
