"""Which policy the ratio of an objective is taken to, where denoising steps may have been drawn by an older one.

Shapes: R rows, each a (sample, trained step) pair; ... latent dimensions.
"""

from __future__ import annotations

import dataclasses

import torch

from sfumato.algorithms.dynamics.step import GaussianStep
from sfumato.algorithms.objectives.ratio import RatioObjective
from sfumato.algorithms.objectives.steps import SampledSteps
from sfumato.algorithms.off_policy.corrections import OffPolicy
from sfumato.algorithms.off_policy.mismatch import Mismatch


def old_policy(
    objective: RatioObjective,
    off_policy: OffPolicy,
    behaviour: SampledSteps,
    proximal: GaussianStep | None,
    sample_of_row: torch.Tensor,
    mismatch: Mismatch | None = None,
) -> tuple[SampledSteps, torch.Tensor]:
    """What an objective takes as its old policy, and factors of its loss.

    Args:
        objective: says what its ratio is.
        off_policy: the correction.
        behaviour: what was drawn, and by which means.
        proximal: the policy at the start of the update. None where the behaviour policy was that policy, or nobody
            knows: the behaviour policy is the old one, and nothing is measured.
        sample_of_row: int64 ``[R]``: rows of one sample share a number, and all are there.
        mismatch: counts the rows; None does not.

    Returns:
        The steps as the old policy drew them, or would have; and float32 ``[R]`` without gradients, 0 for rows that are
        left out, by which losses are multiplied, to be divided by the number of all rows.
    """
    if proximal is None:
        return behaviour, torch.ones_like(behaviour.log_probs)
    log_ratio = objective.ratio(proximal, behaviour).log_ratio.detach()
    correction = off_policy.correct(log_ratio, sample_of_row)
    if mismatch is not None:
        kl = None if behaviour.means is None else proximal.kl(behaviour.means)
        mismatch.add(log_ratio, correction, behaviour.log_ratio(proximal), kl)
    return redrawn(behaviour, proximal) if off_policy.uses_proximal else behaviour, correction.weights


def redrawn(behaviour: SampledSteps, proximal: GaussianStep) -> SampledSteps:
    """The same latents as if the proximal policy had drawn them."""
    log_probs = proximal.log_prob(behaviour.next_latents).detach()
    return dataclasses.replace(behaviour, log_probs=log_probs, means=proximal.mean.detach())
