"""Tasks of environments of the package verifiers (0.4 and newer), each of which is an installed package."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar

from sfumato.config.open_mappings import JsonObject
from sfumato.config.text_rl_data import TextPromptDataConfig
from sfumato.config.trust import refuse_code
from sfumato.data.files.row_table import RowTable
from sfumato.data.text.prompt_formats.base import PromptFormat, PromptRow
from sfumato.errors import ConfigError, DataError, MissingDependencyError

KEY = "verifiers"
"""Column of the metadata that says which task of which environment a prompt is."""


@dataclass(frozen=True)
class VerifiersTasks(PromptFormat):
    """Tasks of an environment of verifiers, for rollout.kind verifiers; some are held out for evaluation."""

    type: ClassVar[str] = "verifiers"
    makes_rows: ClassVar[bool] = True

    environment: str
    """Name of the installed package that holds the tasks (its taskset id)."""
    config: JsonObject = field(default_factory=dict)
    """Further settings of the environment, as its `env` section has them, such as `{taskset: {num_tasks: 100}}`.
    Without others the agent is verifiers' own chat program (`null`) in a process of this machine."""
    num_eval: int = 64
    """Tasks that are held out for evaluation: the first."""

    def open(self, config: TextPromptDataConfig, split: str, seed: int) -> RowTable:
        del config, seed
        settings = json.dumps(self.config, sort_keys=True)
        tasks = load_tasks(self.environment, settings)
        numbers = range(self.num_eval) if split == "eval" else range(self.num_eval, len(tasks))
        if not 0 < self.num_eval < len(tasks):
            raise DataError(
                f"data.data_type.num_eval is {self.num_eval}, but environment {self.environment} has {len(tasks)} "
                "tasks: some must be left for training and for evaluation"
            )
        return _TaskRows(self.environment, self.config, tasks, numbers)

    def read(self, row: JsonObject, where: str) -> PromptRow:
        del where
        return PromptRow(row["prompt"], {KEY: row[KEY]})


@dataclass(frozen=True)
class _TaskRows:
    """A part of an environment's tasks as a table of rows."""

    environment: str
    config: JsonObject
    tasks: list[Any]
    numbers: range

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> JsonObject:
        number = self.numbers[index]
        task_key = {"environment": self.environment, "config": self.config, "task": number}
        return {"prompt": self.tasks[number].data.prompt_text.strip() or f"task {number}", KEY: task_key}

    def describe(self, index: int) -> str:
        return f"environment {self.environment}, task {self.numbers[index]}"

    def fingerprint(self) -> str:
        return f"{self.environment} {json.dumps(self.config, sort_keys=True)} {self.numbers}"


@cache
def load_tasks(environment: str, config: str) -> list[Any]:
    """The tasks of an environment, loaded once. Arguments and errors as ``load_environment``."""
    return list(load_environment(environment, config).taskset)


def load_environment(environment: str, config: str) -> Any:
    """Loads an environment of verifiers, each once in a process.

    Args:
        environment: id of its taskset.
        config: further settings as a JSON text, which can be a key of the cache.

    Raises:
        MissingDependencyError: when verifiers is not installed.
        ConfigError: when there is no such environment, its tasks have no end, it tries episodes again, an agent would
            run elsewhere without the user's word, or settings are wrong.
    """
    refuse_code(f"environment {environment} of verifiers")
    return _load_environment(environment, config)


@cache
def _load_environment(environment: str, config: str) -> object:
    try:
        import verifiers.v1 as verifiers
    except ImportError as error:
        raise MissingDependencyError(
            f"environments of verifiers need the package verifiers, 0.4 or newer ({error}): pip install "
            "'verifiers>=0.4'"
        ) from error
    values = json.loads(config)
    values = {**values, "taskset": {**values.get("taskset", {}), "id": environment}}
    try:
        cls = verifiers.environment_class(environment, values.get("id", ""))
        if cls is verifiers.SingleAgentEnv:
            values["agent"] = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}} | values.get("agent", {})
        env = verifiers.load_environment(verifiers.resolve_env_config(values))
    except Exception as error:  # whatever the package of an environment raises
        raise ConfigError(
            f"cannot load environment {environment!r} of verifiers: {type(error).__name__}: {error}"
        ) from error
    agents = {name: settings for name, settings in env.config if isinstance(settings, verifiers.AgentConfig)}
    _check_agents(environment, values, env.config, agents)
    if not env.taskset.bounded:
        raise ConfigError(f"environment {environment!r} of verifiers has tasks without end, which cannot be held out")
    return env


def _check_agents(environment: str, values: JsonObject, config: Any, agents: dict[str, Any]) -> None:
    """Checks the settings of an environment's agents.

    Args:
        environment: id of its taskset.
        values: that the user has set.
        config: of the environment.
        agents: their settings by name, which are a part of ``config``.

    Raises:
        ConfigError: when failed episodes are tried again, or an agent would run elsewhere without the user's word.
    """
    for name, settings in {"retries": config, **{f"{name}.retries": agent for name, agent in agents.items()}}.items():
        if settings.retries.max_retries or any(rule.max_retries for rule in settings.retries.rules):
            raise ConfigError(
                f"environment {environment!r} of verifiers tries failed episodes again, and the tokens of the failed "
                f"try would be learned from with the reward of the next: set data.data_type.config.{name}: "
                "{max_retries: 0, rules: []}; a failed episode costs its sample"
            )
    for name, agent in agents.items():
        if agent.runtime.type == "prime" and "runtime" not in (values.get(name) or {}):
            raise ConfigError(
                f"agent {name!r} of environment {environment!r} of verifiers would run on machines of Prime Intellect, "
                f"verifiers' default: set data.data_type.config.{name}.runtime, {{type: subprocess}} for this machine"
            )
