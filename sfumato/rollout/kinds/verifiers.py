"""Environments of the package verifiers as they are: their own agents, tools and rewards."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from sfumato.config.open_mappings import JsonObject
from sfumato.data.text.prompt_formats.verifiers import KEY, load_environment, load_tasks
from sfumato.data.text.prompts import TextPrompt
from sfumato.errors import ConfigError
from sfumato.rollout.agents.openai_endpoint import KEY_HEADER
from sfumato.rollout.kinds.agent import ChatAgent


class EpisodeError(Exception):
    """An episode that failed."""


@dataclass(frozen=True, kw_only=True)
class Verifiers(ChatAgent):
    """Runs the environment that data.data_type verifiers has taken the task from. Metadata for rewards:
    environment_reward, which is its own, and its rewards and metrics by name."""

    type: ClassVar[str] = "verifiers"

    async def run(self, prompt: TextPrompt, base_url: str, api_key: str, model: str) -> JsonObject:
        import verifiers.v1 as verifiers

        task = cast("JsonObject | None", prompt.metadata.get(KEY))
        if task is None:
            raise ConfigError("rollout.kind verifiers plays the tasks of data.data_type verifiers: set it, too")
        config_json = json.dumps(task["config"], sort_keys=True)
        # A copy for each sample: while an environment serves, it holds the state of that.
        environment = copy.copy(load_environment(task["environment"], config_json))
        client = verifiers.EvalClientConfig(
            base_url=base_url, api_key_var="SFUMATO_POLICY_KEY", headers={KEY_HEADER: api_key}
        )
        context = verifiers.ModelContext(model=model, client=client)
        slot = environment.slots(load_tasks(task["environment"], config_json)[task["task"]])[0]
        async with environment.serving():
            episode = await environment.run_slot(slot, context)
        return _read_outcome(episode)


def _read_outcome(episode: Any) -> JsonObject:
    """Reward, rewards and metrics of an episode. Raises EpisodeError when it failed or had several agents."""
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        why = f"{errors[-1].type}: {errors[-1].message}" if errors else "for no stated reason"
        raise EpisodeError(f"the episode failed: {why[:500]}")
    if len(episode.traces) != 1:
        raise EpisodeError(f"{len(episode.traces)} agents took part, whose rewards are no single one")
    (trace,) = episode.traces
    rewards = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
    metrics = {name: value for name, value in trace.metrics.items() if value is not None}
    return {**metrics, **rewards, "reward": trace.reward}
