"""Models that predict noise or v on variance-preserving paths: Stable Diffusion and CogVideoX.

They were trained on x_vp = a x0 + c eps with a^2 + c^2 = 1 at 1000 timesteps, and are flow models after a change of
scale and time: with s = c / (a + c)

    x = x_vp / (a + c) = (1 - s) x0 + s eps,    velocity = eps - x0 = (eps - x) / (1 - s)

so that one deterministic step in s is one step of DDIM (arXiv 2010.02502), and ``DDIM`` of
``sfumato.algorithms.dynamics`` with eta 1 the step that DDPO samples with (arXiv 2305.13301). The schedule of Stable
Diffusion begins below s = 1: ``start`` scales the first latents accordingly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar, Unpack

import torch
from torch import Tensor

from sfumato.models.diffusion.base import DiffusionModel, ModelOptions
from sfumato.models.diffusion.schedulers import as_ddim, check_unet_scheduler, unet_levels, unet_sigmas, unet_start

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler

SAME_TIMESTEP = 1e-3
"""A timestep this close to an integer is rounded to it: it was a point of the schedule before float32 rounding."""


class VariancePreserving(DiffusionModel):
    """Base class of such families."""

    timestep_sampling: ClassVar[str] = "uniform"

    def __init__(self, pipeline: DiffusionPipeline, **options: Unpack[ModelOptions]) -> None:
        """As ``DiffusionModel``."""
        super().__init__(pipeline, **options)
        self.levels = unet_levels(pipeline.scheduler)
        """Noise level s of each timestep: float64, ascending."""
        self.largest = float(self.levels[-1])

    def check_scheduler(self) -> None:
        check_unet_scheduler(self.pipeline.scheduler)

    def schedule(self) -> DDIMScheduler:
        """A DDIMScheduler with the noise schedule and timestep spacing of the pipeline's scheduler."""
        return as_ddim(self.pipeline.scheduler)

    def sigmas(self, num_steps: int, latent_shape: Sequence[int]) -> Tensor:
        """Noise levels s of the pipeline's scheduler, then 0.

        Trajectories differ from those of diffusers' DDIM in two points. With ``set_alpha_to_one`` false, DDIM stops at
        the noise level of the first timestep (s = 0.028 in Stable Diffusion); here it goes on to 0, as with
        EulerDiscreteScheduler, with which XL is published. With ``timestep_spacing`` trailing or linspace, a step of
        DDIM misses the next level if the number of steps does not divide that of timesteps; here it ends at that level.
        """
        return unet_sigmas(self.pipeline.scheduler, num_steps, self.levels)

    def start(self, noise: Tensor, sigma: Tensor) -> Tensor:
        """The noise, scaled to the variance with which the pipeline's scheduler starts."""
        return noise * unet_start(self.pipeline.scheduler, sigma)

    def training_sigma(self, sigma: Tensor) -> Tensor:
        """s of the timestep at a fraction ``sigma`` of the schedule.

        So uniform random numbers give the noise levels that the model was trained with.
        """
        levels = self.levels.to(sigma.device)
        place = sigma.double() * (len(levels) - 1)
        lower = place.floor().long().clamp(0, len(levels) - 2)
        return torch.lerp(levels[lower], levels[lower + 1], place - lower).to(torch.float32)

    def loss_weight(self, sigma: Tensor) -> Tensor:
        """Weight that makes the squared error of the velocity that of the network's prediction, its training objective.

        It is (1 - s)^2 for noise and (1 - s)^2 + s^2 for v.
        """
        predicts_noise = self.pipeline.scheduler.config.prediction_type == "epsilon"
        return (1 - sigma) ** 2 if predicts_noise else (1 - sigma) ** 2 + sigma**2

    @property
    def shift(self) -> float:
        return 1.0

    def timestep(self, sigma: Tensor) -> Tensor:
        """The timestep whose noise level is ``sigma``: interpolated between timesteps, and clamped to the schedule."""
        levels = self.levels.to(sigma.device)
        upper = torch.searchsorted(levels, sigma.double().contiguous()).clamp(1, len(levels) - 1)
        below = levels[upper - 1]
        above = levels[upper]
        interpolated = upper - 1 + ((sigma - below) / (above - below)).clamp(0, 1)
        nearest = interpolated.round()
        return torch.where((interpolated - nearest).abs() < SAME_TIMESTEP, nearest, interpolated).to(torch.float32)

    def variance_preserving(self, latents: Tensor, sigma: Tensor) -> Tensor:
        """The latents on the path that the network was trained on, float32."""
        return latents.float() / self._velocity_scale(sigma, latents)

    def velocity(self, predicted: Tensor, latents: Tensor, sigma: Tensor) -> Tensor:
        """The velocity, float32, of the network's prediction.

        A noise level above the schedule's largest one is treated as that one.
        """
        x = latents.float()
        predicted = predicted.float()
        s = _for_each(sigma, latents)
        if self.pipeline.scheduler.config.prediction_type == "v_prediction":
            # v = a eps - c x0, with a = (1 - s) / norm and c = s / norm, solved for eps - x0.
            norm = self._velocity_scale(sigma, latents)
            return predicted / norm + (2 * s - 1) * x / norm**2
        # Above the largest level of the schedule, and at s = 1, the divisor must not become 0.
        return (predicted - x) / (1 - s.clamp(max=self.largest))

    @staticmethod
    def _velocity_scale(sigma: Tensor, latents: Tensor) -> Tensor:
        """1 / (a + c) for each row."""
        s = _for_each(sigma, latents)
        return torch.sqrt((1 - s) ** 2 + s**2)


def _for_each(sigma: Tensor, latents: Tensor) -> Tensor:
    """Noise levels ``[B]`` with the dimensions of latents."""
    return sigma.reshape(-1, *[1] * (latents.ndim - 1))
