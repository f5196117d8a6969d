"""The tensors of a micro-batch of token sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import numpy as np
import torch

from sfumato.data.media.document_media import MultimodalInputs, Tensors
from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.token_batch import TokenBatch
from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import Mesh

if TYPE_CHECKING:
    from sfumato.data.media.vision import Vision


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
        samples: what goes into it. Without samples it is a placeholder, on which a rank computes while others train.
        sample_ids, sources: one integer for each sample.
        packed: puts all documents into one row, one after the other; otherwise one document into each row.
        pad_token_id: token that fills rows up.
        min_tokens: least width of the rows.
        vision: for a model with images or sound: opens the media of the documents.

    Raises:
        DataError: when an image is broken.
    """
    documents = [document for sample in samples for document in sample.documents]
    origins = [source for sample, source in zip(samples, sources, strict=True) for _ in sample.documents]
    num_documents = len(documents)
    inputs: list[MultimodalInputs] = []
    if vision is not None:
        inputs = [vision.multimodal_inputs(document.input_ids, document.images) for document in documents]
        # Every rank must run the encoders, or collectives inside them would wait for ever: a batch that lacks a kind of
        # media gets one more document, with a small medium of each kind, that is in no loss.
        if not vision.is_complete([document_inputs.tensors for document_inputs in inputs]):
            documents.append(Document(vision.idle_ids, np.zeros(vision.idle_length, bool)))
            inputs.append(vision.idle())
            origins.append(0)
    lengths = [len(document.input_ids) for document in documents]
    rows = [list(range(len(documents)))] if packed else [[number] for number in range(len(documents))] or [[]]
    width = max(min_tokens, *(sum(lengths[number] for number in row) for row in rows))
    fills = {"input_ids": pad_token_id, "position_ids": 0, "labels": IGNORED, "document_ids": 0, "source_ids": 0}
    arrays: dict[str, np.ndarray] = {name: np.full((len(rows), width), fill, np.int64) for name, fill in fills.items()}
    if documents and documents[0].numbers is not None:
        arrays["targets"] = np.full((len(rows), width), np.nan, np.float32)
    for index, row in enumerate(rows):
        end = 0
        for number in row:
            document = documents[number]
            start = end
            end += lengths[number]
            slot = (index, slice(start, end))
            arrays["input_ids"][slot] = document.input_ids
            arrays["position_ids"][slot] = np.arange(lengths[number]) + document.first_position
            arrays["labels"][slot] = _shift_labels(document)
            arrays["document_ids"][slot] = number if number < num_documents else 0  # the document for the encoders
            arrays["source_ids"][slot] = origins[number]
            if "targets" in arrays:
                arrays["targets"][slot] = cast(np.ndarray, document.numbers)
        if packed or not row:  # padding is a document of its own, whose positions begin at 0
            arrays["position_ids"][index, end:] = np.arange(width - end)
        else:  # padding continues the row's document
            arrays["position_ids"][index, end:] = np.arange(end, width)
            arrays["document_ids"][index, end:] = row[0]
            arrays["source_ids"][index, end:] = origins[row[0]]
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    tensors |= _place_modalities(inputs, rows, tensors["position_ids"])
    return TokenBatch(
        **tensors,  # pyright: ignore[reportArgumentType]
        document_lengths=lengths[:num_documents],
        sample_ids=list(sample_ids),
        media=[document_inputs.tensors for document_inputs in inputs],
        image_shapes=[shapes for sample in samples for shapes in sample.image_shapes],
    )


def _place_modalities(
    inputs: Sequence[MultimodalInputs], rows: Sequence[Sequence[int]], position_ids: torch.Tensor
) -> Tensors:
    """The tensors ``modality_ids`` and ``rope_positions`` of a batch, where the model has them.

    Args:
        inputs: of each document; empty for a model of text alone.
        rows: numbers of the documents in each row.
        position_ids: int64 ``[B, T]``, from which padding takes its rotary positions, as text would.
    """
    if not inputs:
        return {}
    modality_ids = torch.zeros_like(position_ids)
    rope_positions: torch.Tensor | None = None
    if inputs[0].rope_positions is not None:
        rope_positions = position_ids[..., None].repeat(1, 1, 3).to(inputs[0].rope_positions.dtype)
    for index, row in enumerate(rows):
        end = 0
        for number in row:
            start = end
            document_modality_ids = cast(torch.Tensor, inputs[number].modality_ids)
            end += len(document_modality_ids)
            modality_ids[index, start:end] = document_modality_ids
            if rope_positions is not None:
                rope_positions[index, start:end] = cast(torch.Tensor, inputs[number].rope_positions)
    return {"modality_ids": modality_ids} | ({} if rope_positions is None else {"rope_positions": rope_positions})


def _shift_labels(document: Document) -> np.ndarray:
    """The label of each token, which is the next token: int64 ``[L]``, -100 outside the loss mask and at the end."""
    labels = np.full(len(document.input_ids), IGNORED, np.int64)
    labels[:-1] = np.where(document.loss_mask[1:], document.input_ids[1:], IGNORED)
    return labels


def placeholder_tokens(mesh: Mesh) -> int:
    """Least width of a row: enough for each context-parallel rank to hold two tokens of it."""
    return max(2, 2 * mesh.layout.cp)
