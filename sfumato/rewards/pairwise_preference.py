"""How often is a sample preferred to the others of its group? From a judge's comparisons of two."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from sfumato.errors import ConfigError
from sfumato.rewards.base import Failure, Sample
from sfumato.rewards.http.chat_completions import Reply
from sfumato.rewards.judge import Judge
from sfumato.rewards.judging.replies import choice_after_answer, final_text


@dataclass(frozen=True, kw_only=True)
class PairwisePreference(Judge):
    """Share of the comparisons within its group that a sample wins, from 0 to 1; a tie is half a win.

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

    def read(self, reply: Reply, *samples: Sample) -> float:
        """1 when the first is better, 0 when the second is, 0.5 when neither."""
        return choice_after_answer(final_text(reply))

    def score(self, samples: list[Sample]) -> Sequence[float | Failure]:
        """The mean over a sample's pairs, each asked in both orders.

        A pair without both verdicts counts for neither of its samples; one with less than half of its pairs has no
        value. The only sample of a group has 0.5, which is the mean of every group.
        """
        if len(samples) == 1:
            return [0.5]
        pairs = _pairs(len(samples), self.opponents)
        orders = [order for pair in pairs for order in (pair, pair[::-1])]
        verdicts = self.judge([(samples[first], samples[second]) for first, second in orders])
        wins: list[list[float]] = [[] for _ in samples]
        lost: list[list[Failure]] = [[] for _ in samples]
        for (a, b), forth, back in zip(pairs, verdicts[::2], verdicts[1::2], strict=True):
            failure = next((each for each in (forth, back) if isinstance(each, Failure)), None)
            if failure is not None:
                self.tally.note(f"a pair without verdict: {failure.reason}")
                lost[a].append(failure)
                lost[b].append(failure)
            else:
                share = (forth + 1 - back) / 2
                wins[a].append(share)
                wins[b].append(1 - share)
        return [
            sum(mine) / len(mine) if len(mine) >= max(len(missing), 1) else missing[0]
            for mine, missing in zip(wins, lost, strict=True)
        ]


def _pairs(num_samples: int, opponents: int) -> list[tuple[int, int]]:
    """All pairs, or those of neighbours on a ring, so that all samples have equally many."""
    if not opponents or opponents >= num_samples - 1:
        return list(itertools.combinations(range(num_samples), 2))
    steps = range(1, opponents // 2 + 1)
    return [(index, (index + step) % num_samples) for index in range(num_samples) for step in steps]
