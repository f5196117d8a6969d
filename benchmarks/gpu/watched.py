"""Runs a task of the repository for some steps as it is, and says what they took.

A task is its ``main`` with a configuration, so what is measured is what a user runs: loader, clipping, optimiser,
logging, checks. Only this differs: random weights are drawn where they are used, since drawing billions of them on a
CPU takes minutes, and layers that start at zero get small ones, since zeros are no work; no report is made; and the run
is broken off after the last step that is measured, before it would evaluate, save and export.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import signal
import statistics
import sys
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.diffusion_families import fill
from benchmarks.gpu.cells import Setting
from sfumato.config.load import load_config
from sfumato.models.diffusion import load as diffusion_load
from sfumato.models.language import parts as language_parts
from sfumato.parallel import memory
from sfumato.parallel.weights import build_on_meta
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.lock import release_locks
from sfumato.tracking.run import Run

NEVER = 10**6
"""Steps of a run that is broken off, and steps between its evaluations."""


class Enough(BaseException):
    """All steps that are measured are done. Nothing that handles errors handles it."""


Result = TypeVar("Result")


@dataclass
class Steps:
    """What the measured steps of a run took and got through."""

    seconds: float = 0.0
    """Of all of them together, from the end of the step before the first."""
    amounts: dict[str, float] = field(default_factory=dict)
    """Tokens, images, operations, by the run's own count."""
    count: int = 0
    timings: list[dict[str, float]] = field(default_factory=list)
    """Lines of timings.jsonl."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    """Lines of metrics.jsonl, of all steps."""
    peak_gib: float = 0.0
    """Most memory of the GPU in any of them; 0 without one."""

    def mean(self, name: str) -> float:
        """Mean of a timing over the measured steps; 0 where no step has it."""
        return statistics.fmean(line.get(name, 0.0) for line in self.timings)

    def rates(self, *names: str) -> dict[str, float]:
        """Amounts a second, seconds a step, TFLOP/s and memory."""
        results = {f"{name}_per_s": self.amounts.get(name, 0.0) / self.seconds for name in names}
        results["step_s"] = self.seconds / self.count
        if "flops" in self.amounts:
            results["tflops_per_s"] = self.amounts["flops"] / self.seconds / 1e12
        if self.peak_gib:
            results["gpu_peak_gib"] = self.peak_gib
        return results


def run_steps(
    task: str,
    config: dict[str, Any],
    setting: Setting,
    warm_up: int,
    measured: int,
    each_step: Callable[[int], None] | None = None,
) -> Steps:
    """Runs ``tasks/<task>.py`` for ``warm_up`` steps that do not count, and ``measured`` that do.

    Args:
        task: a name in ``tasks/``.
        config: its configuration; ``train.device`` and ``train.max_steps`` are set here.
        setting: device and folders.
        warm_up: at least 1: the first step compiles and fills caches.
        measured: at least 1.
        each_step: called with the number of finished steps at the end of each, before it is timed.
    """
    module = task_module(task)
    train = {"device": setting.device, "max_steps": NEVER, "trackers": [], **config["train"]}
    if "rollout" in config:
        config = config | {"eval": {"every_steps": NEVER, **config.get("eval", {})}}
    schema = typing.get_type_hints(module.main)["config"]
    parsed = load_config(schema, overrides=config | {"train": train})
    steps, last = Steps(), warm_up + measured
    with watching(steps, setting, warm_up, last, each_step), drawn_on(setting.device), compiled_for(setting):
        run_here(module, parsed)
    folder = Path(parsed.train.output_dir)
    lines = [line for line in read_jsonl(folder / "timings.jsonl") if line["step"] > warm_up]
    steps.timings, steps.metrics = lines, list(read_jsonl(folder / "metrics.jsonl"))
    steps.peak_gib = max(line.get("memory/gpu_peak_mib", 0.0) for line in lines) / 1024
    return steps


def task_module(task: str) -> Any:
    """The module of a task, whose sisters stand beside it."""
    folder = str(Path(__file__).resolve().parents[2] / "tasks")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    return importlib.import_module(task)


def run_here(module: Any, parsed: Any) -> None:
    """``main`` until ``Enough``; then closes what the run held."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        module.main(parsed)
        raise RuntimeError(f"{module.__name__} ended before its measured steps were done")
    except Enough:  # what ends a run that has been measured
        pass
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if Run.newest is not None:
            Run.newest.close()
            Run.newest = None
        release_locks()
        gc.collect()


@contextlib.contextmanager
def watching(
    steps: Steps, setting: Setting, first: int, last: int, each_step: Callable[[int], None] | None
) -> Iterator[None]:
    """Inside, runs are timed from the end of step ``first`` to that of step ``last``, where they are broken off."""
    log, count, started = Run.log, Run.count, [0.0]

    def counted(run: Run, **amounts: Any) -> None:
        count(run, **amounts)
        if started[0]:
            for name, amount in amounts.items():
                value = sum(amount.values()) if isinstance(amount, dict) else amount
                steps.amounts[name] = steps.amounts.get(name, 0.0) + float(value)

    def logged(run: Run, step: int, *args: Any, **named: Any) -> None:
        log(run, step, *args, **named)
        if each_step is not None:
            each_step(step)
        if step == first:
            setting.wait()
            started[0] = time.perf_counter()
        elif step == last:
            setting.wait()
            steps.seconds, steps.count = time.perf_counter() - started[0], last - first
            raise Enough

    with (
        mock.patch.object(Run, "log", logged),
        mock.patch.object(Run, "count", counted),
        mock.patch.object(Run, "write_report", return_value=None),
    ):
        yield


@contextlib.contextmanager
def drawn_on(device: str) -> Iterator[None]:
    """Inside, models that are made from a description draw their weights on this device."""
    make, make_pipeline = language_parts._make, diffusion_load._make_pipeline

    def made(*args: Any) -> Any:
        with torch.device(device):
            return make(*args)

    def pipeline_made(*args: Any) -> Any:
        # on meta first: 20 B weights in float32 before they become bf16 would not fit on one GPU
        family, pipeline = cast("Any", build_on_meta(lambda: cast("Any", make_pipeline(*args))))
        generator = torch.Generator(device).manual_seed(1)
        for component in pipeline.components.values():
            if isinstance(component, torch.nn.Module):
                fill(component, device, None, generator)
        return family, pipeline

    with (
        mock.patch.object(language_parts, "_make", made),
        mock.patch.object(diffusion_load, "_make_pipeline", pipeline_made),
    ):
        yield


@contextlib.contextmanager
def compiled_for(setting: Setting) -> Iterator[None]:
    """Inside, ``train.compile`` generates code for GPUs only: for a CPU a C++ compiler would run for minutes, so that
    there graphs are made as ever, and run operation by operation."""
    defaults = memory.apply_memory_savings.__defaults__
    assert defaults and defaults[0] == "inductor", f"apply_memory_savings has other defaults now: {defaults}"
    taken = defaults if setting.on_gpu else ("aot_eager", *defaults[1:])
    with mock.patch.object(memory.apply_memory_savings, "__defaults__", taken):
        yield


@torch.no_grad()
def redraw_zeros(module: torch.nn.Module) -> None:
    """Small random numbers in the place of weights that are all zero, which multiply faster than those of training."""
    for parameter in module.parameters():
        if not parameter.any():
            generator = torch.Generator(parameter.device).manual_seed(1)
            parameter.normal_(std=0.02, generator=generator)


def largest_that_fits(sizes: Sequence[int], measure: Callable[[int], Result]) -> Result:
    """What ``measure`` gives with the first of some sizes that fits into the GPU's memory.

    Raises:
        torch.OutOfMemoryError: when the last one does not fit.
    """
    for size in sizes[:-1]:
        try:
            return measure(size)
        except torch.OutOfMemoryError as error:
            print(f"size {size}: {error}", flush=True)
        gc.collect()  # the error is gone, and with it what its stack held
        torch.cuda.empty_cache()
    return measure(sizes[-1])


@contextlib.contextmanager
def group_of_one(on_gpu: bool) -> Iterator[None]:
    """Inside, this process is the only rank of a process group, so that ``parallelize`` applies fsdp2."""
    if on_gpu:
        torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
