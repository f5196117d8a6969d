"""Measures sfumato on a GPU within a budget: stages, each a process with a time limit of its own.

    python -m benchmarks.gpu.run --budget 540                      # again until all is done; results: $OUT, or runs/gpu
    python -m benchmarks.gpu.run --budget 540 --only sft rl        # these alone, with all of the time
    python -m benchmarks.gpu.run --budget 120 --only rl --cells compile/2    # chosen cells, however short the time is
    python -m benchmarks.gpu.run --tiny                            # on a CPU, in minutes: whether it works

Each cell appends a line to ``results.jsonl`` when it ends, and a table is printed last, with what to do where a figure
is beyond its bound; what processes say is in ``log.txt``. A cell that fails costs itself; one whose process dies costs
itself, too: the stage is started again after it. What a stage does not use of its time goes to the next ones. A stage
that does not fit into what remains of the budget waits for the next call, which begins with what is not measured yet;
a cell that failed is tried again when the commit is another one, or with ``--again``. Exit code 1 when something failed
or a bound is exceeded, 2 when nothing could be measured. ``benchmarks.gpu.tables`` puts the figures into the pages.
"""

from __future__ import annotations

import argparse
import importlib
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu import pins, results
from benchmarks.gpu.results import (
    BEGUN,
    BROKEN,
    CRASHED,
    EXCEEDED,
    FAILED,
    LATE,
    LEFT_OUT,
    LISTED,
    MEASURED,
    NOT_HERE,
    ROOT,
    Writer,
)


@dataclass(frozen=True)
class Stage:
    """A module of this package with a function ``cells(setting)``, and ``BOUNDS`` of its figures."""

    name: str
    seconds: float
    """What it needs on a GPU."""
    tiny_seconds: float
    """What it needs with --tiny on a CPU."""
    about: str


STAGES = (
    Stage("distances", 240, 40, "the probe and the self-check at real size: eager, compiled, fixed sizes, any size"),
    Stage("served", 90, 4, "vLLM, started by a process group of two: log-probs, updates, sleep, restart"),
    Stage("doctor", 80, 30, "sfumato doctor, and one compiled block"),
    Stage("syncs", 90, 60, "waits and devices of every task, compiled, recomputed and offloaded"),
    Stage("sft", 300, 18, "fine-tuning of a language model of 1.7 B"),
    Stage("attention", 40, 14, "attention of 8,192 tokens: kernels by name, memory"),
    Stage("experts", 20, 8, "a layer of 128 experts, some without tokens"),
    Stage("replay", 50, 20, "replay error of Flow-GRPO's relatives"),
    Stage("ray", 60, 45, "actor and sampler on one GPU, under Ray"),
    Stage("memory", 90, 25, "peak memory beside what sfumato check predicts"),
    Stage("families", 120, 16, "FLUX, Qwen-Image and Wan as their configurations have them"),
    Stage("resume", 150, 20, "saving and resuming: 8 B with adapters, 1.7 B whole"),
    Stage("ceilings", 20, 8, "what the device can do: products, copies, the attention that torch takes"),
    Stage("kernels", 50, 14, "kernels against float64 on the CPU"),
    Stage("tasks", 60, 32, "tiny runs of every task: the CPU's losses, asynchronous saving, resuming"),
    Stage("text_rl", 40, 12, "RL of a language model: the embedded engine, an update"),
    Stage("rl", 400, 26, "Flow-GRPO at the size of Stable Diffusion 3.5 medium"),
    Stage("traces", 60, 22, "two traced steps of both"),
    Stage("tests", 600, 10, "tests of the repository on the device"),
)
"""In the order of what they teach; five calls of nine minutes hold all. Compiled cells of real size need more than
85 s, most of it for the compiler, on a machine that has compiled nothing before."""

TABLE_S = 5.0
"""Seconds of the budget that are kept for the end."""

GRACE_S = 5.0
"""Seconds that a process is given to end after SIGTERM."""

TAIL = 600
"""Characters of a dead process's output that its line keeps."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--budget", type=float, help="seconds for everything; default 540, with --tiny what the stages need"
    )
    parser.add_argument("--output", type=Path, default=Path(os.environ.get("OUT", "runs/gpu")), help="folder")
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="STAGE", help=", ".join(names))
    parser.add_argument("--cells", nargs="+", default=[], metavar="CELL", help="only cells whose names contain one")
    parser.add_argument("--tiny", action="store_true", help="sizes for a CPU")
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: a GPU; --tiny: the CPU"
    )
    parser.add_argument("--commit", help="what is measured, where there is no git")
    parser.add_argument("--again", action="store_true", help="also cells that the results already hold")
    parser.add_argument("--crash", choices=names, metavar="STAGE", help="kill its process in its first cell: a drill")
    parser.add_argument("--inside", nargs=3, metavar=("STAGE", "SECONDS", "RUN"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(command_line: list[str] | None = None) -> int:
    arguments = parse(command_line)
    if arguments.inside:
        return inside(arguments)
    started = time.monotonic()
    result = pins.problems()
    if text := pins.told(result):
        print(text, flush=True)
    if result["needed"]:
        print("error: without the packages that are needed nothing is measured", file=sys.stderr)
        return 2
    if (device := device_of(arguments)) is None:
        print("error: torch finds no GPU; --tiny tries the suite on the CPU", file=sys.stderr)
        return 2
    arguments.output.mkdir(parents=True, exist_ok=True)
    run = f"{datetime.now(UTC):%Y%m%d_%H%M%S}_{os.getpid()}"
    stages = waiting_stages(arguments)
    shares = {stage: stage.tiny_seconds if arguments.tiny else stage.seconds for stage in stages}
    whole = sum(shares.values())
    budget = arguments.budget or (whole if arguments.tiny else 540.0)
    scale = max(1.0, budget / max(whole, 1.0))
    postponed, planned_end = [], 0.0
    for stage, share in shares.items():
        planned_end += share * scale
        limit = min(planned_end, budget - TABLE_S) - (time.monotonic() - started)
        if limit < share / 2 and not arguments.cells:  # chosen cells need less than their stage
            postponed.append(stage.name)
            continue
        print(f"{stage.name}: {stage.about}; at most {limit:.0f} s", flush=True)
        begun, cpu = time.monotonic(), cpu_s()
        run_stage(stage, arguments, device, run, limit)
        print(f"  took {time.monotonic() - begun:.0f} s, {cpu_s() - cpu:.0f} s of processors", flush=True)
    path = arguments.output / results.FILE
    lines = [line for line in results.read([path]) if line["run"] == run] if path.exists() else []
    print(results.table(lines), flush=True)
    if postponed:
        print(f"no time was left for {', '.join(postponed)}: give the same command again", flush=True)
    took = f"{time.monotonic() - started:.0f} s, {cpu_s():.0f} s of processors"
    print(f"{path}: {took}", flush=True)
    return 1 if any(line["status"] in BROKEN for line in results.last_of_each(lines).values()) else 0


def waiting_stages(arguments: argparse.Namespace) -> list[Stage]:
    """The chosen stages, without those of which earlier calls have settled all cells."""
    chosen = [stage for stage in STAGES if stage.name in arguments.only]
    path = arguments.output / results.FILE
    if arguments.again or arguments.cells or not path.exists():
        return chosen
    lines = [line for line in results.read([path]) if line["tiny"] == arguments.tiny]
    commit = results.commit_of(arguments.commit)
    cells = {line["stage"]: set(line["values"]["cells"]) for line in lines if line["status"] == LISTED}
    for (stage, cell), line in results.last_of_each(lines).items():
        if results.is_settled(line, commit):
            cells.get(stage, set()).discard(cell)
    done = [stage.name for stage in chosen if cells.get(stage.name, {""}) == set()]
    if done:
        print(f"measured before: {', '.join(done)}", flush=True)
    return [stage for stage in chosen if stage.name not in done]


def cpu_s() -> float:
    """Processor seconds, user and system, of the processes that this one has started and that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def device_of(arguments: argparse.Namespace) -> str | None:
    """cuda or cpu; None when a GPU is asked for and there is none."""
    if arguments.device == "cpu" or (arguments.device == "auto" and arguments.tiny):
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else None


def run_stage(stage: Stage, arguments: argparse.Namespace, device: str, run: str, limit: float) -> None:
    """Runs a stage's process until it has ended by itself or its time is over; again after a cell in which it died."""
    path, until = arguments.output / results.FILE, time.monotonic() + limit
    python_path = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *([python_path] if python_path else [])])}
    environment |= {
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "SFUMATO_GPU_COMMAND": results.command_of(),
    }
    while (remaining_s := until - time.monotonic()) > 1:
        log = arguments.output / "log.txt"
        command = [sys.executable, "-m", "benchmarks.gpu.run", "--inside", stage.name, f"{remaining_s:.1f}", run]
        command += [
            "--output",
            str(arguments.output),
            "--device",
            device,
            "--commit",
            results.commit_of(arguments.commit),
        ]
        command += ["--tiny"] * arguments.tiny + ["--again"] * arguments.again
        command += [*(["--cells", *arguments.cells] if arguments.cells else [])]
        command += ["--crash", arguments.crash] if arguments.crash else []
        with log.open("ab") as file:
            file.write(f"=== {stage.name}\n".encode())
            file.flush()
            size = file.tell()
            code = run_process(command, environment, file, remaining_s)
        if code == 0:
            return
        said = log.read_bytes()[size:].decode(errors="replace").strip()[-TAIL:]
        if not close_begun(path, stage.name, run, code, said):  # it died before or after its cells
            about = {"run": run, "tiny": arguments.tiny, "commit": results.commit_of(arguments.commit)}
            Writer(path, about).write(stage.name, "the stage", CRASHED if code else LATE, reason=ending(code, said))
            return


def run_process(command: list[str], environment: dict[str, str], file: Any, limit: float) -> int | None:
    """Exit code; None when it had to be ended at its limit, with all processes that it had started."""
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
    )
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Ends what is left of a process and of its session: asks first."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        deadline = time.monotonic() + GRACE_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
    process.wait()


def close_begun(path: Path, stage: str, run: str, code: int | None, said: str) -> bool:
    """Writes what became of the cell that a dead process had begun. Returns whether there was one."""
    lines = [line for line in results.read([path]) if line["run"] == run and line["stage"] == stage]
    if not lines or lines[-1]["status"] != BEGUN:
        return False
    line = lines[-1]
    about = {
        name: value for name, value in line.items() if name not in ("stage", "cell", "status", "values", "seconds")
    }
    status = LATE if code is None else CRASHED
    Writer(path, about).write(stage, line["cell"], status, reason=ending(code, said))
    return True


def ending(code: int | None, said: str) -> str:
    if code is None:
        return "ended at the stage's limit"
    if code < 0:
        return f"ended by {signal.Signals(-code).name}; {said}"
    return f"exit code {code}; {said}"


def inside(arguments: argparse.Namespace) -> int:
    """The process of a stage: measures its cells one after the other."""
    name, seconds, run = arguments.inside
    until = time.monotonic() + float(seconds)

    from sfumato.kernels import choose_kernels

    choose_kernels()
    import torch

    from benchmarks.gpu.cells import Setting

    if arguments.device == "cpu":
        torch.set_num_threads(1)
    path = arguments.output / results.FILE
    about = {
        "run": run,
        "commit": results.commit_of(arguments.commit),
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "device": torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "tiny": arguments.tiny,
        "command": os.environ.get("SFUMATO_GPU_COMMAND", results.command_of()),
    }
    writer = Writer(path, about)
    lines = results.read([path]) if path.exists() else []
    settled = {line["cell"] for line in lines if line["stage"] == name and skips(line, run, arguments)}
    scratch = Path(tempfile.mkdtemp(prefix=f"sfumato_{name}_"))
    setting = Setting(arguments.device, arguments.tiny, arguments.output.resolve(), scratch, until)
    try:
        module = importlib.import_module(f"benchmarks.gpu.{name}")
        cells = module.cells(setting)
        writer.write(name, "all", LISTED, values={"cells": list(cells)})
        chosen = [cell for cell in cells if not arguments.cells or any(part in cell for part in arguments.cells)]
        waiting = {cell: cells[cell] for cell in chosen if cell not in settled}
        measure_all(waiting, name, setting, writer, arguments, module.BOUNDS)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    sys.stdout.flush()
    os._exit(0)  # threads and worker processes of what was broken off need not be waited for


def skips(line: dict[str, Any], run: str, arguments: argparse.Namespace) -> bool:
    """Whether a line says that its cell need not be begun: this run has ended it, or an earlier one has settled it."""
    if line["run"] == run:
        return line["status"] != BEGUN
    commit = results.commit_of(arguments.commit)
    return line["tiny"] == arguments.tiny and not arguments.again and results.is_settled(line, commit)


def measure_all(
    cells: dict[str, Any],
    stage: str,
    setting: Any,
    writer: Writer,
    arguments: argparse.Namespace,
    bounds: tuple[Any, ...] = (),
) -> None:
    """Measures cells one after the other, and has their figures judged."""
    from benchmarks.gpu.cells import NotHereError, judge

    longest = 0.0
    for cell, measure in cells.items():
        if setting.left_s < longest:
            reason = f"{setting.left_s:.0f} s were left, and another cell took {longest:.0f} s"
            writer.write(stage, cell, LEFT_OUT, reason=reason)
            continue
        writer.write(stage, cell, BEGUN)
        if arguments.crash == stage and cell == next(iter(cells)) and not said_crash(writer, stage):
            os.kill(os.getpid(), signal.SIGSEGV)
        started = time.monotonic()
        try:
            values = measure(setting)
            assert "ray" not in sys.modules, "what is measured has imported ray"
        except NotHereError as error:
            writer.write(stage, cell, NOT_HERE, reason=str(error))
        except Exception as error:
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}"[:TAIL]
            writer.write(stage, cell, FAILED, reason=reason, seconds=time.monotonic() - started)
        else:
            judged = judge(bounds, cell, values, setting)
            status = MEASURED if all(verdict["met"] for verdict in judged) else EXCEEDED
            writer.write(stage, cell, status, values=values, judged=judged, seconds=time.monotonic() - started)
        longest = max(longest, time.monotonic() - started)
        free(setting)


def said_crash(writer: Writer, stage: str) -> bool:
    """Whether the drill has been done: the stage goes on after the cell that it cost."""
    lines = results.read([writer.path])
    return any(
        line["run"] == writer.about["run"] and line["stage"] == stage and line["status"] == CRASHED for line in lines
    )


def free(setting: Any) -> None:
    """Gives back what a cell has left: models, compiled code, the allocator's memory."""
    import gc

    import torch

    gc.collect()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    if setting.on_gpu:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
