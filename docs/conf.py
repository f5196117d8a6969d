"""The documentation site: ``make docs`` builds it offline, and every warning is an error.

Pages are plain Markdown that reads as well without the site. The reference of configurations is made here from the
schema (``reference.py``), so it says what ``--help`` says.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

DOCS = Path(__file__).parent
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(DOCS.parent))
sys.path.insert(0, str(DOCS))

from docutils import nodes  # noqa: E402
from reference import write_configuration_pages  # noqa: E402
from sphinx.application import Sphinx  # noqa: E402

import sfumato  # noqa: E402

project = "sfumato"
author = "The sfumato authors"
copyright = "The sfumato authors. Apache-2.0"
release = sfumato.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]
nitpicky = True
# annotations name classes of other libraries and of files that have no page here
nitpick_ignore_regex = [(r"py:(class|exc)", r".*")]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
suppress_warnings = ["myst.header"]

autodoc_typehints = "signature"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}

html_theme = "furo"
html_title = "sfumato"
html_static_path = ["images"]
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"navigation_with_keys": True}

_LINK = re.compile(r"\]\((?P<path>\.\.?/[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
_PAGES_OUTSIDE = {"CONTRIBUTING.md": "contributing.md", "SECURITY.md": "reporting.md", "README.md": "index.md"}


def _link_within_site(app: Sphinx, docname: str, source: list[str]) -> None:
    """Lets links to pages beside ``docs/`` lead to their page of the site."""
    page = Path(app.srcdir) / f"{docname}.md"
    up = "../" * docname.count("/")

    def replace(match: re.Match[str]) -> str:
        target = (page.parent / match["path"]).resolve()
        if target.parent == DOCS.parent and target.name in _PAGES_OUTSIDE:
            return f"]({up}{_PAGES_OUTSIDE[target.name]}{match['anchor'] or ''})"
        return match[0]

    source[0] = _LINK.sub(replace, source[0])


def _add_dark_pictures(app: Sphinx, document: nodes.document) -> None:
    """Shows ``NAME_dark.webp`` in the place of ``NAME.webp`` while the site is dark, where there is one."""
    for picture in list(document.findall(nodes.image)):
        stem, _, ending = picture["uri"].rpartition(".")
        dark_uri = f"{stem}_dark.{ending}"
        if (Path(app.env.doc2path(app.env.docname)).parent / dark_uri).is_file():
            dark = picture.deepcopy()
            dark["uri"] = dark_uri
            dark["classes"] = [*picture["classes"], "only-dark"]
            picture["classes"] = [*picture["classes"], "only-light"]
            picture.parent.insert(picture.parent.index(picture) + 1, dark)


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("builder-inited", lambda app: write_configuration_pages(Path(app.srcdir) / "configuration_reference"))
    app.connect("source-read", _link_within_site)
    app.connect("doctree-read", _add_dark_pictures, priority=400)  # before Sphinx collects the pictures
