"""LLaMA-Factory's ``dataset_info.json``: which files hold a data set, and what its columns and roles are called."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from sfumato.config.file_checks import read_json_object
from sfumato.errors import DataError

COLUMNS = {
    "prompt": "instruction",
    "query": "input",
    "response": "output",
    "messages": "conversations",
}
"""Columns of an entry that names none, by what they are called in ``columns``."""
OTHER_COLUMNS = ("history", "system", "tools", "images", "videos", "audios", "chosen", "rejected", "kto_tag")

TAGS = {
    "role_tag": "from",
    "content_tag": "value",
    "user_tag": "human",
    "assistant_tag": "gpt",
    "observation_tag": "observation",
    "function_tag": "function_call",
    "system_tag": "system",
}
ROLES = {
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "tool",
    "function_tag": "function_call",
    "system_tag": "system",
}

ELSEWHERE = ("hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name")
"""Keys of data sets that lie in no file beside the list."""
NOT_FOLLOWED = ("num_samples", "subset", "folder")
"""Keys that choose a part of a data set of a hub, which have no meaning for a file."""
KEYS = {"file_name", "file_sha1", "formatting", "ranking", "columns", "tags", "split", *ELSEWHERE, *NOT_FOLLOWED}


@dataclass(frozen=True)
class RowMapping:
    """What turns rows of a data set into rows whose columns and roles have the names that formats know."""

    name: str
    """Of the data set."""
    formatting: str
    """``alpaca``, or ``sharegpt`` (and ``openai``, which is read alike)."""
    columns: tuple[tuple[str, str], ...]
    """What a column is for, and its name."""
    tags: tuple[tuple[str, str], ...]
    """What a key or role of messages is for, and its name."""
    folder: str
    """Of the list; paths of media are relative to it."""

    @property
    def content(self) -> list[object]:
        """What a resumed run must find unchanged, as JSON can hold it."""
        return [self.formatting, list(self.columns), list(self.tags)]

    def __str__(self) -> str:
        columns = ", ".join(f"{use} in {name!r}" for use, name in self.columns)
        return f"data set {self.name} of {self.folder}/dataset_info.json: {self.formatting}, {columns}"

    def convert(self, row: Mapping[str, object]) -> dict[str, object]:
        """The row with the columns of Alpaca, or with ``messages``; columns that the entry does not name are left."""
        names = dict(self.columns)
        result = {
            other: row[names[other]] for other in OTHER_COLUMNS if other in names and row.get(names[other]) is not None
        }
        if self.formatting != "alpaca":
            for target, source in (("messages", "messages"), ("chosen", "chosen"), ("rejected", "rejected")):
                value = row.get(names.get(source, ""))
                if value is not None:
                    result[target] = self._with_roles(value)
            return result
        for target, source in (("instruction", "prompt"), ("input", "query"), ("output", "response")):
            value = row.get(names.get(source, ""))
            if value is not None:
                result[target] = value
        if "response" not in names and not {"chosen", "kto_tag"} & names.keys() and "instruction" in result:
            result["text"] = result.pop("instruction")  # texts of pretraining have a prompt alone
        return result

    def _with_roles(self, value: object) -> object:
        """A message, or a list of them, with ``role`` and ``content`` and the usual names of roles."""
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except ValueError:
                return value  # a text is an answer
        if isinstance(value, list | tuple):
            return [self._with_roles(message) for message in value]
        if not isinstance(value, dict):
            return value
        tags = dict(self.tags)
        roles = {tags[tag]: role for tag, role in ROLES.items() if tag in tags}
        message = {key: item for key, item in value.items() if key not in (tags["role_tag"], tags["content_tag"])}
        role = value.get(tags["role_tag"])
        message["role"] = roles.get(role, role) if isinstance(role, str) else role
        message["content"] = value.get(tags["content_tag"])
        return message


@dataclass(frozen=True)
class DatasetEntry:
    """A data set of a list."""

    path: Path
    """Its file, or the folder of its files."""
    mapping: RowMapping


def read_entry(path: Path, name: str, option: str) -> DatasetEntry:
    """An entry of a list of data sets.

    Args:
        path: the list.
        name: of the data set.
        option: the configuration field that names it, for messages.

    Raises:
        DataError: when there is no such entry, it is broken, or lies in no file.
    """
    try:
        entries = read_json_object(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{option}: {path} cannot be read: {error}") from error
    if name not in entries:
        near = difflib.get_close_matches(name, entries, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else "."
        shown = ", ".join(list(entries)[:30])
        raise DataError(f"{option}: {path} has no data set {name!r}{hint} Name one as {path}:NAME; it has {shown}")
    where = f"{option}: {path}, {name}"
    entry = entries[name]
    if not isinstance(entry, dict):
        raise DataError(f"{where}: must be a mapping with file_name, not {entry!r}")
    _check_entry(entry, where)
    mapping = _read_mapping(entry, name, str(path.parent), where)
    file = path.parent / str(entry["file_name"])
    if not file.exists():
        raise DataError(f"{where}: file_name {entry['file_name']} is not there: {file}")
    return DatasetEntry(file, mapping)


def _check_entry(entry: Mapping[str, object], where: str) -> None:
    """Raises DataError for what of an entry cannot be followed."""
    elsewhere = [key for key in ELSEWHERE if entry.get(key)]
    if elsewhere:
        raise DataError(
            f"{where}: {elsewhere[0]} {entry[elsewhere[0]]} is not downloaded: fetch it (hf download --repo-type "
            "dataset) and name its file or folder in file_name"
        )
    if not isinstance(entry.get("file_name"), str) or not entry["file_name"]:
        raise DataError(f"{where}: has no file_name")
    unknown = sorted(entry.keys() - KEYS)
    if unknown:
        raise DataError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(KEYS))}")
    for key in NOT_FOLLOWED:
        if entry.get(key) is not None:
            raise DataError(f"{where}: {key} has no meaning for a file: remove it, and name the file or folder itself")
    if entry.get("split", "train") != "train":
        raise DataError(f"{where}: split {entry['split']!r}: name the files of that split in file_name")
    if entry.get("formatting", "alpaca") not in ("alpaca", "sharegpt", "openai"):
        raise DataError(f"{where}: formatting must be alpaca, sharegpt or openai, not {entry['formatting']!r}")


def _read_mapping(entry: Mapping[str, object], name: str, folder: str, where: str) -> RowMapping:
    tables: dict[str, dict[str, str]] = {}
    for key, valid_keys in (("columns", {*COLUMNS, *OTHER_COLUMNS}), ("tags", {*TAGS})):
        value = entry.get(key) or {}
        if not isinstance(value, dict) or not all(isinstance(item, str | None) for item in value.values()):
            raise DataError(f"{where}: {key} must be a mapping of texts, not {value!r}")
        unknown = sorted(value.keys() - valid_keys)
        if unknown:
            raise DataError(f"{where}: unknown key {unknown[0]!r} of {key}; known are {', '.join(sorted(valid_keys))}")
        tables[key] = {item_key: item for item_key, item in value.items() if item}
    # As LLaMA-Factory: an entry with columns or tags states all of them, the defaults count where it has none.
    columns = tables["columns"] or dict(COLUMNS)
    openai = {"role_tag": "role", "content_tag": "content", "user_tag": "user", "assistant_tag": "assistant"}
    formatting = str(entry.get("formatting", "alpaca"))
    tags = tables["tags"] or ({**TAGS, **openai, "observation_tag": "tool"} if formatting == "openai" else TAGS)
    tags = {"role_tag": TAGS["role_tag"], "content_tag": TAGS["content_tag"], **tags}
    ranking = entry.get("ranking", False)
    if ranking and not {"chosen", "rejected"} <= columns.keys():
        raise DataError(f"{where}: ranking needs chosen and rejected in columns")
    if not ranking:
        columns = {key: value for key, value in columns.items() if key not in ("chosen", "rejected")}
    return RowMapping(name, formatting, tuple(columns.items()), tuple(tags.items()), folder)
