"""Pages of algorithms of RL of diffusion models show their recipes, and the index of papers has them all."""

from __future__ import annotations

import re

import pytest
import yaml

from sfumato.config.recipes import DIFFUSION_RECIPES, DIRECT_RECIPES
from sfumato.config.text_recipes import TEXT_RECIPES
from tests.tiny import ROOT

PAGES = {page.stem: page for page in sorted((ROOT / "docs" / "diffusion_rl").glob("*.md"))}
COMPARED = {path.stem for path in (ROOT / "configs" / "quickstart" / "algorithms").glob("*.yaml")}


def test_every_algorithm_that_is_compared_has_a_page() -> None:
    assert set(PAGES) == COMPARED | {"draft", "srpo"}


@pytest.mark.parametrize("name", PAGES)
def test_a_page_shows_its_recipe(name: str) -> None:
    text = PAGES[name].read_text(encoding="utf-8")
    (block,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert yaml.safe_load(block) == {"algorithm": (DIFFUSION_RECIPES | DIRECT_RECIPES)[name]}


@pytest.mark.parametrize("name", sorted(COMPARED))
def test_a_page_has_the_figures_of_the_comparison(name: str) -> None:
    title = PAGES[name].read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
    (row,) = re.findall(
        rf"^\| {re.escape(title)} \|.*$", (ROOT / "docs/algorithms_compared.md").read_text(), re.MULTILINE
    )
    before, after = (cell.strip() for cell in row.split("|")[4:6])
    assert f"from {before} to {after}" in " ".join(PAGES[name].read_text(encoding="utf-8").split())


def test_the_index_of_papers_has_every_recipe() -> None:
    text = (ROOT / "docs" / "papers.md").read_text(encoding="utf-8")
    of_one_model = {
        name for name in DIFFUSION_RECIPES if re.search(r"_(flux|qwen_image|qwen_image_edit|wan|hunyuan_video)$", name)
    }
    assert [
        name for name in {*DIFFUSION_RECIPES, *DIRECT_RECIPES, *TEXT_RECIPES} - of_one_model if f"`{name}" not in text
    ] == []


def test_pages_have_the_figures_of_several_seeds() -> None:
    text = (ROOT / "docs/algorithms_over_seeds.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| \[.*?\]\(diffusion_rl/(\w+)\.md\) \| (\S+) \[.*?\] \| (\S+ \[.*?\]\*\*) \|", text, re.MULTILINE
    )
    assert rows
    for name, before, after in rows:
        shown = " ".join(PAGES[name].read_text(encoding="utf-8").split())
        assert f"from {before} to {after}" in shown and "images/algorithms_over_seeds.svg" in shown, name
