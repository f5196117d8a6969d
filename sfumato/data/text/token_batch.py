"""A micro-batch of token sequences: what one forward and backward pass of a language model works on."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from sfumato.parallel.loss import IGNORED

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float32, Int64


@dataclass(frozen=True)
class TokenBatch:
    """B rows of T tokens. B is 1 when documents are packed into one row.

    ``make_batch`` makes it in host memory. ``PackedModel.place_batch`` returns the same batch on the model's device, as
    models and losses get it: perhaps padded further, and under sequence parallelism with this rank's part of the T
    tokens. Lists always describe the whole batch.

    Padding has labels -100. In a packed row its positions begin at 0 as those of a document, but its document and
    source are 0; in other rows it continues the row's document.
    """

    input_ids: Int64[Tensor, "batch length"]
    position_ids: Int64[Tensor, "batch length"]
    """Begin at 0 in each document, except in one that continues the prompt of another (``Document.first_position``)."""
    labels: Int64[Tensor, "batch length"]
    """Already shifted: the next token of the same document where the loss mask holds that token, else -100."""
    document_ids: Int64[Tensor, "batch length"]
    """Number of the token's document in this batch. The better and the worse document of a pair are 2k and 2k + 1."""
    source_ids: Int64[Tensor, "batch length"]
    """Number of the data source of the token's document."""
    document_lengths: list[int]
    """Tokens of each document, without padding; empty in a placeholder."""
    sample_ids: list[int]
    """Positions of the samples in the run's stream of all samples, which key everything random; in RL the numbers of
    the samples."""

    targets: Float32[Tensor, "batch length"] | None = None
    """Numbers that the data gives tokens, such as a margin or the label of a step; NaN elsewhere."""
    modality_ids: Int64[Tensor, "batch length"] | None = None
    """For models with images or sound: 0 for text, 1 for an image, 2 for a video, 3 for audio."""
    rope_positions: Int64[Tensor, "batch length 3"] | None = None
    """Frame, row and column of each token, for models with such rotary positions; float32 in some of them."""
    media: list[dict[str, Tensor]] = field(default_factory=list)
    """For models with images or sound: the arguments of their ``forward`` for the media of each document, in the order
    of the rows. A batch that lacks a kind of media that the data may have gets one more document, with a small medium
    of each kind and in no loss, so that every rank runs the encoders."""
    image_shapes: list[np.ndarray] = field(default_factory=list)
    """``MediaRefs.shapes`` of each document that has images."""

    is_scored: Bool[Tensor, "batch length"] | None = None
    """Marks the token of each document at which a reward model's value is the document's score."""
    reference_log_probs: Float32[Tensor, "batch length"] | None = None
    """``log p(label)`` of the reference in nats; 0 where there is no label."""

    # The following fields belong to tokens that a policy drew. They stand where these tokens are labels, and are 0
    # elsewhere.
    sample_index: Int64[Tensor, "batch length"] | None = None
    """Which sample of this batch a token belongs to."""
    decision_index: Int64[Tensor, "batch length"] | None = None
    """Index of the label among all tokens that were drawn for the rank's samples; -1 where it is none of them."""
    rollout_log_probs: Float32[Tensor, "batch length"] | None = None
    """``log p`` of the token when it was drawn, as the engine reported it."""
    proximal_log_probs: Float32[Tensor, "batch length"] | None = None
    """``log p`` of the policy when the update begins."""
    advantages: Float32[Tensor, "batch length"] | None = None
    values: Float32[Tensor, "batch length"] | None = None
    """The critic's values when the update begins."""
    returns: Float32[Tensor, "batch length"] | None = None
    """Targets of the critic."""
    loss_weights: Float32[Tensor, "batch length"] | None = None
    """Weight of the token's loss in the optimiser step, over all ranks; 0 throughout a placeholder."""

    is_placeholder: bool = False
    """Whether a rank without samples computes it only to keep step with the others: it is in no loss and no metric."""

    # ``place_batch`` adds the following fields.
    columns: Int64[Tensor, "batch length"] | None = None
    """Under sequence parallelism, the column of each token in the whole row."""
    output_columns: Int64[Tensor, "kept"] | None = None
    """Columns of a packed row for which the model's output is computed; None is all."""
    is_token: Bool[Tensor, "batch length"] | None = None
    """With ``train.expert_bias_rate``: false for padding, which no expert's load counts."""
    whole_rows: TokenBatch | None = None
    """The batch before its rows were cut, for a model that cuts them itself after it has put the images in."""

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

    def token_mask(self) -> Bool[Tensor, "batch length"]:
        """Whether each place holds a token of a document, not padding, on the CPU; not for a part of cut rows."""
        num_rows, length = self.shape
        columns = torch.arange(length)
        # a packed row has its padding at the end, other rows each at their own
        if num_rows == 1:
            return (columns < sum(self.document_lengths))[None]
        lengths = torch.tensor(self.document_lengths + [0] * (num_rows - len(self.document_lengths)))
        return columns < lengths[:, None]

    def tensors(self) -> dict[str, Tensor]:
        """The tensors ``[B, T, ...]`` by field: those that padding, devices and sequence parallelism treat alike."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor) and name != "output_columns"}

    def with_tensors(self, tensors: dict[str, Tensor]) -> TokenBatch:
        """A copy with other tensors in the fields of these names."""
        return replace(self, **tensors)

    def scatter_to_labels(self, values: Float[Tensor, "decisions"]) -> Float[Tensor, "batch length"]:
        """Puts values of drawn tokens where these tokens are labels in this batch.

        Args:
            values: ``[R]`` in host memory, one for each token that was drawn for the rank's samples, as
                ``decision_index`` counts them.

        Returns:
            ``[B, T]``, 0 where the label is none of these tokens.
        """
        decision_index = cast(Tensor, self.decision_index)
        spread = values[decision_index.clamp(min=0)]  # -1 would read the last value; the next line replaces it
        return torch.where(decision_index >= 0, spread, torch.zeros((), dtype=values.dtype))
