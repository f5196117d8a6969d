"""docs/text_rl/migration.md: every name of ours that it gives exists, and so do the values that it shows."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel

from sfumato.config.base import Variant, find_variants
from sfumato.config.text_recipes import TEXT_RECIPES
from sfumato.config.text_rl import TextRLConfig

PAGE = Path(__file__).parents[2] / "docs" / "text_rl" / "migration.md"
ROWS = [line.strip("|").split(" | ") for line in PAGE.read_text().splitlines() if re.match(r"\| .*`|\| \w+.*`", line)]
SECTIONS = "|".join(TextRLConfig.model_fields)


def look_up(name: str) -> Any:
    """The field of a dotted name; an entry of a part is one of any class that the part may name."""
    section: Any = TextRLConfig
    field: Any = None
    for number, word in enumerate(name.split(".")):
        if number and field is not None:
            named = [*field.metadata, *get_args(field.annotation)]
            variant = next((part for part in named if isinstance(part, Variant)), None)
            if variant is not None:
                classes = find_variants(variant.source).values()
                return any(word in {field.name for field in dataclasses.fields(cls)} for cls in classes)
        assert word in section.model_fields, f"{name}: no {word}"
        field = section.model_fields[word]
        kinds = [field.annotation, *get_args(field.annotation)]
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)
    return True


def variants_of(name: str) -> dict[str, type]:
    section, last = TextRLConfig, name.split(".")[-1]
    for word in name.split(".")[:-1]:
        section = section.model_fields[word].annotation
    results = [part for part in section.model_fields[last].metadata if isinstance(part, Variant)]
    return find_variants(results[0].source) if results else {}


def test_the_page_has_its_tables() -> None:
    assert len(ROWS) > 85 and all(len(row) in (2, 3) for row in ROWS), [row for row in ROWS if len(row) not in (2, 3)]


def test_names_of_ours_exist() -> None:
    names = set(re.findall(rf"`((?:{SECTIONS})\.[\w.]+\w)", "".join(row[1] for row in ROWS)))
    assert len(names) > 60 and all(look_up(name) for name in names), [name for name in names if not look_up(name)]


def test_types_and_values_exist() -> None:
    checked = 0
    for row in ROWS:
        for name, value in re.findall(r"`(algorithm\.\w+|rollout\.(?:kind|engine)|data\.data_type)` `(\w+)`", row[1]):
            allowed = TEXT_RECIPES if name == "algorithm.recipe" else variants_of(name)
            if name == "algorithm.aggregation":
                continue
            assert value in allowed, (name, value)
            checked += 1
        for shown in re.findall(r"`(\{type: [^`]*\})`", "".join(row)):
            part = "reference" if "constant" in shown else "off_policy"
            values = yaml.safe_load(shown)
            variants_of(f"algorithm.{part}")[values.pop("type")](**values)
            checked += 1
    assert checked >= 12
