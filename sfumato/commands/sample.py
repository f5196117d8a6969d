"""``sfumato sample``: what models draw or answer, beside each other, as files and a page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.commands.generation_options import (
    add_generation,
    add_prompts,
    generation_options,
    prompt_choice,
    say,
)
from sfumato.commands.options import parse_positive
from sfumato.config.characters import printable
from sfumato.config.trust import code_of_configurations

if TYPE_CHECKING:
    from sfumato.commands.options import Commands


def add_parser(commands: Commands) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "sample",
        help="draw pictures, videos or answers of a run, a checkpoint or an export",
        description="Draws samples of one or several models for the same prompts and seeds, and writes them as files "
        "with a page that opens offline. The model that a run started from stands beside it.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "models",
        nargs="+",
        metavar="MODEL",
        help="run folder, checkpoints/global_step_N, checkpoints (all of them), or a folder of weights",
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder to write (default: samples-1, samples-2, ...)")
    parser.add_argument("--samples", type=parse_positive, default=1, metavar="N", help="of each prompt and model (1)")
    parser.add_argument("--no-base", action="store_true", help="without the model that the run started from")
    add_prompts(parser)
    add_generation(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Draws and writes; 0 when everything is written, 130 after Ctrl-C with what was finished until then."""
    # torch is imported by these
    from sfumato.evaluation.generate import draw_samples
    from sfumato.evaluation.samples_folder import SamplesFolder, choose_folder
    from sfumato.evaluation.sources import find_sources
    from sfumato.tracking.progress import quiet_libraries

    quiet_libraries()
    prompts = prompt_choice(options)
    settings = generation_options(options)
    with code_of_configurations(options.trust_code):
        sources = find_sources(options.models, not options.no_base, say)
        written: SamplesFolder | None = None
        notes: list[str] = []
        interrupted = False
        last_text = ""
        try:
            for drawn in draw_samples(sources, prompts, settings, options.samples):
                if written is None:  # nothing is made for a command that draws nothing
                    written = SamplesFolder(choose_folder(options.out, "samples"))
                    say(drawn.settings)
                    notes.append(drawn.settings)
                for named in drawn.samples:
                    written.add(named)
                    last_text = named.sample.text or ""
                    if named.sample.damage:
                        say(f"{named.model}, prompt {named.prompt_id}, seed {named.seed}: {named.sample.damage}")
                if drawn.is_last:
                    notes.append(f"{drawn.source.label}: {drawn.source.folder}")
                    say(f"{drawn.source.label}: done, {len(written)} samples in all")
        except KeyboardInterrupt:
            if written is None:
                raise
            interrupted = True
            notes.append("interrupted: samples are missing")
            say(f"interrupted: {len(written)} samples are written")
    assert written is not None
    if len(written) == 1 and last_text:
        print(printable(last_text))
    if written.left_out:
        say(written.left_out)
        notes.append(written.left_out)
    page = written.write_page(notes)
    print(f"written: {page}")
    return 130 if interrupted else 0
