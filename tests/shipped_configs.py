"""The configurations in ``configs/``."""

from __future__ import annotations

import re
from pathlib import Path

FILES = sorted((Path(__file__).parent.parent / "configs").rglob("*.yaml"))
_KEYS = {path: set(re.findall(r"^(\w+):", path.read_text(encoding="utf-8"), re.MULTILINE)) for path in FILES}
"""Keys at the top of each file. All processes of a test run collect all tests, and reading YAML takes a third of it."""


def files_with(key: str) -> list[Path]:
    """Those with a key at the top, such as ``train``, which a task's configuration has."""
    return [path for path in FILES if key in _KEYS[path]]
