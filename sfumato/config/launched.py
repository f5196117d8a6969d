"""How a process was started: what torchrun, or a scheduler in its place, writes into the environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from sfumato.errors import ConfigError


@dataclass(frozen=True)
class Launched:
    """This process among those that were started together."""

    world_size: int = 1
    rank: int = 0
    local_rank: int = 0
    """Its number on this machine: which GPU it takes."""


def world_size() -> int:
    """Processes that were started together. Raises ConfigError when WORLD_SIZE is no number of processes."""
    return _number("WORLD_SIZE", default=1, least=1)


def read_launched() -> Launched:
    """This process's place.

    Raises:
        ConfigError: when the environment contradicts itself, or lacks what processes need to find each other.
    """
    found = Launched(world_size(), _number("RANK", 0, 0), _number("LOCAL_RANK", 0, 0))
    if found.rank >= found.world_size:
        raise ConfigError(
            f"RANK is {found.rank}, but WORLD_SIZE {found.world_size}: ranks count from 0 to WORLD_SIZE - 1"
        )
    if found.world_size > 1:
        missing = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
        if missing:
            raise ConfigError(
                f"WORLD_SIZE is {found.world_size}, but {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not set: start several processes with train.sh "
                f"(NPROC_PER_NODE={found.world_size}) or torchrun, or unset WORLD_SIZE for one process"
            )
        _number("MASTER_PORT", 0, 0)
    return found


def _number(name: str, default: int, least: int) -> int:
    text = os.environ.get(name, "").strip() or str(default)
    if not (text.isascii() and text.isdigit()) or int(text) < least:
        raise ConfigError(
            f"the environment variable {name} must be a whole number from {least}, not {os.environ[name]!r}: unset it, "
            "or start with train.sh or torchrun, which set it"
        )
    return int(text)
