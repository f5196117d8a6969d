"""What one iteration samples, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sfumato.data.prompts import Prompt, PromptLoader
from sfumato.models.diffusion.base import Conditioning
from sfumato.parallel.mesh import Mesh
from sfumato.rewards.base import Sample
from sfumato.rewards.scoring.scores import Scores
from sfumato.rollout.diffusion import Trajectories
from sfumato.rollout.final_samples import FinalSamples
from sfumato.tracking.samples import SampleRecord


@dataclass(frozen=True)
class SampleRequest:
    """One sample that is to be made."""

    sample_id: int
    """Unique within the iteration, over all ranks; its noise is keyed by it."""
    group_id: int
    """Samples of one prompt of the iteration share it."""
    prompt: Prompt


def requests_of(prompts: PromptLoader, iteration: int, mesh: Mesh) -> list[SampleRequest]:
    """This rank's samples of an iteration: whole groups, numbered over all ranks."""
    groups = prompts.groups(iteration)
    return [
        SampleRequest(group * prompts.group_size + member, group, groups[group])
        for group in mesh.share(len(groups))
        for member in range(prompts.group_size)
    ]


def sample_of(prompt: Prompt, image: np.ndarray, group_id: int, source: np.ndarray | None) -> Sample:
    """A sample as rewards see it."""
    return Sample(image=image, prompt=prompt.text, metadata=prompt.metadata, group_id=group_id, source=source)


@dataclass(frozen=True)
class RolloutBatch:
    """B samples that are in this process."""

    requests: list[SampleRequest]
    kept: Trajectories | FinalSamples
    """What the update needs of them."""
    conditioning: Conditioning
    """One row per prompt, kept once for its whole group."""
    conditioning_rows: list[int]
    """B rows of ``conditioning``."""
    images: list[np.ndarray]
    """B images, uint8 ``[H, W, 3]``, or videos, ``[F, H, W, 3]``."""
    sources: list[np.ndarray] | None
    """What they were made from: B images, uint8 ``[H, W, 3]``; None of a model that takes none."""
    latents: torch.Tensor
    """float32 ``[B, ...]``: of which the images were made."""
    policy_version: int
    """Number of iterations that the policy had been updated when it made them."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def sample_ids(self) -> list[int]:
        """B numbers."""
        return [each.sample_id for each in self.requests]

    @property
    def row_conditioning(self) -> Conditioning:
        """One row per sample."""
        return self.conditioning.rows(self.conditioning_rows)

    def rows(self, index: torch.Tensor) -> RolloutBatch:
        """The samples at ``index``."""
        chosen = index.tolist()
        return RolloutBatch(
            [self.requests[row] for row in chosen],
            self.kept.rows(index),
            self.conditioning,
            [self.conditioning_rows[row] for row in chosen],
            [self.images[row] for row in chosen],
            None if self.sources is None else [self.sources[row] for row in chosen],
            self.latents[index],
            self.policy_version,
        )

    def sample(self, row: int) -> Sample:
        """A sample as rewards see it."""
        request, source = self.requests[row], None if self.sources is None else self.sources[row]
        return sample_of(request.prompt, self.images[row], request.group_id, source)

    def records(self, scores: Scores, advantages: torch.Tensor, seed: int, num_groups: int = 2) -> list[SampleRecord]:
        """The first few groups with their scores and advantages ``[B]``, for the run folder."""
        groups = list(dict.fromkeys(each.group_id for each in self.requests))[:num_groups]
        return [
            scores.record(
                row,
                self.sample(row),
                kind="train",
                seed=seed,
                sample_id=request.sample_id,
                policy_version=self.policy_version,
                advantage=float(advantages[row]),
            )
            for row, request in enumerate(self.requests)
            if request.group_id in groups
        ]

    @staticmethod
    def cat(parts: Sequence[RolloutBatch]) -> RolloutBatch:
        """Micro-batches of one policy version as one batch."""
        rows, offset = [], 0
        for each in parts:
            rows += [offset + row for row in each.conditioning_rows]
            offset += len(each.conditioning)
        return RolloutBatch(
            [request for each in parts for request in each.requests],
            type(parts[0].kept).cat([each.kept for each in parts]),
            Conditioning.cat([each.conditioning for each in parts]),
            rows,
            [image for each in parts for image in each.images],
            None if parts[0].sources is None else [source for each in parts for source in each.sources or ()],
            torch.cat([each.latents for each in parts]),
            parts[0].policy_version,
        )
