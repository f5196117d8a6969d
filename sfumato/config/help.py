"""The text of ``--help``: every field with its type, its default and a sentence."""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
import textwrap
import types
import typing
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from sfumato.config.base import Section, Variant, find_variants

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

USAGE = """usage: {command}

The YAML file comes first; dotted overrides of any field follow. Values are read as YAML.
"""


def format_help(schema: type[Section]) -> str:
    """Help text of a configuration: one entry per field, variants listed with their own fields."""
    summary = inspect.cleandoc(schema.__doc__ or "")
    return "\n".join([USAGE.format(command=schema.usage), summary, "", *_section_lines(schema, "", schema.presets({}))])


def _section_lines(schema: type[BaseModel], prefix: str, presets: dict[str, Any]) -> list[str]:
    """Lines about the fields of a section, then about the sections inside it.

    Args:
        schema: the section.
        prefix: dotted place of the section, with a dot at its end.
        presets: values that the default recipe sets, which are shown as defaults.
    """
    lines = []
    # plain fields first: after a section's heading its own fields would seem to belong to that section
    for name, field in sorted(
        schema.model_fields.items(), key=lambda pair: inner_section(pair[1].annotation) is not None
    ):
        path = f"{prefix}{name}"
        inner = inner_section(field.annotation)
        variant = next((marker for marker in _metadata(field) if isinstance(marker, Variant)), None)
        if inner is not None:
            lines += ["", f"[{path}]  {inspect.cleandoc(inner.__doc__ or '').splitlines()[0]}"]
            if not field.is_required() and field.default is None:
                lines += _entry(path, "section", "null", field.description or "")
            lines += _section_lines(inner, f"{path}.", presets.get(name, {}))
            continue
        default = f"{presets[name]}, from the recipe" if name in presets else _default(field, variant)
        lines += _entry(path, _type_name(field.annotation, variant), default, field.description or "")
        entry = f"{path}.0" if typing.get_origin(field.annotation) is list else path
        for cls in find_variants(variant.source).values() if variant else []:
            lines += _variant_lines(cls, entry)
    return lines


def _variant_lines(cls: type, path: str) -> list[str]:
    lines = [f"      type: {cls.type}  {inspect.cleandoc(cls.__doc__ or '').splitlines()[0]}"]
    docs = attribute_docs(cls)
    for field in (field for field in dataclasses.fields(cls) if field.init):
        default = field.default if field.default is not dataclasses.MISSING else "required"
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        lines.append(f"        {path}.{field.name} = {default}  {docs.get(field.name, '')}")
    return lines


def attribute_docs(cls: type) -> dict[str, str]:
    """The strings that stand below the fields of a dataclass and of its bases, by field name."""
    docs: dict[str, str] = {}
    # Python keeps no strings below fields, so they are read from the source; a subclass's go over those of its bases
    for base in reversed(cls.__mro__[:-1]):
        module = sys.modules.get(base.__module__)
        try:
            source = inspect.getsource(module) if module else ""
        except (OSError, TypeError):  # a class made without source, such as in a console, has no field texts
            continue
        docs |= _field_texts(source).get(base.__qualname__, {})
    return docs


@functools.cache
def _field_texts(source: str) -> dict[str, dict[str, str]]:
    """The strings below fields by qualified name of the class, for all classes of a module, which is parsed once."""
    texts: dict[str, dict[str, str]] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            match child:
                case ast.ClassDef():
                    texts[f"{prefix}{child.name}"] = dict(_texts_below(child.body))
                    visit(child, f"{prefix}{child.name}.")
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    visit(child, f"{prefix}{child.name}.<locals>.")
                case ast.stmt():
                    visit(child, prefix)

    visit(ast.parse(source), "")
    return texts


def _texts_below(body: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    for pair in itertools.pairwise(body):
        match pair:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                yield name, " ".join(text.split())


def _entry(path: str, kind: str, default: str, text: str) -> list[str]:
    wrapped = textwrap.wrap(" ".join(text.split()), 96)
    return [f"  --{path} {kind}  (default: {default})", *(f"      {line}" for line in wrapped)]


def _default(field: FieldInfo, variant: Variant | None) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if variant is not None and dataclasses.is_dataclass(value):
        return str(variant.dump(value))
    return "null" if value is None else str(value)


def _metadata(field: FieldInfo) -> list[Any]:
    """Annotations of a field and of the items of a list field."""
    items = typing.get_args(field.annotation)
    return [*field.metadata, *(note for item in items for note in getattr(item, "__metadata__", ()))]


def inner_section(annotation: object) -> type[BaseModel] | None:
    """The section class inside an annotation such as ``Section | None`` or ``list[Section]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((section for arg in typing.get_args(annotation) if (section := inner_section(arg))), None)


def _type_name(annotation: object, variant: Variant | None) -> str:
    if variant is not None:
        types = "|".join(find_variants(variant.source))
        return f"list of {{type: {types}}}" if typing.get_origin(annotation) is list else f"{{type: {types}}}"
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(str(value) for value in typing.get_args(annotation))
    return _plain_name(annotation)


def _plain_name(annotation: object) -> str:
    """A type without the conditions that are noted with it."""
    origin = typing.get_origin(annotation)
    parts = typing.get_args(annotation)
    if origin is typing.Annotated:
        return _plain_name(parts[0])
    if origin in (typing.Union, types.UnionType):
        return " | ".join(map(_plain_name, parts))
    if parts:
        return f"{_plain_name(origin)}[{', '.join(map(_plain_name, parts))}]"
    names = {type(None): "None", Ellipsis: "...", Any: "Any"}
    return names.get(annotation) or getattr(annotation, "__name__", str(annotation))
