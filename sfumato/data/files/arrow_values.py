"""Rows of Arrow tables as Python values: what `datasets` gives for them, JSON columns parsed."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

from sfumato.data.files.bad_rows import parse_json
from sfumato.errors import DataError


class StructValue(dict[str, Any]):
    """A mapping from a struct column, in which each row has the keys of all rows: a key that a row has not is None."""


def arrow_row(table: Any, where: str) -> dict[str, Any]:
    """The only row of a table or batch, whose offsets are checked first: wrong ones would end the process.

    Mappings of struct columns are ``StructValue``. What a column of the type ``Json`` of datasets (Arrow's
    ``arrow.json``) holds, at whatever depth, is parsed.

    Raises DataError that names ``where``.
    """
    return arrow_rows(table, where)[0]


def arrow_rows(table: Any, where: str) -> list[dict[str, Any]]:
    """All rows of a table or batch, as ``arrow_row`` has one. Raises DataError where any of them cannot be read."""
    import pyarrow

    try:
        table.validate(full=True)
        rows = table.to_pylist()
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise DataError(f"{where}: {error}") from error
    converters = _converters(table.schema)
    for row in rows:
        for key, convert in converters.items():
            row[key] = convert(row[key], where)
    return rows


Convert = Callable[[Any, str], Any]


@lru_cache(maxsize=64)
def _converters(schema: Any) -> dict[str, Convert]:
    """How the values of each column are converted; columns that stay as they are have no entry."""
    features = _json_features(schema)
    converters = {field.name: _converter(field.type, features.get(field.name)) for field in schema}
    return {name: convert for name, convert in converters.items() if convert is not None}


def _json_features(schema: Any) -> dict[str, Any]:
    """Features that datasets has written down, where one is ``Json``: older files hold it as a column of texts."""
    if b'"Json"' not in (schema.metadata or {}).get(b"huggingface", b""):
        return {}
    from datasets import Features

    return dict(Features.from_arrow_schema(schema))


def _converter(kind: Any, feature: Any) -> Convert | None:
    """What makes the value of a type; None where to_pylist's is right."""
    import pyarrow

    if isinstance(kind, pyarrow.JsonType) or type(feature).__name__ == "Json":
        return _parse
    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    if pyarrow.types.is_struct(kind):
        return _struct_converter(kind, feature if isinstance(feature, dict) else {})
    is_list = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind)
    if is_list:
        inner = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
        convert = _converter(kind.value_type, inner)
        return None if convert is None else lambda value, where: _convert_items(convert, value, where)
    return None


def _struct_converter(kind: Any, features: dict[str, Any]) -> Convert:
    inner = {field.name: _converter(field.type, features.get(field.name)) for field in kind}

    def convert(value: Any, where: str) -> Any:
        if not isinstance(value, dict):
            return value
        converted = StructValue(value)
        for name, convert_field in inner.items():
            if convert_field is not None and name in converted:
                converted[name] = convert_field(converted[name], where)
        return converted

    return convert


def _convert_items(convert: Convert, value: Any, where: str) -> Any:
    return [convert(item, where) for item in value] if isinstance(value, list) else value


def _parse(value: Any, where: str) -> Any:
    return parse_json(value, where) if isinstance(value, str | bytes) else value
