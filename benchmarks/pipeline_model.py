"""What synchronous, one-step-off and fully asynchronous RL take per iteration, from measured phase times.

    python benchmarks/pipeline_model.py --run runs/quickstart/rl
    python benchmarks/pipeline_model.py --generate 0.4 --score 0.47 --update 2.0 --sync 0.05 --micro-batches 6 \\
        --workers 8 64 512 --stragglers lognormal:0.2 --pictures docs/images

Nothing is run: every figure that this prints is simulated. The phase times are those of one worker, unless the run's
actor had more; with the number of workers the samples of an iteration grow (``--fixed-batch``: they do not). Strategies
with own pools get the split into actor and samplers that the formulas favour. What the simulation assumes is printed
above the table.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pipeline_simulation
from pipeline_simulation import (
    FULLY_ASYNC,
    ONE_STEP_OFF,
    STRATEGIES,
    SYNC,
    SYNC_REWARD,
    Phases,
    Pipeline,
    Pools,
    Result,
    Stragglers,
    Strategy,
    no_stragglers,
    stragglers,
)

from sfumato.errors import DataError, UserError
from sfumato.tracking.charts import (
    LINE,
    MUTED,
    Stretch,
    choose_stretch,
    draw_legend,
    draw_rows,
    inline_svg,
    stand_in,
    theme_css,
)
from sfumato.tracking.json_lines import finite_points, read_jsonl, series_of
from sfumato.tracking.timeline import RUN, Event, read_events


def plain_axes(axes: Any) -> None:
    """Quiet axes: a grid, muted labels, no frame but two lines."""
    axes.grid(True, color=LINE, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, labelsize=10, labelcolor=MUTED)
    for side, spine in axes.spines.items():
        spine.set(visible=side in ("left", "bottom"), edgecolor=LINE)


def whole_svg(figure: Any, label: str) -> str:
    """A figure as a file of its own: an image on a page follows the theme of its reader too."""
    svg = inline_svg(figure, "", label)
    background = '<rect width="100%" height="100%" fill="var(--card)"/>'
    head, body = svg.split(">", 1)
    return f"{head}><style>{theme_css('svg')}</style>{background}{body}\n"


def rollout_s(phases: Phases, samplers: int, scorers: int, with_reward: bool) -> float:
    """Seconds until the last reward is there, without stragglers; too short where few scorers meet long waves."""
    count, g, s = phases.micro_batches, phases.generate_s, phases.score_s
    waves = math.ceil(count / samplers)
    if not with_reward:
        return waves * g + math.ceil(count / scorers) * s
    last = count - (waves - 1) * samplers
    return max(waves * g + math.ceil(last / scorers) * s, g + math.ceil(count / scorers) * s)


def estimate_s(phases: Phases, pools: Pools, strategy: Strategy) -> float:
    """Seconds of an iteration by the formula of docs/asynchrony.md, without stragglers."""
    samplers = pools.actors if strategy.colocated else pools.samplers
    update, between = phases.update_on(pools.actors), phases.switch_s if strategy.colocated else phases.sync_s
    rollout = rollout_s(phases, samplers, pools.scorers, strategy.with_reward)
    round_trip = rollout + update + between
    if strategy.max_staleness == 0:
        return round_trip
    waves = phases.micro_batches / samplers
    generation = (math.ceil(waves) if strategy.max_staleness == 1 else waves) * phases.generate_s
    scoring = phases.micro_batches / pools.scorers * phases.score_s
    slowest = max(generation + between, update + between, scoring)
    return max(slowest, round_trip / (strategy.max_staleness + 1))


def splits(workers: int, scorers: int, phases: Phases, strategy: Strategy, count: int = 3) -> list[Pools]:
    """The workers as actor and samplers: all are both, or the parts that the formula favours, the best one first."""
    if strategy.colocated:
        return [Pools(workers, 0, scorers)]
    if workers < 2:
        raise UserError(f"{strategy.name}: own pools need 2 workers; this is {workers}")
    part = max(1, workers // 32)
    choices = [Pools(workers - index, index, scorers) for index in range(part, workers, part)]
    return sorted(choices, key=lambda pools: estimate_s(phases, pools, strategy))[:count]


def fastest(
    phases: Phases, workers: int, scorers: int, strategy: Strategy, factor: Stragglers, iterations: int
) -> tuple[Pools, Result]:
    """The best of the splits that the formula favours, as it turns out."""
    tried = [
        (pools, Pipeline(phases, pools, strategy, iterations, factor).run())
        for pools in splits(workers, scorers, phases, strategy)
    ]
    return min(tried, key=lambda entry: entry[1].seconds)


def measured(folder: Path, flags: dict[str, float]) -> Phases:
    """Phase times of a run: medians of its timeline, else of its timings; what a flag gives stands.

    Raises:
        DataError: where a time is neither measured nor given.
    """
    result = _from_timeline([event for event in read_events(folder, None) if event.role != RUN and event.step > 1])
    timings = series_of(read_jsonl(folder / "timings.jsonl")[1:])
    count = int(flags.get("micro_batches", result.get("micro_batches", 0)))
    if count < 1:
        raise DataError(f"{folder}: the timeline shows no generation; give --micro-batches of an iteration")
    for phase, share in {"generate": count, "score": count, "update": 1}.items():
        points = finite_points(timings.get({"score": "time/scoring_s"}.get(phase, f"time/{phase}_s"), {}))
        if points:
            result.setdefault(f"{phase}_s", statistics.median(points.values()) / share)
    result |= flags
    if absent := [
        f"--{name.removesuffix('_s')}" for name in ("generate_s", "score_s", "update_s") if name not in result
    ]:
        raise DataError(f"{folder}: found no times of some phases; give {', '.join(absent)}")
    whole = {name: int(result[name]) for name in ("micro_batches", "update_processes") if name in result}
    return Phases(**{**result, **whole})  # type: ignore[arg-type]


def _from_timeline(events: Sequence[Event]) -> dict[str, float]:
    """Medians of calls; one process of a call that several made together stands for them."""
    results: dict[str, float] = {}
    for kind in ("generate", "score", "update", "sync"):
        calls = [event for event in events if event.kind == kind]
        if not calls:
            continue
        results[f"{kind}_s"] = statistics.median(call.end - call.start for call in calls)
        if kind == "generate":
            results["micro_batches"] = statistics.median(_count(call.step for call in calls))
        if kind == "update":
            results["update_processes"] = len({call.rank for call in calls})
    return results


def _count(steps: Iterable[int]) -> list[int]:
    steps = list(steps)
    return [steps.count(step) for step in set(steps)]


@dataclass(frozen=True)
class Row:
    """One line of the table."""

    workers: int
    strategy: Strategy
    pools: Pools
    result: Result
    ratio: float
    """Seconds of an iteration over those of ``SYNC`` on as many workers."""


def simulate(
    phases: Phases, workers: Sequence[int], scorers_per_worker: float, factor: Stragglers, fixed: bool, iterations: int
) -> list[Row]:
    """Every strategy on every number of workers."""
    rows = []
    for count in workers:
        load = phases if fixed else phases.times(count / phases.update_processes)
        scorers = max(1, round(scorers_per_worker * count))
        base = None
        for strategy in STRATEGIES:
            if count < 2 and not strategy.colocated:
                continue
            pools, result = fastest(load, count, scorers, strategy, factor, iterations)
            base = base or result.seconds
            rows.append(Row(count, strategy, pools, result, result.seconds / base))
    return rows


def table(rows: Sequence[Row]) -> str:
    """Markdown: one line per number of workers and strategy."""
    titles = (
        "workers",
        "strategy",
        "actor + sampler",
        "s / iteration",
        "ratio",
        "actor",
        "sampler",
        "scorer",
        "staleness",
    )
    lines = ["| " + " | ".join(titles) + " |", "|" + "---|" * len(titles)]
    for row in rows:
        shares = [row.result.utilisation.get(f"utilisation/{role}") for role in ("actor", "sampler", "scorer")]
        cells = [
            str(row.workers),
            row.strategy.name,
            "shared" if row.strategy.colocated else f"{row.pools.actors} + {row.pools.samplers}",
            f"{row.result.seconds:.3g}",
            f"{row.ratio:.2f}",
            *("" if share is None else f"{100 * share:.0f} %" for share in shares),
            f"{row.result.staleness_mean:.2f} (max {row.result.staleness_max})",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def draw_timelines(phases: Phases, workers: int, scorers: int, factor: Stragglers, path: Path) -> None:
    """Three iterations of each strategy below each other, with one scale of time."""
    shown = {}
    for strategy in STRATEGIES:
        _, result = fastest(phases, workers, scorers, strategy, factor, iterations=9)
        stretch = choose_stretch(result.events, max_steps=3)
        assert stretch is not None
        shown[strategy.name] = stretch
    draw_stretches(shown, "simulated", path)


def draw_stretches(shown: Mapping[str, Stretch], how: str, path: Path) -> None:
    """Timelines below each other, with one scale of time; ``how`` says where the seconds come from."""
    from matplotlib.figure import Figure

    heights = [len(value.rows) + 2.2 for value in shown.values()]
    figure = Figure(figsize=(10, 0.27 * sum(heights) + 0.6), layout="constrained")
    panels = figure.subplots(len(shown), 1, height_ratios=heights, squeeze=False)[:, 0]
    kinds: dict[str, None] = {}
    for panel, (name, stretch) in zip(panels, shown.items(), strict=True):
        kinds |= dict.fromkeys(draw_rows(panel, stretch))
        panel.set_xlim(0, max(value.end - value.start for value in shown.values()))
        panel.set_title(name, loc="left", color=stand_in("ink"), fontsize=10, pad=16)
    panels[-1].set_xlabel(f"seconds ({how})", color=MUTED, fontsize=9)
    draw_legend(figure, kinds)
    path.write_text(whole_svg(figure, f"{how} timelines of " + ", ".join(shown)), encoding="utf-8")


def draw_ratios(phases: Phases, workers: int, path: Path) -> None:
    """Time over the synchronous loop that scores after the rollout, by the time of scoring by few and many scorers."""
    from matplotlib.figure import Figure

    work = phases.generate_s * phases.micro_batches + phases.update_s  # of the samples of one worker
    shares = [index / 20 for index in range(0, 21)]
    load = phases.times(workers)
    figure = Figure(figsize=(10, 3.9), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    drawn = {SYNC_REWARD: "generate", ONE_STEP_OFF: "update", FULLY_ASYNC: "sync"}
    for panel, scorers, per, label in (
        (panels[0], workers, phases.micro_batches, "one scorer a worker: time of scoring / (generation + update)"),
        (panels[1], load.micro_batches, 1, "a scorer for each call: latency / (generation + update)"),
    ):
        for strategy, colour in drawn.items():
            ratios = []
            for share in shares:
                scaled = replace(load, score_s=work * share / per)
                base = Pipeline(scaled, Pools(workers, 0, scorers), SYNC, 12).run()
                ratios.append(fastest(scaled, workers, scorers, strategy, no_stragglers, 12)[1].seconds / base.seconds)
            panel.plot(shares, ratios, color=stand_in(colour), label=strategy.name, linewidth=1.9)
        panel.axhline(1, color=MUTED, linewidth=0.9, linestyle=(0, (3, 3)))
        plain_axes(panel)
        panel.set_xlabel(label, color=MUTED, fontsize=10)
    panels[0].set_ylabel("time / synchronous, rewards after", color=MUTED, fontsize=10)
    panels[1].legend(frameon=False, labelcolor=stand_in("ink"), fontsize=9, loc="lower left")
    path.write_text(whole_svg(figure, "simulated time of strategies over synchronous"), encoding="utf-8")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="run folder whose phases were measured; flags replace its figures")
    for name, what in {
        "generate": "a micro-batch on one worker",
        "score": "a micro-batch at one scorer",
        "update": "an iteration's update on --update-processes",
        "sync": "weights to the samplers",
        "switch": "moving memory between phases, colocated",
    }.items():
        parser.add_argument(f"--{name}", type=float, dest=f"{name}_s", help=f"seconds: {what}")
    parser.add_argument("--micro-batches", type=int, help="of an iteration on --update-processes")
    parser.add_argument("--update-processes", type=int, help="workers that the times are of (1)")
    parser.add_argument("--efficiency", type=float, help="of the update's speed kept per doubling (1)")
    parser.add_argument("--workers", type=int, nargs="+", default=[8, 16, 32, 64, 128, 256, 512, 1024])
    parser.add_argument("--scorers", type=float, default=1, help="for each worker")
    parser.add_argument("--fixed-batch", action="store_true", help="the samples of an iteration stay the same")
    parser.add_argument("--stragglers", default="none", help="none, lognormal:SIGMA or tail:SHARE:FACTOR")
    parser.add_argument("--iterations", type=int, default=16)
    parser.add_argument("--pictures", type=Path, help="folder for timelines.svg and strategies.svg")
    return parser.parse_args()


def main() -> None:
    options = parse()
    names = ("generate_s", "score_s", "update_s", "sync_s", "switch_s", "micro_batches", "update_processes")
    flags = {name: getattr(options, name) for name in (*names, "efficiency") if getattr(options, name) is not None}
    phases = measured(options.run or Path(), flags) if options.run else Phases(**flags)
    factor = stragglers(options.stragglers)
    print(pipeline_simulation.__doc__)
    print(f"Simulated from: {phases}; stragglers {options.stragglers}; {options.scorers:g} scorers for each worker\n")
    rows = simulate(phases, options.workers, options.scorers, factor, options.fixed_batch, options.iterations)
    print(table(rows))
    if options.pictures:
        options.pictures.mkdir(parents=True, exist_ok=True)
        few = phases.times(4 / phases.update_processes)
        draw_timelines(few, 4, max(1, round(4 * options.scorers)), factor, options.pictures / "timelines.svg")
        draw_ratios(phases.times(1 / phases.update_processes), 16, options.pictures / "strategies.svg")


if __name__ == "__main__":
    main()
