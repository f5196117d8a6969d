"""The documentation: no broken link, no page that no list names, and a site that builds without a warning."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from tests.page_commands import FENCE
from tests.tiny import ROOT

DOCS = ROOT / "docs"
PAGES = [
    *sorted(page for page in DOCS.rglob("*.md") if page.parent.name not in ("_build", "configuration_reference")),
    *sorted(ROOT.glob("*.md")),
]
LINK = re.compile(r"\]\((?!https?:|mailto:)(?P<path>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")
LISTED = re.compile(r"^```\{toctree\}\n(?::.*\n)*\n(?P<pages>(?:.+\n)+)```", re.MULTILINE)


@cache
def anchors_of(page: Path) -> frozenset[str]:
    """Anchors of the headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    texts = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return frozenset(re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-") for text in texts)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for match in LINK.finditer(FENCE.sub("", page.read_text(encoding="utf-8"))):
        target = (page.parent / match["path"]).resolve() if match["path"] else page
        assert target.exists(), match[0]
        if match["anchor"] and target.suffix == ".md":
            assert match["anchor"][1:] in anchors_of(target), match[0]


def test_the_index_lists_every_page_once() -> None:
    listed = [name for block in LISTED.finditer((DOCS / "index.md").read_text()) for name in block["pages"].split()]
    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in PAGES if page.is_relative_to(DOCS)}
    assert sorted(listed) == sorted((pages - {"index"}) | {"configuration_reference/index"})


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "--keep-going", str(DOCS), str(tmp_path / "site")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    pages = {path.stem for path in (tmp_path / "site" / "configuration_reference").glob("*.html")}
    assert {"index", "rl_text", "train_dit"} <= pages
    foreign = re.compile(r"""<(?:script|link|img)[^>]*(?:src|href)=["']https?:""")
    for page in (tmp_path / "site").rglob("*.html"):
        assert not foreign.search(page.read_text(encoding="utf-8")), f"{page} loads something from elsewhere"
