"""The policy that a KL penalty compares with: the model before training."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from sfumato.config.sections import TrainConfig
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.parallel.mesh import Mesh


class Reference:
    """With LoRA the model itself, its adapter switched off; else a frozen copy of the denoiser."""

    def __init__(self, model: DiffusionModel) -> None:
        """Make it before training and before the model is put on a mesh, from its initial weights."""
        self.model = model
        self.is_copy = not getattr(model.denoiser, "peft_config", None)
        if self.is_copy:
            self.model = copy.copy(model)
            self.model.pipeline = copy.copy(model.pipeline)  # the autoencoder stays shared
            self.model.free_encoders()  # else they would stay in memory when the model frees its own
            self.model.set_denoiser(copy.deepcopy(model.denoiser).requires_grad_(False).eval())

    @property
    def weights(self) -> nn.Module | None:
        """The frozen copy, which a checkpoint must keep; None with LoRA."""
        return self.model.denoiser if self.is_copy else None

    def parallelize(self, mesh: Mesh, config: TrainConfig) -> None:
        """Puts the copy on a mesh, as ``DiffusionModel.parallelize`` does."""
        if self.is_copy:
            self.model.parallelize(mesh, config)

    @contextmanager
    def active(self) -> Iterator[DiffusionModel]:
        """The reference as a model, inside the block."""
        if self.is_copy:
            yield self.model
            return
        with self.model.without_adapter():
            yield self.model
