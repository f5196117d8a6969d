"""From rewards to advantages within groups of samples that share a prompt.

N samples; samples with the same integer id form a group, even where their prompts differ. A sample whose reward is
missing (NaN) is left out of every statistic. ``has_both_signs`` says that a group's better samples have advantages
above 0 and its worse ones below 0, for any rewards: some objectives need that, others do not allow it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import torch

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float32, Float64, Int64
    from torch import Tensor


ROUNDING = 1e-12
"""Rewards of a group that differ by no more than this part of the largest, or of 1, are equal."""
LARGEST = 1e100
"""Largest magnitude of a reward: squared deviations of larger ones would be infinite, and their advantages 0."""


@dataclass(frozen=True)
class Advantages:
    """Advantages of one step's samples, as ``compute`` of every class in this file returns them."""

    values: Float32[Tensor, "samples"]
    """float32 ``[N]``; 0 where the reward is missing."""
    failed: Bool[Tensor, "samples"]
    """bool ``[N]``: the reward was NaN; the sample must not be trained on."""
    no_spread: Bool[Tensor, "samples"]
    """bool ``[N]``: all rewards of the sample's group are equal (or only one is left), so none is better."""
    left_out: Bool[Tensor, "samples"]
    """bool ``[N]``: the sample was not chosen, where only some of a group are trained on."""
    metrics: dict[str, float]
    """Statistics for the log."""
    rewards: Float64[Tensor, "samples"] | None = None
    """float64 ``[N]``: the rewards that they were computed from, NaN where one is missing; None where unknown."""
    components: Mapping[str, Float[Tensor, "samples"]] = field(default_factory=dict)
    """``[N]`` by name of the reward: the values that were combined into ``rewards``; empty where unknown."""

    def rows(self, index: Sequence[int]) -> Advantages:
        """The samples at ``index``."""
        chosen = torch.tensor(list(index), dtype=torch.long)
        return Advantages(
            values=self.values[chosen],
            failed=self.failed[chosen],
            no_spread=self.no_spread[chosen],
            left_out=self.left_out[chosen],
            metrics=self.metrics,
            rewards=None if self.rewards is None else self.rewards[chosen],
            components={name: values[chosen] for name, values in self.components.items()},
        )

    def useful(self, keep_no_spread: bool) -> Bool[Tensor, "samples"]:
        """bool ``[N]``: samples to train on. ``keep_no_spread`` includes those of groups with equal rewards."""
        trained = ~self.failed & ~self.left_out
        return trained if keep_no_spread else trained & ~self.no_spread


class RewardSumAdvantage:
    """Base of advantages that need only the weighted sum of a sample's rewards; a subclass implements ``of_sums``."""

    def compute(
        self,
        rewards: Float[Tensor, "samples"],
        group_ids: Int64[Tensor, "samples"],
        components: Mapping[str, Float[Tensor, "samples"]] | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> Advantages:
        """Advantages of one step's samples.

        Args:
            rewards: float64 ``[N]``, NaN where scoring failed.
            group_ids: int64 ``[N]``.
            components: ``[N]`` values of each reward; they are handed on to the result, and not computed with.
            weights: weight of each component; not used here, since ``rewards`` are the weighted sums.

        Raises:
            ValueError: when the shapes differ, or a reward is beyond ``LARGEST``.
        """
        del weights
        return replace(self.of_sums(check_rewards(rewards, group_ids), group_ids), components=components or {})

    def of_sums(self, rewards: Tensor, group_ids: Tensor) -> Advantages:
        """Advantages of float64 rewards ``[N]`` in groups ``[N]``."""
        raise NotImplementedError


@dataclass(frozen=True)
class GroupAdvantage(RewardSumAdvantage):
    """(reward - group mean) / (std + eps), as in GRPO (arXiv 2402.03300)."""

    type: ClassVar[str] = "group"
    has_both_signs: ClassVar[bool] = True

    std: Literal["group", "global", "none"] = "group"
    """Standard deviation of the group, of all rewards of the step, or none (Dr. GRPO)."""
    clip: float | None = 5.0
    """Advantages are clamped to [-clip, clip]; null clamps none."""
    ddof: Literal[0, 1] = 0
    """Divisor N - ddof of the variance: 0 as in flow_grpo, 1 as in DanceGRPO and in all frameworks for text."""
    eps: float = 1e-4
    """Added to the standard deviation: 1e-4 in flow_grpo and TRL, 1e-5 in AReaL, 1e-6 in verl, slime and ROLL."""

    def of_sums(self, rewards: Tensor, group_ids: Tensor) -> Advantages:
        scored = rewards[torch.isfinite(rewards)]
        overall = scored.std(correction=self.ddof) if len(scored) > self.ddof else rewards.new_zeros(())

        def standardise(group: Tensor) -> Tensor:
            std = {"group": group.std(correction=self.ddof), "global": overall}.get(self.std)
            return (group - group.mean()) / (1.0 if std is None else std + self.eps)

        return _clip_and_summarise(rewards, group_ids, _map_groups(rewards, group_ids, standardise), self.clip)


@dataclass(frozen=True)
class LeaveOneOut(RewardSumAdvantage):
    """Reward minus the mean of the group's other rewards, as in RLOO (arXiv 2402.14740)."""

    type: ClassVar[str] = "rloo"
    has_both_signs: ClassVar[bool] = True

    clip: float | None = 5.0
    """Advantages are clamped to [-clip, clip]; null clamps none."""
    std: Literal["global", "none"] = "none"
    """Divide by the standard deviation of all advantages of the step, or by none."""
    ddof: Literal[0, 1] = 0
    """Divisor N - ddof of that variance: 1 in TRL."""
    eps: float = 1e-4
    """Added to the standard deviation."""

    def of_sums(self, rewards: Tensor, group_ids: Tensor) -> Advantages:
        """As ``RewardSumAdvantage.of_sums``."""
        # Reward - mean of the n - 1 others = (reward - mean of all n) n / (n - 1).
        values = _map_groups(rewards, group_ids, lambda group: (group - group.mean()) * (len(group) / (len(group) - 1)))
        scored = values[torch.isfinite(rewards)]
        if self.std == "global" and len(scored) > self.ddof:
            values = values / (scored.std(correction=self.ddof) + self.eps)
        return _clip_and_summarise(rewards, group_ids, values, self.clip)


@dataclass(frozen=True)
class GDPO:
    """Each reward standardised within groups, then their weighted sum standardised over the step (arXiv 2601.05242).

    So no reward dominates the others by its scale. As Flow-Factory computes it.
    """

    type: ClassVar[str] = "gdpo"
    has_both_signs: ClassVar[bool] = True
    by_reward: ClassVar[bool] = True

    clip: float = 5.0
    """Advantages are clamped to [-clip, clip]."""
    eps: float = 1e-6
    """Smallest standard deviation that is divided by."""

    def compute(
        self,
        rewards: Float[Tensor, "samples"],
        group_ids: Int64[Tensor, "samples"],
        components: Mapping[str, Float[Tensor, "samples"]] | None = None,
        weights: Mapping[str, float] | None = None,
    ) -> Advantages:
        """As ``RewardSumAdvantage.compute``, from the ``components`` whose weight is not 0.

        A sample for which one of these is NaN counts as failed.

        Raises:
            ValueError: also when a weighted component is missing.
        """
        rewards = check_rewards(rewards, group_ids)
        used_weights = {name: weight for name, weight in (weights or {}).items() if weight != 0}
        missing = [name for name in used_weights if name not in (components or {})]
        if not used_weights or missing:
            raise ValueError(f"gdpo needs every weighted reward by itself; missing: {', '.join(missing) or 'all'}")
        assert components is not None  # without components every weighted one is missing
        used_rewards = {name: components[name].to(rewards) for name in used_weights}
        failed = ~torch.isfinite(torch.stack([rewards, *used_rewards.values()])).all(dim=0)
        combined = torch.zeros_like(rewards)
        for name, values in used_rewards.items():
            for members in groups_of(group_ids, failed):
                combined[members] += used_weights[name] * self._standardise(values[members])
        combined[~failed] = self._standardise(combined[~failed])
        no_spread = torch.stack(
            [_lacks_spread(component.masked_fill(failed, torch.nan), group_ids) for component in used_rewards.values()]
        ).all(dim=0)
        combined[failed | no_spread] = 0.0
        advantages = _summarise(rewards, group_ids, combined.clamp(-self.clip, self.clip), failed, no_spread)
        return replace(advantages, components=components or {})

    def _standardise(self, values: Tensor) -> Tensor:
        if len(values) == 0:
            return values
        return (values - values.mean()) / values.std(correction=0).clamp(min=self.eps)


@dataclass(frozen=True)
class BestWorst(RewardSumAdvantage):
    """The best samples of a group against its worst; the others are left out.

    ±1 labels the pairs of online DPO (flow_grpo, train_sd3_dpo); ``values: group`` keeps the standardised rewards, as
    DanceGRPO does for HunyuanVideo with 4 of 24 from either end. Of equal rewards the first counts.
    """

    type: ClassVar[str] = "best_worst"
    has_both_signs: ClassVar[bool] = True

    top: int = 1
    """Samples taken from the upper end of each group."""
    bottom: int = 1
    """Samples taken from the lower end; in a group that is too small, both ends shrink alike."""
    values: Literal["sign", "group"] = "sign"
    """Advantages of those chosen: +1 and -1, or the standardised reward within the whole group."""
    clip: float = 5.0
    """Standardised rewards are clamped to [-clip, clip]."""

    def __post_init__(self) -> None:
        if self.top < 1 or self.bottom < 1:
            raise ValueError("top and bottom must be at least 1")

    def of_sums(self, rewards: Tensor, group_ids: Tensor) -> Advantages:
        standardised = GroupAdvantage(clip=self.clip).of_sums(rewards, group_ids)
        sign = torch.zeros_like(standardised.values)
        for members in groups_of(group_ids, standardised.failed | standardised.no_spread):
            top, bottom = self.top, self.bottom
            if top + bottom > len(members):
                top, bottom = min(top, len(members) // 2), min(bottom, len(members) // 2)
            # Both sorts are stable, so of equal rewards the first of the group comes first in both; what is among the
            # worst already is skipped at the upper end.
            worst = rewards[members].argsort(stable=True)[:bottom]
            best = rewards[members].argsort(stable=True, descending=True)
            sign[members[worst]] = -1.0
            sign[members[best[~torch.isin(best, worst)][:top]]] = 1.0
        values = sign if self.values == "sign" else standardised.values * (sign != 0)
        return replace(standardised, values=values, left_out=sign == 0)


@dataclass(frozen=True)
class Best(RewardSumAdvantage):
    """1 for the best samples of a group, 0 for the others: best-of-n (flow_grpo, type sft)."""

    type: ClassVar[str] = "best"
    has_both_signs: ClassVar[bool] = False

    leave_out: bool = True
    """Leave the others out; false keeps them for the sake of a KL penalty, as flow_grpo does."""

    def of_sums(self, rewards: Tensor, group_ids: Tensor) -> Advantages:
        """As ``RewardSumAdvantage.of_sums``; all of a group without spread are its best."""
        failed = ~torch.isfinite(rewards)
        values = torch.zeros_like(rewards)
        for members in groups_of(group_ids, failed):
            values[members] = (rewards[members] == rewards[members].max()).to(values)
        left_out = (values == 0) & self.leave_out
        return _summarise(rewards, group_ids, values, failed, _lacks_spread(rewards, group_ids), left_out)


@dataclass(frozen=True)
class RawReward(RewardSumAdvantage):
    """The reward itself, without regard to groups: weights for reward-weighted regression (flow_grpo, type rwr)."""

    type: ClassVar[str] = "raw"
    has_both_signs: ClassVar[bool] = False

    def of_sums(self, rewards: Tensor, group_ids: Tensor) -> Advantages:
        failed = ~torch.isfinite(rewards)
        return _summarise(
            rewards, group_ids, rewards.masked_fill(failed, 0.0), failed, _lacks_spread(rewards, group_ids)
        )


def _map_groups(rewards: Tensor, group_ids: Tensor, of_group: Callable[[Tensor], Tensor]) -> Tensor:
    """Applies ``of_group`` to the scored rewards of each group; 0 where a reward is missing or the group lacks spread.

    A group of one scored sample lacks spread.
    """
    values = torch.zeros_like(rewards)
    for members in groups_of(group_ids, ~torch.isfinite(rewards) | _lacks_spread(rewards, group_ids)):
        values[members] = of_group(rewards[members])
    return values


def _clip_and_summarise(rewards: Tensor, group_ids: Tensor, values: Tensor, clip: float | None) -> Advantages:
    """Clamps the values of advantages that compare the samples of a group, and adds flags and metrics."""
    values = values if clip is None else values.clamp(-clip, clip)
    return _summarise(rewards, group_ids, values, ~torch.isfinite(rewards), _lacks_spread(rewards, group_ids))


def check_rewards(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """Rewards as float64. Raises ValueError when the shapes differ, or squares of the rewards could overflow."""
    if rewards.shape != group_ids.shape or rewards.ndim != 1:
        raise ValueError(f"rewards {tuple(rewards.shape)} and group_ids {tuple(group_ids.shape)} must both be [N]")
    largest = rewards[torch.isfinite(rewards)].abs().max() if torch.isfinite(rewards).any() else 0.0
    if largest > LARGEST:
        raise ValueError(f"a reward is {float(largest):.3g} in magnitude, more than {LARGEST:g}: scale rewards down")
    return rewards.to(torch.float64)


def groups_of(group_ids: Tensor, without: Tensor) -> Iterator[Tensor]:
    """Yields the indices of each group's samples, int64 ``[members]``, in ascending order of group ids.

    Args:
        group_ids: int64 ``[N]``.
        without: bool ``[N]``: samples that are left out. A group without any other sample is skipped.
    """
    for group in torch.unique(group_ids[~without]):
        yield torch.nonzero((group_ids == group) & ~without).flatten()


def has_spread(values: Tensor) -> bool:
    """Whether a group's rewards ``[N]``, at least one, differ by more than rounding: 0.1 + 0.2 and 0.3 teach nothing.

    Below 1 rounding is not that of the values: 0.1 + 0.2 - 0.3 is a sum of larger ones.
    """
    return bool(values.max() - values.min() > ROUNDING * values.abs().max().clamp(min=1))


def _lacks_spread(rewards: Tensor, group_ids: Tensor) -> Tensor:
    """bool ``[N]``: whether all scored rewards of the sample's group are equal, or none is scored."""
    lacks_spread = torch.ones(len(rewards), dtype=torch.bool)
    for members in groups_of(group_ids, ~torch.isfinite(rewards)):
        if has_spread(rewards[members]):
            lacks_spread[group_ids == group_ids[members[0]]] = False
    return lacks_spread


def _group_stds(rewards: Tensor, group_ids: Tensor, failed: Tensor) -> list[float]:
    """Standard deviation of each group's scored rewards; 0 for groups with equal rewards or none."""
    groups = [rewards[members] for members in groups_of(group_ids, failed)]
    stds = [float(group.std(correction=0)) if has_spread(group) else 0.0 for group in groups]
    return stds + [0.0] * (len(torch.unique(group_ids)) - len(stds))


def _summarise(
    rewards: Tensor,
    group_ids: Tensor,
    values: Tensor,
    failed: Tensor,
    no_spread: Tensor,
    left_out: Tensor | None = None,
) -> Advantages:
    """Puts values and flags ``[N]`` together with the step's metrics; None of ``left_out`` leaves out none."""
    stds = _group_stds(rewards, group_ids, failed)
    metrics = {
        "advantage/group_std": sum(stds) / max(len(stds), 1),
        "advantage/groups_without_spread": sum(std == 0 for std in stds) / max(len(stds), 1),
        "advantage/abs_mean": float(values.abs().mean()) if len(values) else 0.0,
    }
    left_out = torch.zeros_like(failed) if left_out is None else left_out
    return Advantages(values.to(torch.float32), failed, no_spread, left_out, metrics, rewards)
