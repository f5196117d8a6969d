"""Runs rewards over a batch, keeps their failures apart from their values, and combines what is optimised."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections import Counter
from collections.abc import Sequence

import numpy as np

from sfumato.config.rl import RewardConfig
from sfumato.errors import ConfigError, DataError, RewardError
from sfumato.rewards.base import Reward, Sample
from sfumato.rewards.scoring.calls import LARGEST
from sfumato.rewards.scoring.combinations import Combination, WeightedSum, normalise_values
from sfumato.rewards.scoring.one_reward import ScoreCache, score_remembering, score_with
from sfumato.rewards.scoring.scores import Scores


class Scorer:
    """Scores batches with a list of rewards.

    Args:
        rewards: built rewards with different labels.
        combination: makes one number of the values that are optimised; None is their weighted sum.
        max_failed_fraction: fraction of a batch, 0 to 1, that may be without total before ``check_budget`` raises.
        cache_size: values that each reward that allows it remembers.
        require_objective: demand a reward that is optimised; False for a scorer that only evaluates.

    Raises:
        ConfigError: no rewards, something that is none, equal labels, a fraction out of range, nothing to optimise.
    """

    def __init__(
        self,
        rewards: list[Reward],
        *,
        combination: Combination | None = None,
        max_failed_fraction: float = 0.5,
        cache_size: int = 0,
        require_objective: bool = True,
    ) -> None:
        if not rewards:
            raise ConfigError("reward.rewards is empty: list at least one reward, such as {type: brightness}")
        for reward in rewards:
            if not isinstance(reward, Reward):
                raise ConfigError(
                    f"reward.rewards holds a {type(reward).__name__}, which does not derive from "
                    "sfumato.rewards.base.Reward"
                )
        duplicates = [label for label, count in Counter(reward.label for reward in rewards).items() if count > 1]
        if duplicates:
            raise ConfigError(f"several rewards are called {duplicates[0]!r}: set a different 'name' on each")
        if not 0 <= max_failed_fraction <= 1:
            raise ConfigError(f"max_failed_fraction must be from 0 to 1, not {max_failed_fraction}")
        self.rewards = list(rewards)
        self.combination = combination or WeightedSum()
        self.max_failed_fraction = max_failed_fraction
        self._caches = {reward.label: ScoreCache(cache_size) for reward in rewards if reward.cached and cache_size}
        self.objective = [reward for reward in rewards if not reward.evaluation_only and reward.weight != 0]
        if require_objective and not self.objective:
            raise ConfigError(
                "no reward is optimised: one needs a non-zero 'weight' and 'evaluation_only: false' "
                f"(rewards: {', '.join(reward.label for reward in rewards)})"
            )

    def prepare(self) -> None:
        """Loads every reward's engine, where it will run. Raises UserError that says how to mend what is missing."""
        self.combination.prepare()
        for reward in self.rewards:
            if reward.process:
                from sfumato.rewards.scoring.workers import pool_of

                pool_of(reward).start()
            else:
                reward.prepare()

    def close(self) -> None:
        """Ends the processes of rewards."""
        if any(reward.process for reward in self.rewards):
            from sfumato.rewards.scoring.workers import close_workers

            close_workers()

    def score(self, samples: list[Sample], objective_only: bool = False) -> Scores:
        """Scores a batch with every reward, one after the other. Several threads may call it.

        A reward that raises, hangs longer than its ``timeout_s``, or returns something other than one finite number
        per sample leaves NaN for the samples concerned and a reason in ``failed``. No reward sees damaged samples.

        Args:
            samples: B samples; those of one group need not stand together.
            objective_only: leave out rewards that are only watched.

        Returns:
            The scores in the order of the samples. ``total`` is ``level``, the combination of what needs no other
            sample, until ``finish`` has seen all of them; NaN throughout when nothing is optimised.

        Raises:
            UserError: what a reward raised as such (missing dependency, bad data) is passed on.
        """
        if samples and samples[0].scores is not None:
            return self._scored_before(samples)
        undamaged_rows = [row for row, sample in enumerate(samples) if not sample.damage]
        undamaged = [samples[row] for row in undamaged_rows]
        components: dict[str, np.ndarray] = {}
        failed = Counter(f"{_DAMAGED}{sample.damage}" for sample in samples if sample.damage)
        notes: list[str] = []
        counts: dict[str, tuple[int, int]] = {}
        seconds: dict[str, float] = {}
        remembered: dict[str, int] = {}
        for reward in self.objective if objective_only else self.rewards:
            started = time.perf_counter()
            if reward.label in self._caches:
                cache = self._caches[reward.label]
                values, reasons, remembered[reward.label] = score_remembering(reward, undamaged, cache)
            else:
                values, reasons = score_with(reward, undamaged)
            seconds[reward.label] = time.perf_counter() - started
            # damaged samples keep NaN
            components[reward.label] = np.full(len(samples), math.nan)
            components[reward.label][undamaged_rows] = values
            failed.update(f"{failure_prefix(reward)}{reason}" for reason in reasons if reason)
            notes += [f"{reward.label}: {note}" for note in reward.take_notes()]
            counts |= reward.take_counts()
        metadata = [sample.metadata for sample in samples] if self.combination.takes_metadata else None
        # without group_ids nothing is standardised: that needs the other samples of the iteration, see ``finish``
        level, left_out = self._combine(components, metadata, None)
        return Scores(
            total=level,
            level=level,
            components=components,
            failed=failed + left_out,
            notes=notes,
            counts=counts,
            metadata=metadata,
            seconds=seconds,
            remembered=remembered,
        )

    def _scored_before(self, samples: list[Sample]) -> Scores:
        """The scores of samples that were scored before and carry their values.

        Raises:
            DataError: the value of an optimised reward is missing, or the combination takes metadata.
        """
        scores = [sample.scores or {} for sample in samples]
        missing = [reward.label for reward in self.objective if any(reward.label not in values for values in scores)]
        if missing or self.combination.takes_metadata:
            lack = (
                f"no value of the reward {missing[0]!r}" if missing else "no metadata, which reward.combination takes"
            )
            raise DataError(f"samples that were scored before bring {lack}: draw and score them again")
        components = {
            reward.label: np.array([values[reward.label] for values in scores], np.float64) for reward in self.objective
        }
        level, _ = self._combine(components, None, None)
        return Scores(total=level, level=level, components=components, seconds=dict.fromkeys(components, 0.0))

    def finish(self, scores: Scores, group_ids: Sequence[int]) -> Scores:
        """Totals of all samples of an iteration, standardised where that is wanted.

        Args:
            scores: of B samples, of all ranks.
            group_ids: [B].

        Returns:
            The scores with these totals, and with a message where one could not be made; ``check_budget`` comes next.
        """
        total, left_out = self._combine(scores.components, scores.metadata, np.asarray(group_ids))
        is_new = any(reward.normalise in ("group", "batch") for reward in self.objective)  # else it was said before
        return dataclasses.replace(scores, total=total, failed=scores.failed + (left_out if is_new else Counter()))

    def _combine(
        self,
        components: dict[str, np.ndarray],
        metadata: list[dict[str, object]] | None,
        group_ids: np.ndarray | None,
    ) -> tuple[np.ndarray, Counter[str]]:
        """Totals float64 [B], and the number of samples by reason for which the combination gave no usable total.

        Args:
            components: values of every reward by label, float64 [B].
            metadata: B rows of the data, for a combination that takes them.
            group_ids: [B]; None where the samples are a part of an iteration, so that nothing is standardised.
        """
        num_samples = len(next(iter(components.values()))) if components else 0
        if not (self.objective and num_samples):
            return np.full(num_samples, math.nan), Counter()
        values = {
            reward.label: normalise_values(components[reward.label].copy(), reward.normalise, group_ids)
            for reward in self.objective
        }
        # copies, since a combination may be a function of the user's that writes into what it is given
        total = self.combination.combine(
            values, {reward.label: reward.weight for reward in self.objective}, copy.deepcopy(metadata)
        )
        has_all = np.all([np.isfinite(array) for array in values.values()], axis=0)
        is_finite = np.isfinite(total)
        reasons = {
            "no finite number": has_all & ~is_finite,
            f"more than {LARGEST:g}": has_all & is_finite & (np.abs(total) > LARGEST),
        }
        left_out = np.any(list(reasons.values()), axis=0)
        prefix = f"{_COMBINATION}{self.combination.type} returned"
        # the plus leaves out reasons that no sample has
        return np.where(has_all & ~left_out, total, math.nan), +Counter(
            {f"{prefix} {reason}": int(rows.sum()) for reason, rows in reasons.items()}
        )

    def check_budget(self, scores: Scores) -> None:
        """Raises RewardError when more than ``max_failed_fraction`` of the batch has no total.

        Rewards that are not optimised never raise, whatever they returned.
        """
        num_samples = len(scores.total)
        num_failed = int(np.isnan(scores.total).sum())
        if not self.objective or num_failed <= self.max_failed_fraction * num_samples:
            return
        prefixes = (_DAMAGED, _COMBINATION, *(failure_prefix(reward) for reward in self.objective))
        reasons = "; ".join(failure for failure in scores.failures if failure.startswith(prefixes))
        raise RewardError(
            f"{num_failed} of {num_samples} samples have no reward, more than max_failed_fraction "
            f"{self.max_failed_fraction} allows: {reasons}"
        )


def build_scorer(config: RewardConfig, with_engines: bool = True) -> Scorer:
    """The scorer of a run, its engines loaded. Raises UserError as ``Scorer`` and its ``prepare`` do.

    One without engines can ``finish`` and ``check_budget`` what others scored.
    """
    scorer = Scorer(
        config.rewards,
        combination=config.combination,
        max_failed_fraction=config.max_failed_fraction,
        cache_size=config.cache_size,
    )
    if with_engines:
        scorer.prepare()
    else:
        scorer.combination.prepare()
    return scorer


_DAMAGED = "not scored: "
_COMBINATION = "combination: "


def failure_prefix(reward: Reward) -> str:
    return f"{reward.label} (evaluation only): " if reward.evaluation_only else f"{reward.label}: "
