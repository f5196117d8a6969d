"""How tests are shared out among the processes of a test run."""

from __future__ import annotations

from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "dist"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests of a file stay together, and those whose ranks talk to each other: two such tests at once take far
    longer than one after the other, as each message waits until both its ends have been given a core."""
    for item in items:
        name = "ranks" if RANKS in item.path.parents else str(item.path)
        item.add_marker(pytest.mark.xdist_group(name))
