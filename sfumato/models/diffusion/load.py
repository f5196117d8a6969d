"""Loads a pipeline folder, or builds a pipeline from a description, as a model that can be trained."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from sfumato.config.file_checks import outside_problem, read_json, read_json_object
from sfumato.config.open_mappings import JsonObject
from sfumato.config.paths import check_pipeline, hub_hint
from sfumato.config.sections import ModelConfig
from sfumato.config.trust import load_pretrained, make_from_config, refuse_code
from sfumato.config.yaml_text import read_yaml
from sfumato.errors import ConfigError, MissingDependencyError
from sfumato.models.diffusion import families
from sfumato.models.diffusion.base import DiffusionModel, read_pipeline_class
from sfumato.models.diffusion.folder_parts import (
    check_parts,
    component_class,
    describe_other_folder,
    has_part,
    names_part,
    refuse_file,
)
from sfumato.models.diffusion.schedulers import FILE as SCHEDULER_FILE
from sfumato.models.diffusion.schedulers import require_scipy
from sfumato.parallel.finite import list_first
from sfumato.parallel.weights import build_on_meta, refuse_misread, refuse_not_finite

if TYPE_CHECKING:
    from diffusers.configuration_utils import ConfigMixin
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "no": None}

_DOTTED_NAME = re.compile(r"[\w.]{1,100}")

VOCABULARIES = ("tokenizer.json", "vocab.json", "vocab.txt", ".model")
"""Suffixes of the names of files with a tokenizer's vocabulary."""
BYTE_TOKENIZER = "ByT5Tokenizer"
"""A tokenizer that needs no vocabulary."""

UNREAD = ("lm_head.",)
"""How names of weights begin that no embedding of a prompt depends on."""


def find_families() -> dict[str, type[DiffusionModel]]:
    """Finds the model families in the package ``families``, by the name of their pipeline class.

    A new file with a subclass of ``DiffusionModel`` needs no registration.
    """
    family_of_pipeline = {}
    for info in pkgutil.iter_modules(families.__path__):
        module = importlib.import_module(f"{families.__name__}.{info.name}")
        classes = [cls for _, cls in inspect.getmembers(module, inspect.isclass)]
        for cls in sorted(classes, key=lambda cls: getattr(cls, "takes_image", False)):
            # Not the classes of other families that the file imports.
            if issubclass(cls, DiffusionModel) and not inspect.isabstract(cls) and cls.__module__ == module.__name__:
                # Of two with one pipeline class, the one with source images is asked for by model.from_images.
                if cls.takes_image and cls.pipeline_class in family_of_pipeline:
                    continue
                family_of_pipeline[cls.pipeline_class] = cls
    return dict(sorted(family_of_pipeline.items()))


def family_of(config: ModelConfig, needs_weights: bool = True) -> type[DiffusionModel]:
    """The family named by ``config.family``, or else the built-in one for the pipeline class of the configuration.

    Args:
        config: the model section.
        needs_weights: see ``check_parts``.

    Raises:
        ConfigError: when the folder or description is missing, there is no family for it, or something in the folder
            could run foreign code.
    """
    if config.config_path is not None:
        where = f"{config.config_path}: pipeline"
        description = read_yaml(config.config_path)
        pipeline_class = str(description.get("pipeline"))
        require_scipy("", description.get("scheduler"), f"{config.config_path}: scheduler")
    else:
        where = f"model.model_path {config.model_path}"
        refuse_file(folder := Path(str(config.model_path)))
        pipeline_class = _read_pipeline_class(folder)
        index = read_index(folder)
        if has_part(index, "scheduler"):
            require_scipy(str(index["scheduler"][1]), _read_scheduler_fields(folder), f"model.model_path {folder}")
    if config.family is not None:
        family = _import_family(config.family)
        if config.from_images and not family.takes_image:
            raise ConfigError(f"model.from_images: model.family {config.family} takes no source images: leave it out")
        if family.pipeline_class != pipeline_class:
            raise ConfigError(
                f"{where}: model.family {config.family} is for pipeline class {family.pipeline_class!r}, not "
                f"{pipeline_class!r}"
            )
    else:
        known_families = find_families()
        if pipeline_class not in known_families:
            raise ConfigError(
                f"{where}: pipeline class {pipeline_class!r} is not known; known: {', '.join(known_families)}. A "
                "family of your own is named by model.family: my_module:MyFamily"
            )
        family = known_families[pipeline_class]
        if config.from_images and not family.takes_image:
            family = _family_from_images(family, where)
    if config.config_path is None:
        check_parts(folder, index, family.needed_parts(), needs_weights)
    length = family.prompt_length(config.max_sequence_length)
    if length < family.shortest_prompt:
        raise ConfigError(
            f"model.max_sequence_length {length}: {family.pipeline_class} reads its prompts "
            f"through an encoder of that length: set it to at least {family.shortest_prompt}"
        )
    return family


def _family_from_images(family: type[DiffusionModel], where: str) -> type[DiffusionModel]:
    """The family for the same components that makes samples from source images. Raises ConfigError without one."""
    if family.image_family is None:
        raise ConfigError(
            f"{where}: model.from_images: {family.pipeline_class} makes samples from text alone here: leave it out, or "
            "take a pipeline that edits or animates"
        )
    return family.with_images()


def _read_scheduler_fields(folder: Path) -> object:
    """The settings in a pipeline folder's scheduler file; empty if it is broken, which loading the pipeline reports."""
    try:
        return read_json(folder / SCHEDULER_FILE)
    except (OSError, ValueError):
        return {}


def _import_family(name: str) -> type[DiffusionModel]:
    """Imports the class that ``model.family`` names as ``module:Class``. Raises ConfigError."""
    refuse_code(f"model.family {name}")
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


def _read_pipeline_class(folder: Path) -> str:
    """The pipeline class that model_index.json names. Raises ConfigError, with a hint what the folder holds instead."""
    try:
        return read_pipeline_class(folder)
    except FileNotFoundError as error:
        from sfumato.models.lora import refuse_adapter

        refuse_adapter(folder)
        if hint := hub_hint(folder):
            raise ConfigError(
                f"model.model_path {folder} is not a pipeline folder{hint}; else give a folder that diffusers' "
                "save_pretrained wrote; for the quickstart, run the step before this one first (make quickstart runs "
                "all of them)"
            ) from error
        raise ConfigError(
            f"model.model_path {folder} is not a pipeline folder: {folder / 'model_index.json'} does not exist. "
            "Give a folder that diffusers' save_pretrained wrote; for the quickstart, run the step before this one "
            f"first (make quickstart runs all of them).{describe_other_folder(folder)}"
        ) from error
    except ValueError as error:
        raise ConfigError(f"model.model_path {folder}: {error}") from error


def read_index(folder: Path) -> JsonObject:
    """Reads and checks the model_index.json of a pipeline folder: library and class of each component, by name.

    Raises:
        ConfigError: when the file is broken, a component that it names is missing, or ``check_pipeline`` refuses one.
    """
    try:
        index = read_json_object(folder / "model_index.json")
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.model_path {folder}: cannot read model_index.json: {error}") from error
    parts = {name: value for name, value in index.items() if not name.startswith("_") and names_part(value)}
    for name, value in parts.items():
        is_named = len(value) == 2 and all(isinstance(part, str) and _DOTTED_NAME.fullmatch(part) for part in value)
        if value != [None, None] and not is_named:
            raise ConfigError(f"model.model_path {folder}: model_index.json names no library and class for {name:.100}")
        problem = outside_problem(folder, name, or_folder=True)
        if problem not in (None, "does not exist"):
            raise ConfigError(f"model.model_path {folder}: model_index.json names {name[:100]!r}, which {problem}")
    present = {name for name in parts if (folder / name).is_dir() and any((folder / name).iterdir())}
    missing = [name for name, value in parts.items() if any(value) and name not in present]
    if missing:
        raise ConfigError(
            f"model.model_path {folder}: {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} missing: "
            "model_index.json names each part, and it must lie in a folder of that name; copy or download it again, or "
            "where a pipeline does without, such as a safety_checker, write [null, null] in its place"
        )
    for name, value in parts.items():
        files = [file.name for file in (folder / name).iterdir()] if any(value) else []
        has_vocabulary = any(file.endswith(VOCABULARIES) for file in files)
        if "Tokenizer" in str(value[-1]) and value[-1] != BYTE_TOKENIZER and files and not has_vocabulary:
            raise ConfigError(
                f"model.model_path {folder}: {name} has no vocabulary ({', '.join(VOCABULARIES)}), so every prompt "
                "would be the same: copy or download the folder again"
            )
    check_pipeline(folder, parts)
    return index


def build_diffusion_model(
    config: ModelConfig,
    device: torch.device | str = "cpu",
    mixed_precision: str = "no",
    seed: int = 0,
    init_device: str = "cuda",
) -> DiffusionModel:
    """Loads or builds a pipeline, moves it to a device, and makes the denoiser or its adapters trainable.

    Trained weights are float32; frozen ones have ``config.dtype``.

    Args:
        config: the model section.
        device: the device of the networks.
        mixed_precision: "no" or "bf16": autocast of the denoiser.
        seed: seed of random weights (of a described pipeline, or of LoRA adapters).
        init_device: where the denoiser is until ``DiffusionModel.parallelize``: "cuda" is ``device``, "cpu" the CPU,
            and "meta" no device: each rank then reads the weights of its shards.

    Raises:
        ConfigError: when the folder or description is missing or of an unknown family, or a weight is not finite.
    """
    if init_device == "meta" and config.model_path is None:
        raise ConfigError("train.init_device meta reads weights from model.model_path; with model.config_path take cpu")
    if init_device == "meta" and config.lora is not None and config.lora.changes_weights:
        raise ConfigError(
            f"train.init_device meta: adapters of variant {config.lora.variant} are made of the weights: take cpu"
        )
    family, pipeline = _make_pipeline(config, seed, init_device == "meta")
    source = Path(config.model_path) if config.model_path is not None else None
    model = family(
        pipeline,
        max_sequence_length=family.prompt_length(config.max_sequence_length),
        autocast_dtype=DTYPES[mixed_precision],
        source=source,
    )
    model.device = torch.device(device)
    model.idle_device = torch.device("cpu") if config.offload_idle else None
    idle_components = (*model.encoder_names, *model.autoencoder_names) if config.offload_idle else ()
    for name, component in model.components.items():
        lacking = [weight for weight, parameter in component.named_parameters() if parameter.is_meta]
        if lacking and (component is not model.denoiser or init_device != "meta"):
            raise ConfigError(
                f"model.model_path {source}: the files of {name} lack {list_first(lacking)}, which its config.json "
                "asks for: the two are not of one model; copy both from the same place"
            )
        if name in idle_components:
            component.to(model.idle_device)
        elif component is not model.denoiser or init_device == "cuda":
            component.to(device)
    if source is not None:
        denoisers = model.split_denoiser(model.denoiser)
        for name, component in (model.components | denoisers).items():
            refuse_misread(component, source / name, is_whole=name in denoisers)
            refuse_not_finite(component, source / name)
    if config.lora is not None:
        from sfumato.models.lora import add_lora

        add_lora(model.denoiser, config.lora, model.lora_targets, seed)
    else:
        model.denoiser.requires_grad_(True)
    model.denoiser.train()
    return model


def read_description(path: str) -> JsonObject:
    """Reads the description of a pipeline; words of its tokenizer stay strings where YAML would make other types."""
    description = read_yaml(path)
    as_strings = read_yaml(path, as_written=True)
    tokens = description.get("tokenizer")
    if isinstance(tokens, dict) and isinstance(tokens.get("words"), list):
        tokens["words"] = as_strings["tokenizer"]["words"]
    return description


def _make_pipeline(config: ModelConfig, seed: int, on_meta: bool) -> tuple[type[DiffusionModel], DiffusionPipeline]:
    """Builds the pipeline of a description, or loads that of a folder, its denoiser on meta if ``on_meta``."""
    frozen_dtype = DTYPES[config.dtype]
    family = family_of(config)
    if config.config_path is not None:
        description = read_description(config.config_path)
        trained = (family.denoiser_name, *family.further_denoisers) if config.lora is None else ()
        try:
            pipeline = family.build(description, seed)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{config.config_path}: cannot build {family.pipeline_class}: {error}") from error
        if config.dtype != "fp32":
            for name, component in pipeline.components.items():
                if isinstance(component, torch.nn.Module) and name not in trained:
                    component.to(frozen_dtype)
        return family, pipeline
    folder = Path(str(config.model_path))
    pipeline_type = family.pipeline_type()
    denoiser_dtype = frozen_dtype if config.lora else torch.float32
    index = read_index(folder)
    components: dict[str, Any] = {name: None for name, value in index.items() if value == [None, None]}
    if not has_part(index, family.denoiser_name):
        raise ConfigError(f"model.model_path {folder}: it has no {family.denoiser_name}, by model_index.json")
    denoisers = [name for name in (family.denoiser_name, *family.further_denoisers) if has_part(index, name)]
    dtypes = {"default": frozen_dtype, **dict.fromkeys(denoisers, denoiser_dtype)}
    for name in denoisers if on_meta else ():
        components[name] = build_on_meta(partial(_from_config, component_class(*index[name]), folder / name)).to(
            denoiser_dtype
        )
    try:
        components |= _load_encoders(folder, index, family.encoder_names, frozen_dtype)
        pipeline = load_pretrained(pipeline_type, folder, use_safetensors=True, dtype=dtypes, **components)
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, SafetensorError) as error:
        message = " ".join(str(error).split()).partition(" If you want to instead overwrite")[0]
        reason = _describe_mismatch(folder, index) or f"diffusers cannot load it: {message}"
        raise ConfigError(f"model.model_path {folder}: {reason}") from error
    except ImportError as error:
        raise MissingDependencyError(
            f"model.model_path {folder}: {family.pipeline_class} needs a package that is not installed: {error}"
        ) from error
    return family, pipeline


def _load_encoders(
    folder: Path, index: JsonObject, names: Iterable[str], dtype: torch.dtype | None
) -> dict[str, torch.nn.Module]:
    """The encoders of a pipeline folder that are models of transformers, with exactly the weights of its files.

    transformers makes weights that the files lack at random, and diffusers hides its warning.

    Raises:
        ConfigError: when the files lack a weight; ``UNREAD`` may be missing.
    """
    import transformers

    encoders: dict[str, torch.nn.Module] = {}
    for name in names:
        cls = component_class(*index[name]) if has_part(index, name) else None
        if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
            continue
        encoders[name], report = load_pretrained(
            cls, folder / name, use_safetensors=True, dtype=dtype, output_loading_info=True
        )
        lacking = sorted(key for key in map(str, report["missing_keys"]) if not key.startswith(UNREAD))
        if lacking:
            rest = f" and {len(lacking) - 3} more" if len(lacking) > 3 else ""
            raise ConfigError(
                f"model.model_path {folder}: the files of {name} lack {', '.join(lacking[:3])}{rest}, which would be "
                "random: copy or download its folder again, or remove what another tool has put before the names of "
                "its weights"
            )
    return encoders


def _describe_mismatch(folder: Path, index: dict[str, object]) -> str:
    """Names a weight of a transformers component whose shape is not that of its configuration; empty for none."""
    import transformers

    for name, value in index.items():
        cls = component_class(*value) if names_part(value) and all(value) else None
        if not (isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)):
            continue
        settings = {"output_loading_info": True, "ignore_mismatched_sizes": True}
        try:
            _, report = load_pretrained(cls, folder / name, **settings)
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError):
            continue  # the error of diffusers is reported instead
        for weight, stored_shape, expected_shape in sorted(report.get("mismatched_keys") or ()):  # pyright: ignore[reportGeneralTypeIssues]
            return (
                f"{name}: {weight} is {list(stored_shape)} in the safetensors files, but "
                f"{list(expected_shape)} by config.json: the two are not of one model; copy both from the same place"
            )
    return ""


def _from_config(cls: type[ConfigMixin], folder: Path) -> torch.nn.Module:
    """A diffusers module with random weights, of the configuration in a folder."""
    return make_from_config(cls, cls.load_config(folder))
