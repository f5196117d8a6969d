"""Which task a configuration file is for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from sfumato.config.environment import environment_with
from sfumato.config.load import load_config
from sfumato.config.tasks import TASKS, schema_of
from sfumato.config.yaml_text import read_yaml
from sfumato.errors import ConfigError, suggest

if TYPE_CHECKING:
    from sfumato.config.tasks import TaskConfig


def load_for_task(
    path: str | Path, overrides: dict[str, object], task: str | None = None, num_ranks: int | None = None
) -> tuple[str, TaskConfig]:
    """Reads a configuration with the schema of its task.

    Args:
        path: the YAML file.
        overrides: laid over it.
        task: a name in ``TASKS``; None takes the first task without a mistake.
        num_ranks: processes that it must fit; None takes WORLD_SIZE, or one.

    Returns:
        The task's name, and the configuration.

    Raises:
        ConfigError: when no task fits: the mistakes for the one with the fewest, if the file is not named as another's.
    """
    if task is not None and task not in TASKS:
        raise ConfigError(f"--task {task}: there is no such task{suggest(task, list(TASKS))}")
    read_yaml(path)  # what is wrong with the file itself is wrong for every task
    mistakes: dict[str, ConfigError] = {}
    with environment_with({} if num_ranks is None else {"WORLD_SIZE": str(num_ranks)}):
        for name in TASKS if task is None else [task]:
            try:
                return name, cast("TaskConfig", load_config(schema_of(name), path, overrides))
            except ConfigError as error:
                mistakes[name] = error
    texts = {name: str(error) for name, error in mistakes.items()}
    # a file that names another task as its own ("run tasks/...") is not for this one, however few its mistakes
    best = min(texts, key=lambda name: (": run tasks/" in texts[name], len(texts[name].splitlines())))
    raise ConfigError(f"as a configuration of tasks/{best}.py:\n{mistakes[best]}") from mistakes[best]
