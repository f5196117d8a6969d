"""The policy that a KL penalty compares with: the model before training."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from sfumato.models.diffusion.base import DiffusionModel


class Reference:
    """With LoRA the model itself, its adapter switched off; else a frozen copy of the denoiser."""

    def __init__(self, model: DiffusionModel) -> None:
        """Make it before training, from the model's initial weights."""
        self.model = model
        self.weights: nn.Module | None = None
        """The frozen copy, which a checkpoint must keep; None with LoRA."""
        if not getattr(model.denoiser, "peft_config", None):
            self.weights = copy.deepcopy(model.denoiser).requires_grad_(False).eval()
            self.model = copy.copy(model)
            self.model.pipeline = copy.copy(model.pipeline)  # encoders and autoencoder stay shared
            setattr(self.model.pipeline, model.denoiser_name, self.weights)

    @contextmanager
    def active(self) -> Iterator[DiffusionModel]:
        """The reference as a model, inside the block."""
        if self.weights is not None:
            yield self.model
            return
        with self.model.without_adapter():
            yield self.model
