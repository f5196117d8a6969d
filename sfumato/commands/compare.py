"""``sfumato compare``: options. What is compared is in ``tracking/compare.py``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from sfumato.commands.options import Commands

WIDTH_IN_FILES = 200
"""Columns of the tables in a file or a pipe, which have no width of their own."""


def add_parser(commands: Commands) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "compare",
        help="runs beside each other: settings that differ, results with intervals, curves",
        description="Compares runs with the first one. Intervals are of a paired bootstrap over evaluation samples "
        "of the same prompts and seeds.",
        allow_abbrev=False,
    )
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="run folders, the one to compare with first")
    parser.add_argument("--step", type=int, help="evaluation whose samples are compared; else the newest of both")
    parser.add_argument("--seed", type=int, default=0, help="seed of the bootstrap")
    parser.add_argument("--html", type=Path, metavar="FILE", help="also write a page with curves over each other")
    parser.add_argument("--json", action="store_true", help="print the comparison as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints the comparison; 0 when there is one."""
    from rich.console import Console

    from sfumato.commands.compare_tables import comparison_json, show_comparison
    from sfumato.tracking.compare import compare_runs
    from sfumato.tracking.compare_page import write_comparison

    if options.html is not None and (problem := _page_problem(options.html)):
        raise ConfigError(f"--html {options.html} {problem}")
    comparison = compare_runs(options.runs, options.step, options.seed)
    if options.html is not None:
        try:
            write_comparison(comparison, options.html)
        except OSError as error:
            raise ConfigError(f"--html {options.html} cannot be written: {error.strerror}") from error
    if options.json:
        print(comparison_json(comparison))
    else:
        console = Console()
        if not console.is_terminal:
            console.width = WIDTH_IN_FILES
        show_comparison(comparison, console, options.html)
    return 0


def _page_problem(path: Path) -> str:
    """Why the page cannot be written there; empty where it can. A folder of a run is no page."""
    if path.is_dir():
        return "is a folder: name a file, such as compare.html"
    if path.exists() and path.suffix not in (".html", ".htm"):
        return "exists and is no page: name a file that ends in .html"
    if not path.absolute().parent.is_dir():
        return f"lies in {path.absolute().parent}, which does not exist"
    return ""
