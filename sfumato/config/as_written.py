"""Text fields hold what a person wrote, where YAML reads it as a boolean, a number, a date or nothing."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticCustomError

from sfumato.config.base import Variant


def with_written_texts(value: object, written: object, annotation: object) -> object:
    """A configuration in which text fields hold the text of the file, such as ``no``, and not YAML's reading of it.

    A field that may also be of the type that YAML has read keeps that value.

    Args:
        value: the configuration as YAML reads it.
        written: the same mappings and lists with the text of each scalar.
        annotation: the type of the value: of a section, of a field or of an item.
    """
    kinds = list(_kinds_of(annotation))
    if isinstance(value, dict) and isinstance(written, dict):
        fields, rest = _fields_of(value, kinds)
        return {key: with_written_texts(item, written.get(key), fields.get(key, rest)) for key, item in value.items()}
    # both were read from one text, so mappings and lists have the same keys and lengths
    if isinstance(value, list) and isinstance(written, list):
        item_types = _items_of(kinds, len(value))
        return [with_written_texts(*item_args) for item_args in zip(value, written, item_types, strict=True)]
    if not isinstance(written, str) or isinstance(value, str) or any(_is_of(value, kind) for kind in kinds):
        return value
    is_said = bool(written) or value is not None  # a key with nothing behind it says nothing
    return written if is_said and any(map(_is_text, kinds)) else value


def _kinds_of(annotation: object) -> Iterator[object]:
    """The members of a union, each without its ``Annotated``; one with a ``Variant`` gives the Variant itself."""
    origin = typing.get_origin(annotation)
    parts = typing.get_args(annotation)
    if origin is typing.Annotated:
        variant = next((note for note in parts[1:] if isinstance(note, Variant)), None)
        yield from [variant] if variant is not None else _kinds_of(parts[0])
    elif origin in (typing.Union, types.UnionType):
        for part in parts:
            yield from _kinds_of(part)
    else:
        yield annotation


def _fields_of(value: Mapping[str, object], kinds: Sequence[object]) -> tuple[Mapping[str, object], object]:
    """Types of a mapping's values by key, and the type of the values under all other keys."""
    for kind in kinds:
        if isinstance(kind, Variant):
            try:
                return _field_types(kind.resolve(str(value.get("type")))), Any
            except PydanticCustomError:
                continue  # validation names the unknown type
        if isinstance(kind, type) and (issubclass(kind, BaseModel) or dataclasses.is_dataclass(kind)):
            return _field_types(kind), Any
        if typing.get_origin(kind) is dict:
            return {}, typing.get_args(kind)[1]
    return {}, Any


def _items_of(kinds: Sequence[object], count: int) -> list[object]:
    """Types of the items of a list of ``count`` items."""
    for kind in kinds:
        parts = typing.get_args(kind)
        if typing.get_origin(kind) is tuple and Ellipsis not in parts and len(parts) == count:
            return list(parts)
        if isinstance(kind, Variant) or (parts and typing.get_origin(kind) is not dict):
            return [kind if isinstance(kind, Variant) else parts[0]] * count
    return [Any] * count


@functools.cache
def _field_types(cls: type) -> dict[str, object]:
    try:
        return typing.get_type_hints(cls, include_extras=True)
    except NameError:  # a class of one's own whose types are only there for a checker
        return {}


def _is_text(kind: object) -> bool:
    return kind is str or (
        typing.get_origin(kind) is typing.Literal and any(isinstance(choice, str) for choice in typing.get_args(kind))
    )


def _is_of(value: object, kind: object) -> bool:
    """Whether a value that YAML has read is of that type."""
    if kind is Any:
        return True
    if typing.get_origin(kind) is typing.Literal:
        return any(value == choice and type(value) is type(choice) for choice in typing.get_args(kind))
    if kind is float:
        return isinstance(value, float | int) and not isinstance(value, bool)
    return type(value) is (type(None) if kind is None else kind)
