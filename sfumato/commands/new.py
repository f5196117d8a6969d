"""``sfumato new``: a task's script and a configuration, copied into a folder that is the user's to edit."""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.commands.shipped_files import (
    config_files,
    find_config,
    summary_of_config,
    summary_of_script,
    task_files,
    task_of_config,
)
from sfumato.config.characters import printable
from sfumato.config.shipped import shipped_folder
from sfumato.config.writing import open_new
from sfumato.errors import ConfigError, DataError

if TYPE_CHECKING:
    from sfumato.commands.options import Commands

NAMED_FILE = re.compile(r"(?:configs|docs/examples)/[\w./-]+\.(?:yaml|py)")
"""A file that comes with sfumato, named in a configuration."""

MAKER = re.compile(r'importlib\.import_module\("(\w+)"\)')
"""The task beside a script whose ``main`` makes what a configuration's ``made_by`` describes."""

COMMAND = re.compile(r"(?:PYTHONPATH=\S+ )?bash train\.sh tasks/(\w+)\.py")

README = """# {name}

{task}: {task_summary}.
{config}: {config_summary}.

```
sfumato check {config_path} --task {task}
sfumato launch {script} {config_path}
pytest {folder}
```

- `{task}.py` is the whole training, from top to bottom. It is yours: change it.
- `config.yaml` holds its settings; `--section.field VALUE` after it overrides one, `sfumato launch {script}
  --help` lists them all. Relative paths of data and of runs start where you call.
- `test_{task}.py` runs the script for two steps on the small model of `tiny.yaml`, on a CPU.
- Python files in this folder can be named in `config.yaml`: `type: my_rewards:MyReward`.
"""

TEST = '''"""Runs {task}.py for two steps on the small model of tiny.yaml, on the CPU."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parent


def test_two_steps_run(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sfumato.cli", "launch", FOLDER / "{task}.py", FOLDER / "tiny.yaml"]
    options = ["--train.output_dir", tmp_path / "run", "--train.device", "cpu"]
    environment = {{**os.environ, "NPROC_PER_NODE": "1"}}
    done = subprocess.run([*command, *options], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert steps[-1]["step"] == 2
    numbers = [value for step in steps for value in step.values() if isinstance(value, float)]
    assert numbers and all(math.isfinite(number) for number in numbers)
    assert any((tmp_path / "run" / "hf_ckpt").iterdir())
'''


def add_parser(commands: Commands) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "new",
        help="copy a task and a configuration into a folder of your own",
        description="Copies a task's script and a configuration, with the files that it names, into a folder that is "
        "yours to edit, beside a README and a test of two steps. sfumato recipes lists what there is.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=Path, help="folder to make, which must not exist")
    parser.add_argument("--task", help="such as rl_diffusion; that of the configuration if not given")
    parser.add_argument("--config", help="such as flow_grpo_sd35_ocr; the small one of the task's test if not given")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Makes the folder, and says what to type next."""
    task, config = choose(options.task, options.config)
    make_project(options.folder, task, config)
    files = sorted(path.name for path in options.folder.iterdir())
    print(printable(f"{options.folder.as_posix()}: {', '.join(files)}"))
    script, config_path = (_as_argument(options.folder / name) for name in (f"{task}.py", "config.yaml"))
    print(printable(f"sfumato launch {script} {config_path}"))
    return 0


def choose(task: str | None, config: str | None) -> tuple[str, Path]:
    """The task's name and the configuration's file, one of which may be left out.

    Raises:
        ConfigError: when there is none of that name, they do not fit each other, or both are left out.
    """
    tasks = task_files()
    name = None if task is None else task.removeprefix("tasks/").removesuffix(".py")
    if task is not None and name not in tasks:
        from sfumato.errors import suggest

        raise ConfigError(f"--task {task}: there is no such task{suggest(task, [*tasks])}")
    if config is None:
        if name is None:
            raise ConfigError("name --task, --config or both; sfumato recipes lists them")
        return name, config_files()[f"tiny/{name}"]
    path = find_config(config)
    fitting = task_of_config(path)
    if name not in (None, fitting):
        raise ConfigError(f"--task {task}: {config} is a configuration of {fitting}: --task {fitting}")
    return fitting, path


def make_project(folder: Path, task: str, config: Path) -> None:
    """Writes the project's files; on an error nothing stays.

    Args:
        folder: must not exist; folders above it are made.
        task: a name of ``task_files``.
        config: becomes ``config.yaml``.

    Raises:
        DataError: when the folder exists or cannot be made.
    """
    if folder.exists() or folder.is_symlink():
        raise DataError(f"{folder} exists: name a folder that does not, or remove it")
    texts = {"config.yaml": config.read_text(encoding="utf-8")}
    tiny = config_files()[f"tiny/{task}"]
    texts["tiny.yaml"] = tiny.read_text(encoding="utf-8")
    names = {_shipped_name(config): "config.yaml", _shipped_name(tiny): "tiny.yaml"}
    pending = list(texts.values())
    while pending:
        for named in NAMED_FILE.findall(pending.pop()):
            path = shipped_folder() / named
            if named in names or not path.is_file():
                continue
            names[named] = _free_name(path, set(names.values()))
            texts[names[named]] = path.read_text(encoding="utf-8")
            pending.append(texts[names[named]])
    scripts = {task: task_files()[task].read_text(encoding="utf-8")}
    if any("made_by:" in text for text in texts.values()):  # the script imports the one that makes the model
        for name in MAKER.findall(scripts[task]):
            scripts[name] = task_files()[name].read_text(encoding="utf-8")
    readme = README.format(
        name=folder.name,
        folder=_as_argument(folder),
        script=_as_argument(folder / f"{task}.py"),
        config_path=_as_argument(folder / "config.yaml"),
        task=task,
        task_summary=summary_of_script(task_files()[task]),
        config=config.stem,
        config_summary=summary_of_config(config) or "your configuration",
    )
    texts = {name: _rename(text, names, folder, task) for name, text in texts.items()}
    texts |= {f"{name}.py": _rename(script, names, folder, task) for name, script in scripts.items()}
    texts["README.md"] = readme
    texts[f"test_{task}.py"] = TEST.format(task=task)
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise DataError(f"{folder} cannot be made: {error.strerror}") from error
    try:
        for name, text in texts.items():
            with open_new(folder / name) as file:
                file.write(text.encode())
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise DataError(f"{folder} cannot be written: {error.strerror}") from error


def _shipped_name(path: Path) -> str:
    root = shipped_folder()
    return path.relative_to(root).as_posix() if path.is_relative_to(root) else path.as_posix()


def _free_name(path: Path, taken: set[str]) -> str:
    """The file's name, with its folder's before it where another file has it."""
    return path.name if path.name not in taken else f"{path.parent.name}_{path.name}"


def _as_argument(path: Path) -> str:
    """A path as a shell takes it for one word."""
    return shlex.quote(path.as_posix())


def _rename(text: str, names: dict[str, str], folder: Path, task: str) -> str:
    """A file's text with the names that its files have in the project, and with commands that start there."""

    def launch(match: re.Match[str]) -> str:
        script = _as_argument(folder / f"{task}.py") if match[1] == task else match[1]
        return f"sfumato launch {script}"

    lines = []
    for line in text.splitlines(keepends=True):
        is_command = "bash train.sh" in line
        for shipped, name in names.items():
            line = line.replace(shipped, _as_argument(folder / name) if is_command else name)
        lines.append(COMMAND.sub(launch, line))
    return "".join(lines)
