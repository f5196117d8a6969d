"""Prompts with the answers to other prompts, by which KTO estimates the KL divergence of policy and reference."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.packing import make_batch, placeholder_tokens
from sfumato.data.text.token_batch import TokenBatch
from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import Mesh


def mismatch_answers(
    batches: Sequence[TokenBatch], mesh: Mesh, max_seq_len: int, pad_token_id: int
) -> list[TokenBatch]:
    """Pairs every prompt of a step with the answer of the sample before it; the first prompt gets the last answer.

    The order is that of sample ids over all ranks, so the pairs do not depend on how ranks share the samples. Every
    rank must call it.

    Args:
        batches: this rank's micro-batches of the step, with one document for each sample.
        mesh: the ranks.
        max_seq_len: tokens of a prompt and its answer after which the answer is cut off.
        pad_token_id: token that pads rows.

    Returns:
        As many micro-batches, with as many documents each.
    """
    documents_by_batch = [_split_documents(batch) for batch in batches]
    answer_by_sample = {
        sample_id: document[_count_prompt_tokens(document) :]
        for batch, documents in zip(batches, documents_by_batch, strict=True)
        for sample_id, document in zip(batch.sample_ids, documents, strict=True)
    }
    answers = {sample_id: answer for part in mesh.gather(answer_by_sample) for sample_id, answer in part.items()}
    order = sorted(answers)
    previous = dict(zip(order, [order[-1], *order[:-1]] if order else [], strict=True))
    mismatched_batches = []
    for batch, documents in zip(batches, documents_by_batch, strict=True):
        samples = []
        for sample_id, document in zip(batch.sample_ids, documents, strict=True):
            prompt = document[: _count_prompt_tokens(document)]
            tokens = np.concatenate([prompt, answers[previous[sample_id]]])[:max_seq_len]
            samples.append(TextSample((Document(tokens[:, 0].astype(np.int32), tokens[:, 1].astype(bool)),)))
        sources = [0] * len(samples)
        is_packed = batch.shape[0] == 1
        least = placeholder_tokens(mesh)
        mismatched_batches.append(make_batch(samples, batch.sample_ids, sources, is_packed, pad_token_id, least))
    return mismatched_batches


def _split_documents(batch: TokenBatch) -> list[np.ndarray]:
    """The documents of a batch, each int64 ``[L, 2]``: its tokens, and 1 for tokens of the loss mask."""
    ids = batch.input_ids.flatten().numpy()
    labels = batch.labels.flatten().numpy()
    document_ids = batch.document_ids.flatten().numpy()
    documents = []
    for number, length in enumerate(batch.document_lengths):
        start = int((document_ids == number).argmax())
        mask = np.zeros(length, bool)
        mask[1:] = labels[start : start + length - 1] != IGNORED  # labels are the next tokens: shifted back by one
        documents.append(np.stack([ids[start : start + length], mask], axis=1))
    return documents


def _count_prompt_tokens(document: np.ndarray) -> int:
    """Tokens before the answer, which begins with the first token of the loss mask."""
    return int(document[:, 1].argmax())
