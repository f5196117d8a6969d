"""A token sequence of a language model that grows at its end: tokens that are given, and tokens that are drawn."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sfumato.data.media.vision import Images
from sfumato.rollout.engines.base import Completion, Engine, GenerationRequest, Sampling
from sfumato.rollout.text.tokens import FinishReason, TokenSequence

_ARRAYS = {"token_ids": np.int32, "drawn": np.bool_, "log_probs": np.float32, "versions": np.int32}


@dataclass
class GrowingSequence:
    """A prompt with what follows it, or without a prompt an answer that is not whole yet.

    What stands in it is never tokenised again. Its pickle takes 13 bytes a token.
    """

    token_ids: list[int] = field(default_factory=list)
    drawn: list[bool] = field(default_factory=list)
    """Whether the policy drew the token."""
    log_probs: list[float] = field(default_factory=list)
    """That tokens were drawn with, in nats; 0 of those that were given."""
    versions: list[int] = field(default_factory=list)
    """Of the policy that drew the token; -1 of those that were given."""
    finish_reason: FinishReason | None = None
    """None while it is unfinished."""
    images: Images | None = None
    """Those that stand in the prompt."""
    num_prompt_tokens: int = 0

    @classmethod
    def after_prompt(cls, token_ids: Sequence[int], images: Images | None = None) -> GrowingSequence:
        """Begins with a prompt, in which images may stand."""
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
        """Appends what the policy drew."""
        lengths = {len(completion.token_ids), len(completion.log_probs), len(completion.versions)}
        assert len(lengths) == 1, f"tokens, log-probs and versions must be equally many, not {lengths}"
        self.token_ids += completion.token_ids
        self.drawn += [True] * len(completion.token_ids)
        self.log_probs += completion.log_probs
        self.versions += completion.versions

    def truncate(self, length: int) -> None:
        """Forgets what stands beyond so many tokens, and that it ended there."""
        if len(self.token_ids) > length:
            del self.token_ids[length:], self.drawn[length:], self.log_probs[length:], self.versions[length:]
            self.finish_reason = None

    def freeze(self, finish_reason: FinishReason | None = None) -> TokenSequence:
        """The sequence as it is now."""
        return TokenSequence(
            np.array(self.token_ids, np.int32),
            np.array(self.drawn, bool),
            np.array(self.log_probs, np.float32),
            np.array(self.versions, np.int32),
            finish_reason or self.finish_reason or "stop",
            self.images,
        )

    async def draw(
        self, engine: Engine, seed: int, max_new_tokens: int, sampling: Sampling, first_position: int = 0
    ) -> list[int]:
        """Has the engine draw a completion and appends it.

        One that was aborted so that weights could change goes on with its noise and its tokens, by the new weights; the
        engine lets it wait for ``resume``.

        Args:
            engine: that draws.
            seed: of ``request_seed``.
            max_new_tokens: at least 1.
            sampling: how.
            first_position: tokens of the same completion that stand at the end already.

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
            await asyncio.sleep(0)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {name: np.array(getattr(self, name), dtype) for name, dtype in _ARRAYS.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, **{name: state[name].tolist() for name in _ARRAYS})
