"""Batches of documents of random tokens, and sequences, for tests of language models and of scalar heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.packing import make_batch
from sfumato.data.text.token_batch import TokenBatch
from sfumato.rollout.engines.base import FinishReason
from sfumato.rollout.text.tokens import TokenSequence

LENGTHS = (7, 7, 20, 3, 3, 3, 31, 2)


def samples(learned: float = 0.6) -> list[TextSample]:
    """A document of each length, of whose tokens about that fraction is in the loss mask."""
    results = []
    for index, length in enumerate(LENGTHS):
        generator = np.random.default_rng(index)
        ids = generator.integers(3, 259, length).astype(np.int32)
        mask = generator.random(length) < learned
        mask[0], mask[-1] = False, True
        results.append(TextSample((Document(ids, mask),)))
    return results


def batch(chosen: Sequence[TextSample], packed: bool = True) -> TokenBatch:
    """A micro-batch of them."""
    return make_batch(chosen, list(range(len(chosen))), [0] * len(chosen), packed, 0, 2)


def single_turn(
    prompt_ids: Sequence[int],
    token_ids: Sequence[int],
    log_probs: Sequence[float],
    versions: Sequence[int],
    finish_reason: FinishReason,
) -> TokenSequence:
    """A prompt with one completion."""
    num_prompt_tokens = len(prompt_ids)
    return TokenSequence(
        np.array([*prompt_ids, *token_ids], np.int32),
        np.arange(num_prompt_tokens + len(token_ids)) >= num_prompt_tokens,
        np.array([0.0] * num_prompt_tokens + list(log_probs), np.float32),
        np.array([-1] * num_prompt_tokens + list(versions), np.int32),
        finish_reason,
    )
