"""Prompts with answers to other prompts: which they get, and what of it is in the loss mask."""

import numpy as np
import pytest
import torch

from sfumato.data.files.mismatched import mismatch_answers
from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.packing import make_batch
from sfumato.parallel.layout import Layout
from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import Mesh

ALONE = Mesh(Layout(), torch.device("cpu"))


def sample(number, prompt, answer):
    """Tokens that say whose they are: prompts 100 n and on, answers 100 n + 50 and on, then one outside of the mask."""
    ids = [*range(100 * number, 100 * number + prompt), *range(100 * number + 50, 100 * number + 50 + answer), 9]
    mask = [False] * prompt + [True] * answer + [False]
    return TextSample((Document(np.array(ids, np.int32), np.array(mask)),))


def documents(batch):
    """Tokens of each document, and those that are labels."""
    ids, labels = batch.input_ids.flatten(), batch.labels.flatten()
    results = []
    for number, length in enumerate(batch.document_lengths):
        start = int((batch.document_ids.flatten() == number).nonzero()[0])
        document_labels = labels[start : start + length]
        results.append((ids[start : start + length].tolist(), document_labels[document_labels != IGNORED].tolist()))
    return results


@pytest.mark.parametrize("packed", [True, False])
def test_each_prompt_has_the_answer_of_the_sample_before(packed):
    samples = [sample(1, 2, 3), sample(2, 4, 1), sample(3, 1, 2)]
    batches = [
        make_batch([samples[2], samples[0]], [12, 10], [0, 0], packed, 0, 2),
        make_batch([samples[1]], [11], [0], packed, 0, 2),
    ]
    first, second = mismatch_answers(batches, ALONE, 64, 0)
    assert documents(first) == [([300, 250, 9], [250]), ([100, 101, 350, 351, 9], [350, 351])]
    assert documents(second) == [([200, 201, 202, 203, 150, 151, 152, 9], [150, 151, 152])]
    assert first.sample_ids == [12, 10] and first.input_ids.shape[0] == (1 if packed else 2)


def test_long_answers_are_cut_and_placeholders_stay():
    batches = [
        make_batch([sample(1, 5, 9), sample(2, 6, 1)], [0, 1], [0, 0], True, 0, 2),
        make_batch([], [], [], True, 0, 2),
    ]
    result, nothing = mismatch_answers(batches, ALONE, 8, 0)
    assert documents(result)[1] == ([200, 201, 202, 203, 204, 205, 150, 151], [150, 151])
    assert not nothing.document_lengths and nothing.input_ids.shape == (1, 2)
