"""Files that columns of rows name by a path, or hold as bytes or as base64."""

from __future__ import annotations

import base64
import binascii
import os
import re
import unicodedata
from pathlib import Path
from urllib.parse import unquote, unquote_to_bytes

from sfumato.config.file_checks import file_problem
from sfumato.config.paths import LONGEST_PATH
from sfumato.data.media.kinds import File
from sfumato.data.media.pictures import frames_of
from sfumato.errors import DataError

BASE64 = re.compile(r"[A-Za-z0-9+/_\-\s]*=*\s*")
"""Base64 in either alphabet, perhaps in lines."""

BEGINNINGS = re.compile(
    rb"\x89PNG|\xff\xd8\xff|GIF8|BM|RIFF|II\*\0|MM\0\*|....ftyp|\x1a\x45\xdf\xa3|OggS|ID3|fLaC|\xff[\xf2-\xfb]",
    re.DOTALL,
)
"""How files of pictures, videos and audio begin. A path may look like base64; it decodes to something else."""


def find_file(row: dict[str, object], key: str, root: Path, where: str, kind: str = "image") -> File:
    """The picture that a column of a row names or holds.

    Args:
        row: its column is a path, bytes, base64, a data: URL, or the struct of bytes and path that Hugging Face's
            datasets write.
        key: name of the column.
        root: folder that paths are relative to.
        where: file and row, for messages.
        kind: of the file, for messages.

    Raises:
        DataError: when the column is missing, holds something else, or names a file that does not exist.
    """
    value = row.get(key)
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if not isinstance(value, str) or not value:
        raise DataError(
            f"{where}: column {key!r} holds no {kind} path or bytes; its columns are {', '.join(map(str, row))}"
        )
    if value.startswith(("http://", "https://", "s3://", "gs://", "hf://")):
        raise DataError(f"{where}: {value}: {kind}s are not downloaded: give a file, bytes, or a data: URL")
    if value.startswith("data:"):
        return _read_data_url(value, where, kind)
    if value.startswith("file://"):
        value = unquote(value.removeprefix("file://"))
    path = _find_composed(root, value)
    problem = file_problem(path, or_folder=True)  # a folder may hold the frames of a video
    if problem is None:
        return path
    content = _read_base64(value)
    if content is not None and BEGINNINGS.match(content):
        return content
    if problem == "does not exist":
        hint = ""
        if "\\" in value and file_problem(root / value.replace("\\", "/"), or_folder=True) is None:
            hint = f": it is there as {value.replace(chr(92), '/')}; write its path with slashes"
        raise DataError(f"{where}: {kind} file not found: {path}{hint}")
    if len(value) > LONGEST_PATH:
        raise DataError(
            f"{where}: column {key!r} holds {len(value):,} letters, which are no path and no base64: {value}"
        )
    raise DataError(f"{where}: {path} {problem}")


def _find_composed(root: Path, name: str) -> Path:
    """The path of a name; where there is none, of the same name with its letters composed or decomposed (NFC, NFD),
    since macOS writes names of files with decomposed ones, and tables seldom do."""
    forms = [] if name.isascii() else [name, *(unicodedata.normalize(form, name) for form in ("NFC", "NFD"))]
    return next((root / form for form in forms if os.path.exists(root / form)), root / name)


def find_frames(row: dict[str, object], key: str, root: Path, where: str) -> File | list[File]:
    """The video that a column of a row names or holds: a file, as of ``find_file``, or a list of images.

    Raises DataError as ``find_file`` does.
    """
    value = row.get(key)
    if not isinstance(value, list):
        return find_file(row, key, root, where)
    return [find_file({**row, key: frame}, key, root, f"{where}, frame {n}") for n, frame in enumerate(value, start=1)]


def list_frames(source: File | list[File]) -> list[File]:
    """The files that ``read_frames`` reads; a folder of images counts as these images."""
    if isinstance(source, Path) and source.is_dir():
        return list(frames_of(source))
    return source if isinstance(source, list) else [source]


def _read_data_url(url: str, where: str, kind: str) -> bytes:
    """The content of a data: URL (RFC 2397). Raises DataError when it is not valid."""
    head, comma, text = url.partition(",")
    if not comma:
        raise DataError(f"{where}: a data: URL of {kind} has no comma after its type: {url}")
    if not head.endswith(";base64"):
        return unquote_to_bytes(text)
    content = _read_base64(unquote(text))
    if content is None:
        raise DataError(f"{where}: the {kind} of a data: URL is no valid base64: {text}")
    return content


def _read_base64(text: str) -> bytes | None:
    """The bytes that base64 in either alphabet stands for; None where the text is no base64."""
    if BASE64.fullmatch(text) is None:
        return None
    try:
        return base64.b64decode("".join(text.split()).replace("-", "+").replace("_", "/"), validate=True)
    except (binascii.Error, ValueError):
        return None
