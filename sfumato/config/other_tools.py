"""What options of other tools are called here, for the message about an unknown key."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from pydantic import BaseModel

from sfumato.config.base import Variant, find_variants, inner_section

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

TABLE = Path(__file__).parent / "other_tools.yaml"
MOST_SHOWN = 6
"""Options of one unknown section that a message explains."""


@functools.cache
def read_table() -> dict[str, dict[str, tuple[tuple[str, ...], str]]]:
    """By tool and option: the dotted names of ours, of which a task has one, and what differs (empty: nothing)."""
    table: dict[str, dict[str, tuple[tuple[str, ...], str]]] = {}
    for tool, options in yaml.safe_load(TABLE.read_text(encoding="utf-8")).items():
        table[tool] = {}
        for option, value in options.items():
            names, note = (value, "") if isinstance(value, str) else (value[0] or "", value[1])
            table[tool][option] = (tuple(name.strip() for name in names.split("|") if name.strip()), note)
    return table


def explain_option(place: str, value: object, schema: type[BaseModel]) -> str:
    """The end of a message about an unknown key; empty where no other tool has such an option.

    Args:
        place: of the key, dotted.
        value: below the key; of a mapping, or a list of them, each option in it is looked up.
        schema: of the task.
    """
    explained = []
    for path, leaf in _iterate_leaves(place, value):
        explained += [text for text in [_explain_one(path, leaf, schema)] if text]
    more = [f"and {len(explained) - MOST_SHOWN} more"] if len(explained) > MOST_SHOWN else []
    shown = "; ".join([*explained[:MOST_SHOWN], *more])
    return f"; {shown}" if shown else ""


def _iterate_leaves(place: str, value: object) -> list[tuple[str, object]]:
    if isinstance(value, Mapping) and value:
        return [leaf for key, item in value.items() for leaf in _iterate_leaves(f"{place}.{key}", item)]
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):  # ai-toolkit's jobs and data
        return [leaf for item in value for leaf in _iterate_leaves(place, item)]
    return [(place, value)]


def _explain_one(path: str, value: object, schema: type[BaseModel]) -> str:
    """Whose option it is and what it is called here; the same text of several tools is said once."""
    words = path.lstrip("-+").replace("-", "_").split(".")
    # The longest end of the path that a tool has: options of TRL stand at the top, here they may stand in train. An
    # option with more of the path is meant, where tools have several.
    for start in range(len(words)):
        name = ".".join(words[start:])
        tools_by_text: dict[str, list[str]] = {}
        for tool, options in read_table().items():
            if name in options and (text := _describe_target(*options[name], value, schema)):
                tools_by_text.setdefault(text, []).append(f"{tool}'s")
        if tools_by_text:
            return "; ".join(f"{' and '.join(tools)} {words[-1]} {text}" for text, tools in tools_by_text.items())
    return ""


def _describe_target(names: tuple[str, ...], note: str, value: object, schema: type[BaseModel]) -> str:
    """What an option is here, such as ``is --train.lr 1e-06 here``."""
    name = next((name for name in names if has_field(schema, name)), "")
    if not name:
        return f"is not offered here: {note}" if not names else ""
    if note:
        return f"is {name} here: {note}"
    is_plain = isinstance(value, int | float | str) and not isinstance(value, bool)
    return f"is --{name} {value} here" if is_plain else f"is {name} here"


def has_field(schema: type[BaseModel], name: str) -> bool:
    """Whether a configuration has a field of this dotted name; below a part, whether a class of it has one."""
    section: type[BaseModel] | None = schema
    variant: Variant | None = None
    for word in name.split("."):
        if variant is not None:
            return any(
                word in getattr(cls, "__dataclass_fields__", {}) for cls in find_variants(variant.source).values()
            )
        field: FieldInfo | None = None if section is None else section.model_fields.get(word)
        if field is None:
            return False
        variant = next((note for note in field.metadata if isinstance(note, Variant)), None)
        section = inner_section(field.annotation)
    return True
