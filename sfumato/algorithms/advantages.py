"""From rewards to advantages within groups of samples that share a prompt.

N samples; a group is a set of samples with one integer id, whatever their prompts read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch


@dataclass(frozen=True)
class Advantages:
    """What ``GroupAdvantage.compute`` returns."""

    values: torch.Tensor
    """float32 ``[N]``; 0 where the reward is missing or the group has no spread."""
    failed: torch.Tensor
    """bool ``[N]``: the reward was NaN; the sample must not be trained on."""
    no_spread: torch.Tensor
    """bool ``[N]``: all rewards of the sample's group are equal (or only one is left), so nothing can be learned."""
    metrics: dict[str, float]
    """Statistics for the log."""

    def rows(self, index: Sequence[int]) -> Advantages:
        """The samples at ``index``."""
        chosen = torch.tensor(list(index), dtype=torch.long)
        return Advantages(self.values[chosen], self.failed[chosen], self.no_spread[chosen], self.metrics)

    def useful(self, keep_no_spread: bool) -> torch.Tensor:
        """bool ``[N]``: samples to train on; those of groups without spread only if asked for."""
        return ~self.failed if keep_no_spread else ~self.failed & ~self.no_spread


@dataclass(frozen=True)
class GroupAdvantage:
    """(reward - group mean) / (std + 1e-4), as in GRPO; a missing reward is left out of its group's statistics."""

    type: ClassVar[str] = "group"

    std: Literal["group", "global", "none"] = "group"
    """Population standard deviation of the group, of all rewards of the step, or none (Dr. GRPO)."""
    clip: float = 5.0
    """Advantages are clamped to [-clip, clip]."""

    def compute(self, rewards: torch.Tensor, group_ids: torch.Tensor) -> Advantages:
        """Advantages of one step's samples.

        Args:
            rewards: float64 ``[N]``, NaN where scoring failed.
            group_ids: int64 ``[N]``.

        Raises:
            ValueError: when the shapes differ.
        """
        if rewards.shape != group_ids.shape or rewards.ndim != 1:
            raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be [N]")
        rewards = rewards.to(torch.float64)
        failed = ~torch.isfinite(rewards)
        values = torch.zeros_like(rewards)
        no_spread = torch.zeros_like(failed)
        spreads = []
        global_std = rewards[~failed].std(correction=0) if (~failed).any() else torch.tensor(0.0, dtype=torch.float64)
        for group in torch.unique(group_ids):
            members = group_ids == group
            valid = members & ~failed
            group_rewards = rewards[valid]
            if len(group_rewards) == 0 or group_rewards.max() == group_rewards.min():
                no_spread |= members
                spreads.append(0.0)
                continue
            group_std = group_rewards.std(correction=0)
            spreads.append(float(group_std))
            scale = {"group": group_std + 1e-4, "global": global_std + 1e-4, "none": 1.0}[self.std]
            values[valid] = (group_rewards - group_rewards.mean()) / scale
        values = values.clamp(-self.clip, self.clip)
        metrics = {
            "advantage/group_std": sum(spreads) / max(len(spreads), 1),
            "advantage/groups_without_spread": sum(each == 0 for each in spreads) / max(len(spreads), 1),
            "advantage/abs_mean": float(values.abs().mean()) if len(values) else 0.0,
        }
        return Advantages(values.to(torch.float32), failed, no_spread, metrics)
