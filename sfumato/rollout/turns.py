"""A sample of a language model in the making: tokens that are given and tokens that are drawn, turn by turn."""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from sfumato.data.messages import Messages
from sfumato.data.text_prompts import TextPrompt
from sfumato.data.vision import Images
from sfumato.rewards.base import Sample
from sfumato.rollout.engines.base import Completion, Engine, GenerationRequest, Sampling
from sfumato.rollout.tokens import FinishReason, TokenSequence


def request_seed(seed: int, purpose: str, iteration: int, sample_id: int, turn: int = 0) -> int:
    """Key of the noise of one completion, from 0 to 2^63 - 1: a function of its arguments alone.

    Args:
        seed: of the run.
        purpose: what the sample is for, such as ``rollout`` or ``evaluation``.
        iteration: that the sample is drawn in.
        sample_id: number that no other sample of the iteration has.
        turn: the how-manieth completion of the sample.
    """
    text = "/".join(["completion", str(int(seed)), purpose, *(str(int(key)) for key in (iteration, sample_id, turn))])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class SampleKeys:
    """What the noise of a sample is keyed by."""

    seed: int
    """Of the run."""
    iteration: int
    """That the sample is drawn in."""
    sample_id: int
    """Number that no other sample of the iteration has."""
    purpose: str = "rollout"
    """``rollout`` for training; ``evaluation``."""

    def request_seed(self, turn: int = 0) -> int:
        """Key of the noise of the sample's completion number ``turn``."""
        return request_seed(self.seed, self.purpose, self.iteration, self.sample_id, turn)


@dataclass(frozen=True)
class LengthLimits:
    """How long a sample may become."""

    max_new_tokens: int
    """Most tokens after the prompt, of all turns together, given ones included."""
    max_sequence_tokens: int
    """Most tokens of a sequence, prompt included."""

    def room(self, prompt_tokens: int, sequence_tokens: int) -> int:
        """Tokens that may still follow, 0 where there is no room.

        Args:
            prompt_tokens: of the sequence.
            sequence_tokens: of the sequence now, prompt included.
        """
        new = self.max_new_tokens - (sequence_tokens - prompt_tokens)
        return max(min(new, self.max_sequence_tokens - sequence_tokens), 0)


@dataclass(frozen=True)
class DrawnText:
    """What came of a prompt."""

    sequences: list[TokenSequence]
    """Mostly one; none where the sample was damaged before its first token."""
    text: str
    """The answer, as rewards see it."""
    messages: Messages | None = None
    """The whole conversation, prompt and tools included; None where the prompt was no conversation."""
    is_truncated: bool = False
    """Whether it ended at a limit of its length."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """What the rollout found out for rewards, beside the metadata of the prompt."""
    damage: str = ""
    """Why it is not to be scored, such as an environment that raised an error."""

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy drew."""
        return sum(sequence.num_drawn for sequence in self.sequences)

    def checked(self, without_text: frozenset[int]) -> DrawnText:
        """The same, damaged where a drawn token is one of these, which the tokenizer has not: it decodes to nothing, so
        that what is scored would not be what was drawn."""
        tokens = {int(token) for sequence in self.sequences for token in sequence.token_ids[sequence.drawn]}
        strange = sorted(tokens & without_text)
        if not strange or self.damage:
            return self
        return replace(self, damage=f"it drew the token {strange[0]}, which the tokenizer has not")

    def sample(self, prompt: TextPrompt, group_id: int) -> Sample:
        """The sample as rewards see it."""
        return Sample(
            prompt=prompt.text,
            metadata={**prompt.metadata, **self.metadata},
            group_id=group_id,
            text=self.text,
            messages=self.messages,
            num_tokens=self.num_tokens,
            is_truncated=self.is_truncated,
            damage=self.damage or _odd_log_prob(self.sequences),
            images=prompt.images,
        )


class SequenceInMaking:
    """A token sequence that grows at its end. What stands in it is never tokenised again."""

    def __init__(self, token_ids: Sequence[int], images: Images | None = None) -> None:
        """Begins with a prompt, in which images may stand."""
        self.images = images
        self.num_prompt_tokens = len(token_ids)
        self.token_ids: list[int] = []
        self.drawn: list[bool] = []
        self.log_probs: list[float] = []
        self.versions: list[int] = []
        self.finish_reason: FinishReason = "stop"
        self.give(token_ids)

    def __len__(self) -> int:
        return len(self.token_ids)

    def give(self, token_ids: Sequence[int]) -> None:
        """Appends tokens that the policy did not draw."""
        self.token_ids += token_ids
        self.drawn += [False] * len(token_ids)
        self.log_probs += [0.0] * len(token_ids)
        self.versions += [-1] * len(token_ids)

    def take(self, completion: Completion) -> None:
        """Appends what the policy drew."""
        lengths = {len(completion.token_ids), len(completion.log_probs), len(completion.versions)}
        assert len(lengths) == 1, f"tokens, log-probs and versions must be equally many, not {lengths}"
        self.token_ids += completion.token_ids
        self.drawn += [True] * len(completion.token_ids)
        self.log_probs += completion.log_probs
        self.versions += completion.versions
        self.finish_reason = completion.finish_reason

    def finished(self, finish_reason: FinishReason | None = None) -> TokenSequence:
        """The sequence as it is now."""
        return TokenSequence(
            np.array(self.token_ids, np.int32),
            np.array(self.drawn, bool),
            np.array(self.log_probs, np.float32),
            np.array(self.versions, np.int32),
            finish_reason or self.finish_reason,
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
            self.take(completion)
            if completion.finish_reason != "abort":
                return self.token_ids[first:]
            if len(self) - first >= max_new_tokens:
                self.finish_reason = "length"
                return self.token_ids[first:]
            await asyncio.sleep(0)


def _odd_log_prob(sequences: Sequence[TokenSequence]) -> str:
    """What is wrong with the log-probabilities that an engine gave; empty where nothing is."""
    for sequence in sequences:
        values = sequence.log_probs[sequence.drawn]
        if not np.isfinite(values).all() or (values > 1e-3).any():
            worst = next(float(value) for value in values if not math.isfinite(value) or value > 1e-3)
            return f"the engine gave a drawn token the log-probability {worst}"
    return ""
