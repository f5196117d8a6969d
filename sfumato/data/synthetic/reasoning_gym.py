"""Rows of problems that reasoning-gym makes, by the name of a task; the reward ``reasoning_gym`` can score them."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Mapping

from sfumato.errors import ConfigError, MissingDependencyError

HASHED = (
    "isomorphic_strings",
    "knight_swap",
    "list_functions",
    "polynomial_multiplication",
    "ransom_note",
    "word_ladder",
)
"""Tasks whose problems follow from hashes of texts, too (version 0.1.25): Python makes others in each process."""


def load(task: str, size: int, seed: int, parameters: Mapping[str, object] | None = None) -> list[dict[str, object]]:
    """Makes the problems of a task: the same ones for the same arguments and version of reasoning-gym.

    Args:
        task: name in reasoning-gym, such as ``basic_arithmetic``.
        size: how many.
        seed: of the problems; another one gives others.
        parameters: fields of the task's configuration, such as ``{"max_digits": 2}``; JSON.

    Returns:
        Rows with the texts ``question`` and ``answer`` (a correct answer; others may be correct, too), and with
        ``metadata``, from which the reward ``reasoning_gym`` makes the problem again.

    Raises:
        MissingDependencyError: reasoning-gym is not installed.
        ConfigError: there is no such task, it has no such parameters, they are refused, or processes would make other
            problems.
    """
    if task in HASHED and sys.flags.hash_randomization:
        raise ConfigError(
            f"each process would make other problems of task {task!r} of reasoning-gym, which follow from hashes of "
            "texts: export PYTHONHASHSEED=0 before the run"
        )
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ImportError as error:
        raise MissingDependencyError(
            f"problems of reasoning-gym need a package that is missing ({error}): pip install 'sfumato[environments]'"
        ) from error
    settings = dict(parameters or {})
    if task not in DATASETS:
        close = difflib.get_close_matches(task, DATASETS, 3)
        hint = f"did you mean {', '.join(close)}?" if close else f"known are {', '.join(sorted(DATASETS))}"
        raise ConfigError(f"reasoning-gym has no task {task!r}; {hint}")
    names = {field.name for field in dataclasses.fields(DATASETS[task][1])} - {"size", "seed"}
    if unknown := set(settings) - names:
        raise ConfigError(
            f"task {task!r} of reasoning-gym has no parameter {min(unknown)!r}: it has {', '.join(sorted(names))}"
        )
    if size < 1:
        raise ConfigError(f"size of task {task!r} must be at least 1, not {size}")
    try:
        problems = create_dataset(task, size=size, seed=seed, **settings)
        entries = [problems[index] for index in range(size)]
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(
            f"task {task!r} of reasoning-gym refuses {settings or 'its size and seed'}: {error}"
        ) from error
    task_metadata = {"task": task, "size": size, "seed": seed, "parameters": settings}
    return [
        {"question": entry["question"], "answer": str(entry["answer"]), "metadata": {**task_metadata, "index": index}}
        for index, entry in enumerate(entries)
    ]
