"""``python -m tests.mutation map`` and ``python -m tests.mutation run``; ``--help`` says what they take."""

from __future__ import annotations

import argparse
import os

from tests.mutation.campaign import MAP, ROOT, choose, make_map, plan, run, table


def build_parser() -> argparse.ArgumentParser:
    """What the command line may hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutation", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    mapping = commands.add_parser("map", help="which test runs which line; further arguments are pytest's")
    mapping.add_argument("--add", action="store_true", help="to what is known of the same code already")
    running = commands.add_parser("run", help="breaks lines and runs the tests that reach them")
    running.add_argument("--count", type=int, default=240, help="how many mutants")
    running.add_argument("--seed", type=int, default=0, help="which ones")
    running.add_argument("--only", default="", help="part of path:line:, such as runtime/stream.py or stream.py:344:")
    running.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many at once")
    running.add_argument("--budget", type=float, default=300.0, help="seconds of tests for each mutant")
    running.add_argument("--list", action="store_true", help="only list them")
    return parser


def main() -> int:
    parser = build_parser()
    options, others = parser.parse_known_args()
    if options.command == "map":
        return make_map(others, options.add)
    if others:
        parser.error(f"unknown: {' '.join(others)}")
    mutants = choose(options.count, options.seed, options.only)
    if options.list:
        print("\n".join(f"{mutant.path}:{mutant.line}: {mutant.change}" for mutant in mutants))
        return 0
    if not MAP.exists():
        parser.error(f"{MAP.relative_to(ROOT)} is missing: run python -m tests.mutation map first")
    trials = run(plan(mutants, options.budget), options.jobs)
    print(table(trials))
    return int(any(trial.outcome in ("passed", "not reached") for trial in trials))


if __name__ == "__main__":
    raise SystemExit(main())
