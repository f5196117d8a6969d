"""Kinds of rollout, which draw a sample for a prompt with an engine: their base, what they are given and return."""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np

from sfumato.data.text.chat_message import Messages
from sfumato.data.text.prompt_template import PromptTemplate, Tools
from sfumato.data.text.prompts import TextPrompt
from sfumato.rewards.base import Sample
from sfumato.rollout.engines.base import Engine, Sampling
from sfumato.rollout.text.tokens import TokenSequence


def request_seed(seed: int, purpose: str, iteration: int, sample_id: int, turn: int = 0) -> int:
    """Key of the noise of one completion, from 0 to 2^63 - 1: a function of its arguments alone.

    Args:
        seed: of the run.
        purpose: ``rollout`` for training, ``evaluation``, or another name that keeps noises apart.
        iteration: the iteration in which the sample is drawn.
        sample_id: unique within the iteration.
        turn: index of the completion within the sample, from 0.
    """
    text = "/".join(["completion", str(int(seed)), purpose, *(str(int(key)) for key in (iteration, sample_id, turn))])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


@dataclass(frozen=True)
class SampleKeys:
    """The key of a sample's noise."""

    seed: int
    """Of the run."""
    iteration: int
    """The iteration in which the sample is drawn."""
    sample_id: int
    """Unique within the iteration."""
    purpose: str = "rollout"
    """``rollout`` for training; ``evaluation``."""

    def request_seed(self, turn: int = 0) -> int:
        """Key of the noise of the sample's completion of index ``turn``."""
        return request_seed(self.seed, self.purpose, self.iteration, self.sample_id, turn)


@dataclass(frozen=True)
class LengthLimits:
    """How long a sample may become."""

    max_new_tokens: int
    """Most tokens after the prompt, over all turns, those that the policy did not draw included."""
    max_sequence_tokens: int
    """Most tokens of a sequence, prompt included."""

    def room(self, prompt_tokens: int, sequence_tokens: int) -> int:
        """How many tokens may still follow; 0 where there is no room.

        Args:
            prompt_tokens: length of the sequence's prompt.
            sequence_tokens: length of the sequence now, prompt included.
        """
        remaining_new = self.max_new_tokens - (sequence_tokens - prompt_tokens)
        return max(min(remaining_new, self.max_sequence_tokens - sequence_tokens), 0)


@dataclass(frozen=True)
class DrawnText:
    """What was drawn for a prompt."""

    sequences: list[TokenSequence]
    """Mostly one; several where an agent began conversations anew; none where nothing was drawn before it failed. The
    last one's ``finish_reason`` is that of the sample, as ``is_truncated`` has it."""
    text: str
    """The answer, as rewards see it."""
    messages: Messages | None = None
    """The whole conversation, prompt and tools included; None where the prompt was no conversation."""
    is_truncated: bool = False
    """Whether it ended at a limit of its length."""
    metadata: dict[str, object] = field(default_factory=dict)
    """What the rollout adds for rewards to the metadata of the prompt."""
    damage: str = ""
    """Why it is not to be scored, such as an environment that raised an error."""

    def __post_init__(self) -> None:
        if self.sequences:  # its last turn may have stopped by itself at the limit of turns, or before a long result
            last = replace(self.sequences[-1], finish_reason="length" if self.is_truncated else "stop")
            object.__setattr__(self, "sequences", [*self.sequences[:-1], last])  # the caller's list stays as it is

    @property
    def num_tokens(self) -> int:
        """Tokens that the policy drew."""
        return sum(sequence.num_drawn for sequence in self.sequences)

    def mark_unknown_tokens(self, without_text: frozenset[int]) -> DrawnText:
        """The same, marked as damaged where a drawn token is in ``without_text``, ids that the tokenizer does not have.

        Such ids exist where a model's vocabulary is padded beyond that of its tokenizer. They decode to nothing, so
        rewards would score another text than the one that was drawn.
        """
        tokens = {int(token) for sequence in self.sequences for token in sequence.token_ids[sequence.drawn]}
        unknown_tokens = sorted(tokens & without_text)
        if not unknown_tokens or self.damage:
            return self
        return replace(self, damage=f"it drew the token {unknown_tokens[0]}, which the tokenizer has not")

    def sample(self, prompt: TextPrompt, group_id: int) -> Sample:
        """The sample as rewards see it, one of the group ``group_id`` of its prompt."""
        return Sample(
            prompt=prompt.text,
            metadata={**prompt.metadata, **self.metadata},
            group_id=group_id,
            text=self.text,
            messages=self.messages,
            num_tokens=self.num_tokens,
            is_truncated=self.is_truncated,
            damage=self.damage or self._describe_clash(prompt) or _odd_log_prob(self.sequences),
            images=prompt.images,
        )

    def _describe_clash(self, prompt: TextPrompt) -> str:
        """What the rollout adds that the row has already, such as the correct answer; empty where nothing is."""
        shared = self.metadata.keys() & prompt.metadata.keys()
        names = sorted(name for name in shared if not _is_equal(self.metadata[name], prompt.metadata[name]))
        if not names:
            return ""
        return f"the rollout gives {names[0]!r} to rewards, which is a column of the row, too: rename one of them"


def _is_equal(first: object, second: object) -> bool:
    try:
        return bool(first == second)
    except Exception:  # of arrays, and of what a user's object raises
        return False


def _odd_log_prob(sequences: Sequence[TokenSequence]) -> str:
    """What is wrong with the log-probabilities that an engine gave; empty where nothing is.

    They may exceed 0 by rounding only.
    """
    for sequence in sequences:
        values = sequence.log_probs[sequence.drawn]
        if not np.isfinite(values).all() or (values > 1e-3).any():
            worst = next(float(value) for value in values if not math.isfinite(value) or value > 1e-3)
            return f"the engine gave a drawn token the log-probability {worst}"
    return ""


@dataclass(frozen=True, kw_only=True)
class RolloutKind(ABC):
    """Base of every kind. A subclass states ``type: ClassVar[str]`` and defines ``draw``.

    A kind from outside of the library is named by its import path, ``kind: {type: my_module:MyKind}``.
    """

    type: ClassVar[str]
    modality: ClassVar[str] = "text"
    """What rewards are given."""
    takes_images: ClassVar[bool] = False
    """Whether the images of a prompt are passed to the engine."""

    def prepare(self, template: PromptTemplate) -> None:  # noqa: B027  (most kinds need nothing)
        """Loads what ``draw`` needs, so that a missing piece is noticed before the first step.

        Raises:
            ConfigError: when the kind does not fit tokenizer and chat template, or an import path leads nowhere.
            MissingDependencyError: holds the command that installs what is missing.
        """

    def tools(self) -> Tools | None:
        """JSON schemas that the chat template shows with each prompt; None where there are none."""
        return None

    @abstractmethod
    async def draw(
        self,
        engine: Engine,
        prompt: TextPrompt,
        keys: SampleKeys,
        sampling: Sampling,
        template: PromptTemplate,
        limits: LengthLimits,
    ) -> DrawnText:
        """Draws one sample. Many calls are awaited at a time in one event loop, and the engine batches them.

        Args:
            engine: draws the tokens.
            prompt: text and tokens.
            keys: key the sample's noise.
            sampling: how tokens are drawn.
            template: the tokenizer with the chat template.
            limits: of the sample's length.

        Returns:
            The sample. An error of this sample alone (of a tool, an environment, an agent) is in its ``damage``.

        Raises:
            UserError: a mistake that a person has to mend, such as an import path that leads nowhere.
            EngineError: when the engine died.
        """
