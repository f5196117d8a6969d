"""What drawing samples of a diffusion policy and learning from them share, whatever is kept of the samples.

Shapes: B samples, G groups whose samples they are, ... latent dimensions, T denoising steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from sfumato.algorithms.device import to_device
from sfumato.algorithms.noise import keyed_normal
from sfumato.algorithms.rows import TensorRows, by_group, by_row
from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.data.images.prompts import Prompt
from sfumato.models.diffusion.base import Conditioning, DiffusionModel
from sfumato.parallel.finite import finite_rows
from sfumato.rewards.base import Sample
from sfumato.rollout.batch import Rollout, SampleRequest
from sfumato.rollout.diffusion.policy import encode_prompts

LATENTS_NOT_FINITE = "its latents are NaN or infinite"
PICTURE_NOT_FINITE = (
    "its latents decode to NaN or infinite values (where the autoencoder overflows, set model.dtype fp32)"
)


@dataclass(frozen=True)
class Kept(TensorRows):
    """What an update needs of B samples besides their conditioning."""

    @property
    def rows_per_sample(self) -> int:
        """Trained steps or noise levels of each sample."""
        raise NotImplementedError

    def is_finite(self) -> torch.Tensor:
        """Which samples are: bool ``[B]``."""
        return finite_rows(*self._drawn().values())

    def blanked(self, is_whole: torch.Tensor) -> Self:
        """Zeros in the place of what was drawn of the samples that are not whole, bool ``[B]``."""
        return replace(self, **{name: blanked(tensor, is_whole) for name, tensor in self._drawn().items()})

    def _drawn(self) -> dict[str, torch.Tensor]:
        """Tensors ``[B, ...]`` that hold no ids."""
        own = {name: getattr(self, name) for name in self.row_fields()}
        return {name: tensor for name, tensor in own.items() if tensor is not None and tensor.is_floating_point()}


@dataclass(frozen=True, kw_only=True)
class DiffusionRollout(Rollout):
    """B samples of a diffusion policy."""

    kept: Any = by_row()
    """What the update needs of them: the ``Kept`` of the task."""
    latents: torch.Tensor = by_row()
    """float32 ``[B, ...]``, from which the pictures were decoded."""
    conditioning: Conditioning | None = by_group()
    """One row per prompt, kept once for its whole group; None of a micro-batch in which no group begins."""
    conditioning_groups: list[int] = by_group()
    """The group of each row of ``conditioning``."""

    @property
    def num_rows(self) -> list[int]:
        """Trained steps or noise levels of each sample."""
        return [self.kept.rows_per_sample] * len(self)

    @property
    def row_conditioning(self) -> Conditioning:
        """One row per sample."""
        row_of = {group: row for row, group in enumerate(self.conditioning_groups)}
        return self.conditioning.rows([row_of[request.group_id] for request in self.requests])

    @classmethod
    def made(
        cls,
        requests: list[SampleRequest],
        kept: Kept,
        conditioning: Conditioning,
        groups: list[int],
        latents: torch.Tensor,
        version: int,
        damage: Sequence[str],
    ) -> DiffusionRollout:
        """A micro-batch of one version, with the embeddings of the groups that begin in it.

        What is damaged becomes zeros: it is never learned from, but what is computed of it in a pass that other ranks
        need is multiplied by 0, which NaN survives.

        Args:
            requests, kept, latents: of B samples.
            conditioning: one row for each of ``groups``.
            groups: those that the samples belong to.
            version: of the policy.
            damage: what is wrong with each sample, empty where nothing is.
        """
        if any(damage):
            is_whole = to_device(torch.tensor([not what for what in damage]), latents.device)
            kept, latents = kept.blanked(is_whole), blanked(latents, is_whole)
            conditioning = conditioning.blanked()
        begun = [request.group_id for request in requests if request.is_first]
        return cls(
            requests=requests,
            versions=[version] * len(requests),
            kept=kept,
            latents=latents,
            conditioning=conditioning.rows([groups.index(group) for group in begun]) if begun else None,
            conditioning_groups=begun,
        )


class EncodedRequests:
    """B requested samples with the conditioning of their G prompts, each of which is embedded once."""

    def __init__(
        self,
        model: DiffusionModel,
        requests: list[SampleRequest],
        prompts: Sequence[Prompt],
        config: DiffusionRLConfig,
    ) -> None:
        """
        Args:
            model: embeds the prompts, and decodes the pictures later.
            requests: B samples.
            prompts: all of the run.
            config: size and guidance of the rollout, and whether the reference is guided.

        Raises:
            DataError: when a source image is missing or broken; names file and row.
        """
        rollout, algorithm = config.rollout, config.algorithm
        self.model, self.requests = model, requests
        self._prompts = {request.group_id: prompts[request.prompt_id] for request in requests}
        guided = {rollout.guidance_scale, algorithm.reference_guidance_scale or 1.0} != {1.0}
        self._by_group, self._sources = encode_prompts(model, list(self._prompts.values()), rollout.size, guided)
        self._rows = [list(self._prompts).index(request.group_id) for request in requests]
        self.conditioning = self._by_group.rows(self._rows)
        """B rows."""
        self.sample_ids = [request.sample_id for request in requests]
        self.group_ids = [request.group_id for request in requests]

    def rollout(self, latents: torch.Tensor, kept: Kept | None, version: int) -> tuple[DiffusionRollout, list[Sample]]:
        """What was drawn as the update needs it, and as rewards see it.

        Args:
            latents: float32 ``[B, ...]``, to be decoded.
            kept: what else the update needs of the B samples.
            version: of the policy that drew them.
        """
        pictures = decode_samples(self.model, latents, kept)
        samples = [
            sample_of(self._prompts[group], image, group, self._sources and self._sources[row], damage)
            for group, (image, damage), row in zip(self.group_ids, pictures, self._rows, strict=True)
        ]
        damage, groups = [sample.damage for sample in samples], list(self._prompts)
        drawn = DiffusionRollout.made(self.requests, kept, self._by_group, groups, latents, version, damage)
        return drawn, samples


def sample_of(prompt: Prompt, image: np.ndarray, group_id: int, source: np.ndarray | None, damage: str = "") -> Sample:
    """A picture as rewards see it: uint8 ``[H, W, 3]``, of a video ``[F, H, W, 3]``."""
    about = {"prompt": prompt.text, "metadata": prompt.metadata, "group_id": group_id, "source": source}
    return Sample(image=image, damage=damage, **about)


def start_latents(
    model: DiffusionModel, size: tuple[int, ...], num_steps: int, seed: int, iteration: int, ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first latents ``[B, ...]``, keyed by (seed, iteration, id), and the noise levels ``[T + 1]``."""
    shape = model.latent_shape(*size)
    sigmas = to_device(model.sigmas(num_steps, shape), model.device, remember=True)
    noise = keyed_normal(shape, seed, "latent", iteration, ids, model.device)
    return model.start(noise, sigmas[0]), sigmas


def decode_samples(
    model: DiffusionModel, latents: torch.Tensor, kept: Kept | None = None
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
        for sampled, decoded in torch.stack([has_latents, has_picture], dim=1).tolist()
    ]
    images = pixels.movedim(-3, -1).contiguous().cpu().numpy()  # [B, H, W, 3], or [B, F, H, W, 3]
    return list(zip(images, wrong, strict=True))


def blanked(tensor: torch.Tensor, is_whole: torch.Tensor) -> torch.Tensor:
    """``[B, ...]`` with zeros in the rows that are not whole, bool ``[B]``."""
    return torch.where(is_whole.view(-1, *[1] * (tensor.ndim - 1)), tensor, 0)
