"""Evaluation, and the samples that a run saves: written by the actor, scored by the scorer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sfumato.config.rl import RLConfig
from sfumato.errors import RewardError
from sfumato.parallel.mesh import range_of_rank
from sfumato.rewards.base import Sample
from sfumato.rewards.scoring.scorer import Scorer, failure_prefix
from sfumato.rewards.scoring.scores import Scores
from sfumato.rollout.batch import EvalStats, RankBatch, records_of
from sfumato.runtime.decisions import Decisions
from sfumato.runtime.roles import Handle, Role, Roles
from sfumato.runtime.states import Actor
from sfumato.runtime.stream import RolloutStream
from sfumato.tracking.control import Actions, RunControl
from sfumato.tracking.run import Run
from sfumato.tracking.samples import SampleRecord, save_samples_and_grids

if TYPE_CHECKING:
    from sfumato.algorithms.advantages import Advantages
    from sfumato.models.policies import PolicyModel


def evaluate(
    roles: Roles,
    run: Run,
    draw: Callable[..., object],
    config: RLConfig,
    step: int,
    trained: Sequence[RankBatch] = (),
    scores: Scores | None = None,
    advantages: Advantages | None = None,
    stream: RolloutStream | None = None,
    *,
    count: int | None = None,
    add: bool = False,
) -> dict[str, float]:
    """Draws one sample per held-out prompt, divided over the data-parallel ranks, scores them, and saves some.

    Args:
        roles: the actor draws, or if so configured a sampler of its own. The actor saves samples, so that no image
            passes through this process.
        run: reports what could not be scored, and shows samples to the trackers.
        draw: ``(state, rows, config)`` to samples of these held-out prompts, and an ``EvalStats`` with measurements.
        config: of the task.
        step: finished iterations.
        trained: what the ranks learned from in the iteration, if there was one.
        scores: of all samples of that iteration.
        advantages: of the same samples.
        stream: has a sampler of its own draw by the current weights; needed only then.
        count: of how many prompts a sample is drawn, the first ones; None: of all.
        add: the step's samples that were saved before stay.

    Returns:
        Metrics over all prompts.
    """
    actor = roles.actor
    count = config.eval.num_prompts if count is None else count
    drawer = roles.sampler if config.sampler_evaluates else actor
    by_rank = [list(range_of_rank(count, rank, drawer.num_data_ranks)) for rank in drawer.data_ranks]
    draw_and_score = partial(_draw_and_score, roles, drawer, draw, config, by_rank)
    with run.timed("evaluate"):
        if drawer is not actor:
            assert stream is not None, "a sampler draws, and there is no stream to give it weights"
            samples, scored, drawn_by_rank = stream.with_latest_weights(draw_and_score)
        else:
            samples, scored, drawn_by_rank = draw_and_score()
        values = {
            name: [
                value
                for rows, drawn in zip(by_rank, drawn_by_rank, strict=True)
                for value in drawn.values[name][: len(rows)]  # without the padding of ``_draw_and_score``
            ]
            for name in drawn_by_rank[0].values
        }
        everyone = roles.together((Scores.cat(scored), values))
        all_scores = Scores.cat([values_of_process for values_of_process, _ in everyone])
        for text in all_scores.messages:
            run.say(f"evaluation at step {step}: reward {text}")
        if step == 0 and not add:
            refuse_failed_rewards(all_scores, config)
        metrics = all_scores.metrics("eval/") | drawn_by_rank[0].metrics
        for name in values:
            finite = [
                value for _, values_of_process in everyone for value in values_of_process[name] if math.isfinite(value)
            ]
            metrics[name] = sum(finite) / len(finite) if finite else math.nan
        # Sampler and actor may have different numbers of ranks: each actor rank saves samples of some of the sampler's.
        shares = [range_of_rank(len(samples), number, len(actor.data_ranks)) for number in range(len(actor.data_ranks))]
        parts = [
            ([samples[place] for place in share], [scored[place] for place in share], part)
            for share, part in zip(shares, list(trained) or [None] * len(shares), strict=True)
        ]
        error = actor.map(_save_samples, parts, scores, advantages, config, step, add, kind="save").result()
        run.report_samples(error)
        run.show_samples(step)
    return metrics


def control_of(
    run: Run,
    roles: Roles,
    config: RLConfig,
    draw: Callable[..., object],
    watch: Callable[..., list[SampleRecord]],
    stream: RolloutStream | None = None,
) -> RunControl:
    """What a run of RL does on request.

    Args:
        run: of this process.
        roles: of the run.
        config: of the task.
        draw, stream: as of ``evaluate``.
        watch: ``(state, prompts, config)`` to records of samples of these texts, not scored; every rank draws them.
    """
    drawer = roles.sampler if config.sampler_evaluates else roles.actor
    # At least one for each rank: ``_draw_and_score`` pads a rank's prompts with its last one.
    num_shown = min(max(config.eval.num_saved, drawer.num_data_ranks), config.eval.num_prompts)

    def measure(count: int | None = None) -> dict[str, float]:
        step = roles.actor.call(_finished_steps).result()
        return evaluate(roles, run, draw, config, step, stream=stream, count=count, add=True)

    def draw_watched(prompts: list[str]) -> list[SampleRecord]:
        def draw_all() -> list[SampleRecord]:
            return drawer.call(watch, prompts, config, kind="evaluate").result()

        if drawer is roles.actor:
            return draw_all()
        assert stream is not None, "a sampler draws, and there is no stream to give it weights"
        return stream.with_latest_weights(draw_all)

    def sample() -> None:
        measure(num_shown)

    return RunControl(
        run,
        Actions(
            save=lambda: roles.actor.call(Actor.save, kind="save").result(),
            evaluate=measure,
            sample=sample if config.eval.num_saved > 0 else None,
            watch=draw_watched,
        ),
    )


def _finished_steps(actor: Actor[PolicyModel]) -> int:
    """Runs in the actor."""
    return actor.updates


def refuse_failed_rewards(scores: Scores, config: RLConfig) -> None:
    """Raises RewardError when an optimised reward gave no value at all: the iterations would be drawn for nothing.

    Rewards that compare the samples of a group are left out: an evaluation draws one for each prompt.
    """
    for reward in config.reward.rewards:
        values = scores.components.get(reward.label)
        is_optimised = not reward.evaluation_only and reward.weight != 0 and not reward.groupwise
        if values is None or not len(values) or not is_optimised or not np.isnan(values).all():
            continue
        reasons = "; ".join(text for text in scores.failures if text.startswith(failure_prefix(reward)))
        if reasons and config.reward.max_failed_fraction < 1:
            raise RewardError(
                f"the reward {reward.label!r} gave no value for any of the {len(values)} samples of the first "
                f"evaluation, so that nothing could be learned: {reasons}"
            )


def _draw_and_score(
    roles: Roles, drawer: Role, draw: Callable[..., object], config: RLConfig, by_rank: list[list[int]]
) -> tuple[list[Handle], list[Scores], list[EvalStats]]:
    """Has a role draw samples of held-out prompts, and the scorer score them.

    Args:
        roles: of the run.
        drawer: the role that draws.
        draw: as of ``evaluate``.
        config: of the task.
        by_rank: rows of the prompts of each data-parallel rank that this process drives.

    Returns:
        For each rank: a handle of its samples, their scores, and what was measured. Samples and measurements may be
        padded at their end with repetitions of the last prompt; scores are not.
    """
    size = config.rollout.micro_batch_size
    longest = max(map(len, by_rank))
    padded = [rows + rows[-1:] * (longest - len(rows)) for rows in by_rank]  # ranks that compute together need as many
    handles = drawer.map_remote(draw, padded, config, num_values=2, kind="evaluate")
    scoring = [
        [
            roles.scorer.submit(_score, samples, start, min(start + size, len(rows)), kind="score")
            for start in range(0, len(rows), size)
        ]
        for rows, (samples, _) in zip(by_rank, handles, strict=True)
    ]
    scored = [Scores.cat([future.result() for future in futures]) for futures in scoring]
    return [samples for samples, _ in handles], scored, [drawn.fetch() for _, drawn in handles]


def _score(scorer: Scorer, samples: list[Sample], start: int, stop: int) -> Scores:
    """Runs in the scorer."""
    return scorer.score(samples[start:stop])


def _save_samples(
    actor: Actor[PolicyModel],
    part: tuple[list[list[Sample]], list[Scores], RankBatch | None],
    scores: Scores | None,
    advantages: Advantages | None,
    config: RLConfig,
    step: int,
    add: bool,
) -> OSError | None:
    """Runs in the actor's ranks: the first one saves samples of the evaluation and of the iteration.

    ``part`` holds samples that drawing ranks returned, their scores, and what this actor rank learned from.

    Returns:
        Why they could not be written, as on a full disk; the run can do without them.
    """
    drawn, scored, trained = part
    records = [
        eval_scores.record(
            row, sample, kind="eval", seed=config.eval.seed, sample_id=sample.group_id, policy_version=step
        )
        for samples, eval_scores in zip(drawn, scored, strict=True)
        for row, sample in enumerate(samples[: len(eval_scores.total)])
        if sample.group_id < config.eval.num_saved
    ]
    if trained is not None:
        assert scores is not None and advantages is not None
        decisions = actor.decisions or Decisions(is_wanted=False)
        first_group = actor.mesh.range_of_rank(config.rollout.num_prompts).start
        groups = max(config.eval.num_saved_groups - first_group, 0)
        learned = records_of(
            trained, scores, advantages.values, config.train.seed, groups, decisions.by_sample(), decisions.trained_ids
        )
        if actor.engine is not None:
            learned = [replace(record, learned=actor.engine.describe_saved(record.learned)) for record in learned]
        records += learned
    # Before ranks return: gathering needs them all.
    together: list[SampleRecord] = [record for some in actor.mesh.gather(records) for record in some]
    if not actor.mesh.is_first:
        return None
    together.sort(key=lambda record: (record.kind, record.sample_id))  # files are equal on any number of ranks
    try:
        save_samples_and_grids(Path(config.train.output_dir), step, together, add=add)
    except OSError as error:
        return error
    return None
