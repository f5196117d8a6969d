"""Files of LoRA adapters of a denoiser, as diffusers and ComfyUI read them.

ComfyUI multiplies up by down by alpha / rank where a file has alphas, else by 1, and takes no notice of what diffusers
writes into the header. In a file with diffusers' names the scale is therefore part of the up matrix, so that 1 is right
for everybody. ComfyUI does not know diffusers' names of some models: these get a second file, with names and alphas as
it reads them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

COMFYUI_FILE = "comfyui_lora_weights.safetensors"
"""The second file."""


def fold_scale(layers: Mapping[str, Tensor], adapter: Any) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Adapters whose scale is 1, and the description of them that diffusers puts into the header of the file.

    Args:
        layers: ``lora_A`` ``[rank, in]`` and ``lora_B`` ``[out, rank]`` of each layer, by peft's names.
        adapter: peft's description of the adapters as they were trained.
    """
    scale = scale_of(adapter)
    folded = {name: weight * scale if ".lora_B." in name else weight for name, weight in layers.items()}
    return folded, {**adapter.to_dict(), "lora_alpha": adapter.r, "use_rslora": False}


def scale_of(adapter: Any) -> float:
    """By what peft multiplies up times down."""
    return adapter.lora_alpha / (math.sqrt(adapter.r) if adapter.use_rslora else adapter.r)


def save_for_comfyui(folder: Path, layers: Mapping[str, Tensor], adapter: Any, name_of: Callable[[str], str]) -> None:
    """Writes adapters with ComfyUI's names of the layers, and the alpha of each: ``COMFYUI_FILE``.

    Args:
        folder: where to; it must exist.
        layers, adapter: see ``fold_scale``.
        name_of: ComfyUI's name of a layer of the denoiser.
    """
    alpha = torch.tensor(scale_of(adapter) * adapter.r)
    stored = {}
    for name, weight in layers.items():
        layer, _, matrix = name.removesuffix(".weight").rpartition(".")
        stored[f"{name_of(layer)}.lora_{'down' if matrix == 'lora_A' else 'up'}.weight"] = weight.contiguous()
        stored[f"{name_of(layer)}.alpha"] = alpha.clone()
    save_file(stored, folder / COMFYUI_FILE, metadata={"format": "pt"})
