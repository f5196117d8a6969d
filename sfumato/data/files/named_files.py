"""Digests of files and folders that a configuration names besides its data: models, rewards, templates.

Only files that a task reads count: weights, configurations and source files.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel

NAMES = {"path", "teacher", "projector", "image_tokenizer", "chat_template"}
"""Fields that name a file or folder, besides those whose names end in ``_path``."""

SKIPPED = ("data.train_path", "data.eval_path", "train.", "model.tokenizer_path")
"""Beginnings of fields whose files are compared elsewhere or do not matter: data, tokens, the run's own folder."""

READ = {".safetensors", ".json", ".model", ".txt", ".jinja", ".py", ".yaml"}
"""Endings of the files of a model's folder that count."""

UNREAD = {"generation_config.json", "README.md"}
"""Files with such endings that do not change what a model computes."""

DENOISERS = {"transformer", "transformer_2", "unet"}
"""Folders of a diffusers pipeline whose weights are trained."""

WITH_REFERENCE = ("algorithm", "dpo", "kto")
"""Sections of tasks whose reference is the model that the run began with: they read its weights at every start."""

BEGINNING = "model.model_path (weights that the run began with)"
"""The field of weights that are trained: a resumed run takes them from the checkpoint."""

DESCRIBED = "model.model_path (its config.json)"
"""The field of a language model's description: with other rotary positions equal weights are another model."""

SOURCE = "(its source)"
"""The end of the field of a function in the user's own code, whose file may change."""


def content_of_named_files(
    config: BaseModel, content_of_file: Callable[[Path], str], within: str = ""
) -> dict[str, str]:
    """Digests of the named files and folders, by the field that names them.

    Args:
        config: of a task.
        content_of_file: computes the digest of a file.
        within: the beginning of the fields that count, such as ``model.``; of all, where it is empty.
    """
    output_dir = os.path.realpath(getattr(config.train, "output_dir", ""))  # type: ignore[attr-defined]
    content: dict[str, str] = {}
    for name, value in _iterate_named(config, ""):
        path = Path(value.rpartition(":")[0] if name.endswith(".path") else value)
        if not name.startswith(within) or name.startswith(SKIPPED) or not value:
            continue
        if os.path.realpath(path).startswith(f"{output_dir}{os.sep}"):
            continue  # a file in the run's own folder, such as an export, changes while the run goes on
        if path.is_file():
            content[f"{name} {SOURCE}" if name.endswith(".path") else name] = content_of_file(path)
        elif path.is_dir():
            files = [file for file in sorted(path.rglob("*")) if file.suffix in READ and file.name not in UNREAD]
            trained = [file for file in files if name == "model.model_path" and _is_trained(file, path, config)]
            fixed = [file for file in files if file not in trained]
            is_language_model = name == "model.model_path" and not (path / "model_index.json").is_file()
            described = [file for file in fixed if is_language_model and file == path / "config.json"]
            if is_language_model:  # the tokeniser's files are compared by the field of tokens
                fixed = [file for file in fixed if file.suffix == ".safetensors"]
            for field, listed in ((name, fixed), (DESCRIBED, described), (BEGINNING, trained)):
                if listed:
                    content[field] = _digest_files(listed, path, content_of_file)
    return content


def _is_trained(file: Path, folder: Path, config: BaseModel) -> bool:
    """Whether a file of the model's folder holds weights that a resumed run takes from the checkpoint alone.

    This is not so with adapters, which are added to the original weights, and with a reference model.
    """
    has_adapter = getattr(getattr(config, "model", None), "lora", None) is not None
    if has_adapter or any(hasattr(config, name) for name in WITH_REFERENCE):
        return False
    is_pipeline = (folder / "model_index.json").is_file()
    return file.suffix == ".safetensors" and (not is_pipeline or file.parent.name in DENOISERS)


def _iterate_named(value: object, name: str) -> Iterator[tuple[str, str]]:
    """Dotted names of the fields that name files, with their values."""
    if isinstance(value, BaseModel):
        parts: Mapping[str, object] = {field: getattr(value, field) for field in type(value).model_fields}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    elif isinstance(value, Mapping):
        parts = value
    elif isinstance(value, list | tuple):
        parts = dict(enumerate(value))  # type: ignore[arg-type]
    else:
        last = name.rpartition(".")[2]
        if isinstance(value, str) and (last.endswith("_path") or last in NAMES):
            yield name, value
        return
    for key, part in parts.items():
        yield from _iterate_named(part, f"{name}.{key}" if name else str(key))


def _digest_files(files: list[Path], folder: Path, content_of_file: Callable[[Path], str]) -> str:
    """The digest of several files of a folder, by their names and contents."""
    digest = hashlib.blake2b(digest_size=20)
    for file in files:
        digest.update(f"{file.relative_to(folder)} {content_of_file(file)}\n".encode())
    return digest.hexdigest()
