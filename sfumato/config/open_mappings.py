"""Mappings whose values others give or take: what they are is checked there."""

from __future__ import annotations

from typing import Any

JsonObject = dict[str, Any]
"""A mapping as JSON gives it: what its values are is checked where they are used."""

Keywords = dict[str, Any]
"""Arguments by name of a function of another library, which checks them."""
