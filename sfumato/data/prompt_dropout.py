"""Documents that draw without their prompt, which classifier-free guidance compares with."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from sfumato.algorithms.noise import keyed_generator
from sfumato.data.packing import TextBatch
from sfumato.parallel.loss import IGNORED


def is_image(labels: Tensor, codes: range, line_end: int | None = None) -> Tensor:
    """Which labels are codes of images, or end a line of them: bool of the same shape."""
    found = (labels >= codes.start) & (labels < codes.stop)
    return found if line_end is None else found | (labels == line_end)


def drop_prompts(
    batch: TextBatch, codes: range, share: float, seed: int, step: int, pad_token_id: int, kept: int | None = None
) -> TextBatch:
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
    tensors = dict(batch.tensors)
    input_ids, labels = tensors["input_ids"].clone(), tensors["labels"]
    for number, sample_id in enumerate(batch.sample_ids):
        own = (tensors["documents"] == number).flatten()
        targets = (own & (labels.flatten() != IGNORED)).nonzero()
        draws = bool((own & is_image(labels, codes).flatten()).any())
        dropped = float(torch.rand((), generator=keyed_generator(seed, "prompt dropout", step, sample_id))) < share
        if draws and dropped:
            prompt = own & (torch.arange(own.numel()) <= targets[0]) & (tensors["kinds"].flatten() == 0)
            prompt = prompt if kept is None else prompt & (input_ids.flatten() != kept)
            input_ids.view(-1)[prompt] = pad_token_id
    return replace(batch, tensors=tensors | {"input_ids": input_ids})
