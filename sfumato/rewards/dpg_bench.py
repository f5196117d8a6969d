"""DPG-Bench (arXiv 2403.05135): a judge answers the questions that a table asks about the picture of each prompt."""

from __future__ import annotations

import csv
import dataclasses
import functools
import io
import itertools
import re
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, cast

from sfumato.config.paths import FilePath
from sfumato.errors import ConfigError, DataError
from sfumato.rewards.base import Failure, Sample, load_once
from sfumato.rewards.http.chat_completions import ChatReply
from sfumato.rewards.judge import Judge, UnreadableError, final_text
from sfumato.rewards.judging.template import read_file

COLUMNS = ("item_id", "text", "proposition_id", "dependency", "tuple", "question_natural_language")
"""Columns of ``dpg_bench.csv`` that are read; it has a row for each question."""
_YES_OR_NO = re.compile(r"[\s*_`\"'(\[]*(yes|no)\b", re.IGNORECASE)


@dataclass(frozen=True)
class PictureQuestion:
    """A question about the picture of a prompt."""

    number: int
    text: str
    parents: tuple[int, ...]
    """Numbers of the questions without whose Yes it counts as No."""
    category: str
    """Such as ``entity/whole``, or ``global``."""


@dataclass
class QuestionTable:
    """The questions of ``dpg_bench.csv``, in its order."""

    by_item: dict[str, list[PictureQuestion]] = field(default_factory=dict)
    items_of_text: dict[str, list[str]] = field(default_factory=dict)
    """Items by their prompt, whose white space is single spaces."""

    @functools.cached_property
    def categories(self) -> list[str]:
        """Categories, and the broad ones that they belong to."""
        detailed = {question.category for questions in self.by_item.values() for question in questions}
        return sorted(detailed | {category.partition("/")[0] for category in detailed})

    def find(self, prompt: str, metadata: Mapping[str, object]) -> list[PictureQuestion]:
        """The questions about a prompt: those of the item that its row names, or else of its text.

        Raises:
            DataError: the table has none, those of several items, or one that depends on a question that is missing.
        """
        items = self.items_of_text.get(_single_spaced(prompt), [])
        if "item_id" in metadata:
            items = [str(metadata["item_id"])]
        if len(items) > 1:
            raise DataError(f"the prompt is that of {', '.join(items)}: give its row a column item_id")
        if not items or items[0] not in self.by_item:
            raise DataError("the table of questions has none about it: draw DPG-Bench's own prompts")
        questions = self.by_item[items[0]]
        numbers = [question.number for question in questions]
        for question in questions:
            lacking = [parent for parent in question.parents if parent not in numbers]
            if lacking or numbers.count(question.number) > 1:
                problem = f"depends on {lacking[0]}, which is missing" if lacking else "is there twice"
                raise DataError(f"question {question.number} of item {items[0]} {problem}: correct the table")
        return questions


def score_answers(questions: Sequence[PictureQuestion], answers: Sequence[float]) -> float:
    """The share of questions with a Yes whose parents, too, have one that counts (DSG, arXiv 2310.18235).

    Args:
        questions: about one picture; as in the published code, a parent counts as No because of its own parents where
            it stands before its child.
        answers: 1.0 for Yes, 0.0 for No.
    """
    counted = {question.number: answer for question, answer in zip(questions, answers, strict=True)}
    for question in questions:
        if any(counted[parent] == 0 for parent in question.parents):
            counted[question.number] = 0.0
    return sum(counted.values()) / len(counted)


@dataclass(frozen=True, kw_only=True)
class DPGBench(Judge):
    """Share of a table's questions about the picture that a judge answers with Yes, each after those it depends on.

    The judge is asked the question alone, which the template has as ``prompt``. A picture with an answer that cannot
    be read has no value. ``take_counts`` has the share of Yes by category, whatever the parents say, as published.
    """

    type: ClassVar[str] = "dpg_bench"
    modality: ClassVar[str] = "image"

    questions: FilePath
    """Path of ``dpg_bench.csv``."""

    def prepare(self) -> None:
        """As ``Judge.prepare``. Raises ConfigError for a table that cannot be read, too."""
        self._load_table()
        super().prepare()

    def check_installed(self) -> str:
        """See ``Reward``."""
        self._load_table()
        return super().check_installed()

    def check_row(self, prompt: str, metadata: dict[str, object]) -> None:
        """Raises DataError when there are no questions about the prompt."""
        self._load_table().find(prompt, metadata)
        super().check_row(prompt, metadata)

    def read(self, reply: ChatReply, *samples: Sample) -> float:
        """1.0 for a reply that begins with Yes, 0.0 for No."""
        answer = _YES_OR_NO.match(final_text(reply))
        if answer is None:
            raise UnreadableError("it does not begin with Yes or No")
        return float(answer.group(1).casefold() == "yes")

    def score(self, samples: list[Sample]) -> Sequence[float | Failure]:
        """``score_answers`` of each picture; a Failure where an answer is missing."""
        table = self._load_table()
        by_sample = [table.find(sample.prompt, sample.metadata) for sample in samples]
        answers = iter(
            self.judge(
                [
                    (dataclasses.replace(sample, prompt=question.text),)
                    for sample, questions in zip(samples, by_sample, strict=True)
                    for question in questions
                ]
            )
        )
        values: list[float | Failure] = []
        for questions in by_sample:
            of_sample = list(itertools.islice(answers, len(questions)))
            failure = next((answer for answer in of_sample if isinstance(answer, Failure)), None)
            if failure is not None:
                values.append(failure)
                continue
            read = cast("list[float]", of_sample)
            _build_category_tally(self).add(questions, read)
            values.append(score_answers(questions, read))
        return values

    def take_counts(self) -> dict[str, tuple[int, int]]:
        """Questions answered with Yes of all, by category and broad category; and what ``Judge`` counts."""
        counts = _build_category_tally(self).pop_counts()
        shares = {
            f"{self.label}/{category}": counts.get(category, (0, 0)) for category in self._load_table().categories
        }
        return shares | super().take_counts()

    def _load_table(self) -> QuestionTable:
        try:
            return _read_once(self.questions)
        except ConfigError as error:
            raise ConfigError(f"questions of reward {self.label!r}: {error}") from error


class CategoryTally:
    """Answers by category since they were last taken. Threads may share it."""

    def __init__(self) -> None:
        """No answers."""
        self._lock = threading.Lock()
        self._counts: dict[str, tuple[int, int]] = {}

    def add(self, questions: Sequence[PictureQuestion], answers: Sequence[float]) -> None:
        """Counts the answers about one picture."""
        with self._lock:
            for question, answer in zip(questions, answers, strict=True):
                for category in {question.category, question.category.partition("/")[0]}:
                    yes, all_of_it = self._counts.get(category, (0, 0))
                    self._counts[category] = (yes + int(answer), all_of_it + 1)

    def pop_counts(self) -> dict[str, tuple[int, int]]:
        """Questions with Yes and all questions, by category."""
        with self._lock:
            counts, self._counts = self._counts, {}
        return counts


@load_once
def _build_category_tally(reward: DPGBench) -> CategoryTally:
    del reward  # one for each
    return CategoryTally()


def read_questions(path: str) -> QuestionTable:
    """Reads ``dpg_bench.csv``.

    Raises:
        ConfigError: there is no such file, it is no CSV with the columns ``COLUMNS``, or a number in it is none.
    """
    if not Path(path).is_file():
        raise ConfigError(f"no file {path}: give DPG-Bench's dpg_bench.csv")
    table = QuestionTable()
    reader = csv.DictReader(io.StringIO(read_file(Path(path)), newline=""))
    try:
        missing = [name for name in COLUMNS if name not in (reader.fieldnames or ())]
        if missing:
            raise ConfigError(f"{path} has no column {missing[0]!r}: give DPG-Bench's dpg_bench.csv")
        for row in reader:
            item = row["item_id"]
            items = table.items_of_text.setdefault(_single_spaced(row["text"]), [])
            if item not in items:
                items.append(item)
            table.by_item.setdefault(item, []).append(_read_question(row))
    except (csv.Error, ValueError, AttributeError, TypeError) as error:  # a short row has None in the place of texts
        raise ConfigError(f"{path}, line {reader.line_num}: not a row of dpg_bench.csv: {error}") from error
    if not table.by_item:
        raise ConfigError(f"{path} holds no question: give DPG-Bench's dpg_bench.csv")
    return table


_read_once = load_once(read_questions)
"""The table as it was when it was first asked for."""


def _read_question(row: Mapping[str, str]) -> PictureQuestion:
    # published category scores are by what stands before the bracket of "entity - whole (chair)", not by the columns
    broad, _, detailed = row["tuple"].partition("(")[0].partition("-")
    if not broad.strip():
        raise ValueError("its tuple names no category")
    parents = (int(number) for number in row["dependency"].split(","))
    return PictureQuestion(
        number=int(row["proposition_id"]),
        text=row["question_natural_language"].strip(),
        parents=tuple(parent for parent in parents if parent != 0),
        category="/".join(part for part in (broad.strip(), detailed.strip()) if part),
    )


def _single_spaced(text: str) -> str:
    return " ".join(text.split())
