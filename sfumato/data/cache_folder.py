"""The folder of a cache, made where it is missing."""

from __future__ import annotations

from pathlib import Path

from sfumato.errors import DataError


def make_cache_folder(folder: Path) -> None:
    """Makes a folder with its parents. Raises DataError when it cannot be made, such as where a file stands."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(
            f"the cache folder {folder} cannot be made: {error.strerror}; data.cache_dir names a folder that can be "
            "written"
        ) from error
