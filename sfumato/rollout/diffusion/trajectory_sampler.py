"""Samples of a diffusion policy, as they are drawn and learned from, whether an update needs trajectories or not.

Shapes: B samples, G groups whose samples they are, ... latent dimensions, T denoising steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np
import torch

from sfumato.algorithms.device import to_device
from sfumato.algorithms.noise import keyed_normal
from sfumato.algorithms.rows import TensorRows, by_group, by_row
from sfumato.data.images.prompts import Prompt
from sfumato.data.images.source_images import side_by_side
from sfumato.models.diffusion.base import Conditioning, DiffusionModel
from sfumato.parallel.finite import finite_rows
from sfumato.rewards.base import Sample
from sfumato.rollout.batch import Rollout, SampleRequest
from sfumato.rollout.diffusion.policy import encode_prompts
from sfumato.tracking.waveforms import VideoWithSound, Waveform

if TYPE_CHECKING:
    from sfumato.config.diffusion_rl import DiffusionRLConfig

Content = np.ndarray | Waveform | VideoWithSound
"""An image, uint8 ``[H, W, 3]``, a video, ``[F, H, W, 3]``, a sound, or a video with its sound."""

LATENTS_NOT_FINITE = "its latents are NaN or infinite"
PICTURE_NOT_FINITE = (
    "its latents decode to NaN or infinite values (where the autoencoder overflows, set model.dtype fp32)"
)


@dataclass(frozen=True)
class ReplayData(TensorRows):
    """The data of B samples that an update needs besides their conditioning. Subclasses hold it."""

    @property
    def rows_per_sample(self) -> int:
        """How many trained steps or noise levels each sample has."""
        raise NotImplementedError

    def is_finite(self) -> torch.Tensor:
        """Which samples have finite values only: bool ``[B]``."""
        return finite_rows(*self._float_fields().values())

    def zero_damaged(self, is_whole: torch.Tensor) -> Self:
        """The same with zeros in the place of the samples for which ``is_whole``, bool ``[B]``, is False."""
        return replace(self, **{name: zero_rows(tensor, is_whole) for name, tensor in self._float_fields().items()})

    def _float_fields(self) -> dict[str, torch.Tensor]:
        """Tensors ``[B, ...]`` of floating point, which ids are not, by the names of their fields."""
        fields = {name: getattr(self, name) for name in self.row_fields()}
        return {name: tensor for name, tensor in fields.items() if tensor is not None and tensor.is_floating_point()}


@dataclass(frozen=True, kw_only=True)
class DiffusionRollout(Rollout):
    """B samples of a diffusion policy."""

    kept: Any = by_row()
    """The ``ReplayData`` of the task: ``Trajectories`` or ``FinalSamples``."""
    latents: torch.Tensor = by_row()
    """float32 ``[B, ...]``: the final latents, from which images were decoded."""
    conditioning: Conditioning | None = by_group()
    """One row per prompt, in the micro-batch where its group begins; None in one where no group begins."""
    conditioning_groups: list[int] = by_group()
    """The group of each row of ``conditioning``."""

    @property
    def num_rows(self) -> list[int]:
        """How many trained steps or noise levels each sample has."""
        return [self.kept.rows_per_sample] * len(self)

    @property
    def row_conditioning(self) -> Conditioning:
        """The conditioning with one row per sample; the groups of all samples must begin in this rollout."""
        row_of = {group: row for row, group in enumerate(self.conditioning_groups)}
        assert self.conditioning is not None
        return self.conditioning.rows([row_of[request.group_id] for request in self.requests])

    @classmethod
    def from_samples(
        cls,
        requests: list[SampleRequest],
        replay_data: ReplayData,
        conditioning: Conditioning,
        groups: list[int],
        latents: torch.Tensor,
        version: int,
        damage: Sequence[str],
    ) -> DiffusionRollout:
        """A micro-batch of one version of the policy, with the embeddings of the groups that begin in it.

        Damaged samples become zeros. They are never learned from, but a pass that this rank makes only because other
        ranks need it may compute with them: its result is multiplied by 0, which leaves NaN as NaN.

        Args:
            requests, replay_data, latents: of B samples.
            conditioning: one row for each of ``groups``.
            groups: ids of the groups that the samples belong to.
            version: of the policy.
            damage: what is wrong with each sample, an empty text where nothing is.
        """
        if any(damage):
            is_whole = to_device(torch.tensor([not problem for problem in damage]), latents.device)
            replay_data = replay_data.zero_damaged(is_whole)
            latents = zero_rows(latents, is_whole)
            conditioning = conditioning.blanked()
        first_groups = [request.group_id for request in requests if request.is_first]
        return cls(
            requests=requests,
            versions=[version] * len(requests),
            kept=replay_data,
            latents=latents,
            conditioning=conditioning.rows([groups.index(group) for group in first_groups]) if first_groups else None,
            conditioning_groups=first_groups,
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
            model: embeds the prompts, and later decodes the samples.
            requests: of B samples.
            prompts: all prompts of the run.
            config: has size and guidance of the rollout, and whether the reference is guided.

        Raises:
            DataError: when a source image is missing or broken; names file and row.
        """
        rollout = config.rollout
        algorithm = config.algorithm
        self.model = model
        self.requests = requests
        self._prompts = {request.group_id: prompts[request.prompt_id] for request in requests}
        guided = {rollout.guidance_scale, algorithm.reference_guidance_scale or 1.0} != {1.0}
        self._by_group, self._sources = encode_prompts(model, list(self._prompts.values()), rollout.size, guided)
        self._rows = [list(self._prompts).index(request.group_id) for request in requests]
        self.conditioning = self._by_group.rows(self._rows)
        """B rows."""
        self.sample_ids = [request.sample_id for request in requests]
        self.group_ids = [request.group_id for request in requests]

    def rollout(
        self, latents: torch.Tensor, replay_data: ReplayData | None, version: int
    ) -> tuple[DiffusionRollout, list[Sample]]:
        """The B samples as an update needs them, and as rewards see them.

        Args:
            latents: float32 ``[B, ...]``, to be decoded.
            replay_data: what else the update needs.
            version: of the policy that drew the samples.
        """
        pictures = decode_samples(self.model, latents, replay_data)
        samples = [
            sample_of(
                self._prompts[group],
                image,
                group,
                None if self._sources is None else self._sources[row],
                damage,
                self.model.frame_rate,
            )
            for group, (image, damage), row in zip(self.group_ids, pictures, self._rows, strict=True)
        ]
        damage = [sample.damage for sample in samples]
        groups = list(self._prompts)
        rollout = DiffusionRollout.from_samples(
            self.requests, cast(ReplayData, replay_data), self._by_group, groups, latents, version, damage
        )
        return rollout, samples


def sample_of(
    prompt: Prompt,
    content: Content,
    group_id: int,
    source: np.ndarray | None,
    damage: str = "",
    frame_rate: float = 0.0,
) -> Sample:
    """A sample as rewards see it. ``frame_rate`` is that of the model's videos, of which one with sound has its own."""
    if isinstance(content, VideoWithSound):
        image, sound, frame_rate = content.frames, content.sound, content.frame_rate
    elif isinstance(content, Waveform):
        image, sound = None, content
    else:
        image, sound = content, None
        frame_rate = frame_rate if content.ndim == 4 else 0.0
    return Sample(
        prompt=prompt.text,
        image=image,
        sound=sound,
        frame_rate=frame_rate,
        metadata=prompt.metadata,
        group_id=group_id,
        source=side_by_side(source),
        damage=damage,
    )


def start_latents(
    model: DiffusionModel, size: tuple[int, ...], num_steps: int, seed: int, iteration: int, ids: Sequence[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The first latents ``[B, ...]``, keyed by (seed, iteration, id), and the schedule of noise levels ``[T + 1]``."""
    shape = model.latent_shape(*size)
    sigmas = to_device(model.sigmas(num_steps, shape), model.device, remember=True)
    noise = keyed_normal(shape, seed, "latent", iteration, ids, model.device)
    return model.start(noise, sigmas[0]), sigmas


def decode_samples(
    model: DiffusionModel, latents: torch.Tensor, replay_data: ReplayData | None = None
) -> list[tuple[Content, str]]:
    """Decodes samples, and finds those whose values are not finite.

    Args:
        model: has the autoencoder.
        latents: ``[B, ...]``.
        replay_data: what else an update needs of the samples, which must be finite, too.

    Returns:
        For each sample its image, uint8, or sound, and what is wrong with it, an empty text where nothing is.
    """
    pixels, has_picture = model.decode_marked(latents)
    waveforms = None
    if model.makes_video_with_sound:
        waveforms, has_sound = model.decode_sound(latents)
        has_picture &= has_sound
    has_latents = finite_rows(latents)
    if replay_data is not None:
        has_latents &= replay_data.is_finite()
    problems = [
        "" if sampled and decoded else PICTURE_NOT_FINITE if sampled else LATENTS_NOT_FINITE
        for sampled, decoded in torch.stack([has_latents, has_picture], dim=1).tolist()
    ]
    if model.makes_sound:
        sounds = [Waveform(sound, model.sampling_rate) for sound in pixels.cpu().numpy()]
        return list(zip(sounds, problems, strict=True))
    images = pixels.movedim(-3, -1).contiguous().cpu().numpy()  # [B, H, W, 3], or [B, F, H, W, 3]
    if waveforms is not None:
        sounds = [Waveform(sound, model.sampling_rate) for sound in waveforms.cpu().numpy()]
        images = [VideoWithSound(*parts, model.frame_rate) for parts in zip(images, sounds, strict=True)]
    return list(zip(images, problems, strict=True))


def zero_rows(tensor: torch.Tensor, is_whole: torch.Tensor) -> torch.Tensor:
    """``[B, ...]`` with zeros in the rows for which ``is_whole``, bool ``[B]``, is False."""
    # not a product with the mask: NaN times 0 is NaN
    return torch.where(is_whole.view(-1, *[1] * (tensor.ndim - 1)), tensor, 0)
