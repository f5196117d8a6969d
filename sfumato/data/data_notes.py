"""What is said of text data before a run: files and keys that nothing reads, evaluation rows that are trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from typing import Any

from sfumato.config.text_data import TextDataConfig
from sfumato.data.folders import describe_left_out, shared_line
from sfumato.data.messages import unread_keys
from sfumato.data.rows import RowTable
from sfumato.data.sources import Sources
from sfumato.data.text import TextTransform
from sfumato.errors import DataError

LOOKED_AT = 64
"""Rows of a source whose keys are looked at."""
COMPARED = 50_000
"""Training rows that evaluation rows are compared with."""
OTHER_COLUMNS = ("tools", "system", "chosen", "rejected", "image", "images", "video", "videos", "audio", "audios")
"""Columns that formats of conversations read besides their keys."""


def describe_text_data(
    data: TextDataConfig, sources: Sources, held_out: Sources | None, transform: TextTransform, num_eval_rows: int
) -> list[str]:
    """Lines about what is left out in silence otherwise, of data that is not made in code.

    Args:
        data: the data section.
        sources, held_out: of training and validation.
        transform: what reads their rows.
        num_eval_rows: most rows of the validation that are used.
    """
    if data.synthetic is not None:
        return []
    lines = describe_left_out(data.train_path, "data.train_path")
    lines += describe_left_out(data.eval_path, "data.eval_path", held_out=True)
    keys = getattr(transform, "keys", None)
    if keys is None or sources.files is not None:
        return lines
    columns = {*keys, *OTHER_COLUMNS, getattr(transform, "margin_key", "")}
    template = getattr(transform, "template", None)
    for name, table in zip(sources.names, sources.rows, strict=True):
        rows = list(islice(_readable_rows(table), LOOKED_AT))
        if names := unread_keys(rows, columns, None if template is None else template.text + template.tool_text):
            lines.append(f"{name}: not read: {', '.join(names)}")
    if held_out is not None:
        lines += _shared_rows(sources, held_out, sorted(columns), num_eval_rows)
    return lines


def _shared_rows(sources: Sources, held_out: Sources, columns: list[str], num_eval_rows: int) -> list[str]:
    """Evaluation rows that hold in the columns that are read what one of the first training rows holds."""
    places: dict[bytes, str] = {}
    num_rows = 0
    for table in held_out.rows:
        for index in range(min(len(table), num_eval_rows - num_rows)):
            num_rows += 1
            try:
                places.setdefault(_digest(table[index], columns), table.describe(index))
            except DataError:
                continue  # a broken row is named where it is used
    trained: set[bytes] = set()
    for table in sources.rows:
        for row in islice(_readable_rows(table), COMPARED):
            trained.add(_digest(row, columns))
    return shared_line([where for digest, where in places.items() if digest in trained], num_rows)


def _digest(row: dict[str, Any], columns: list[str]) -> bytes:
    content = {column: row[column] for column in columns if row.get(column) is not None}
    return hashlib.blake2b(json.dumps(content, sort_keys=True, default=repr).encode(), digest_size=16).digest()


def _readable_rows(table: RowTable) -> Iterator[dict[str, Any]]:
    """Rows in order. Broken ones are left out here: they are named where they are read for training."""
    for index in range(len(table)):
        try:
            row = table[index]
        except DataError:
            continue
        yield row
