"""``sfumato chat``: a language model in the terminal."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.commands.generation_options import (
    add_text_sampling,
    check_line,
    generation_options,
    parse_natural,
    read_any_bytes,
    say,
)
from sfumato.commands.options import add_trust
from sfumato.config.characters import printable
from sfumato.config.trust import code_of_configurations
from sfumato.errors import ConfigError, UserError

if TYPE_CHECKING:
    from sfumato.commands.options import Commands
    from sfumato.evaluation.chat import ChatSession

HELP = """/image FILE  show the model an image with the next message
/undo        take the last message and its answer back
/reset       begin anew
/save FILE   write the conversation as a row of messages (JSONL)
/quit        end (also Ctrl-D); Ctrl-C stops an answer
//...        a message that begins with /"""


def add_parser(commands: Commands) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "chat",
        help="talk with a language model of a run, a checkpoint or an export",
        description="Answers what you type, with the chat template of the model and the settings of its "
        "generation_config.json. Lines from a pipe are answered one by one, an answer a line.",
        epilog=f"While it runs:\n{HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("model", metavar="MODEL", help="run folder, checkpoints/global_step_N, or a folder of weights")
    parser.add_argument("--seed", type=parse_natural)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="of folders of weights (fp32 on CPUs, bf16 on GPUs)")
    parser.add_argument("--base", type=Path, metavar="FOLDER", help="the model that adapters belong to")
    add_text_sampling(parser)
    add_trust(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Talks until the end of the input; 0 then."""
    from sfumato.evaluation.sources import find_sources
    from sfumato.tracking.progress import quiet_libraries

    quiet_libraries()
    settings = generation_options(options)
    with code_of_configurations(options.trust_code):
        (source, *others) = find_sources([options.model], False, say)
        if others:
            raise ConfigError(f"{options.model} holds {1 + len(others)} checkpoints: name one of them")
        if source.is_diffusion:
            raise ConfigError(f"{options.model} draws pictures and does not talk: take `sfumato sample`")
        # torch is imported by these, once the folder is known to be a language model's
        from sfumato.evaluation.chat import ChatSession, prepare_chat
        from sfumato.evaluation.texts import text_models

        ((_, model),) = text_models([source], settings)
        prepare_chat(model, source, settings)
        conversation = ChatSession(model)
        say("before the first answer the engine compares itself with the model: seconds on a GPU, longer on a CPU")
        read_any_bytes()
        if not sys.stdin.isatty():
            return _answer_lines(conversation)
        say(f"{source.label}: {model.settings.describe()}. /help lists commands.")
        return _chat_in_terminal(conversation)


def _chat_in_terminal(conversation: ChatSession) -> int:
    """Reads from a terminal."""
    import contextlib

    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (input() then has a history)
    images: list[Path] = []
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print("\n/quit or Ctrl-D ends")
            continue
        if not line.strip():
            continue
        try:
            if _is_command(line):
                if not _obey(line, conversation, images):
                    return 0
                continue
            answer = conversation.say(check_line(line).removeprefix("/"), images, _show)  # of two slashes one is left
        except UserError as error:
            print(printable(f"error: {error}"), file=sys.stderr)
            continue
        images.clear()
        notes = {"length": "[cut at the limit of tokens]", "interrupted": "[stopped]"}
        print(f" {notes[answer.ending]}" if answer.ending in notes else "")
        if not answer.text.strip():
            print("[an empty answer: this turn is forgotten]")


def _answer_lines(conversation: ChatSession) -> int:
    """Answers each line of a pipe by one line, in which line breaks are written as ``\\n``."""
    images: list[Path] = []
    for line in sys.stdin:
        line = line.rstrip("\n")
        if not line.strip():
            continue
        if _is_command(line):
            if not _obey(line, conversation, images):
                return 0
            continue
        answer = conversation.say(check_line(line).removeprefix("/"), images, lambda text: None)
        if answer.ending == "interrupted":
            return 130
        images.clear()
        print(printable(answer.text).replace("\n", "\\n"), flush=True)
    return 0


def _is_command(line: str) -> bool:
    return line.startswith("/") and not line.startswith("//")


def _obey(line: str, conversation: ChatSession, images: list[Path]) -> bool:
    """Does what a line that begins with ``/`` says. Returns whether the conversation goes on.

    Raises:
        UserError: when there is no such command, or it cannot be done.
    """
    command, _, rest = line.strip().partition(" ")
    argument = rest.strip()
    if command in ("/image", "/save") and not argument:
        raise ConfigError(f"{command} needs a file: {command} FILE")
    if command == "/quit":
        return False
    if command == "/help":
        say(HELP)
    elif command == "/reset":
        conversation.reset()
        images.clear()
        say("begun anew")
    elif command == "/undo":
        say("taken back" if conversation.undo() else "there is nothing to take back")
    elif command == "/image":
        path = Path(argument).expanduser()
        if not path.is_file():
            raise ConfigError(f"{path} is no file")
        images.append(path)
        say(f"with the next message: {', '.join(map(str, images))}")
    elif command == "/save":
        conversation.save(Path(argument).expanduser())
        say(f"written: {argument}")
    else:
        raise ConfigError(f"there is no {command}: /help lists commands; a message may begin with //")
    return True


def _show(text: str) -> None:
    """Shows a piece of an answer; what a terminal would act on stands by its number."""
    print(printable(text), end="", flush=True)
