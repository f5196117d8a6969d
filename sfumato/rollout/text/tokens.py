"""What a language model drew: sequences of tokens with the log-probability and the policy version of each.

Sequences are never tokenised again: an update trains on the very tokens that the engine was given and drew. Shapes: B
samples, L tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from sfumato.algorithms.rows import by_row
from sfumato.data.media.document_media import MediaRefs
from sfumato.rollout.batch import Rollout

FinishReason = Literal["stop", "length", "abort"]
"""Why a completion ended: by a stop token or text, at the limit of its length, or because it was aborted."""


MOST_TOKENS = 4096
"""Most tokens of a sample that the run folder has the ids of."""


@dataclass(frozen=True)
class TokenSequence:
    """A prompt and the tokens after it, in one turn or several turns of the policy with other tokens between them."""

    token_ids: np.ndarray
    """int32 ``[L]``."""
    drawn: np.ndarray
    """bool ``[L]``: tokens that the policy drew, each of them a decision; the others are the prompt, results of tools
    and other tokens between turns."""
    log_probs: np.ndarray
    """float32 ``[L]``: natural logarithms of the probabilities that the drawn tokens were drawn with; 0 elsewhere."""
    versions: np.ndarray
    """int32 ``[L]``: version of the policy that drew each token; -1 elsewhere."""
    finish_reason: FinishReason = "stop"
    """Of the last turn; ``length``, too, where the sample ended at its limit of turns."""
    images: MediaRefs | None = None
    """The images of the prompt."""

    def __post_init__(self) -> None:
        lengths = {len(self.token_ids), len(self.drawn), len(self.log_probs), len(self.versions)}
        assert len(lengths) == 1, f"token_ids, drawn, log_probs and versions must be equally long, not {lengths}"

    @property
    def num_drawn(self) -> int:
        """How many decisions it has."""
        return int(self.drawn.sum())


@dataclass(frozen=True, kw_only=True)
class TextRollout(Rollout):
    """B samples of a language model."""

    sequences: list[list[TokenSequence]] = by_row()
    """B lists: the sequences of a sample, mostly one; several where an agent has more than one conversation. All of
    them share the sample's reward."""

    @property
    def num_rows(self) -> list[int]:
        """Tokens of each sample that the policy drew."""
        return [sum(sequence.num_drawn for sequence in sequences) for sequences in self.sequences]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each sample."""
        return [sum(len(sequence.token_ids) for sequence in sequences) for sequences in self.sequences]

    def described(self, row: int) -> dict[str, object]:
        """Ids and log-probabilities of the tokens that the policy drew for a sample, the first ones of many, and why
        the last turn ended."""
        sequences = self.sequences[row]
        if not sequences:
            return {"token_ids": [], "log_probs": []}
        token_ids = np.concatenate([sequence.token_ids[sequence.drawn] for sequence in sequences])
        log_probs = np.concatenate([sequence.log_probs[sequence.drawn] for sequence in sequences])
        return {
            "finish_reason": sequences[-1].finish_reason,
            "token_ids": token_ids[:MOST_TOKENS].tolist(),
            # the fewest digits that make the same float32
            "log_probs": [float(str(value)) for value in log_probs[:MOST_TOKENS]],
        }
