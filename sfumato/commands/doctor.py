"""``sfumato doctor``: options. What it looks at is in ``doctor_findings``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sfumato.commands.options import Commands


def add_parser(commands: Commands) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser("doctor", help="what is installed, and which devices and extras work")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--ray", action="store_true", help="also start Ray on this machine (10 s)")
    parser.add_argument(
        "--folder", type=Path, metavar="DIR", help="also whether machines share a folder: call it on each of them"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints what was found; 1 when something that is needed is broken."""
    from sfumato.commands.doctor_findings import run_doctor

    return run_doctor(as_json=options.json, start_ray=options.ray, folder=options.folder)
