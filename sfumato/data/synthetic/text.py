"""Problems with one correct answer, made in code: texts, conversations and pairs of answers without any download."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from PIL import Image

from sfumato.algorithms.noise import keyed_generator
from sfumato.config.open_mappings import JsonObject
from sfumato.config.text_data import SyntheticTextConfig
from sfumato.data.media.pictures import as_png
from sfumato.data.synthetic import digits, keypad
from sfumato.data.synthetic.glyphs import default_font, render_word
from sfumato.errors import DataError

LETTERS = "abcdefghijklmnopqrstuvwxyz"
MAX_DRAWS = 100_000

QUESTIONS = {
    "reverse": "Reverse the letters of {}.",
    "sort": "Sort the letters of {}.",
    "add": "Add {} and {}.",
    "multiply": "Multiply {} by {}.",
    "read": "<image>Read it.",
    "digits": "<image>Read it.",
    "dial": "<audio>Which number?",
    "draw": 'Draw "{}".',
}
STATEMENTS = {
    "reverse": "{} reversed is {}.",
    "sort": "{} sorted is {}.",
    "add": "{} plus {} is {}.",
    "multiply": "{} times {} is {}.",
    "read": "{} is {}.",
    "digits": "Scan {} is {}.",
    "dial": "{} is dialled as {}.",
    "draw": "{} is drawn as {}.",
}
ARITHMETIC = {"add": "+", "multiply": "*"}
PICTURED = ("read", "digits", "draw")
"""Problems with a picture of a number, in the question or in the answer."""
NUMBERS = (*PICTURED, "dial")
"""Problems about a number that is seen or heard."""


@dataclass(frozen=True)
class Problem:
    """A question of one kind about a word, a number, or two numbers."""

    kind: str
    """A key of ``QUESTIONS``."""
    operands: tuple[str, ...]
    """The word or numbers; of handwritten digits the indices of their scans, in one text with spaces."""

    @property
    def prompt(self) -> str:
        """The question in words."""
        return QUESTIONS[self.kind].format(*self.operands)

    @property
    def answer(self) -> str:
        """The correct answer."""
        if self.kind in ARITHMETIC:
            numbers = map(int, self.operands)
            return str(sum(numbers) if self.kind == "add" else math.prod(numbers))
        word = self.operands[0]
        if self.kind == "digits":
            return "".join(map(digits.label_scan, self.scans))
        if self.kind in NUMBERS:
            return word
        return word[::-1] if self.kind == "reverse" else "".join(sorted(word))

    @property
    def scans(self) -> list[int]:
        """Indices of the scans of handwritten digits that are shown."""
        return [int(scan) for scan in self.operands[0].split()]

    def picture(self, generator: torch.Generator) -> bytes:
        """A PNG file that shows the number."""
        return digits.draw_digits(self.scans) if self.kind == "digits" else render(self.answer, generator)

    @property
    def call(self) -> str:
        """The answer with a call of the calculator, the result included."""
        return f"calc({ARITHMETIC[self.kind].join(self.operands)})={self.answer}"

    @property
    def statement(self) -> str:
        """Question and answer in one sentence."""
        return STATEMENTS[self.kind].format(*self.operands, self.answer)

    def fraction(self) -> float:
        """A number in [0, 1), by a hash of the problem alone, which decides whether it is held out.

        Problems that give each other's answer away have the same number: those of abc and cba, or 1 + 2 and 2 + 1.
        """
        twins = [self.operands[0], self.answer] if self.kind == "reverse" else self.operands
        kind = "read" if self.kind in PICTURED else self.kind  # a number held out from reading is held out from drawing
        digest = hashlib.blake2b("/".join([kind, *sorted(twins)]).encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") / 2**64


class SyntheticRows:
    """Rows of problems; row i is a function of (seed, i).

    Every row has the columns ``text``, ``messages``, ``prompt``, ``chosen``, ``rejected`` (a wrong answer) and
    ``answer``; with several turns the last four are about the last one. Training rows and held-out rows share no
    problem, in no column.
    """

    def __init__(self, config: SyntheticTextConfig, seed: int, held_out: bool) -> None:
        """Takes the kind of problems, the seed of the rows, and whether they are the ones that training never shows."""
        self.config = config
        self.seed = seed
        self.held_out = held_out

    def __len__(self) -> int:
        return max(1, round(self.config.num_rows * self.config.held_out)) if self.held_out else self.config.num_rows

    def __getitem__(self, index: int) -> JsonObject:
        if not 0 <= index < len(self):
            raise IndexError(index)
        generator = keyed_generator(self.seed, "held-out problems" if self.held_out else "problems", index)
        # All draws below come from this one generator: their order must stay, or every row changes.
        problems = [self._draw(generator) for _ in range(self.config.turns)]
        last = problems[-1]
        wrong = wrong_answer(problems[-1], generator)
        answers = [self._shown_answer(problem, generator) for problem in problems]
        return {
            "text": " ".join(problem.statement for problem in problems),
            "messages": [
                message
                for problem, answer in zip(problems, answers, strict=True)
                for message in _question_and_answer(problem.prompt, answer)
            ],
            "prompt": last.prompt,
            "chosen": last.answer,
            "rejected": wrong,
            "answer": last.answer,
        } | self._make_media(problems, generator)

    def describe(self, index: int) -> str:
        """Where the row comes from, for messages."""
        return f"synthetic {'held-out ' * self.held_out}{self.config.problem} row {index + 1}"

    def fingerprint(self) -> str:
        """Identifies the rows, for caches."""
        return f"{self.config.model_dump_json()} {self.seed} {self.held_out}"

    def _make_media(self, problems: list[Problem], generator: torch.Generator) -> dict[str, list[bytes]]:
        """Columns with the sounds or pictures of the problems, as files; none for problems of text alone."""
        if problems[0].kind == "dial":
            return {"audios": [keypad.dial_number(problem.answer, generator) for problem in problems]}
        if problems[0].kind in PICTURED:
            return {"images": [problem.picture(generator) for problem in problems]}
        return {}

    def _shown_answer(self, problem: Problem, generator: torch.Generator) -> str:
        share = self.config.calculator_calls
        if problem.kind == "draw":
            return "<image>"
        return problem.call if share and float(torch.rand((), generator=generator)) < share else problem.answer

    def _draw(self, generator: torch.Generator) -> Problem:
        if self.config.problem == "digits":  # scans are held out, rather than the numbers that they make up
            scans = digits.scans_of(self.config.held_out, self.held_out)
            length = _draw_length(generator, self.config)
            return Problem(
                "digits", (" ".join(str(scans[_draw_integer(generator, len(scans))]) for _ in range(length)),)
            )
        fraction = self.config.held_out if self.held_out else 1 - self.config.held_out
        # A hundred times as many draws as are expected until one is of the wanted kind, and a thousand more.
        for _ in range(min(MAX_DRAWS, 1000 + int(100 / fraction))):
            problem = _draw_problem(generator, self.config)
            if (problem.fraction() < self.config.held_out) == self.held_out:
                return problem
        raise DataError(
            f"data.synthetic: found no {'held-out' if self.held_out else 'training'} problem among those of "
            f"{self.config.min_length} to {self.config.max_length} letters or digits with held_out "
            f"{self.config.held_out}: raise max_length, or bring held_out closer to 0.5"
        )


def render(text: str, generator: torch.Generator) -> bytes:
    """A PNG file of a text in black on white, in one of two font sizes.

    The picture is 16 pixels high, and 8 pixels wide for each letter, of at least two.
    """
    word = render_word(text, default_font(11 + _draw_integer(generator, 2)), 16, 8 * max(len(text), 2), [0, 0])
    return as_png(Image.fromarray(word.permute(1, 2, 0).numpy()))


def wrong_answer(problem: Problem, generator: torch.Generator) -> str:
    """An answer of the same kind that is wrong: two letters swapped, one replaced, or one digit changed."""
    correct = problem.answer
    if problem.kind in (*ARITHMETIC, *NUMBERS):
        position = _draw_integer(generator, len(correct))
        no_leading_zero = position == 0 and len(correct) > 1
        digits = [digit for digit in "0123456789"[no_leading_zero:] if digit != correct[position]]
        return correct[:position] + digits[_draw_integer(generator, len(digits))] + correct[position + 1 :]
    pairs = [  # of different letters, whose swap changes the word
        (i, j) for j in range(len(correct)) for i in range(j) if correct[i] != correct[j]
    ]
    letters = list(correct)
    if pairs:
        i, j = pairs[_draw_integer(generator, len(pairs))]
        letters[i], letters[j] = letters[j], letters[i]
    else:
        letters[-1] = LETTERS[(LETTERS.index(letters[-1]) + 1) % len(LETTERS)]
    return "".join(letters)


def _draw_problem(generator: torch.Generator, config: SyntheticTextConfig) -> Problem:
    if config.problem in ARITHMETIC:
        return Problem(config.problem, (_draw_number(generator, config), _draw_number(generator, config)))
    if config.problem == "read_or_draw":
        return Problem(("read", "draw")[_draw_integer(generator, 2)], (_draw_number(generator, config),))
    if config.problem in NUMBERS:
        return Problem(config.problem, (_draw_number(generator, config),))
    letters = [LETTERS[_draw_integer(generator, len(LETTERS))] for _ in range(_draw_length(generator, config))]
    return Problem(config.problem, ("".join(letters),))


def _draw_number(generator: torch.Generator, config: SyntheticTextConfig) -> str:
    length = _draw_length(generator, config)
    first = _draw_integer(generator, 10) if length == 1 else 1 + _draw_integer(generator, 9)
    return str(first) + "".join(str(_draw_integer(generator, 10)) for _ in range(length - 1))


def _draw_length(generator: torch.Generator, config: SyntheticTextConfig) -> int:
    return config.min_length + _draw_integer(generator, config.max_length - config.min_length + 1)


def _draw_integer(generator: torch.Generator, below: int) -> int:
    """Draws an integer from 0 to ``below - 1``."""
    return int(torch.randint(below, (), generator=generator))


def _question_and_answer(prompt: str, answer: str) -> list[dict[str, str]]:
    """A question and its answer as messages."""
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
