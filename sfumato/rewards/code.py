"""Does the program of an answer pass its tests? It runs in the sandbox, out of reach of what is expected of it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sfumato.rewards.answers import column_of, text_of
from sfumato.rewards.base import Failure, Reward, Sample
from sfumato.rewards.coding.tests import CodeTests, code_of, put_behind, read_tests, same_output
from sfumato.sandbox.sandbox import PYTHON, ProgramLimits, Sandbox, SandboxError

_WORKER_FILE = Path(__file__).parent / "coding" / "sandbox_worker.py"
_MOST_REPORTED = 1 << 20
"""Bytes of results that are read from the process of the tests."""
_GRACE_S = 15.0
"""Seconds beyond a program's own time limit in which its sandbox must have ended."""


class _CannotRunError(Exception):
    """The tests cannot be run against an answer in another process, so the answer has no value."""


@dataclass(frozen=True, kw_only=True)
class CodeReward(Reward):
    """1 when the program of the answer passes all tests of the row, else 0; it runs in the sandbox."""

    type: ClassVar[str] = "code"
    modality: ClassVar[str] = "text"

    target_key: str = "tests"
    """Column with the tests: assertions, pairs of input and output, or a function check(candidate)."""
    partial: bool = False
    """Give the fraction of the tests that pass instead; all of them are then run."""
    concurrency: int = 2
    """Answers that are tested at the same time."""
    run_timeout_s: float = 10.0
    """Seconds that a program may take: for each input, or for all assertions together."""
    run_memory_mib: int = 1024
    """Memory that a program may take."""
    timeout_s: float = 60.0
    """Seconds that all tests of one answer may take; those after that have not passed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("concurrency", "run_memory_mib")
        ProgramLimits(wall_s=self.run_timeout_s)

    def prepare(self) -> None:
        """Runs a program that looks at its own containment. Raises SandboxError where programs cannot be contained."""
        self._build_sandbox().check()

    def check_installed(self) -> str:
        """See ``Reward``."""
        self.prepare()
        return ""

    def check_row(self, prompt: str, metadata: dict[str, object]) -> None:
        """Raises DataError when the row has no tests, or some that cannot be read."""
        self._read_tests(prompt, metadata)

    def call_timeout_s(self, num_samples: int) -> float:
        """Time for all samples, of which ``concurrency`` are tested at once."""
        turns = math.ceil(num_samples / self.concurrency)
        return turns * (self.timeout_s + self.run_timeout_s + _GRACE_S)

    def score(self, samples: list[Sample]) -> list[float | Failure]:
        """1 or 0 for each answer, or a fraction; a Failure where the sandbox could not do its part."""
        with ThreadPoolExecutor(self.concurrency) as threads:
            return list(threads.map(self._score_one, samples))

    def _build_sandbox(self) -> Sandbox:
        return Sandbox(ProgramLimits(wall_s=self.run_timeout_s, memory_mib=self.run_memory_mib))

    def _read_tests(self, prompt: str, metadata: dict[str, object]) -> CodeTests:
        value = column_of(metadata, self.target_key, self.label, prompt)
        return read_tests(metadata, value, f"reward {self.label!r}, column {self.target_key!r} of prompt {prompt!r}")

    def _score_one(self, sample: Sample) -> float | Failure:
        tests = self._read_tests(sample.prompt, sample.metadata)
        code = put_behind(tests.setup, code_of(text_of(sample, self.label)))
        try:
            passed = self._run_pairs(code, tests) if tests.pairs else self._run_assertions(code, tests)
        except (SandboxError, _CannotRunError) as error:
            return Failure(str(error))
        count = len(tests.pairs or tests.assertions)
        return passed / count if self.partial else float(passed == count)

    def _run_pairs(self, code: str, tests: CodeTests) -> int:
        """How many outputs are right. They are compared here: no program ever sees one."""
        sandbox = self._build_sandbox()
        passed = 0
        deadline = time.monotonic() + self.timeout_s
        for stdin, expected in tests.pairs:
            finished = sandbox.run_python(code, stdin=stdin.encode("utf-8", "surrogatepass"))
            is_right = finished.is_success and same_output(finished.stdout.decode("utf-8", "replace"), expected)
            passed += is_right
            if time.monotonic() > deadline or not (is_right or self.partial):
                break
        return passed

    def _run_assertions(self, code: str, tests: CodeTests) -> int:
        """How many tests pass. The answer and its tests have a sandbox each."""
        check_request = {"setup": tests.setup, "entry_point": tests.entry_point, "tests": tests.assertions}
        worker_source = _WORKER_FILE.read_bytes()
        answer_files = {"sandbox_worker.py": worker_source, "answer.py": code.encode("utf-8", "surrogatepass")}
        check_files = {"sandbox_worker.py": worker_source, "tests.json": json.dumps(check_request).encode()}
        sandbox = self._build_sandbox()
        with contextlib.ExitStack() as running:
            with contextlib.ExitStack() as descriptors:  # closed here as soon as the programs have them
                calls, values, results = (_open_pipe(descriptors) for _ in range(3))
                null_fd = os.open(os.devnull, os.O_RDWR)
                descriptors.callback(os.close, null_fd)
                command = [PYTHON, "-I", "-S", "/tmp/sandbox_worker.py"]
                quiet = [null_fd] * 3
                answer = sandbox.start([*command, "answer"], [*quiet, calls[0], values[1]], answer_files)
                running.callback(answer.close)
                check = sandbox.start([*command, "check"], [*quiet, results[1], values[0], calls[1]], check_files)
                running.callback(check.close)
                report_fd = os.dup(results[0])
                running.callback(os.close, report_fd)
            # Only the tests' report counts: an answer that ends early or hangs shows as tests that fail.
            report = check.wait(self.run_timeout_s + _GRACE_S)
            if report["code"] and not report["why"]:
                raise _CannotRunError("the tests could not begin: their setup raises an error")
            return _count_passed(os.read(report_fd, _MOST_REPORTED), len(tests.assertions))


def _open_pipe(descriptors: contextlib.ExitStack) -> tuple[int, int]:
    pair = os.pipe()
    for descriptor in pair:
        descriptors.callback(os.close, descriptor)
    return pair


def _count_passed(written: bytes, most: int) -> int:
    """How many of the result lines of ``sandbox_worker.check`` say that their test passed.

    Raises:
        _CannotRunError: a line holds the reason why its test cannot be run.
    """
    # what follows the last line break is a line that was cut off when the process was killed, or nothing
    results = [json.loads(line) for line in written.split(b"\n")[:-1][:most]]
    if errors := [result for result in results if isinstance(result, str)]:
        raise _CannotRunError(errors[0])
    return sum(result is True for result in results)
