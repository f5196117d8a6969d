"""The text of ``--help``: every field with its type, its default and a sentence."""

from __future__ import annotations

import ast
import dataclasses
import difflib
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

from sfumato.config.base import Section, Variant, find_variants, inner_section
from sfumato.config.open_mappings import JsonObject
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo

USAGE = """usage: {command}

The YAML file comes first; dotted overrides of any field follow. Values are read as YAML.
"""


@dataclasses.dataclass(frozen=True)
class VariantHelp:
    """A class that a field may hold, chosen by its ``type``."""

    type: str
    summary: str
    fields: tuple[tuple[str, object, str], ...]
    """Name, default and text of each."""


@dataclasses.dataclass(frozen=True)
class FieldHelp:
    """A field of a configuration."""

    path: str
    """Dotted, such as ``train.lr``."""
    kind: str
    default: str
    text: str
    variants: tuple[VariantHelp, ...] = ()
    variant_path: str = ""
    """Path of a variant's fields: of a list, that of its first item."""


@dataclasses.dataclass(frozen=True)
class SectionHelp:
    """A section of a configuration; the outermost has no path."""

    path: str
    summary: str
    fields: tuple[FieldHelp, ...]
    """Its plain fields. Those of the sections inside it stand with these."""


FIRST = (
    "model.model_path",
    "model.family",
    "model.lora.rank",
    "data.train_path",
    "data.eval_path",
    "data.data_type",
    "data.chat_template",
    "data.max_seq_len",
    "data.max_prompt_tokens",
    "data.height",
    "data.width",
    "algorithm.recipe",
    "dpo.loss",
    "dpo.beta",
    "kto.beta",
    "reward.rewards",
    "reward.objective",
    "rollout.num_prompts",
    "rollout.n",
    "rollout.max_new_tokens",
    "rollout.engine",
    "rollout.height",
    "rollout.width",
    "rollout.num_inference_steps",
    "train.lr",
    "train.max_steps",
    "train.num_train_epochs",
    "train.global_batch_size",
    "train.micro_batch_size",
    "train.output_dir",
    "train.load_checkpoint_path",
    "eval.every_steps",
    "sample.every_steps",
    "train.save_steps",
    "train.data_parallel_mode",
    "train.trackers",
    "train.optimizer",
    "train.seed",
    "train.mixed_precision",
    "train.activation_checkpointing",
    "eval.num_prompts",
    "eval.num_rows",
)
"""Fields that ``--help`` shows, those of them that a task has, from the first on."""
NUM_FIRST = 20
"""How many of them."""


def format_help(schema: type[Section], part: str = "all") -> str:
    """Help text of a configuration: one entry per field, variants listed with their own fields.

    Args:
        schema: of the task.
        part: ``all``, or the dotted name of a section or field; empty: the fields that matter first, and what sections
            there are.

    Raises:
        ConfigError: when there is no such section or field.
    """
    summary = inspect.cleandoc(schema.__doc__ or "")
    head = [USAGE.format(command=schema.usage), summary, ""]
    sections = describe_sections(schema)
    if part == "all":
        return "\n".join([*head, *(line for section in sections for line in _section_lines(section))])
    if not part:
        return "\n".join([*head, *_first_lines(sections)])
    chosen = [section for section in sections if section.path == part or section.path.startswith(f"{part}.")]
    if chosen:
        return "\n".join(line for section in chosen for line in _section_lines(section)).lstrip("\n")
    fields = {field.path: field for section in sections for field in section.fields}
    if part not in fields:
        names = [section.path for section in sections if section.path]
        near = difflib.get_close_matches(part, [*names, *fields], n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"--help {part}: no section or field of that name{hint} Sections are {', '.join(names)}")
    return "\n".join(_field_lines(fields[part]))


def _section_lines(section: SectionHelp) -> list[str]:
    heading = ["", f"[{section.path}]  {section.summary}"] if section.path else []
    return [*heading, *(line for field in section.fields for line in _field_lines(field))]


def _field_lines(field: FieldHelp) -> list[str]:
    lines = _entry(field)
    for variant in field.variants:
        lines.append(f"      type: {variant.type}  {variant.summary}")
        lines += [f"        {field.variant_path}.{name} = {default}  {text}" for name, default, text in variant.fields]
    return lines


def _first_lines(sections: list[SectionHelp]) -> list[str]:
    """The fields that matter first, without the fields of variants, and the sections with how many fields they have."""
    fields = {field.path: field for section in sections for field in section.fields}
    shown = [fields[path] for path in FIRST if path in fields][:NUM_FIRST] or list(fields.values())[:NUM_FIRST]
    lines = [line for field in shown for line in _entry(field)]
    if len(shown) == len(fields):
        return lines
    lines += ["", f"These are {len(shown)} of {len(fields)} options. The rest by section, --help SECTION:", ""]
    for name in dict.fromkeys(section.path.partition(".")[0] for section in sections if section.fields):
        inside = [section for section in sections if section.path.partition(".")[0] == name]
        count = sum(len(section.fields) for section in inside)
        if name:
            lines.append(f"  --help {name:<10} {count:>3} options  {inside[0].summary}")
    return [
        *lines,
        "",
        "  --help all        every option, with the fields of each type",
        "  --help train.lr   one option",
    ]


def describe_sections(schema: type[Section]) -> list[SectionHelp]:
    """What ``--help`` says of a configuration, section by section, with the default recipe's values as defaults."""
    return _describe(schema, "", schema.presets({}), ())


def _describe(
    schema: type[BaseModel], prefix: str, presets: JsonObject, first: tuple[FieldHelp, ...]
) -> list[SectionHelp]:
    """A section, then the sections inside it.

    Args:
        schema: the section.
        prefix: dotted place of the section, with a dot at its end.
        presets: values that the default recipe sets, which are shown as defaults.
        first: the entry of the section as a whole, where it may be left out.
    """
    plain_fields = list(first)
    inner_sections: list[SectionHelp] = []
    for name, field in schema.model_fields.items():
        path = f"{prefix}{name}"
        inner = inner_section(field.annotation)
        if inner is not None:
            is_optional = not field.is_required() and field.default is None
            whole = (FieldHelp(path, "section", "null", field.description or ""),) if is_optional else ()
            inner_sections += _describe(inner, f"{path}.", presets.get(name, {}), whole)
            continue
        variant = next((marker for marker in _annotations(field) if isinstance(marker, Variant)), None)
        plain_fields.append(
            FieldHelp(
                path,
                _type_name(field.annotation, variant),
                f"{presets[name]}, from the recipe" if name in presets else _shown_default(field, variant),
                field.description or "",
                tuple(_describe_variant(cls) for cls in find_variants(variant.source).values()) if variant else (),
                f"{path}.0" if typing.get_origin(field.annotation) is list else path,
            )
        )
    summary = next(
        iter(inspect.cleandoc(schema.__doc__ or "").splitlines()), ""
    )  # a class of one's own may say nothing
    return [SectionHelp(prefix.removesuffix("."), summary, tuple(plain_fields)), *inner_sections]


def _describe_variant(cls: type) -> VariantHelp:
    docs = attribute_docs(cls)
    fields = []
    for field in (field for field in dataclasses.fields(cls) if field.init):
        default = field.default if field.default is not dataclasses.MISSING else "required"
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        fields.append((field.name, default, docs.get(field.name, "")))
    return VariantHelp(cls.type, inspect.cleandoc(cls.__doc__ or "").splitlines()[0], tuple(fields))


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


def _entry(field: FieldHelp) -> list[str]:
    wrapped = textwrap.wrap(" ".join(field.text.split()), 96)
    return [f"  --{field.path} {field.kind}  (default: {field.default})", *(f"      {line}" for line in wrapped)]


def _shown_default(field: FieldInfo, variant: Variant | None) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if variant is not None and dataclasses.is_dataclass(value):
        return str(variant.dump(value))
    return "null" if value is None else str(value)


def _annotations(field: FieldInfo) -> list[object]:
    """Annotations of a field and of the items of a list field."""
    items = typing.get_args(field.annotation)
    return [*field.metadata, *(note for item in items for note in getattr(item, "__metadata__", ()))]


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
