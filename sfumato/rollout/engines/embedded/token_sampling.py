"""Drawing the next token from logits with noise that belongs to the request and the position.

A token is the inverse of the cumulative distribution at one uniform number in [0, 1), in float64, over tokens in the
order of their ids. n rows; V tokens of the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sfumato.algorithms.noise import keyed_generator
from sfumato.rollout.engines.base import GenerationRequest

AT_A_TIME = 2**24
"""Logits that are drawn from at a time, which bounds the memory of their float64 copies."""


def request_noise(request: GenerationRequest) -> np.ndarray:
    """The uniform numbers of a request's tokens: float64 ``[max_new_tokens]``, from ``first_position`` on."""
    count = request.first_position + request.max_new_tokens
    drawn = torch.rand(count, generator=keyed_generator(request.seed, "token"), dtype=torch.float64)
    return drawn[request.first_position :].numpy()


@dataclass(frozen=True)
class DrawSettings:
    """How each row's token is drawn."""

    temperature: Tensor
    """float64 ``[n, 1]``; 0 takes the likeliest token."""
    top_p: Tensor
    """float64 ``[n, 1]``."""
    top_k: Tensor
    """int64 ``[n, 1]``; 0 leaves out none."""
    is_plain: bool
    """Whether no row leaves out tokens by top_p or top_k, so that nothing need be sorted."""
    is_warm: bool
    """Whether no temperature is 0."""

    @classmethod
    def from_rows(
        cls, temperature: np.ndarray, top_p: np.ndarray, top_k: np.ndarray, device: torch.device
    ) -> DrawSettings:
        """From one number for each row."""
        # ``from_numpy`` shares memory, and the arrays of the rows change in place.
        tensors = (torch.from_numpy(values.copy())[:, None].to(device) for values in (temperature, top_p, top_k))
        is_plain = bool((top_p >= 1).all() and (top_k == 0).all())
        return cls(*tensors, is_plain, bool((temperature > 0).all()))  # pyright: ignore[reportCallIssue] (length)

    def part(self, rows: slice) -> DrawSettings:
        """The settings of some rows."""
        return DrawSettings(self.temperature[rows], self.top_p[rows], self.top_k[rows], self.is_plain, self.is_warm)


def draw(logits: Tensor, uniform: Tensor, settings: DrawSettings) -> tuple[Tensor, Tensor]:
    """Draws a token for each row.

    Args:
        logits: ``[n, V]`` of any floating dtype.
        uniform: float64 ``[n]``, in [0, 1).
        settings: temperature, top_p and top_k.

    Returns:
        The tokens, int64 ``[n]``, and the natural logarithms of their probabilities as they were drawn, float64
        ``[n]``; NaN where the logits of a row have no distribution.
    """
    num_rows = max(AT_A_TIME // logits.shape[1], 1)
    if len(logits) <= num_rows:
        return _draw(logits, uniform, settings)
    # The float64 copies of all rows at once could need more memory than the model.
    drawn = []
    for start in range(0, len(logits), num_rows):
        rows = slice(start, start + num_rows)
        drawn.append(_draw(logits[rows], uniform[rows], settings.part(rows)))
    tokens, log_probs = zip(*drawn, strict=True)
    return torch.cat(tokens), torch.cat(log_probs)


def _draw(logits: Tensor, uniform: Tensor, settings: DrawSettings) -> tuple[Tensor, Tensor]:
    scores = logits.double()
    if settings.is_warm:
        scores = scores / settings.temperature
    else:
        scores = scores / settings.temperature.masked_fill(settings.temperature == 0, 1.0)
    # Less the largest, so that ``exp`` cannot overflow; probabilities stay the same.
    scores = scores - scores.amax(-1, keepdim=True)
    if not settings.is_plain:
        scores = _without_unlikely(scores, settings)
    cumulative = running_sums(scores.exp())
    total = cumulative[:, -1:]
    # Rounding may raise the product to the total, which lies beyond the last token.
    threshold = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    # ``right``: of equal sums the first is taken, so that a token without probability is never drawn.
    tokens = torch.searchsorted(cumulative, threshold, right=True).clamp_(max=logits.shape[1] - 1)
    log_probs = scores.gather(1, tokens) - total.log()
    if not settings.is_warm:
        likeliest = scores.argmax(-1, keepdim=True)
        greedy = settings.temperature == 0
        tokens = torch.where(greedy, likeliest, tokens)
        # Zero, since a greedy token is certain; but NaN where the logits were, which the engine looks for.
        log_probs = torch.where(greedy, log_probs - log_probs, log_probs)
    return tokens[:, 0], log_probs[:, 0]


STEPS_OF_ONE = 2.0**44
"""Parts of 1 that ``running_sums`` counts; the sum of 2^18 of them fits into int64."""


def running_sums(probabilities: Tensor) -> Tensor:
    """Sums of each row up to each column, of float64 numbers from 0 to 1.

    Under ``train.deterministic`` torch refuses those of floating-point numbers on GPUs, where they may be added in any
    order. Whole numbers add up to the same in each, so that probabilities are rounded to 2^-44 there.
    """
    if not _must_keep_order(probabilities):
        return probabilities.cumsum(-1)
    return (probabilities * STEPS_OF_ONE).round().long().cumsum(-1).double() / STEPS_OF_ONE


def _must_keep_order(numbers: Tensor) -> bool:
    return numbers.is_cuda and torch.are_deterministic_algorithms_enabled()


def _without_unlikely(scores: Tensor, settings: DrawSettings) -> Tensor:
    """Scores ``[n, V]`` with -inf for the tokens that top_k, and then top_p, leave out. Of equally likely tokens those
    with smaller ids are preferred."""
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    places = torch.arange(scores.shape[1], device=scores.device)
    ordered = ordered.masked_fill((places >= settings.top_k) & (settings.top_k > 0), -torch.inf)
    probs = ordered.softmax(-1)
    before = running_sums(probs) - probs  # probability of all likelier tokens: the one that crosses top_p stays
    ordered = ordered.masked_fill((before >= settings.top_p) & (settings.top_p < 1) & (places > 0), -torch.inf)
    return torch.empty_like(scores).scatter_(-1, order, ordered)
