"""Whether a path may be read as a file, and lies in its folder, and what files of JSON hold; needs the standard library
alone."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any

from sfumato.config.open_mappings import JsonObject

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def file_problem(path: Path, most_bytes: int | None = None, or_folder: bool = False) -> str | None:
    """The reason why a path cannot be read as a file, as the end of a sentence about it; None where it can.

    Args:
        path: links are followed.
        most_bytes: size of the largest file that is read.
        or_folder: a folder is as good as a file.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        return "does not exist"
    except (OSError, ValueError) as error:  # a name that is too long, or holds a zero byte
        return f"cannot be read: {getattr(error, 'strerror', None) or error}"
    kind = stat.S_IFMT(status.st_mode)
    if kind == stat.S_IFDIR and or_folder:
        return None
    if kind != stat.S_IFREG:
        return f"is {KINDS.get(kind, 'something else')}, not a file"
    if most_bytes is not None and status.st_size > most_bytes:
        return f"has {status.st_size:,} bytes, more than the {most_bytes:,} that are read"
    return None


def path_inside(folder: Path, name: str | Path) -> Path | None:
    """The resolved path of a file in a folder; None if it leads out of the folder, or is no valid path.

    For folders that somebody else may have made: links within the folder are followed, links out of it are not. The
    folder itself may be reached by a link.
    """
    try:
        root = folder.resolve()
        path = (root / name).resolve()
    except (OSError, ValueError, RuntimeError):  # a name with a zero byte, links in a circle
        return None
    return path if path.is_relative_to(root) else None


def outside_problem(
    folder: Path, name: str | Path, most_bytes: int | None = None, or_folder: bool = False
) -> str | None:
    """The reason why a file of a folder cannot be read, as ``file_problem`` gives it, or that it lies outside."""
    path = path_inside(folder, name)
    return "lies outside of its folder" if path is None else file_problem(path, most_bytes, or_folder)


MOST_JSON_BYTES = 2**28
"""Of a file of JSON that is read whole: tokenizers of large vocabularies have tens of megabytes."""


def read_json(path: Path) -> Any:
    """Reads a file of JSON that somebody else may have written.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no JSON in UTF-8, is no file, is too large, or has values within values too deep to be read.
    """
    problem = file_problem(path, MOST_JSON_BYTES)
    if problem is not None and problem != "does not exist":
        raise ValueError(f"it {problem}")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError("it has values within values, too deep to be read") from error


def read_json_object(path: Path) -> JsonObject:
    """Reads a file of JSON that holds an object. Raises as ``read_json``, and ValueError for any other value."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"it holds a {type(value).__name__}, not a JSON object")
    return value
