"""What a language model drew: sequences of tokens with the log-probability and the policy version of each.

Sequences are never tokenised again: an update trains on the very tokens that the engine was given and drew. Shapes: B
samples, L tokens of a sequence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sfumato.algorithms.rows import by_row
from sfumato.data.media.document_media import MediaRefs
from sfumato.rollout.batch import Rollout
from sfumato.rollout.engines.base import Completion, Engine, FinishReason, GenerationRequest, Sampling

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


_ARRAYS = {"token_ids": np.int32, "drawn": np.bool_, "log_probs": np.float32, "versions": np.int32}


@dataclass
class GrowingSequence:
    """A prompt and the tokens after it; or, without a prompt, an answer that may still be unfinished.

    Its tokens are never made from text again. Its pickle takes 13 bytes a token.
    """

    token_ids: list[int] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    """Whether the policy drew the token."""
    log_probs: list[float] = field(default_factory=list)
    """Log-probabilities in nats that tokens were drawn with; 0 for tokens that the policy did not draw."""
    versions: list[int] = field(default_factory=list)
    """Version of the policy that drew the token; -1 for tokens that it did not draw."""
    finish_reason: FinishReason | None = None
    """None while it is unfinished."""
    images: MediaRefs | None = None
    """Those that stand in the prompt."""
    num_prompt_tokens: int = 0

    @classmethod
    def after_prompt(cls, token_ids: Sequence[int], images: MediaRefs | None = None) -> GrowingSequence:
        """A sequence that consists of a prompt, with the images that the prompt holds."""
        sequence = cls(images=images, num_prompt_tokens=len(token_ids))
        sequence.append_given(token_ids)
        return sequence

    def __len__(self) -> int:
        return len(self.token_ids)

    def append_given(self, token_ids: Sequence[int]) -> None:
        """Appends tokens that the policy did not draw."""
        self.token_ids += token_ids
        self.drawn += [False] * len(token_ids)
        self.log_probs += [0.0] * len(token_ids)
        self.versions += [-1] * len(token_ids)

    def append_drawn(self, completion: Completion | GrowingSequence) -> None:
        """Appends tokens that the policy drew."""
        lengths = {len(completion.token_ids), len(completion.log_probs), len(completion.versions)}
        assert len(lengths) == 1, f"tokens, log-probs and versions must be equally many, not {lengths}"
        self.token_ids += completion.token_ids
        self.drawn += [True] * len(completion.token_ids)
        self.log_probs += completion.log_probs
        self.versions += completion.versions

    def truncate(self, length: int) -> None:
        """Removes the tokens after the first ``length``; a sequence that loses some is unfinished again."""
        if len(self.token_ids) > length:
            del self.token_ids[length:], self.drawn[length:], self.log_probs[length:], self.versions[length:]
            self.finish_reason = None

    def freeze(self) -> TokenSequence:
        """The sequence as it is now."""
        return TokenSequence(
            np.array(self.token_ids, np.int32),
            np.array(self.drawn, bool),
            np.array(self.log_probs, np.float32),
            np.array(self.versions, np.int32),
            self.finish_reason or "stop",
            self.images,
        )

    async def draw(
        self, engine: Engine, seed: int, max_new_tokens: int, sampling: Sampling, first_position: int = 0
    ) -> list[int]:
        """Has the engine draw a completion and appends it.

        A completion that the engine aborts, so that weights can change, is requested again: it goes on after its
        tokens, with the same noise and the new weights, once the engine resumes.

        Args:
            engine: draws the completion.
            seed: key of the noise, by ``request_seed``.
            max_new_tokens: at least 1.
            sampling: how tokens are drawn.
            first_position: how many tokens of the same completion the sequence ends with already.

        Returns:
            The drawn tokens.

        Raises:
            ConfigError, EngineError: as ``Engine.generate``.
        """
        first = len(self)
        while True:
            so_far = len(self) - first
            request = GenerationRequest(
                list(self.token_ids), seed, max_new_tokens - so_far, first_position + so_far, self.images
            )
            completion = await engine.generate(request, sampling)
            self.append_drawn(completion)
            self.finish_reason = completion.finish_reason
            if completion.finish_reason != "abort":
                return self.token_ids[first:]
            if len(self) - first >= max_new_tokens:
                self.finish_reason = "length"
                return self.token_ids[first:]
            # A paused engine may abort at once: whoever resumes it needs a turn of the event loop.
            await asyncio.sleep(0)

    def __getstate__(self) -> dict[str, Any]:
        """The lists as arrays, which take 13 bytes a token."""
        return self.__dict__ | {name: np.array(getattr(self, name), dtype) for name, dtype in _ARRAYS.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, **{name: state[name].tolist() for name in _ARRAYS})


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
