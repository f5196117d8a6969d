"""``sfumato report``: the page of a run folder, written anew."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.errors import DataError

if TYPE_CHECKING:
    from sfumato.commands.options import Commands


def add_parser(commands: Commands) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser("report", help="write report.html of a run folder anew")
    parser.add_argument("run_dir", type=Path, help="run folder")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Writes the page; 0 when it is written."""
    from sfumato.tracking.report import write_report

    if not (options.run_dir / "config.yaml").is_file():
        raise DataError(f"{options.run_dir} is no run folder: it has no config.yaml")
    write_report(options.run_dir)
    print(f"written: {options.run_dir / 'report.html'}")
    return 0
