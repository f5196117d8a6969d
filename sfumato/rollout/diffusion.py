"""Denoising trajectories: sampling them with what an update needs, and replaying them with gradients.

Shapes: B samples, W trained steps, ... latent dimensions, T denoising steps. The same step function serves both
sides; latents, sigmas and noise are float32 in it, and the latent that is scored is the latent that is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sfumato.algorithms.dynamics import Dynamics, EulerODE, GaussianStep
from sfumato.algorithms.noise import keyed_normal
from sfumato.algorithms.objectives import SampledSteps
from sfumato.errors import NonFiniteError, SelfCheckError
from sfumato.models.diffusion.base import Conditioning, DiffusionModel
from sfumato.parallel.finite import finite_rows
from sfumato.rollout.step_cache import StepCache

LATENTS_NOT_FINITE = "its latents are NaN or infinite"
PICTURE_NOT_FINITE = (
    "its latents decode to NaN or infinite values (where the autoencoder overflows, set model.dtype fp32)"
)


@dataclass(frozen=True)
class Trajectories:
    """What an update needs of B sampled trajectories: the trained steps only."""

    steps: list[int]
    """The W trained denoising steps."""
    sigmas: torch.Tensor
    """float32 ``[T + 1]``, the whole schedule."""
    latents: torch.Tensor
    """float32 ``[B, W, ...]``: the latent before each trained step."""
    next_latents: torch.Tensor
    """float32 ``[B, W, ...]``: the latent that was drawn."""
    means: torch.Tensor
    """float32 ``[B, W, ...]``: the mean it was drawn around."""
    log_probs: torch.Tensor
    """float32 ``[B, W]``."""
    proximal_means: torch.Tensor | None = None
    """float32 ``[B, W, ...]``: the means of the policy at the start of an update, where it is another."""

    @property
    def proximal_rows(self) -> torch.Tensor | None:
        """``proximal_means`` of the B x W rows, sample by sample."""
        return None if self.proximal_means is None else self.proximal_means.flatten(0, 1)

    @property
    def rows_per_sample(self) -> int:
        """W."""
        return len(self.steps)

    def rows(self, index: torch.Tensor) -> Trajectories:
        """The samples at ``index``."""
        return Trajectories(
            self.steps,
            self.sigmas,
            self.latents[index],
            self.next_latents[index],
            self.means[index],
            self.log_probs[index],
            None if self.proximal_means is None else self.proximal_means[index],
        )

    def is_finite(self) -> torch.Tensor:
        """Which samples are: bool ``[B]``."""
        return finite_rows(self.latents, self.next_latents, self.means, self.log_probs)

    def blanked(self, is_whole: torch.Tensor) -> Trajectories:
        """Zeros in the place of what is kept of the samples that are not whole, bool ``[B]``."""
        names = ("latents", "next_latents", "means", "log_probs")
        return replace(self, **{name: blanked(getattr(self, name), is_whole) for name in names})

    def to(self, device: torch.device) -> Trajectories:
        """The same on another device."""
        tensors = (self.sigmas, self.latents, self.next_latents, self.means, self.log_probs, self.proximal_means)
        return Trajectories(self.steps, *(None if each is None else each.to(device) for each in tensors))

    def sampled_steps(self) -> SampledSteps:
        """The B x W rows, sample by sample, as an objective takes them."""
        steps = torch.tensor(self.steps, device=self.sigmas.device)
        return SampledSteps(
            next_latents=self.next_latents.flatten(0, 1),
            log_probs=self.log_probs.flatten(),
            step_sizes=(self.sigmas[steps] - self.sigmas[steps + 1]).repeat(len(self.latents)),
            means=self.means.flatten(0, 1),
        )

    @staticmethod
    def cat(parts: Sequence[Trajectories]) -> Trajectories:
        """Samples of several micro-batches, in order."""
        joined = {
            name: torch.cat([getattr(each, name) for each in parts])
            for name in ("latents", "next_latents", "means", "log_probs")
        }
        return Trajectories(parts[0].steps, parts[0].sigmas, **joined)


def start_latents(
    model: DiffusionModel, size: tuple[int, ...], num_steps: int, seed: int, iteration: int, ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first latents ``[B, ...]``, keyed by (seed, iteration, id), and the noise levels ``[T + 1]``."""
    shape = model.latent_shape(*size)
    sigmas = model.sigmas(num_steps, shape).to(model.device)
    noise = keyed_normal(shape, seed, "latent", iteration, ids, model.device)
    return model.start(noise, sigmas[0]), sigmas


@torch.no_grad()
def sample_trajectories(
    model: DiffusionModel,
    conditioning: Conditioning,
    sample_ids: Sequence[int],
    *,
    dynamics: Dynamics,
    trained_steps: Sequence[int],
    size: tuple[int, ...],
    num_steps: int,
    guidance_scale: float,
    seed: int,
    iteration: int,
    latent_ids: Sequence[int] | None = None,
    observe: Callable[[torch.Tensor], object] | None = None,
) -> tuple[torch.Tensor, Trajectories | None]:
    """Denoises B samples; steps outside ``trained_steps`` are deterministic.

    Args:
        model: the policy.
        conditioning: B rows.
        sample_ids: B integers that key the noise.
        dynamics: the stochastic step.
        trained_steps: the steps that are stochastic and kept, ascending; may be empty.
        size: height and width in pixels, and of videos the number of frames.
        num_steps: denoising steps T.
        guidance_scale: classifier-free guidance; 1 is none.
        seed, iteration: the rest of the noise's key.
        latent_ids: keys of the initial latents where they differ from ``sample_ids`` (groups that share one).
        observe: is given the velocity ``[B, ...]`` of each step.

    Returns:
        The final latents ``[B, ...]`` and the trajectories (None without trained steps).
    """
    latents, sigmas = start_latents(model, size, num_steps, seed, iteration, latent_ids or sample_ids)
    sigma_max = float(sigmas[1])
    ode, kept = EulerODE(), []
    for index in range(num_steps):
        sigma, sigma_next = (sigmas[i].expand(len(latents)) for i in (index, index + 1))
        velocity = model.predict_velocity(latents, sigma, conditioning, guidance_scale)
        if observe is not None:
            observe(velocity)
        if index not in trained_steps:
            latents = ode.step(velocity, latents, sigma, sigma_next, sigma_max).mean
            continue
        step = dynamics.step(velocity, latents, sigma, sigma_next, sigma_max)
        noise = keyed_normal(latents.shape[1:], seed, f"step noise {index}", iteration, sample_ids, model.device)
        drawn = step.draw(noise)
        kept.append((latents, drawn, step.mean, step.log_prob(drawn)))
        latents = drawn
    if not kept:
        return latents, None
    before, after, means, log_probs = (torch.stack(each, dim=1) for each in zip(*kept, strict=True))
    return latents, Trajectories(list(trained_steps), sigmas, before, after, means, log_probs)


def replay_trajectories(
    model: DiffusionModel,
    trajectories: Trajectories,
    conditioning: Conditioning,
    dynamics: Dynamics,
    guidance_scale: float,
) -> GaussianStep:
    """The policy's present distribution of every trained step, all steps and guidance branches in one forward pass.

    Args:
        model: the policy; gradients flow into it.
        trajectories: B samples of W steps.
        conditioning: B rows.
        dynamics, guidance_scale: as in the rollout.

    Returns:
        A step of B x W rows, sample by sample.
    """
    num_steps = len(trajectories.steps)
    rows = trajectories.latents.flatten(0, 1)
    steps = torch.tensor(trajectories.steps, device=rows.device).repeat(len(trajectories.latents))
    sigma, sigma_next = trajectories.sigmas[steps], trajectories.sigmas[steps + 1]
    velocity = model.predict_velocity(rows, sigma, conditioning.repeat_interleave(num_steps), guidance_scale)
    return dynamics.step(velocity, rows, sigma, sigma_next, float(trajectories.sigmas[1]))


def check_replay(log_ratio: torch.Tensor, steps: Sequence[int], dtype: torch.dtype, bound: float | None) -> float:
    """Compares replay and rollout before an update, when the policy is still the one that sampled.

    Args:
        log_ratio: ``[B x W]`` of the replay, sample by sample.
        steps: the W trained steps.
        dtype: the model's, for the message.
        bound: largest log-ratio that passes; None passes all.

    Returns:
        The largest absolute log-ratio.

    Raises:
        SelfCheckError: naming the denoising step and the dtype.
    """
    errors = log_ratio.abs().reshape(-1, len(steps)).amax(dim=0)
    worst = int(errors.argmax())
    largest = float(errors[worst])
    if bound is not None and not largest <= bound:
        raise SelfCheckError(
            f"before the first update, replay and rollout differ at denoising step {steps[worst]} by a log-ratio of "
            f"{largest:.2e} (allowed: {bound:.2e}; model in {dtype}). Use one batch shape in both "
            "(rollout.micro_batch_size = train.micro_batch_size x trained steps), float32, or a wider clip range; "
            "algorithm.self_check: false goes on anyway"
        )
    return largest


def sample_images(
    model: DiffusionModel,
    conditioning: Conditioning,
    sample_ids: Sequence[int],
    *,
    size: tuple[int, ...],
    num_steps: int,
    guidance_scale: float,
    seed: int,
    micro_batch_size: int,
    observe: Callable[[torch.Tensor], object] | None = None,
    cache: StepCache | None = None,
    damage: list[str] | None = None,
) -> list[np.ndarray]:
    """Images without noise after the first latent, for evaluation: uint8 ``[H, W, 3]`` each; videos ``[F, H, W, 3]``.

    Args are those of ``sample_trajectories``; ``micro_batch_size`` samples are denoised together. With a ``cache``
    denoising steps are left out, and the first image is also made without it, to compare. To ``damage`` is appended
    what is wrong with each image, empty where nothing is.

    Raises:
        NonFiniteError: when an image is not finite before it is rounded, and ``damage`` is not given.
    """

    def draw(part: slice, observe: Callable[[torch.Tensor], object] | None = observe) -> list[tuple[np.ndarray, str]]:
        with model.evaluating():
            latents, _ = sample_trajectories(
                model,
                conditioning.rows(part),
                sample_ids[part],
                dynamics=EulerODE(),
                trained_steps=(),
                size=size,
                num_steps=num_steps,
                guidance_scale=guidance_scale,
                seed=seed,
                iteration=0,
                observe=observe,
            )
        return decode_samples(model, latents)

    parts = [slice(start, start + micro_batch_size) for start in range(0, len(sample_ids), micro_batch_size)]
    if cache is None:
        drawn = [each for part in parts for each in draw(part)]
    else:
        exact = cache.measured(lambda: draw(slice(0, 1), observe=None)[0][0])
        with cache.active():
            drawn = [each for part in parts for each in draw(part)]
        cache.compare(exact, drawn[0][0])
    wrong = [each for _, each in drawn]
    if damage is None and any(wrong):
        raise NonFiniteError(f"{sum(map(bool, wrong))} of {len(wrong)} samples: {next(filter(None, wrong))}")
    if damage is not None:
        damage.extend(wrong)
    return [image for image, _ in drawn]


def decode_samples(
    model: DiffusionModel, latents: torch.Tensor, kept: Trajectories | None = None
) -> list[tuple[np.ndarray, str]]:
    """The pictures of samples, and what is wrong with each; empty where nothing is.

    Args:
        model: with the autoencoder.
        latents: ``[B, ...]``.
        kept: what else an update needs of them.
    """
    pixels, has_picture = model.decode_marked(latents)
    has_latents = finite_rows(latents)
    if kept is not None:
        has_latents &= kept.is_finite()
    wrong = [
        "" if sampled and decoded else PICTURE_NOT_FINITE if sampled else LATENTS_NOT_FINITE
        for sampled, decoded in zip(has_latents.tolist(), has_picture.tolist(), strict=True)
    ]
    return list(zip(to_images(pixels), wrong, strict=True))


def blanked(tensor: torch.Tensor, is_whole: torch.Tensor) -> torch.Tensor:
    """``[B, ...]`` with zeros in the rows that are not whole, bool ``[B]``."""
    return torch.where(is_whole.view(-1, *[1] * (tensor.ndim - 1)), tensor, 0)


def to_images(pixels: torch.Tensor) -> list[np.ndarray]:
    """uint8 pixels ``[B, 3, H, W]`` as arrays ``[H, W, 3]``, and ``[B, F, 3, H, W]`` as ``[F, H, W, 3]``."""
    return list(pixels.movedim(-3, -1).contiguous().cpu().numpy())
