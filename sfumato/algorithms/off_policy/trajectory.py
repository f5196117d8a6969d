"""The loss of an objective on trajectories whose steps an older policy may have drawn.

Shapes: R rows, each a (sample, trained step) pair; ... latent dimensions.
"""

from __future__ import annotations

import dataclasses

import torch

from sfumato.algorithms.dynamics.step import GaussianStep, mean_over_sample
from sfumato.algorithms.objectives.trajectory import Loss, SampledSteps, TrajectoryObjective
from sfumato.algorithms.off_policy.corrections import OffPolicy
from sfumato.algorithms.off_policy.mismatch import Mismatch


def corrected_loss(
    objective: TrajectoryObjective,
    off_policy: OffPolicy,
    new: GaussianStep,
    behaviour: SampledSteps,
    advantages: torch.Tensor,
    sample_of_row: torch.Tensor,
    proximal_means: torch.Tensor | None = None,
    mismatch: Mismatch | None = None,
) -> Loss:
    """The objective's loss, its ratio taken to the proximal policy and weighted as the correction says.

    Args:
        objective: the objective.
        off_policy: the correction.
        new: the policy that is trained, with gradients.
        behaviour: what was drawn, and by which means.
        advantages: ``[R]``.
        sample_of_row: int64 ``[R]``: rows of one sample share a number, and all are there.
        proximal_means: float32 ``[R, ...]``: means of the policy at the start of the update; in its first optimiser
            step they are ``new.mean``. None where the behaviour policy was that policy, or nobody knows: the objective
            is taken as it is and nothing is measured.
        mismatch: counts the rows; None does not.

    Returns:
        The loss ``[R]``, 0 for rows that are left out, to be divided by the number of all rows; and the objective's
        sums over rows, those left out included.
    """
    if proximal_means is None:
        return objective.loss(new, behaviour, advantages)
    proximal = dataclasses.replace(new, mean=proximal_means.detach())  # all else does not depend on the policy
    log_ratio = objective.log_ratio(proximal, behaviour).detach()
    correction = off_policy.correct(log_ratio, sample_of_row)
    if mismatch is not None:
        mismatch.add(log_ratio, correction, behaviour.log_ratio(proximal), _kl(behaviour, proximal))
    if not off_policy.uses_proximal:
        return objective.loss(new, behaviour, advantages)
    losses, stats = objective.loss(new, redrawn(behaviour, proximal), advantages)
    return losses * correction.weights, stats


def redrawn(behaviour: SampledSteps, proximal: GaussianStep) -> SampledSteps:
    """The same latents as if the proximal policy had drawn them: what an objective takes as its old policy."""
    log_probs = proximal.log_prob(behaviour.next_latents).detach()
    return dataclasses.replace(behaviour, log_probs=log_probs, means=proximal.mean.detach())


def _kl(behaviour: SampledSteps, proximal: GaussianStep) -> torch.Tensor | None:
    """KL of the two Gaussians per element, ``[R]``; None where the means were not kept."""
    if behaviour.means is None:
        return None
    return mean_over_sample((proximal.mean - behaviour.means) ** 2) / (2 * proximal.std**2)
