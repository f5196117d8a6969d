"""Other forms of an exported folder: another dtype, kohya's names of adapters, a GGUF file by llama.cpp."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from sfumato.config.file_checks import read_json_object
from sfumato.config.open_mappings import JsonObject
from sfumato.config.paths import ADAPTER_FILES
from sfumato.errors import ConfigError, MissingDependencyError
from sfumato.models.diffusion.kohya import KOHYA_FILE, from_kohya, to_kohya
from sfumato.models.diffusion.single_file import NAMES, SUPPORTED, to_single_file
from sfumato.tracking.folder import write_json

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
GGUF_TYPES = {"fp32": "f32", "bf16": "bf16", "fp16": "f16"}
LORA_FILE = "pytorch_lora_weights.safetensors"
CONVERTER = "convert_hf_to_gguf.py"
INSTALL_LLAMA_CPP = (
    "git clone https://github.com/ggml-org/llama.cpp && pip install gguf sentencepiece protobuf, then set LLAMA_CPP to "
    "the folder"
)


def change_dtype(folder: Path, name: str) -> int:
    """Casts the floating-point weights of an exported folder, file by file.

    Args:
        folder: of the export; its files are replaced.
        name: one of ``DTYPES``.

    Returns:
        How many files hold weights.

    Raises:
        ConfigError: a weight is too large for the dtype; the file that holds it is as it was.
    """
    dtype = DTYPES[name]
    files = sorted(folder.rglob("*.safetensors"))
    for path in files:
        with safe_open(path, "pt") as opened:
            metadata = opened.metadata() or {"format": "pt"}
        weights = load_file(path)
        for key, weight in weights.items():
            if not weight.is_floating_point():
                continue
            cast = weight.to(dtype)
            if not torch.isfinite(cast).all():
                raise ConfigError(f"{path}: {key} has values that {name} does not hold: take --dtype bf16")
            weights[key] = cast
        temporary = path.with_suffix(".tmp")
        save_file(weights, temporary, metadata)
        temporary.replace(path)
    for path in folder.rglob("*.safetensors.index.json"):
        index = read_json_object(path)
        own_files = {path.parent / file for file in index.get("weight_map", {}).values()}
        size = sum(_weight_bytes(file) for file in own_files)
        write_json(path, {**index, "metadata": {**index.get("metadata", {}), "total_size": size}})
    for path in folder.rglob("config.json"):
        config = read_json_object(path)
        for key in ("dtype", "torch_dtype"):
            if key in config:
                write_json(path, {**config, key: str(dtype).removeprefix("torch.")})
                config = read_json_object(path)
    return len(files)


def read_kohya_class(source: Path) -> str:
    """The pipeline's class in a model's folder. Raises ConfigError when its adapters have no names of kohya's."""
    pipeline_class = str(_read_index(source, "--lora kohya").get("_class_name"))
    to_kohya({}, pipeline_class)
    return pipeline_class


def _read_index(source: Path, option: str) -> JsonObject:
    """The parts of a pipeline's folder. Raises ConfigError, which names the option, where there is no pipeline."""
    index = source / "model_index.json"
    if not index.is_file():
        raise ConfigError(f"{option}: {source} has no model_index.json, so that it is no picture or video model")
    return read_json_object(index)


def write_kohya(folder: Path, pipeline_class: str) -> list[Path]:
    """Writes the adapter of an exported folder once more, with kohya's names, one file for each transformer.

    Args:
        folder: the export.
        pipeline_class: of the model that the adapter belongs to.

    Raises:
        ConfigError: the folder holds no adapter of a diffusion model, or a layer has no such name.
    """
    adapters = sorted(folder.rglob(LORA_FILE))
    if not adapters:
        raise ConfigError(
            f"--lora kohya: {folder} holds no {LORA_FILE}: the run trained no adapters of a picture model"
        )
    files = []
    for path in adapters:
        stored = to_kohya(load_file(path), pipeline_class)
        files.append(path.with_name(KOHYA_FILE))
        save_file(stored, files[-1], metadata={"format": "pt"})
    return files


def refuse_adapters(exported: Path, merge: bool = False) -> None:
    """Raises ConfigError when an export holds adapters alone, and they are not merged."""
    if not merge and any((exported / name).is_file() for name in ADAPTER_FILES):
        raise ConfigError("--comfyui takes a whole model: add --merge, or write its adapters by --lora kohya")


def read_transformer_classes(source: Path) -> dict[str, str]:
    """The transformers of a pipeline's folder, by their names in it.

    Raises:
        ConfigError: there is none, or one of a class that is not written as one file.
    """
    parts = _read_index(source, "--comfyui")
    classes = {name: str(parts[name][1]) for name in ("transformer", "transformer_2") if parts.get(name, [None])[0]}
    if not classes:
        raise ConfigError(f"--comfyui: {parts.get('_class_name')} has no transformer: one file holds {SUPPORTED}")
    for name, class_name in classes.items():
        if class_name not in NAMES:
            raise ConfigError(f"--comfyui: the {name} is a {class_name}: one file holds {SUPPORTED}")
    return classes


def write_single_files(folder: Path) -> list[Path]:
    """Writes each transformer of an exported pipeline as one file with the published names; returns the files.

    Raises:
        ConfigError: the folder holds adapters alone, or a model that has no such form.
    """
    refuse_adapters(folder)
    files = []
    for name, class_name in read_transformer_classes(folder).items():
        weights: dict[str, torch.Tensor] = {}
        for path in sorted((folder / name).glob("*.safetensors")):
            weights |= load_file(path)
        files.append(folder / f"comfyui_{name}.safetensors")
        written = to_single_file(weights, class_name)
        # safetensors takes no two names for one memory, and no views
        save_file({key: weight.contiguous() for key, weight in written.items()}, files[-1], {"format": "pt"})
    return files


def import_lora(file: Path, out: Path) -> Path:
    """Writes adapters with kohya's names as diffusers' file into a new folder; returns the file."""
    try:
        stored = load_file(file)
    except Exception as error:  # safetensors raises an error of its own that derives from Exception alone
        raise ConfigError(f"{file} is no file of safetensors: {error}") from error
    layers = from_kohya(stored)
    out.mkdir(parents=True, exist_ok=True)
    # A file takes no tensor twice, and FLUX.1's queries, keys and values share their down matrix.
    copies = {name: weight.clone(memory_format=torch.contiguous_format) for name, weight in layers.items()}
    save_file(copies, out / LORA_FILE, {"format": "pt"})
    return out / LORA_FILE


def write_gguf(folder: Path, dtype: str, llama_cpp: str | None = None) -> Path:
    """Has llama.cpp's converter write an exported language model as one file; returns the file.

    Args:
        folder: the export, a whole model.
        dtype: one of ``DTYPES``.
        llama_cpp: folder of llama.cpp; None takes LLAMA_CPP of the environment, or the converter on the PATH.

    Raises:
        MissingDependencyError: the converter is not there.
        ConfigError: the folder is no whole language model, or the converter failed, with its last lines.
    """
    if any((folder / name).is_file() for name in ADAPTER_FILES):
        raise ConfigError("--gguf takes a whole model: add --merge")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"--gguf: {folder} is no language model of transformers")
    converter = find_converter(llama_cpp)
    file = folder / f"model-{dtype}.gguf"
    command = [sys.executable, str(converter), str(folder), "--outfile", str(file), "--outtype", GGUF_TYPES[dtype]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not file.is_file():
        last_lines = "\n".join((done.stderr or done.stdout).splitlines()[-5:])
        raise ConfigError(f"{converter} ended with {done.returncode}:\n{last_lines}")
    return file


def find_converter(llama_cpp: str | None = None) -> Path:
    """llama.cpp's converter. Raises MissingDependencyError with the lines that install it."""
    folder = llama_cpp or os.environ.get("LLAMA_CPP")
    if folder:
        path = Path(folder).expanduser() / CONVERTER
        if not path.is_file():
            raise MissingDependencyError(f"LLAMA_CPP {folder} holds no {CONVERTER}: {INSTALL_LLAMA_CPP}")
        return path
    on_path = shutil.which(CONVERTER)
    if on_path is None:
        raise MissingDependencyError(f"--gguf needs llama.cpp's {CONVERTER}: {INSTALL_LLAMA_CPP}")
    return Path(on_path)


def _weight_bytes(path: Path) -> int:
    with safe_open(path, "pt") as opened:
        names = opened.keys()
        return sum(opened.get_tensor(name).nbytes for name in names)
