"""The studio with a long run: how fast its pages come, how large they get, and what it costs a run that is at work.

    python -m benchmarks.studio

makes a run of 10,000 steps and 100,000 pictures in a temporary folder, serves it, and measures in chromium without a
screen: the time to the first curves of the overview and the first pictures of the gallery, the nodes of the page while
its slider jumps, the memory of server and page, and twenty tabs at once. ``--slowdown`` measures how much longer the
steps of a process that computes and writes metrics take while five pages watch it, by the clock and in processor time:
pairs of stretches with and without, in turn. The pages are drawn on the same machine, by browsers that people have on
their own; the server's share of a core is given beside.

It needs chromium and the package playwright.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil

from sfumato.tracking.bootstrap import paired_bootstrap
from sfumato.tracking.json_lines import JsonLines
from sfumato.tracking.samples import write_picture

TOKEN = "a-token-for-the-benchmark"
STEPS, PICTURES, METRICS = 10_000, 10, 60
SERVER = [sys.executable, "-m", "sfumato.cli", "studio"]


def make_run(folder: Path, steps: int) -> None:
    """A run with ``METRICS`` curves and ``PICTURES`` evaluation samples at every step, the files hard links of some."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(f"train:\n  max_steps: {steps}\n")
    environment = {"run_id": "made up", "task": "rl_diffusion", "date": "2026-11-25", "total_steps": steps}
    (folder / "environment.json").write_text(json.dumps(environment))
    (folder / "log.txt").write_text("made up\n")
    generator = np.random.default_rng(0)
    pictures = []
    for number in range(64):
        path = folder.parent / f"picture_{number}.png"
        write_picture(generator.integers(0, 255, (64, 64, 3), dtype=np.uint8), path)
        pictures.append(path)
    metrics = JsonLines(folder / "metrics.jsonl")
    timings = JsonLines(folder / "timings.jsonl")
    for step in range(1, steps + 1):
        values = {f"group_{number % 6}/metric_{number}": float(generator.normal()) for number in range(METRICS)}
        metrics.write({"step": step, "reward/total": step / steps, "eval/reward/total": step / steps, **values})
        timings.write({"step": step, "time/step_s": 1.0})
        samples = folder / "samples" / f"step_{step:06d}"
        samples.mkdir(parents=True)
        rows = []
        for number in range(PICTURES):
            name = f"eval_{number:04d}.png"
            os.link(pictures[(step * PICTURES + number) % 64], samples / name)
            row = {"file": name, "kind": "eval", "prompt": f"prompt {number}", "seed": 7, "sample_id": number}
            rows.append(json.dumps({**row, "rewards": {"r": 0.5}, "total": 0.5, "advantage": None}) + "\n")
        (samples / "samples.jsonl").write_text("".join(rows))
    metrics.close()
    timings.close()


class Served:
    """A studio in a process of its own."""

    def __init__(self, root: Path) -> None:
        environment = os.environ | {"SFUMATO_STUDIO_TOKEN": TOKEN, "XDG_CACHE_HOME": str(root.parent / "cache")}
        command = [*SERVER, str(root), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(3)]
        self.address = next(line.split()[1] for line in lines if line.startswith("open "))
        self.base = self.address.partition("/?")[0]

    @property
    def mib(self) -> float:
        """Resident memory."""
        return psutil.Process(self.process.pid).memory_info().rss / 2**20

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(20)


def measure_pages(root: Path, num_tabs: int) -> dict[str, float]:
    """Times, nodes and memory of the pages of the made-up run."""
    from playwright.sync_api import sync_playwright

    served = Served(root)
    figures: dict[str, float] = {"server, before a page (MiB)": served.mib}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        context = browser.new_context(viewport={"width": 1280, "height": 900})
        page = context.new_page()
        began = time.perf_counter()
        page.goto(served.address)
        page.wait_for_selector("td")
        figures["first page, list of runs (s)"] = time.perf_counter() - began
        for name, view, selector in (
            ("overview with curves (s)", "overview?run=long", "figure canvas"),
            ("gallery, first pictures (s)", "gallery?run=long", "a.cell img"),
            ("curves (s)", "curves?run=long", "figure canvas"),
        ):
            began = time.perf_counter()
            page.goto(f"{served.base}/#/{view}")
            page.wait_for_selector(selector)
            figures[name] = time.perf_counter() - began
        page.goto(f"{served.base}/#/gallery?run=long")
        page.wait_for_selector("text=10 prompts and seeds", timeout=120_000)
        page.wait_for_selector("a.cell img")
        nodes, waits = [], []
        for column in np.random.default_rng(1).integers(0, STEPS - 1, 60).tolist():
            began = time.perf_counter()
            page.evaluate(f"document.querySelector('.slider input').value = {column}")
            page.dispatch_event(".slider input", "input")
            page.wait_for_selector("a.cell.active img")
            waits.append(time.perf_counter() - began)
            nodes.append(page.evaluate("document.querySelectorAll('*').length"))
        figures["gallery, a jump of the slider (s, median)"] = statistics.median(waits)
        figures["gallery, nodes of the page at most"] = max(nodes)
        client = context.new_cdp_session(page)
        client.send("HeapProfiler.collectGarbage")
        figures["page, heap after 60 jumps (MiB)"] = page.evaluate("performance.memory.usedJSHeapSize") / 2**20
        figures["server after it (MiB)"] = served.mib
        began = time.perf_counter()
        tabs = [browser.new_context().new_page() for _ in range(num_tabs)]
        for tab in tabs:
            tab.goto(served.address)
            tab.goto(f"{served.base}/#/overview?run=long", wait_until="commit")
        for tab in tabs:
            tab.wait_for_selector("figure canvas")
        figures[f"{num_tabs} tabs, all with curves (s)"] = time.perf_counter() - began
        before = psutil.Process(served.process.pid).cpu_times()
        time.sleep(10)
        after = psutil.Process(served.process.pid).cpu_times()
        busy_s = after.user + after.system - before.user - before.system
        figures[f"server with {num_tabs} tabs that watch, share of a core (%)"] = 10 * busy_s
        figures[f"server with {num_tabs} tabs (MiB)"] = served.mib
        browser.close()
    served.close()
    return figures


TRAIN = """
import sys, time
import numpy as np
from pathlib import Path
from sfumato.tracking.json_lines import JsonLines
folder = Path(sys.argv[1])
metrics, timings = JsonLines(folder / "metrics.jsonl"), JsonLines(folder / "timings.jsonl")
weights = np.random.default_rng(0).normal(size=(300, 300))
step = 0
while True:
    step += 1
    began = time.perf_counter()
    for _ in range(40):
        weights = np.tanh(weights @ weights / 20)
    seconds = time.perf_counter() - began
    metrics.write({"step": step, **{f"m/{i}": float(weights[0, i]) for i in range(60)}})
    timings.write({"step": step, "time/step_s": seconds})
"""


def cpu_seconds(pid: int) -> float:
    """Processor time that a process has taken."""
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


def measure_stretch(run: int, server: int, metrics: Path, stretch_s: float) -> dict[str, float]:
    """Seconds and processor seconds of a step, and the server's share of a core, over a stretch of time."""
    began_s = time.perf_counter()
    run_s = cpu_seconds(run)
    server_s = cpu_seconds(server)
    first = sum(1 for _ in metrics.open())
    time.sleep(stretch_s)
    steps = sum(1 for _ in metrics.open()) - first
    passed_s = time.perf_counter() - began_s
    return {
        "clock": passed_s / steps,
        "processor": (cpu_seconds(run) - run_s) / steps,
        "server": (cpu_seconds(server) - server_s) / passed_s,
    }


def measure_slowdown(root: Path, num_pairs: int, stretch_s: float) -> dict[str, tuple[float, float, float]]:
    """By how much steps take longer while pages watch: means of the ratios of pairs, less 1, with their intervals, and
    the server's share of a core while they watch."""
    from playwright.sync_api import sync_playwright

    folder = root / "working"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("train:\n  max_steps: 1000000\n")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    run = subprocess.Popen([sys.executable, "-c", TRAIN, str(folder)], env=environment)
    served = Served(root)
    changes: dict[str, list[float]] = {"clock": [], "processor": [], "server": []}
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        tabs = [browser.new_context().new_page() for _ in range(5)]
        for tab in tabs:
            tab.goto(served.address, timeout=120_000)
        for number in range(num_pairs):
            stretches: dict[bool, dict[str, float]] = {}
            # the order changes, so that whatever else the machine does counts for both
            for is_watched in (True, False) if number % 2 else (False, True):
                for tab in tabs:
                    tab.goto(f"{served.base}/#/overview?run=working" if is_watched else "about:blank")
                for tab in tabs if is_watched else ():
                    tab.wait_for_selector("figure canvas", timeout=120_000)
                stretches[is_watched] = measure_stretch(
                    run.pid, served.process.pid, folder / "metrics.jsonl", stretch_s
                )
            for name in ("clock", "processor"):
                changes[name].append(stretches[True][name] / stretches[False][name] - 1)
            changes["server"].append(stretches[True]["server"])
        browser.close()
    run.kill()
    run.wait()
    served.close()
    return {name: paired_bootstrap(values) for name, values in changes.items()}


def main() -> None:
    """Measures, and prints a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--tabs", type=int, default=20)
    parser.add_argument("--slowdown", action="store_true", help="measure only what a run loses")
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "runs"
        if options.slowdown:
            titles = {
                "clock": "steps take longer, by the clock",
                "processor": "steps take longer, in processor time",
                "server": "the server's share of a core while five pages watch",
            }
            for name, figures in measure_slowdown(root, options.pairs, options.seconds).items():
                mean, low, high = (100 * figure for figure in figures)
                print(f"{titles[name]}: {mean:.2f} %, 95 % interval {low:.2f} to {high:.2f} %")
            return
        make_run(root / "long", options.steps)
        for name, value in measure_pages(root, options.tabs).items():
            print(f"{name}: {value:.3g}", flush=True)


if __name__ == "__main__":
    main()
