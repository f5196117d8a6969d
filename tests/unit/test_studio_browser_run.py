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
from tests.tiny import ROOT, weights_in, write_config
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


def open_view(page, studio, view):
    page.goto(f"{studio.base}/#/{view}")


def wait_for_pictures(page, selector, count):
    """Until as many pictures are there, and have been loaded."""
    loaded = (
        "([selector, count]) => [...document.querySelectorAll(selector)].filter((i) => i.naturalWidth).length == count"
    )
    page.wait_for_function(loaded, arg=[selector, count], timeout=180_000)


def replay(page, studio, step, kind, sample_id):
    """Has the page draw a sample of the run again, which must be the same to the bit."""
    open_view(page, studio, f"sample?run=rl&step={step}&kind={kind}&id={sample_id}")
    page.click("button:has-text('make it again')")
    verdict = page.wait_for_selector("[data-verdict]", timeout=180_000)
    assert verdict.get_attribute("data-verdict") == "identical", page.inner_text("main")
    wait_for_pictures(page, ".pair img", 2)


def ask_checkpoints(page, studio):
    """Asks the newest checkpoint and the run's start, then every checkpoint, and frees their memory."""
    open_view(page, studio, "checkpoints?run=rl")
    page.wait_for_selector("#checkpoint option >> nth=3", state="attached")
    page.fill("#playground textarea", "AB")
    page.fill("[data-field=steps]", "2")
    page.click("#playground button:text-is('ask')")
    wait_for_pictures(page, "#playground .frame img", 2)
    assert page.locator(".frame[data-label=base]").count() == 1
    num_checkpoints = page.locator("#checkpoint option").count() - 3
    page.select_option("#checkpoint", "all")
    page.click("#playground button:text-is('ask')")
    wait_for_pictures(page, "#playground .frame img", num_checkpoints + 1)
    assert page.locator("#playground .frame .warning").count() == 0
    shoot(page, "5_playground")
    page.click("button:text-is('free memory')")
    page.wait_for_selector("text=memory is free")


def test_the_quickstart_under_way_stopped_resumed_killed_and_moved_aside(browser, tmp_path):
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
        open_view(page, studio, "overview?run=rl")
        page.wait_for_selector("main .badge.running")
        wait_for_step(run, 4)
        page.wait_for_selector("h2:has-text('Newest samples')")
        shoot(page, "2_under_way")

        # stopped from the page, which saves
        page.on("dialog", lambda dialog: dialog.accept())
        page.click("button[data-command=stop]")
        assert process.wait(120) == 143, log.read_text()
        page.wait_for_selector("main .badge:text-is('stopped')")
        stopped_at = max(read_samples(run))
        replay(page, studio, 2, "eval", 0)
        replay(page, studio, 2, "train", 1)
        shoot(page, "4_replay")
        ask_checkpoints(page, studio)

        # it goes on
        process = start(config, log, "--train.load_checkpoint_path", "auto")
        open_view(page, studio, "overview?run=rl")
        page.wait_for_selector("main .badge.running", timeout=300_000)
        wait_for_step(run, stopped_at + 4)

        # a kill is told
        process.send_signal(signal.SIGKILL)
        process.wait()
        page.wait_for_selector("#state .badge.died")
        page.wait_for_selector(".toast:has-text('died')")
        shoot(page, "3_died")

        # another run in its folder: the curves are those of that one, and it stands beside as it was
        process = start(config, log, "--train.load_checkpoint_path", "new")
        page.wait_for_selector("main .badge.running", timeout=300_000)
        page.wait_for_selector("main .state:has-text('step 1 of 2000')")
        open_view(page, studio, "runs")
        page.wait_for_selector("tr:has-text('rl.1') .badge.died")
        shoot(page, "6_moved_aside")
        open_view(page, studio, f"gallery?run=rl.1&step={stopped_at + 4}")
        page.wait_for_selector("a.cell.active img")
        page.context.close()
        # between two names of the folder there is no run to ask about
        studio.complaints = [text for text in studio.complaints if "404" not in text and "no run" not in text]
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        studio.close()


def test_what_is_clicked_in_an_open_studio_changes_no_bit(browser, tmp_path):
    root = tmp_path / "runs"
    root.mkdir()
    settings = {"train": {"max_steps": 6, "save_steps": 0}, "eval": {"every_steps": 3}}

    def begin(folder):
        config = merge(quickstart_config(folder), settings)
        return start(write_config(config, tmp_path / f"{folder.name}.yaml"), tmp_path / "log.txt")

    process = begin(tmp_path / "plain")
    try:
        assert process.wait(300) == 0, (tmp_path / "log.txt").read_text()
        studio = Studio(root, browser, "--control", cache=tmp_path / "cache")
        process = begin(root / "rl")
        page = studio.tab("runs")
        page.wait_for_selector("tr:has-text('rl') .badge.running", timeout=300_000)
        open_view(page, studio, "overview?run=rl")
        for command in ("pause", "sample", "save", "evaluate", "resume"):
            page.click(f"button[data-command={command}]")
            page.wait_for_selector(f"[data-answer={command}]:has-text('done')", timeout=120_000)
        assert process.wait(300) == 0, (tmp_path / "log.txt").read_text()
        page.context.close()
        studio.close()
    finally:
        process.kill()
        process.wait()
    assert (root / "rl/metrics.jsonl").read_bytes() == (tmp_path / "plain/metrics.jsonl").read_bytes()
    assert weights_in(root / "rl/hf_ckpt") == weights_in(tmp_path / "plain/hf_ckpt")
