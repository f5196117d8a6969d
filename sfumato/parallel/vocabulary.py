"""Cross entropy over a vocabulary that lies in pieces on tensor-parallel ranks (Megatron-LM, arXiv 1909.08053)."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from sfumato.parallel.mesh import Mesh


def vocab_parallel_cross_entropy(local_logits: Tensor, labels: Tensor, mesh: Mesh, ignore_index: int = -100) -> Tensor:
    """Sum of cross entropies of logits that were never gathered.

    The head's style must be ``colwise`` in the plan, so that it returns this rank's part of the vocabulary. Pieces may
    differ in size; they lie in rank order. Ranks exchange three numbers for each token.

    Args:
        local_logits: [..., V of this rank], float; computed in float32 whatever their dtype.
        labels: [...], int64, ids in the whole vocabulary, the same on every rank.
        mesh: the ranks.
        ignore_index: label of tokens that do not count.

    Returns:
        Scalar, float32, the same on every rank.
    """
    if mesh.size_of("tp") == 1:
        return torch.nn.functional.cross_entropy(
            local_logits.flatten(0, -2).float(), labels.flatten(), ignore_index=ignore_index, reduction="sum"
        )
    return _CrossEntropy.apply(local_logits.flatten(0, -2), labels.flatten(), mesh.group("tp"), ignore_index)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, group, ignore_index):
        counted = labels != ignore_index
        index = labels.masked_fill(~counted, 0) - _first_id(logits, group)
        found = counted & (index >= 0) & (index < logits.shape[-1])
        index = index.masked_fill(~found, 0)

        ctx.width = logits.shape[-1]  # 0 where there are more ranks than pieces
        logits = logits if ctx.width else logits.new_full((len(logits), 1), -torch.inf)
        largest = logits.amax(-1).float()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        exponentials = (logits.float() - largest[:, None]).exp_().sum(-1)
        target = (logits.gather(-1, index[:, None])[:, 0].float() - largest).masked_fill(~found, 0)
        sums = torch.stack([exponentials, target])
        dist.all_reduce(sums, group=group)

        log_sum = sums[0].log()
        ctx.save_for_backward(logits, largest + log_sum, index, found, counted)
        return (log_sum - sums[1]).masked_fill(~counted, 0).sum()

    @staticmethod
    def backward(ctx, gradient):
        logits, normaliser, index, found, counted = ctx.saved_tensors
        probabilities = (logits.float() - normaliser[:, None]).exp_()
        probabilities.scatter_add_(-1, index[:, None], -found[:, None].float())
        probabilities.mul_((gradient * counted)[:, None])
        return probabilities[:, : ctx.width].to(logits.dtype), None, None, None


def _first_id(logits: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The id in the whole vocabulary of this rank's first logit, on the device, without waiting for it."""
    size = torch.tensor([logits.shape[-1]], device=logits.device)
    sizes = size.new_empty(dist.get_world_size(group))
    dist.all_gather_into_tensor(sizes, size, group=group)
    return sizes[: dist.get_rank(group)].sum()
