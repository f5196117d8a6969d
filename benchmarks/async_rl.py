"""RL with a judge that takes its time: synchronous, rewards during rollout, one-step-off and fully asynchronous.

    python benchmarks/async_rl.py --latency-s 0.2 1 --rounds 2

Starts ``judge_latency_server.py`` and runs ``tasks/rl_diffusion.py`` with the quickstart's settings on a model with
random weights, every mode in turn, so that a slow minute of the machine slows all of them. Printed are medians of the
steps in the middle of the runs: seconds, ratios to the first mode, and what the formula of ``docs/asynchrony.md`` gives
for each mode from the phase times in its own timelines. In process one core computes, with own pools two; colocated on
two processes is what these are to be compared with.

At the end the bytes through the driver at two resolutions, of as many samples: it fails if they differ.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pipeline_model import draw_stretches, estimate_s, measured
from pipeline_simulation import DECOUPLED, FULLY_ASYNC, ONE_STEP_OFF, SYNC, SYNC_REWARD, Phases, Pools, Strategy

from sfumato.config.yaml_text import read_yaml
from sfumato.errors import UserError
from sfumato.tracking.charts import Stretch, choose_stretch
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.timeline import RUN, Event, read_events, step_windows

ROOT = Path(__file__).parents[1]
FIRST, LAST = 2, 1
"""Steps that are left out at either end: pipes fill; the last one evaluates, and nothing is generated beside it."""
OWN_POOLS = {"hybrid_engine": False}


@dataclass(frozen=True, eq=False)
class Mode:
    """One way to run the same iterations."""

    name: str
    strategy: Strategy
    rollout: Mapping[str, Any]
    """Settings of the section of that name."""
    processes: int
    """That compute with the model."""
    on_ray: bool = True

    @property
    def pools(self) -> Pools:
        """As the formula counts processes, but for scorers."""
        return Pools(self.processes, 0, 1) if self.strategy.colocated else Pools(1, self.processes - 1, 1)


SYNC_POOLS = Mode("own pools, synchronous", DECOUPLED, OWN_POOLS, 2)
ONE_OFF = Mode("one-step-off", ONE_STEP_OFF, OWN_POOLS | {"async_strategy": "one-step-off"}, 2)
MODES = {
    "after": Mode("in process, rewards after rollout", SYNC, {"with_reward": False}, 1, on_ray=False),
    "during": Mode("in process, rewards during rollout", SYNC_REWARD, {}, 1, on_ray=False),
    "colocated": Mode("colocated, rewards during rollout", SYNC_REWARD, {}, 2),
    "pools": SYNC_POOLS,
    "one-off": ONE_OFF,
    "async": Mode("fully asynchronous", FULLY_ASYNC, OWN_POOLS | {"async_strategy": "fully-async"}, 2),
}


@contextmanager
def judge(latency_s: float, concurrency: int) -> Iterator[str]:
    """Runs the judge; gives its address."""
    script = ROOT / "benchmarks" / "judge_latency_server.py"
    command = [sys.executable, str(script), "--latency-s", str(latency_s), "--concurrency", str(concurrency)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        if not line.startswith("serving"):
            raise UserError(f"the judge did not start: {' '.join(command)}")
        yield line.split()[-1]
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def run(mode: Mode, address: str, folder: Path, options: argparse.Namespace, steps: int, side: int = 32) -> Path:
    """Runs the task once.

    Args:
        mode: how.
        address: of the judge.
        folder: for the run.
        options: of the command line.
        steps: iterations.
        side: of the images, in pixels.

    Returns:
        The run folder.

    Raises:
        UserError: the run failed; its last lines are in the message.
    """
    config = read_yaml(ROOT / "configs" / "quickstart" / "rl.yaml")
    config["model"] = {"config_path": str(ROOT / "configs" / "quickstart" / "tiny_sd3.yaml"), "max_sequence_length": 1}
    config["rollout"] |= {"num_prompts": options.prompts, "height": side, "width": side, **mode.rollout}
    reward = {"type": "remote", "base_urls": [address], "allow_private": True}
    config["reward"] = {"rewards": [reward], "num_workers": options.scorers}
    batch = options.prompts * config["rollout"]["n"] // 2
    config["train"] |= {"output_dir": str(folder), "max_steps": steps, "save_steps": 1000, "global_batch_size": batch}
    config["eval"] = {"every_steps": 1000, "num_prompts": 2, "num_inference_steps": 2, "num_saved": 1}
    if mode.on_ray:
        pools = {name: {"cpus": 0.5} for name in ("actor", "sampler")}  # one thread each
        pools["actor"]["processes"] = mode.pools.actors
        config["runtime"] = {"backend": "ray", "pools": pools | {"scorer": {"cpus": 0.1}}}
        if mode.strategy.colocated:
            del config["runtime"]["pools"]["sampler"]
    path = folder.with_name(f"{folder.name}.yaml")
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    log = folder.with_name(f"{folder.name}.txt")
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("w", encoding="utf-8") as file:
        command = [sys.executable, str(ROOT / "tasks" / "rl_diffusion.py"), str(path)]
        ended = subprocess.run(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, check=False)
    if ended.returncode:
        last = "\n".join(log.read_text(encoding="utf-8").splitlines()[-20:])
        raise UserError(f"{mode.name}: the run ended with code {ended.returncode}; its last lines:\n{last}")
    return folder


def middle(lines: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Of a file with one line per step, from 0 on: those in the middle of the run."""
    return [line for line in lines if FIRST < line["step"] <= lines[-1]["step"] - LAST]


@dataclass(frozen=True)
class Row:
    """What the runs of one mode came to."""

    mode: Mode
    seconds: float
    predicted: float
    phases: Phases
    shares: dict[str, float]
    """Of time that roles worked."""
    staleness: tuple[float, float]
    """Mean and largest."""


def measure(mode: Mode, folders: Sequence[Path], scorers: int) -> Row:
    """Medians over the steps of all runs, and the formula on the phases of their timelines."""
    timings = [line for folder in folders for line in middle(read_jsonl(folder / "timings.jsonl"))]
    metrics = [line for folder in folders for line in middle(read_jsonl(folder / "metrics.jsonl"))]
    results = [measured(folder, {}) for folder in folders]
    phases = Phases(
        **{name: statistics.median(getattr(result, name) for result in results) for name in ("generate_s", "score_s")},
        update_s=statistics.median(result.update_s for result in results),
        sync_s=0.0 if mode.strategy.colocated else statistics.median(sync_s(folder) for folder in folders),
        micro_batches=results[0].micro_batches,
        update_processes=results[0].update_processes,
    )
    roles = sorted({name for line in timings for name in line if name.startswith("utilisation/")})
    return Row(
        mode,
        statistics.median(line["time/step_s"] for line in timings),
        estimate_s(phases, replace(mode.pools, scorers=scorers), mode.strategy),
        phases,
        {name.partition("/")[2]: statistics.fmean(line.get(name, 0.0) for line in timings) for name in roles},
        (
            statistics.fmean(line["staleness/mean"] for line in metrics),
            max(line["staleness/max"] for line in metrics),
        ),
    )


def sync_s(folder: Path) -> float:
    """Seconds that a sampler receives a version and takes it, the first left out; the actor sends meanwhile."""
    events = [event for event in read_events(folder, None) if event.kind == "sync" and event.role == "sampler"]
    versions = sorted({event.version for event in events if event.version is not None})[1:]
    return statistics.median(sum(e.end - e.start for e in events if e.version == version) for version in versions)


def print_table(latency_s: float, rows: Sequence[Row]) -> None:
    """Markdown."""
    by_mode = {row.mode: row for row in rows}
    sync = by_mode.get(SYNC_POOLS)
    print(f"\nA judge that takes {latency_s:g} s for a batch:\n")
    titles = ("", "s / iteration", "ratio", "formula, s", "ratio", "generate", "update", "judge", "sync", "busy")
    print("| " + " | ".join([*titles, "staleness"]) + " |\n|" + "---|" * (len(titles) + 1))
    for row in rows:
        phases = row.phases
        cells = [
            row.mode.name,
            f"{row.seconds:.2f}",
            f"{row.seconds / rows[0].seconds:.2f}",
            f"{row.predicted:.2f}",
            f"{row.predicted / rows[0].predicted:.2f}",
            f"{phases.micro_batches} x {phases.generate_s:.2f}",
            f"{phases.update_s:.2f}",
            f"{phases.score_s:.2f}",
            f"{phases.sync_s:.3f}",
            ", ".join(f"{name} {100 * share:.0f} %" for name, share in row.shares.items()),
            f"{row.staleness[0]:.2f}, at most {row.staleness[1]:.0f}",
        ]
        print("| " + " | ".join(cells) + " |")
    for row in rows if sync else ():
        if row.mode.strategy.max_staleness:
            ratio, formula = row.seconds / sync.seconds, row.predicted / sync.predicted
            print(f"{row.mode.name} over {sync.mode.name}: {ratio:.2f}, formula {formula:.2f}")
    sys.stdout.flush()


def stretch_of(folder: Path) -> Stretch:
    """The last two steps in the middle of a run."""
    events = read_events(folder, None)
    end = list(step_windows(events).values())[-1 - LAST][1]
    shown: list[Event] = [event for event in events if (event.end <= end if event.role == RUN else event.start < end)]
    stretch = choose_stretch(shown, max_steps=2)
    assert stretch is not None
    return stretch


def compare_bytes(folder: Path, options: argparse.Namespace) -> bool:
    """Prints the bytes through the driver for each sample at every side; whether they are equal."""
    steps, results = FIRST + 2 + LAST, {}
    with judge(0.0, options.scorers) as address:
        for side in options.sides:
            timings = middle(
                read_jsonl(run(SYNC_POOLS, address, folder / f"{side:04}", options, steps, side) / "timings.jsonl")
            )
            results[side] = {
                name: sum(line[name] for line in timings) for name in timings[0] if name.startswith("driver_bytes/")
            }
    samples = 2 * options.prompts * 16
    print(f"\nBytes through the driver, of {samples} samples in {steps - FIRST - LAST} iterations of own pools:\n")
    for side, value in results.items():
        parts = ", ".join(f"{name.partition('/')[2]} {size:.0f}" for name, size in value.items())
        print(f"{side} x {side} pixels: {sum(value.values()) / samples:.1f} a sample ({parts})")
    return len({tuple(sorted(value.items())) for value in results.values()}) == 1


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency-s", type=float, nargs="*", default=[0.2, 1.0], help="of the judge, for a batch")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument("--rounds", type=int, default=2, help="runs of each mode, in turn")
    parser.add_argument("--steps", type=int, default=7, help=f"of a run, of which {FIRST + LAST} do not count")
    parser.add_argument("--prompts", type=int, default=18, help="of an iteration, 16 images each; 48 are a micro-batch")
    parser.add_argument("--scorers", type=int, default=4, help="batches that are judged at the same time")
    parser.add_argument("--sides", type=int, nargs="*", default=[16, 32], help="pixels, for the bytes")
    parser.add_argument("--folder", type=Path, help="keeps the runs; else they are deleted")
    parser.add_argument("--picture", type=Path, help="SVG of the timelines at the longest latency")
    return parser.parse_args()


def main() -> None:
    options = parse()
    modes = [MODES[name] for name in options.modes]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        print(f"load of the machine before: {os.getloadavg()[0]:.1f}, of {os.cpu_count()} cores", flush=True)
        for latency_s in options.latency_s:
            runs: dict[Mode, list[Path]] = {mode: [] for mode in modes}
            loads: list[float] = []
            with judge(latency_s, options.scorers) as address:
                for number in range(options.rounds):
                    for name, mode in zip(options.modes, modes, strict=True):
                        at = folder / f"{latency_s:g}s_{name}_{number}"
                        runs[mode].append(run(mode, address, at, options, options.steps))
                        loads.append(os.getloadavg()[0])
                        print(f"{at.name}: load {loads[-1]:.1f}", file=sys.stderr, flush=True)
            print_table(latency_s, [measure(mode, folders, options.scorers) for mode, folders in runs.items()])
            print(f"load of the machine after each run: {min(loads):.1f} to {max(loads):.1f}", flush=True)
            if options.picture and latency_s == max(options.latency_s):
                drawn = {mode: runs[mode][-1] for mode in (SYNC_POOLS, ONE_OFF) if mode in runs}
                shown = {mode.name: stretch_of(folder) for mode, folder in drawn.items()}
                draw_stretches(shown, "measured", options.picture)
        if options.sides and not compare_bytes(folder, options):
            raise SystemExit("the bytes through the driver depend on the resolution")


if __name__ == "__main__":
    main()
