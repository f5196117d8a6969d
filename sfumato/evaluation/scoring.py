"""Scores samples of several models with rewards."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

from pydantic import Field

from sfumato.config.base import Section, Variant
from sfumato.config.load import load_config
from sfumato.config.yaml_text import parse_yaml
from sfumato.errors import ConfigError
from sfumato.evaluation.results import Evaluation, SampleValues, Values
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

    def check_modality(self, kinds: Sequence[str]) -> None:
        """Raises ConfigError for a reward of other kinds of samples than these of "image", "text" and "sound"."""
        for reward in self.rewards:
            if not any(map(reward.scores, kinds)):
                raise ConfigError(f"--reward {reward.label} scores samples of another kind ({reward.kinds})")

    def score(self, samples: Sequence[NamedSample]) -> tuple[list[NamedSample], list[str], dict[str, tuple[int, int]]]:
        """The samples with their values, lines about those that failed, and the rewards' own fractions by name."""
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
        with_values = [replace(named, rewards=scored[index]) for index, named in enumerate(samples)]
        if not parts:
            return with_values, [], {}
        scores = Scores.cat(parts)
        return with_values, scores.messages, scores.counts

    def close(self) -> None:
        """Ends the processes of rewards."""
        self.scorer.close()


ModelCounts = tuple[str, Mapping[str, tuple[int, int]]]
"""The label of a model, and how many of how many by name of the fraction."""


@dataclass(frozen=True)
class ScoredSample:
    """The values of a sample, without its content."""

    model: str
    key: tuple[int, int]
    """Its prompt and seed."""
    rewards: Mapping[str, float]
    group: str | None = None
    """The value of the column that means are taken by."""


def add_rewards(evaluation: Evaluation, samples: Sequence[ScoredSample], by: str | None) -> None:
    """Adds the results of all rewards, and of the groups of samples.

    Args:
        evaluation: is added to.
        samples: of all models.
        by: the column whose values the samples' groups are; None: there are none.
    """
    for name in dict.fromkeys(name for sample in samples for name in sample.rewards):
        by_model: dict[str, SampleValues] = {model: {} for model in evaluation.models}
        by_group: dict[str, dict[str, SampleValues]] = {}
        for sample in samples:
            by_model[sample.model][sample.key] = sample.rewards[name]
            if sample.group is not None:
                of_group = by_group.setdefault(sample.group, {})
                of_group.setdefault(sample.model, {})[sample.key] = sample.rewards[name]
        evaluation.add_metric(name, by_model)
        for group, of_group in by_group.items():
            evaluation.add_metric(f"{name}: {group}", of_group)
        for model in evaluation.models if by_group else ():
            groups = [of_group[model] for of_group in by_group.values()]
            evaluation.add_value(model, f"{name}: mean over {by}", mean_over_groups(groups))


def add_fractions(evaluation: Evaluation, counted: Sequence[ModelCounts]) -> None:
    """Adds what rewards count themselves, such as the answers of a judge that could not be read.

    Args:
        evaluation: is added to.
        counted: of each call of ``SampleScorer.score``.
    """
    parts: Counter[tuple[str, str]] = Counter()
    wholes: Counter[tuple[str, str]] = Counter()
    for model, counts in counted:
        for name, (part, whole) in counts.items():
            parts[name, model] += part
            wholes[name, model] += whole
    for (name, model), whole in wholes.items():
        if whole:
            evaluation.add_value(model, name, parts[name, model] / whole)


def mean_over_groups(groups: Sequence[Values]) -> float:
    """The mean of the groups' means, each group counting the same; values that failed are left out."""
    finite = [[value for value in group.values() if math.isfinite(value)] for group in groups]
    means = [sum(values) / len(values) for values in finite if values]
    return sum(means) / len(means) if means else math.nan
