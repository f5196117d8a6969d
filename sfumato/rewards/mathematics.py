"""Is the answer mathematically equal to the row's? Decided by math-verify, in processes of its own."""

from __future__ import annotations

import importlib.util
import logging
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NoReturn

from sfumato.errors import ConfigError, DataError, MissingDependencyError
from sfumato.rewards.answers import AnswerReward, extract_answer, text_of
from sfumato.rewards.base import Failure, Sample
from sfumato.rewards.scoring.workers import pool_of

if TYPE_CHECKING:
    from types import FrameType

INSTALL = "pip install --target math_verify 'math-verify[antlr4_13_2]>=0.9'"
_PLAIN_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?")
_WITH_EXPONENT = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+))[eE]([-+]?\d{1,4})")
_MIXED_NUMBER = re.compile(r"(-?\d+) +(\d+)/(\d+)")
_GROUPS_OF_DIGITS = re.compile(r"[-+]?\d{1,3}(?:(?:\\[,:; ]|[~ \u00a0\u2009\u202f])\d{3})+(?:\.\d+)?")
_CURRENCY = re.compile("[\u00a3\u20ac\u00a5\u20b9]")
_STOP_IN_BOX = re.compile(r"(\\boxed\{[^{}]*[^{}.])\.\s*\}")
_FORMULA = re.compile(r"(?<!\\)\$.+(?<!\\)\$", re.DOTALL)


class _TooLongError(BaseException):
    """Raised by the alarm; no ``except Exception`` of math-verify or sympy takes it for one of theirs."""


@dataclass(frozen=True, kw_only=True)
class MathAnswer(AnswerReward):
    """1 when the answer is mathematically equal to that of the row, else 0."""

    type: ClassVar[str] = "math"
    cached: ClassVar[bool] = True
    memory_mib: ClassVar[int] = 4096

    package_path: str = ""
    """Folder into which pip --target installed math-verify; empty: it stands among the installed packages."""
    timeout_s: float = 10.0
    """Seconds that reading and comparing one answer may take; then it has no reward."""
    process: bool = True
    """Always true: sympy can be given work that never ends, and the package brings versions that others do not bear."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.process:
            raise ConfigError(f"process of reward {self.label!r} must stay true: what sympy begins only a kill ends")

    def prepare(self) -> None:
        """Imports math-verify into this process, which is one of the reward's own."""
        if self.package_path:
            sys.path.insert(0, str(self._package_folder()))
        try:
            import math_verify
        except ImportError as error:
            raise self._missing(error) from error
        logging.getLogger(math_verify.__name__).setLevel(logging.CRITICAL)

    def check_installed(self) -> str:
        """See ``Reward``."""
        if self.package_path:
            self._package_folder()
        elif importlib.util.find_spec("math_verify") is None:
            raise self._missing("No module named 'math_verify'")
        return ""

    def _package_folder(self) -> Path:
        folder = Path(self.package_path).expanduser().resolve()
        if not (folder / "math_verify").is_dir():
            raise MissingDependencyError(
                f"package_path of reward {self.label!r} is {self.package_path}, which holds no math_verify: run "
                f"{INSTALL.replace('--target math_verify', f'--target {self.package_path}')}"
            )
        return folder

    def _missing(self, why: object) -> MissingDependencyError:
        return MissingDependencyError(
            f"reward {self.label!r} needs math-verify ({why}): run {INSTALL} and set package_path to that folder "
            "(its antlr4-python3-runtime 4.13 breaks hydra and omegaconf where they are installed)"
        )

    def check_row(self, prompt: str, metadata: dict[str, object]) -> None:
        """Raises DataError when the row has no target, or one that math-verify cannot read.

        What is no plain number is compared with itself, in the reward's process.
        """
        target = self._read_target(prompt, metadata)
        if _PLAIN_NUMBER.fullmatch(target):
            return
        sample = Sample(text=in_box(target), prompt=prompt, metadata=metadata, group_id=0)
        (value, reason), *_ = pool_of(self).call([sample]).values
        if value != 1.0:
            raise DataError(
                f"math-verify cannot read column {self.target_key!r} of prompt {prompt!r}, {target!r}"
                f"{f' ({reason})' if reason else ''}: write one expression in LaTeX, or leave the row out"
            )

    def plan_calls(self, samples: Sequence[Sample]) -> list[list[int]]:
        """One sample after the other, so that one which takes too long costs no other its value."""
        return [[index] for index in range(len(samples))]

    def score(self, samples: list[Sample]) -> list[float | Failure]:  # type: ignore[override]
        """1 or 0 for each answer; a Failure for one that took too long."""
        return [self._score_one(sample) for sample in samples]

    def _score_one(self, sample: Sample) -> float | Failure:
        target = self._read_target(sample.prompt, sample.metadata)
        text = text_of(sample, self.label)
        # with extract all, math-verify looks for the mathematics in the answer itself
        if self.extract != "all":
            answer = extract_answer(text, self.extract, self.marker)
            if answer is None:
                return 0.0
            text = in_box(answer)
        # An alarm before timeout_s: at timeout_s the process is killed, and another one has to load sympy.
        limit_s = 0.8 * self.timeout_s
        previous_handler = signal.signal(signal.SIGALRM, _raise_too_long)
        signal.setitimer(signal.ITIMER_REAL, limit_s)
        try:
            return float(_are_equal(target, text))
        except _TooLongError:
            return Failure(f"comparing with {target!r} took more than {limit_s:g} s")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, previous_handler)


def _are_equal(target: str, text: str) -> bool:
    """math-verify's verdict. Its time limits are off: they use SIGALRM, which the caller has set."""
    from math_verify import parse, verify

    gold = parse(_spell_as_read(in_box(target)), parsing_timeout=None)
    if all(isinstance(part, str) for part in gold):
        raise DataError(
            f"math-verify reads no mathematics in the target {target!r}: write it in LaTeX, such as \\frac{{1}}{{2}}"
        )
    return verify(gold, parse(_spell_as_read(text), parsing_timeout=None), timeout_seconds=None)


def _spell_as_read(text: str) -> str:
    """A text without two things that math-verify does not read: the full stop at the end of a box, as in ``10.`` and
    ``C.``, and another sign of the empty set."""
    return _STOP_IN_BOX.sub(r"\1}", text).replace(r"\varnothing", r"\emptyset")


def in_box(text: str) -> str:
    r"""A text in which math-verify finds one expression: in a box, unless it has one or marks formulas by dollar signs.

    A single ``$`` and ``\$`` are units, which math-verify reads in a box alone, and other currencies not at all. Three
    ways to write a number it would read as a product: ``1e-05`` (with Euler's number), ``2 1/2``, and ``10\,000`` (0).
    """
    if "\\boxed" in text or _FORMULA.search(text):
        return text
    text = _CURRENCY.sub(r"\\$", text)
    if match := _WITH_EXPONENT.fullmatch(text):
        text = rf"{match[1]} \times 10^{{{int(match[2])}}}"
    elif match := _MIXED_NUMBER.fullmatch(text):
        text = rf"{match[1]}\frac{{{match[2]}}}{{{match[3]}}}"
    elif _GROUPS_OF_DIGITS.fullmatch(text):
        text = re.sub(r"[^-+.\d]", "", text)
    return f"\\boxed{{{text}}}"


def _raise_too_long(number: int, frame: FrameType | None) -> NoReturn:
    raise _TooLongError
