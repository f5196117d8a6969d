"""Exports of trained weights, as folders that diffusers, transformers and peft load without this library."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from sfumato.checkpoint.saving import disk_error
from sfumato.errors import CheckpointError, NonFiniteError
from sfumato.models.exportable import Exportable, has_adapters
from sfumato.optim.ema import Ema, averaged_weights
from sfumato.parallel.finite import listed
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.weights import weights_not_finite, whole_weights
from sfumato.tracking.atomic_folders import (
    replace_folder,
)


def export_model(model: Exportable, ema: Ema | None, folder: Path, mesh: Mesh, merge: bool = False) -> None:
    """Writes the model, or the adapters alone, to ``folder``, replacing an earlier export in one move.

    Args:
        model: what was trained.
        ema: if given, its averaged weights are exported, since evaluation uses them.
        folder: target, such as ``output_dir/hf_ckpt``.
        mesh: every rank gathers the weights, and the first one writes them.
        merge: writes a whole model also when adapters were trained.

    Raises:
        NonFiniteError: on every rank, when a weight is not finite; an earlier export stays.
        CheckpointError: on every rank, when the folder cannot be written.
    """
    merge = merge or getattr(model, "exports_merged", False)
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


def _write(model: Exportable, folder: Path, weights: dict[str, Tensor], merge: bool) -> None:
    model.save_export(folder, weights, merge)
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes files that only their owner can read
