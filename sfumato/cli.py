"""The command line: ``sfumato check | preprocess | doctor | export | report``. Training starts with ``train.sh``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import sfumato
from sfumato.config.characters import printable
from sfumato.config.trust import SWITCH, code_of_configurations
from sfumato.errors import DataError, UserError
from sfumato.kernels import choose_kernels


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit code; a user's mistake prints its message and gives 2."""
    parser = build_parser()
    options, rest = parser.parse_known_args(arguments)
    # only these two read a configuration, whose fields the rest may override
    if rest and options.run not in (_run_check, _run_preprocess):
        parser.error(f"unexpected arguments: {' '.join(rest)}")
    options.overrides = rest
    # before a command imports torch: MKL reads the environment when it computes for the first time
    choose_kernels()
    try:
        return options.run(options)
    except UserError as error:
        print(printable(f"error: {error}"), file=sys.stderr)
        return error.exit_code


def build_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = argparse.ArgumentParser("sfumato", description=__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"sfumato {sfumato.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    check = commands.add_parser(
        "check",
        help="validate a configuration and its data, predict memory and steps",
        description="Reads a configuration and some of its data, builds the model without memory, and predicts "
        "parameters, memory of each process and steps. Exit code: 0 fits, 1 does not fit, 2 something is wrong.",
        epilog="Any other --section.field VALUE overrides the file, as for a task.",
        allow_abbrev=False,
    )
    check.add_argument("config", help="YAML file of a task")
    check.add_argument("--task", help="task that it is for, such as train_text; found out if not given")
    check.add_argument("--ranks", type=_parse_positive, help="processes (default: WORLD_SIZE, or the fewest possible)")
    check.add_argument(
        "--device-memory", type=_parse_memory, metavar="GIB", help="memory of one GPU (default: of this one)"
    )
    check.add_argument(
        "--host-memory", type=_parse_memory, metavar="GIB", help="CPU memory of one machine (default: of this one)"
    )
    check.add_argument("--skip-data", action="store_true", help="do not look at the data")
    check.add_argument("--json", action="store_true", help="print the findings as JSON")
    _add_trust(check)
    check.set_defaults(run=_run_check)

    prepare = commands.add_parser(
        "preprocess",
        help="tokenise the data of a configuration, and open its media, before a run",
        description="Makes what a run on text makes before its first step: the tokens, and with data.cache_media what "
        "the model's processor makes of images, videos and audio. It needs no GPU and reads no weights.",
        epilog="Any other --section.field VALUE overrides the file, as for a task.",
        allow_abbrev=False,
    )
    prepare.add_argument("config", help="YAML file of a task that trains on text")
    prepare.add_argument("--task", help="task that it is for, such as train_text; found out if not given")
    _add_trust(prepare)
    prepare.set_defaults(run=_run_preprocess)

    doctor = commands.add_parser("doctor", help="what is installed, and which devices and extras work")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    doctor.add_argument("--ray", action="store_true", help="also start Ray on this machine (10 s)")
    doctor.add_argument(
        "--folder", type=Path, metavar="DIR", help="also whether machines share a folder: call it on each of them"
    )
    doctor.set_defaults(run=_run_doctor)

    export = commands.add_parser("export", help="write the trained weights of a run or checkpoint for other programs")
    export.add_argument("source", type=Path, help="run folder (its newest checkpoint is taken) or checkpoint folder")
    export.add_argument("out", type=Path, help="folder to write, which must not exist")
    export.add_argument("--merge", action="store_true", help="add adapters to the weights they belong to")
    _add_trust(export)
    export.set_defaults(run=_run_export)

    report = commands.add_parser("report", help="write report.html of a run folder anew")
    report.add_argument("run_dir", type=Path, help="run folder")
    report.set_defaults(run=_run_report)
    return parser


def _add_trust(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        SWITCH,
        action="store_true",
        help="let the code run that the configuration names: modules, functions, Python files of a model's folder",
    )


def _parse_positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive whole number")
    return int(text)


def _parse_memory(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GiB above 0")
    return size


def _run_check(options: argparse.Namespace) -> int:
    # commands import what they need themselves: the others, and --help, stay quick
    from sfumato.commands.find_task import load_for_task
    from sfumato.config.load import parse_overrides

    overrides = parse_overrides(options.overrides)
    with code_of_configurations(options.trust_code):
        load_for_task(options.config, overrides, options.task, options.ranks)  # before the slow imports
    # torch and transformers are imported here, so that a mistake in the file was named without waiting for them
    from rich.console import Console

    from sfumato.commands.check import check_config
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


def _run_preprocess(options: argparse.Namespace) -> int:
    from sfumato.config.load import parse_overrides

    overrides = parse_overrides(options.overrides)
    from sfumato.commands.preprocess import preprocess

    with code_of_configurations(options.trust_code):
        preprocess(options.config, overrides, options.task)
    return 0


def _run_doctor(options: argparse.Namespace) -> int:
    from sfumato.commands.doctor import run_doctor

    return run_doctor(as_json=options.json, start_ray=options.ray, folder=options.folder)


def _run_export(options: argparse.Namespace) -> int:
    from sfumato.commands.export import export_checkpoint

    with code_of_configurations(options.trust_code):
        print(printable(export_checkpoint(options.source, options.out, options.merge)))
    return 0


def _run_report(options: argparse.Namespace) -> int:
    from sfumato.tracking.report import write_report

    if not (options.run_dir / "config.yaml").is_file():
        raise DataError(f"{options.run_dir} is no run folder: it has no config.yaml")
    write_report(options.run_dir)
    print(f"written: {options.run_dir / 'report.html'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
