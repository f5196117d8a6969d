"""Dynamic sampling (DAPO, arXiv 2503.14476, equation 11): groups that teach nothing are drawn anew, of other prompts.

Each of an iteration's groups has a place. A group whose rewards have no spread is followed, in its place, by a group of
the next prompt that is reserved for that place, until one has spread or no more may be drawn. So the group that a place
has in the end follows from the groups of that place alone: not from the order in which rewards arrive, nor from how
ranks share the work (under torchrun each rank asks for groups of its own places).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from sfumato.algorithms.advantages import has_spread
from sfumato.config.rl import RLConfig
from sfumato.data.text.prompts import TextPromptLoader
from sfumato.errors import ConfigError
from sfumato.rewards.scoring.scores import Scores
from sfumato.rollout.batch import SampleRequest

ScoredGroups = Sequence[tuple[Sequence[SampleRequest], Scores]]


@dataclass(frozen=True)
class DynamicSampling:
    """``more_groups`` of a rollout stream. It remembers nothing, so that a resume goes on exactly.

    Place p holds the groups p, p + P, p + 2P … of P places; the samples of group g are g·n … g·n + n - 1. Group P + k
    is of the k-th prompt of ``TextPromptLoader.replacements``.
    """

    loader: TextPromptLoader
    """Gives the prompts of each iteration, and those that may replace them."""
    max_extra_groups: int
    """Most groups of an iteration that are drawn besides the P that it begins with. Place p may have those of its
    groups p + P, p + 2P … that are below P + ``max_extra_groups``, so the places share them as evenly as they can."""

    def __call__(self, iteration: int, scored: ScoredGroups, num_requested: int) -> list[list[SampleRequest]]:
        """The requests of the group that follows the one that was scored last; none if that one has spread.

        When all groups that a place may have are drawn, or no other prompts remain, it has no group to learn from: the
        update leaves it out, and takes the mean over the other places.
        """
        del num_requested
        requests, scores = scored[-1]
        if rewards_differ(scores.level):
            return []
        last_group = requests[0].group_id
        next_group = last_group + self.loader.num_prompts
        prompts = self.loader.replacements(iteration, self.max_extra_groups)
        if last_group >= len(prompts):  # group P + k has the k-th of these prompts, and k is ``last_group``
            return []
        first_sample = next_group * self.loader.group_size
        members = range(self.loader.group_size)
        return [
            [
                SampleRequest(first_sample + member, next_group, prompts[last_group], is_first=member == 0)
                for member in members
            ]
        ]


def dynamic_sampling(config: RLConfig, loader: TextPromptLoader, max_extra_groups: int) -> DynamicSampling | None:
    """``more_groups`` for the stream of a configured run; None where ``max_extra_groups`` is 0.

    Raises:
        ConfigError: when ranks that share a sample would each ask for groups by themselves.
    """
    if max_extra_groups == 0:
        return None
    if config.runtime.backend == "in_process" and config.train.ranks_per_sample > 1:
        raise ConfigError(
            f"rollout.max_extra_groups: the {config.train.ranks_per_sample} ranks that share a sample would each "
            "decide by themselves whether to draw more, and could part: set runtime.backend to ray, where one process "
            "decides"
        )
    return DynamicSampling(loader, max_extra_groups)


def rewards_differ(values: np.ndarray) -> bool:
    """Whether two of a group's rewards ``[n]`` differ by more than rounding; those that are missing do not count."""
    scored = values[np.isfinite(values)]
    return len(scored) > 1 and has_spread(torch.from_numpy(scored))


def sampling_metrics(group_ids: Sequence[int], num_prompts: int) -> dict[str, float]:
    """Metric: how many groups an iteration drew in the place of others.

    Args:
        group_ids: of all samples, as the stream's batch has them.
        num_prompts: how many groups the iteration began with.
    """
    return {"rollout/extra_groups": float(len(set(group_ids)) - num_prompts)}
