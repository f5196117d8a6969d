"""``sfumato playground``: a model that stays in memory and answers prompts, beside the one that training began with."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.commands.generation_options import add_generation, check_line, generation_options, read_any_bytes, say
from sfumato.config.characters import printable
from sfumato.config.trust import code_of_configurations

if TYPE_CHECKING:
    from sfumato.commands.options import Commands
    from sfumato.evaluation.playground import Playground, PlaygroundAnswer

MOST_LINE = 2**20
"""Characters of a question in JSON."""


def add_parser(commands: Commands) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "playground",
        help="load a checkpoint once, and answer one prompt after the other",
        description="Loads the model of a run, a checkpoint or an export once, and answers each line of standard "
        "input: with the newest weights, and beside them the model that the run started from. Ends with the input.",
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="run folder, checkpoints/global_step_N, or a folder of weights")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for pictures (default: playground-1, ...)")
    parser.add_argument("--no-base", action="store_true", help="without the model that the run started from")
    parser.add_argument(
        "--json", action="store_true", help="lines are JSON objects, as are the answers: the studio's way to ask"
    )
    add_generation(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Answers until the end of the input; 0 then."""
    from sfumato.errors import UserError
    from sfumato.evaluation.playground import Playground
    from sfumato.evaluation.samples_folder import choose_folder
    from sfumato.tracking.progress import quiet_libraries

    quiet_libraries()
    settings = generation_options(options)
    with code_of_configurations(options.trust_code):
        try:
            playground = Playground(options.model, settings)
        except UserError as error:
            if options.json:
                _print({"error": str(error)})
            raise
        read_any_bytes()
        if options.json:
            out = options.out or choose_folder(None, "playground")
            _print(
                {"checkpoints": [*playground.checkpoints], "has_base": playground.has_base, "memory": _measure_memory()}
            )
            return _answer_json(playground, sys.stdin, out)
        has_base = playground.has_base and not options.no_base
        say(f"{playground.source.folder} is loaded: a line is a prompt, Ctrl-D ends; {_describe_memory()}")
        return _answer_lines(playground, options.out, has_base)


def _answer_lines(playground: Playground, out: Path | None, has_base: bool) -> int:
    from sfumato.errors import UserError
    from sfumato.evaluation.questions import Question
    from sfumato.evaluation.samples_folder import choose_folder

    folder: Path | None = None
    number = 0
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "")
        except EOFError:
            return 0
        except KeyboardInterrupt:
            print()
            return 130
        if not line.strip():
            continue
        number += 1
        try:
            for answer in playground.ask(Question(check_line(line), with_base=has_base)):
                has_file = answer.sample.image is not None or answer.sample.sound is not None
                if has_file and folder is None:
                    folder = choose_folder(out, "playground")
                shown = answer.sample.text if folder is None else _write(answer, folder, number)
                print(printable(f"{answer.label}: {shown or ''}{_note_lost_messages(answer)}"), flush=True)
        except UserError as error:
            print(printable(f"error: {error}"), file=sys.stderr)
        except KeyboardInterrupt:
            print("\nstopped; Ctrl-D ends")


def _answer_json(playground: Playground, lines: Iterable[str], out: Path) -> int:
    """Answers each question by lines of JSON with its ``id``, and then one with ``done``."""
    from sfumato.errors import UserError
    from sfumato.evaluation.questions import parse_question

    number = 0
    for line in lines:
        if not line.strip():
            continue
        number += 1
        identity: object = None
        try:
            value = _parse_object(line)
            identity = value.pop("id", None)
            for answer in playground.ask(parse_question(value)):
                _print({"id": identity, **_describe_answer(answer, out, number)})
        except (UserError, OSError, MemoryError, RuntimeError) as error:  # RuntimeError: a GPU without memory
            _print({"id": identity, "error": str(error) or type(error).__name__})
        _print({"id": identity, "done": True, "memory": _measure_memory()})
    return 0


def _parse_object(line: str) -> dict[str, object]:
    """A line of JSON. Raises ConfigError for anything but an object of bounded size."""
    from sfumato.errors import ConfigError
    from sfumato.serving.bounded_json import load_json

    if len(line) > MOST_LINE:
        raise ConfigError(f"a question has at most {MOST_LINE:,} characters")
    try:
        value = load_json(check_line(line).encode(), max_values=10_000, max_depth=10)
    except ValueError as error:
        raise ConfigError(f"a question must be one line of JSON: {str(error)[:200]}") from error
    if not isinstance(value, dict):
        raise ConfigError("a question must be an object of JSON")
    return value


def _describe_answer(answer: PlaygroundAnswer, out: Path, number: int) -> dict[str, object]:
    sample = answer.sample
    content: dict[str, object] = {"file": _write(answer, out, number)}
    if sample.text is not None:
        content = {"text": sample.text, "num_tokens": sample.num_tokens, "is_truncated": sample.is_truncated}
    return {
        "label": answer.label,
        "checkpoint": answer.step,
        **content,
        "damage": sample.damage,
        "settings": answer.settings,
        "seconds": round(answer.seconds, 2),
    }


def _write(answer: PlaygroundAnswer, folder: Path, number: int) -> str:
    """Writes the picture, the video as an animation, or the sound; returns its path. Of a text nothing is written.

    The sound of a video is a file beside it, and so is the picture of a sound's spectrum.
    """
    from sfumato.config.writing import write_atomically
    from sfumato.evaluation.samples_folder import folder_name
    from sfumato.tracking.samples import FRAME_MS, write_picture
    from sfumato.tracking.waveforms import spectrum_picture

    path = folder / f"{number:04d}_{folder_name(answer.label)}.png"  # a label may have dots, too
    image = answer.sample.image
    sound = answer.sample.sound
    frame_rate = answer.sample.frame_rate
    if sound is not None:
        write_atomically(path.with_suffix(".wav"), sound.wav())
        if image is None:
            write_picture(spectrum_picture(sound), path)
            return str(path.with_suffix(".wav").absolute())
    if image is None:
        return ""
    if image.ndim == 4:
        path = path.with_suffix(".webp")
    write_picture(image, path, round(1000 / frame_rate) if frame_rate else FRAME_MS)
    return str(path.absolute())


def _note_lost_messages(answer: PlaygroundAnswer) -> str:
    notes = [answer.sample.damage] if answer.sample.damage else []
    notes += ["cut at the limit of tokens"] if answer.sample.is_truncated else []
    return f" [{'; '.join(notes)}]" if notes else ""


def _measure_memory() -> dict[str, int]:
    """MiB that this process takes: of the machine's memory, and of a GPU's."""
    from sfumato.tracking.meters import memory_in_use

    usage = memory_in_use()
    process = usage.get("memory/process_mib", usage["memory/process_peak_mib"])
    gpu = {"gpu_mib": round(usage["memory/gpu_reserved_mib"])} if "memory/gpu_reserved_mib" in usage else {}
    return {"process_mib": round(process), **gpu}


def _describe_memory() -> str:
    memory = _measure_memory()
    gpu = f", and {memory['gpu_mib']:,} MiB of the GPU's" if "gpu_mib" in memory else ""
    return f"it takes {memory['process_mib']:,} MiB of memory{gpu}"


def _print(value: dict[str, object]) -> None:
    """One line for a program. Texts keep no bare surrogates, which cannot be sent."""
    print(json.dumps(value), flush=True)
