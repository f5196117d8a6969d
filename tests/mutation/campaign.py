"""Which lines are broken, which tests are run for each, and what comes of it."""

from __future__ import annotations

import ast
import json
import multiprocessing
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path

import yaml

from sfumato.tracking.progress import Progress
from tests.mutation.lines import DURATIONS, SETTINGS, read_map
from tests.mutation.mutants import Mutant, mutants_of
from tests.mutation.nearest import nearest_test_files
from tests.mutation.trials import copy_project, preload, run_tests

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("algorithms", "rollout", "runtime", "checkpoint", "parallel", "data")
MAP = ROOT / "outputs" / "mutation" / "map.json"
EQUIVALENT = Path(__file__).parent / "equivalent.yaml"
FACTOR, SPARE_S = 6.0, 120.0
"""Tests hang when they take so many times as long as they took unbroken, and so many seconds more."""

LONG_S = 900.0
"""Seconds for whole files of tests."""


@dataclass
class Trial:
    """A mutant, and what came of it."""

    mutant: Mutant
    tests: list[str] = field(default_factory=list)
    timeout_s: float = SPARE_S
    outcome: str = ""
    """``failed`` and ``hangs`` are kills; ``passed``, ``not reached`` (by no test) and ``equivalent`` are not."""
    reason: str = ""
    """Why the change makes no difference, of an equivalent one."""


def make_map(arguments: list[str], adding: bool) -> int:
    """Runs tests under coverage and writes which of them runs which line. Returns the exit code of the tests.

    Args:
        arguments: pytest's; none are the whole suite.
        adding: keep what earlier runs found, which must have been of the same code.
    """
    folder = MAP.parent / "coverage"
    if not adding:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    settings = folder / "settings"
    settings.write_text(SETTINGS.format(folder=folder), encoding="utf-8")
    command = [
        "-m",
        "coverage",
        "run",
        f"--rcfile={settings}",
        "-m",
        "pytest",
        "-p",
        "tests.mutation.lines",
        *arguments,
    ]
    environment = {**os.environ, DURATIONS: str(folder), "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.setdefault("MKL_CBWR", "AUTO,STRICT")
    code = subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=False).returncode
    MAP.write_text(json.dumps(read_map(folder, ROOT)), encoding="utf-8")
    print(f"{MAP.relative_to(ROOT)}: which of the tests runs which line")
    return code


def choose(count: int, seed: int, only: str) -> list[Mutant]:
    """Mutants at random: of each line one at most, of each room as many as it has lines."""
    generator = random.Random(seed)
    chosen = []
    for room in ROOMS:
        by_line = defaultdict(list)
        for path in sorted((ROOT / "sfumato" / room).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            for mutant in mutants_of(name, path.read_bytes()):
                if only in f"{name}:{mutant.line}:":
                    by_line[name, mutant.line].append(mutant)
        places = sorted(by_line)
        chosen += [(generator.random(), generator.choice(by_line[place])) for place in places]
    return [mutant for _, mutant in sorted(chosen, key=lambda pair: pair[0])][:count]


def plan(mutants: list[Mutant], budget_s: float) -> list[Trial]:
    """The tests of each mutant, quick ones first, as many as fit into the budget."""
    coverage = json.loads(MAP.read_text(encoding="utf-8"))
    tests = list(coverage["tests"])
    explained = yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8")) or []
    trials = []
    for mutant in mutants:
        lines = (ROOT / mutant.path).read_text(encoding="utf-8").splitlines()
        trial = Trial(mutant)
        above, line = (text.strip() for text in ["", *lines][mutant.line - 1 : mutant.line + 1])
        for entry in explained:
            place = (entry["path"], entry["line"], entry["change"], entry.get("above", above))
            if place == (mutant.path, line, mutant.change, above):
                trial.outcome, trial.reason = "equivalent", entry["why"]
        of_file = coverage["lines"].get(mutant.path, {})
        if mutant.line in lines_of_functions(mutant.path):
            numbers = set(of_file.get(str(mutant.line), ()))
        else:  # it is run once, when the first of all tests that use it imports the file
            numbers = {number for some in of_file.values() for number in some}
        reached = [tests[number] for number in numbers]
        seconds = 0.0
        for test in sorted(reached, key=lambda test: coverage["tests"][test]):
            if trial.tests and seconds + coverage["tests"][test] > budget_s:
                break
            trial.tests.append(test)
            seconds += coverage["tests"][test] + 0.05
        trial.timeout_s = SPARE_S + FACTOR * seconds
        if not reached:
            trial.tests, trial.timeout_s = nearest_test_files(mutant.path, ROOT), LONG_S
        trials.append(trial)
    return trials


@cache
def lines_of_functions(path: str) -> set[int]:
    """Lines that are run when a function is called, not when the file is imported."""
    functions = [
        node
        for node in ast.walk(ast.parse((ROOT / path).read_bytes()))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    ]
    return {line for node in functions for line in range(node.body[0].lineno, node.end_lineno + 1)}


def work(inbox, outbox) -> None:
    """Tries mutants in a copy of the project, one after the other, until None comes.

    Nothing follows from tests that fail when nothing is broken: the first ones of all, and whole files, are run before.
    """
    preload()
    with tempfile.TemporaryDirectory(prefix="mutation") as folder:
        project = copy_project(ROOT, Path(folder) / "project")
        is_sound: dict[tuple[str, ...], bool] = {}
        while (trial := inbox.get()) is not None:
            path, name = project / trial.mutant.path, f"{trial.mutant.path.replace('/', '.')}.{trial.mutant.line}.log"
            source, log = path.read_bytes(), MAP.parent / "logs" / name
            key = tuple(trial.tests) if trial.outcome else ()
            if key not in is_sound:
                is_sound[key] = run_tests(project, trial.tests, trial.timeout_s, log) == "passed"
                assert is_sound[key] or key, log.read_text(encoding="utf-8", errors="replace")[-2000:]
            if is_sound[key]:
                path.write_bytes(trial.mutant.applied(source))
                trial.outcome = run_tests(project, trial.tests, trial.timeout_s, log)
                path.write_bytes(source)
            outbox.put(trial)
    outbox.put(None)


def run(trials: list[Trial], jobs: int) -> list[Trial]:
    """All trials, in ``jobs`` processes.

    A change that no test notices is tried again with all tests of the nearest files: a line may be one that only
    processes run which keep no record.
    """
    (MAP.parent / "logs").mkdir(parents=True, exist_ok=True)
    for trial in trials:
        if not trial.outcome and not trial.tests:
            trial.outcome = "not reached"
    done = [trial for trial in trials if trial.outcome]
    done += _try([trial for trial in trials if not trial.outcome], jobs)
    again = []
    for trial in done:
        if trial.outcome == "passed" and (files := nearest_test_files(trial.mutant.path, ROOT)) != trial.tests:
            again.append(replace(trial, tests=files, timeout_s=LONG_S))
    tried = {trial.mutant: trial for trial in _try(again, jobs)}
    return [tried.get(trial.mutant, trial) for trial in done]


def _try(trials: list[Trial], jobs: int) -> list[Trial]:
    """Trials with what came of them, quick ones first."""
    context = multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    for trial in sorted(trials, key=lambda trial: trial.timeout_s):
        inbox.put(trial)
    for _ in range(jobs):
        inbox.put(None)
    workers = [context.Process(target=work, args=(inbox, outbox), daemon=True) for _ in range(jobs if trials else 0)]
    for worker in workers:
        worker.start()
    done, running = [], len(workers)
    with Progress(len(trials), 0, "mutants", enabled=True) as progress:
        while running:
            try:
                trial = outbox.get(timeout=1.0)
            except queue.Empty:
                if any(worker.exitcode for worker in workers):
                    raise SystemExit("a worker ended with an error") from None
                continue
            if trial is None:
                running -= 1
                continue
            done.append(trial)
            with (MAP.parent / "trials.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(trial)) + "\n")
            if trial.outcome == "passed":
                mutant = trial.mutant
                progress.message(f"survives: {mutant.path}:{mutant.line}: {mutant.change} ({len(trial.tests)} tests)")
            progress.update(len(done))
    for worker in workers:
        worker.join()
    return done


def table(trials: list[Trial]) -> str:
    """The result as Markdown: numbers by room, then what was not killed."""
    rows = ["| room | mutants | killed | equivalent | survive |", "|---|---|---|---|---|"]
    total = [0, 0, 0, 0]
    for room in ROOMS:
        outcomes = [trial.outcome for trial in trials if trial.mutant.path.startswith(f"sfumato/{room}/")]
        killed, same = sum(outcome in ("failed", "hangs") for outcome in outcomes), outcomes.count("equivalent")
        counts = [len(outcomes), killed, same, len(outcomes) - killed - same]
        total = [left + right for left, right in zip(total, counts, strict=True)]
        rows.append(f"| `{room}/` | " + " | ".join(map(str, counts)) + " |")
    rows.append("| all | " + " | ".join(map(str, total)) + " |")
    rows.append("")
    for trial in sorted(trials, key=lambda trial: (trial.outcome, trial.mutant.path, trial.mutant.line)):
        if trial.outcome not in ("failed", "hangs"):
            mutant = trial.mutant
            note = trial.reason or f"{trial.outcome}, {len(trial.tests)} tests"
            rows.append(f"- `{mutant.path}:{mutant.line}`: `{mutant.change}`: {note}")
    return "\n".join(rows)
