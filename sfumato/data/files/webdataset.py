"""Shards of webdataset: .tar files in which a row's members follow each other and share a name up to its first dot."""

from __future__ import annotations

import tarfile
from pathlib import Path
from typing import NamedTuple

from sfumato.data.files.bad_rows import parse_json
from sfumato.data.files.file_rows import MAX_LINE, FileRows
from sfumato.data.files.folders import is_hidden
from sfumato.data.media.kinds import IMAGE_ENDINGS, SOUND_ENDINGS, VIDEO_ENDINGS
from sfumato.errors import DataError

MEDIA = {
    "image": {ending[1:] for ending in IMAGE_ENDINGS},
    "video": {ending[1:] for ending in VIDEO_ENDINGS},
    "audio": {ending[1:] for ending in SOUND_ENDINGS},
}
"""Endings of members by the kind of medium, whose column they become."""


class Member(NamedTuple):
    """A file in a shard."""

    ending: str
    """What follows the first dot of its name."""
    position: int
    size: int


class TarRows(FileRows):
    """A .tar file. Only names and positions of its members are kept in memory.

    The fields of the member ``json`` are columns. An image is the column ``image``, several are ``images``, in their
    order, whatever these fields say; videos and audio likewise. Any other member is a column called by its ending: a
    text if it is ``txt``, otherwise its bytes.
    """

    def __init__(self, path: Path) -> None:
        """Reads the headers of all members.

        Raises:
            DataError: when the file is broken or compressed, or the members of a row do not follow each other.
        """
        super().__init__(path)
        self._rows: list[tuple[str, list[Member]]] = []
        size = path.stat().st_size
        seen_keys = set()
        try:
            with tarfile.open(path, "r:") as shard:
                for info in shard:
                    if info.isdir() or any(is_hidden(part) for part in info.name.split("/") if part != "."):
                        continue
                    if not info.isfile():
                        raise DataError(f"{path}: member {info.name} is a link, not a file")
                    # tarfile would report an unexpected end of the file, and not which member is cut off.
                    if info.offset_data + info.size > size:
                        raise DataError(f"{path}: member {info.name} is cut off: the shard is not whole")
                    folder, _, name = info.name.rpartition("/")
                    key, _, ending = name.partition(".")
                    key = f"{folder}/{key}"
                    member = Member(ending.lower(), info.offset_data, info.size)
                    if not self._rows or self._rows[-1][0] != key:
                        if key in seen_keys:
                            raise DataError(f"{path}: member {info.name} does not follow the others of its row")
                        seen_keys.add(key)
                        self._rows.append((key, []))
                    if any(earlier.ending == member.ending for earlier in self._rows[-1][1]):
                        raise DataError(f"{path}: member {info.name} is there twice")
                    self._rows[-1][1].append(member)
        except (tarfile.TarError, EOFError) as error:
            raise DataError(f"{path} cannot be read as an uncompressed .tar file: {error}") from error

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, object]:
        where = self.describe(index)
        row = {}
        media: dict[str, list[bytes]] = {kind: [] for kind in MEDIA}
        with self.path.open("rb") as file:
            for member in self._rows[index][1]:
                file.seek(member.position)
                last = member.ending.rpartition(".")[2]
                kind = next((kind for kind, endings in MEDIA.items() if last in endings), None)
                if kind is None and last in ("json", "txt") and member.size > MAX_LINE:
                    raise DataError(f"{where}: {member.ending} is longer than the {MAX_LINE:,} bytes that are read")
                content = file.read(member.size)
                if kind is not None:
                    media[kind].append(content)
                elif member.ending == "json":
                    fields = parse_json(content, where)
                    if not isinstance(fields, dict):
                        raise DataError(f"{where}: json must be an object, not {type(fields).__name__}")
                    row = fields | row  # members win over fields, whichever came first
                elif last == "txt":
                    row[member.ending] = _decode_member(content, where)
                else:
                    row[member.ending] = content
        for kind, contents in media.items():
            if contents:  # a field of the member json with this name holds the name of the file: it is replaced
                row = {name: value for name, value in row.items() if name not in (kind, f"{kind}s")}
                row |= {kind: contents[0]} if len(contents) == 1 else {f"{kind}s": contents}
        return row

    def describe(self, index: int) -> str:
        return f"{self.path}, row {index + 1} ({self._rows[index][0].lstrip('/')})"


def _decode_member(content: bytes, where: str) -> str:
    """The text of a member. Raises DataError when it is not UTF-8."""
    try:
        return content.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise DataError(f"{where}: txt is not UTF-8 text: {error}") from error
