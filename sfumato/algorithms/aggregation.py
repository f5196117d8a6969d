"""From the losses of rows to one loss: the four means that the field uses, with counts over all ranks.

The loss of a micro-batch is ``(weights * losses * mask).sum()``. Weights come from counts of the whole optimiser step,
over all ranks and micro-batches, so that their losses (and gradients) add up to the aggregate over all rows, however
these are split. A mean over ranks, as data parallelism may take, is multiplied by their number first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch

if TYPE_CHECKING:
    from jaxtyping import Float, Real
    from torch import Tensor

Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
"""How the losses of N sequences' tokens become one number: the mean over all tokens (DAPO); over sequences the mean of
their tokens' means (GRPO), of their tokens' sums, or of these divided by the greatest length (Dr. GRPO)."""


def row_weights(
    mode: Aggregation,
    sequence_lengths: Real[Tensor, "rows"],
    num_tokens: float,
    num_sequences: float,
    max_length: int,
) -> Float[Tensor, "rows"]:
    """Factors of the losses of R rows.

    Args:
        mode: which mean.
        sequence_lengths: ``[R]``: the number of masked-in rows in the whole sequence of each row, counted over all
            ranks that hold parts of it.
        num_tokens: masked-in rows of the optimiser step, over all ranks and micro-batches.
        num_sequences: sequences of the optimiser step with such a row, over all ranks and micro-batches.
        max_length: divisor of ``seq-mean-token-sum-norm``, a constant of the run (Dr. GRPO, arXiv 2503.20783).

    Returns:
        float32 ``[R]``, or float64 where the counts are. The mask is not applied: the caller multiplies by it.

    Raises:
        ValueError: for an unknown mode, or a count or ``max_length`` that is not above 0 and is divided by.
    """
    lengths = sequence_lengths if sequence_lengths.dtype == torch.float64 else sequence_lengths.float()
    divisors = {
        "token-mean": {"num_tokens": num_tokens},
        "seq-mean-token-mean": {"num_sequences": num_sequences},
        "seq-mean-token-sum": {"num_sequences": num_sequences},
        "seq-mean-token-sum-norm": {"num_sequences": num_sequences, "max_length": max_length},
    }
    if mode not in divisors:
        raise ValueError(f"unknown aggregation {mode!r}; known: {', '.join(get_args(Aggregation))}")
    weights = torch.ones_like(lengths)
    if mode == "seq-mean-token-mean":
        weights = weights / lengths.clamp(min=1)  # rows of a sequence without masked-in rows are masked themselves
    for name, divisor in divisors[mode].items():
        if not divisor > 0:
            raise ValueError(f"{name} {divisor} must be above 0 for aggregation {mode}")
        weights = weights / divisor
    return weights
