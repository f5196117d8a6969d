"""A token sequence of a language model that grows at its end, by tokens of the policy and tokens of others."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sfumato.data.media.document_media import MediaRefs
from sfumato.rollout.engines.base import Completion, Engine, GenerationRequest, Sampling
from sfumato.rollout.text.tokens import FinishReason, TokenSequence

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
