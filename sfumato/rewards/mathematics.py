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
from sfumato.rewards.answers import AnswerReward, extract_answer, strip_latex, text_of
from sfumato.rewards.base import Failure, Sample
from sfumato.rewards.scoring.workers import pool_of

if TYPE_CHECKING:
    from types import FrameType

INSTALL = "pip install --target math_verify 'math-verify[antlr4_13_2]>=0.9'"
_PLAIN_NUMBER = re.compile(r"-?\d{1,15}(?:\.\d{1,15})?")
_WITH_EXPONENT = re.compile(r"([-+]?(?:\d+\.?\d*|\.\d+))[eE]([-+]?\d{1,4})")
_MIXED_NUMBER = re.compile(r"(?<![\w.^/])(\d{1,15})(?:\\?[ ~])+(\d{1,15})/(\d{1,15})(?![\d/])")
_REPEATING = re.compile(r"(\d{1,15})\.(\d{0,15})\\overline\s*\{(\d{1,15})\}")
_BETWEEN_DIGITS = re.compile(r"(?<=\d)(?:\\[,:; ]|\{,\}|,\\!|[~\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_GROUPS_OF_DIGITS = re.compile(r"[-+]?\d{1,3}(?: \d{3})+(?:\.\d+)?")
_CURRENCY = re.compile(r"[\u00a3\u20ac\u00a5\u20b9]|\b(?:dollars?|euros?|USD|EUR)\b")
_FORMULA = re.compile(r"(?<!\\)\$.+(?<!\\)\$", re.DOTALL)
_BOX_WITHOUT_BRACES = re.compile(r"\\boxed\s*\{([^{}]*)\}")


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
            raise self._missing_package(error) from error
        logging.getLogger(math_verify.__name__).setLevel(logging.CRITICAL)

    def check_installed(self) -> str:
        """See ``Reward``."""
        if self.package_path:
            self._package_folder()
        elif importlib.util.find_spec("math_verify") is None:
            raise self._missing_package("No module named 'math_verify'")
        return ""

    def _package_folder(self) -> Path:
        folder = Path(self.package_path).expanduser().resolve()
        if not (folder / "math_verify").is_dir():
            raise MissingDependencyError(
                f"package_path of reward {self.label!r} is {self.package_path}, which holds no math_verify: run "
                f"{INSTALL.replace('--target math_verify', f'--target {self.package_path}')}"
            )
        return folder

    def _missing_package(self, why: object) -> MissingDependencyError:
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
        sample = Sample(text=self.write_answer(target), prompt=prompt, metadata=metadata, group_id=0)
        (value, reason), *_ = pool_of(self).call([sample]).values
        if value != 1.0:
            raise DataError(
                f"math-verify cannot read column {self.target_key!r} of prompt {prompt!r}, {target!r}"
                f"{f' ({reason})' if reason else ''}: write one expression in LaTeX, or leave the row out"
            )

    def write_answer(self, target: str) -> str:
        """An answer of which ``extract`` takes a target out again."""
        on_one_line = " ".join(target.split())
        forms = {
            "all": in_box(target),
            "boxed": f"\\boxed{{{target}}}",
            "tags": f"<answer>{target}</answer>",
            "marker": f"{self.marker} {on_one_line}",
            "last_number": target,
        }
        return forms[self.extract]

    def plan_calls(self, samples: Sequence[Sample]) -> list[list[int]]:
        """One sample after the other, so that one which takes too long costs no other its value."""
        return [[index] for index in range(len(samples))]

    def score(self, samples: list[Sample]) -> list[float | Failure]:  # type: ignore[override]
        """1 or 0 for each answer; a Failure for one that took too long."""
        return [self._score_one(sample) for sample in samples]

    def _score_one(self, sample: Sample) -> float | Failure:
        target = self._read_target(sample.prompt, sample.metadata)
        text = text_of(sample, self.label)
        if self.extract == "all":  # math-verify looks for the mathematics in the answer itself
            text = write_plain_numbers(text)
        else:
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

    gold = parse(in_box(target), parsing_timeout=None)
    if all(isinstance(part, str) for part in gold):
        raise DataError(
            f"math-verify reads no mathematics in the target {target!r}: write it in LaTeX, such as \\frac{{1}}{{2}}"
        )
    answer = parse(text, parsing_timeout=None)
    return verify(gold, answer, timeout_seconds=None) and not differ_far_below_one(gold[:1], answer[:1])


def differ_far_below_one(gold: Sequence[object], answer: Sequence[object]) -> bool:
    """Whether two numbers below 0.001 differ by more than a thousandth of them.

    math-verify rounds to 6 decimals, to which Planck's constant is any other small number. False for what is no number.
    """
    from sympy import Expr, N

    numbers = [N(part.doit()) for part in (*gold, *answer) if isinstance(part, Expr)]
    if len(numbers) < 2 or not all(number.is_number and number.is_finite for number in numbers):
        return False
    first, second = numbers
    larger = max(abs(first), abs(second))
    return bool(larger < 1e-3 and abs(first - second) > 1e-3 * larger)


def in_box(text: str) -> str:
    r"""A text in which math-verify finds one expression: in a box, unless it has one or marks formulas by dollar signs.

    A single ``$`` and ``\$`` are units, which math-verify reads in a box alone.
    """
    if "\\boxed" in text or _FORMULA.search(text):
        return write_plain_numbers(text)
    return write_plain_numbers(f"\\boxed{{{_name_currency(text)}}}")


def write_plain_numbers(text: str) -> str:
    r"""A text with the numbers that math-verify reads as something else written as it reads them.

    Anywhere: ``10\,000``, ``10{,}000`` and ``2 1/2``, of which it makes products, and ``0.\overline{3}``. What is all
    of a box: see ``_write_plainly``. So is the other sign of the empty set.
    """
    text = text.replace(r"\varnothing", r"\emptyset")
    text = _BETWEEN_DIGITS.sub("", text)
    text = _MIXED_NUMBER.sub(_write_as_fraction, text)
    text = _REPEATING.sub(_write_as_ratio, text)
    return _BOX_WITHOUT_BRACES.sub(lambda box: f"\\boxed{{{_write_plainly(box[1])}}}", text)


def _write_as_fraction(mixed: re.Match[str]) -> str:
    whole, numerator, denominator = (int(part) for part in mixed.groups())
    return f"{whole * denominator + numerator}/{denominator}"


def _write_as_ratio(decimal: re.Match[str]) -> str:
    whole, start, repeated = decimal.groups()
    numerator = int(whole + start + repeated) - int(whole + start)
    return rf"\frac{{{numerator}}}{{{10 ** len(start) * (10 ** len(repeated) - 1)}}}"


def _write_plainly(content: str) -> str:
    r"""What stands in a box: ``1e-05`` (Euler's number to math-verify), ``10 000`` (a product), ``36.`` (nothing)."""
    content = _name_currency(strip_latex(strip_latex(content).removesuffix(".")))
    if match := _WITH_EXPONENT.fullmatch(content):
        return rf"{match[1]} \times 10^{{{int(match[2])}}}"
    return content.replace(" ", "") if _GROUPS_OF_DIGITS.fullmatch(content) else content


def _name_currency(text: str) -> str:
    r"""Currencies as ``\$``: other signs math-verify does not read, words it takes for products of variables."""
    return _CURRENCY.sub(r"\\$", text)


def _raise_too_long(number: int, frame: FrameType | None) -> NoReturn:
    raise _TooLongError
