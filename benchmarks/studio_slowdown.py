"""What an open studio takes from a run that is at work.

    python -m benchmarks.studio_slowdown --model runs/quickstart/pretrain/hf_ckpt

runs the quickstart's RL with small steps twice, from the same seed, so that a step is the same work in both. Pages
watch every second block of steps of the first run, and the others of the second: each pair is one block, watched and
not, in wall time and in processor time of the run, and in the time that the run's threads waited for a core (the
kernel counts it, to the microsecond, where the speed of a shared machine changes from step to step). The server's
processor time is counted while pages watch and while none does. A page is a client that holds its stream of news open
and asks at each change for what the page Overview asks for; browsers stand on other machines. Both runs' metrics must
be equal to the byte.

``--long STEPS`` measures only the server, with pages that watch a run that has so many steps already and writes one a
second. ``--pairs FILE`` adds the pairs to a file and takes those of earlier calls along.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlencode, urlsplit

import numpy as np
import psutil

from benchmarks.studio import METRICS, TOKEN, Served, make_run
from sfumato.tracking.bootstrap import paired_bootstrap
from sfumato.tracking.json_lines import JsonLines

ROOT = Path(__file__).resolve().parent.parent
RUN = (
    f"{ROOT}/tasks/rl_diffusion.py {ROOT}/configs/quickstart/rl.yaml "
    "--rollout.num_prompts 3 --train.global_batch_size 24 "
    "--train.save_steps 1000 --eval.every_steps 1000 --eval.num_prompts 16"
).split()
WARM_UP = 2
"""Steps before the first block."""
LOOK_EVERY_S = 0.01
WIDTH = 400
"""Pixels of a curve on the page."""


@dataclass(frozen=True)
class Block:
    """Means over the steps of a block: seconds, the run's processor seconds and those that it waited for a core, and
    the server's processor seconds a second."""

    clock_s: float
    processor_s: float
    waited_s: float
    server_share: float


class Page(threading.Thread):
    """Watches a run as the page Overview does, without drawing it."""

    def __init__(self, address: str, run: str) -> None:
        super().__init__(daemon=True)
        self._host = urlsplit(address).netloc
        self._run = run
        self._cookie = self._sign_in()
        self._stream = self._open(f"/events?{urlencode({'run': run})}")
        self._step_shown = ""
        self._is_closed = False
        self.num_changes = 0
        self._error: BaseException | None = None

    def _sign_in(self) -> str:
        connection = http.client.HTTPConnection(self._host)
        connection.request("GET", f"/?token={TOKEN}")
        return connection.getresponse().headers["set-cookie"].partition(";")[0]

    def _open(self, path: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(self._host)
        connection.request("GET", path, headers={"cookie": self._cookie})
        return connection.getresponse()

    def run(self) -> None:
        try:
            self._read_page()
            while not self._is_closed:
                line = self._stream.readline()
                if not line:
                    raise EOFError("the studio has ended the stream")
                if line.startswith(b"event: change"):
                    self.num_changes += 1
                    self._read_page()
        except (OSError, EOFError, ValueError, AttributeError, AssertionError) as error:
            # reading what this program has closed ends in one of these, too
            if not self._is_closed:
                self._error = error

    def _read_page(self) -> None:
        # one connection for what is asked together: the studio closes those that rest
        requests = http.client.HTTPConnection(self._host)
        overview = json.loads(self._get(requests, "/api/overview", run=self._run))
        self._get(requests, "/api/curves", run=self._run, name=overview["curves"], width=WIDTH)
        shown = f"{overview['last_sample_step']} {overview['samples_generation']}"
        if shown != self._step_shown and overview["last_sample_step"] is not None:
            step = overview["last_sample_step"]
            data = json.loads(self._get(requests, "/api/step", run=self._run, step=step))
            samples = data["evaluation"] or [sample for group in data["groups"] for sample in group["samples"]]
            for sample in samples[:12]:
                self._get(requests, "/thumbnail", run=self._run, step=step, file=sample["file"], width=256)
        self._step_shown = shown
        self._get(requests, "/api/status", run=self._run)
        requests.close()

    def _get(self, requests: http.client.HTTPConnection, path: str, **parameters: object) -> bytes:
        requests.request("GET", f"{path}?{urlencode(parameters, doseq=True)}", headers={"cookie": self._cookie})
        answer = requests.getresponse()
        content = answer.read()
        assert answer.status == 200, (path, answer.status, content)
        return content

    def close(self) -> None:
        """Ends the stream, as a tab that is closed does; raises RuntimeError where the page has stopped before."""
        self._is_closed = True
        if self._error is not None or not self.is_alive():
            raise RuntimeError(f"a page has stopped watching: {self._error!r}")
        self._stream.close()


def with_children(pid: int) -> list[psutil.Process]:
    """A process, its children and theirs."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def processor_seconds(pid: int) -> float:
    """Processor time of a process and its children."""
    times = [member.cpu_times() for member in with_children(pid)]
    return sum(used.user + used.system for used in times)


def waiting_seconds(pid: int) -> float:
    """Time for which threads of a process and its children could run and had no core (Linux: second of schedstat)."""
    waited_ns = 0
    for member in with_children(pid):
        for path in Path(f"/proc/{member.pid}/task").glob("*/schedstat"):
            with contextlib.suppress(FileNotFoundError):  # a thread has ended
                waited_ns += int(path.read_text().split()[1])
    return waited_ns / 1e9


def wait_for_lines(path: Path, number: int, process: subprocess.Popen[bytes]) -> None:
    """Waits until a file has so many lines; raises RuntimeError where the run ends before."""
    size, lines = 0, 0
    while lines < number:
        if process.poll() is not None:
            raise RuntimeError(f"the run ended with exit code {process.returncode}")
        time.sleep(LOOK_EVERY_S)
        if path.exists() and path.stat().st_size != size:
            content = path.read_bytes()
            size = len(content)
            lines = content.count(b"\n")


def measure_run(
    folder: Path, served: Served, model: str, num_blocks: int, block: int, pages: int, first_is_watched: bool
) -> list[tuple[bool, Block]]:
    """Blocks of a run that are watched and not, in turn."""
    steps = WARM_UP + num_blocks * block
    more = ["--model.model_path", model, "--train.output_dir", str(folder), "--train.max_steps", str(steps + 1)]
    with (folder.parent.parent / f"{folder.name}.txt").open("wb") as output:
        run = subprocess.Popen([sys.executable, *RUN, *more], stdout=output, stderr=subprocess.STDOUT)
    try:
        blocks = measure_blocks(run, folder, served, num_blocks, block, pages, first_is_watched)
        assert run.wait(300) == 0
    finally:
        run.kill()
    return blocks


def measure_blocks(
    run: subprocess.Popen[bytes],
    folder: Path,
    served: Served,
    num_blocks: int,
    block: int,
    pages: int,
    first_is_watched: bool,
) -> list[tuple[bool, Block]]:
    """Blocks of a run that has just been started."""
    blocks: list[tuple[bool, Block]] = []
    metrics = folder / "metrics.jsonl"
    is_watched = first_is_watched
    wait_for_lines(metrics, WARM_UP + 1, run)  # the evaluation before the first step has a line, too
    for number in range(num_blocks):
        watchers = [Page(served.address, folder.name) for _ in range(pages if is_watched else 0)]
        began_s = time.perf_counter()
        run_s = processor_seconds(run.pid)
        run_waited_s = waiting_seconds(run.pid)
        server_s = processor_seconds(served.process.pid)
        for watcher in watchers:
            watcher.start()
        wait_for_lines(metrics, WARM_UP + 1 + (number + 1) * block, run)
        passed_s = time.perf_counter() - began_s
        used_s = processor_seconds(run.pid) - run_s
        waited_s = waiting_seconds(run.pid) - run_waited_s
        share = (processor_seconds(served.process.pid) - server_s) / passed_s
        blocks.append((is_watched, Block(passed_s / block, used_s / block, waited_s / block, share)))
        for watcher in watchers:
            watcher.close()
        is_watched = not is_watched
    return blocks


def measure_pairs(root: Path, model: str, num_blocks: int, block: int, pages: int) -> list[tuple[Block, Block]]:
    """Blocks as they are while pages watch, and while none does: the same steps of two runs."""
    root.mkdir(parents=True)
    served = Served(root)
    first = measure_run(root / "first", served, model, num_blocks, block, pages, True)
    second = measure_run(root / "second", served, model, num_blocks, block, pages, False)
    served.close()
    contents = [(root / name / "metrics.jsonl").read_bytes() for name in ("first", "second")]
    assert contents[0] == contents[1], "the metrics of both runs differ"
    return [
        (one, other) if is_watched else (other, one)
        for (is_watched, one), (_, other) in zip(first, second, strict=True)
    ]


def measure_long(root: Path, steps: int, pages: int, seconds: float) -> dict[str, float]:
    """The server's share of a core while pages watch a run that has many steps and writes one a second."""
    folder = root / "long"
    make_run(folder, steps)
    served = Served(root)
    watchers = [Page(served.address, "long") for _ in range(pages)]
    for watcher in watchers:
        watcher.start()
    metrics = JsonLines(folder / "metrics.jsonl")
    timings = JsonLines(folder / "timings.jsonl")
    generator = np.random.default_rng(1)
    deadline = time.monotonic() + seconds + 10
    measured_from = time.monotonic() + 10
    step, began_s, server_s = steps, 0.0, 0.0
    while time.monotonic() < deadline:
        step += 1
        values = {f"group_{number % 6}/metric_{number}": float(generator.normal()) for number in range(METRICS)}
        metrics.write({"step": step, "reward/total": 1.0, **values})
        timings.write({"step": step, "time/step_s": 1.0})
        if not began_s and time.monotonic() > measured_from:
            began_s = time.monotonic()
            server_s = processor_seconds(served.process.pid)
        time.sleep(1)
    share = (processor_seconds(served.process.pid) - server_s) / (time.monotonic() - began_s)
    for watcher in watchers:
        watcher.close()
    time.sleep(2)
    server_s = processor_seconds(served.process.pid)
    time.sleep(10)
    idle = (processor_seconds(served.process.pid) - server_s) / 10
    served.close()
    changes = sum(watcher.num_changes for watcher in watchers) / pages
    return {
        f"server with {pages} pages, {steps} steps before, share of a core (%)": 100 * share,
        "changes that a page was told of": changes,
        "server that nobody watches, share of a core (%)": 100 * idle,
    }


def describe(pairs: list[tuple[Block, Block]]) -> dict[str, tuple[float, float, float]]:
    """Means with their intervals, in percent."""
    figures = {
        "steps take longer, by the clock": [one.clock_s / other.clock_s - 1 for one, other in pairs],
        "steps take longer, in processor time": [one.processor_s / other.processor_s - 1 for one, other in pairs],
        "of a step, threads of the run wait for a core longer": [
            (one.waited_s - other.waited_s) / other.clock_s for one, other in pairs
        ],
        "the server's share of a core while pages watch": [one.server_share for one, _ in pairs],
        "the server's share of a core while none does": [other.server_share for _, other in pairs],
    }
    return {name: paired_bootstrap([100 * value for value in values]) for name, values in figures.items()}


def main() -> None:
    """Measures, and prints a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="pretrained model of the quickstart")
    parser.add_argument("--blocks", type=int, default=20, help="pairs")
    parser.add_argument("--block", type=int, default=3, help="steps of a block")
    parser.add_argument("--pages", type=int, default=1)
    parser.add_argument("--pairs", type=Path, help="file of JSON lines to which the pairs are added")
    parser.add_argument("--long", type=int, help="measure the server alone, on a run of so many steps")
    parser.add_argument("--seconds", type=float, default=30.0, help="of --long")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "runs"
        if options.long:
            for name, value in measure_long(root, options.long, options.pages, options.seconds).items():
                print(f"{name}: {value:.3g}")
            return
        if not options.model:
            parser.error("--model is needed: make quickstart makes one, in runs/quickstart/pretrain/hf_ckpt")
        model = os.path.abspath(options.model)
        pairs = measure_pairs(root, model, options.blocks, options.block, options.pages)
    if options.pairs:
        lines = options.pairs.read_text().splitlines() if options.pairs.exists() else []
        lines += [json.dumps([asdict(one), asdict(other)]) for one, other in pairs]
        options.pairs.write_text("\n".join(lines) + "\n")
        pairs = [(Block(**one), Block(**other)) for one, other in map(json.loads, lines)]
    seconds = float(np.mean([other.clock_s for _, other in pairs]))
    print(f"{len(pairs)} pairs; a step takes {seconds:.2f} s")
    for name, (mean, low, high) in describe(pairs).items():
        print(f"{name}: {mean:.2f} %, 95 % interval {low:.2f} to {high:.2f} %")


if __name__ == "__main__":
    main()
