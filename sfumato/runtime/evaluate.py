"""Evaluation and the samples that a run keeps: drawn and written where the actor is, scored where the scorer is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from sfumato.config.rl import RLConfig
from sfumato.parallel.mesh import range_of_rank
from sfumato.rewards.base import Sample
from sfumato.rewards.scoring.scorer import Scorer
from sfumato.rewards.scoring.scores import Scores
from sfumato.rollout.batch import Drawn, RankBatch, records_of
from sfumato.runtime.roles import Handle, Role, Roles
from sfumato.runtime.stream import RolloutStream
from sfumato.tracking.run import Run
from sfumato.tracking.samples import SampleRecord, save_samples_and_grids


def evaluate(
    roles: Roles,
    run: Run,
    draw: Callable[..., Any],
    config: RLConfig,
    step: int,
    trained: Sequence[RankBatch] = (),
    scores: Scores | None = None,
    advantages: Any = None,
    stream: RolloutStream | None = None,
) -> dict[str, float]:
    """Draws one sample per held-out prompt, each data-parallel rank its part, scores them, keeps some.

    Args:
        roles: the actor draws, or where the configuration says so a sampler of its own; the actor writes samples, so
            that no image passes through this process.
        run: says what could not be scored, and shows samples to the trackers.
        draw: ``(state, rows, config)`` to samples of these held-out prompts, and what was ``Drawn`` with them.
        config: of the task.
        step: finished iterations.
        trained: what the ranks learned from in the iteration, if any, with scores and advantages of all its samples.
        stream: brings a sampler that draws the weights of now.

    Returns:
        Metrics over all prompts.
    """
    actor, count = roles.actor, config.eval.num_prompts
    drawer = roles.sampler if config.sampler_evaluates else actor
    by_rank = [list(range_of_rank(count, rank, drawer.num_data_ranks)) for rank in drawer.data_ranks]
    draw_and_score = partial(_draw_and_score, roles, drawer, draw, config, by_rank)
    with run.timed("evaluate"):
        samples, scored, drawn_by_rank = stream.by_newest_weights(draw_and_score) if drawer is not actor else draw_and_score()
        values = {
            name: [
                value for rows, drawn in zip(by_rank, drawn_by_rank, strict=True) for value in drawn.values[name][: len(rows)]
            ]
            for name in drawn_by_rank[0].values
        }
        everyone = roles.together((Scores.cat(scored), values))
        all_scores = Scores.cat([values_of_process for values_of_process, _ in everyone])
        for text in all_scores.messages:
            run.say(f"evaluation at step {step}: reward {text}")
        metrics = all_scores.metrics("eval/") | drawn_by_rank[0].metrics
        for name in values:
            finite = [value for _, values_of_process in everyone for value in values_of_process[name] if math.isfinite(value)]
            metrics[name] = sum(finite) / len(finite) if finite else math.nan
        shares = [range_of_rank(len(samples), number, len(actor.data_ranks)) for number in range(len(actor.data_ranks))]
        parts = [
            ([samples[place] for place in share], [scored[place] for place in share], part)
            for share, part in zip(shares, list(trained) or [None] * len(shares), strict=True)
        ]
        actor.map(_save_samples, parts, scores, advantages, config, step, kind="save").result()
        run.show_samples(step)
    return metrics


def _draw_and_score(
    roles: Roles, drawer: Role, draw: Callable[..., Any], config: RLConfig, by_rank: list[list[int]]
) -> tuple[list[Handle], list[Scores], list[Drawn]]:
    """Samples of held-out prompts as each of a role's data-parallel ranks has drawn them, with scores."""
    size, longest = config.rollout.micro_batch_size, -(-config.eval.num_prompts // drawer.num_data_ranks)
    padded = [rows + rows[-1:] * (longest - len(rows)) for rows in by_rank]  # ranks compute together
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
    return scorer.score(samples[start:stop])


def _save_samples(
    actor: Any,
    part: tuple[list[list[Sample]], list[Scores], RankBatch | None],
    scores: Any,
    advantages: Any,
    config: Any,
    step: int,
) -> None:
    drawn, scored, trained = part
    records = [
        eval_scores.record(
            row, sample, kind="eval", seed=config.eval.seed, sample_id=sample.group_id, policy_version=step
        )
        for samples, eval_scores in zip(drawn, scored, strict=True)
        for row, sample in enumerate(samples[: len(eval_scores.total)])
        if sample.group_id < config.eval.num_saved
    ]
    if trained is not None:  # of the groups the first rank's are enough
        groups = 2 if actor.mesh.is_first else 0
        records += records_of(trained, scores, advantages.values, config.train.seed, groups)
    together: list[SampleRecord] = [record for some in actor.mesh.gather(records) for record in some]
    if not actor.mesh.is_first:
        return
    save_samples_and_grids(Path(config.train.output_dir), step, together)
