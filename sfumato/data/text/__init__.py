"""Text: messages and chat templates, formats of rows and prompts, tokens, packing, token stores and streams."""

from __future__ import annotations

from typing import Any

FROM_FORMAT = ("Document", "TextFormat", "TextSample", "fingerprint_of", "fit", "find_key")
"""Names of ``format`` that users' own formats import from here, which therefore stay."""


def __getattr__(name: str) -> Any:
    """Gives users' own formats what they import from here, on first use: ``format`` loads more than the rest needs."""
    if name in FROM_FORMAT:
        from sfumato.data.text import format

        return getattr(format, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
