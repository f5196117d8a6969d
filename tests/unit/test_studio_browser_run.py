"""The studio in a real browser beside a real run: the quickstart's RL, with random weights and fewer prompts."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from sfumato.config.load import merge
from sfumato.tracking.samples import read_samples
from tests.tiny import ROOT, write_config
from tests.unit.test_studio_browser import Studio
from tests.unit.test_studio_browser import browser as browser
from tests.unit.test_studio_browser import pytestmark as of_browsers

pytestmark = [
    *of_browsers,
    pytest.mark.skipif(importlib.util.find_spec("rapidocr") is None, reason="pip install sfumato[ocr]"),
]

SHOTS = os.environ.get("SFUMATO_SHOTS")
"""Folder for pictures of the pages, for people."""


def quickstart_config(folder):
    """``configs/quickstart/rl.yaml``, smaller."""
    config = yaml.safe_load((ROOT / "configs/quickstart/rl.yaml").read_text(encoding="utf-8"))
    del config["model"]["model_path"]
    overrides = {
        "model": {"config_path": str(ROOT / "configs/quickstart/tiny_sd3.yaml")},
        "rollout": {"num_prompts": 3, "n": 4, "micro_batch_size": 12},
        # random weights draw no word that could be read
        "reward": {"rewards": [*config["reward"]["rewards"], {"type": "brightness"}]},
        "train": {
            "output_dir": str(folder),
            **{"micro_batch_size": 4, "global_batch_size": 12, "save_steps": 1, "max_checkpoints": 1000},
            **{"max_steps": 2000, "trackers": []},
        },
        "eval": {"every_steps": 2, "num_prompts": 2, "num_inference_steps": 2},
    }
    return merge(config, overrides)


def start(config, log, *options):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "tasks/rl_diffusion.py", str(config), *options]
    with open(log, "ab") as file:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT)


def shoot(page, name):
    if SHOTS:
        page.screenshot(path=f"{SHOTS}/{name}.png", full_page=True)


def wait_for_step(run, step):
    deadline = time.monotonic() + 300
    while not (run / "samples" / f"step_{step:06d}").is_dir():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def test_the_quickstart_under_way_stopped_resumed_and_killed(browser, tmp_path):
    root = tmp_path / "runs"
    run = root / "rl"
    root.mkdir()
    config = write_config(quickstart_config(run), tmp_path / "rl.yaml")
    log = tmp_path / "log.txt"
    process = start(config, log)
    studio = Studio(root, browser, "--control", cache=tmp_path / "cache")
    try:
        page = studio.tab("runs", viewport={"width": 1280, "height": 900})
        page.wait_for_selector("tr:has-text('rl') .badge.running", timeout=300_000)
        shoot(page, "1_runs")
        page.goto(f"{studio.base}/#/overview?run=rl")
        page.wait_for_selector("main .badge.running")
        wait_for_step(run, 4)
        page.wait_for_selector("h2:has-text('Newest samples')")
        shoot(page, "2_under_way")

        # stopped from the page, which saves; then it goes on
        page.on("dialog", lambda dialog: dialog.accept())
        page.click("button[data-command=stop]")
        assert process.wait(120) == 143, log.read_text()
        page.wait_for_selector("main .badge:text-is('stopped')")
        stopped_at = max(read_samples(run))
        process = start(config, log, "--train.load_checkpoint_path", "auto")
        page.wait_for_selector("main .badge.running", timeout=300_000)
        wait_for_step(run, stopped_at + 4)

        # a kill is told
        process.send_signal(signal.SIGKILL)
        process.wait()
        page.wait_for_selector("#state .badge.died")
        page.wait_for_selector(".toast:has-text('died')")
        shoot(page, "3_died")

        page.context.close()
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        studio.close()
