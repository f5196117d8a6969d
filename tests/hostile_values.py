"""Bad inputs made from the configurations' own schemas: every field of every section and part with hostile values."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

from sfumato.config.base import Variant, find_variants

VALUES = (
    # other types, nothing, numbers out of bounds, huge ones, what is no number
    "null", "true", "''", "[]", "{}", "0", "-1", "1", "0.5", "-0.5", "1.5", "3", "1e-300", "1e300", "1" + "0" * 30,
    "-1" + "0" * 30, str(2**63), str(2**31), ".nan", ".inf", "-.inf", "nan", "0x10", "1_000", "12:30:45", "2020-01-01",
    # strings that are no path, no name, no expression
    '"a\\0b"', '"a\\nb"', '"\\ud800"', "ä/ö\u202e", "x" * 5000, "'~'", "/", "/proc/self/mem", "/dev/zero", "/dev/null",
    "..", "{word}", "'{word}'", "'{{ word }}{% for %}'", "'(((('", "'%s%n'", "'--help'", "'; rm -rf x'",
    # lists and mappings
    "[null]", "[[[[]]]]", "[1, 2]", "[2, 1]", f"[-1, {10**30}]", "[0.5, .nan]", "[a, a, a]", str(list(range(300))),
    "{type: null}", "{type: nothing}", "{type: [a]}", "{type: 'os:system'}", "{type: ':'}", "{type: 'a:b:c'}",
    "{type: 'json:JSONDecoder'}", "{type: 'sfumato.errors:UserError'}",
    "{type: 'sfumato.rewards.pixels:JpegCompressibility'}", "{type: 'sfumato.algorithms.windows:AllSteps'}",
    "{'': 1}", "{a.b: 1}", "{0: 1}", "{null: 1}",
)  # fmt: skip
"""Values of overrides, as YAML."""

TEXTS = (
    "[" * 50 + "]" * 50, "{a: " * 3000 + "}" * 3000, "[" * 100_000, "&a [*a]", "!!python/object/apply:os.getcwd []",
    "!!binary x", "!!set {a}", "{<<: 1}", "a: b: c", "%", "@", "\t", "- a", "{? {a: 1} : 1}", "{[1]: 1}", "*a", "a\0b",
    "\ud800",
)  # fmt: skip
"""YAML that is broken, odd or made to hurt, whatever the field."""

REQUIRED = {"base_urls": "[http://127.0.0.1:9]", "path": "math:hypot", "rubric": "good", "clip_range": "0.1"}
"""Values of fields that parts must be given; ``x`` for the others."""


def fields_of(schema: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, list[str]]]:
    """Fields of all sections, and of the parts that ``type`` can name: a dotted path, and the overrides it needs."""
    for name, field in schema.model_fields.items():
        path = f"{prefix}{name}"
        yield path, []
        inside = [*_inside(field.annotation), *field.metadata]
        entry = f"{path}.0" if list in map(typing.get_origin, inside) else path
        for section in (part for part in inside if isinstance(part, type) and issubclass(part, BaseModel)):
            yield from fields_of(section, f"{entry}.")
        for variant in (part for part in inside if isinstance(part, Variant)):
            for kind, cls in find_variants(variant.source).items():
                fields = [field for field in dataclasses.fields(cls) if field.init]
                needed = [field.name for field in fields if field.default is dataclasses.MISSING]
                around = [f"--{entry}.type={kind}", *(f"--{entry}.{name}={REQUIRED.get(name, 'x')}" for name in needed)]
                for setting in fields:
                    yield f"{entry}.{setting.name}", around


def _inside(annotation: Any) -> Iterator[Any]:
    yield annotation
    for part in (*typing.get_args(annotation), *getattr(annotation, "__metadata__", ())):
        yield from _inside(part)


def hostile_arguments(schema: type[BaseModel], every: int = 1) -> Iterator[list[str]]:
    """Overrides with every value in every field, or every ``every``-th of these."""
    pairs = itertools.product(fields_of(schema), VALUES)
    for (path, around), value in itertools.islice(pairs, 0, None, every):
        yield [*around, f"--{path}={value}"]
