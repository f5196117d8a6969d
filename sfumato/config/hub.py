"""Fetches a model from the hub, where ``model.download`` asks for it: files of weights and settings alone, no code."""

from __future__ import annotations

import re
from pathlib import Path

from sfumato.config.paths import HUB_NAME
from sfumato.config.trust import trusts_code

ENDINGS = (".json", ".safetensors", ".txt", ".model", ".jinja", ".tiktoken")
"""Of files that are fetched; pickles and Python code are not."""

VARIANT = re.compile(r"\.(fp16|bf16|fp32|non_ema)[.-]")
"""In names of weights that a pipeline has a second time, in another precision."""

TEMPLATES = "additional_chat_templates/"


def download_model(fields: object) -> object:
    """The fields of a model section after the model has been fetched, if ``download`` asks for it.

    Where ``model_path`` is a name on the hub it becomes the path of the snapshot. Files in the local hub cache are not
    fetched again, and a command that does not trust the configuration fetches nothing.

    Raises:
        ValueError: when the hub does not give the files.
    """
    if not isinstance(fields, dict) or fields.get("download") is not True or not trusts_code():
        return fields
    name = str(fields.get("model_path"))
    if HUB_NAME.fullmatch(name) is None or Path(name).exists():
        return fields
    return fields | {"model_path": _fetch(name)}


def _fetch(name: str) -> str:
    """The folder of a snapshot. Raises ValueError."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        files = wanted_files(HfApi().list_repo_files(name))
        if not any(file.endswith(".safetensors") for file in files):
            raise ValueError(f"model.download: {name} has no safetensors files on the hub, which alone are read")
        return str(snapshot_download(name, allow_patterns=files))
    except (HfHubHTTPError, HFValidationError, OfflineModeIsEnabled, OSError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"model.download: the hub does not give {name}: {reason}") from error


def wanted_files(files: list[str]) -> list[str]:
    """The files of a repository that are read here.

    Of a pipeline these are the files in the folders of its parts, of another model those beside its config.json and
    its chat templates.
    """
    readable = [file for file in files if file.endswith(ENDINGS)]
    # some repositories hold the weights several times: in other precisions, or in one file beside the parts
    if "model_index.json" in readable:
        return [file for file in readable if file.count("/") == 1 and not VARIANT.search(file)] + ["model_index.json"]
    top = [file for file in readable if "/" not in file and not file.startswith("consolidated")]
    return top + [file for file in readable if file.startswith(TEMPLATES)]
