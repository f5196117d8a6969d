"""Evaluation rows that are also training rows, in any modality."""

from __future__ import annotations

from collections.abc import Sequence

SHARED_EXAMPLES = 3
"""Evaluation rows among the training rows that a note names."""


def shared_line(shared: Sequence[tuple[str, str]], num_rows: int) -> list[str]:
    """The line about evaluation rows that are also training rows; empty where there are none.

    Args:
        shared: the place of each such row, and the place of the same row among the training rows.
        num_rows: evaluation rows.
    """
    if not shared:
        return []
    examples = "; ".join(f"{held_out} is {trained}" for held_out, trained in shared[:SHARED_EXAMPLES])
    more = f"; and {len(shared) - SHARED_EXAMPLES} more" if len(shared) > SHARED_EXAMPLES else ""
    return [
        f"data.eval_path: {len(shared)} of the {num_rows} evaluation rows are among the training rows "
        f"({examples}{more}): the evaluation does not say how the model does on what it has not seen"
    ]
