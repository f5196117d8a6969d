"""Every page of the studio in a real browser: chromium without a screen, served by the command that people start."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from sfumato.tracking.samples import SampleRecord, save_samples
from sfumato.tracking.timeline import RUN, STEP, Event, Timeline
from sfumato.tracking.waveforms import Waveform
from tests.studio_runs import TOKEN, add_decisions, picture, write_run, write_steps
from tests.unit.test_studio import write_lock

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(BROWSER is None, reason="chromium is not installed: apt-get install chromium"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="pip install playwright"),
]

WAIT_MS = 60_000


class Studio:
    """A studio in a process of its own, and tabs that note whatever a page must not do."""

    def __init__(self, root: Path, browser, *options: str, cache: Path) -> None:
        environment = os.environ | {"SFUMATO_STUDIO_TOKEN": TOKEN.replace(" ", "-"), "XDG_CACHE_HOME": str(cache)}
        command = [sys.executable, "-m", "sfumato.cli", "studio", str(root), "--port", "0", *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert self.process.stdout is not None
        lines = [self.process.stdout.readline() for _ in range(3)]
        self.address = next(line.split()[1] for line in lines if line.startswith("open "))
        assert os.getpriority(os.PRIO_PROCESS, self.process.pid) == os.getpriority(os.PRIO_PROCESS, 0) + 10
        self.base = self.address.partition("/?")[0]
        self.browser = browser
        self.complaints: list[str] = []

    def tab(self, view: str, **options):
        """A tab that shows a view."""
        page = self.browser.new_context(**options).new_page()
        page.set_default_timeout(WAIT_MS)
        page.on(
            "console", lambda message: message.type in ("error", "warning") and self.complaints.append(message.text)
        )
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("request", lambda request: self.note_request(request.url))
        page.goto(self.address)
        page.goto(f"{self.base}/#/{view}")
        return page

    def note_request(self, url: str) -> None:
        if not url.startswith((self.base, "data:")):
            self.complaints.append(f"a foreign request: {url}")

    def close(self) -> None:
        self.process.send_signal(signal.SIGINT)
        assert self.process.wait(20) == 0
        assert self.complaints == []


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("studio") / "runs"
    write_run(root / "a")
    add_decisions(root / "a", 8)
    write_run(root / "b", config="train:\n  max_steps: 30\n")
    text = ("the", " ans", "wer")
    rows = [SampleRecord("the answer", "train", "q", 1, number, {"exact": 1.0}, 1.0, 0.5) for number in range(3)]
    write_run(root / "words", steps=2)
    folder = save_samples(root / "words", 2, rows)
    lines = (folder / "samples.jsonl").read_text().splitlines()
    fields = f', "tokens": {list(text)}, "log_ratio": [0.0, 0.3, -0.2], "clipped": [false, true, false]}}'.replace(
        "'", '"'
    )
    (folder / "samples.jsonl").write_text("".join(f"{line[:-1]}{fields}\n" for line in lines))
    write_run(root / "experiments" / "a_long_name_that_somebody_gave_to_a_run_of_theirs", total=100_000)
    tone = Waveform((9000 * np.sin(np.arange(4000) / 3)).astype(np.int16)[None], 8000)
    tones = write_run(root / "tones", steps=1)
    for step in (2, 4):
        save_samples(tones, step, [SampleRecord(tone, "eval", "a tone", 7, 5)])
    changed = write_run(root / "experiments" / "changed", steps=1)
    save_samples(changed, 2, [SampleRecord("words", "eval", "another prompt", 7, 0)])
    timeline = Timeline(root / "b")
    for step in range(1, 5):
        timeline.add([Event("sampler", rank, "generate", 10.0 * step, 10.0 * step + 6, step, 0) for rank in range(2)])
        timeline.add([Event("actor", 0, "update", 10.0 * step + 6, 10.0 * step + 9, step, step)])
        timeline.add([Event(RUN, 0, STEP, 10.0 * step, 10.0 * step + 10, step)])
    timeline.close()
    return root


@pytest.fixture(scope="module")
def studio(runs, browser, tmp_path_factory):
    studio = Studio(runs, browser, cache=tmp_path_factory.mktemp("cache"))
    yield studio
    studio.close()


PAGES = {
    "runs": "tr:has-text('words')",
    "overview?run=a": ".card[data-metric='eval/reward/total'] >> text=+0.4",
    "curves?run=a": "figure[data-metric='loss'] canvas",
    "gallery?run=a": "a.cell img",
    "group?run=a&step=8": ".group[data-group='1'] .tile img",
    "sample?run=a&step=8&kind=train&id=4": ".denoise .clipped",
    "sample?run=words&step=2&kind=train&id=1": ".tokens .clipped",
    "sample?run=tones&step=2&kind=eval&id=5": ".stage audio",
    "scrub?run=a&with=b": ".frame:nth-child(2) img",
    "why?run=a": "table[data-table=intervals] .interval",
    "compare?run=a&run=b": "td:has-text('train.max_steps')",
    "timeline?run=a": "text=no timeline",
    "timeline?run=b": ".timeline rect",
    "files?run=a": "#config:has-text('max_steps: 20')",
    "checkpoints?run=a": "text=no finished checkpoint",
}


@pytest.mark.parametrize("view", PAGES)
def test_every_page_shows_its_run_also_on_a_phone(studio, view):
    page = studio.tab(view, viewport={"width": 390, "height": 844})
    page.wait_for_selector(PAGES[view], state="attached")
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wider than a phone"
    for tab in page.locator(".tabs a[aria-current]").all():
        box = tab.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= 390, "the tab of the page that is shown is out of sight"
    brand, dot = (page.locator(name).bounding_box() for name in (".brand", ".live"))
    assert dot["y"] < brand["y"] + brand["height"], "the bar has room for its first line"
    assert not page.query_selector("[role=alert]")
    assert page.evaluate(
        "[...document.querySelectorAll('.runs')].every((list) => list.parentElement.scrollWidth <= 390)"
    )
    sizes = [text.bounding_box()["height"] for text in page.locator(".timeline text").all()]
    assert not sizes or min(sizes) > 11, "texts are too small to read"
    page.context.close()


def test_texts_of_a_run_are_never_html(studio):
    page = studio.tab("gallery?run=a")
    page.wait_for_selector("a.cell img")
    assert page.locator(".name:has-text('<script>alert(1)</script>')").count() == 1
    assert page.locator("#view script, #view b").count() == 0
    page.context.close()


def test_keys_move_through_steps_and_samples_and_the_address_follows(studio):
    page = studio.tab("gallery?run=a")
    page.wait_for_selector("a.cell.active")
    for key in ("ArrowLeft", "ArrowDown"):
        page.keyboard.press(key)
    assert re.search(r"step=8&row=1|row=1&step=8", page.url)
    page.wait_for_selector("a.cell.active img")
    page.keyboard.press("Enter")
    page.wait_for_selector("text=eval 1")
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector("b:has-text('step 4')")
    assert "step=4" in page.url
    page.reload()
    page.wait_for_selector("b:has-text('step 4')")
    page.context.close()


def test_a_sound_that_plays_goes_on_with_that_of_the_other_step(studio):
    page = studio.tab("scrub?run=tones&id=5&seed=7")
    page.wait_for_selector(".frame[data-step='4'] audio")
    page.evaluate(
        "() => { const sound = document.querySelector('audio'); sound.currentTime = 0.2; return sound.play(); }"
    )
    page.keyboard.press("ArrowLeft")
    page.wait_for_selector(".frame[data-step='2'] audio")
    page.wait_for_function(
        "() => { const sound = document.querySelector('audio'); return sound.ended || sound.currentTime >= 0.2; }"
    )
    assert page.evaluate("document.querySelector('audio').autoplay")
    page.keyboard.press("ArrowRight")
    page.wait_for_selector(".frame[data-step='4'] audio")
    page.context.close()


def test_of_two_prompts_with_the_same_id_and_seed_each_is_chosen(studio):
    page = studio.tab("scrub?run=experiments/changed&id=0&seed=7")
    page.wait_for_selector(".frame[data-step='1']")
    page.select_option("select[aria-label=prompt]", label="another prompt · seed 7")
    page.wait_for_selector(".frame[data-step='2'] :text('another prompt')")
    page.reload()
    page.wait_for_selector(".frame[data-step='2'] :text('another prompt')")
    page.context.close()


def test_curves_are_searched_flat_ones_folded_and_a_stretch_is_fetched_anew(studio):
    from playwright.sync_api import expect

    page = studio.tab("curves?run=a&with=b", viewport={"width": 1200, "height": 900})
    page.wait_for_selector("figure[data-metric='loss'] canvas")
    assert page.locator("figure[data-metric=lr]").count() == 0
    assert page.locator("summary:has-text('flat')").count() == 1
    page.fill("input[type=search]", "no metric at all")
    page.wait_for_selector("text=no metric has that in its name")
    assert page.locator("figure").count() == 0
    page.fill("input[type=search]", "^policy/|^loss")
    expect(page.locator("figure")).to_have_count(2)
    plot = page.locator("figure[data-metric=loss] .u-over")
    box = plot.bounding_box()
    with page.expect_request(lambda request: "first=" in request.url and "name=loss" in request.url):
        page.mouse.move(box["x"] + box["width"] * 0.3, box["y"] + 40)
        page.mouse.down()
        page.mouse.move(box["x"] + box["width"] * 0.6, box["y"] + 60, steps=4)
        page.mouse.up()
    page.context.close()


def test_a_run_under_way_resumes_is_moved_aside_and_is_killed(browser, tmp_path):
    root = tmp_path / "runs"
    folder = write_run(root / "live", steps=4)
    write_lock(folder)
    studio = Studio(root, browser, cache=tmp_path / "cache")
    try:
        page = studio.tab("overview?run=live")
        page.wait_for_selector("main .badge.running")
        write_steps(folder, 5, 8)
        page.wait_for_selector("main .state:has-text('step 8 of 20')")
        page.wait_for_selector("h2:has-text('Newest samples, step 8')")
        write_steps(folder, 7, 7)
        page.wait_for_selector("main .state:has-text('step 7 of 20')")
        page.goto(f"{studio.base}/#/gallery?run=live")
        page.wait_for_selector(".head:has-text('step 8')")
        write_steps(folder, 8, 12)
        page.wait_for_selector(".head:has-text('step 12')")
        write_lock(folder, born="a process that is gone")
        page.wait_for_selector("#state .badge.died")
        page.wait_for_selector(".toast:has-text('died')")
        folder.rename(root / "live.1")
        page.wait_for_selector("text=is not there any more")
        write_run(root / "live", steps=1)
        page.goto(f"{studio.base}/#/runs")
        page.wait_for_selector("td:has-text('live.1')")
        page.context.close()
        # the answer about the run that is gone is what the page was told
        studio.complaints = [text for text in studio.complaints if "404" not in text and "no run" not in text]
    finally:
        studio.close()


def test_the_gallery_stays_small_however_long_the_run(browser, tmp_path):
    root = tmp_path / "runs"
    folder = write_run(root / "long", steps=1)
    for step in range(2, 402):
        rows = [SampleRecord("a word", "eval", f"prompt {number}", 7, number, {}, 0.5) for number in range(20)]
        save_samples(folder, step, rows)
    save_samples(folder, 500, [SampleRecord(picture(5), "eval", "prompt 0", 7, 0, {}, 0.5)])
    studio = Studio(root, browser, cache=tmp_path / "cache")
    try:
        page = studio.tab("gallery?run=long", viewport={"width": 1280, "height": 900})
        page.wait_for_selector(".head:has-text('step 500')")
        page.wait_for_selector("text=402 steps, ")  # the newest are shown before all have been looked at
        most = 0
        for column in (*range(0, 400, 40), 399):
            page.evaluate(f"document.querySelector('.slider input').value = {column}")
            page.dispatch_event(".slider input", "input")
            page.wait_for_selector(f".head:has-text('step {1 + column}')")
            page.wait_for_selector(".cell.active")
            most = max(most, page.evaluate("document.querySelectorAll('#view *').length"))
        assert most < 600, most
        page.context.close()
    finally:
        studio.close()


def test_control_writes_what_was_pressed_and_shows_the_answer(browser, tmp_path):
    root = tmp_path / "runs"
    folder = write_run(root / "a")
    write_lock(folder)
    studio = Studio(root, browser, "--control", cache=tmp_path / "cache")
    try:
        page = studio.tab("overview?run=a")
        page.click("button[data-command=save]")
        page.wait_for_selector("text=waiting for the end of the step")
        (request,) = (folder / "control").glob("*.json")
        request.unlink()
        answer = {"id": request.stem, "command": "save", "time": time.time(), "step": 12, "result": "done", "text": ""}
        (folder / "control.jsonl").write_text(json.dumps(answer) + "\n")
        page.wait_for_selector("[data-answer=save]:has-text('done')")
        page.context.close()
    finally:
        studio.close()


def test_links_and_long_answers_need_neither_colours_nor_a_mouse(studio):
    page = studio.tab("overview?run=a")
    page.wait_for_selector("main p a:has-text('gallery')")
    link = page.locator("main p a:has-text('gallery')")
    assert link.evaluate("(link) => getComputedStyle(link).textDecorationLine") == "underline"
    assert link.bounding_box()["height"] >= 24  # WCAG 2.2, 2.5.8
    page.goto(f"{studio.base}/#/sample?run=experiments/changed&step=2&kind=eval&id=0")
    page.wait_for_selector(".stage .text[tabindex='0']")
    page.goto(f"{studio.base}/#/files?run=a")
    page.wait_for_selector("#log[tabindex='0'] ~ #config[tabindex='0']")
    page.context.close()


def test_the_page_is_dark_where_the_system_is(studio):
    colours = []
    for scheme in ("light", "dark"):
        page = studio.tab("overview?run=a", color_scheme=scheme)
        page.wait_for_selector("canvas")
        colours.append(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        page.context.close()
    assert np.unique(colours).size == 2
