"""Operations that a model itself needs for a batch, from which model FLOPs utilisation follows (arXiv 2204.02311).

A product of matrices ``[m, k] [k, n]`` counts 2 m k n. Everything else (norms, activations, softmax, rotations) is left
out, and so is what is computed twice to save memory: recomputed blocks, logits in chunks, flash attention's scores.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from sfumato.errors import ConfigError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.parallel.expert import find_experts, has_experts
from sfumato.parallel.shards import trainable_parameters

TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")
"""Names of the number of experts that a token goes to, in configurations."""


class FlopCount:
    """Operations of a causal transformers model on documents of given lengths.

    Matrices: every linear layer, router and output layer once for each token, of the experts those that a token goes
    to. Attention: exactly the pairs of a token with itself and those before it in its document, within the window of
    layers that have one; L tokens make L (L + 1) / 2 pairs of ``2 heads (query width + value width)`` operations. The
    state of linear attention and convolutions are not counted.
    """

    def __init__(self, model: nn.Module) -> None:
        """
        Args:
            model: before ``parallelize``, adapters included; its weights may be on meta.

        Raises:
            ConfigError: when it has experts, but does not say how many a token goes to.
        """
        self.trained_weights, self.frozen_weights = _matrix_weights(model)
        self.attention = _attention_by_window(model)
        """Operations for a pair of tokens in all layers together that have the same window."""

    @property
    def active_weights(self) -> int:
        """Weights of matrices that one token is multiplied with."""
        return self.trained_weights + self.frozen_weights

    def forward(self, lengths: Iterable[int]) -> int:
        """Operations of a forward pass with logits for every token.

        Args:
            lengths: tokens of each document; padding does not count.
        """
        lengths = list(lengths)
        return 2 * self.active_weights * sum(lengths) + self._attention(lengths)

    def training(self, lengths: Iterable[int]) -> int:
        """Operations of a forward and a backward pass.

        The backward pass has a product for the gradient of each layer's input and one for that of its weight, which
        frozen weights (LoRA) have not.
        """
        lengths = list(lengths)
        matrices = (6 * self.trained_weights + 4 * self.frozen_weights) * sum(lengths)
        return matrices + 3 * self._attention(lengths)

    def _attention(self, lengths: list[int]) -> int:
        return sum(
            flops * causal_pairs(length, window) for window, flops in self.attention.items() for length in lengths
        )


def causal_pairs(length: int, window: int | None = None) -> int:
    """Pairs of a token with itself and each before it, at most ``window`` with itself."""
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


class DenoiserFlops(NamedTuple):
    """Operations of a denoiser for one image or video, without guidance."""

    forward: int
    """Operations of a forward pass."""
    training: int
    """Operations of a forward and a backward pass."""


def denoiser_flops(model: DiffusionModel, height: int, width: int) -> DenoiserFlops:
    """Operations of a denoiser for one image or video, without guidance.

    Counted by torch on meta tensors, in which nothing is computed. Of the backward pass only what is needed counts:
    frozen weights (LoRA) have no gradient, and before the first adapter there is none at all.

    Args:
        model: before or after ``parallelize``.
        height, width: of the image in pixels; a video has ``model.frames`` of them.
    """
    shadow = with_denoiser(model, meta_denoiser(model))
    embeddings = {name: tensor.to("meta") for name, tensor in model.example_embeddings(height, width).items()}
    latents = torch.empty(1, *model.latent_shape(height, width, model.frames), device="meta")
    with torch.enable_grad(), FlopCounterMode(display=False) as counter:
        velocity = shadow.denoise(latents, torch.empty(1, device="meta"), embeddings)
        forward = counter.get_total_flops()
        velocity.sum().backward()
    return DenoiserFlops(forward, counter.get_total_flops())


def meta_denoiser(model: DiffusionModel) -> nn.Module:
    """The denoiser as it was before ``parallelize``, on meta, with what is trained marked as such."""
    plain = model.plain_denoiser().train()
    trained = set(trainable_parameters(model.denoiser))
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name in trained)
    return plain


def with_denoiser(model: DiffusionModel, denoiser: nn.Module) -> DiffusionModel:
    """A copy of a model that shares everything but the denoiser."""
    shadow = copy.copy(model)
    shadow.pipeline = copy.copy(model.pipeline)
    shadow.set_denoiser(denoiser)
    return shadow


def _matrix_weights(model: nn.Module) -> tuple[int, int]:
    """Trained and frozen weights that a token is multiplied with: matrices that are no embeddings, shares of experts.

    A weight that embedding and output layer share counts as the output layer's.
    """
    experts = {}
    for name, layer_experts in find_experts(model, "").items() if has_experts(model) else ():
        experts[f"{name.partition('.base_layer')[0]}."] = _top_k(layer_experts), layer_experts.down_proj.shape[0]
    found = {True: 0, False: 0}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding):
            continue
        share = next((share for prefix, share in experts.items() if f"{name}.".startswith(prefix)), (1, 1))
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == 2 or (parameter.ndim == 3 and share != (1, 1)):
                found[parameter.requires_grad] += parameter.numel() * share[0] // share[1]
    return found[True], found[False]


def _top_k(experts: nn.Module) -> int:
    for name in TOP_K:
        if getattr(experts.config, name, None):
            return int(getattr(experts.config, name))
    raise ConfigError(
        f"cannot count the operations of {type(experts).__name__}: its configuration has none of {', '.join(TOP_K)}"
    )


def _attention_by_window(model: nn.Module) -> dict[int | None, int]:
    found: dict[int | None, int] = {}
    for module in model.modules():
        if not (hasattr(module, "layer_idx") and hasattr(module, "config") and hasattr(module, "scaling")):
            continue
        config = module.config
        own = getattr(module, "head_dim", None) or config.hidden_size // config.num_attention_heads
        query = getattr(module, "qk_head_dim", None) or own
        value = getattr(module, "v_head_dim", None) or query
        window = getattr(module, "sliding_window", None)
        found[window] = found.get(window, 0) + 2 * config.num_attention_heads * (query + value)
    return found
