"""Which test runs which line: a plugin of pytest for runs under ``coverage``, and the map that comes of it.

Subprocesses and Ray's workers are told the test that started them by the environment, ranks that outlive a test by what
they are given to run. A fixture of more than one test counts for all tests of its file.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import coverage
import pytest

TEST = "SFUMATO_TEST"
"""Environment variable: the test that is running, for processes that it starts."""
DURATIONS = "SFUMATO_TEST_DURATIONS"
"""Environment variable: the folder that durations of tests are written into."""
SETTINGS = """[run]
source = sfumato, tasks
data_file = {folder}/lines
parallel = true
sigterm = true
patch = subprocess, _exit
context = ${{SFUMATO_TEST-}}
"""


class InTest:
    """Runs a function of a test in a process that serves many."""

    def __init__(self, test: str) -> None:
        self.test = test

    def __call__(self, function, *args):
        measured = coverage.Coverage.current()
        if measured is None:
            return function(*args)
        measured.switch_context(self.test)
        try:
            return function(*args)
        finally:
            measured.save()


def _switch(test: str) -> None:
    os.environ[TEST] = test
    if (measured := coverage.Coverage.current()) is not None:
        measured.switch_context(test)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_protocol(item):
    _switch(item.nodeid)
    yield
    _switch("")


@pytest.hookimpl(hookwrapper=True)
def pytest_fixture_setup(fixturedef, request):
    if fixturedef.scope == "function":
        yield
        return
    test = os.environ.get(TEST, "")
    _switch(test.partition("::")[0])
    yield
    _switch(test)


def pytest_sessionstart(session):
    from tests.dist.ranks import RankPool

    run = RankPool.run

    def run_in_test(self, num_ranks, function, *args, **kwargs):
        return run(self, num_ranks, InTest(os.environ.get(TEST, "")), function, *args, **kwargs)

    RankPool.run = run_in_test


def pytest_runtest_logreport(report):
    if DURATIONS in os.environ and report.when == "call":
        with (Path(os.environ[DURATIONS]) / f"{os.getpid()}.durations").open("a", encoding="utf-8") as file:
            file.write(json.dumps([report.nodeid, report.duration, report.outcome]) + "\n")


def read_map(folder: Path, root: Path) -> dict:
    """Joins what all processes wrote: ``tests`` (seconds by test) and ``lines`` (numbers of tests by file and line)."""
    joined = coverage.CoverageData(basename=str(folder / "joined"))
    for path in folder.glob("lines.*"):
        part = coverage.CoverageData(basename=str(path))
        try:
            part.read()
        except coverage.exceptions.DataError:
            continue  # of a process that was killed as it wrote
        joined.update(part)
    seconds: dict[str, float] = {}
    for path in folder.glob("*.durations"):
        for text in path.read_text(encoding="utf-8").splitlines():
            test, duration, outcome = json.loads(text)
            if outcome == "passed":
                seconds[test] = duration
    of_file = defaultdict(list)
    for test in seconds:
        of_file[test.partition("::")[0]].append(test)
    number_of = {test: number for number, test in enumerate(seconds)}
    lines: dict[str, dict[str, list[int]]] = {}
    for path in joined.measured_files():
        name = os.path.relpath(path, root)
        reached: dict[str, list[int]] = {}
        for line, contexts in joined.contexts_by_lineno(path).items():
            tests = {context.rpartition("|")[2] or context.partition("|")[0] for context in contexts}
            recorded = {test for name in tests for test in ([name] if name in seconds else of_file.get(name, []))}
            if recorded:
                reached[str(line)] = sorted(number_of[test] for test in recorded)
        lines[name] = reached
    return {"tests": seconds, "lines": lines}
