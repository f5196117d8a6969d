"""Keys and passwords never reach a page: what a run folder holds of them is replaced before it is sent.

A configuration that holds one is refused when a run starts, so these are folders of older versions and of other people,
and what programs have printed into a log.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping

from sfumato.config.secrets import NAMES_OF_SECRETS, PUBLISHED_FORMS, secret_problem

HIDDEN = "(hidden)"

_ADDRESS = re.compile(r"([a-z][a-z0-9+.-]*://)[^\s/@:]*:[^\s/@]+@", re.IGNORECASE)
"""A user and a password in an address."""

_IN_TEXT = re.compile(
    r"(?i)((?:[\w-]*api[_-]?key|password|passwd|secret|authorization|(?:access|auth|hf)[_-]token"
    r"|[A-Z0-9_]*_(?:KEY|TOKEN|SECRET|PASSWORD))[\"']?\s*[=:]\s*(?:bearer\s+)?[\"']?)[^\s\"',}]{4,}"
)
"""A name of a secret, a sign between, and a value."""


def hide_in_text(text: str) -> str:
    """A text with everything that looks like a key or a password replaced."""
    text = PUBLISHED_FORMS.sub(HIDDEN, text)
    text = _ADDRESS.sub(rf"\1{HIDDEN}@", text)
    return _IN_TEXT.sub(rf"\1{HIDDEN}", text)


def hide_secrets(value: object, place: tuple[Hashable, ...] = ()) -> object:
    """A value of JSON or YAML with its secrets replaced; names decide, and the forms of keys.

    Args:
        value: mappings, lists and leaves.
        place: names that lead to the value.
    """
    if isinstance(value, Mapping):
        return {name: hide_secrets(item, (*place, name)) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return _hide_in_list(list(value), place)
    if isinstance(value, str):
        return HIDDEN if secret_problem(place, value) else hide_in_text(value)
    name = place[-1] if place else ""
    if value is not None and not isinstance(value, bool) and isinstance(name, str) and NAMES_OF_SECRETS.fullmatch(name):
        return HIDDEN
    return value


def _hide_in_list(values: list[object], place: tuple[Hashable, ...]) -> list[object]:
    """Items one by one; in a command, also the word that follows an option named like a secret."""
    shown = [hide_secrets(item, place) for item in values]
    for index, item in enumerate(values[:-1]):
        if isinstance(item, str) and item.startswith("-"):
            option = item.lstrip("-").rpartition(".")[2].replace("-", "_")
            if NAMES_OF_SECRETS.fullmatch(option):
                shown[index + 1] = HIDDEN
    return shown
