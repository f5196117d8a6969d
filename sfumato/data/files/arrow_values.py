"""Rows of Arrow tables as Python values, the same that `datasets` gives for them, with JSON columns parsed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING

from sfumato.data.files.bad_rows import parse_json
from sfumato.errors import DataError

if TYPE_CHECKING:
    import pyarrow


class StructValue(dict[str, object]):
    """A mapping from a struct column. Arrow gives every row the keys of all rows: a key that a row lacks is None."""


def arrow_row(table: pyarrow.Table | pyarrow.RecordBatch, where: str) -> dict[str, object]:
    """The only row of a table or batch.

    Mappings of struct columns are ``StructValue``. Values of columns of the type ``Json`` of datasets (Arrow's
    ``arrow.json``) are parsed, at whatever depth these columns are.

    Args:
        table: of one row.
        where: file and row, for messages.

    Raises:
        DataError: when the row cannot be read.
    """
    return arrow_rows(table, where)[0]


def arrow_rows(table: pyarrow.Table | pyarrow.RecordBatch, where: str) -> list[dict[str, object]]:
    """All rows of a table or batch, as ``arrow_row`` gives one. Raises DataError where any of them cannot be read."""
    import pyarrow

    try:
        # Reading with wrong offsets, as a damaged file may have them, would crash the process.
        table.validate(full=True)
        rows = table.to_pylist()
    except (pyarrow.ArrowException, ValueError, OverflowError) as error:
        raise DataError(f"{where}: {error}") from error
    converters = _converters(table.schema)
    for row in rows:
        for key, convert in converters.items():
            row[key] = convert(row[key], where)
    return rows


Convert = Callable[[object, str], object]


@lru_cache(maxsize=64)
def _converters(schema: pyarrow.Schema) -> dict[str, Convert]:
    """The converter of each column's values; columns whose values stay as they are have no entry."""
    features = _json_features(schema)
    converters = {field.name: _converter(field.type, features.get(field.name)) for field in schema}
    return {name: convert for name, convert in converters.items() if convert is not None}


def _json_features(schema: pyarrow.Schema) -> dict[str, object]:
    """The features that datasets stored in the schema, where one of them is ``Json``; otherwise empty.

    Files of older versions of datasets hold such a column as texts, and only the features tell that these are JSON.
    """
    if b'"Json"' not in (schema.metadata or {}).get(b"huggingface", b""):
        return {}
    from datasets import Features

    return dict(Features.from_arrow_schema(schema))


def _converter(kind: pyarrow.DataType, feature: object) -> Convert | None:
    """The converter of values of an Arrow type; None where the values of ``to_pylist`` stay as they are."""
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


def _struct_converter(kind: pyarrow.StructType, features: Mapping[str, object]) -> Convert:
    """The converter of a struct column's values, which become ``StructValue``."""
    inner = {field.name: _converter(field.type, features.get(field.name)) for field in kind}

    def convert(value: object, where: str) -> object:
        if not isinstance(value, dict):
            return value
        converted = StructValue(value)
        for name, convert_field in inner.items():
            if convert_field is not None and name in converted:
                converted[name] = convert_field(converted[name], where)
        return converted

    return convert


def _convert_items(convert: Convert, value: object, where: str) -> object:
    return [convert(item, where) for item in value] if isinstance(value, list) else value


def _parse(value: object, where: str) -> object:
    return parse_json(value, where) if isinstance(value, str | bytes) else value
