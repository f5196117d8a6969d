"""Exports of trained weights, as folders that diffusers, transformers and peft load without this library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from torch import Tensor

from sfumato.checkpoint.saving import disk_error
from sfumato.errors import CheckpointError, NonFiniteError
from sfumato.models.exportable import Exportable, Streamable, has_adapters
from sfumato.optim.ema import Ema, averaged_weights
from sfumato.parallel.finite import list_first
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.weights import weights_not_finite, weights_on_first, whole_weights
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
            raise NonFiniteError(f"weights are NaN or infinite: {list_first(bad)}. Nothing was exported to {folder}")
        streamed = None
        if isinstance(model, Streamable) and not has_adapters(model.trained):
            streamed = model.streamed_export(mesh)
        weights: dict[str, Tensor] = {}
        arriving: Iterator[tuple[str, Tensor | None]] = iter(())
        if streamed is None:
            weights = whole_weights(model.trained, mesh, only_adapters, share=True)
        else:
            arriving = weights_on_first(model.trained, mesh, dtype_of=streamed.dtype_of)

        def write(building: Path) -> None:
            if streamed is None:
                model.save_export(building, weights, merge)
            else:
                streamed.write(building, arriving)
            let_others_read(building)

        problem = ""
        if mesh.is_first:
            try:
                replace_folder(folder, write)
            except (OSError, SafetensorError) as error:
                problem = f"the export {folder} could not be written: {disk_error(error) or error}"
        for _ in arriving:  # on every rank, whatever has become of the files on the first
            pass
        with mesh.first_rank_first():  # writing may take longer than a collective waits
            pass
        if problem := mesh.first(problem, among="world"):
            raise CheckpointError(problem)


def let_others_read(folder: Path) -> None:
    """Lets everybody read the weights of a folder."""
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o644)  # safetensors writes files that only their owner can read
