"""Checks that a pipeline folder has the components that its family needs, with weights in files that are read."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeGuard

import torch

from sfumato.config.file_checks import read_json
from sfumato.config.open_mappings import JsonObject
from sfumato.errors import ConfigError

WEIGHTS = (
    "diffusion_pytorch_model.safetensors",
    "diffusion_pytorch_model.safetensors.index.json",
    "model.safetensors",
    "model.safetensors.index.json",
)
"""Names of files with the weights of components of diffusers and transformers, whole or in shards."""


def component_class(library: str, name: str) -> Any:
    """The class that model_index.json names for a component; None where its library was not imported or lacks it.

    A library may be a package of diffusers' pipelines, such as ``ltx2``.
    """
    module = sys.modules.get(library) or sys.modules.get(f"diffusers.pipelines.{library}")
    return getattr(module, name, None)


def names_part(value: object) -> TypeGuard[list[Any]]:
    """Whether a value of a model_index.json is to name a component: lists of numbers are settings of the pipeline."""
    return isinstance(value, list) and not (value and all(type(item) in (int, float) for item in value))


def has_part(index: JsonObject, name: str) -> bool:
    """Whether model_index.json names a component that is not null."""
    return isinstance(index.get(name), list) and any(index[name])


def refuse_file(path: Path) -> None:
    """Raises ConfigError when what should be a pipeline folder is a single file."""
    if path.is_file():
        raise ConfigError(
            f"model.model_path {path} is a file, not a pipeline folder. Make one, once, where the hub can be reached "
            'for what such a file does not hold: python -c "import diffusers; diffusers.StableDiffusionXLPipeline.'
            f"from_single_file('{path}').save_pretrained('FOLDER')\", with the class of your model, and give FOLDER"
        )


def describe_other_folder(folder: Path) -> str:
    """A sentence to append to a message if a folder without model_index.json holds one component; else empty."""
    try:
        config = read_json(folder / "config.json")
        name = config.get("_class_name") or ", ".join(config.get("architectures") or [])
    except (OSError, ValueError, AttributeError, TypeError):
        return ""
    if not name:
        return ""
    return (
        f" It holds a single part ({name}): give the folder of the whole pipeline, in which it stands beside the "
        "others and model_index.json names it"
    )


def check_parts(folder: Path, index: dict[str, object], needed: Iterable[str], needs_weights: bool = True) -> None:
    """Checks that a pipeline folder has the components that its family needs, with weights in files that are read.

    Args:
        folder: the folder with ``model_index.json``.
        index: the content of that file.
        needed: names of components that must be there.
        needs_weights: whether a network without any weights is refused; without them its size can be predicted.

    Raises:
        ConfigError: when a component is missing or cannot be read; the message names it and the remedy.
    """
    import diffusers
    import transformers  # noqa: F401  (component_class looks for classes in imported modules)

    pipeline_class = getattr(diffusers, str(index.get("_class_name")), None)
    for name in getattr(pipeline_class, "_optional_components", []):
        if name in index and index[name] is None:
            raise ConfigError(
                f"model.model_path {folder}: model_index.json says null of {name}, which diffusers does not read: "
                "write [null, null]"
            )
    missing = [name for name in needed if index.get(name) is None or index[name] == [None, None]]
    if missing:
        raise ConfigError(
            f"model.model_path {folder}: {index.get('_class_name')} needs {', '.join(missing)}, which model_index.json "
            "does not name: take a whole pipeline"
        )
    for name, value in index.items():
        if isinstance(value, list) and len(value) == 2 and all(isinstance(part, str) for part in value):
            _check_part(folder, name, component_class(*value), str(index.get("_class_name")), needs_weights)


def parts_without_weights(folder: Path, index: dict[str, object]) -> list[str]:
    """Names of the networks of a pipeline folder that have a configuration and no weights."""
    names = [name for name, value in index.items() if names_part(value) and has_part(index, name)]
    networks = [name for name in names if (folder / name / "config.json").is_file()]
    return [name for name in networks if not any((folder / name).glob("*.safetensors"))]


def _check_part(folder: Path, name: str, cls: object, pipeline_class: str, needs_weights: bool) -> None:
    """Raises ConfigError for a network that is quantised, or whose files of weights have names that are not read."""
    part_folder = folder / name
    if not (isinstance(cls, type) and issubclass(cls, torch.nn.Module)) or not part_folder.is_dir():
        return
    try:
        config = read_json(part_folder / "config.json")
    except (OSError, ValueError):
        return  # loading the component reports it
    quantised = config.get("quantization_config") if isinstance(config, dict) else None
    if quantised:
        method = quantised.get("quant_method", "") if isinstance(quantised, dict) else ""
        raise ConfigError(
            f"model.model_path {folder}: {name} is quantised ({method or 'quantization_config'} in its config.json), "
            "which can neither be trained nor kept in another precision here: take the weights that were quantised"
        )
    if all((part_folder / file).is_file() for file in WEIGHTS[:2]):
        raise ConfigError(
            f"model.model_path {folder}: {name} has {WEIGHTS[0]} and shards that {WEIGHTS[1]} names, of which one was "
            "left by an earlier save: remove it"
        )
    if any((part_folder / file).is_file() for file in WEIGHTS):
        return
    safetensors_files = sorted(path.name for path in part_folder.glob("*.safetensors"))
    # The variant stands before the number of the shard and the extension, as in model.fp16-00001-of-00002.safetensors.
    variants = {file.split(".")[1].split("-")[0] for file in safetensors_files if file.count(".") > 1}
    if not safetensors_files and not needs_weights:
        return
    if not safetensors_files:
        raise ConfigError(
            f"model.model_path {folder}: {name} has no weights: copy or download {' or '.join(WEIGHTS[::2])} into it"
        )
    if variants:
        variant = sorted(variants)[0]
        raise ConfigError(
            f"model.model_path {folder}: {name} has weights of the variant {variant} alone "
            f"({safetensors_files[0]}). Write "
            f'the folder anew without: python -c "import diffusers; diffusers.{pipeline_class}.from_pretrained('
            f"'{folder}', variant='{variant}').save_pretrained('FOLDER')\", and give FOLDER"
        )
    raise ConfigError(
        f"model.model_path {folder}: {name} has {safetensors_files[0]}, but {' or '.join(WEIGHTS[::2])} is read"
    )
