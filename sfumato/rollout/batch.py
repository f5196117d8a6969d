"""Requests for the samples of an iteration, and the samples that a policy drew, whatever the modality.

Shapes: B samples.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch

from sfumato.algorithms.rows import TensorRows, by_row
from sfumato.parallel.mesh import range_of_rank
from sfumato.rewards.base import Sample
from sfumato.tracking.samples import SampleRecord

if TYPE_CHECKING:
    from sfumato.rewards.scoring.scores import Scores


@dataclass(frozen=True)
class SampleRequest:
    """One sample that is to be drawn. It holds numbers only: the process that draws it has the prompts."""

    sample_id: int
    """Unique within the iteration, over all ranks; the sample's noise is keyed by it."""
    group_id: int
    """Shared by the samples of one prompt of the iteration."""
    prompt_id: int
    """Row of the training prompts."""
    is_first: bool = False
    """Whether it is the first of its group: its micro-batch holds the prompt's embeddings, once for the group."""


class GroupOrder(Protocol):
    """A loader of prompts of any modality: it says which prompts an iteration's groups are drawn for."""

    group_size: int
    """How many samples a group has."""

    def groups(self, iteration: int) -> list[int]:
        """Rows of the training prompts, one for each group of the iteration, over all ranks."""
        ...


def requests_of(prompts: GroupOrder, iteration: int, data_rank: int, num_data_ranks: int) -> list[SampleRequest]:
    """The requests of a data-parallel rank for an iteration: whole groups, numbered over all ranks."""
    groups = prompts.groups(iteration)
    return [
        SampleRequest(group * prompts.group_size + member, group, groups[group], is_first=member == 0)
        for group in range_of_rank(len(groups), data_rank, num_data_ranks)
        for member in range(prompts.group_size)
    ]


@dataclass(frozen=True, kw_only=True)
class Rollout(TensorRows, ABC):
    """B samples that a policy drew. The subclass of a modality adds what an update needs to replay them."""

    requests: list[SampleRequest] = by_row()
    versions: list[int] = by_row()
    """B versions of the policy that drew each sample: how many iterations it had been updated."""
    samples: list[Sample] | None = by_row(None)
    """B samples as rewards see them; None on the way from the sampler to the actor, as they are sent to the scorer
    separately."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    @abstractmethod
    def num_rows(self) -> list[int]:
        """How many decisions each of the B samples has. Together they are the R rows of an update, sample by sample."""

    @property
    def lengths(self) -> list[int]:
        """The cost of each of the B samples in a pass, such as its tokens; 1 where all samples cost the same."""
        return [1] * len(self)

    @property
    def sample_ids(self) -> list[int]:
        """The B ids, unique within the iteration."""
        return [request.sample_id for request in self.requests]

    def described(self, row: int) -> dict[str, object]:
        """What a modality writes of a sample besides its content and scores."""
        del row
        return {}


@dataclass(frozen=True)
class Passes:
    """The forward and backward passes of one optimiser step."""

    num_rows: float
    """Rows that the step learns from, over all ranks."""
    num_samples: float
    """Samples that these rows are of, over all ranks."""
    parts: list[torch.Tensor]
    """int64, positions of this rank's samples in each of its passes; empty in a pass that it makes only because other
    ranks need it: all ranks have the same number of passes."""


class RankBatch(NamedTuple):
    """What a data-parallel rank learns from in an iteration.

    In the driver, the fields hold handles of values that a role keeps (``runtime.roles.Handle``); a role that is called
    with a batch is given the values themselves.
    """

    rollouts: Sequence[Rollout]
    """Micro-batches as ``generate`` returned them. They hold the rank's samples, and may hold others."""
    samples: Sequence[list[Sample]]
    """The samples of each micro-batch as rewards see them."""
    sample_ids: Mapping[int, int]
    """Positions of the rank's samples among the samples of all ranks, by their ids."""
    unfinished: Any = None
    """The unfinished groups that the iteration leaves to the next, in a run with oversampling."""


def join_rollouts(rank_batch: RankBatch, device: torch.device) -> Any:
    """A rank's samples as one ``Rollout`` of the modality, in the order of ``sample_ids``, on the model's device."""
    rollouts = rank_batch.rollouts
    whole = type(rollouts[0]).cat(rollouts)
    whole = dataclasses.replace(whole, samples=[sample for samples in rank_batch.samples for sample in samples])
    row_of = {sample_id: row for row, sample_id in enumerate(whole.sample_ids)}
    rows = [row_of[sample_id] for sample_id in rank_batch.sample_ids]
    if rows != list(range(len(whole))):  # else all of it is wanted in this order: indexing would only copy it
        whole = whole.rows(torch.tensor(rows))
    return whole.to(device)


@dataclass(frozen=True)
class EvalStats:
    """Metrics that are measured while the samples of an evaluation are drawn."""

    values: dict[str, list[float]] = field(default_factory=dict)
    """One number per sample for each metric, which is the mean over the finite ones of all ranks."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics that are equal on all ranks already."""


MAX_EXTREMES = 8
"""How many texts with the highest rewards of an iteration are recorded, and as many with the lowest."""


def records_of(
    rank_batch: RankBatch,
    scores: Scores,
    advantages: torch.Tensor,
    seed: int,
    num_groups: int = 2,
    decisions: Mapping[int, Mapping[str, object]] | None = None,
    trained_ids: Collection[int] = (),
) -> list[SampleRecord]:
    """Records of a rank's samples for the run folder: all of its first few groups, and texts with extreme rewards.

    Texts are recorded where their rewards are among the highest or lowest of the samples of all ranks.

    Args:
        rank_batch: the rank's samples.
        scores: of the samples of all ranks, in the order of the positions in ``rank_batch.sample_ids``.
        advantages: float32, one for each of these samples.
        seed: of the run.
        num_groups: of how many groups all samples are recorded.
        decisions: what the update made of each sample's decisions, by its id.
        trained_ids: samples that the update learned from.
    """
    place_of = rank_batch.sample_ids
    drawn_samples = [
        (request, sample, version, rollout.described(row))
        for rollout, samples in zip(rank_batch.rollouts, rank_batch.samples, strict=True)
        for row, (request, sample, version) in enumerate(zip(rollout.requests, samples, rollout.versions, strict=True))
        if request.sample_id in place_of
    ]
    places_of_group: dict[int, list[int]] = {}
    for request, *_ in drawn_samples:
        places_of_group.setdefault(request.group_id, []).append(place_of[request.sample_id])
    spreads = {group: _spread_of_group(group, scores.total[places]) for group, places in places_of_group.items()}
    groups = list(dict.fromkeys(request.group_id for request, *_ in drawn_samples))[:num_groups]
    ascending = np.argsort(scores.total, kind="stable")[: int(np.isfinite(scores.total).sum())]  # NaN comes last
    extremes = {*ascending[:MAX_EXTREMES].tolist(), *ascending[-MAX_EXTREMES:].tolist()}
    return [
        scores.record(
            place_of[request.sample_id],
            sample,
            kind="train",
            seed=seed,
            sample_id=request.sample_id,
            policy_version=version,
            advantage=float(advantages[place_of[request.sample_id]]),
            learned={
                **spreads[request.group_id],
                "is_trained": request.sample_id in trained_ids,
                **described,
                **(decisions or {}).get(request.sample_id, {}),
            },
        )
        for request, sample, version, described in drawn_samples
        if request.group_id in groups or (sample.text is not None and place_of[request.sample_id] in extremes)
    ]


def _spread_of_group(group_id: int, totals: np.ndarray) -> dict[str, object]:
    """A group's mean reward and standard deviation over the samples that have one; NaN where none has."""
    scored = totals[np.isfinite(totals)]
    mean, deviation = (float(scored.mean()), float(scored.std())) if len(scored) else (float("nan"), float("nan"))
    return {"group_id": group_id, "group_mean": mean, "group_std": deviation}
