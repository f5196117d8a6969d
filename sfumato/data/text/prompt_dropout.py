"""Trains some documents to draw images without their prompt, which classifier-free guidance compares with."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor

from sfumato.algorithms.noise import keyed_generator
from sfumato.data.text.token_batch import TokenBatch


def is_image(labels: Tensor, codes: range, line_end: int | None = None) -> Tensor:
    """Which labels are codes of images, or the token ``line_end`` that ends a line of codes: bool of the same shape."""
    is_code = (labels >= codes.start) & (labels < codes.stop)
    return is_code if line_end is None else is_code | (labels == line_end)


def drop_prompts(
    batch: TokenBatch,
    codes: range,
    share: float,
    seed: int,
    step: int,
    pad_token_id: int,
    kept_token_id: int | None = None,
) -> TokenBatch:
    """Replaces the prompt's text by padding in some of the documents that draw an image.

    These teach the model to draw without a prompt, which classifier-free guidance compares with. Input images stay.
    Which documents lose their prompt is keyed by (seed, step, sample), not by the batch.

    Args:
        batch: one document for each sample.
        codes: token ids of the codes of images.
        share: of the documents that draw.
        seed, step: of the run.
        pad_token_id: replaces the text.
        kept_token_id: a token of prompts that stays.

    Returns:
        The batch with other ``input_ids``.
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
            # Up to and with the token before the first target: labels are shifted, so that its own place is the last of
            # the prompt.
            is_text = cast(Tensor, batch.modality_ids).flatten() == 0
            prompt = document & (torch.arange(document.numel()) <= targets[0]) & is_text
            prompt = prompt if kept_token_id is None else prompt & (input_ids.flatten() != kept_token_id)
            input_ids.view(-1)[prompt] = pad_token_id
    return replace(batch, input_ids=input_ids)
