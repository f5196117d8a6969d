"""Settings that other settings leave without effect: who gives one believes that it does something."""

from __future__ import annotations

from collections.abc import Sequence

from sfumato.config.base import Section

MAX_SIDE = 16_384
"""Most pixels of a picture's side."""

MAX_PIXELS = 2**28
"""Most pixels of a sample, over all of its frames."""


def refuse_needless(section: Section, path: str, names: Sequence[str], why: str) -> None:
    """Raises ValueError for the first of the fields that is not as it is by default.

    Args:
        section: that has the fields.
        path: its place in the configuration.
        names: of the fields.
        why: what leaves them without effect, and what else could be done than to remove them.
    """
    for name in names:
        if name in section.given:
            raise ValueError(f"{path}.{name} has no effect {why}")


def check_size(path: str, height: int, width: int, num_frames: int) -> None:
    """Raises ValueError for samples that no memory holds."""
    if height * width * num_frames > MAX_PIXELS:
        raise ValueError(
            f"{path}.height {height} x {path}.width {width} x {path}.num_frames {num_frames} make samples of "
            f"{height * width * num_frames:,} pixels, more than {MAX_PIXELS:,}: lower one of them"
        )
