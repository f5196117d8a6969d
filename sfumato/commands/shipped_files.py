"""The tasks, configurations and algorithm recipes that come with sfumato, with a sentence each from the files."""

from __future__ import annotations

import ast
import difflib
import re
from pathlib import Path

from sfumato.config.shipped import shipped_folder
from sfumato.errors import ConfigError

RECIPES = {
    "rl_diffusion": ("recipes.py", "TRAJECTORY_RECIPES"),
    "rl_diffusion_forward": ("recipes.py", "FORWARD_RECIPES"),
    "rl_diffusion_direct": ("recipes.py", "DIRECT_RECIPES"),
    "rl_text": ("text_recipes.py", "TEXT_RECIPES"),
}
"""File in ``sfumato/config`` and name of the recipes of a task."""


def task_files() -> dict[str, Path]:
    """The scripts by the tasks' names."""
    return {path.stem: path for path in sorted((shipped_folder() / "tasks").glob("*.py"))}


def config_files() -> dict[str, Path]:
    """The configurations of tasks by their names, which are paths within ``configs`` without the ending.

    Descriptions of models, which lie beside them, are none.
    """
    root = shipped_folder() / "configs"
    paths = sorted(root.rglob("*.yaml"))
    return {
        path.relative_to(root).with_suffix("").as_posix(): path
        for path in paths
        if re.search(r"^train:", path.read_text(encoding="utf-8"), re.MULTILINE)
    }


def find_config(name: str) -> Path:
    """A configuration by its name, with or without its folder and ending.

    Raises:
        ConfigError: when there is none, or several of that name; the message says which is near, and where to look.
    """
    files = config_files()
    path = Path(name)
    plain = path.with_suffix("").as_posix() if path.suffix in (".yaml", ".yml") else name
    plain = plain.removeprefix("configs/")
    if plain in files:
        return files[plain]
    matching = [key for key in files if key.rpartition("/")[2] == plain]
    if len(matching) == 1:
        return files[matching[0]]
    if matching:
        raise ConfigError(f"--config {name}: there are several of that name: {', '.join(matching)}")
    near = difflib.get_close_matches(plain, {key.rpartition("/")[2] for key in files}, n=1, cutoff=0.5)
    meant = f"; did you mean {near[0]!r}?" if near else ""
    raise ConfigError(f"--config {name}: there is none of that name{meant} (`sfumato recipes` lists them)")


def summary_of_script(path: Path) -> str:
    """The first line of a script's docstring."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.partition("\n")[0].rstrip(".")


def summary_of_config(path: Path) -> str:
    """The first sentence of the comment at the head of a YAML file, without commands."""
    lines = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if not line.startswith("# ") or line.startswith("#  "):
            break
        lines.append(line[2:].strip())
    return first_sentence(" ".join(lines))


def first_sentence(text: str) -> str:
    """A text up to the end of its first sentence, or to a bracket with sources, whichever comes first."""
    sentence = re.split(r"(?<=[^.\s]{2})\.(?:\s|$)", text, maxsplit=1)[0]
    return re.split(r"\s*\((?=[^)]*(?:;|config|\.py))", sentence, maxsplit=1)[0].strip().rstrip(":;,.")


def recipes_of(task: str) -> dict[str, str]:
    """The recipes of a task's algorithm, with the comment above each."""
    if task not in RECIPES:
        return {}
    name, variable = RECIPES[task]
    text = (Path(__file__).parents[1] / "config" / name).read_text(encoding="utf-8")
    body = text[text.index(f"{variable}:") :]
    summaries: dict[str, str] = {}
    comment: list[str] = []
    for line in body.splitlines()[1:]:
        if line == "}":
            break
        if line.startswith("    # "):
            comment.append(line.strip("# "))
        elif match := re.match(r'    "(\w+)": ', line):
            summaries[match[1]] = " ".join(comment).partition("; ")[0].rstrip(".")
            comment = []
    return summaries


def task_of_config(path: Path) -> str:
    """The task that a configuration is for.

    Raises:
        ConfigError: when it fits none.
    """
    from sfumato.commands.find_task import load_for_task
    from sfumato.config.__main__ import defer

    defer("torch")
    task, _ = load_for_task(path, {})
    return task
