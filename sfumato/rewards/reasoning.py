"""Problems of reasoning-gym, scored by their tasks' own verifiers in the sandbox: some of them evaluate the answer."""

from __future__ import annotations

import functools
import importlib.util
import json
import math
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from sfumato.errors import DataError, MissingDependencyError
from sfumato.rewards.answers import Extraction, column_of, extract_answer, text_of
from sfumato.rewards.base import Failure, Reward, Sample
from sfumato.sandbox.persistent_process import KeptProgram
from sfumato.sandbox.sandbox import PYTHON, ProgramLimits, Sandbox, SandboxError

_VERIFIER = Path(__file__).parent / "coding" / "verifier.py"
_FIELDS = {"task": str, "size": int, "seed": int, "index": int, "parameters": dict}
_START_S = 300.0
_LIFE_S = 30 * 24 * 3600.0  # the verifier stays for the whole run: the sandbox's time limit must not end it
_MOST_BYTES = 2048
"""Bytes of the verifier's answer for each request, and as many for the line as a whole."""


@dataclass(frozen=True, kw_only=True)
class ReasoningGym(Reward):
    """The score of a problem of reasoning-gym by its own verifier, from 0 to 1."""

    type: ClassVar[str] = "reasoning_gym"
    modality: ClassVar[str] = "text"

    target_key: str = "metadata"
    """Column that says which problem it is, as sfumato.data.synthetic.reasoning_gym makes it."""
    extract: Extraction = "tags"
    """What of the answer the verifier is given: what is in the last <answer></answer>, or as for the reward exact."""
    marker: str = "####"
    """What the answer stands behind with extract marker."""
    run_timeout_s: float = 10.0
    """Seconds that the verifier may take for one answer; then it has no reward."""

    def prepare(self) -> None:
        """Looks for the package and starts the verifier in the sandbox, which stays.

        Raises:
            MissingDependencyError: reasoning-gym is not installed.
            SandboxError: programs cannot be contained here.
        """
        Sandbox(readable=_package_folders()).check()
        verifier.ask([], _START_S)

    def check_installed(self) -> str:
        """See ``Reward``."""
        Sandbox(readable=_package_folders()).check()
        return ""

    def check_row(self, prompt: str, metadata: dict[str, object]) -> None:
        """Raises DataError when the row does not say which problem it is."""
        self._read_problem(prompt, metadata)

    def call_timeout_s(self, num_samples: int) -> float:
        """The start of the verifier, and what all answers may take."""
        return self.timeout_s + self._limit_s(num_samples)

    def score(self, samples: list[Sample]) -> list[float | Failure]:
        """The verifiers' scores; 0 for an answer in which nothing was found, a Failure where a verifier gave none."""
        values: list[float | Failure] = [0.0] * len(samples)
        requests = []
        rows = []
        for row, sample in enumerate(samples):
            problem = self._read_problem(sample.prompt, sample.metadata)
            answer = extract_answer(text_of(sample, self.label), self.extract, self.marker)
            if answer is not None:
                requests.append({**problem, "given": answer, "limit_s": self.run_timeout_s})
                rows.append(row)
        try:
            verdicts = self._verify(requests) if requests else []
        except SandboxError as error:
            verdicts = [str(error)] * len(requests)
        for row, verdict in zip(rows, verdicts, strict=True):
            values[row] = Failure(verdict) if isinstance(verdict, str) else float(verdict)
        return values

    def _read_problem(self, prompt: str, metadata: dict[str, object]) -> dict[str, object]:
        value = column_of(metadata, self.target_key, self.label, prompt)
        if not isinstance(value, dict) or not all(type(value.get(name)) is kind for name, kind in _FIELDS.items()):
            raise DataError(
                f"column {self.target_key!r} of prompt {prompt!r} must say which problem of reasoning-gym it is "
                f"({', '.join(_FIELDS)}) for reward {self.label!r}: make the rows with "
                "sfumato.data.synthetic.reasoning_gym.load"
            )
        return {**{name: value[name] for name in _FIELDS}, "answer": column_of(metadata, "answer", self.label, prompt)}

    def _limit_s(self, count: int) -> float:
        return _START_S + count * self.run_timeout_s

    def _verify(self, requests: list[dict[str, object]]) -> list[float | str]:
        """A score, or why there is none, for each. Raises SandboxError when the verifier could not do its work."""
        answers = verifier.ask(requests, self._limit_s(len(requests)))
        return [verdict if isinstance(verdict, str) else _check_score(verdict) for verdict in answers]


def build_sandbox() -> Sandbox:
    """The sandbox that verifiers run in. Raises MissingDependencyError where reasoning-gym is not installed."""
    return Sandbox(ProgramLimits(wall_s=_LIFE_S, memory_mib=4096), readable=_package_folders())


class Verifier:
    """The program in the sandbox that scores for all rewards of this process.

    It is started when it is first needed, and again when it was lost.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._program: KeptProgram | None = None

    def ask(self, requests: list[dict[str, object]], timeout_s: float) -> list[object]:
        """The verdict on each request, in order. Raises SandboxError when the verifier ended or answers nonsense."""
        with self._lock:
            try:
                if self._program is None:
                    self._program = self._start()
                reply = self._program.ask(json.dumps(requests).encode(), timeout_s, _MOST_BYTES * (1 + len(requests)))
            except SandboxError as error:
                self._program = None
                raise SandboxError(f"the verifier of reasoning-gym gave no scores: {error}") from error
            except BaseException:  # interrupted: the next line that it writes would answer these requests
                self._program = None
                raise
        verdicts = json.loads(reply)
        if not isinstance(verdicts, list) or len(verdicts) != len(requests):
            raise SandboxError(f"the verifier of reasoning-gym gave {len(verdicts)} scores of {len(requests)} answers")
        return verdicts

    def _start(self) -> KeptProgram:
        files = {"verifier.py": _VERIFIER.read_bytes()}
        # some problems follow from hashes of texts; without -I the variable counts, and -P keeps /tmp out of the path
        command = ["/usr/bin/env", "PYTHONHASHSEED=0", PYTHON, "-s", "-P", "-S", "/tmp/verifier.py"]
        program = KeptProgram(build_sandbox(), command, files)
        program.ask(json.dumps({"paths": _package_folders()}).encode(), _START_S, _MOST_BYTES)
        return program

    def forget(self) -> None:
        """Lets go of the program in a process that was forked, since it belongs to the parent."""
        if self._program is not None:
            self._program.close()
        self._lock = threading.Lock()
        self._program = None


verifier = Verifier()
os.register_at_fork(after_in_child=verifier.forget)


def _check_score(value: object) -> float | str:
    if isinstance(value, (int, float)) and math.isfinite(value) and 0 <= value <= 1:
        return float(value)
    return f"its verifier gave {value!r}, which is no score from 0 to 1"


@functools.cache
def _package_folders() -> list[str]:
    """Where reasoning-gym and what it needs are installed. Raises MissingDependencyError."""
    spec = importlib.util.find_spec("reasoning_gym")
    if spec is None or spec.origin is None:
        raise MissingDependencyError(
            "the reasoning_gym reward needs reasoning-gym: pip install 'sfumato[environments]'"
        )
    folders = [str(Path(spec.origin).resolve().parents[1])]
    for name in ("sympy", "numpy"):  # they may stand in another folder of the path
        dependency = importlib.util.find_spec(name)
        if dependency is not None and dependency.origin is not None:
            folders.append(str(Path(dependency.origin).resolve().parents[1]))
    return list(dict.fromkeys(folders))
