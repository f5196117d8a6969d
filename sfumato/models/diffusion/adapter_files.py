"""Files of LoRA adapters of a denoiser, as diffusers and ComfyUI read them.

An adapter adds up @ down * scale to a weight. ComfyUI takes alpha / rank for the scale where a file has alphas, else 1,
and ignores the metadata that diffusers writes into the header of the file. In a file with diffusers' names the scale is
therefore multiplied into the up matrix, so that a scale of 1 is right for every reader. For some models ComfyUI does
not know diffusers' names of the layers: for these a second file is written, with ComfyUI's names and alphas.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sfumato.config.open_mappings import Keywords
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline
    from peft import LoraConfig

ADAPTER_FILE = "pytorch_lora_weights.safetensors"
"""Name of diffusers' file of adapters."""

COMFYUI_FILE = "comfyui_lora_weights.safetensors"
"""Name of the second file, the one for ComfyUI."""


def fold_scale(layers: Mapping[str, Tensor], adapter: LoraConfig) -> tuple[dict[str, Tensor], Keywords]:
    """Multiplies the scale of adapters into their up matrices.

    Args:
        layers: ``lora_A`` ``[rank, in]`` and ``lora_B`` ``[out, rank]`` of each layer, by peft's names.
        adapter: peft's configuration of the adapters as they were trained.

    Returns:
        The layers of adapters with a scale of 1, and their configuration, which diffusers puts into the file's header.
    """
    scale = scale_of(adapter)
    folded = {name: weight * scale if ".lora_B." in name else weight for name, weight in layers.items()}
    return folded, {**adapter.to_dict(), "lora_alpha": adapter.r, "use_rslora": False}


def scale_of(adapter: LoraConfig) -> float:
    """The factor by which peft multiplies the product of the up and the down matrix."""
    return adapter.lora_alpha / (math.sqrt(adapter.r) if adapter.use_rslora else adapter.r)


def save_for_diffusers(
    pipeline: DiffusionPipeline, name: str, folder: Path, layers: Mapping[str, Tensor], metadata: Mapping[str, object]
) -> None:
    """Writes adapters to ``ADAPTER_FILE`` as diffusers' ``load_lora_weights`` reads them.

    Some pipelines have no such method; of these ``pipeline.transformer.load_lora_adapter`` reads the file.

    Args:
        pipeline: the pipeline of the denoiser.
        name: name of the denoiser in the pipeline.
        folder: the folder to write to.
        layers, metadata: what ``fold_scale`` returns.
    """
    if hasattr(pipeline, "save_lora_weights"):
        arguments: Keywords = {f"{name}_lora_layers": layers, f"{name}_lora_adapter_metadata": metadata}
        pipeline.save_lora_weights(folder, **arguments)  # pyright: ignore[reportAttributeAccessIssue]
        return
    from diffusers.loaders.lora_base import LoraBaseMixin

    LoraBaseMixin.write_lora_layers(
        state_dict=LoraBaseMixin.pack_weights(dict(layers), name),
        save_directory=str(folder),
        is_main_process=True,
        weight_name=ADAPTER_FILE,
        save_function=None,  # pyright: ignore[reportArgumentType]
        safe_serialization=True,
        lora_adapter_metadata=LoraBaseMixin.pack_weights(dict(metadata), name),
    )


def load_from_diffusers(pipeline: DiffusionPipeline, folder: Path) -> None:
    """Gives a pipeline the adapters of a folder that ``save_for_diffusers`` wrote, in place of those that it has.

    Args:
        pipeline: of the model that is to have them.
        folder: the adapter of a second transformer lies in the folder ``transformer_2`` in it.

    Raises:
        ConfigError: when they are adapters of another model, or with names that diffusers does not read.
    """
    unload_adapters(pipeline)
    second = folder / "transformer_2"
    try:
        if not hasattr(pipeline, "load_lora_weights"):
            pipeline.transformer.load_lora_adapter(str(folder), weight_name=ADAPTER_FILE)
            return
        pipeline.load_lora_weights(str(folder))
        _refuse_unread(pipeline, folder, "unet" if hasattr(pipeline, "unet") else "transformer")
        if second.is_dir():
            pipeline.load_lora_weights(str(second), load_into_transformer_2=True)
    except (ValueError, RuntimeError, KeyError) as error:
        first = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise ConfigError(
            f"{folder}: its adapters cannot be loaded into this {type(pipeline).__name__}: {first}. Give the model "
            "that they were trained on; `sfumato export FILE OUT` makes a folder of a file of kohya's"
        ) from error


def _refuse_unread(pipeline: Any, folder: Path, denoiser: str) -> None:
    """Raises ValueError for layers of a file that have no adapter in the model: diffusers leaves them out silently."""
    stored = pipeline.lora_state_dict(str(folder))
    stored = stored[0] if isinstance(stored, tuple) else stored
    modules = getattr(pipeline, denoiser).named_modules()
    adapted = {f"{denoiser}.{name}" for name, module in modules if hasattr(module, "lora_A")}
    encoders = tuple(f"{name}." for name in pipeline.components if name != denoiser)
    layers = {name.partition(".lora_A.")[0] for name in stored if ".lora_A." in name and not name.startswith(encoders)}
    if unread := sorted(layers - adapted):
        raise ValueError(f"the model has no place for {len(unread)} of {len(layers)} layers, such as {unread[0]}")


def unload_adapters(pipeline: DiffusionPipeline) -> None:
    """Removes the adapters of a pipeline."""
    if hasattr(pipeline, "unload_lora_weights"):
        pipeline.unload_lora_weights()
    else:
        pipeline.transformer.unload_lora()


def save_for_comfyui(
    folder: Path, layers: Mapping[str, Tensor], adapter: LoraConfig, name_of: Callable[[str], str]
) -> None:
    """Writes adapters to ``COMFYUI_FILE``, with ComfyUI's names of the layers and an alpha for each.

    Args:
        folder: the folder to write to; it must exist.
        layers, adapter: see ``fold_scale``.
        name_of: gives ComfyUI's name of a layer of the denoiser.
    """
    # ComfyUI divides alpha by the rank: this alpha gives back the scale of peft.
    alpha = torch.tensor(scale_of(adapter) * adapter.r)
    stored = {}
    for name, weight in layers.items():
        layer, _, matrix = name.removesuffix(".weight").rpartition(".")
        stored[f"{name_of(layer)}.lora_{'down' if matrix == 'lora_A' else 'up'}.weight"] = weight.contiguous()
        stored[f"{name_of(layer)}.alpha"] = alpha.clone()
    save_file(stored, folder / COMFYUI_FILE, metadata={"format": "pt"})
