"""Micro-batches of token sequences: which samples fit together, with equal work on every rank, and their tensors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from sfumato.data.media.vision import MultimodalInputs, Tensors, Vision
from sfumato.data.text.format import Document, TextSample
from sfumato.data.text.token_batch import TokenBatch
from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import Mesh


def make_batch(
    samples: Sequence[TextSample],
    sample_ids: Sequence[int],
    sources: Sequence[int],
    packed: bool,
    pad_token_id: int,
    min_tokens: int,
    vision: Vision | None = None,
) -> TokenBatch:
    """Puts samples into one micro-batch.

    Args:
        samples: what goes into it; none make a placeholder, which ranks without samples compute on with the others.
        sample_ids, sources: one integer for each sample.
        packed: all documents in one row, one after the other; otherwise one document a row.
        pad_token_id: token that fills rows up.
        min_tokens: shortest row.
        vision: of a model that sees; opens the documents' images.

    Raises:
        DataError: when an image is broken.
    """
    documents = [document for sample in samples for document in sample.documents]
    origins = [source for sample, source in zip(samples, sources, strict=True) for _ in sample.documents]
    num_documents = len(documents)
    beside = []
    if vision is not None:
        beside = [vision.beside(document.input_ids, document.images) for document in documents]
        if not vision.is_complete([one.tensors for one in beside]):
            documents.append(Document(vision.idle_ids, np.zeros(vision.idle_length, bool)))
            beside.append(vision.idle())
            origins.append(0)
    lengths = [len(document.input_ids) for document in documents]
    rows = [list(range(len(documents)))] if packed else [[number] for number in range(len(documents))] or [[]]
    width = max(min_tokens, *(sum(lengths[number] for number in row) for row in rows))
    fills = {"input_ids": pad_token_id, "position_ids": 0, "labels": IGNORED, "document_ids": 0, "source_ids": 0}
    arrays = {name: np.full((len(rows), width), fill, np.int64) for name, fill in fills.items()}
    if documents and documents[0].numbers is not None:
        arrays["targets"] = np.full((len(rows), width), np.nan, np.float32)
    for index, row in enumerate(rows):
        end = 0
        for number in row:
            document = documents[number]
            start = end
            end += lengths[number]
            place = (index, slice(start, end))
            arrays["input_ids"][place] = document.input_ids
            arrays["position_ids"][place] = np.arange(lengths[number]) + document.first_position
            arrays["labels"][place] = _shift_labels(document)
            arrays["document_ids"][place] = number if number < num_documents else 0
            arrays["source_ids"][place] = origins[number]
            if "targets" in arrays:
                arrays["targets"][place] = document.numbers
        if packed or not row:
            arrays["position_ids"][index, end:] = np.arange(width - end)
        else:
            arrays["position_ids"][index, end:] = np.arange(end, width)
            arrays["document_ids"][index, end:] = row[0]
            arrays["source_ids"][index, end:] = origins[row[0]]
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    tensors |= _place_modalities(beside, rows, tensors["position_ids"])
    return TokenBatch(
        **tensors,
        document_lengths=lengths[:num_documents],
        sample_ids=list(sample_ids),
        media=[document.tensors for document in beside],
        image_shapes=[shapes for sample in samples for shapes in sample.image_shapes],
    )


def _place_modalities(
    beside: Sequence[MultimodalInputs], rows: Sequence[Sequence[int]], position_ids: torch.Tensor
) -> Tensors:
    """Modalities and rotary positions of the tokens of models that see; those of padding are those of text."""
    if not beside:
        return {}
    modality_ids = torch.zeros_like(position_ids)
    rope_positions = None
    if beside[0].rope_positions is not None:
        rope_positions = position_ids[..., None].repeat(1, 1, 3).to(beside[0].rope_positions.dtype)
    for index, row in enumerate(rows):
        end = 0
        for number in row:
            start = end
            end += len(beside[number].modality_ids)
            modality_ids[index, start:end] = beside[number].modality_ids
            if rope_positions is not None:
                rope_positions[index, start:end] = beside[number].rope_positions
    return {"modality_ids": modality_ids} | ({} if rope_positions is None else {"rope_positions": rope_positions})


def _shift_labels(document: Document) -> np.ndarray:
    """The token that follows each token: int64 ``[L]``, -100 outside the loss mask, and at the end."""
    labels = np.full(len(document.input_ids), IGNORED, np.int64)
    labels[:-1] = np.where(document.loss_mask[1:], document.input_ids[1:], IGNORED)
    return labels


def placeholder_tokens(mesh: Mesh) -> int:
    """Tokens of the shortest row: enough for every rank that shares a sequence to have a part of it."""
    return max(2, 2 * mesh.layout.cp)
