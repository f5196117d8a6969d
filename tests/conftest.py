"""How tests are shared out among the processes of a test run, and what all of them compute with."""

from __future__ import annotations

import functools
import gc
import importlib.metadata
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from sfumato.kernels import choose_kernels

choose_kernels()  # before a test computes anything; processes that tests start inherit it
# each run of a task asks for the versions of all packages, and reads their files again
importlib.metadata.version = functools.cache(importlib.metadata.version)
importlib.metadata.requires = functools.cache(importlib.metadata.requires)
gc.set_threshold(100_000, 20, 20)  # Python's own 700 is exceeded by every model that is built: a twelfth of the time


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collects without Python's garbage collector, which would look again and again through millions of objects that
    imports leave, and takes these out of its sight for the tests, too: each full collection would take seconds."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The tests of a file stay together, so that each module's fixtures are made once; and so do all of ``tests/dist``,
    whose ranks talk to each other: two such tests at once take far longer than one after the other, as each message
    waits until both its ends have been given a core."""
    from xdist.scheduler.loadscope import LoadScopeScheduling

    class FilesTogether(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ranks" if nodeid.startswith("tests/dist/") else nodeid.partition("::")[0]

    return FilesTogether(config, log)


@pytest.fixture(autouse=True, scope="module")
def leave_imports_out_of_garbage_collection() -> None:
    """Takes what stands before a file's tests out of the sight of Python's garbage collector: with torch, transformers
    and diffusers imported, each full collection takes more than a second."""
    gc.collect()
    gc.freeze()


LONG_FILES = Path(__file__).parent / "unit" / "long_files.txt"
"""Files of tests/unit that take more than about three seconds: ``make quick-test`` leaves them out."""


SLOW_CASES = Path(__file__).parent / "slow_cases.txt"
"""Tests and cases of tests that are marked slow besides those marked where they stand."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the files that tests/unit/long_files.txt names")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves long files out before they are imported; None asks pytest's other rules."""
    if not config.getoption("--quick") or collection_path.parent != LONG_FILES.parent:
        return None
    return collection_path.stem in LONG_FILES.read_text(encoding="utf-8").split() or None


def mark_slow_cases(items: list[pytest.Item], is_whole: bool) -> None:
    """Marks the items that ``slow_cases.txt`` lists.

    Raises:
        pytest.UsageError: with ``is_whole``, whole files having been collected, for a line that names no test of them.
    """
    lines = SLOW_CASES.read_text(encoding="utf-8").splitlines()
    unmatched = {line for line in lines if line and not line.startswith("#")}
    listed = frozenset(unmatched)
    files = set()
    for item in items:
        case = item.nodeid.removeprefix("tests/")
        files.add(case.partition("::")[0])
        names = listed & {case, case.partition("[")[0]}
        unmatched -= names
        if names:
            item.add_marker(pytest.mark.slow)
    if is_whole and (stale := sorted(line for line in unmatched if line.partition("::")[0] in files)):
        raise pytest.UsageError(f"{SLOW_CASES.name} lists what is no test: " + ", ".join(stale))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests slow that ``slow_cases.txt`` lists, and those of model families that have the parts of others: see
    ``TELLING``."""
    mark_slow_cases(items, is_whole=not any("::" in argument for argument in config.args))
    family_items = [item for item in items if item.path.name == "test_families.py"]
    if not family_items:
        return
    from tests.family_rows import ROWS, TELLING

    for item in family_items:
        name = getattr(item, "callspec", None) and item.callspec.params.get("built")  # pyright: ignore[reportAttributeAccessIssue]
        if name and ROWS[name].brief and getattr(item, "originalname", "") not in TELLING:
            item.add_marker(pytest.mark.slow)
