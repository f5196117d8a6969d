"""Pages of algorithms of RL of language models: what they show can be configured, with the options that parts have."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import yaml

from sfumato.config.base import Variant, find_variants
from sfumato.config.text_recipes import TEXT_RECIPES
from sfumato.config.text_rl import TextAlgorithmConfig
from tests.golden.test_text_rl import CASES

ALGORITHMS = ["cispo", "dapo", "distillation", "dr_grpo", "gspo", "grpo", "ppo", "reinforce_pp", "rloo", "sapo"]
PAGES = [Path(__file__).parents[2] / "docs" / "text_rl" / f"{name}.md" for name in ALGORITHMS]
PARTS = {
    "advantage": "sfumato.algorithms.advantages",
    "token_advantage": "sfumato.algorithms.token_advantages",
    "objective": "sfumato.algorithms.token_objectives",
    "kl": "sfumato.algorithms.token_kl",
}


def blocks() -> list[tuple[str, dict]]:
    return [
        (page.stem, yaml.safe_load(block))
        for page in PAGES
        for block in re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    ]


@pytest.mark.parametrize(("page", "shown"), blocks())
def test_what_a_page_shows_can_be_configured(page: str, shown: dict) -> None:
    assert {*PARTS, "aggregation"} <= set(shown["algorithm"]), page
    built = TextAlgorithmConfig.model_validate(shown["algorithm"])
    recipe = f"{page}_baseline" if page == "reinforce_pp" and not built.token_advantage.takes_rewards else page
    if recipe in TEXT_RECIPES and page != "distillation":  # which is shown as returns of a penalty
        preset = TextAlgorithmConfig.model_validate({"recipe": recipe, **TEXT_RECIPES[recipe]})
        for name in ("advantage", "token_advantage", "objective", "aggregation"):
            assert getattr(built, name) == getattr(preset, name), name
    for reward in shown.get("reward", {}).get("rewards", []):
        Variant("sfumato.rewards").validate(reward)


def test_every_page_shows_how_its_algorithm_is_configured() -> None:
    assert {page for page, _ in blocks()} == set(ALGORITHMS)


def test_options_of_tables_exist_with_the_defaults_that_they_name() -> None:
    """Rows such as ``| `advantage.eps` | 1e-4 |``: the field of any part of that kind."""
    checked = 0
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for part, field, default in re.findall(
            rf"^\| `({'|'.join(PARTS)})\.(\w+)`[^|]*\| ([^|]+) \|", text, re.MULTILINE
        ):
            defaults = [
                option.default
                for cls in find_variants(PARTS[part]).values()
                for option in dataclasses.fields(cls)
                if option.name == field
            ]
            stated = yaml.safe_load(re.sub(r"[`]", "", default.split(",")[0]))
            stated = float(stated) if re.fullmatch(r"\d+e-\d+", str(stated)) else stated
            assert stated in defaults, f"{page.name}: {part}.{field} is {stated!r} there, {defaults} in the code"
            checked += 1
    assert checked > 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_golden_cases_that_a_page_names_exist(page: Path) -> None:
    section = page.read_text(encoding="utf-8").partition("## Golden cases")[2]
    named = re.findall(r"`((?:verl|trl|slime|openrlhf|areal|roll|\*)/[^`]+)`", section)
    assert named
    for pattern in named:
        regex = re.escape(pattern).replace(r"\*", ".*")
        assert any(re.match(regex, name) for name in CASES), pattern
