"""Text: messages and chat templates, formats of rows and prompts, tokens, packing, token stores and streams."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    """What formats of one's own import from here; it loads more than most who need a part of this package."""
    if name in ("Document", "TextFormat", "TextSample", "fingerprint_of", "fit", "find_key"):
        from sfumato.data.text import format

        return getattr(format, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
