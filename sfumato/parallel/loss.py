"""Cross entropy and log-probabilities of language models without all logits in memory at once.

The logits of T tokens over a vocabulary of V are often the largest tensor of a step. Here they are computed for
``chunk_tokens`` tokens at a time (the idea of Cut Cross-Entropy, arXiv 2411.09009, and Liger, arXiv 2410.10989, in
plain torch).

``linear_cross_entropy`` computes gradients in the forward pass, so that logits are computed once: all tokens of a sum
have the same upstream gradient, a factor that can be multiplied in later. Log-probabilities each have an upstream
gradient of their own, which the forward pass does not know: ``token_log_probs`` computes logits once more in the
backward pass, and keeps two numbers per token until then. torch 2.13's own ``linear_cross_entropy`` does the former,
but without temperature, entropy, losses of single tokens, or a vocabulary that is cut over ranks (arXiv 1909.08053).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn import functional

if TYPE_CHECKING:
    from jaxtyping import Float, Float32, Int64

Tail = Callable[[Tensor], Tensor]
"""An elementwise function that a model applies to the result of its output layer: a scale, a soft cap."""

IGNORED = -100
"""Label of a token that does not count."""

LEAST = -1e30
"""Where an entropy is computed, logits or log-probabilities below are this one. Their probabilities are 0 all the same,
and 0 times the -inf of a token that a model rules out is NaN."""

CHUNK_TOKENS = 4096
"""Tokens whose logits are in memory at a time. With fewer, adding to the gradient of the weight, which is as large as
the weight in float32, takes longer on a GPU than the product that is added."""


def cross_entropy_sum(
    logits: Float[Tensor, "*tokens vocabulary"], labels: Int64[Tensor, "*tokens"]
) -> Float32[Tensor, ""]:
    """Sum of ``-log p(label)`` over tokens, computed in float32.

    Args:
        logits: ``[..., V]``, any float dtype.
        labels: int64 ``[...]``; ``IGNORED`` does not count.

    Returns:
        float32 scalar; 0 with zero gradients when no token counts.
    """
    return functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), labels.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )


def linear_cross_entropy(
    hidden: Float[Tensor, "*tokens width"],
    weight: Float[Tensor, "vocabulary width"],
    labels: Int64[Tensor, "*tokens"],
    bias: Float[Tensor, "vocabulary"] | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    group: dist.ProcessGroup | None = None,
    tail: Tail | None = None,
) -> tuple[Float32[Tensor, ""], Float32[Tensor, "*tokens"]]:
    """The sum of ``-log p(label)`` over tokens, with gradients that are computed in the forward pass.

    Arguments as in ``token_log_probs``. Under autocast or in half precision gradients are rounded to the dtype of the
    matrix products before they are multiplied by the upstream gradient.

    Returns:
        float32 scalar, and float32 ``[...]``, the loss of each token without gradients, 0 where the label is
        ``IGNORED``.

    Raises:
        ValueError: when the shapes do not fit.
    """
    hidden, weight, bias = _prepare(hidden, weight, bias, labels, chunk_tokens, group)
    with_grad = torch.is_grad_enabled()
    with torch.autocast(hidden.device.type, enabled=False):
        total, losses = _LinearCrossEntropy.apply(
            hidden.reshape(-1, hidden.shape[-1]), weight, bias, labels.reshape(-1), chunk_tokens, group, tail, with_grad
        )
    return total, losses.view(labels.shape)


def token_log_probs(
    hidden: Float[Tensor, "*tokens width"],
    weight: Float[Tensor, "vocabulary width"],
    labels: Int64[Tensor, "*tokens"],
    temperature: float = 1.0,
    bias: Float[Tensor, "vocabulary"] | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    group: dist.ProcessGroup | None = None,
    tail: Tail | None = None,
) -> Float32[Tensor, "*tokens"]:
    """Log-probability of each label under ``softmax(tail(hidden @ weight.T + bias) / temperature)``.

    Matrix products run in the dtype of ``hidden``, or that of autocast; softmax and sums in float32.

    Args:
        hidden: ``[..., H]``; with ``group`` equal on its ranks, and of all tokens: gather it first where Megatron's
            sequence parallelism has cut it.
        weight: ``[V, H]``, or with ``group`` this rank's rows of it. A DTensor (fsdp2) is gathered, and its gradient
            summed over the ranks that hold its shards and copies. An axis called tp, whose ranks see the same tokens,
            is the exception: its gradient is not summed, and where it is ``group``, its rows are not gathered.
        labels: int64 ``[...]`` in the whole vocabulary; ``IGNORED`` gives 0.
        temperature: divides the logits.
        bias: ``[V]``, or this rank's part of it.
        chunk_tokens: tokens whose logits are in memory at a time.
        group: ranks over which the vocabulary is cut in rank order. Gradients of ``hidden`` are summed over it.
        tail: the model's elementwise function of its logits; None leaves them.

    Returns:
        float32 ``[...]``. A label outside the vocabulary is an error, or -inf with ``group``.

    Raises:
        ValueError: when the shapes do not fit.
    """
    settings = (temperature, bias, chunk_tokens, group, tail)
    return token_log_probs_and_entropy(hidden, weight, labels, *settings, with_entropy=False)[0]


def token_log_probs_and_entropy(
    hidden: Float[Tensor, "*tokens width"],
    weight: Float[Tensor, "vocabulary width"],
    labels: Int64[Tensor, "*tokens"],
    temperature: float = 1.0,
    bias: Float[Tensor, "vocabulary"] | None = None,
    chunk_tokens: int = CHUNK_TOKENS,
    group: dist.ProcessGroup | None = None,
    tail: Tail | None = None,
    with_entropy: bool = True,
) -> tuple[Float32[Tensor, "*tokens"], Float32[Tensor, "*tokens_or_none"]]:
    """``token_log_probs`` and the entropy of each token's distribution in nats, both with gradients.

    Returns:
        float32 ``[...]`` twice, the second empty without entropy; both are 0 where the label is ``IGNORED``.
    """
    if temperature <= 0:
        raise ValueError(f"temperature {temperature} must be above 0")
    hidden, weight, bias = _prepare(hidden, weight, bias, labels, chunk_tokens, group)
    flat = hidden.reshape(-1, hidden.shape[-1])
    with torch.autocast(hidden.device.type, enabled=False):
        log_probs, entropy = _LinearLogProbs.apply(
            flat, weight, bias, labels.reshape(-1), temperature, chunk_tokens, group, tail, with_entropy
        )
    return log_probs.view(labels.shape), entropy.view(labels.shape) if with_entropy else entropy


def _prepare(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    chunk_tokens: int,
    group: dist.ProcessGroup | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, weight and bias as plain tensors, gathered, in the dtype of matrix products.

    Raises:
        ValueError: when the shapes do not fit, or ``chunk_tokens`` is below 1.
    """
    device = hidden.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
    # Cast before gathering, so that fewer bytes travel. Not with gradients: these are to be summed over ranks in the
    # weight's own dtype.
    if not torch.is_grad_enabled():
        weight = weight.to(dtype)
    weight = _gather_rows(weight, group)
    bias = None if bias is None else _gather_rows(bias, group)
    if labels.shape != hidden.shape[:-1] or weight.shape[-1] != hidden.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and labels {tuple(labels.shape)} do not fit: "
            "they must be [..., H], [V, H] and [...]"
        )
    if chunk_tokens < 1:
        raise ValueError(f"chunk_tokens {chunk_tokens} must be at least 1")
    return hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def vocabulary_group(weight: Tensor) -> dist.ProcessGroup | None:
    """The tensor-parallel ranks over which the rows of an output layer's weight ``[V, H]`` are cut, if any."""
    if not isinstance(weight, DTensor) or "tp" not in (weight.device_mesh.mesh_dim_names or ()):
        return None
    axis = cast("tuple[str, ...]", weight.device_mesh.mesh_dim_names).index("tp")
    return weight.device_mesh.get_group(axis) if weight.placements[axis].is_shard(0) else None


def _gather_rows(tensor: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """A DTensor as a plain tensor with all rows, or with this rank's rows over ``group``; gradients as wanted there.

    Ranks of other axes see other tokens, so their gradients are parts of a sum (Partial); those of tp compute equal
    gradients (Replicate).
    """
    if not isinstance(tensor, DTensor):
        return tensor
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or ("",) * mesh.ndim
    placements, gradients = [], []
    for axis, (name, placement) in enumerate(zip(names, tensor.placements, strict=True)):
        stays_cut = group is not None and mesh.get_group(axis).group_name == group.group_name
        placements.append(placement if stays_cut else Replicate())
        gradients.append(placement if stays_cut else Replicate() if name == "tp" else Partial())
    return tensor.redistribute(placements=placements).to_local(grad_placements=gradients)


class _Gradients:
    """Gradients of hidden states, weight and bias, added up chunk by chunk."""

    def __init__(self, hidden: Tensor, weight: Tensor, bias: Tensor | None, wanted: Sequence[bool]) -> None:
        """``wanted`` says of each of the three whether its gradient is needed."""
        self.of_hidden = torch.empty_like(hidden) if wanted[0] else None
        # Sums over chunks are kept in float32.
        self.of_weight = torch.zeros_like(weight, dtype=torch.float32) if wanted[1] else None
        self.of_bias = torch.zeros_like(cast("Tensor", bias), dtype=torch.float32) if wanted[2] else None

    def add(self, chunk: slice, grad: Tensor, hidden: Tensor, weight: Tensor) -> None:
        """Adds those of a chunk, given the gradient of its products ``hidden[chunk] @ weight.T + bias``."""
        if self.of_hidden is not None:
            self.of_hidden[chunk] = grad @ weight
        if self.of_weight is not None:
            self.of_weight += grad.T @ hidden[chunk]
        if self.of_bias is not None:
            self.of_bias += grad.sum(0, dtype=torch.float32)

    def join(self, group: dist.ProcessGroup | None) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """The three gradients, None where not needed; that of the hidden states summed over the vocabulary's ranks."""
        if self.of_hidden is not None and group is not None:
            dist.all_reduce(self.of_hidden, group=group)
        return self.of_hidden, self.of_weight, self.of_bias


class _LinearCrossEntropy(torch.autograd.Function):
    """The sum of losses and its gradients, chunk by chunk, while the chunk's logits are in memory."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        chunk_tokens: int,
        group: dist.ProcessGroup | None,
        tail: Tail | None,
        with_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        wanted = [with_grad and is_needed for is_needed in ctx.needs_input_grad[:3]]
        gradients = _Gradients(hidden, weight, bias, wanted)
        counts = labels != IGNORED
        rows = _rows_of_labels(labels, weight.shape[0], group)
        losses = hidden.new_empty(labels.shape, dtype=torch.float32)
        for chunk in _row_chunks(len(labels), chunk_tokens):
            products = functional.linear(hidden[chunk], weight, bias)
            with torch.set_grad_enabled(tail is not None and with_grad):
                logits = products if tail is None else tail(products.requires_grad_(with_grad))
            log_p, losses[chunk] = _log_softmax(logits.detach(), rows[chunk], counts[chunk], group)
            if not any(wanted):
                continue
            # The gradient of a token's loss by its logits is softmax - one-hot(label).
            grad = log_p.exp_().mul_(counts[chunk, None])
            index, is_local = _find_local_rows(rows[chunk], weight.shape[0])
            grad.scatter_add_(1, index[:, None], -(is_local & counts[chunk]).to(grad.dtype)[:, None])
            grad = grad.to(hidden.dtype)
            if tail is not None:
                (grad,) = torch.autograd.grad(logits, products, grad.to(logits.dtype))
            del products, logits, log_p  # frees them before the products below need memory
            gradients.add(chunk, grad, hidden, weight)
        ctx.gradients = gradients.join(group)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.mark_non_differentiable(losses)
        return losses.sum(), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: Tensor, _grad_losses: Tensor) -> tuple[object, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        gradients = ctx.gradients
        ctx.gradients = None
        if gradients is None:
            raise RuntimeError(
                "the gradients of linear_cross_entropy are given once: its backward pass has run already"
            )
        scaled = [
            None if gradient is None else gradient.mul_(grad_total).to(dtype)
            for gradient, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return *scaled, *[None] * 5


def _log_softmax(
    logits: Tensor, rows: Tensor, counts: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Log-probabilities ``[T, V]`` in float32, which the caller may overwrite, and each token's loss ``[T]``.

    The loss is 0 where a token does not count.
    """
    if group is None:
        log_p = logits.log_softmax(-1, dtype=torch.float32)
        return log_p, torch.where(counts, -_pick(log_p, rows, counts, None), 0.0)
    logits = logits.float()
    lse = logits.logsumexp(-1)
    target = _pick(logits, rows, counts, group)
    lse, target, _ = _join_vocabulary(lse, target, lse.new_empty(0), group)
    return logits - lse[:, None], torch.where(counts, lse - target, 0.0)


class _LinearLogProbs(torch.autograd.Function):
    """Log-probabilities of labels, and entropies, chunk by chunk; the backward pass computes the logits again.

    With p = softmax(logits / temperature), upstream gradients g of the log-probability and h of the entropy H, the
    gradient by the scaled logits is g (one-hot(label) - p) - h p (log p + H).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        temperature: float,
        chunk_tokens: int,
        group: dist.ProcessGroup | None,
        tail: Tail | None,
        with_entropy: bool,
    ) -> tuple[Tensor, Tensor]:
        counts = labels != IGNORED
        rows = _rows_of_labels(labels, weight.shape[0], group)
        lse = hidden.new_empty(labels.shape, dtype=torch.float32)
        target = torch.empty_like(lse)
        entropy = torch.empty_like(lse) if with_entropy else lse.new_empty(0)
        for chunk in _row_chunks(len(labels), chunk_tokens):
            logits = functional.linear(hidden[chunk], weight, bias)
            logits = _divide_by_temperature(logits if tail is None else tail(logits), temperature)
            target[chunk] = _pick(logits, rows[chunk], counts[chunk], group)
            if with_entropy:
                logits.clamp_(min=LEAST)
            lse[chunk] = logits.logsumexp(-1)
            if with_entropy:
                log_p = logits.sub_(lse[chunk, None])
                entropy[chunk] = -(log_p.exp() * log_p).sum(-1)
        if group is not None:
            lse, target, entropy = _join_vocabulary(lse, target, entropy, group)
        log_probs = torch.where(counts, target - lse, 0.0)
        if with_entropy:
            entropy = torch.where(counts, entropy, 0.0)
        ctx.save_for_backward(hidden, weight, bias, rows, counts, lse, entropy)
        ctx.settings = temperature, chunk_tokens, group, tail, with_entropy
        if not with_entropy:
            ctx.mark_non_differentiable(entropy)
        return log_probs, entropy

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_log_probs: Tensor, grad_entropy: Tensor) -> tuple[object, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, weight, bias, rows, counts, lse, entropy = ctx.saved_tensors
        temperature, chunk_tokens, group, tail, with_entropy = ctx.settings
        gradients = _Gradients(hidden, weight, bias, ctx.needs_input_grad[:3])
        for chunk in _row_chunks(len(rows), chunk_tokens):
            upstream = torch.where(counts[chunk], grad_log_probs[chunk], 0.0)
            products = functional.linear(hidden[chunk], weight, bias)
            with torch.set_grad_enabled(tail is not None):
                logits = products if tail is None else tail(products.requires_grad_())
            # Without a tail nothing needs the products again, and they may be overwritten in place; with one its
            # backward pass needs them.
            logits_copy = products if tail is None else logits.detach().clone()
            log_p = _divide_by_temperature(logits_copy, temperature).sub_(lse[chunk, None])
            grad = log_p.exp() if with_entropy else log_p.exp_()
            if with_entropy:
                log_p.clamp_(min=LEAST).add_(entropy[chunk, None]).mul_(grad)
                log_p.mul_(torch.where(counts[chunk], grad_entropy[chunk], 0.0)[:, None])
            grad.mul_(-upstream[:, None])
            index, is_local = _find_local_rows(rows[chunk], weight.shape[0])
            grad.scatter_add_(1, index[:, None], torch.where(is_local, upstream, 0.0)[:, None])
            if with_entropy:
                grad -= log_p
            grad = grad.div_(temperature).to(hidden.dtype)
            if tail is not None:
                (grad,) = torch.autograd.grad(logits, products, grad.to(logits.dtype))
            gradients.add(chunk, grad, hidden, weight)
        grad_hidden, grad_weight, grad_bias = gradients.join(group)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        grad_bias = None if grad_bias is None else grad_bias.to(bias.dtype)
        return grad_hidden, grad_weight, grad_bias, *[None] * 6


def _row_chunks(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def _divide_by_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Logits in float32, divided by the temperature; float32 ones are divided in place."""
    return logits.float() if temperature == 1.0 else logits.float().div_(temperature)


def _rows_of_labels(labels: Tensor, size: int, group: dist.ProcessGroup | None) -> Tensor:
    """Labels as row indices of this rank's part of the weight, of ``size`` rows.

    Labels in other ranks' parts become negative or at least ``size``. Parts may differ in size: all ranks exchange it.
    """
    if group is None:
        return labels
    sizes = [torch.zeros(1, dtype=torch.int64, device=labels.device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([size], device=labels.device), group=group)
    return labels - torch.cat(sizes)[: dist.get_rank(group)].sum()


def _find_local_rows(rows: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Row indices with 0 in the place of those outside of this rank's part, and whether each lies inside."""
    is_local = (rows >= 0) & (rows < size)
    return torch.where(is_local, rows, 0), is_local


def _pick(logits: Tensor, rows: Tensor, counts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Each token's logit of its label; with ``group`` -inf where another rank has it, or none."""
    if group is None:
        return logits.gather(-1, torch.where(counts, rows, 0)[:, None])[:, 0]
    index, is_local = _find_local_rows(rows, logits.shape[-1])
    return torch.where(is_local, logits.gather(-1, index[:, None])[:, 0], -torch.inf)


def _join_vocabulary(
    lse: Tensor, target: Tensor, entropy: Tensor, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-sum-exp, label's logit and entropy over the whole vocabulary, from those over each rank's part.

    A part with log-sum-exp l and entropy e has the share w = exp(l - l_all) of the probability, and the entropy of the
    whole is the sum over parts of w (e + l_all - l).
    """
    # The label's logit is -inf on all ranks but one: its maximum comes with that of the log-sum-exps.
    largest = torch.stack([lse, target])
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
    # Less the largest part's, so that no weight overflows.
    below = largest[0] - lse
    weights = torch.exp(-below)
    sums = torch.stack([weights, weights * (entropy + below)] if len(entropy) else [weights])
    dist.all_reduce(sums, group=group)
    spread = sums[0].log()
    return largest[0] + spread, largest[1], sums[1] / sums[0] + spread if len(entropy) else entropy
