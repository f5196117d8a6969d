"""What one iteration samples, and what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sfumato.data.prompts import Prompt, PromptLoader
from sfumato.models.diffusion.base import Conditioning
from sfumato.parallel.mesh import share_of
from sfumato.rewards.base import Sample
from sfumato.rewards.scoring.scores import Scores
from sfumato.rollout.diffusion import Trajectories, blanked
from sfumato.rollout.final_samples import FinalSamples
from sfumato.tracking.samples import SampleRecord


@dataclass(frozen=True)
class SampleRequest:
    """One sample that is to be made: numbers only, whoever makes it has the prompts."""

    sample_id: int
    """Unique within the iteration, over all ranks; its noise is keyed by it."""
    group_id: int
    """Samples of one prompt of the iteration share it."""
    prompt_id: int
    """Row of the training prompts."""
    is_first: bool = False
    """Of its group: the micro-batch that holds it brings what the prompt's embeddings are, once for the group."""


def requests_of(prompts: PromptLoader, iteration: int, data_rank: int, num_data_ranks: int) -> list[SampleRequest]:
    """A data-parallel rank's samples of an iteration: whole groups, numbered over all ranks."""
    groups = prompts.groups(iteration)
    return [
        SampleRequest(group * prompts.group_size + member, group, groups[group], is_first=member == 0)
        for group in share_of(len(groups), data_rank, num_data_ranks)
        for member in range(prompts.group_size)
    ]


def sample_of(prompt: Prompt, image: np.ndarray, group_id: int, source: np.ndarray | None, damage: str = "") -> Sample:
    """A sample as rewards see it."""
    about = {"prompt": prompt.text, "metadata": prompt.metadata, "group_id": group_id, "source": source}
    return Sample(image=image, damage=damage, **about)


@dataclass(frozen=True)
class RolloutBatch:
    """B samples."""

    requests: list[SampleRequest]
    kept: Trajectories | FinalSamples
    """What the update needs of them."""
    conditioning: Conditioning | None
    """One row per prompt, kept once for its whole group; None of a micro-batch in which no group begins."""
    conditioning_groups: list[int]
    """The group of each row of ``conditioning``."""
    latents: torch.Tensor
    """float32 ``[B, ...]``: of which the images were made."""
    versions: list[int]
    """B numbers: of iterations that the policy had been updated when it made the sample."""
    samples: list[Sample] = dataclasses.field(default_factory=list)
    """B samples as rewards see them; empty on the way from the sampler, since they go to the scorer by themselves."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def sample_ids(self) -> list[int]:
        """B numbers."""
        return [each.sample_id for each in self.requests]

    @property
    def row_conditioning(self) -> Conditioning:
        """One row per sample."""
        row_of = {group: row for row, group in enumerate(self.conditioning_groups)}
        return self.conditioning.rows([row_of[each.group_id] for each in self.requests])

    def rows(self, index: torch.Tensor) -> RolloutBatch:
        """The samples at ``index``."""
        chosen = index.tolist()
        return dataclasses.replace(
            self,
            requests=[self.requests[row] for row in chosen],
            kept=self.kept.rows(index),
            latents=self.latents[index],
            versions=[self.versions[row] for row in chosen],
            samples=[self.samples[row] for row in chosen] if self.samples else [],
        )

    def to(self, device: torch.device) -> RolloutBatch:
        """The same with its tensors on another device; the very same if they are there."""
        if self.latents.device == device:
            return self
        conditioning = None if self.conditioning is None else self.conditioning.to(device)
        return dataclasses.replace(
            self, kept=self.kept.to(device), conditioning=conditioning, latents=self.latents.to(device)
        )

    @classmethod
    def made(
        cls,
        requests: list[SampleRequest],
        kept: Trajectories | FinalSamples,
        conditioning: Conditioning,
        groups: list[int],
        latents: torch.Tensor,
        version: int,
        damage: Sequence[str],
    ) -> RolloutBatch:
        """A micro-batch of one version, with the embeddings of the groups that begin in it.

        What is damaged becomes zeros: it is never learned from, but a row that only keeps other ranks company is
        multiplied by 0, which NaN survives.

        Args:
            requests, kept, latents: of B samples.
            conditioning: one row for each of ``groups``.
            groups: those that the samples belong to.
            version: of the policy.
            damage: what is wrong with each sample, empty where nothing is.
        """
        if any(damage):
            is_whole = torch.tensor([not each for each in damage], device=latents.device)
            kept, latents = kept.blanked(is_whole), blanked(latents, is_whole)
            conditioning = conditioning.blanked()
        begun = [each.group_id for each in requests if each.is_first]
        carried = conditioning.rows([groups.index(each) for each in begun]) if begun else None
        return cls(requests, kept, carried, begun, latents, [version] * len(requests))

    @staticmethod
    def cat(parts: Sequence[RolloutBatch]) -> RolloutBatch:
        """Micro-batches as one batch."""
        embedded = [each for each in parts if each.conditioning is not None]
        return RolloutBatch(
            [request for each in parts for request in each.requests],
            type(parts[0].kept).cat([each.kept for each in parts]),
            Conditioning.cat([each.conditioning for each in embedded]) if embedded else None,
            [group for each in embedded for group in each.conditioning_groups],
            torch.cat([each.latents for each in parts]),
            [version for each in parts for version in each.versions],
            [sample for each in parts for sample in each.samples],
        )


Part = tuple[Sequence[RolloutBatch], Sequence[list[Sample]], Sequence[int]]
"""What a data-parallel rank learns from: micro-batches, what of them rewards saw, and the ids of its samples,
which they hold."""


def records_of(
    part: Part, scores: Scores, advantages: torch.Tensor, seed: int, num_groups: int = 2
) -> list[SampleRecord]:
    """The first few groups of a data-parallel rank, for the run folder.

    Args:
        part: the rank's.
        scores, advantages: of the samples of all ranks, in the order of their ids.
        seed: of the run.
        num_groups: how many.
    """
    batches, samples, ids = part
    rows = [
        (request, sample, version)
        for batch, some in zip(batches, samples, strict=True)
        for request, sample, version in zip(batch.requests, some, batch.versions, strict=True)
        if request.sample_id in set(ids)
    ]
    groups = list(dict.fromkeys(request.group_id for request, _, _ in rows))[:num_groups]
    return [
        scores.record(
            request.sample_id,
            sample,
            kind="train",
            seed=seed,
            sample_id=request.sample_id,
            policy_version=version,
            advantage=float(advantages[request.sample_id]),
        )
        for request, sample, version in rows
        if request.group_id in groups
    ]


def join(part: Part, device: torch.device) -> RolloutBatch:
    """A data-parallel rank's samples in the order of their ids, on the model's device."""
    batches, samples, ids = part
    batch = RolloutBatch.cat(batches)
    batch = dataclasses.replace(batch, samples=[sample for each in samples for sample in each])
    row_of = {sample_id: row for row, sample_id in enumerate(batch.sample_ids)}
    rows = [row_of[each] for each in ids]
    if rows != list(range(len(batch))):
        batch = batch.rows(torch.tensor(rows))
    return batch.to(device)
