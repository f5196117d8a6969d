"""Rows of Arrow tables as Python values, the same that `datasets` gives for them, with JSON columns parsed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from sfumato.data.files.bad_rows import parse_json
from sfumato.errors import DataError

if TYPE_CHECKING:
    import pyarrow


TRUTH_OF_CLASS = {
    **dict.fromkeys(("true", "yes", "1", "good", "chosen", "desirable", "correct", "positive", "+"), 1),
    **dict.fromkeys(("false", "no", "0", "bad", "rejected", "undesirable", "incorrect", "negative", "-"), 0),
}
"""What the names of classes say of an answer that they label."""


class ClassLabelValue(int):
    """A number from a ``ClassLabel`` column of datasets, which is the place of a name in a list, and this name."""

    name: str

    def __new__(cls, number: int, name: str) -> ClassLabelValue:
        value = super().__new__(cls, number)
        value.name = name
        return value

    def __reduce__(self) -> tuple[type[ClassLabelValue], tuple[int, str]]:
        return ClassLabelValue, (int(self), self.name)


def truth_of_class(value: ClassLabelValue, key: str, where: str) -> int:
    """1 or 0, as the name of a class says: the number depends on the order in which the names are listed.

    Args:
        value: of the column.
        key: name of the column.
        where: file and row, for messages.

    Raises:
        DataError: when the name says neither.
    """
    truth = TRUTH_OF_CLASS.get(value.name.strip().lower())
    if truth is None:
        raise DataError(
            f"{where}: column {key!r} holds classes (ClassLabel of datasets), and the name of this one, "
            f"{value.name!r}, says neither true nor false: store a column of true and false instead"
        )
    return truth


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
    converters = _column_converters(table.schema)
    for row in rows:
        for key, convert in converters.items():
            row[key] = convert(row[key], where)
    return rows


def arrow_column(table: pyarrow.Table, key: str, where: str) -> list[object]:
    """One column of a table, its values as in ``arrow_rows``. Raises DataError where one cannot be read."""
    values = table.column(key).to_pylist()
    convert = _column_converters(table.schema).get(key)
    return values if convert is None else [convert(value, where) for value in values]


Convert = Callable[[object, str], object]


@lru_cache(maxsize=64)
def _column_converters(schema: pyarrow.Schema) -> dict[str, Convert]:
    """The converter of each column's values; columns whose values stay as they are have no entry."""
    features = _stored_features(schema)
    converters = {field.name: _value_converter(field.type, features.get(field.name)) for field in schema}
    return {name: convert for name, convert in converters.items() if convert is not None}


def _stored_features(schema: pyarrow.Schema) -> dict[str, object]:
    """The features that datasets stored in the schema, where one is ``Json`` or ``ClassLabel``; otherwise empty.

    Files of older versions of datasets hold a column of JSON as texts, and files of all versions one of classes as
    numbers: only the features tell what these are.
    """
    stored = (schema.metadata or {}).get(b"huggingface", b"")
    if b'"Json"' not in stored and b'"ClassLabel"' not in stored:
        return {}
    from datasets import Features

    return dict(Features.from_arrow_schema(schema))


def _value_converter(kind: pyarrow.DataType, feature: object) -> Convert | None:
    """The converter of values of an Arrow type; None where the values of ``to_pylist`` stay as they are."""
    import pyarrow

    if isinstance(kind, pyarrow.JsonType) or type(feature).__name__ == "Json":
        return _parse
    if type(feature).__name__ == "ClassLabel":
        names = cast("list[str]", getattr(feature, "names", None) or [])
        return lambda value, where: _name_class(names, value)
    if isinstance(kind, pyarrow.BaseExtensionType):
        kind = kind.storage_type
    if pyarrow.types.is_struct(kind):
        return _struct_converter(kind, feature if isinstance(feature, dict) else {})
    is_list_view = pyarrow.types.is_list_view(kind) or pyarrow.types.is_large_list_view(kind)
    is_list = pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind) or pyarrow.types.is_fixed_size_list(kind)
    if is_list or is_list_view:
        inner = feature[0] if isinstance(feature, list) and feature else getattr(feature, "feature", None)
        convert = _value_converter(kind.value_type, inner)
        return None if convert is None else lambda value, where: _convert_items(convert, value, where)
    return None


def _struct_converter(kind: pyarrow.StructType, features: Mapping[str, object]) -> Convert:
    """The converter of a struct column's values, which become ``StructValue``."""
    inner = {field.name: _value_converter(field.type, features.get(field.name)) for field in kind}

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


def _name_class(names: list[str], value: object) -> object:
    """A number of a class with its name; what is no such number, as datasets writes -1 for none, stays as it is."""
    return ClassLabelValue(value, names[value]) if isinstance(value, int) and 0 <= value < len(names) else value


def _parse(value: object, where: str) -> object:
    return parse_json(value, where) if isinstance(value, str | bytes) else value
