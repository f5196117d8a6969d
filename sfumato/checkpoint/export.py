"""Trained weights as folders that diffusers loads by itself."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from sfumato.models.diffusion.base import DiffusionModel
from sfumato.optim.ema import Ema, averaged_weights
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.weights import whole_weights


def export_diffusion_model(model: DiffusionModel, ema: Ema | None, folder: Path, mesh: Mesh) -> None:
    """Writes the pipeline (or with LoRA the adapter) to ``folder``, replacing an earlier export in one move.

    Args:
        model: what was trained.
        ema: if given, the averaged weights are exported, as they are what evaluation shows.
        folder: target, such as ``output_dir/hf_ckpt``.
        mesh: every rank gathers, the first one writes.
    """
    with averaged_weights(ema):
        weights = whole_weights(model.denoiser, mesh)
    if mesh.is_first:
        building, old = folder.with_name(f"{folder.name}.tmp"), folder.with_name(f"{folder.name}.old")
        shutil.rmtree(building, ignore_errors=True)
        building.mkdir(parents=True)
        if getattr(model.denoiser, "peft_config", None):
            model.save_adapter(building, weights)
        else:
            model.save_pipeline(building, weights)
        for path in building.rglob("*.safetensors"):
            path.chmod(0o644)  # safetensors writes files that only their owner can read
        shutil.rmtree(old, ignore_errors=True)
        if folder.exists():
            os.replace(folder, old)
        os.replace(building, folder)
        shutil.rmtree(old, ignore_errors=True)
    mesh.barrier()
