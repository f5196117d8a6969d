"""``sfumato export``: options. What it writes is in ``export_checkpoint``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.commands.options import add_trust
from sfumato.config.characters import printable
from sfumato.config.trust import code_of_configurations

if TYPE_CHECKING:
    from sfumato.commands.options import Commands


def add_parser(commands: Commands) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser("export", help="write the trained weights of a run or checkpoint for other programs")
    parser.add_argument("source", type=Path, help="run folder (its newest checkpoint is taken) or checkpoint folder")
    parser.add_argument("out", type=Path, help="folder to write, which must not exist")
    parser.add_argument("--merge", action="store_true", help="add adapters to the weights they belong to")
    add_trust(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Writes the folder; 0 when it is written."""
    from sfumato.commands.export_checkpoint import export_checkpoint

    with code_of_configurations(options.trust_code):
        print(printable(export_checkpoint(options.source, options.out, options.merge)))
    return 0
