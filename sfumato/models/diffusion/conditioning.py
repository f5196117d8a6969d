"""What a denoiser is conditioned on, and the two branches of classifier-free guidance on two ranks (CFG parallelism).

Shapes: B samples.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import FunctionCtx

from sfumato.algorithms.device import to_device
from sfumato.algorithms.rows import TensorRows, by_row
from sfumato.parallel.mesh import Mesh


@dataclass(frozen=True)
class Conditioning(TensorRows):
    """What a denoiser is conditioned on: tensors with one row per sample."""

    tensors: dict[str, Tensor] = by_row()
    """Tensors ``[B, ...]`` by the names of the model family."""
    negative: dict[str, Tensor] | None = None
    """Tensors of the unconditional branch of classifier-free guidance, ``[1, ...]``, shared by all rows. A name that it
    lacks does not depend on the prompt: its tensor in ``tensors`` is used in both branches."""
    own_negative: bool = False
    """``negative`` has one row per sample, ``[B, ...]``, since it depends on the sample's image."""

    def __len__(self) -> int:
        return len(next(iter(self.tensors.values())))

    def row_fields(self) -> list[str]:
        """As ``TensorRows.row_fields``, with ``negative`` where it has one row per sample."""
        return [*super().row_fields(), *(["negative"] if self.own_negative else [])]

    def repeat_interleave(self, times: int) -> Conditioning:
        """Repeats every row ``times`` times, copies of a row side by side."""
        return self.change(lambda tensor: tensor.repeat_interleave(times, dim=0))

    def without_prompt(self, dropped: Tensor) -> Conditioning:
        """Replaces the embeddings by those of the empty prompt in the rows where ``dropped`` (bool ``[B]``) is true."""
        assert self.negative is not None
        tensors = dict(self.tensors)
        for name, negative in self.negative.items():
            tensor = tensors[name]
            mask = to_device(dropped, tensor.device).reshape(-1, *[1] * (tensor.ndim - 1))
            tensors[name] = torch.where(mask, negative.to(tensor.dtype), tensor)
        return replace(self, tensors=tensors)

    def blanked(self) -> Conditioning:
        """Replaces values that are not finite by zeros."""
        return self.change(
            # By itself ``nan_to_num`` makes the largest numbers of infinite ones, which overflow in the next product.
            lambda tensor: torch.nan_to_num(tensor, 0.0, 0.0, 0.0) if tensor.is_floating_point() else tensor
        )

    def branch(self, number: int) -> dict[str, Tensor]:
        """Tensors ``[B, ...]`` of one guidance branch: 0 is the unconditional one, 1 the conditional one."""
        assert self.negative is not None
        if number == 1:
            return self.tensors
        return {
            name: self.negative[name].to(tensor.dtype).expand_as(tensor) if name in self.negative else tensor
            for name, tensor in self.tensors.items()
        }

    def with_negative(self) -> dict[str, Tensor]:
        """Tensors ``[2B, ...]`` of both guidance branches, the unconditional rows first, as diffusers orders them."""
        assert self.negative is not None
        return {name: torch.cat([unconditional, self.tensors[name]]) for name, unconditional in self.branch(0).items()}


def image_digests(prompts: Sequence[str], images: Sequence[np.ndarray] | None) -> list[str]:
    """A digest of each prompt's image; empty strings without images."""
    return [image_digest(image) for image in ([None] * len(prompts) if images is None else images)]


def image_digest(image: np.ndarray | None) -> str:
    """A digest that identifies an image, or several; an empty string without one."""
    return "" if image is None else hashlib.blake2b(np.ascontiguousarray(image), digest_size=16).hexdigest()  # pyright: ignore[reportArgumentType]  (an array is a buffer)


class _ExchangeContext(FunctionCtx):
    """What ``_Exchange`` keeps for its backward pass."""

    rank: int


class _Exchange(torch.autograd.Function):
    """Gathers the branches of both ranks; the backward pass keeps the gradient of this rank's branch."""

    @staticmethod
    def forward(ctx: _ExchangeContext, branch: Tensor, mesh: Mesh) -> tuple[Tensor, ...]:
        ctx.rank = mesh.rank_in("cfg")
        branches = [torch.empty_like(branch) for _ in range(mesh.layout.cfg)]
        dist.all_gather(branches, branch.contiguous(), group=mesh.group("cfg"))
        return tuple(branches)

    @staticmethod
    def backward(ctx: _ExchangeContext, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[ctx.rank], None


def exchange_branches(branch: Tensor, mesh: Mesh) -> tuple[Tensor, ...]:
    """Gathers both branches' velocities on both ranks.

    Each rank then computes the same loss from both branches and gets the gradient of its own branch. The gradients of
    parameters are summed over the two ranks, as over all other ranks.

    Args:
        branch: this rank's branch, ``[B, ...]``.
        mesh: its cfg axis has one rank per branch.

    Returns:
        The unconditional and the conditional branch, ``[B, ...]`` each.
    """
    return _Exchange.apply(branch, mesh)


def share_gradient(output: Tensor, mesh: Mesh) -> Tensor:
    """Returns an output ``[B, ...]`` that every rank of the cfg axis computed alike, with its share of the gradient.

    Without guidance there is one branch, which both ranks compute. Since gradients are summed over ranks, each rank
    passes on half of it.
    """
    share = 1 / mesh.layout.cfg
    return output * share + output.detach() * (1 - share)
