"""Policy objectives on ratios of probabilities: from log-ratios of decisions and advantages to a loss per row.

``loss(...) -> (loss [R], stats)``: the caller takes the mean over all rows of a step; ``stats`` are detached sums over
rows, which the caller divides by the number of rows.

Shapes: R rows, each a decision that a policy made at random: a (sample, trained denoising step) pair, or a token;
... latent dimensions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Protocol

import torch

from sfumato.algorithms.dynamics import GaussianStep
from sfumato.algorithms.row_losses import RowLosses, masked

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float32
    from torch import Tensor


@dataclass(frozen=True)
class SampledSteps:
    """R denoising steps as the policy that sampled them drew them. Their standard deviation depends on no policy."""

    next_latents: Float32[Tensor, "rows *latent"]
    """float32 ``[R, ...]``: the latents that were drawn."""
    log_probs: Float32[Tensor, "rows"]
    """float32 ``[R]``: their log-probability under the policy that drew them."""
    step_sizes: Float32[Tensor, "rows"]
    """float32 ``[R]``: h = sigma - sigma' > 0."""
    means: Float32[Tensor, "rows *latent"] | None
    """float32 ``[R, ...]``: the means of the Gaussians they were drawn from; None where these were not stored."""

    def log_ratio(self, new: GaussianStep) -> Float32[Tensor, "rows"]:
        """log p_new - log p_old of each row, ``[R]``: in closed form where the means were stored, for precision."""
        if self.means is None:
            return new.log_prob(self.next_latents) - self.log_probs
        return new.log_ratio(self.means, self.next_latents)

    def old_means(self) -> Float32[Tensor, "rows *latent"]:
        """The means, ``[R, ...]``. Raises ValueError where they were not stored."""
        if self.means is None:
            raise ValueError("this objective needs the means of the sampled steps")
        return self.means


@dataclass(frozen=True)
class Ratio:
    """The ratios of R decisions' probabilities under the policy to those under an older one."""

    log_ratio: Float32[Tensor, "rows"]
    """float32 ``[R]``, with gradients: log p - log p_old, or an objective's variant of it; 0 for equal policies."""
    kl: Float32[Tensor, "rows"] | None = None
    """float32 ``[R]``, without gradients: KL(old, new) of the distributions of the decisions; None where unknown."""
    divisor: Float32[Tensor, "rows"] | None = None
    """float32 ``[R]``: divisor of the losses, which evens out the gradients of denoising steps; None is 1."""


class RatioObjective(Protocol):
    """A policy objective on ratios of probabilities."""

    @property
    def replay_tolerance(self) -> float:
        """Largest absolute log-ratio that may show while the policy is still the one that sampled."""
        ...

    def ratio(self, new: GaussianStep, old: SampledSteps) -> Ratio:
        """The ratios of R denoising steps, from the Gaussians of the dynamics, as ``loss`` takes them."""
        ...

    def loss(
        self, ratio: Ratio, advantages: Float[Tensor, "rows"], mask: Bool[Tensor, "rows"] | None = None
    ) -> RowLosses:
        """The loss ``[R]`` (lower is better) and its statistics.

        Args:
            ratio: of R decisions.
            advantages: ``[R]``.
            mask: bool ``[R]``: decisions that are learned from; the others have a loss of 0 and no part in the
                statistics. None is all.
        """
        ...


def clipped_surrogate(
    log_ratio: Float[Tensor, "rows"],
    advantages: Float[Tensor, "rows"],
    low: float,
    high: float,
    mask: Bool[Tensor, "rows"] | None = None,
) -> RowLosses:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) (PPO, arXiv 1707.06347, eq. 7).

    Args:
        log_ratio: ``[R]``.
        advantages: ``[R]``.
        low, high: clip ranges, above 0.
        mask: bool ``[R]``, as ``RatioObjective.loss`` has it.

    Returns:
        The loss ``[R]`` and sums over rows named ``ratio/...``.
    """
    log_ratio = masked(log_ratio, mask)  # before exp: an overflow outside the mask would make gradients NaN
    ratio = torch.exp(log_ratio)
    clipped = ratio.clamp(1 - low, 1 + high)
    loss = masked(torch.maximum(-advantages * ratio, -advantages * clipped), mask)
    with torch.no_grad():
        stats = ratio_sums(log_ratio, ratio, mask)
        stats["ratio/clipped_high"] = masked((ratio > 1 + high).float(), mask).sum()
        stats["ratio/clipped_low"] = masked((ratio < 1 - low).float(), mask).sum()
    return loss, stats


def ratio_sums(
    log_ratio: Float[Tensor, "rows"], ratio: Float[Tensor, "rows"], mask: Bool[Tensor, "rows"] | None
) -> dict[str, Float[Tensor, ""]]:
    """Sums over rows of ratios ``[R]``, and of half their squared logarithms.

    ``log_ratio`` ``[R]`` must be 0 outside the mask.
    """
    return {
        "ratio/mean": masked(ratio.detach(), mask).sum(),
        "ratio/approx_kl": 0.5 * (log_ratio.detach() ** 2).sum(),
    }


def check_clip_ranges(clip_range: float, clip_range_high: float | None) -> None:
    """Raises ValueError when a clip range is not above 0."""
    if not clip_range > 0 or (clip_range_high is not None and not clip_range_high > 0):
        raise ValueError("clip ranges must be above 0")


@dataclass(frozen=True)
class ClippedRatio:
    """max(-A r, -A clip(r, 1 - low, 1 + high)) (arXiv 1707.06347, eq. 7)."""

    type: ClassVar[str] = "clipped_ratio"

    clip_range: float = 1e-4
    """The ratio is clipped to [1 - clip_range, 1 + clip_range_high]; small, since log-probs are means over elements."""
    clip_range_high: float | None = None
    """Upper clip range where it differs from the lower one."""

    def __post_init__(self) -> None:
        check_clip_ranges(self.clip_range, self.clip_range_high)

    @property
    def replay_tolerance(self) -> float:
        """A tenth of the clip range."""
        return self.clip_range / 10

    def ratio(self, new: GaussianStep, old: SampledSteps) -> Ratio:
        """log p_new - log p_old of R denoising steps."""
        return Ratio(old.log_ratio(new))

    def loss(
        self, ratio: Ratio, advantages: Float[Tensor, "rows"], mask: Bool[Tensor, "rows"] | None = None
    ) -> RowLosses:
        """As ``RatioObjective.loss``."""
        high = self.clip_range if self.clip_range_high is None else self.clip_range_high
        return clipped_surrogate(ratio.log_ratio, advantages, self.clip_range, high, mask)


@dataclass(frozen=True)
class Guard(ClippedRatio):
    """The clipped surrogate of the recentred log-ratio, divided by the step size h (``recentred_log_ratio`` of steps).

    1 / h evens out the gradients of the steps. The term that recentring adds is computed for each sample: flow_grpo
    averages it over the batch (its issue 244). Flow-Factory omits 1 / h.
    """

    type: ClassVar[str] = "guard"

    clip_range: float = 2e-6
    """The ratio is clipped to [1 - clip_range, 1 + clip_range_high]."""

    def ratio(self, new: GaussianStep, old: SampledSteps) -> Ratio:
        """The recentred log-ratio of R denoising steps. Raises ValueError when the old means were not stored."""
        return Ratio(new.recentred_log_ratio(old.old_means(), old.next_latents), divisor=old.step_sizes)

    def loss(
        self, ratio: Ratio, advantages: Float[Tensor, "rows"], mask: Bool[Tensor, "rows"] | None = None
    ) -> RowLosses:
        """As ``RatioObjective.loss``."""
        loss, stats = super().loss(ratio, advantages, mask)
        return loss if ratio.divisor is None else loss / ratio.divisor, stats


@dataclass(frozen=True)
class DPPO:
    """-A r, masked where the step left the trust region and the update would lead further away from the old policy.

    A row is masked when KL(old, new) = mean((mu - mu_old)^2) / 2S^2 has reached the threshold and the ratio has
    already moved in the direction that its advantage asks for.
    """

    type: ClassVar[str] = "dppo"

    kl_threshold: float = 1e-5
    """KL divergence per element from which rows are masked."""
    scale_by_variance: bool = True
    """Divide the squared distance of the means by S^2; false measures it as it is."""

    def __post_init__(self) -> None:
        if not self.kl_threshold > 0:
            raise ValueError("kl_threshold must be above 0")

    @property
    def replay_tolerance(self) -> float:
        """A tenth of the threshold."""
        return self.kl_threshold / 10

    def ratio(self, new: GaussianStep, old: SampledSteps) -> Ratio:
        """log p_new - log p_old of R denoising steps, and their KL. Raises ValueError without the old means."""
        with torch.no_grad():
            kl = new.kl(old.old_means()) if self.scale_by_variance else new.squared_distance(old.old_means()) / 2
        return Ratio(old.log_ratio(new), kl)

    def loss(
        self, ratio: Ratio, advantages: Float[Tensor, "rows"], mask: Bool[Tensor, "rows"] | None = None
    ) -> RowLosses:
        """As ``RatioObjective.loss``. Raises ValueError when no KL is known."""
        if ratio.kl is None:
            raise ValueError("dppo needs the KL divergence from the old policy of each decision")
        log_ratio = masked(ratio.log_ratio, mask)
        r = torch.exp(log_ratio)
        with torch.no_grad():
            far = ratio.kl >= self.kl_threshold
            # Only where a further update would increase the distance: back towards the old policy gradients flow.
            high = far & (r > 1) & (advantages > 0)
            low = far & (r < 1) & (advantages < 0)
        loss = masked(torch.where(high | low, torch.zeros_like(r), -advantages * r), mask)
        stats = ratio_sums(log_ratio, r, mask)
        stats["ratio/masked_high"] = masked(high.float(), mask).sum()
        stats["ratio/masked_low"] = masked(low.float(), mask).sum()
        stats["kl/old"] = masked(ratio.kl, mask).sum()
        return loss, stats
