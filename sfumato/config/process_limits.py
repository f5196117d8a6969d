"""Limits of this process."""

from __future__ import annotations

import resource
import sys


def lower_limit(kind: int, most: int) -> None:
    """Limits this process to ``most`` of a resource, or to less where the machine's own limit (``ulimit``) is lower.

    Args:
        kind: of ``resource.RLIMIT_*``.
        most: bytes, seconds or a number, as the kind has it.
    """
    if kind == resource.RLIMIT_AS and sys.platform == "darwin":
        return  # macOS has no limit of memory, and raises ValueError
    _, hard = resource.getrlimit(kind)  # only root may raise it
    value = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (value, value))
