"""The interface of an engine that generates text.

Token ids go in and come out; nothing is decoded on the way. A request brings the seed of its noise, so that what is
drawn for it depends on nothing else: not on the other requests of a batch, on ranks or on a restart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from sfumato.data.media.document_media import MediaRefs

FinishReason = Literal["stop", "length", "abort"]
"""Why a completion ended: by a stop token or text, at the limit of its length, or because it was aborted."""


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
    """Tokens that the completion follows, at least one."""
    seed: int
    """Key of the noise, from 0 to 2^63 - 1. Two requests with equal prompts and seeds get equal completions."""
    max_new_tokens: int
    """Longest completion, at least 1."""
    first_position: int = 0
    """Number of tokens of the same completion that were drawn before and stand at the end of ``prompt_ids``. The noise
    of a token is keyed by (seed, first_position + its position among the new tokens), so that an interrupted completion
    goes on as if it had not been interrupted."""
    images: MediaRefs | None = None
    """The images in ``prompt_ids``; requests with equal prompts share this object. The last token of a prompt is no
    image token."""
    on_token: Callable[[int], None] | None = field(default=None, compare=False)
    """Called with each token when it has been drawn, by the embedded engine alone: for those who show an answer while
    it is drawn."""


@dataclass(frozen=True)
class Completion:
    """The result of a request."""

    token_ids: list[int]
    """The drawn tokens, the stop token included; none where it was aborted before its first."""
    log_probs: list[float]
    """Natural logarithms of their probabilities as they were drawn: after temperature, top_p and top_k."""
    versions: list[int]
    """For each token the version of the weights that drew it."""
    finish_reason: FinishReason
    """``abort`` only after ``pause("abort")``, with the tokens drawn until then."""


UNEXPECTED_ANSWER = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)
"""Errors of reading a server's answer that does not have the form of a known version."""


class EngineError(RuntimeError):
    """An engine failed, and says why. Its requests can be made again."""


class Engine(Protocol):
    """An engine. All calls come from one thread, except those of ``Receiver`` (``runtime/weight_sync/receiver.py``),
    which an engine with weights of its own implements as well."""

    version: int
    """Version of the weights that tokens are drawn by now."""

    async def generate(self, request: GenerationRequest, sampling: Sampling) -> Completion:
        """Draws a completion. Any number of calls may be awaited at a time, in one event loop; they share batches.

        Raises:
            ConfigError: when the prompt with ``max_new_tokens`` is longer than the engine can take; names both.
            EngineError: when it died or does not answer.
        """
        ...

    def pause(self, mode: Literal["keep", "abort"]) -> None:
        """Stops drawing. With ``keep``, open requests continue at ``resume``; with ``abort`` they end with the tokens
        drawn so far."""
        ...

    def resume(self) -> None:
        """Goes on drawing."""
        ...

    def flush(self) -> None:
        """Drops all keys and values, also of earlier requests' prefixes. Open requests compute theirs again before the
        next token. Called whenever weights have changed."""
        ...

    def rescore(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[torch.Tensor]:
        """Log-probabilities of given tokens by the current weights: for each sequence of L token ids float32
        ``[L - 1]``, of all tokens but the first."""
        ...

    def release(self) -> None:
        """Frees the memory of weights, keys and values until ``restore``. No request may be open."""
        ...

    def restore(self) -> None:
        """Allocates the memory again. Weights must be loaded again where the engine has its own."""
        ...

    def health(self) -> None:
        """Raises EngineError when it does not answer."""
        ...

    def close(self) -> None:
        """Ends the engine and the processes that it has started; a second call does nothing."""
        ...
