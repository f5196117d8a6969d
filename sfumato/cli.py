"""The command line: ``sfumato COMMAND ...``."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence

import sfumato
from sfumato.commands import (
    chat,
    check,
    compare,
    doctor,
    evaluate,
    export,
    launch,
    new,
    playground,
    preprocess,
    recipes,
    replay,
    report,
    sample,
    studio,
)
from sfumato.config.characters import printable
from sfumato.errors import UserError, describe_file_error
from sfumato.kernels import choose_kernels
from sfumato.tracking.terminal import outlive_readers

# Each has add_parser(commands) and run(options), and imports what is slow within run: --help stays quick.
COMMANDS = (
    new,
    launch,
    recipes,
    check,
    preprocess,
    doctor,
    export,
    report,
    compare,
    sample,
    chat,
    evaluate,
    replay,
    playground,
    studio,
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; a user's mistake prints its message and gives 2."""
    outlive_readers()
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    # only commands that read a configuration take fields of it
    if near := _find_misspelt_option(rest, options.own_options):
        parser.error(f"unknown option {near[0]}; did you mean {near[1]}?")
    if rest and not options.takes_overrides:
        parser.error(f"unexpected arguments: {' '.join(rest)}")
    options.overrides = rest
    # before a command imports torch: MKL reads the environment when it computes for the first time
    choose_kernels()
    try:
        return options.run(options)
    except UserError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if not (problem := describe_file_error(error)):
            raise
        print(printable(f"error: {problem}"), file=sys.stderr)
        return UserError.exit_code
    except (ImportError, RuntimeError) as error:
        from sfumato.config.versions import describe_broken_package  # not at the top: `sfumato --help` is quick

        if not (broken_package := describe_broken_package(error)):
            raise
        print(printable(f"error: {broken_package}"), file=sys.stderr)
        return UserError.exit_code


def build_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = argparse.ArgumentParser("sfumato", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"sfumato {sfumato.__version__}")
    parser.set_defaults(takes_overrides=False)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(commands)
    for subparser in commands.choices.values():
        subparser.set_defaults(own_options=[*subparser._option_string_actions])
    return parser


def _find_misspelt_option(rest: Sequence[str], own_options: Sequence[str]) -> tuple[str, str] | None:
    """An argument that is nearly an option of the command, and that option; fields of a configuration have dots."""
    for argument in rest:
        name = argument.partition("=")[0]
        if name.startswith("--") and "." not in name:
            near = difflib.get_close_matches(name, own_options, n=1, cutoff=0.75)
            if near:
                return name, near[0]
    return None


if __name__ == "__main__":
    sys.exit(main())
