"""A reward for runs that are compared: pixels that round otherwise do not move it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sfumato.rewards.base import Sample
from sfumato.rewards.pixels import Brightness


@dataclass(frozen=True, kw_only=True)
class CoarseBrightness(Brightness):
    """Mean brightness in thousandths.

    Sums in another order change weights in their last bits, and sometimes a pixel by one of 255 levels. That is 5e-6 of
    the brightness of a picture of 16 x 16, but 1e-3 of the advantages within a group.
    """

    def score(self, samples: Sequence[Sample]) -> list[float]:
        return [round(value, 3) for value in super().score(samples)]
