"""``sfumato replay``: draws a saved sample of a run again, and says whether it is the same to the bit."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.commands.generation_options import parse_natural, say
from sfumato.commands.options import add_trust
from sfumato.config.characters import printable
from sfumato.config.trust import code_of_configurations

if TYPE_CHECKING:
    from sfumato.commands.options import Commands

DIFFERS = 1
"""Exit code of a sample that is not the same, or was drawn by other weights."""


def add_parser(commands: Commands) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "replay",
        help="draw a saved sample of a run again, and compare it to the bit",
        description="Draws a sample that a run has saved again, from its checkpoint, its prompt and its seed, and "
        "compares it with what samples.jsonl and its files hold: pictures, answers, tokens, log-probabilities, "
        "rewards. Exit code 0 when all of it is equal to the bit, 1 when something is not.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, metavar="RUN", help="run folder")
    parser.add_argument("--step", type=parse_natural, required=True, metavar="N", help="step of the sample")
    parser.add_argument("--sample", type=parse_natural, required=True, metavar="I", help="its sample_id")
    parser.add_argument(
        "--kind", choices=("eval", "train", "watched"), default="eval", help="kind of the sample (default: %(default)s)"
    )
    parser.add_argument("--no-rewards", action="store_true", help="do not score it again")
    parser.add_argument("--out", type=Path, metavar="DIR", help="keep the picture in this folder")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON")
    add_trust(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Draws and compares; 0 when everything is equal, else 1."""
    # torch is imported by these
    from sfumato.errors import ConfigError
    from sfumato.evaluation.options import GenerationOptions
    from sfumato.evaluation.recorded import choose_weights, find_recorded
    from sfumato.evaluation.replay import replay
    from sfumato.evaluation.sources import SourceRun
    from sfumato.tracking.progress import quiet_libraries

    quiet_libraries()
    if options.out is not None:
        try:
            options.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"--out {options.out}: cannot make the folder: {error.strerror}") from error
    with code_of_configurations(options.trust_code):
        recorded = find_recorded(SourceRun(options.folder), options.step, options.kind, options.sample)
        weights = choose_weights(recorded)
        say(f"{recorded}: drawn again by {weights.source.folder} ({weights.source.label})")
        settings = GenerationOptions(device=options.device, say=say)
        result = replay(recorded, weights, settings, not options.no_rewards, options.out)
    if options.json:
        print(json.dumps(result.as_json()))
    else:
        lines = [result.text, *(f"  {part.name}: {part.text}" for part in result.parts if part.is_equal), *result.notes]
        lines += [f"written: {result.file}"] if result.file else []
        print("\n".join(printable(line) for line in lines))
    return 0 if result.verdict == "identical" else DIFFERS
