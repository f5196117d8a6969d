"""A micro-batch of token sequences: what one forward and backward pass of a language model works on."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from sfumato.parallel.loss import IGNORED

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float32, Int64


@dataclass(frozen=True)
class TokenBatch:
    """B rows of T tokens. B is 1 when documents are packed into one row.

    ``make_batch`` makes it in host memory. What a model computes and what a loss is given is the same batch on the
    model's device, as ``PackedModel.place_batch`` returns it: perhaps padded further, and under sequence parallelism
    with this rank's part of the T tokens. Lists are always those of the whole batch.

    Padding has labels -100. In a packed row it is a document of its own by position, but has document and source 0; in
    other rows it continues what stands before it.
    """

    input_ids: Int64[Tensor, "batch length"]
    position_ids: Int64[Tensor, "batch length"]
    """Start at 0 with each document, but for one that goes on after the beginning of another."""
    labels: Int64[Tensor, "batch length"]
    """The next token of the same document where the loss mask holds it, -100 elsewhere: shifted already."""
    document_ids: Int64[Tensor, "batch length"]
    """Number of the document in this batch; the better and the worse one of a pair are 2k and 2k + 1."""
    source_ids: Int64[Tensor, "batch length"]
    """Number of the data source that the document is of."""
    document_lengths: list[int]
    """Tokens of each document, without padding; empty in a placeholder."""
    sample_ids: list[int]
    """Positions of the samples in the stream of all samples of the run, from which anything random is keyed; in RL the
    numbers of the samples."""

    targets: Float32[Tensor, "batch length"] | None = None
    """Numbers that the data say of tokens, such as a margin or the label of a step; NaN elsewhere."""
    modality_ids: Int64[Tensor, "batch length"] | None = None
    """Of models that see or hear: 0 of text, 1 of images, 2 of videos, 3 of audio."""
    rope_positions: Int64[Tensor, "batch length 3"] | None = None
    """Frame, row and column of each token, of models whose rotary positions have these; float32 for some."""
    media: list[dict[str, Tensor]] = field(default_factory=list)
    """Of models that see, what their ``forward`` takes for the images of each document, in the order of the rows. A
    batch without images, or without videos where there may be some, has one more document, a small one of each that is
    in no loss, so that every rank computes the encoder."""
    image_shapes: list[np.ndarray] = field(default_factory=list)
    """``Images.shapes`` of each document that has images."""

    is_scored: Bool[Tensor, "batch length"] | None = None
    """The token of each document at which a reward model's value is its score."""
    reference_log_probs: Float32[Tensor, "batch length"] | None = None
    """``log p(label)`` of the reference in nats; 0 where there is no label."""

    # What follows belongs to the tokens that a policy drew, at the places of their labels, and is 0 elsewhere.
    sample_index: Int64[Tensor, "batch length"] | None = None
    """Which of the samples of this batch a token is of."""
    decision_index: Int64[Tensor, "batch length"] | None = None
    """Which of all tokens that the rank's samples drew the label is; -1 where it is none."""
    rollout_log_probs: Float32[Tensor, "batch length"] | None = None
    """``log p`` that the token was drawn with, as the engine gave it."""
    proximal_log_probs: Float32[Tensor, "batch length"] | None = None
    """``log p`` of the policy when the update begins."""
    advantages: Float32[Tensor, "batch length"] | None = None
    values: Float32[Tensor, "batch length"] | None = None
    """Of the critic when the update begins."""
    returns: Float32[Tensor, "batch length"] | None = None
    """What the critic learns."""
    loss_weights: Float32[Tensor, "batch length"] | None = None
    """What the token's loss counts in the optimiser step, over all ranks; 0 throughout in a placeholder."""

    is_placeholder: bool = False
    """Whether a rank without samples computes it only because the others compute: it is in no loss and no metric."""

    # What ``place_batch`` adds.
    columns: Int64[Tensor, "batch length"] | None = None
    """Under sequence parallelism, the column of each token in the whole row."""
    output_columns: Int64[Tensor, "kept"] | None = None
    """Columns of a packed row for which the model's output is computed; None is all."""
    whole_rows: TokenBatch | None = None
    """The rows before they were cut, for a model that cuts them itself once images stand in them."""

    @property
    def shape(self) -> tuple[int, int]:
        """B and T."""
        return self.input_ids.shape[0], self.input_ids.shape[1]

    @property
    def loss_mask(self) -> Bool[Tensor, "batch length"]:
        """Tokens that have a label."""
        return self.labels != IGNORED

    @property
    def num_labels(self) -> int:
        """Tokens that have a label. Waits for the device."""
        return int(self.loss_mask.sum())

    def tensors(self) -> dict[str, Tensor]:
        """The tensors ``[B, T, ...]`` by their fields' names, as padding, devices and sequence parallelism treat
        them."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor) and name != "output_columns"}

    def with_tensors(self, tensors: dict[str, Tensor]) -> TokenBatch:
        """The same with other tensors in the place of those with these names."""
        return replace(self, **tensors)

    def scatter_to_labels(self, values: Float[Tensor, "decisions"]) -> Float[Tensor, "batch length"]:
        """Values of all tokens that the rank's samples drew, at the places of the labels of those of this batch.

        Args:
            values: ``[R]`` in host memory, in the order that ``decision_index`` counts.

        Returns:
            ``[B, T]``, 0 where there is no label.
        """
        spread = values[self.decision_index.clamp(min=0)]
        return torch.where(self.decision_index >= 0, spread, torch.zeros((), dtype=values.dtype))
