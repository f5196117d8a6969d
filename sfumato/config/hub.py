"""Models by their names on the hub: fetched where ``model.download`` asks for it (weights and settings alone, no code),
and for a run that goes on the revision that it began with."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from sfumato.config.paths import HUB_NAME, find_model_folder
from sfumato.config.trust import trusts_code
from sfumato.errors import ConfigError

ENDINGS = (".json", ".safetensors", ".txt", ".model", ".jinja", ".tiktoken")
"""Of files that are fetched; pickles and Python code are not."""

VARIANT = re.compile(r"\.(fp16|bf16|fp32|non_ema)[.-]")
"""In names of weights that a pipeline has a second time, in another precision."""

TEMPLATES = "additional_chat_templates/"

SNAPSHOT = re.compile(r"models--(?P<owner>[\w.-]+?)--(?P<name>[\w.-]+)/snapshots/(?P<revision>[0-9a-f]{40})")
"""A model's folder in the local hub cache."""


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


def pin_revisions(fields: object, recorded: object, place: str = "") -> object:
    """A configuration in which names on the hub are the snapshots that an earlier one resolved them to.

    Args:
        fields: nested mappings and lists, as they were written.
        recorded: the resolved configuration of the run that is gone on with.
        place: the dotted name of both.

    Returns:
        The fields; a name that the earlier run did not have there stays as it is.

    Raises:
        ConfigError: when the local hub cache holds that revision no longer.
    """
    if isinstance(fields, Mapping) and isinstance(recorded, Mapping):
        may_download = fields.get("download") is True
        pinned = {}
        for name, value in fields.items():
            inner = f"{place}.{name}" if place else str(name)
            pinned[name] = pin_revisions(value, recorded.get(name), inner)
            if isinstance(value, str) and (snapshot := _snapshot_of(value, recorded.get(name))):
                pinned[name] = _find_revision(value, snapshot, inner, may_download)
        return pinned
    if isinstance(fields, list) and isinstance(recorded, list):
        both = zip(fields, recorded, strict=False)
        pairs = [pin_revisions(value, before, f"{place}.{index}") for index, (value, before) in enumerate(both)]
        return pairs + fields[len(pairs) :]
    return fields


def has_hub_names(fields: object) -> bool:
    """Whether a text among nested mappings and lists could be a name on the hub."""
    if isinstance(fields, Mapping):
        return any(has_hub_names(value) for value in fields.values())
    if isinstance(fields, list):
        return any(has_hub_names(value) for value in fields)
    return isinstance(fields, str) and HUB_NAME.fullmatch(fields) is not None


def describe_moved_names(values: Mapping[str, object]) -> list[str]:
    """A line for each model of which the local hub cache has a newer revision than the one that is taken.

    Args:
        values: of a resolved configuration, by dotted name.
    """
    lines = []
    for place, value in values.items():
        match = SNAPSHOT.search(value) if isinstance(value, str) else None
        if match is None:
            continue
        name = f"{match['owner']}/{match['name']}"
        newest = SNAPSHOT.search(find_model_folder(name))
        if newest is not None and newest["revision"] != match["revision"]:
            lines.append(
                f"{place}: {name} at revision {match['revision'][:12]}, with which the run began; the local hub cache "
                f"has {newest['revision'][:12]} by now, which a new run takes"
            )
    return lines


def _snapshot_of(name: str, recorded: object) -> re.Match[str] | None:
    """The snapshot of a name on the hub that an earlier configuration recorded in its place."""
    match = SNAPSHOT.search(recorded) if isinstance(recorded, str) else None
    is_same = match is not None and name == f"{match['owner']}/{match['name']}"
    return match if is_same and not Path(name).exists() else None


def _find_revision(name: str, recorded: re.Match[str], place: str, may_download: bool) -> str:
    """The folder of a revision, in the cache of this machine. Raises ConfigError."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    revision = recorded["revision"]
    try:
        return str(snapshot_download(name, revision=revision, local_files_only=True))
    except (LocalEntryNotFoundError, OSError):
        if Path(recorded.string).is_dir():
            return recorded.string
    if may_download and trusts_code():
        try:
            return _fetch(name, revision)
        except ValueError as error:
            raise ConfigError(f"{place}: {error}") from error
    raise ConfigError(
        f"{place}: the run began with revision {revision} of {name}, which the local hub cache does not hold: "
        f"hf download {name} --revision {revision}"
    )


def _fetch(name: str, revision: str | None = None) -> str:
    """The folder of a snapshot. Raises ValueError."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled

    try:
        files = wanted_files(HfApi().list_repo_files(name, revision=revision))
        if not any(file.endswith(".safetensors") for file in files):
            raise ValueError(f"model.download: {name} has no safetensors files on the hub, which alone are read")
        return str(snapshot_download(name, revision=revision, allow_patterns=files))
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
