"""Where the tasks and configurations lie that come with sfumato, and files that a configuration names beside itself."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

NAMES_A_FILE = ("config_path", "made_by", "image_tokenizer_made_by")
"""Fields that name another YAML file."""

PYTHON_FILE = re.compile(r"(?P<file>[^:]+\.py)(?P<function>:\w+)")
"""A value such as ``folder/file.py:function``."""


def shipped_folder() -> Path:
    """The folder with ``tasks/``, ``configs/`` and ``docs/examples/``: the repository, or the installed package."""
    package = Path(__file__).resolve().parents[1]
    return package if (package / "tasks").is_dir() else package.parent


def find_shipped(path: str | Path) -> Path:
    """The path, or the configuration that comes with sfumato where it is given as ``configs/...`` from elsewhere."""
    path = Path(path)
    shipped = shipped_folder() / path
    return shipped if path.parts[:1] == ("configs",) and not path.exists() and shipped.is_file() else path


def find_beside(data: Mapping[str, object], path: str | Path) -> dict[str, object]:
    """A configuration's values, with the paths of files that do not lie where the command was called.

    Such a file is looked for beside the configuration, and of a shipped configuration from the folder that holds
    ``configs/``, so that it may be called from anywhere. A path that leads nowhere stays as it is.

    Args:
        data: the file's values.
        path: of the file.
    """
    folder = Path(path).parent
    shipped = shipped_folder()
    places = [folder, shipped] if folder.resolve().is_relative_to(shipped / "configs") else [folder]
    return {key: _find(key, value, places) for key, value in data.items()}


def _find(key: str, value: object, places: list[Path]) -> object:
    if isinstance(value, dict):
        return {name: _find(name, part, places) for name, part in value.items()}
    if isinstance(value, list):
        return [_find(key, part, places) for part in value]
    if not isinstance(value, str):
        return value
    code = PYTHON_FILE.fullmatch(value)
    if key not in NAMES_A_FILE and code is None:
        return value
    name = value if code is None else code["file"]
    if Path(name).is_absolute() or name.startswith("~") or os.path.exists(name):
        return value
    # os.path says of a name that is too long that it is not there, where pathlib raises OSError
    rest = "" if code is None else code["function"]
    return next((f"{place / name}{rest}" for place in places if os.path.isfile(place / name)), value)
