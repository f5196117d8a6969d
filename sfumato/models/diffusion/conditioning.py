"""What a denoiser is conditioned on.

Shapes: B samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch


@dataclass(frozen=True)
class Conditioning:
    """What a denoiser is conditioned on: tensors with one row per sample."""

    tensors: dict[str, torch.Tensor]
    """Each ``[B, ...]``; the names are the model family's."""
    negative: dict[str, torch.Tensor] | None = None
    """The same for the unconditional branch of classifier-free guidance, ``[1, ...]``, shared by all rows."""
    own_negative: bool = False
    """The negative has ``[B, ...]``, one row per sample: what belongs to a sample's image."""

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def rows(self, index: torch.Tensor | Sequence[int] | slice) -> Conditioning:
        """The rows at ``index``; an index may repeat."""
        if not isinstance(index, slice):
            index = torch.as_tensor(index, dtype=torch.long)
        return self._changed(lambda each: each[index])

    def repeat_interleave(self, times: int) -> Conditioning:
        """Every row ``times`` times in a row."""
        return self._changed(lambda each: each.repeat_interleave(times, dim=0))

    @staticmethod
    def cat(parts: Sequence[Conditioning]) -> Conditioning:
        """Rows of several, in order; a shared negative is that of the first."""
        first = parts[0]
        tensors = {name: torch.cat([each.tensors[name] for each in parts]) for name in first.tensors}
        negative = first.negative
        if first.own_negative:
            negative = {name: torch.cat([each.negative[name] for each in parts]) for name in negative}
        return replace(first, tensors=tensors, negative=negative)

    def without_prompt(self, dropped: torch.Tensor) -> Conditioning:
        """The rows where ``dropped`` (bool ``[B]``) is true get the embeddings of the empty prompt."""
        assert self.negative is not None
        tensors = {}
        for name, each in self.tensors.items():
            mask = dropped.to(each.device).reshape(-1, *[1] * (each.ndim - 1))
            tensors[name] = torch.where(mask, self.negative[name].to(each.dtype), each)
        return replace(self, tensors=tensors)

    def blanked(self) -> Conditioning:
        """Zeros in the rows that are not finite."""
        return self._changed(lambda each: torch.nan_to_num(each, 0.0, 0.0, 0.0) if each.is_floating_point() else each)

    def to(self, device: torch.device | str) -> Conditioning:
        """The same on another device."""
        negative = None if self.negative is None else {name: each.to(device) for name, each in self.negative.items()}
        return replace(self, tensors={name: each.to(device) for name, each in self.tensors.items()}, negative=negative)

    def branch(self, number: int) -> dict[str, torch.Tensor]:
        """Rows of one guidance branch, ``[B, ...]``: 0 is the unconditional one."""
        assert self.negative is not None
        if number == 1:
            return self.tensors
        return {name: self.negative[name].to(each.dtype).expand_as(each) for name, each in self.tensors.items()}

    def with_negative(self) -> dict[str, torch.Tensor]:
        """Rows of both guidance branches, ``[2B, ...]``: the unconditional ones first, as diffusers orders them."""
        assert self.negative is not None
        return {name: torch.cat([each, self.tensors[name]]) for name, each in self.branch(0).items()}

    def _changed(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Conditioning:
        """Every tensor that has one row per sample, changed."""
        negative = self.negative
        if self.own_negative:
            negative = {name: change(each) for name, each in negative.items()}
        return replace(self, tensors={name: change(each) for name, each in self.tensors.items()}, negative=negative)


def image_digests(prompts: Sequence[str], images: Sequence[np.ndarray] | None) -> list[str]:
    """What tells the images of prompts apart; empty without images."""
    return [image_digest(each) for each in ([None] * len(prompts) if images is None else images)]


def image_digest(image: np.ndarray | None) -> str:
    """What tells an image from others; empty without one."""
    return "" if image is None else hashlib.blake2b(np.ascontiguousarray(image), digest_size=16).hexdigest()
