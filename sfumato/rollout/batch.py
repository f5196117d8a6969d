"""What one iteration asks for, and what a policy drew, to which a modality adds what its replay needs.

Shapes: B samples.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from sfumato.algorithms.rows import TensorRows, by_row
from sfumato.parallel.mesh import range_of_rank
from sfumato.rewards.base import Sample
from sfumato.rewards.scoring.scores import Scores
from sfumato.tracking.samples import SampleRecord


@dataclass(frozen=True)
class SampleRequest:
    """One sample that is to be made: numbers only, whoever makes it has the prompts."""

    sample_id: int
    """Number that is unique within the iteration, over all ranks; the sample's noise is keyed by it."""
    group_id: int
    """Number that the samples of one prompt of the iteration share."""
    prompt_id: int
    """Row of the training prompts."""
    is_first: bool = False
    """Whether it is the first of its group: its micro-batch brings the prompt's embeddings, once for the group."""


class GroupOrder(Protocol):
    """Which prompts the groups of an iteration are of: a loader of prompts of any modality."""

    group_size: int
    """Samples of a group."""

    def groups(self, iteration: int) -> list[int]:
        """Rows of the training prompts, one for each group of the iteration, over all ranks."""
        ...


def requests_of(prompts: GroupOrder, iteration: int, data_rank: int, num_data_ranks: int) -> list[SampleRequest]:
    """A data-parallel rank's samples of an iteration: whole groups, numbered over all ranks."""
    groups = prompts.groups(iteration)
    return [
        SampleRequest(group * prompts.group_size + member, group, groups[group], is_first=member == 0)
        for group in range_of_rank(len(groups), data_rank, num_data_ranks)
        for member in range(prompts.group_size)
    ]


@dataclass(frozen=True, kw_only=True)
class Rollout(TensorRows, ABC):
    """B samples that a policy drew. A subclass of a modality adds what its replay needs."""

    requests: list[SampleRequest] = by_row()
    versions: list[int] = by_row()
    """B numbers of iterations that the policy had been updated when it drew the sample."""
    samples: list[Sample] | None = by_row(None)
    """B samples as rewards see them; None on the way from the sampler, since they go to the scorer by themselves."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    @abstractmethod
    def num_rows(self) -> list[int]:
        """Decisions of each of the B samples that are learned from: the R rows of an update, sample by sample."""

    @property
    def lengths(self) -> list[int]:
        """How much of a pass each of the B samples takes up, such as its tokens; all take 1 where they are alike."""
        return [1] * len(self)

    @property
    def sample_ids(self) -> list[int]:
        """B numbers, unique within the iteration."""
        return [request.sample_id for request in self.requests]


@dataclass(frozen=True)
class Passes:
    """The forward and backward passes of one optimiser step."""

    num_rows: float
    """Rows of all ranks that it learns from."""
    num_samples: float
    """Samples of all ranks that have such rows."""
    parts: list[torch.Tensor]
    """int64: the samples of this rank in each of its passes, perhaps none. All ranks have equally many passes."""


class RankBatch(NamedTuple):
    """What a data-parallel rank learns from in an iteration.

    On its way through the stream the values are handles of what a role has made (``runtime.roles.Handle``); a role that
    is called with it is given the values themselves.
    """

    rollouts: Sequence[Rollout]
    """Micro-batches that ``generate`` returned for the update, which hold the rank's samples and perhaps others."""
    samples: Sequence[list[Sample]]
    """What rewards saw of each of these."""
    sample_ids: Mapping[int, int]
    """Ids of the rank's samples, with their places among the samples of all ranks."""
    unfinished: Any = None
    """What the iteration left to the next, where it leaves something."""


def join_rollouts(rank_batch: RankBatch, device: torch.device) -> Any:
    """A rank's samples as one ``Rollout`` in the order of their ids, on the model's device."""
    rollouts = rank_batch.rollouts
    whole = type(rollouts[0]).cat(rollouts)
    whole = dataclasses.replace(whole, samples=[sample for samples in rank_batch.samples for sample in samples])
    row_of = {sample_id: row for row, sample_id in enumerate(whole.sample_ids)}
    rows = [row_of[sample_id] for sample_id in rank_batch.sample_ids]
    if rows != list(range(len(whole))):
        whole = whole.rows(torch.tensor(rows))
    return whole.to(device)


@dataclass(frozen=True)
class Drawn:
    """What was measured while samples of an evaluation were drawn."""

    values: dict[str, list[float]] = field(default_factory=dict)
    """One number per sample for each metric, which is the mean over the finite ones of all ranks."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that all ranks agree on already."""


MAX_EXTREMES = 8
"""Texts of an iteration with the highest rewards that are kept, and as many with the lowest."""


def records_of(
    rank_batch: RankBatch, scores: Scores, advantages: torch.Tensor, seed: int, num_groups: int = 2
) -> list[SampleRecord]:
    """Samples of a rank, for the run folder: its first few groups, and of texts those with the highest and the lowest
    rewards of all ranks' samples.

    Args:
        rank_batch: the rank's.
        scores: of the samples of all ranks, in the order of their ids.
        advantages: float32, one for each of these samples.
        seed: of the run.
        num_groups: how many.
    """
    ids = rank_batch.sample_ids
    rows = [
        (request, sample, version)
        for rollout, samples in zip(rank_batch.rollouts, rank_batch.samples, strict=True)
        for request, sample, version in zip(rollout.requests, samples, rollout.versions, strict=True)
        if request.sample_id in set(ids)
    ]
    groups = list(dict.fromkeys(request.group_id for request, _, _ in rows))[:num_groups]
    order = np.argsort(scores.total, kind="stable")[: int(np.isfinite(scores.total).sum())]  # NaN comes last
    extremes = {*order[:MAX_EXTREMES].tolist(), *order[-MAX_EXTREMES:].tolist()}
    return [
        scores.record(
            ids[request.sample_id],
            sample,
            kind="train",
            seed=seed,
            sample_id=request.sample_id,
            policy_version=version,
            advantage=float(advantages[ids[request.sample_id]]),
        )
        for request, sample, version in rows
        if request.group_id in groups or (sample.text is not None and ids[request.sample_id] in extremes)
    ]
