"""Micro-batches: packed and padded, labels shifted within documents, placeholders."""

import numpy as np
import pytest
import torch

from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.packing import make_batch, placeholder_tokens
from tests.token_rows import mesh_of


def sample(*documents):
    """Documents as lists of tokens; those that are learned are negative."""
    return TextSample(
        tuple(
            Document(np.abs(np.array(document, np.int32)), np.array([token < 0 for token in document]))
            for document in documents
        )
    )


def rows(batch):
    return {name: tensor.tolist() for name, tensor in batch.tensors().items()}


ONE, TWO = sample([11, 12, -13, -14]), sample([21, -22])
PAIR = sample([31, -32, -33], [31, -34])


def test_packed():
    batch = make_batch([ONE, TWO], [70, 75], [2, 0], packed=True, pad_token_id=9, min_tokens=2)
    assert rows(batch) == {
        "input_ids": [[11, 12, 13, 14, 21, 22]],
        "position_ids": [[0, 1, 2, 3, 0, 1]],
        "labels": [[-100, 13, 14, -100, 22, -100]],
        "document_ids": [[0, 0, 0, 0, 1, 1]],
        "source_ids": [[2, 2, 2, 2, 0, 0]],
    }
    assert all(tensor.dtype == torch.int64 for tensor in batch.tensors().values())
    assert batch.document_lengths == [4, 2] and batch.sample_ids == [70, 75] and batch.num_labels == 3


def test_padded():
    batch = make_batch([ONE, TWO], [70, 75], [2, 1], packed=False, pad_token_id=9, min_tokens=2)
    assert rows(batch) == {
        "input_ids": [[11, 12, 13, 14], [21, 22, 9, 9]],
        "position_ids": [[0, 1, 2, 3], [0, 1, 2, 3]],
        "labels": [[-100, 13, 14, -100], [22, -100, -100, -100]],
        "document_ids": [[0, 0, 0, 0], [1, 1, 1, 1]],
        "source_ids": [[2, 2, 2, 2], [1, 1, 1, 1]],
    }
    assert batch.document_lengths == [4, 2] and batch.num_labels == 3


def test_pairs():
    batch = make_batch([PAIR, PAIR], [5, 6], [0, 1], packed=True, pad_token_id=9, min_tokens=2)
    assert rows(batch)["input_ids"] == [[31, 32, 33, 31, 34] * 2]
    assert rows(batch)["document_ids"] == [[0, 0, 0, 1, 1, 2, 2, 2, 3, 3]]
    assert rows(batch)["source_ids"] == [[0] * 5 + [1] * 5]
    assert rows(batch)["labels"] == [[32, 33, -100, 34, -100] * 2]
    assert batch.document_lengths == [3, 2, 3, 2] and batch.sample_ids == [5, 6]
    padded = make_batch([PAIR], [5], [0], packed=False, pad_token_id=9, min_tokens=2)
    assert rows(padded)["document_ids"] == [[0, 0, 0], [1, 1, 1]]


def test_short_rows_are_filled_up():
    batch = make_batch([TWO], [5], [1], packed=True, pad_token_id=9, min_tokens=5)
    assert rows(batch) == {
        "input_ids": [[21, 22, 9, 9, 9]],
        "position_ids": [[0, 1, 0, 1, 2]],
        "labels": [[22, -100, -100, -100, -100]],
        "document_ids": [[0] * 5],
        "source_ids": [[1, 1, 0, 0, 0]],
    }
    assert rows(make_batch([TWO], [5], [1], False, 9, 4))["position_ids"] == [[0, 1, 2, 3]]


@pytest.mark.parametrize("packed", [True, False])
def test_placeholders_have_nothing_to_learn(packed):
    batch = make_batch([], [], [], packed, pad_token_id=9, min_tokens=4)
    assert rows(batch)["input_ids"] == [[9] * 4] and rows(batch)["labels"] == [[-100] * 4]
    assert rows(batch)["position_ids"] == [[0, 1, 2, 3]]
    assert batch.document_lengths == [] and batch.sample_ids == [] and batch.num_labels == 0


def test_every_rank_of_a_sequence_has_a_part():
    assert placeholder_tokens(mesh_of()) == 2
    assert placeholder_tokens(mesh_of(ring=2, ulysses=2)) == 8
