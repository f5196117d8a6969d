"""Micro-batches of token sequences: packed into one row, told apart by position ids, or one document a row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sfumato.data.text import Document, Sample
from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import Mesh


@dataclass(frozen=True)
class TextBatch:
    """What one forward and backward pass works on. B rows of T tokens; B is 1 when packed."""

    tensors: dict[str, torch.Tensor]
    """int64 ``[B, T]`` each. ``input_ids``. ``position_ids``: start at 0 with each document. ``labels``: the next token
    of the same document where it is learned, -100 elsewhere (shifted already). ``documents``: the number of the
    document in this batch; the parts of a pair are 2k and 2k + 1. ``sources``: the number of its source.

    Padding has labels -100. In a packed row it is a document of its own by position, but has number and source 0; in
    other rows it continues what stands before it.
    """
    lengths: list[int]
    """Tokens of each document, without padding; none in a placeholder."""
    sample_ids: list[int]
    """Positions of the samples in the stream of all samples of the run, from which anything random is keyed."""

    @property
    def num_tokens(self) -> int:
        """Tokens that are learned."""
        return int((self.tensors["labels"] != IGNORED).sum())


def make_batch(
    samples: Sequence[Sample],
    sample_ids: Sequence[int],
    sources: Sequence[int],
    packed: bool,
    pad_token_id: int,
    min_tokens: int,
) -> TextBatch:
    """Puts samples into one micro-batch.

    Args:
        samples: what goes into it; none make a placeholder, which ranks without samples compute on with the others.
        sample_ids, sources: one integer for each sample.
        packed: all documents in one row, one after the other; otherwise one document a row.
        pad_token_id: token that fills rows up.
        min_tokens: shortest row.
    """
    documents = [each for sample in samples for each in sample.documents]
    origins = [source for sample, source in zip(samples, sources, strict=True) for _ in sample.documents]
    lengths = [len(each.input_ids) for each in documents]
    rows = [list(range(len(documents)))] if packed else [[number] for number in range(len(documents))] or [[]]
    width = max(min_tokens, *(sum(lengths[number] for number in row) for row in rows))
    tensors = {
        "input_ids": np.full((len(rows), width), pad_token_id, np.int64),
        "position_ids": np.zeros((len(rows), width), np.int64),
        "labels": np.full((len(rows), width), IGNORED, np.int64),
        "documents": np.zeros((len(rows), width), np.int64),
        "sources": np.zeros((len(rows), width), np.int64),
    }
    for index, row in enumerate(rows):
        end = 0
        for number in row:
            start, end = end, end + lengths[number]
            place = (index, slice(start, end))
            tensors["input_ids"][place] = documents[number].input_ids
            tensors["position_ids"][place] = np.arange(lengths[number])
            tensors["labels"][place] = _labels(documents[number])
            tensors["documents"][place] = number
            tensors["sources"][place] = origins[number]
        if packed or not row:
            tensors["position_ids"][index, end:] = np.arange(width - end)
        else:
            tensors["position_ids"][index, end:] = np.arange(end, width)
            tensors["documents"][index, end:] = row[0]
            tensors["sources"][index, end:] = origins[row[0]]
    return TextBatch({name: torch.from_numpy(each) for name, each in tensors.items()}, lengths, list(sample_ids))


def _labels(document: Document) -> np.ndarray:
    """The token that follows each token: int64 ``[L]``, -100 where it is not learned, and at the end."""
    labels = np.full(len(document.input_ids), IGNORED, np.int64)
    labels[:-1] = np.where(document.learned[1:], document.input_ids[1:], IGNORED)
    return labels


def placeholder_tokens(mesh: Mesh) -> int:
    """Tokens of the shortest row: enough for every rank that shares a sequence to have a part of it."""
    return max(2, 2 * mesh.layout.cp)
