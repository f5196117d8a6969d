"""What every configuration is made of: strict sections, and parts that are chosen by ``type:``."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import json
import math
import pkgutil
import typing
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError, core_schema

from sfumato.config.open_mappings import JsonObject
from sfumato.config.trust import refuse_code

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler


class Section(BaseModel):
    """A section of the configuration: typed, frozen, and strict about unknown keys and numbers that are not finite.

    The string below a field is its help text.

    pyright does not see a default that ``Field`` is given by position, and asks for these fields where a section is
    built without arguments; such lines carry ``pyright: ignore[reportCallIssue]``.
    """

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, validate_default=True, allow_inf_nan=False
    )

    usage: ClassVar[str] = "bash train.sh TASK.py CONFIG.yaml [--section.field VALUE ...]"
    """The command that a configuration of this kind is for."""

    @property
    def non_defaults(self) -> dict[str, object]:
        """Fields that differ from their defaults."""
        fields = type(self).model_fields.items()
        return {name: getattr(self, name) for name, field in fields if getattr(self, name) != field.get_default()}

    @classmethod
    def presets(cls, data: JsonObject) -> JsonObject:
        """Defaults that depend on ``data`` (the file with its overrides), such as the parts of a recipe it names."""
        del data
        return {}

    @classmethod
    def reasons(cls, data: JsonObject, overrides: JsonObject) -> dict[str, str]:
        """Reasons why overrides do not go together with values of the file, by the dotted place of a section.

        Where a section has one, messages give it in the place of the mistakes in the section's fields.
        """
        del data, overrides
        return {}


NOT_FINITE = "Input should be a finite number"


def iterate_leaves(value: object, place: tuple[Hashable, ...] = ()) -> Iterator[tuple[tuple[Hashable, ...], object]]:
    """The values of nested mappings and lists that are neither, each with its place: the keys and indices to it."""
    if not isinstance(value, (dict, list)):
        yield place, value
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inside:
        yield from iterate_leaves(item, (*place, key))


def flatten(value: object, name: str = "") -> dict[str, object]:
    """The leaves of nested mappings by dotted name."""
    if not isinstance(value, Mapping) or not value:
        return {name: value}
    return {key: leaf for k, item in value.items() for key, leaf in flatten(item, f"{name}.{k}" if name else k).items()}


@functools.cache
def find_variants(source: str) -> dict[str, type]:
    """Classes that can be chosen by ``type:`` from a module or from all modules of a package.

    A class counts when it is a dataclass that states ``type: ClassVar[str]`` itself; nothing has to be registered.
    Of what a module imports, those that its ``__all__`` names count, too.

    Args:
        source: import path of the module or package, such as ``sfumato.algorithms.dynamics``.

    Returns:
        The classes by their ``type``, sorted.
    """
    module = importlib.import_module(source)
    modules = [module]
    if hasattr(module, "__path__"):
        modules += [importlib.import_module(f"{source}.{info.name}") for info in pkgutil.iter_modules(module.__path__)]
    variants = {
        vars(cls)["type"]: cls
        for module in modules
        for name, cls in inspect.getmembers(module, inspect.isclass)
        if (cls.__module__ == module.__name__ or name in getattr(module, "__all__", ()))
        and "type" in vars(cls)
        and dataclasses.is_dataclass(cls)
    }
    return dict(sorted(variants.items()))


def names_of(cls: type) -> set[str]:
    """Public methods, attributes and fields of a dataclass."""
    return {name for name in (*dir(cls), *(f.name for f in dataclasses.fields(cls))) if not name.startswith("_")}


@functools.cache
def shared_names(source: str) -> frozenset[str]:
    """Names that all classes of a source have, and that a class of the user's must have to be chosen in their place."""
    shared = set.intersection(*map(names_of, find_variants(source).values()))
    return frozenset(shared - {"type"} if "label" in shared else shared)  # a reward's label does without a type


@functools.lru_cache(maxsize=512)
def _adapter_of(cls: type) -> TypeAdapter[object]:
    """The validator of a class, which takes pydantic milliseconds to make."""
    return TypeAdapter(cls)


@dataclasses.dataclass(frozen=True)
class Variant:
    """Marks a field whose value is an object of a class chosen by ``type:``, the other keys being its fields.

    Use it as ``dynamics: Annotated[Any, Variant("sfumato.algorithms.dynamics")]``. Besides the types found in
    ``source``, a class of your own is named by import path, ``type: my_package.my_module:MyClass``.
    """

    source: str
    optional: bool = False
    """The value may also be null."""
    short: bool = False
    """An object of a class without fields is written as its type alone."""

    def resolve(self, name: str) -> type:
        """The class of that ``type``. Raises PydanticCustomError when there is none."""
        if ":" in name:
            refuse_code(f"type {name}")
            module, _, attribute = name.partition(":")
            try:
                cls = getattr(importlib.import_module(module), attribute)
                if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
                    raise TypeError("it is not a dataclass")
                if missing := sorted(shared_names(self.source) - names_of(cls)):
                    raise TypeError(f"it has no {', '.join(missing)}, as all types that can stand here have")
            except Exception as error:  # whatever a module of one's own raises when it is imported
                why = str(error) or type(error).__name__
                raise PydanticCustomError(
                    "unknown_variant", "cannot import type {name}: {why}", {"name": repr(name), "why": why}
                ) from error
            return cls
        variants = find_variants(self.source)
        if name not in variants:
            raise PydanticCustomError(
                "unknown_variant", "unknown type {name}", {"name": repr(name), "value": name, "known": list(variants)}
            )
        return variants[name]

    def validate(self, value: object) -> object:
        """Builds the object from a mapping with ``type``, or from the type; an object that was built already passes."""
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return value
        if value is None and self.optional:
            return None
        if isinstance(value, str):
            value = {"type": value}
        if not isinstance(value, dict):
            raise PydanticCustomError("variant_mapping", "must be a mapping with a key 'type'")
        if "type" not in value:
            raise PydanticCustomError(
                "variant_type", "needs a key 'type', one of {known}", {"known": ", ".join(find_variants(self.source))}
            )
        # Unknown keys are collected here, since pydantic passes over those of a plain dataclass.
        cls = self.resolve(str(value["type"]))
        fields = {key: item for key, item in value.items() if key != "type"}
        names = [field.name for field in dataclasses.fields(cls) if field.init]
        unknown = [
            {"type": "extra_forbidden", "loc": (key,), "msg": "", "input": None} for key in fields if key not in names
        ]
        numbers = {loc: number for loc, number in iterate_leaves(fields) if isinstance(number, float)}
        # json.dumps writes NaN and Infinity, which pydantic would take for numbers
        not_finite = {loc: number for loc, number in numbers.items() if not math.isfinite(number)}
        unknown += [
            {"type": "finite_number", "loc": loc, "msg": NOT_FINITE, "input": not_finite[loc]} for loc in not_finite
        ]
        built = None
        # in JSON mode, which is strict about types and still takes a list for a tuple
        try:
            built = _adapter_of(cls).validate_json(
                json.dumps({key: item for key, item in fields.items() if key in names}, default=str), strict=True
            )
            errors = unknown
        except ValidationError as error:
            errors = unknown + [details for details in error.errors() if not not_finite]
        except Exception as error:  # a class of one's own that cannot be made, such as one without a method it needs
            raise PydanticCustomError(
                "broken_variant", "cannot make {cls}: {why}", {"cls": cls.__name__, "why": str(error)}
            ) from error
        if errors:
            raise PydanticCustomError(
                "variant", "wrong fields of {cls}", {"cls": cls.__name__, "errors": errors, "names": ["type", *names]}
            )
        return built

    def dump(self, value: Any) -> dict[str, object] | str | None:
        """The value of a configuration that builds an equal object: a mapping, or with ``short`` a type alone."""
        if value is None:
            return None
        cls = type(value)
        name = next((type_name for type_name, variant in find_variants(self.source).items() if variant is cls), None)
        name = name or f"{cls.__module__}:{cls.__qualname__}"  # a class of your own, whatever type it states
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        if self.short and not fields:
            return name
        return {"type": name, **TypeAdapter(JsonObject).dump_python(fields, mode="json")}

    def __get_pydantic_core_schema__(self, _source: object, _handler: GetCoreSchemaHandler) -> core_schema.CoreSchema:
        return core_schema.no_info_plain_validator_function(
            self.validate, serialization=core_schema.plain_serializer_function_ser_schema(self.dump)
        )


def refuse_needless(section: Section, path: str, names: Sequence[str], why: str) -> None:
    """Raises ValueError for the first of the fields that is not as it is by default.

    Args:
        section: that has the fields.
        path: its place in the configuration.
        names: of the fields.
        why: what leaves them without effect, and what else could be done than to remove them.
    """
    for name in names:
        if name in section.non_defaults:
            raise ValueError(f"{path}.{name} has no effect {why}")


def inner_section(annotation: object) -> type[BaseModel] | None:
    """The section class inside an annotation such as ``Section | None`` or ``list[Section]``."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((section for arg in typing.get_args(annotation) if (section := inner_section(arg))), None)
