"""``sfumato recipes``: what comes with sfumato, a sentence each."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING

from sfumato.commands.shipped_files import (
    RECIPES,
    config_files,
    recipes_of,
    summary_of_config,
    summary_of_script,
    task_files,
)
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from sfumato.commands.options import Commands


def add_parser(commands: Commands) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "recipes",
        help="list tasks, configurations and algorithm recipes",
        description="Lists the tasks, configurations and algorithm recipes that come with sfumato, a sentence each.",
        allow_abbrev=False,
    )
    parser.add_argument("word", nargs="?", help="only what has this in its name or sentence")
    parser.add_argument("--json", action="store_true", help="print them as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Prints them.

    Raises:
        ConfigError: when nothing has the word in it.
    """
    sections = {
        "tasks": {name: summary_of_script(path) for name, path in task_files().items()},
        "configurations": {name: summary_of_config(path) for name, path in config_files().items()},
    }
    sections |= {f"recipes of {task} (algorithm.recipe)": recipes_of(task) for task in RECIPES}
    word = (options.word or "").lower()
    shown = {
        title: {name: text for name, text in entries.items() if word in f"{name} {text}".lower()}
        for title, entries in sections.items()
    }
    if not any(shown.values()):
        raise ConfigError(f"nothing has {options.word!r} in its name or sentence: sfumato recipes lists everything")
    if options.json:
        print(json.dumps(shown, indent=2, ensure_ascii=False))
        return 0
    for title, entries in shown.items():
        if entries:
            print(f"{title}:")
            print("\n".join(f"  {name:<34} {text}" for name, text in entries.items()))
    print("sfumato new FOLDER --task TASK --config CONFIGURATION copies two of them to a folder of your own.")
    return 0
