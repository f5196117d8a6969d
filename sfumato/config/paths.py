"""Paths in a configuration: ``~`` is the home folder, and what no file system can hold is refused."""

from __future__ import annotations

import os
from typing import Annotated

from pydantic import AfterValidator

LONGEST_NAME, LONGEST_PATH = 255, 4095
"""Bytes of a name and of a whole path that Linux takes."""


def check_path(path: str) -> str:
    """The path with the home folder in the place of a leading ``~``.

    Raises:
        ValueError: when there can be no such path.
    """
    if not path.strip():
        raise ValueError("a path must not be empty")
    if any(ord(letter) < 32 or 0xD800 <= ord(letter) < 0xE000 for letter in path):
        raise ValueError("a path must not hold control characters, such as line breaks")
    longest = max(len(part.encode()) for part in path.split("/"))
    if longest > LONGEST_NAME or len(path.encode()) > LONGEST_PATH:
        raise ValueError(
            f"a path of {len(path.encode())} bytes with a name of {longest}: file systems take {LONGEST_PATH} and "
            f"{LONGEST_NAME}"
        )
    return os.path.expanduser(path.lstrip()) if path.lstrip().startswith("~") else path


def check_paths(paths: str) -> str:
    """The same for several paths with commas between them."""
    return ",".join(check_path(part) for part in paths.split(","))


FilePath = Annotated[str, AfterValidator(check_path)]
"""The type of a field that names a file or folder."""

FilePaths = Annotated[str, AfterValidator(check_paths)]
"""The type of a field that names several, with commas between them."""
