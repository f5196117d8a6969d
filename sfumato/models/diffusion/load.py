"""From a pipeline folder, or a description, to a model that can be trained."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

import sfumato.models.diffusion as families
from sfumato.config.load import read_yaml
from sfumato.config.sections import ModelConfig
from sfumato.errors import ConfigError, MissingDependencyError
from sfumato.models.diffusion.base import DiffusionModel, read_pipeline_class
from sfumato.models.lora import add_lora
from sfumato.parallel.weights import build_on_meta

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "no": None}


def find_families() -> dict[str, type[DiffusionModel]]:
    """The model families in this folder by pipeline class name; a file with a subclass is enough to be found."""
    found = {}
    for info in pkgutil.iter_modules(families.__path__):
        module = importlib.import_module(f"{families.__name__}.{info.name}")
        for _, cls in inspect.getmembers(module, inspect.isclass):
            if issubclass(cls, DiffusionModel) and not inspect.isabstract(cls) and cls.__module__ == module.__name__:
                found[cls.pipeline_class] = cls
    return dict(sorted(found.items()))


def family_of(config: ModelConfig) -> type[DiffusionModel]:
    """The family that ``config.family`` names, else the one here for the pipeline class of the folder or description.

    Raises:
        ConfigError: when the folder or description is missing, or no family goes with it.
    """
    if config.config_path is not None:
        where = f"{config.config_path}: pipeline"
        pipeline_class = str(read_yaml(config.config_path).get("pipeline"))
    else:
        where = f"model.model_path {config.model_path}"
        pipeline_class = _pipeline_class_of(Path(str(config.model_path)))
    if config.family is not None:
        family = _import_family(config.family)
        if family.pipeline_class != pipeline_class:
            raise ConfigError(
                f"{where}: model.family {config.family} is for pipeline class {family.pipeline_class!r}, not "
                f"{pipeline_class!r}"
            )
        return family
    known = find_families()
    if pipeline_class not in known:
        raise ConfigError(
            f"{where}: pipeline class {pipeline_class!r} is not known; known: {', '.join(known)}. A family of your own "
            "is named by model.family: my_module:MyFamily"
        )
    return known[pipeline_class]


def component_class(library: str, name: str) -> Any:
    """The class of a pipeline's component as model_index.json names it; None where its module was not imported."""
    return getattr(sys.modules.get(library), name, None)


def _import_family(name: str) -> type[DiffusionModel]:
    module, _, attribute = name.partition(":")
    try:
        family = getattr(importlib.import_module(module), attribute)
        if not (isinstance(family, type) and issubclass(family, DiffusionModel)) or inspect.isabstract(family):
            raise TypeError("it is not a subclass of DiffusionModel with all of its methods")
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise ConfigError(
            f"model.family {name}: cannot import it: {error}. Give module:Class, and put the folder of the module on "
            "PYTHONPATH"
        ) from error
    return family


def _pipeline_class_of(folder: Path) -> str:
    try:
        return read_pipeline_class(folder)
    except FileNotFoundError as error:
        raise ConfigError(
            f"model.model_path {folder} is not a pipeline folder: {folder / 'model_index.json'} does not exist. "
            "Give a folder that diffusers' save_pretrained wrote; for the quickstart, run the step before this one "
            "first (make quickstart runs all of them)"
        ) from error
    except ValueError as error:
        raise ConfigError(f"model.model_path {folder}: {error}") from error


def build_diffusion_model(
    config: ModelConfig,
    device: torch.device | str = "cpu",
    mixed_precision: str = "no",
    seed: int = 0,
    init_device: str = "cuda",
) -> DiffusionModel:
    """Loads or builds a pipeline, puts it on a device, and makes what is trained trainable.

    Trained weights are float32; what is frozen has ``config.dtype``.

    Args:
        config: the model section.
        device: where the networks go.
        mixed_precision: "no" or "bf16": autocast of the denoiser.
        seed: seed of random weights (a description, or LoRA's initialisation).
        init_device: where the denoiser is until ``DiffusionModel.parallelize``: "cuda" is ``device``, "cpu" the CPU,
            and "meta" nowhere: its weights are then read where they are needed.

    Raises:
        ConfigError: when the folder or description is missing or of an unknown family.
    """
    if init_device == "meta" and config.model_path is None:
        raise ConfigError("train.init_device meta reads weights from model.model_path; with model.config_path take cpu")
    family, pipeline = _make_pipeline(config, seed, init_device == "meta")
    source = Path(config.model_path) if config.model_path is not None else None
    model = family(pipeline, config.max_sequence_length, DTYPES[mixed_precision], source)
    model.device = torch.device(device)
    model.idle_device = torch.device("cpu") if config.offload_idle else None
    waiting = (*model.encoder_names, *model.autoencoder_names) if config.offload_idle else ()
    for name, component in model.components.items():
        if name in waiting:
            component.to(model.idle_device)
        elif component is not model.denoiser or init_device == "cuda":
            component.to(device)
    if config.lora is not None:
        add_lora(model.denoiser, config.lora, model.lora_targets, seed)
    else:
        model.denoiser.requires_grad_(True)
    model.denoiser.train()
    return model


def _make_pipeline(config: ModelConfig, seed: int, on_meta: bool) -> tuple[type[DiffusionModel], Any]:
    frozen, family = DTYPES[config.dtype], family_of(config)
    if config.config_path is not None:
        description = read_yaml(config.config_path)
        trained = (family.denoiser_name, *family.further_denoisers) if config.lora is None else ()
        try:
            pipeline = family.build(description, seed)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{config.config_path}: cannot build {family.pipeline_class}: {error}") from error
        if config.dtype != "fp32":
            for name, component in pipeline.components.items():
                if isinstance(component, torch.nn.Module) and name not in trained:
                    component.to(frozen)
        return family, pipeline
    folder = Path(str(config.model_path))
    pipeline_type = family.pipeline_type()
    dtype = frozen if config.lora else torch.float32
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    given: dict[str, Any] = {name: None for name, value in index.items() if value == [None, None]}
    denoisers = [each for each in (family.denoiser_name, *family.further_denoisers) if index.get(each, [None])[0]]
    dtypes = {"default": frozen, **dict.fromkeys(denoisers, dtype)}
    for name in denoisers if on_meta else ():
        given[name] = build_on_meta(partial(_from_config, component_class(*index[name]), folder / name)).to(dtype)
    try:
        pipeline = pipeline_type.from_pretrained(folder, local_files_only=True, dtype=dtypes, **given)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"model.model_path {folder}: diffusers cannot load it: {error}") from error
    except ImportError as error:
        raise MissingDependencyError(
            f"model.model_path {folder}: {family.pipeline_class} needs a package that is not installed: {error}"
        ) from error
    return family, pipeline


def _from_config(cls: Any, folder: Path) -> torch.nn.Module:
    return cls.from_config(cls.load_config(folder))
