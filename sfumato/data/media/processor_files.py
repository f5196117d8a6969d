"""The files of a transformers folder that say how images, videos and audio become tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from sfumato.config.file_checks import read_json_object

PROCESSOR_FILES = (
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
    "chat_template.json",
    "chat_template.jinja",
)
"""Names of the files that transformers may load a processor from."""


def save_processor(processor: Any, media: Sequence[str], folder: Path, source: Path | None) -> None:
    """Writes what transformers loads a processor from.

    Args:
        processor: transformers' processor of a model that sees or hears.
        media: what it is used for: image, and video or audio or both, or audio alone.
        folder: where to.
        source: the folder that the model came from, whose files stay as they are; None: it was described.
    """
    if "image" in media:
        processor.image_processor.save_pretrained(folder)
        if settings := _image_settings_within(source):
            # without the limits of the run, which the folder's other file does not have either
            _write_json(folder / PROCESSOR_FILES[0], settings)
    if source is None:
        _write_json(
            folder / "processor_config.json",
            {"processor_class": type(processor).__name__, **_processor_settings(processor)},
        )
    if "audio" in media:
        file = folder / PROCESSOR_FILES[0]  # one file for images and for audio: each would replace the other's
        image = read_json_object(file) if "image" in media else {}
        processor.feature_extractor.save_pretrained(folder)
        _write_json(file, read_json_object(file) | image)
    if "video" in media:
        _write_json(folder / "video_preprocessor_config.json", processor.video_processor.to_dict())
    for path in [] if source is None else sorted(source.glob("*.json")) + sorted(source.glob("*.jinja")):
        if path.name in PROCESSOR_FILES:
            shutil.copyfile(path, folder / path.name)


def _image_settings_within(source: Path | None) -> dict[str, object]:
    """The settings of images that a folder keeps in its processor_config.json, as transformers 5 writes them."""
    file = None if source is None else source / "processor_config.json"
    settings = read_json_object(file).get("image_processor") if file is not None and file.is_file() else None
    return settings if isinstance(settings, dict) else {}


def _processor_settings(processor: object) -> dict[str, object]:
    """The scalar arguments that a processor was constructed with; its parts have files of their own."""
    names = [name for name in signature(type(processor)).parameters if name != "chat_template"]  # the tokenizer's files
    named = {name: getattr(processor, name, None) for name in names}
    return {name: value for name, value in named.items() if isinstance(value, (int, float, str, bool))}


def _write_json(path: Path, settings: dict[str, object]) -> None:
    path.write_text(f"{json.dumps(settings, indent=2)}\n", encoding="utf-8")
