"""The options of commands that draw samples, and what they say. Nothing heavy is imported at the top."""

from __future__ import annotations

import argparse
import codecs
import io
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.commands.options import add_trust, parse_positive
from sfumato.config.characters import printable

if TYPE_CHECKING:
    from sfumato.evaluation.generate import PromptChoice
    from sfumato.evaluation.options import GenerationOptions


def parse_number(text: str) -> float:
    """A finite number of at least 0; argparse says so otherwise."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of at least 0")
    return number


def parse_natural(text: str) -> int:
    """A whole number of at least 0; argparse says so otherwise."""
    if not text.isdigit() or int(text) >= 2**63:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 to 2^63 - 1")
    return int(text)


def read_any_bytes() -> None:
    """Has standard input give bytes that are no text as halves of surrogate pairs, which ``check_line`` refuses.

    Reading itself would end with an error of Python, and lose the lines before, since it decodes many at once. Where
    the environment names no language, Python takes ASCII, which is a part of UTF-8.
    """
    if isinstance(sys.stdin, io.TextIOWrapper):
        is_ascii = codecs.lookup(sys.stdin.encoding).name == "ascii"
        sys.stdin.reconfigure(encoding="utf-8" if is_ascii else None, errors="surrogateescape")


def check_line(line: str) -> str:
    """A line of standard input. Raises ConfigError for one that is no text in its encoding."""
    from sfumato.errors import ConfigError

    try:
        line.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"standard input has a line that is not text in UTF-8: {line.strip()[:40]!r}: save it as UTF-8"
        ) from error
    return line


def add_prompts(parser: argparse.ArgumentParser) -> None:
    """Which prompts are taken."""
    group = parser.add_argument_group("prompts (default: those of the run's evaluation)")
    group.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; may be repeated")
    group.add_argument("--prompts", metavar="FILE", help=".txt with one a line, .jsonl, .parquet, ...")
    group.add_argument("--prompt-key", metavar="COLUMN", help="column of the prompt in that file (prompt)")
    group.add_argument(
        "--image",
        action="append",
        default=[],
        type=Path,
        metavar="FILE",
        help="image of --prompt: edited, or seen; of a single prompt perhaps several",
    )
    group.add_argument("--num-prompts", type=parse_positive, metavar="N", help="the first N prompts only")


def add_generation(parser: argparse.ArgumentParser) -> None:
    """How samples are drawn."""
    group = parser.add_argument_group("sampling (default: as the run evaluates, else as the model's folder says)")
    group.add_argument("--seed", type=parse_natural, help="of the first sample of each prompt")
    group.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    group.add_argument("--dtype", choices=("fp32", "bf16"), help="of folders of weights (fp32 on CPUs, bf16 on GPUs)")
    group.add_argument("--base", type=Path, metavar="FOLDER", help="the model that adapters belong to")
    group.add_argument("--batch-size", type=parse_positive, metavar="N", help="pictures that are drawn together")
    pictures = parser.add_argument_group("pictures, videos and sounds")
    pictures.add_argument("--height", type=parse_positive, metavar="PIXELS")
    pictures.add_argument("--width", type=parse_positive, metavar="PIXELS")
    pictures.add_argument("--num-frames", type=parse_positive, metavar="N")
    pictures.add_argument("--seconds", type=parse_number, metavar="S", help="length of a sound")
    pictures.add_argument("--steps", type=parse_positive, metavar="N", help="denoising steps")
    pictures.add_argument("--guidance-scale", type=parse_number, metavar="G", help="1 is none")
    pictures.add_argument("--max-sequence-length", type=parse_positive, metavar="N", help="tokens of a prompt")
    add_text_sampling(parser)
    add_trust(parser)


def add_text_sampling(parser: argparse.ArgumentParser) -> None:
    """How texts are drawn."""
    texts = parser.add_argument_group("texts")
    texts.add_argument("--max-new-tokens", type=parse_positive, metavar="N")
    texts.add_argument("--temperature", type=parse_number, metavar="T", help="0 takes the likeliest token each time")
    texts.add_argument("--top-p", type=parse_number, metavar="P")
    texts.add_argument("--top-k", type=parse_natural, metavar="K", help="0 leaves out none")
    texts.add_argument("--system-prompt", metavar="TEXT")
    texts.add_argument("--chat-template", metavar="NAME", help="chatml, a Jinja file, or none")


def prompt_choice(options: argparse.Namespace) -> PromptChoice:
    """The prompts of the command line. Raises ConfigError for options that exclude each other."""
    from sfumato.errors import ConfigError
    from sfumato.evaluation.generate import PromptChoice

    if options.prompts is not None and (options.prompt or options.image):
        raise ConfigError("--prompts reads prompts, and their images, from a file: leave --prompt and --image out")
    if options.image and not options.prompt:
        raise ConfigError("--image is for --prompt TEXT: give both")
    return PromptChoice(
        tuple(options.prompt), tuple(options.image), options.prompts, options.prompt_key, options.num_prompts
    )


def generation_options(options: argparse.Namespace) -> GenerationOptions:
    """The settings of the command line."""
    from sfumato.errors import ConfigError
    from sfumato.evaluation.options import OF_FOLDERS, OF_PICTURES, OF_TEXTS, OPTION_OF, GenerationOptions

    top_p = options.top_p
    if top_p is not None and not 0 < top_p <= 1:
        raise ConfigError(f"--top-p {top_p:g} must be above 0 and at most 1")
    names = (*OF_PICTURES, *OF_TEXTS, *OF_FOLDERS)  # of which a command has some
    given = {name: getattr(options, OPTION_OF.get(name, name), None) for name in names}
    return GenerationOptions(
        seed=options.seed,
        device=options.device,
        base=options.base,
        from_images=bool(getattr(options, "image", [])),
        say=say,
        **given,
    )


def say(text: str) -> None:
    """A line for the person who watches; results go to the other stream."""
    print(printable(text), file=sys.stderr, flush=True)
