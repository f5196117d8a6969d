"""Warnings about text data before a run: files and keys that nothing reads, evaluation rows that are trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from sfumato.config.text_data import TextDataConfig
from sfumato.data.files.folders import describe_left_out
from sfumato.data.files.row_blocks import FilePlace, RowBlocks, RowFile
from sfumato.data.files.row_table import RowTable
from sfumato.data.files.rows import readable_rows
from sfumato.data.files.sources import Sources
from sfumato.data.shared_rows import shared_line
from sfumato.data.text.format import TextTransform, has_media
from sfumato.data.text.messages import ROW_OPTIONS, unread_keys
from sfumato.data.text.row_layouts import (
    CHANGED_COLUMNS,
    CONVERSATION_KEYS,
    CONVERSATIONS,
    LABELLED,
    PAIRS,
    PREFERENCE_KEYS,
    UNPAIRED_KEYS,
    ColumnLayout,
    describe_layouts,
)
from sfumato.errors import DataError

if TYPE_CHECKING:
    from sfumato.data.text.chat import ChatTemplate

LOOKED_AT = 64
"""Rows of a source whose keys are compared with those that are read."""
COMPARED = 50_000
"""Training rows of a streamed source that evaluation rows are compared with; of other sources all rows are. Of streams
with media none is, since their files are large."""
OTHER_COLUMNS = (
    "tools",
    "functions",
    "system",
    "chosen",
    "rejected",
    "image",
    "images",
    "video",
    "videos",
    "audio",
    "audios",
)
"""Columns that formats of conversations read besides their keys."""


def describe_text_data(
    data: TextDataConfig, sources: Sources, held_out: Sources | None, transform: TextTransform, num_eval_rows: int
) -> list[str]:
    """Lines about parts of the data that would be ignored silently; none for data that is made in code.

    Args:
        data: the data section.
        sources, held_out: the sources of training and of validation.
        transform: makes samples of their rows.
        num_eval_rows: most rows of the validation set that are used.
    """
    if data.synthetic is not None:
        return []
    lines = describe_left_out(data.train_path, "data.train_path")
    lines += describe_left_out(data.eval_path, "data.eval_path", held_out=True)
    keys = getattr(transform, "keys", None)
    if keys is None:
        return lines
    layouts = layouts_of(transform)
    template = getattr(transform, "template", None)
    columns = {*keys, *OTHER_COLUMNS, getattr(transform, "margin_key", "")}
    if getattr(transform, "has_row_options", False):
        columns.add(ROW_OPTIONS)
    if layouts:
        columns |= {*CHANGED_COLUMNS, *(column for layout in layouts for column in layout.columns)}
    for name, rows_with_places in zip(sources.names, _rows_of(sources, LOOKED_AT), strict=True):
        places = [*rows_with_places]
        rows = [row for _, row in places]
        lines += _describe_layout(name, layouts, rows)
        if not layouts and transform.documents_per_sample == 1 and not getattr(transform, "has_numbers", False):
            lines += _describe_other_texts(name, keys, rows)
        lines += _describe_markers(name, places, columns, template)
        if names := unread_keys(rows, columns, None if template is None else template.text + template.tool_text):
            lines.append(f"{name}: not read: {', '.join(names)}")
    if held_out is not None and not (sources.files is not None and has_media(transform)):
        max_rows = COMPARED if data.datasets_type == "iterable" else None
        lines += _describe_shared_rows(sources, held_out, sorted(columns), num_eval_rows, max_rows)
    return lines


def layouts_of(transform: TextTransform) -> Sequence[ColumnLayout]:
    """The layouts that a transform tells rows by; none where ``data.text_keys`` names the columns."""
    keys = getattr(transform, "keys", None)
    if keys == CONVERSATION_KEYS:
        return CONVERSATIONS
    return PAIRS if keys == PREFERENCE_KEYS else LABELLED if keys == UNPAIRED_KEYS else ()


def _describe_layout(name: str, layouts: Sequence[ColumnLayout], rows: Sequence[Mapping[str, object]]) -> list[str]:
    """The line that says what rows of a source are read as; none where no row has a layout."""
    described = describe_layouts(layouts, rows)
    return [f"{name}: rows read as {described}"] if described else []


def _describe_other_texts(name: str, keys: Sequence[str], rows: Sequence[Mapping[str, object]]) -> list[str]:
    """The line about columns that rows have beside the first of ``keys``, which alone is read; none without such."""
    others = [key for row in rows for key in [key for key in keys if row.get(key) is not None][1:]]
    named = ", ".join(dict.fromkeys(map(repr, others)))
    return [f"{name}: the first column of {', '.join(keys)} is read, and not {named}"] if others else []


def _describe_markers(
    name: str, rows: Sequence[tuple[str, Mapping[str, object]]], columns: set[str], template: ChatTemplate | None
) -> list[str]:
    """The line about turn markers within the columns of rows; none for data without a chat template."""
    if template is None:
        return []
    from sfumato.data.text.turn_markers import RENDERED_ROWS, describe_turn_markers

    contents = [(place, [row[column] for column in columns & row.keys()]) for place, row in rows]
    return describe_turn_markers(name, contents, template, RENDERED_ROWS)


def _rows_of(sources: Sources, most: int | None) -> list[Iterator[tuple[str, dict[str, object]]]]:
    """The first rows of each source with their places, at most so many; None: all."""
    if sources.files is not None:
        return [_read_stream(files, most) for files in sources.files]
    return [_read_table(table, most) for table in sources.rows]


def _read_table(table: RowTable, most: int | None) -> Iterator[tuple[str, dict[str, object]]]:
    """The first rows of a table."""
    for index, row in islice(readable_rows(table), most):
        yield table.describe(index), row


def _read_stream(files: Sequence[RowFile], most: int | None) -> Iterator[tuple[str, dict[str, object]]]:
    """The first rows of files that are streamed, up to what is broken, which is named when its turn comes."""
    blocks = RowBlocks([(0, file) for file in files])
    place = FilePlace()
    is_last = False
    num_read = 0
    while not is_last and (most is None or num_read < most):
        try:
            block = blocks.read(place, LOOKED_AT if most is None else min(LOOKED_AT, most - num_read))
        except DataError:
            return
        for index, row in readable_rows(block.rows):
            yield block.rows.describe(index), row
        place = block.after
        is_last = block.is_last
        num_read += len(block.rows)


def _describe_shared_rows(
    sources: Sources, held_out: Sources, columns: list[str], num_eval_rows: int, max_rows: int | None
) -> list[str]:
    """A line about evaluation rows that equal a training row in the columns that are read; none if there are none.

    Args:
        sources, held_out: the sources of training and of validation.
        columns: names of the columns that are read.
        num_eval_rows: most rows of the validation set that are used.
        max_rows: rows of each training source that are compared; None: all.
    """
    rows_by_digest: dict[bytes, list[str]] = {}
    num_rows = 0
    for table in held_out.rows:
        # As ``build_validation`` does: each source gives an equal part, rounded up.
        for index in range(min(len(table), -(-num_eval_rows // len(held_out.rows)))):
            num_rows += 1
            try:
                rows_by_digest.setdefault(_digest_row(table[index], columns), []).append(table.describe(index))
            except DataError:
                continue  # a broken row is named where it is used
    trained: dict[bytes, str] = {}
    for rows in _rows_of(sources, max_rows):
        for place, row in rows:
            digest = _digest_row(row, columns)
            if digest in rows_by_digest and digest not in trained:
                trained[digest] = place
    shared = [
        (where, trained[digest]) for digest, wheres in rows_by_digest.items() if digest in trained for where in wheres
    ]
    return shared_line(shared, num_rows)


def _digest_row(row: dict[str, object], columns: list[str]) -> bytes:
    content = {column: row[column] for column in columns if row.get(column) is not None}
    return hashlib.blake2b(json.dumps(content, sort_keys=True, default=repr).encode(), digest_size=16).digest()
