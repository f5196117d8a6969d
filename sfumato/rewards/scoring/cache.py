"""Values by the content of what was scored, so that equal samples are scored once."""

from __future__ import annotations

import hashlib
import pickle
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np

from sfumato.rewards.base import Sample


class ScoreCache:
    """Values of one reward, the least recently used of which are forgotten. Threads may share it.

    Args:
        max_entries: samples, or groups, that are remembered.
    """

    def __init__(self, max_entries: int) -> None:
        self._max_entries = max_entries
        self._values: OrderedDict[bytes, np.ndarray] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: bytes) -> np.ndarray | None:
        """float64 [n] of the n samples with that digest; None where it is not known."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key]

    def put(self, key: bytes, values: np.ndarray) -> None:
        """Remembers values, float64 [n]."""
        with self._lock:
            self._values[key] = values
            self._values.move_to_end(key)
            while len(self._values) > self._max_entries:
                self._values.popitem(last=False)


def digest(samples: Sequence[Sample]) -> bytes:
    """128 bits of all that a reward sees of samples, in their order; their group's number does not count."""
    content = hashlib.blake2b(digest_size=16)
    for sample in samples:
        for part in (sample.image, sample.source, sample.prompt, sample.text, sample.metadata):
            for piece in _pieces(part):
                content.update(len(piece).to_bytes(8, "little"))
                content.update(piece)
    return content.digest()


def _pieces(part: Any) -> list[Any]:
    if isinstance(part, np.ndarray):
        return [repr(part.shape).encode(), np.ascontiguousarray(part).data.cast("B")]
    return [pickle.dumps(part, protocol=5)]  # equal bytes are equal values, whatever types metadata has
