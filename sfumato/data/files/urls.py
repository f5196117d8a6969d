"""What a path of the configuration is: a file of this machine, or a URL."""

from __future__ import annotations

import re

URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")


def is_url(path: str) -> bool:
    """Whether a path of the configuration is a URL."""
    return URL.match(path) is not None


def without_secrets(url: str) -> str:
    """A URL as messages show it: without a query, which may hold a signature."""
    return url.partition("?")[0]
