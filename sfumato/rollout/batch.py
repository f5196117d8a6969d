"""What one iteration samples, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sfumato.data.prompts import Prompt
from sfumato.models.diffusion.base import Conditioning
from sfumato.rewards.base import Sample
from sfumato.rollout.diffusion import Trajectories


@dataclass(frozen=True)
class SampleRequest:
    """One sample that is to be made."""

    sample_id: int
    """Unique within the iteration, over all ranks; its noise is keyed by it."""
    group_id: int
    """Samples of one prompt of the iteration share it."""
    prompt: Prompt


@dataclass(frozen=True)
class RolloutBatch:
    """B samples that are in this process."""

    requests: list[SampleRequest]
    trajectories: Trajectories
    conditioning: Conditioning
    """One row per prompt, kept once for its whole group."""
    conditioning_rows: list[int]
    """B rows of ``conditioning``."""
    images: list[np.ndarray]
    """B images, uint8 ``[H, W, 3]``."""
    policy_version: int
    """Number of iterations that the policy had been updated when it made them."""

    def __len__(self) -> int:
        return len(self.requests)

    def conditioning_of(self, index: torch.Tensor) -> Conditioning:
        """One row per sample at ``index``."""
        return self.conditioning.rows([self.conditioning_rows[row] for row in index.tolist()])

    def sample(self, row: int) -> Sample:
        """A sample as rewards see it."""
        request = self.requests[row]
        return Sample(
            image=self.images[row],
            prompt=request.prompt.text,
            metadata=request.prompt.metadata,
            group_id=request.group_id,
        )

    @staticmethod
    def cat(parts: Sequence[RolloutBatch]) -> RolloutBatch:
        """Micro-batches of one policy version as one batch."""
        rows, offset = [], 0
        for each in parts:
            rows += [offset + row for row in each.conditioning_rows]
            offset += len(each.conditioning)
        return RolloutBatch(
            [request for each in parts for request in each.requests],
            Trajectories.cat([each.trajectories for each in parts]),
            Conditioning.cat([each.conditioning for each in parts]),
            rows,
            [image for each in parts for image in each.images],
            parts[0].policy_version,
        )
