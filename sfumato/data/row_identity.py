"""What identifies the rows of a table, whatever files or folders they are read from."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sfumato.data.files.file_rows import FileRows
from sfumato.data.files.mapped_rows import MappedRows
from sfumato.data.files.picture_folder import FolderRows
from sfumato.data.files.rows import JoinedRows
from sfumato.data.identity import content_of_file

if TYPE_CHECKING:
    from sfumato.data.files.row_table import RowTable


def digest_rows(rows: RowTable) -> str | list[object]:
    """What identifies the rows of a table, as values that JSON can hold: digests of files, or a listing of a folder."""
    if isinstance(rows, JoinedRows):
        return [digest_rows(part) for part in rows.parts]
    if isinstance(rows, MappedRows):
        return [digest_rows(rows.rows), rows.mapping.content]
    if isinstance(rows, FileRows):
        return content_of_file(rows.path)
    if isinstance(rows, FolderRows):
        return [[str(path.relative_to(rows.root)), path.stat().st_size] for path in rows.files()]
    return "made in code"  # as the configuration says
