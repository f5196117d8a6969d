"""Floating point operations of a denoiser for an image or a video, counted as in ``models/estimate/flops.py``."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sfumato.errors import ConfigError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.encoded import EncodedBatch
from sfumato.parallel.shards import trainable_parameters


class DenoiserFlops(NamedTuple):
    """Operations of a denoiser for one image or video, without guidance."""

    forward: int
    """Operations of a forward pass."""
    training: int
    """Operations of a forward and a backward pass."""


class BatchFlops:
    """Operations of a denoiser for the images of batches, counted once for each size and number of source images."""

    def __init__(self, model: DiffusionModel) -> None:
        self._model = model
        self._counted: dict[tuple[tuple[int, int], int], DenoiserFlops] = {}

    def count_image(self, batch: EncodedBatch) -> DenoiserFlops:
        """Operations for one image or video of a batch, without guidance."""
        kind = batch.size, batch.num_sources
        if kind not in self._counted:
            several = batch.conditioning.tensors if self._model.max_source_images > 1 else None
            self._counted[kind] = denoiser_flops(self._model, *batch.size, several)
        return self._counted[kind]


def denoiser_flops(
    model: DiffusionModel, height: int, width: int, conditioning: Mapping[str, Tensor] | None = None
) -> DenoiserFlops:
    """Counts the operations of a denoiser for one image or video, without guidance.

    torch counts them on meta tensors, so nothing is computed. Of the backward pass only what is needed counts: frozen
    weights (LoRA) get no gradient, and layers before the first adapter have no backward pass.

    Args:
        model: before or after ``parallelize``.
        height, width: of the image in pixels; a video has ``model.frames`` of them.
        conditioning: what the denoiser is conditioned on, ``[B, ...]``; None takes an example.
    """
    shadow = with_denoiser(model, meta_denoiser(model))
    example = model.example_embeddings(height, width) if conditioning is None else conditioning
    embeddings = {name: tensor[:1].to("meta") for name, tensor in example.items()}
    latents = torch.empty(1, *model.latent_shape(height, width, model.frames), device="meta")
    with torch.enable_grad(), FlopCounterMode(display=False) as counter:
        with refusing_other_inputs(model):
            velocity = shadow.denoise(latents, torch.empty(1, device="meta"), embeddings)
        forward = counter.get_total_flops()
        velocity.sum().backward()
    return DenoiserFlops(forward, counter.get_total_flops())


@contextmanager
def refusing_other_inputs(model: DiffusionModel) -> Iterator[None]:
    """Inside, a denoiser on meta is called; raises ConfigError where it has other inputs than its family gives it.

    One that fills, edits or follows a control image has further channels, and may be saved as the plain pipeline.
    """
    try:
        yield
    except (RuntimeError, ValueError, TypeError, AttributeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"model: the {model.denoiser_name} has other inputs than {model.pipeline_class} gives it ({reason:.300}). "
            "One that fills a mask, edits or follows a control image goes with a pipeline of its own: take the "
            f"folder, or the {model.denoiser_name}, that was published for {model.pipeline_class}"
        ) from error


def meta_denoiser(model: DiffusionModel) -> nn.Module:
    """The denoiser as it was before ``parallelize``, on meta, with the same parameters trainable."""
    plain = model.plain_denoiser().train()
    trained = set(trainable_parameters(model.denoiser))
    for name, parameter in plain.named_parameters():
        parameter.requires_grad_(name in trained)
    return plain


def with_denoiser(model: DiffusionModel, denoiser: nn.Module) -> DiffusionModel:
    """A copy of a model with another denoiser; everything else is shared."""
    shadow = copy.copy(model)
    shadow.pipeline = copy.copy(model.pipeline)
    shadow.set_denoiser(denoiser)
    return shadow
