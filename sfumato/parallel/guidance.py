"""The two branches of classifier-free guidance on two ranks (CFG parallelism)."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from sfumato.parallel.mesh import Mesh


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, mine: torch.Tensor, mesh: Mesh) -> tuple[torch.Tensor, ...]:
        ctx.rank = mesh.rank_in("cfg")
        branches = [torch.empty_like(mine) for _ in range(mesh.layout.cfg)]
        dist.all_gather(branches, mine.contiguous(), group=mesh.group("cfg"))
        return tuple(branches)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[ctx.rank], None


def exchange_branches(mine: torch.Tensor, mesh: Mesh) -> tuple[torch.Tensor, ...]:
    """Both branches' velocities on both ranks.

    Each rank goes on to compute the same loss from both and gets the gradient of its own branch; parameters' gradients
    are summed over the ranks as over all others.

    Args:
        mine: this rank's branch, ``[B, ...]``.
        mesh: its cfg axis has one rank per branch.

    Returns:
        The unconditional and the conditional branch, ``[B, ...]`` each.
    """
    return _Exchange.apply(mine, mesh)


def share_gradient(output: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """The output itself where both ranks computed the same, without guidance; each keeps half of the gradient."""
    part = 1 / mesh.layout.cfg
    return output * part + output.detach() * (1 - part)
