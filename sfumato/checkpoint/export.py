"""Trained weights as folders that diffusers, transformers and peft load by themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError
from torch import nn

from sfumato.checkpoint.replacing import replace_folder
from sfumato.checkpoint.saving import disk_error
from sfumato.errors import CheckpointError, NonFiniteError
from sfumato.optim.ema import Ema, averaged_weights
from sfumato.parallel.finite import listed
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.weights import weights_not_finite, whole_weights


class Exportable(Protocol):
    """A model that knows the folders that other programs load."""

    @property
    def trained(self) -> nn.Module:
        """What holds the trained parameters, as ``parallelize`` returned it."""

    def save_export(self, folder: Path, weights: dict[str, torch.Tensor], merge: bool = False) -> None:
        """Writes the folder.

        Args:
            folder: an empty folder.
            weights: of ``trained``, whole, by the names of the plain module: the trainable ones when adapters are
                written, else all. The dictionary may be emptied.
            merge: write the model that computes the same without adapters, instead of the adapters.
        """


def export_model(model: Exportable, ema: Ema | None, folder: Path, mesh: Mesh, merge: bool = False) -> None:
    """Writes the model, or the adapters alone, to ``folder``, replacing an earlier export in one move.

    Args:
        model: what was trained.
        ema: if given, the averaged weights are exported, as they are what evaluation shows.
        folder: target, such as ``output_dir/hf_ckpt``.
        mesh: every rank gathers, the first one writes.
        merge: write a whole model also when adapters were trained.

    Raises:
        NonFiniteError: on every rank, when a weight is not finite; an earlier export stays.
    """
    only_adapters = has_adapters(model.trained) and not merge
    with averaged_weights(ema):
        bad = weights_not_finite(model.trained, mesh)
        if bad:
            raise NonFiniteError(f"weights are NaN or infinite: {listed(bad)}. Nothing was exported to {folder}")
        weights = whole_weights(model.trained, mesh, only_adapters, share=True)
        problem = ""
        with mesh.first_rank_first():  # writing may take longer than a collective waits
            if mesh.is_first:
                try:
                    replace_folder(folder, lambda building: _write(model, building, weights, merge))
                except (OSError, SafetensorError) as error:
                    problem = f"the export {folder} could not be written: {disk_error(error) or error}"
        if problem := mesh.first(problem, among="world"):
            raise CheckpointError(problem)


def _write(model: Exportable, folder: Path, weights: dict[str, torch.Tensor], merge: bool) -> None:
    model.save_export(folder, weights, merge)
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes files that only their owner can read


def has_adapters(module: nn.Module) -> bool:
    """Whether there are low-rank adapters in a module."""
    return any(getattr(each, "peft_config", None) for each in module.modules())
