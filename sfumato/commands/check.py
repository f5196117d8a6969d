"""``sfumato check``: options. What it looks at is in ``check_config``."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from sfumato.commands.options import add_trust, parse_memory, parse_positive
from sfumato.config.trust import code_of_configurations

if TYPE_CHECKING:
    from sfumato.commands.options import Commands


def add_parser(commands: Commands) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "check",
        help="validate a configuration and its data, predict memory and steps",
        description="Reads a configuration and some of its data, builds the model without memory, and predicts "
        "parameters, memory of each process and steps. Exit code: 0 fits, 1 does not fit, 2 something is wrong.",
        epilog="Any other --section.field VALUE overrides the file, as for a task.",
        allow_abbrev=False,
    )
    parser.add_argument("config", help="YAML file of a task")
    parser.add_argument("--task", help="task that it is for, such as train_text; found out if not given")
    parser.add_argument("--ranks", type=parse_positive, help="processes (default: WORLD_SIZE, or the fewest possible)")
    parser.add_argument(
        "--device-memory", type=parse_memory, metavar="GIB", help="memory of one GPU (default: of this one)"
    )
    parser.add_argument(
        "--host-memory", type=parse_memory, metavar="GIB", help="CPU memory of one machine (default: of this one)"
    )
    parser.add_argument("--skip-data", action="store_true", help="do not look at the data")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    add_trust(parser)
    parser.set_defaults(run=run, takes_overrides=True)


def run(options: argparse.Namespace) -> int:
    """Prints what was found, and returns the exit code."""
    from sfumato.commands.find_task import load_for_task
    from sfumato.config.load import parse_overrides
    from sfumato.config.shipped import find_shipped

    options.config = find_shipped(options.config)
    overrides = parse_overrides(options.overrides)
    with code_of_configurations(options.trust_code):
        load_for_task(options.config, overrides, options.task, options.ranks)  # before the slow imports
    # torch and transformers are imported here, so that a mistake in the file was named without waiting for them
    from rich.console import Console

    from sfumato.commands.check_config import check_config
    from sfumato.commands.check_tables import show_findings

    with code_of_configurations(options.trust_code):
        findings = check_config(
            options.config,
            overrides,
            options.task,
            options.ranks,
            options.device_memory,
            with_data=not options.skip_data,
            show=True,
            host_gib=options.host_memory,
        )
    if options.json:
        print(findings.to_json())
    else:
        show_findings(findings, Console())
    return findings.exit_code
