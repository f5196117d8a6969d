"""What an engine that generates text offers, whoever wrote it.

Token ids go in and come out; nothing is made into text on the way. A request brings the seed of its noise, so that what
is drawn for it depends on nothing else: not on the other requests of a batch, on ranks or on a restart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from sfumato.data.media.vision import Images
from sfumato.rollout.text.tokens import FinishReason


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: the same for all requests of a rollout."""

    temperature: float = 1.0
    """Divides the logits before anything else; 0 takes the likeliest token."""
    top_p: float = 1.0
    """Only the likeliest tokens with this probability together are drawn; 1 leaves out none."""
    top_k: int = 0
    """Only so many of the likeliest tokens are drawn; 0 leaves out none."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens that end a completion; they are part of it."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion; the token that completes one is part of it."""


@dataclass(frozen=True)
class GenerationRequest:
    """One completion that is to be drawn."""

    prompt_ids: Sequence[int]
    """Tokens that stand before it, at least one."""
    seed: int
    """From 0 to 2^63 - 1: key of its noise. Two requests with equal prompts and seeds are drawn alike."""
    max_new_tokens: int
    """Longest completion, at least 1."""
    first_position: int = 0
    """Tokens of the same completion that were drawn already and stand at the end of ``prompt_ids``. The noise of a
    token is keyed by (seed, first_position + its position in this completion), so that a completion that was
    interrupted goes on as if it had not been."""
    images: Images | None = None
    """Those that stand in ``prompt_ids``; equal prompts share them, too. The last token belongs to none."""


@dataclass(frozen=True)
class Completion:
    """What was drawn for a request."""

    token_ids: list[int]
    """The drawn tokens, the stop token included; none where it was aborted before its first."""
    log_probs: list[float]
    """Natural logarithms of their probabilities as they were drawn: after temperature, top_p and top_k."""
    versions: list[int]
    """Version of the weights that each was drawn by."""
    finish_reason: FinishReason
    """``abort`` is given only after ``pause("abort")``; what was drawn until then is there."""


UNEXPECTED_ANSWER = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""What comes of reading an answer of a server that has another form than that of a version which is known."""


class EngineError(RuntimeError):
    """An engine cannot do what it was asked to, and says why. Its requests can be given to it again."""


class Engine(Protocol):
    """An engine. All calls come from one thread, but those that weights arrive by (``Receiver`` in
    ``runtime/weight_sync/receiver.py``, which an engine with weights of its own implements besides)."""

    version: int
    """Version of the weights that it draws by."""

    async def generate(self, request: GenerationRequest, sampling: Sampling) -> Completion:
        """Draws a completion. Any number of calls may wait at a time, in one event loop; they share batches.

        Raises:
            ConfigError: when the prompt with ``max_new_tokens`` is longer than the engine can take; names both.
            EngineError: when it died or does not answer.
        """
        ...

    def pause(self, mode: Literal["keep", "abort"]) -> None:
        """Stops drawing. ``keep`` holds what is under way, which goes on at ``resume``; ``abort`` ends it with what has
        been drawn so far."""
        ...

    def resume(self) -> None:
        """Goes on drawing."""
        ...

    def flush(self) -> None:
        """Forgets keys and values of earlier requests, which other weights made; what is under way computes its own
        anew before its next token. Called whenever weights have changed."""
        ...

    def rescore(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[torch.Tensor]:
        """Log-probabilities of given tokens by the weights that it holds now: for each sequence of L token ids
        float32 ``[L - 1]``, of all but the first."""
        ...

    def release(self) -> None:
        """Gives memory for weights, keys and values to others, until ``restore``. Nothing may be under way."""
        ...

    def restore(self) -> None:
        """Takes the memory back. Weights must be loaded again where the engine has its own."""
        ...

    def health(self) -> None:
        """Raises EngineError when it does not answer."""
        ...

    def close(self) -> None:
        """Ends it and whatever processes it has started; a second call does nothing."""
        ...
