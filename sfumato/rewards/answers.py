"""Rewards that compare the answer of a language model with the row's, or look at its form: rules, no model."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import ClassVar, Literal

from sfumato.errors import ConfigError, DataError
from sfumato.rewards.base import Reward, Sample

_MINUS = "\u2212"  # the sign of mathematics
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
_EXPONENT = r"[eE][-+]?\d{1,4}"
_NUMBER = re.compile(rf"(?:(?<![\w)\]}}])[-{_MINUS}])?(?:{_DIGITS})(?:{_EXPONENT}(?!\w))?")
_WHOLE_NUMBER = re.compile(rf"[-{_MINUS}+]?(?:{_DIGITS})(?:{_EXPONENT})?")
_EMPHASIS = "*_` \t"
_QUOTES = {('"', '"'), ("'", "'"), ("\u201c", "\u201d"), ("\u2018", "\u2019"), ("$", "$")}
_RAISED_DIGITS = re.compile("(?<=[0-9])[\u2070\u00b9\u00b2\u00b3\u2074-\u2079]+")
_LOWERED_DIGITS = re.compile("(?<=[0-9])[\u2080-\u2089]+")
_CHOICE = re.compile(r"[(\[{]?([A-Za-z])(?:[)\]}.:,;]|\s*$|\s+\(|\s+[-\u2013\u2014]\s)")
_ANOTHER_CHOICE = re.compile(
    r"[)\]}\s]*(?:[,;/&]|\b(?:and|or)\b)\s*(?:(?:and|or)\s+)?[(\[{]?[A-Za-z](?:[)\]}.,;/&]|\s*$|\s+(?:and|or)\b)"
)
_CHOICE_BEGINS = re.compile(r"\A(?:\\\(|\\(?:boxed|text|textbf|mathrm|mathbf)\s*\{|[*_`\s$])+")
_LAST_SPACES = re.compile(r"(?:(?<!\\)\\[ ,;:!]|[~\s])+$")
_COMMAND = re.compile(r"\\(?:(?:text|textbf|mathrm|mathbf|boxed)\{([^{}]*)\}|\((.*)\\\)|\[(.*)\\\])")

Extraction = Literal["all", "marker", "boxed", "tags", "last_number"]


def extract_answer(text: str, how: Extraction, marker: str) -> str | None:
    r"""The part of an answer that counts.

    Args:
        text: what the model wrote.
        how: ``all``: all of it; ``marker``: the rest of the line after the last ``marker``; ``boxed``: what stands in
            the last ``\boxed{}``; ``tags``: in the last ``<answer></answer>``; ``last_number``:
            the last decimal number, with its commas, sign and exponent.
        marker: as it is written; asterisks, underscores and backticks around what follows it are removed, and may stand
            before the colon that ends it, as in ``**Answer**: B``. Behind a colon the answer may be in another line. Of
            a marker that ends with one the case does not count.

    Returns:
        That part without spaces around it; None when there is none, or when it is empty.
    """
    answer: str | None = text
    if how == "marker":
        answer = _after_last(marker, text).lstrip(_EMPHASIS).partition("\n")[0].rstrip(_EMPHASIS)
    elif how == "boxed":
        answer = last_boxed(text)
    elif how == "tags":
        before, closed, _ = text.rpartition("</answer>")
        answer = before.rpartition("<answer>")[2] if closed and "<answer>" in before else None
    elif how == "last_number":
        numbers = _NUMBER.findall(text)
        answer = numbers[-1] if numbers else None
    return (answer or "").strip() or None


def _after_last(marker: str, text: str) -> str:
    """What follows the last marker; empty without one.

    Of one that ends with a colon neither case nor spaces before the colon count, as for DAPO's verifier and
    simple-evals; a model may have ended its emphasis before the colon, and go on in another line.
    """
    if marker.endswith((":", "\uff1a")):
        colon = re.compile(re.escape(marker[:-1].rstrip()) + r"[*_`\s]*[:\uff1a][*_`\s]*", re.IGNORECASE)
        return text[max((match.end() for match in colon.finditer(text)), default=len(text)) :]
    return text.rpartition(marker)[2] if marker in text else ""


def last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{}`` whose brace is closed; None when there is none."""
    open_braces: list[int | None] = []  # where the content of a box begins; None for any other brace
    span: tuple[int, int] | None = None
    for match in re.finditer(r"\\f?boxed\s*\{|(?<!\\)[{}]", text):
        if match.group() != "}":
            open_braces.append(None if match.group() == "{" else match.end())
        # boxes may stand within each other: the one that begins last counts
        elif open_braces and (start := open_braces.pop()) is not None and (span is None or start > span[0]):
            span = (start, match.start())
    return None if span is None else strip_latex(text[slice(*span)])


def strip_latex(text: str) -> str:
    r"""A text without spaces around it, those of LaTeX such as ``\ `` and ``\,`` included.

    Of ``12\ `` the usual ``strip`` leaves a backslash, which then stands before the brace of a box.
    """
    return _LAST_SPACES.sub("", text).strip()


def same_text(first: str, second: str) -> bool:
    """Whether two answers are the same but for spelling.

    Compared are their forms NFKC, case folded, spaces within collapsed, without quotation marks, signs of a formula,
    a box or a LaTeX command for text around all of it and without a full stop at the end. Digits raised or lowered
    behind a digit stay apart from it, as 10^2. Two decimal numbers are compared as numbers, so that 1,000 is 1000.0.
    """
    first, second = _normalise_spelling(first), _normalise_spelling(second)
    if _WHOLE_NUMBER.fullmatch(first) and _WHOLE_NUMBER.fullmatch(second):
        return _parse_decimal(first) == _parse_decimal(second)
    return first == second


def _normalise_spelling(text: str) -> str:
    # NFKC would make 102 of 10\u00b2
    text = _LOWERED_DIGITS.sub(r"_\g<0>", _RAISED_DIGITS.sub(r"^\g<0>", text))
    text = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    # one pair or full stop at a time: they may stand around each other, as in "Paris."
    while len(text) > 1 and ((text[0], text[-1]) in _QUOTES or text[-1] == "."):
        text = text[:-1].strip() if text[-1] == "." else text[1:-1].strip()
    if command := _COMMAND.fullmatch(text):
        text = command[command.lastindex or 0].strip()
    return text.removeprefix("$").strip() if _WHOLE_NUMBER.fullmatch(text[1:].strip()) else text


def _parse_decimal(text: str) -> Decimal:
    return Decimal(text.replace(",", "").replace(_MINUS, "-"))


def text_of(sample: Sample, label: str) -> str:
    """The text of a sample. Raises DataError for one that has none."""
    if sample.text is None:
        raise DataError(f"reward {label!r} scores texts, but the sample of prompt {sample.prompt!r} has none")
    return sample.text


def column_of(metadata: Mapping[str, object], key: str, label: str, prompt: str) -> object:
    """The value of a column of a row.

    Args:
        metadata: the row's columns besides the prompt.
        key: name of the column. Where no column has this name, dots lead into mappings, as in
            ``reward_model.ground_truth``.
        label: of the reward, for the message.
        prompt: of the row, for the message.

    Raises:
        DataError: the row has no such value; the message names reward, column and prompt.
    """
    value: object = metadata
    if key in metadata:
        return metadata[key]
    for part in key.split("."):
        if not isinstance(value, Mapping) or value.get(part) is None:
            columns = ", ".join(map(repr, metadata)) or "none"
            raise DataError(
                f"reward {label!r} needs column {key!r}, which prompt {prompt!r} does not have (columns beside the "
                f"prompt: {columns}): add it, or name another one"
            )
        value = value[part]
    return value


@dataclass(frozen=True, kw_only=True)
class AnswerReward(Reward):
    """Base of rewards that compare the answer with a column of the row."""

    modality: ClassVar[str] = "text"

    target_key: str = "answer"
    """Column with what is correct; dots lead into it, as in reward_model.ground_truth."""
    extract: Extraction = "all"
    """What of the answer counts: all, the rest of the line after the last marker, what is in the last \\boxed{} or
    <answer></answer>, or the last number. The column is read likewise where it has such a part."""
    marker: str = "####"
    """What the answer stands behind with extract marker."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.marker.strip():
            raise ConfigError(f"marker of reward {self.label!r} is empty: write what stands before the answer")

    def check_row(self, prompt: str, metadata: dict[str, object]) -> None:
        """Raises DataError when the row has no target, or one that cannot be compared."""
        self._read_target(prompt, metadata)

    def score(self, samples: list[Sample]) -> list[float]:
        """1 for each answer that is correct, 0 for one that is not, or in which nothing was found."""
        values = []
        for sample in samples:
            target = self._read_target(sample.prompt, sample.metadata)
            answer = extract_answer(text_of(sample, self.label), self.extract, self.marker)
            values.append(float(answer is not None and self._is_correct(answer, target)))
        return values

    def _read_target(self, prompt: str, metadata: Mapping[str, object]) -> str:
        value = column_of(metadata, self.target_key, self.label, prompt)
        is_missing = isinstance(value, float) and math.isnan(value)  # as pandas writes a cell without a value
        if isinstance(value, bool) or not isinstance(value, (str, int, float)) or is_missing or not str(value).strip():
            raise DataError(
                f"column {self.target_key!r} of prompt {prompt!r} must be a text or a number for reward "
                f"{self.label!r}, not {value!r}"
            )
        return extract_answer(str(value), self.extract, self.marker) or str(value).strip()

    def _is_correct(self, answer: str, target: str) -> bool:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class ExactAnswer(AnswerReward):
    """1 when the answer is that of the row, else 0."""

    type: ClassVar[str] = "exact"

    strict: bool = False
    """Compare character by character; otherwise case, spaces, quotation marks and a final stop do not count, and
    numbers are compared as numbers."""

    def _is_correct(self, answer: str, target: str) -> bool:
        return answer == target if self.strict else same_text(answer, target)


@dataclass(frozen=True, kw_only=True)
class MultipleChoice(AnswerReward):
    """1 when the letter that the answer gives is that of the row, else 0."""

    type: ClassVar[str] = "multiple_choice"

    extract: Extraction = "marker"
    """Where the letter stands; it must be the first thing there, alone or followed by punctuation."""
    marker: str = "Answer:"
    """What the letter stands behind with extract marker."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.extract == "last_number":
            raise ConfigError(f"extract of reward {self.label!r} cannot be last_number: a choice is a letter")

    def _read_target(self, prompt: str, metadata: Mapping[str, object]) -> str:
        value = column_of(metadata, self.target_key, self.label, prompt)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 26:
            return chr(ord("A") + value)
        letter = choice_of(value) if isinstance(value, str) else None
        if letter is None:
            raise DataError(
                f"column {self.target_key!r} of prompt {prompt!r} must be the letter of a choice, or its number from 0 "
                f"on, for reward {self.label!r}, not {value!r}"
            )
        return letter

    def _is_correct(self, answer: str, target: str) -> bool:
        return choice_of(answer) == target


def choice_of(text: str) -> str | None:
    r"""The letter of a choice with which a text begins, in upper case: of ``B``, ``(b)``, ``**B**``, ``B. Paris``.

    It may stand in ``\boxed{}``, a command for text or marks of a formula. None where the text begins with something
    else, such as a word, or with several letters, as in ``A, B``.
    """
    text = _CHOICE_BEGINS.sub("", text).strip(_EMPHASIS + "\n$").removesuffix("\\)")
    match = _CHOICE.match(text)
    return match.group(1).upper() if match and not _ANOTHER_CHOICE.match(text, match.end(1)) else None


@dataclass(frozen=True, kw_only=True)
class Format(Reward):
    """1 when the answer has the form that is asked for, else 0."""

    type: ClassVar[str] = "format"
    modality: ClassVar[str] = "text"

    template: Literal["none", "think", "think_answer"] = "none"
    """A known form: a thought, </think> and an answer; the same with the answer in <answer></answer>; or none."""
    pattern: str = ""
    """Regular expression of Python that the whole answer must match; a full stop matches line breaks, too."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.template == "none") == (not self.pattern):
            raise ConfigError(f"reward {self.label!r} needs either a template or a pattern, and not both")
        try:
            re.compile(self.pattern, re.DOTALL)
        except (re.error, RecursionError, OverflowError) as error:
            raise ConfigError(f"pattern of reward {self.label!r} is no regular expression: {error}") from error

    def score(self, samples: list[Sample]) -> list[float]:
        """1 or 0 for each answer."""
        return [float(self._has_form(text_of(sample, self.label))) for sample in samples]

    def _has_form(self, text: str) -> bool:
        if self.pattern:
            return re.fullmatch(self.pattern, text, re.DOTALL) is not None
        return has_thought(text, in_tags=self.template == "think_answer")


def has_thought(text: str, *, in_tags: bool) -> bool:
    """Whether a text is a thought, ``</think>``, and an answer, none of them empty.

    ``<think>`` may stand at the beginning and nowhere else; it may be missing, since chat templates often end the
    prompt with it. With ``in_tags`` all that follows the thought must stand in one pair of ``<answer>`` and
    ``</answer>``.
    """
    thought, closed, answer = text.strip().removeprefix("<think>").partition("</think>")
    answer = answer.strip()
    if in_tags:
        if not (answer.startswith("<answer>") and answer.endswith("</answer>")):
            return False
        answer = answer.removeprefix("<answer>").removesuffix("</answer>").strip()
    tags = ("<think>", "</think>", "<answer>", "</answer>")
    return bool(closed and thought.strip() and answer) and not any(
        tag in part for tag in tags for part in (thought, answer)
    )
