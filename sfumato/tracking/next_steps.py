"""The commands that come next when a run has ended, with real paths, for a checkout and for an installed copy."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping
from pathlib import Path

import sfumato

CONFIG_ENDINGS = (".yaml", ".yml")


def rerun_command(**overrides: object) -> str:
    """The command that started this process, with other values of some fields; empty when it is no task of a run.

    Args:
        overrides: values by field, with two underscores for a point, such as ``train__max_steps``; None takes an
            override away.
    """
    if len(sys.argv) < 2 or not sys.argv[0].endswith(".py") or not sys.argv[1].endswith(CONFIG_ENDINGS):
        return ""
    task, config, *arguments = sys.argv
    names = {name.replace("__", "."): value for name, value in overrides.items()}
    words = [*launch_words(), _shorten(task), config, *_drop_overrides(arguments, names)]
    for name, value in names.items():
        if value is not None:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def resume_command() -> str:
    """The command that goes on with this run from its newest checkpoint; empty when this process runs no task."""
    return rerun_command(train__load_checkpoint_path="auto")


def fork_command(config: Path, output_dir: Path, steps: int | None) -> str:
    """The command that goes on from a run's end, with settings of one's own, as a run in another folder.

    Args:
        config: configuration of the run that it goes on from.
        output_dir: a free folder.
        steps: after which the new run ends; None leaves the configuration's.
    """
    if not rerun_command():
        return ""
    words = [*launch_words(), _shorten(sys.argv[0]), str(config), "--train.load_checkpoint_path", str(config.parent)]
    words += ["--train.output_dir", str(output_dir)]
    return shlex.join([*words, *([] if steps is None else ["--train.max_steps", str(steps)])])


TRY_COMMANDS = {
    **dict.fromkeys(
        ("train_dit", "train_dit_dpo", "rl_diffusion", "rl_diffusion_forward", "rl_diffusion_direct"), "sample"
    ),
    **dict.fromkeys(("train_text", "train_text_dpo", "train_text_kto", "rl_text"), "chat"),
}
"""The command that tries out what a task has trained."""


def finished_lines(output_dir: Path, task: str, total_steps: int, free_folder: Path) -> list[str]:
    """What people do with a finished run, a line each.

    Args:
        output_dir: the run folder.
        task: name of the run's task.
        total_steps: of the run.
        free_folder: a folder that does not exist.
    """
    folder = shlex.quote(str(output_dir))
    attempt = f"try it: sfumato {TRY_COMMANDS[task]} {folder}   " if task in TRY_COMMANDS else ""
    lines = [f"{attempt}compare: sfumato compare {folder} OTHER_RUN   export: sfumato export {folder} OUT"]
    if more := fork_command(output_dir / "config.yaml", free_folder, 2 * total_steps):
        lines.append(f"go on from its end, also with another --train.lr: {more}")
    return lines


def launch_words() -> list[str]:
    """The words in front of a task: of the checkout that this code is from, or of an installed copy."""
    root = Path(sfumato.__file__).parent.parent
    if (root / "train.sh").is_file() and (root / "tasks").is_dir():
        return ["bash", _shorten(str(root / "train.sh"))]
    return ["sfumato", "launch"]


def _shorten(path: str) -> str:
    """A path as it is from the working directory, where it lies in there."""
    absolute = Path(path).absolute()
    return str(absolute.relative_to(Path.cwd())) if absolute.is_relative_to(Path.cwd()) else path


def _drop_overrides(arguments: list[str], names: Mapping[str, object]) -> list[str]:
    """Overrides of a command line, ``--a.b VALUE`` or ``--a.b=VALUE``, but for those of some fields."""
    rest = list(arguments)
    words = []
    while rest:
        argument = rest.pop(0)
        has_value = "=" not in argument and argument.startswith("--") and bool(rest)
        part = [argument, rest.pop(0)] if has_value else [argument]
        if argument.removeprefix("--").partition("=")[0] not in names:
            words += part
    return words
