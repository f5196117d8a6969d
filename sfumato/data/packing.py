"""Micro-batches of token sequences: which samples fit together, with equal work on every rank, and their tensors."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch

from sfumato.config.parallel import ParallelConfig
from sfumato.data.text import Document, TextSample
from sfumato.data.token_batch import TokenBatch
from sfumato.data.vision import MultimodalInputs, Tensors, Vision
from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import Mesh

Bins = list[list[int]]
"""Positions of samples within the step, by micro-batch."""


def pack(
    lengths: Sequence[int],
    costs: Sequence[float],
    capacity: int,
    num_ranks: int,
    multiple: int = 1,
    minimum: int = 1,
) -> list[Bins]:
    """Shares samples out to ranks and micro-batches, as few as fit.

    The costs of the micro-batches that ranks compute at the same time are close to each other, and so are the ranks'
    sums. The result is a function of the arguments alone.

    Args:
        lengths: size of each sample.
        costs: work that each sample makes.
        capacity: most that the sizes in a micro-batch may add up to; a longer sample has one to itself.
        num_ranks: ranks with different samples.
        multiple, minimum: what the number of micro-batches of a rank must be, see ``micro_batch_rule``.

    Returns:
        Positions of samples, ``[rank][micro-batch]``: each of them once, as many micro-batches on each rank. Some are
        empty when there are too few samples.
    """
    by_cost = sorted(range(len(lengths)), key=lambda position: (-costs[position], -lengths[position], position))
    by_length = sorted(range(len(lengths)), key=lambda position: (-lengths[position], position))
    total = sum(min(length, capacity) for length in lengths)
    wanted = max(-(-total // (capacity * num_ranks)), minimum, 1)
    num = -(-wanted // multiple) * multiple
    while True:
        bins = _level(by_cost, costs, lengths, capacity, num * num_ranks) or _fill(
            by_length, lengths, capacity, num * num_ranks
        )
        if bins is not None:
            return deal(bins, costs, num_ranks)
        num += multiple


def micro_batch_rule(config: ParallelConfig) -> tuple[int, int]:
    """What the number of micro-batches must be a multiple of, and its least, for the pipeline's schedule."""
    size = config.pipeline_parallel_size
    if config.pipeline_schedule in ("interleaved_1f1b", "zero_bubble"):
        return size, size
    return 1, size if config.pipeline_schedule == "1f1b" else 1


def _level(
    order: Sequence[int], weights: Sequence[float], lengths: Sequence[int], capacity: int, num_bins: int
) -> Bins | None:
    """Puts each sample into the lightest bin that has room for it; None when one fits nowhere."""
    bins: Bins = [[] for _ in range(num_bins)]
    filled = [0] * num_bins
    lightest = [(0.0, index) for index in range(num_bins)]
    for sample in order:
        passed = []
        while lightest:
            weight, index = heapq.heappop(lightest)
            if filled[index] + lengths[sample] <= capacity or not bins[index]:
                bins[index].append(sample)
                filled[index] += lengths[sample]
                passed.append((weight + weights[sample], index))
                break
            passed.append((weight, index))
        else:
            return None
        for entry in passed:
            heapq.heappush(lightest, entry)
    return bins


def _fill(order: Sequence[int], lengths: Sequence[int], capacity: int, num_bins: int) -> Bins | None:
    """Fills one bin after the other, to the last token where that can be; None when samples are left.

    Each gets the longest sample that is left and those that fill the rest best.
    """
    bins: Bins = []
    rest = list(order)
    while rest and len(bins) < num_bins:
        first = rest.pop(0)
        more = _best_sum(rest, lengths, max(capacity - lengths[first], 0))
        bins.append([first, *more])
        rest = [position for position in rest if position not in more]
    return None if rest else bins + [[] for _ in range(num_bins - len(bins))]


def _best_sum(samples: Sequence[int], lengths: Sequence[int], room: int) -> set[int]:
    """Samples whose lengths add up to the most that is not above ``room``, by dynamic programming over bits."""
    fitting = [position for position in samples if lengths[position] <= room]
    sums = [1]  # bit s: the samples so far can add up to s
    for position in fitting:
        sums.append((sums[-1] | sums[-1] << lengths[position]) & ((2 << room) - 1))
        if sums[-1] >> room:
            break
    left = sums[-1].bit_length() - 1
    chosen = set()
    for number in range(len(sums) - 1, 0, -1):
        if not sums[number - 1] >> left & 1:
            chosen.add(fitting[number - 1])
            left -= lengths[fitting[number - 1]]
    return chosen


def deal(bins: Bins, costs: Sequence[float], num_ranks: int) -> list[Bins]:
    """Hands bins out, the costliest first: in each round one to each rank, the costliest to the rank with the least."""
    work = {index: sum(costs[position] for position in members) for index, members in enumerate(bins)}
    order = sorted(work, key=lambda index: (-work[index], index))
    by_rank: list[Bins] = [[] for _ in range(num_ranks)]
    sums = [0.0] * num_ranks
    for start in range(0, len(order), num_ranks):
        ranks = sorted(range(num_ranks), key=lambda rank: (sums[rank], rank))
        for rank, index in zip(ranks, order[start : start + num_ranks], strict=True):
            by_rank[rank].append(sorted(bins[index]))
            sums[rank] += work[index]
    return by_rank


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
    num_documents, beside = len(documents), []
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
    modality_ids, rope_positions = torch.zeros_like(position_ids), None
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
