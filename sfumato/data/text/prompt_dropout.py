"""Documents that draw without their prompt, which classifier-free guidance compares with."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sfumato.algorithms.noise import keyed_generator
from sfumato.data.text.token_batch import TokenBatch


def is_image(labels: Tensor, codes: range, line_end: int | None = None) -> Tensor:
    """Which labels are codes of images, or end a line of them: bool of the same shape."""
    found = (labels >= codes.start) & (labels < codes.stop)
    return found if line_end is None else found | (labels == line_end)


def drop_prompts(
    batch: TokenBatch, codes: range, share: float, seed: int, step: int, pad_token_id: int, kept: int | None = None
) -> TokenBatch:
    """A micro-batch in which some documents that draw have padding in the place of their prompt's text.

    They teach the model to draw without a prompt, which classifier-free guidance compares with. Images that are seen
    stay. Which ones is keyed by (seed, step, sample), not by the batch.

    Args:
        batch: one document a sample.
        codes: tokens of the codes of images.
        share: of the documents that draw.
        seed, step: of the run.
        pad_token_id: what stands in the place of the text.
        kept: a token that stays.
    """
    if share == 0:
        return batch
    input_ids = batch.input_ids.clone()
    labels = batch.labels
    for number, sample_id in enumerate(batch.sample_ids):
        document = (batch.document_ids == number).flatten()
        targets = (document & batch.loss_mask.flatten()).nonzero()
        draws = bool((document & is_image(labels, codes).flatten()).any())
        dropped = float(torch.rand((), generator=keyed_generator(seed, "prompt dropout", step, sample_id))) < share
        if draws and dropped:
            prompt = document & (torch.arange(document.numel()) <= targets[0]) & (batch.modality_ids.flatten() == 0)
            prompt = prompt if kept is None else prompt & (input_ids.flatten() != kept)
            input_ids.view(-1)[prompt] = pad_token_id
    return replace(batch, input_ids=input_ids)
