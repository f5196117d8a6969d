"""Rewards that ask a judge: a rubric, UnifiedReward, a transcription, the probability of Yes, comparisons of two."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, cast

from sfumato.errors import ConfigError
from sfumato.rewards.base import Failure, Sample
from sfumato.rewards.http.chat_completions import ChatReply
from sfumato.rewards.judge import Judge, UnreadableError, choice_after_answer, final_text, number_after
from sfumato.rewards.judging.template import read_file
from sfumato.rewards.ocr import ocr_target, ocr_text_score


@dataclass(frozen=True, kw_only=True)
class RubricReward(Judge):
    """A judge's score by a rubric of your own, scaled to 0 to 1.

    Raises ConfigError when the rubric is empty or its file missing, or when ``score_range`` is none.
    """

    type: ClassVar[str] = "rubric"

    rubric: str
    """What is good and what is not: a text, or the path of a .txt or .md file that holds it."""
    score_range: tuple[float, float] = (1.0, 10.0)
    """Lowest and highest score that the judge may give."""

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.score_range
        if not (math.isfinite(low) and math.isfinite(high) and low < high):
            raise ConfigError(f"score_range of reward {self.label!r} must be low and high, not {low:g} and {high:g}")
        if not self.variables()["rubric"]:
            raise ConfigError(f"rubric of reward {self.label!r} is empty: say what is good and what is not")

    def variables(self) -> dict[str, object]:
        """The rubric, and the range as ``low`` and ``high``."""
        low, high = (f"{bound:g}" for bound in self.score_range)
        return {"rubric": self._read_rubric().strip(), "low": low, "high": high}

    def read(self, reply: ChatReply, *samples: Sample) -> float:
        """``(score - low) / (high - low)`` of the number after the last ``Score:``."""
        low, high = self.score_range
        return (number_after(final_text(reply), "Score", low, high) - low) / (high - low)

    def _read_rubric(self) -> str:
        is_path = self.rubric.endswith((".txt", ".md")) and "\n" not in self.rubric
        if is_path and not Path(self.rubric).is_file():
            raise ConfigError(f"rubric of reward {self.label!r}: no file {self.rubric}")
        return _read_once(Path(self.rubric)) if is_path else self.rubric


_read_once = functools.cache(read_file)
"""A file as it was when it was first asked for, whoever edits it during the run."""


@dataclass(frozen=True, kw_only=True)
class UnifiedReward(Judge):
    """Final score of UnifiedReward, 1 to 5, divided by 5."""

    type: ClassVar[str] = "unified_reward"
    modality: ClassVar[str] = "image"

    def read(self, reply: ChatReply, *samples: Sample) -> float:
        """The number after ``Final Score:``, divided by 5."""
        return number_after(final_text(reply), "Final Score", 1, 5) / 5


@dataclass(frozen=True, kw_only=True)
class QwenVLOcrReward(Judge):
    """Closeness of a vision-language model's transcription to the text quoted in the prompt, from 0 to 1."""

    type: ClassVar[str] = "qwenvl_ocr"
    modality: ClassVar[str] = "image"
    takes_video: ClassVar[bool] = False  # the mean over the frames, as for ``ocr``

    max_tokens: int = 256
    """Length of a transcription; one that is cut off does not count."""

    def check_row(self, prompt: str, metadata: dict[str, object]) -> None:
        """Raises DataError when the row has no target."""
        ocr_target(prompt, metadata)
        super().check_row(prompt, metadata)

    def read(self, reply: ChatReply, *samples: Sample) -> float:
        """``ocr_text_score`` of the reply."""
        return ocr_text_score(final_text(reply), ocr_target(samples[0].prompt, samples[0].metadata))


_NUM_CANDIDATES = 20  # as many as OpenAI's API and vLLM give
_AROUND_A_WORD = " \t\n▁Ġ\"'*_.,!"  # spaces also as tokens of SentencePiece and of byte-level BPE write them


@dataclass(frozen=True, kw_only=True)
class YesProbability(Judge):
    """Probability that the answer begins with Yes and not with No, from 0 to 1."""

    type: ClassVar[str] = "yes_probability"
    options: ClassVar[Mapping[str, object]] = {"logprobs": True, "top_logprobs": _NUM_CANDIDATES}

    max_tokens: int = 1
    """Length of a reply, of which only the first token counts."""

    def check_reply(self, reply: ChatReply) -> None:
        """Raises ConfigError when there are no log-probabilities."""
        if not reply.first_token:
            raise ConfigError(
                f"reward {self.label!r}: the server of model {self.model!r} gives no top_logprobs: use one that does, "
                "such as vLLM"
            )

    def read(self, reply: ChatReply, *samples: Sample) -> float:
        """``P(Yes) / (P(Yes) + P(No))``, each the sum over the ways to write it among the 20 likeliest tokens."""
        if not reply.first_token:
            raise UnreadableError("no top_logprobs")
        words = [(token.strip(_AROUND_A_WORD).casefold(), logprob) for token, logprob in reply.first_token]
        yes, no = (math.fsum(math.exp(p) for word, p in words if word == wanted) for wanted in ("yes", "no"))
        if yes + no == 0:
            raise UnreadableError(f"neither Yes nor No among the {len(words)} likeliest first tokens")
        return yes / (yes + no)


@dataclass(frozen=True, kw_only=True)
class PairwisePreference(Judge):
    """Fraction of the comparisons within its group that a sample wins, from 0 to 1; a tie is half a win.

    Raises ConfigError when ``opponents`` is odd or negative.
    """

    type: ClassVar[str] = "pairwise_preference"
    groupwise: ClassVar[bool] = True
    shows: ClassVar[tuple[str, ...]] = ("first", "second")

    opponents: int = 0
    """Others that each sample is compared with, an even number; 0: all others of its group."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.opponents < 0 or self.opponents % 2:
            raise ConfigError(f"opponents of reward {self.label!r} must be even and not negative: {self.opponents}")

    def read(self, reply: ChatReply, *samples: Sample) -> float:
        """1 when the first is better, 0 when the second is, 0.5 when neither."""
        return choice_after_answer(final_text(reply))

    def score(self, samples: list[Sample]) -> Sequence[float | Failure]:
        """The mean over a sample's pairs, each asked in both orders.

        A pair without both verdicts counts for neither of its samples; one with less than half of its pairs has no
        value. The only sample of a group has 0.5, which is the mean of every group.
        """
        if len(samples) == 1:
            return [0.5]
        pairs = _build_pairs(len(samples), self.opponents)
        orders = [order for pair in pairs for order in (pair, pair[::-1])]
        verdicts = self.judge([(samples[first], samples[second]) for first, second in orders])
        wins: list[list[float]] = [[] for _ in samples]
        lost: list[list[Failure]] = [[] for _ in samples]
        for (a, b), forth, back in zip(pairs, verdicts[::2], verdicts[1::2], strict=True):
            failure = next((verdict for verdict in (forth, back) if isinstance(verdict, Failure)), None)
            if failure is not None:
                self.tally.note(f"a pair without verdict: {failure.reason}")
                lost[a].append(failure)
                lost[b].append(failure)
            else:
                # the mean of both orders, so that a judge's liking for the first place cancels out
                won = (cast("float", forth) + 1 - cast("float", back)) / 2
                wins[a].append(won)
                wins[b].append(1 - won)
        return [
            sum(won_pairs) / len(won_pairs) if len(won_pairs) >= max(len(lost_pairs), 1) else lost_pairs[0]
            for won_pairs, lost_pairs in zip(wins, lost, strict=True)
        ]


def _build_pairs(num_samples: int, opponents: int) -> list[tuple[int, int]]:
    """All pairs, or those of neighbours on a ring, so that all samples have equally many."""
    if not opponents or opponents >= num_samples - 1:
        return list(itertools.combinations(range(num_samples), 2))
    steps = range(1, opponents // 2 + 1)
    return [(index, (index + step) % num_samples) for index in range(num_samples) for step in steps]
