"""What parts of algorithms are when nothing is given.

Runs that say nothing rest on these numbers, and papers give them: whoever changes one changes ``defaults.yaml`` too,
and sees it.
"""

import dataclasses
from pathlib import Path

import pytest
import yaml

from sfumato.config.base import Variant, find_variants

KINDS = {
    "advantages": "sfumato.algorithms.advantages",
    "combinations": "sfumato.rewards.combinations",
    "decay": "sfumato.algorithms.decay",
    "dynamics": "sfumato.algorithms.dynamics",
    "kl": "sfumato.algorithms.kl",
    "objectives": "sfumato.algorithms.objectives",
    "off_policy": "sfumato.algorithms.off_policy",
    "solvers": "sfumato.algorithms.solvers",
    "timesteps": "sfumato.algorithms.timesteps",
    "windows": "sfumato.algorithms.windows",
}
EXPECTED = yaml.safe_load((Path(__file__).parent / "defaults.yaml").read_text(encoding="utf-8"))


def defaults_of(cls: type) -> dict:
    """Fields that may be left out, and their values, as YAML would hold them."""
    found = {}
    for field in dataclasses.fields(cls):
        if field.default_factory is not dataclasses.MISSING:
            found[field.name] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            found[field.name] = field.default
        if dataclasses.is_dataclass(found.get(field.name)):
            part = found[field.name]
            found[field.name] = {"type": part.type, **dataclasses.asdict(part)}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in found.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_defaults_are_what_they_were(kind):
    found = {name: defaults_of(cls) for name, cls in find_variants(KINDS[kind]).items()}
    assert found == EXPECTED[kind]


def test_every_kind_of_part_is_looked_at():
    from tests.unit.test_config import SCHEMAS, fields_of

    sources = {
        variant.source for schema in SCHEMAS for _, variant, _, _ in fields_of(schema) if isinstance(variant, Variant)
    }
    assert sources - {"sfumato.rewards"} == set(KINDS.values())
