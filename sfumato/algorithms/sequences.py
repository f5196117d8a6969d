"""Which rows form a sequence, such as the tokens of an answer, where rows of many sequences are flattened into one.

Shapes: R rows, N sequences. A sequence may have no row here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Int64
    from torch import Tensor

Reduce = Callable[["Tensor"], "Tensor"]
"""Sums a tensor over ranks. Where gradients are to pass it must be differentiable."""


def sum_of_one_rank(values: Tensor) -> Tensor:
    """The sum over ranks in a run of one rank: the values themselves."""
    return values


@dataclass(frozen=True)
class Sequences:
    """Which of R rows are of which of N sequences."""

    of_row: Int64[Tensor, "rows"]
    """int64 ``[R]``: the number of each row's sequence, from 0 to ``count`` - 1."""
    count: int
    """N."""
    reduce: Reduce = sum_of_one_rank
    """Sums a tensor ``[N]`` over the ranks that hold parts of the same sequences (context parallelism). These ranks
    number sequences equally and call it together. Differentiable; the identity where no sequence is cut."""

    @classmethod
    def named(cls, names: Int64[Tensor, "rows"], reduce: Reduce = sum_of_one_rank) -> Sequences:
        """From ids, int64 ``[R]``: any numbers, equal for the rows of a sequence.

        Sequences are numbered in ascending order of ids, so ranks that share sequences must each have rows of all.
        """
        unique_names, of_row = torch.unique(names, return_inverse=True)
        return cls(of_row, len(unique_names), reduce)

    @classmethod
    def of_lengths(cls, lengths: Int64[Tensor, "sequences"]) -> Sequences:
        """N sequences one after the other, of which the i-th has ``lengths[i]`` rows; int64 ``[N]``."""
        return cls(torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths), len(lengths))

    def sums(
        self, values: Float[Tensor, "rows"], mask: Bool[Tensor, "rows"] | None = None
    ) -> Float[Tensor, "sequences"]:
        """The sum over each sequence's rows, with gradients; added up in float64.

        Args:
            values: ``[R]``.
            mask: bool ``[R]``: rows that count; other values, NaN included, reach neither sum nor gradient.

        Returns:
            ``[N]``, in the dtype of ``values``; 0 without rows.

        Raises:
            ValueError: when the shapes differ.
        """
        if values.ndim != 1 or values.shape != self.of_row.shape:
            shapes = f"{tuple(values.shape)} and {tuple(self.of_row.shape)}"
            raise ValueError(f"values and the numbers of their sequences must both be [R], and are {shapes}")
        wide = values.double()
        if mask is not None:
            wide = torch.where(mask, wide, torch.zeros_like(wide))
        # index_put sorts on GPUs: the same bits each time
        sums = wide.new_zeros(self.count).index_put((self.of_row.to(values.device),), wide, accumulate=True)
        return self.reduce(sums).to(values.dtype)

    def counts(self, mask: Bool[Tensor, "rows"]) -> Float[Tensor, "sequences"]:
        """Rows of each sequence that count, float64 ``[N]``, over all ranks that share it."""
        return self.sums(mask.double())

    def means(
        self, values: Float[Tensor, "rows"], mask: Bool[Tensor, "rows"] | None = None
    ) -> Float[Tensor, "sequences"]:
        """The mean over each sequence's rows that count, ``[N]``; 0 without such rows. Arguments as of ``sums``."""
        counted = torch.ones_like(values, dtype=torch.bool) if mask is None else mask
        return self.sums(values, mask) / self.counts(counted).clamp(min=1).to(values.dtype)

    def spread(self, values: Float[Tensor, "sequences"]) -> Float[Tensor, "rows"]:
        """``[R]``: the value ``[N]`` of each row's sequence."""
        return values[self.of_row.to(values.device)]
