"""What the options of several commands share. Nothing heavy is imported: ``sfumato --help`` reads this."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, TypeAlias

from sfumato.config.trust import SWITCH

if TYPE_CHECKING:
    Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_trust(command: argparse.ArgumentParser) -> None:
    """Adds the switch that lets code run which a configuration names."""
    command.add_argument(
        SWITCH,
        action="store_true",
        help="let the code run that the configuration names: modules, functions, Python files of a model's folder",
    )


def parse_positive(text: str) -> int:
    """A whole number above 0; argparse says so otherwise."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)


def parse_memory(text: str) -> float:
    """A number of GiB above 0; argparse says so otherwise."""
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GiB above 0")
    return size
