"""The report in a real browser: its one script searches curves, and long answers leave the columns where they are."""

import importlib.util
import shutil
from contextlib import closing

import pytest

from sfumato.tracking.json_lines import JsonLines
from sfumato.tracking.report import write_report
from sfumato.tracking.samples import SampleRecord, save_samples

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(BROWSER is None, reason="chromium is not installed: apt-get install chromium"),
    pytest.mark.skipif(importlib.util.find_spec("playwright") is None, reason="pip install playwright"),
]


@pytest.fixture
def page(tmp_path):
    from playwright.sync_api import sync_playwright

    with closing(JsonLines(tmp_path / "metrics.jsonl")) as metrics:
        for step in range(5):
            many = {f"experts/layer_{number}/load": step * 0.1 + number for number in range(200)}
            metrics.write({"step": step, **many, "loss": 1.0 / (1 + step), "lr": 0.1})
    for step in (0, 2, 4):
        answers = ("42", "Let us think step by step. " * 80)
        records = [
            SampleRecord(text, "eval", f"question {i}", 1, i, {"math": 0.5}, 0.5) for i, text in enumerate(answers)
        ]
        save_samples(tmp_path, step, records)
    path = write_report(tmp_path)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1200, "height": 900})
        page.goto(path.as_uri())
        yield page
        browser.close()


def test_curves_are_searched(page):
    shown = page.locator("figure[data-metric]:visible")
    assert [figure.get_attribute("data-metric") for figure in shown.all()] == ["loss"], "200 others are folded"
    page.locator("#search").fill("layer_199 load")
    assert [figure.get_attribute("data-metric") for figure in shown.all()] == ["experts/layer_199/load"]
    page.locator("#search").fill("nothing like it")
    assert shown.count() == 0
    page.locator("#search").fill("")
    assert [figure.get_attribute("data-metric") for figure in shown.all()] == ["loss"]


def test_a_long_answer_leaves_the_columns_where_they_are(page):
    def places():
        rows = page.locator("table.grid tbody tr:not(.prompt)")
        cells = [rows.nth(row).locator("td") for row in range(rows.count())]
        return [[round(cell.nth(column).bounding_box()["x"]) for column in range(3)] for cell in cells]

    before = places()
    heads = [round(page.locator("table.grid thead th").nth(column).bounding_box()["x"]) for column in range(3)]
    assert before == [heads, heads]
    fold = page.locator("table.grid details").first
    assert fold.locator("summary").evaluate("element => getComputedStyle(element).fontSize") == "13.5px"
    fold.locator("summary").click()
    assert places() == before
    assert page.evaluate("document.documentElement.scrollWidth") <= 1200
