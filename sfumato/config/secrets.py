"""Keys and passwords stand in the environment alone: what a configuration holds is written, logged and shown."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable

PUBLISHED_FORMS = re.compile(
    r"\bsk-[\w-]{16,}|\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bgithub_pat_\w{20,}|\bglpat-[\w-]{16,}"
    r"|\bAKIA[0-9A-Z]{16}\b|\bxox[abeprs]-[\w-]{10,}|\bAIza[\w-]{30,}|\beyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----"
)
"""Forms in which OpenAI, Hugging Face, GitHub, GitLab, AWS, Slack, Google and others publish that they give keys."""

NAMES_OF_SECRETS = re.compile(
    r"(?i:(?:.*[_-])?api[_-]?key|password|passwd|secret|authorization|(?:access|auth|hf)[_-]token)"
    r"|[A-Z0-9_]*(?:KEY|TOKEN|SECRET|PASSWORD)"
)
"""Names below which a secret stands, in mappings that are passed on to something else."""

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def secret_problem(place: Iterable[Hashable], value: object) -> str:
    """A message about a value of a configuration that is a secret, which does not repeat it; empty for other values.

    Args:
        place: names and numbers that lead to the value.
        value: a leaf.
    """
    *_, name = ["", *place]
    if not isinstance(value, str) or not value.strip():
        return ""
    if isinstance(name, str) and name.endswith("_env"):
        if VARIABLE.fullmatch(value) and not _is_random(value) and not PUBLISHED_FORMS.search(value):
            return ""
        return (
            "must be the name of an environment variable, not the key itself, which is not repeated here: export it, "
            "and if it was a key, replace it where it was given"
        )
    if PUBLISHED_FORMS.search(value) or (isinstance(name, str) and NAMES_OF_SECRETS.fullmatch(name)):
        return (
            "holds a key or a password, which would be written into files and is not repeated here: export it as an "
            "environment variable, which programs that a run starts see, too"
        )
    return ""


def _is_random(text: str) -> bool:
    """Whether a part of a name between underscores is long and mixes letters and digits, as keys do."""
    parts = [part for part in text.split("_") if len(part) >= 20]
    return any(re.search(r"\d", part) and re.search(r"[A-Za-z]", part) for part in parts)
