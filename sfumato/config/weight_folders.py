"""Folders of weights from elsewhere: what is read of them is safetensors, which holds numbers and runs nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sfumato.config.files import file_problem
from sfumato.errors import ConfigError

OTHER_WEIGHTS = ("*.bin.index.json", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.msgpack", "*.h5")
"""Names of weights that are pickles, which may run a program, or that nothing here reads."""


def check_pipeline(folder: Path, index: dict[str, Any]) -> None:
    """Looks at every part of a diffusers pipeline before any is loaded.

    Args:
        folder: with ``model_index.json``.
        index: what that file holds.

    Raises:
        ConfigError: when a part brings Python code, or weights other than safetensors.
    """
    for name, value in index.items():
        if not isinstance(value, list) or not value or not isinstance(value[0], str):
            continue
        if not (folder / name).resolve().is_relative_to(folder.resolve()):
            raise ConfigError(f"model.model_path {folder}: model_index.json names {name!r}, which lies outside of it")
        code = folder / name / f"{value[0]}.py"
        if code.exists():
            raise ConfigError(
                f"model.model_path {folder}: {code} is Python code that the pipeline would run: remove it, and name a "
                "class of diffusers or transformers in model_index.json"
            )
        check_weights(folder / name)


def check_weights(folder: Path, option: str = "model.model_path") -> None:
    """Looks at the weights in one model's folder; one that holds none passes.

    Args:
        folder: of the model.
        option: the configuration field that led to it, for messages.

    Raises:
        ConfigError: when they are not safetensors files that lie in the folder.
    """
    if not folder.is_dir():
        return
    for path in sorted(folder.glob("*.safetensors")):
        if problem := file_problem(path):
            raise ConfigError(f"{option}: {path} {problem}")
    for index in sorted(folder.glob("*.safetensors.index.json")):
        _check_index(index, option)
    others = [path for pattern in OTHER_WEIGHTS for path in sorted(folder.glob(pattern))]
    if others and not any(folder.glob("*.safetensors")):
        stem = others[0].name.split(".")[0]
        target = folder / f"{'model' if stem == 'pytorch_model' else stem}.safetensors"
        raise ConfigError(
            f"{option}: {others[0]} is not read, since it may run a program; only safetensors files are: take those of "
            f"the model, or make them: python -m sfumato.rewards.convert weights {others[0]} {target}"
        )


def _check_index(index: Path, option: str) -> None:
    """Whether the files of an index lie beside it."""
    if problem := file_problem(index, 2**28):
        raise ConfigError(f"{option}: {index} {problem}")
    try:
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        wrong = sorted(str(each) for each in names if Path(each).name != each or not each.endswith(".safetensors"))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{option}: {index} is not an index of weights: {error!r}; fetch it again") from error
    if wrong:
        raise ConfigError(f"{option}: {index} names {wrong[0]!r}, which is no safetensors file beside it")
