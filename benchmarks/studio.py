"""The studio with a long run: how fast its pages come, and how large they get.

    python -m benchmarks.studio

makes a run of 10,000 steps and 100,000 pictures in a temporary folder, serves it, and measures in chromium without a
screen: the time to the first curves of the overview and the first pictures of the gallery, the nodes of the page while
its slider jumps, the memory of server and page, and twenty tabs at once. ``benchmarks.studio_slowdown`` measures what a
run that is at work loses.

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
        page.wait_for_selector("td .figures")
        figures["list of runs with their figures, all read (s)"] = time.perf_counter() - began
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


def main() -> None:
    """Measures, and prints a line for each figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--tabs", type=int, default=20)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "runs"
        make_run(root / "long", options.steps)
        for name, value in measure_pages(root, options.tabs).items():
            print(f"{name}: {value:.3g}", flush=True)


if __name__ == "__main__":
    main()
