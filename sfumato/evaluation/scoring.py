"""Scores samples of several models with rewards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from sfumato.config.base import Section, Variant
from sfumato.config.load import load_config, parse_yaml
from sfumato.errors import ConfigError
from sfumato.evaluation.samples_folder import NamedSample
from sfumato.evaluation.sources import ModelSource
from sfumato.rewards.base import Reward
from sfumato.rewards.scoring.scorer import Scorer
from sfumato.rewards.scoring.scores import Scores

SCORED_AT_ONCE = 16
"""Samples of one call of a reward, more where a prompt has more; the time limits of rewards are for calls."""


class _Rewards(Section):
    """What is evaluated."""

    usage = "sfumato evaluate MODEL --reward TYPE"

    reward: list[Annotated[Any, Variant("sfumato.rewards")]] = Field(min_length=1)
    """Rewards."""


def choose_rewards(texts: Sequence[str], sources: Sequence[ModelSource]) -> list[Reward]:
    """The rewards of the command line, or those of the first run that has some.

    Args:
        texts: types, such as ``ocr``, mappings, such as ``{type: clip_score, model_path: clip}``, or import paths.
        sources: models.

    Raises:
        ConfigError: when one cannot be made, or there is none.
    """
    if texts:
        values = [parse_yaml(text, f"--reward {text}") for text in texts]
        rewards: list[Reward] = load_config(_Rewards, None, {"reward": values}).reward
        return rewards
    for source in sources:
        section = None if source.run is None else getattr(source.run.config, "reward", None)
        if section is not None:
            return list(section.rewards)
    raise ConfigError("nothing to evaluate: give --reward TYPE, --reference FOLDER or --tasks NAME")


class SampleScorer:
    """Scores the samples of one model after the other."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        """Loads the rewards' engines. Raises UserError when something is missing."""
        self.rewards = [replace(reward, evaluation_only=True, weight=1.0, normalise="none") for reward in rewards]
        self.scorer = Scorer(self.rewards, require_objective=False)
        self.scorer.prepare()

    def check_modality(self, draws_pictures: bool) -> None:
        """Raises ConfigError for a reward of another kind of samples."""
        kind = "image" if draws_pictures else "text"
        for reward in self.rewards:
            if reward.modality not in ("", kind):
                raise ConfigError(f"--reward {reward.label} scores samples of another kind ({reward.modality})")

    def score(self, samples: Sequence[NamedSample]) -> tuple[list[NamedSample], list[str]]:
        """The samples with their values, and lines about those that failed."""
        by_prompt: dict[int, list[int]] = {}
        for index, named in enumerate(samples):
            by_prompt.setdefault(named.prompt_id, []).append(index)
        scored: dict[int, Mapping[str, float]] = {}
        parts: list[Scores] = []
        call: list[int] = []
        groups = list(by_prompt.values())
        for number, group in enumerate(groups, 1):
            call += group
            if len(call) < SCORED_AT_ONCE and number < len(groups):
                continue
            scores = self.scorer.score([samples[index].sample for index in call])
            parts.append(scores)
            for row, index in enumerate(call):
                scored[index] = {name: float(values[row]) for name, values in scores.components.items()}
            call = []
        messages = Scores.cat(parts).messages if parts else []
        return [replace(named, rewards=scored[index]) for index, named in enumerate(samples)], messages

    def close(self) -> None:
        """Ends the processes of rewards."""
        self.scorer.close()


def grouped_means(samples: Sequence[NamedSample], column: str, metric: str) -> dict[str, dict[tuple[int, int], float]]:
    """Values of a metric by the value of a column of the prompts.

    Raises:
        ConfigError: when a prompt has no such column.
    """
    groups: dict[str, dict[tuple[int, int], float]] = {}
    for named in samples:
        if column not in named.sample.metadata:
            names = ", ".join(named.sample.metadata) or "none"
            raise ConfigError(f"--by {column}: prompt {named.prompt_id} has no such column; it has {names}")
        group = groups.setdefault(str(named.sample.metadata[column]), {})
        group[named.prompt_id, named.seed] = named.rewards[metric]
    return groups


def mean_over_groups(groups: Mapping[str, Mapping[object, float]]) -> float:
    """The mean of the groups' means, each group counting the same; values that failed are left out."""
    means = [np.nanmean(list(values.values())) for values in groups.values() if not np.isnan([*values.values()]).all()]
    return float(np.mean(means)) if means else float("nan")
