"""What a language model drew: sequences of tokens with the log-probability and the policy version of each.

Tokens are never made from text again: what the engine was given and what it drew is what is trained on. B samples; L
tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from sfumato.algorithms.rows import by_row
from sfumato.data.media.vision import Images
from sfumato.rollout.batch import Rollout

FinishReason = Literal["stop", "length", "abort"]
"""Why a completion ended: a stop token, the limit of its length, or somebody who no longer wants it."""


@dataclass(frozen=True)
class TokenSequence:
    """A prompt with what the policy drew after it, perhaps in several turns with other tokens between them."""

    token_ids: np.ndarray
    """int32 ``[L]``."""
    drawn: np.ndarray
    """bool ``[L]``: tokens that the policy drew, each of them a decision; the others are the prompt, answers of tools
    and whatever else it was given."""
    log_probs: np.ndarray
    """float32 ``[L]``: natural logarithms of the probabilities that the drawn tokens were drawn with; 0 elsewhere."""
    versions: np.ndarray
    """int32 ``[L]``: version of the policy that drew each token; -1 elsewhere."""
    finish_reason: FinishReason = "stop"
    """Of the last turn."""
    images: Images | None = None
    """Those that stand in the prompt."""

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.drawn), len(self.log_probs), len(self.versions)}
        assert len(lengths) == 1, f"token_ids, drawn, log_probs and versions must be equally long, not {lengths}"

    @property
    def num_drawn(self) -> int:
        """Decisions in it."""
        return int(self.drawn.sum())


@dataclass(frozen=True, kw_only=True)
class TextRollout(Rollout):
    """B samples of a language model."""

    sequences: list[list[TokenSequence]] = by_row()
    """B lists: the sequences of a sample, mostly one; several where an agent began anew or had others work for it. All
    of them share the sample's reward."""

    @property
    def num_rows(self) -> list[int]:
        """Tokens of each sample that the policy drew."""
        return [sum(sequence.num_drawn for sequence in sequences) for sequences in self.sequences]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return [sum(len(sequence.token_ids) for sequence in sequences) for sequences in self.sequences]


def single_turn(
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    versions: Sequence[int],
    finish_reason: FinishReason,
) -> TokenSequence:
    """A prompt with one completion."""
    given = len(prompt_ids)
    return TokenSequence(
        np.array([*prompt_ids, *token_ids], np.int32),
        np.arange(given + len(token_ids)) >= given,
        np.array([0.0] * given + list(log_probs), np.float32),
        np.array([-1] * given + list(versions), np.int32),
        finish_reason,
    )
