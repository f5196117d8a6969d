"""How many rows of data may be left out: a number, or a share."""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import BeforeValidator


def read_row_limit(value: object) -> int | float:
    """A number of rows, or a share of them as a float between 0 and 1; ``1%`` is 0.01.

    Raises:
        ValueError: for anything else.
    """
    limit = value
    if isinstance(value, str):
        text = value.strip()
        try:
            limit = float(text[:-1]) / 100 if text.endswith("%") else float(text) if "." in text else int(text)
        except ValueError:
            limit = None
    if (
        not isinstance(limit, int | float)
        or isinstance(limit, bool)
        or not math.isfinite(limit)
        or limit < 0
        or (isinstance(limit, float) and limit >= 1)
    ):
        raise ValueError("must be a whole number of rows, 0 or more, or a share below 1 such as 0.01 or 1%")
    return limit if limit else 0


RowLimit = Annotated[int | float, BeforeValidator(read_row_limit)]
"""The type of a field that says how many rows may be left out."""
