"""The report is one safe file that holds what the run folder holds."""

import base64
import hashlib
import json
import math
import re
import subprocess
import sys
from contextlib import closing
from html.parser import HTMLParser

import numpy as np
import pytest

from sfumato.errors import DataError
from sfumato.tracking.charts import LIGHT, stand_in
from sfumato.tracking.curves import curve_svg, find_ticks, format_ticks, smooth_values, unit_of
from sfumato.tracking.json_lines import JsonLines, series_of
from sfumato.tracking.report import write_report
from sfumato.tracking.report_curves import group_by_prefix
from sfumato.tracking.report_tables import failed_rewards, time_per_phase
from sfumato.tracking.samples import SampleRecord, drop_samples_after, save_samples

PROMPT = "write \"<script>alert(1)</script>\" & 'more'"
VOID = {"meta", "img", "br", "use", "path", "input"}


class Page(HTMLParser):
    """Tags with their attributes, text, and a check that what is opened is closed."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.text, self.open = [], "", []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def values(self, attribute, tag=None):
        return [a[attribute] for t, a in self.tags if attribute in a and tag in (None, t)]


def make_run(folder, steps=40, every=4, prompt=PROMPT):
    drop_samples_after(folder, -1)
    with (
        closing(JsonLines(folder / "metrics.jsonl")) as metrics,
        closing(JsonLines(folder / "timings.jsonl")) as timings,
    ):
        for step in range(steps + 1):
            record = {"step": step}
            if step:
                record |= {"loss": 1.0 / step, "reward/ocr": step / 50, "ratio_mean": 1.0, "lr": 1e-4}
                timings.write({"step": step, "time/step_s": 2.0, "time/generate_s": 0.5, "memory/peak_mib": 812.0})
            if step % every == 0:
                record |= {"eval/reward/ocr": 0.25 + step / 100}
                save_samples(folder, step, make_samples(step, prompt))
            metrics.write(record)
    (folder / "config.yaml").write_text(
        f"train:\n  max_steps: {steps}\n  note: <script>alert(2)</script>\nreward: {{rewards: [{{type: ocr}}]}}\n"
    )
    environment = {"python": "3.12.1", "packages": {"torch": "2.13.0"}, "git_commit": "0123456789abcdef"}
    (folder / "environment.json").write_text(json.dumps(environment))


def make_samples(step, prompt):
    image = np.full((8, 8, 3), step, np.uint8)
    samples = [SampleRecord(image, "eval", f"{prompt} {i}", 7, i, {"ocr": 0.5}, 0.5, None, step) for i in range(2)]
    for i, total in enumerate((0.125, 0.875, float("nan"), 0.5)):
        samples.append(SampleRecord(image, "train", prompt, i, i, {"ocr": total}, total, 2 * total - 1, step))
    return samples


def read_page(folder):
    html = write_report(folder).read_text(encoding="utf-8")
    page = Page(html)
    assert page.open == []
    return page, html


def test_the_file_refers_to_nothing_outside_itself(tmp_path):
    make_run(tmp_path)
    page, html = read_page(tmp_path)
    references = page.values("src") + page.values("href") + page.values("xlink:href")
    assert len(references) > 15
    assert all(r.startswith(("data:image/", "#")) for r in references)
    assert not {"script", "link", "iframe", "object", "base"} & {tag for tag, _ in page.tags}
    assert "@import" not in html and "url(http" not in html


def test_videos_play_and_edits_stand_beside_their_source(tmp_path):
    drop_samples_after(tmp_path, -1)
    source, film = np.full((8, 8, 3), 9, np.uint8), np.arange(4 * 192, dtype=np.uint8).reshape(4, 8, 8, 3)
    kinds = (("eval", 0), ("train", 0), ("train", 1))
    save_samples(
        tmp_path, 1, [SampleRecord(film, kind, PROMPT, 7, i, total=0.5 + i, source=source) for kind, i in kinds]
    )
    page, _ = read_page(tmp_path)
    pictures = [(tag["src"].split(";")[0], tag["alt"]) for name, tag in page.tags if name == "img"]
    shown, source_shown = ("data:image/webp", PROMPT), ("data:image/png", f"source: {PROMPT}")
    assert pictures == [source_shown, shown, source_shown, shown, shown]


def test_text_from_prompts_and_config_is_escaped(tmp_path):
    make_run(tmp_path)
    page, html = read_page(tmp_path)
    assert "<script" not in html
    assert PROMPT in page.text, "the prompt reads as it was written"
    assert any(PROMPT in alt for alt in page.values("alt"))
    assert "<script>alert(2)</script>" in page.text


def test_hostile_names_cannot_leave_their_attributes(tmp_path):
    folder = tmp_path / "run & <b>"
    folder.mkdir()
    name = 'loss" onload="alert(1)$x_{'
    (folder / "metrics.jsonl").write_text(json.dumps({"step": 1, name: 0.5}) + "\n")
    page, _ = read_page(folder)
    assert page.values("onload") == []
    assert name in page.values("data-metric") and "run & <b>" in page.text


def test_headline_shows_before_after_difference_and_best(tmp_path):
    make_run(tmp_path)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "eval/reward/ocr": 0.5, "eval/loss": 3.0}\n')
    page, _ = read_page(tmp_path)
    assert "0.250→0.500+0.250" in page.text
    assert "best: 0.650 at 40" in page.text
    assert page.values("data-metric", "div") == ["eval/reward/ocr"], "only rewards stand in the headline"


def test_an_evaluation_without_a_number_is_said_and_is_not_left_out(tmp_path):
    steps = [{"step": step, "eval/reward/ocr": value} for step, value in enumerate([0.25, 0.5, None])]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in steps))
    page, _ = read_page(tmp_path)
    assert "0.250→0.500+0.250" in page.text and "not finite at step 2" in page.text
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in steps[1:]))
    page, _ = read_page(tmp_path)
    assert "step 1 alone has a value" in page.text and "one evaluation so far" not in page.text


def test_one_evaluation_has_no_after(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "eval/reward/ocr": 0.25}\n')
    page, _ = read_page(tmp_path)
    assert "one evaluation so far" in page.text and "→" not in page.text


def test_curves_stand_in_their_groups_and_keep_their_ids_apart(tmp_path):
    make_run(tmp_path)
    page, html = read_page(tmp_path)
    assert page.values("data-metric", "figure") == ["eval/reward/ocr", "reward/ocr", "loss"]
    unchanged = ["lr", "ratio_mean", "memory/peak_mib", "time/generate_s", "time/step_s"]
    assert sorted(page.values("data-metric", "tr")) == sorted(unchanged)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    assert {r.removeprefix("#") for r in page.values("xlink:href")} <= set(ids)
    for name in LIGHT:
        assert stand_in(name) not in html
    assert "stroke: var(--accent)" in html and "prefers-color-scheme:dark" in html


def test_many_curves_are_folded_by_the_beginnings_of_their_names_and_searched(tmp_path):
    with closing(JsonLines(tmp_path / "metrics.jsonl")) as metrics:
        for step in range(5):
            many = {f"experts/layer_{n}/load": step * 0.1 + n for n in range(40)}
            metrics.write({"step": step, **many, "loss": 1.0 / (1 + step), "seed": 7})
    page, html = read_page(tmp_path)
    assert len(page.values("data-metric", "figure")) == 41
    assert page.values("data-metric", "tr") == ["seed"]
    assert "experts 40 curves" in " ".join(page.text.split())
    assert page.values("id", "input") == ["search"]
    # the page's one script is the constant whose digest the policy holds
    script = re.search(r"<script>(.*?)</script>", html, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in page.values("content", "meta")[0]
    assert "<script>" not in html.replace(f"<script>{script}</script>", "")


def test_beginnings_of_names():
    names = ["loss", "a/x/1", "a/x/2", "a/x/3", "a/y", "a/z/1", "a/w", "b/1"]
    assert group_by_prefix(names) == {
        "a": ["a/y", "a/z/1", "a/w"],
        "a/x": ["a/x/1", "a/x/2", "a/x/3"],
        "": ["loss", "b/1"],
    }


def test_a_curve_with_a_missing_value_is_not_folded(tmp_path):
    with closing(JsonLines(tmp_path / "metrics.jsonl")) as metrics:
        for step in range(5):
            metrics.write({"step": step, "loss": 1.0 if step else math.nan})
    page, _ = read_page(tmp_path)
    assert page.values("data-metric", "figure") == ["loss"]
    assert "1 not finite" in page.text


def test_only_long_curves_are_smoothed(tmp_path):
    make_run(tmp_path, steps=20)
    assert "stroke: var(--faint)" not in read_page(tmp_path)[1]
    make_run(tmp_path, steps=40)
    assert "stroke: var(--faint)" in read_page(tmp_path)[1]


def test_smooth_keeps_constants_and_trends_and_length():
    np.testing.assert_allclose(smooth_values(np.full(31, 3.0)), 3.0)
    line = np.arange(100.0)
    np.testing.assert_allclose(smooth_values(line)[10:-10], line[10:-10])
    assert smooth_values(line).shape == line.shape


def test_grid_has_a_column_for_each_chosen_step_and_a_row_for_each_sample(tmp_path):
    make_run(tmp_path, steps=12)
    page, _ = read_page(tmp_path)
    assert page.values("data-step") == ["0", "4", "8", "12"]
    assert page.values("data-sample") == ["0", "1"]
    assert "0.50" in page.text and len(page.values("src", "img")) == 2 * 4 + 2

    make_run(tmp_path, steps=80)
    steps = read_page(tmp_path)[0].values("data-step")
    assert len(steps) == 8 and steps[0] == "0" and steps[-1] == "80"


def test_an_image_never_stands_beside_another_prompt(tmp_path):
    save_samples(tmp_path, 0, make_samples(0, "old prompt")[:1])
    save_samples(tmp_path, 5, make_samples(5, "new prompt")[:1])
    page, _ = read_page(tmp_path)
    assert page.values("data-sample") == ["0", "0"]
    assert page.text.count("absent") == 2


def test_latest_training_samples_show_best_and_worst_with_advantage(tmp_path):
    make_run(tmp_path)
    page, _ = read_page(tmp_path)
    section = page.text[page.text.index("Latest training samples") :]
    assert "Step 40" in section
    assert "best 0.88advantage +0.75" in section and "worst 0.12advantage -0.75" in section


def test_rewards_are_coloured_from_red_to_green(tmp_path):
    image = np.zeros((4, 4, 3), np.uint8)
    for low, high in ((0.0, 1.0), (-3.0, 5.0)):
        samples = [SampleRecord(image, "eval", "p", 0, i, {"r": t}, t) for i, t in enumerate((low, high))]
        save_samples(tmp_path, 0, [*samples, SampleRecord(image, "eval", "p", 0, 2, {"r": float("nan")})])
        page, _ = read_page(tmp_path)
        assert [s for s in page.values("style", "span") if "hue" in s] == ["--hue:0", "--hue:120"]
        assert "no reward" in page.text and "r failed" in page.values("title")


def test_header_config_tables_and_timing(tmp_path):
    make_run(tmp_path)
    page, _ = read_page(tmp_path)
    for text in ("all 40 steps finished", "torch 2.13.0", "git_commit 0123456789ab", "Configuration", "Last values"):
        assert text in page.text
    assert "generate40 of 400.50.525 %" in page.text and "whole step40 of 4022100 %" in page.text
    make_run(tmp_path, steps=8)
    (tmp_path / "config.yaml").write_text("train: {max_steps: 40}")
    assert "step 8 of 40" in read_page(tmp_path)[0].text


def test_values_that_are_not_finite_are_counted_and_small_differences_are_seen(tmp_path):
    lines = ['{"step": 1, "loss": 0.5, "ratio_mean": 1}', '{"step": 2, "loss": null, "ratio_mean": 1.00001}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page, _ = read_page(tmp_path)
    assert "1 not finite" in page.text and "lossnot finite2" in page.text
    assert "ratio_mean1.000012" in page.text


def test_a_run_that_has_just_begun_has_a_report(tmp_path):
    assert "nothing logged yet" in read_page(tmp_path)[0].text
    for name in ("metrics.jsonl", "timings.jsonl", "config.yaml", "environment.json"):
        (tmp_path / name).write_text("")
    (tmp_path / "samples").mkdir()
    assert "nothing logged yet" in read_page(tmp_path)[0].text
    (tmp_path / "environment.json").write_text('{"torch": ')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 0.5}\n{"step": 2, "lo')
    assert "step 1" in read_page(tmp_path)[0].text


def test_lost_image_files_are_named_and_broken_metrics_are_not_hidden(tmp_path):
    make_run(tmp_path, steps=4)
    (tmp_path / "samples" / "step_000004" / "eval_0001.png").unlink()
    assert "eval_0001.png" in read_page(tmp_path)[0].text
    before = (tmp_path / "report.html").read_bytes()
    (tmp_path / "metrics.jsonl").write_text('{"step": \n{"step": 2}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl:1"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_bytes() == before
    assert not list(tmp_path.glob("*.tmp"))


def test_drawing_leaves_matplotlib_settings_and_pyplot_alone(tmp_path):
    make_run(tmp_path, steps=4)
    code = (
        "import sys, matplotlib; from pathlib import Path; from sfumato.tracking.report import write_report\n"
        "matplotlib.rcParams['lines.linewidth'] = 3.5; before = matplotlib.rcParams.copy()\n"
        f"write_report(Path({str(tmp_path)!r}))\n"
        "assert 'matplotlib.pyplot' not in sys.modules\n"
        "changed = [k for k in before if k != 'backend' and before[k] != matplotlib.rcParams[k]]\n"
        "assert changed == [], changed"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_rare_part_of_a_step_counts_as_often_as_it_happened():
    steps = [{"step": step, "time/step_s": 1.0, "time/update_s": 0.9} for step in range(1, 21)]
    for step in steps[9::10]:
        step |= {"time/save_s": 8.0, "time/step_s": 9.0, "time/reward_ocr_s": 3.0}
    text = Page(time_per_phase(series_of(steps))).text
    assert "update20 of 200.90.950 %" in text and "save2 of 208844 %" in text
    assert "everything else6 %" in text and "whole step20 of 20" in text
    assert "reward ocr2 of 2033beside the others" in text
    for step in steps:
        step["time/generate_s"] = step["time/step_s"] - 0.1  # by a sampler of its own, while the policy learns
    text = Page(time_per_phase(series_of(steps))).text
    assert re.search(r"generate20 of 20[\d.]+beside the others", text)
    assert "update20 of 200.90.950 %" in text and "everything else6 %" in text


def test_reasons_of_failed_rewards_are_counted_from_the_log():
    log = (
        "step 1: reward failed: ocr: returned NaN (2 of 16 samples)\n"
        "resumed from checkpoints/global_step_0 at step 0\n"
        "step 1: reward failed: ocr: returned NaN (3 of 16 samples)\n"
        "step 4: reward failed: ocr: returned NaN (4 of 16 samples)\n"
        "evaluation at step 4: reward failed: ocr: returned NaN (1 of 2 samples)\n"
        "step 4: reward failed: judge: ValueError: two\nlines <b> (at judge.py:3) (16 of 16 samples)\n"
        "step 4: reward attempts that a server did not answer: timeout (3)\n"
    )
    page = Page(failed_rewards(log))
    assert "ocr: returned NaN711 to 4" in page.text, "7 training samples, 1 of an evaluation"
    assert "judge: ValueError: two\nlines <b> (at judge.py:3)1604 to 4" in page.text
    assert "attempts" not in page.text and ("b", {}) not in page.tags
    assert failed_rewards("all went well\n") == ""


def test_colours_stand_where_better_and_worse_are_known(tmp_path):
    names = ("total", "ocr", "size", "mine", "std", "failed")
    with closing(JsonLines(tmp_path / "metrics.jsonl")) as metrics:
        for step in (0, 1):
            record = {f"eval/reward/{name}": 0.25 + step / 2 for name in names}
            metrics.write({"step": step, **record, "eval/reward_failed/ocr": step / 1, "eval/kl": step / 1})
    (tmp_path / "config.yaml").write_text(
        "reward: {rewards: [{type: ocr}, {type: jpeg, name: size, weight: -1.0}, {type: 'my:Mine'}]}\n"
    )
    page, _ = read_page(tmp_path)
    changes = [value.removeprefix("change ") for value in page.values("class", "span") if value.startswith("change ")]
    shown = [name.removeprefix("eval/reward/") for name in page.values("data-metric", "div")]
    assert dict(zip(shown, changes, strict=True)) == {
        "total": "better",
        "ocr": "better",
        "size": "worse",
        "mine": "unknown",  # its label is its class's, which only Python knows
    }
    assert "best: 0.250 at 0" in page.text and "highest: 0.750 at 1" in page.text


def test_what_cannot_be_shown_is_said_and_no_reward_is_no_failure(tmp_path):
    image = np.zeros((8, 8, 3), np.uint8)
    save_samples(
        tmp_path,
        1,
        [SampleRecord(image, "eval", "p", 7, 0, damage="it is NaN"), SampleRecord(image, "eval", "p", 7, 1)],
    )
    page, _ = read_page(tmp_path)
    assert page.text.count("it is NaN") == 1 and "no reward" not in page.text and "The reward stands" not in page.text


@pytest.mark.parametrize("values", [(1.00000012, 1.00000019), (-812345.6789, -812345.6781), (0.1, 0.9), (1e-9, 3e-9)])
def test_no_label_of_a_curve_is_cut(values):
    svg = curve_svg("loss", dict(enumerate(values)))
    ticks = re.findall(r'class="y" x="([-\d.]+)".*?>([^<]*)</text>', svg)
    assert len(ticks) >= 2 and len({text for _, text in ticks}) == len(ticks)
    for right, text in ticks:
        assert float(right) - 6 * len(text) > 14, "the axis' own label stands left of them"


@pytest.mark.parametrize(
    ("limits", "labels"),
    [
        ((0, 1), ["0.0", "0.2", "0.4", "0.6", "0.8", "1.0"]),
        ((0.12, 0.29), ["0.15", "0.20", "0.25"]),
        ((0, 120), ["0", "25", "50", "75", "100"]),
        ((-3e-5, 3e-5), ["-2e-5", "0", "2e-5"]),
        ((1.2e6, 2.1e6), ["1.2e6", "1.4e6", "1.6e6", "1.8e6", "2.0e6"]),
        ((1000000.0, 1000000.5), ["1000000.0", "1000000.1", "1000000.2", "1000000.3", "1000000.4", "1000000.5"]),
    ],
)
def test_ticks_are_round_and_told_apart(limits, labels):
    assert format_ticks(find_ticks(*limits, 5)) == labels


def test_a_curve_has_a_gap_where_a_value_is_missing_and_few_points_where_it_is_long():
    svg = curve_svg("loss", dict(enumerate([1.0, 2.0, math.nan, 3.0, 4.0])))
    assert re.search(r'<path d="([^"]*)"', svg)[1].count("M") == 2 and svg.count("<circle") == 4
    noise = np.random.default_rng(0).standard_normal(20_000)
    noise[7_777] = 50.0
    long = curve_svg("loss", dict(enumerate(noise)))
    assert len(long) < 60_000
    assert f" {12:.1f}L" not in long and min(float(y) for y in re.findall(r" ([\d.]+)L", long)) < 20, (
        "the peak is drawn"
    )
    flat = curve_svg("lr", {1: 5.0})
    assert "nan" not in flat and flat.count("<circle") == 1
    assert "stroke-dasharray" in curve_svg("a", {0: 1.0, 1: 2.0}, {0: 3.0, 1: 4.0})


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("throughput/tokens_per_s", "tokens/s"),
        ("throughput/tokens_per_s_per_device", "tokens/s per device"),
        ("throughput/generate_flops_per_s", "FLOP/s"),
        ("time/save_s", "seconds"),
        ("memory/gpu_peak_mib", "MiB"),
        ("loss", "loss"),
    ],
)
def test_units_of_curves(name, unit):
    assert unit_of(name) == unit
