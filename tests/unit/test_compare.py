"""What ``sfumato compare`` computes: fields that differ, results, paired differences, and folders of all kinds."""

import json
import math
import re
import shutil

import numpy as np
import pytest

from sfumato.cli import main
from sfumato.commands.compare_tables import draw_sparkline
from sfumato.config.writing import write_atomically
from sfumato.errors import DataError
from sfumato.tracking.compare import ABSENT, compare_runs, differing_fields, direction_of, flatten_config, read_run
from sfumato.tracking.curves import line_style
from sfumato.tracking.folder import write_json
from sfumato.tracking.json_lines import strict_json
from sfumato.tracking.samples import SampleRecord, save_samples
from tests.unit.test_report import Page

CONFIG = """train: {{lr: {lr}, max_steps: 20, output_dir: {name}, load_checkpoint_path: null}}
eval: {{num_prompts: 8, seed: 1}}
reward:
  rewards:
    - {{type: ocr, weight: 1.0}}
    - {{type: function, path: "mine:length", weight: {weight}}}
"""


def make_run(folder, lr=0.1, weight=-0.5, gain=0.0, run_id=None, steps=(0, 10, 20), num_prompts=8, task="rl_diffusion"):
    """A run folder written by the writers of runs; prompt i has reward i / 10 + gain at the last step."""
    folder.mkdir(parents=True)
    write_atomically(folder / "config.yaml", CONFIG.format(lr=lr, weight=weight, name=folder.name).encode())
    environment = {"task": task, "run_id": run_id or folder.name, "total_steps": 20, "python": "3.12.1"}
    write_json(folder / "environment.json", {**environment, "finished": "2026-11-25" if steps[-1] == 20 else None})
    lines = []
    for step in steps:
        rewards = [0.1 * prompt + gain * step / 20 for prompt in range(num_prompts)]
        records = [
            SampleRecord(f"text {step}", "eval", f"prompt {prompt}", 1, prompt, {"ocr": reward}, reward)
            for prompt, reward in enumerate(rewards)
        ]
        save_samples(folder, step, records)
        mean = float(np.mean(rewards))
        lines.append({"step": step, "eval/reward/total": mean, "eval/reward/std": 0.1, "loss": 1 / (1 + step)})
    write_atomically(folder / "metrics.jsonl", "".join(f"{strict_json(line)}\n" for line in lines).encode())
    return folder


def test_says_what_differs_and_by_how_much(tmp_path):
    first = make_run(tmp_path / "a")
    second = make_run(tmp_path / "b", lr=0.2, gain=0.3)
    comparison = compare_runs([first, second])
    assert [(field.name, field.values) for field in comparison.config] == [("train.lr", (0.1, 0.2))]
    assert not comparison.environment
    assert [run.state for run in comparison.runs] == ["finished, step 20 of 20"] * 2
    total = comparison.results["eval/reward/total"][1]
    assert (total.first_step, total.last_step, total.best_step) == (0, 20, 20)
    assert comparison.results["loss"][0].best == pytest.approx(1 / 21)
    assert "eval/reward/std" not in comparison.results
    paired = comparison.paired[0]
    assert paired.steps == (20, 20)
    assert [difference.reward for difference in paired.differences] == ["total", "ocr"]
    # every prompt gained the same, so the interval has no width
    assert paired.differences[0].mean == pytest.approx(0.3)
    assert paired.differences[0].low == pytest.approx(0.3)
    assert paired.differences[0].num_prompts == 8


def test_the_same_run_twice_differs_by_exactly_nothing(tmp_path):
    comparison = compare_runs([make_run(tmp_path / "a")] * 2)
    difference = comparison.paired[0].differences[0]
    assert (difference.mean, difference.low, difference.high) == (0.0, 0.0, 0.0)
    assert not comparison.config
    assert "the same run" in comparison.notes[0]
    assert len({run.name for run in comparison.runs}) == 2


def test_a_copy_is_the_same_run(tmp_path):
    first = make_run(tmp_path / "a")
    shutil.copytree(first, tmp_path / "copy")
    assert "the same run" in compare_runs([first, tmp_path / "copy"]).notes[0]


def test_an_unfinished_run_is_compared_at_the_newest_common_step(tmp_path):
    comparison = compare_runs([make_run(tmp_path / "a", gain=1.0), make_run(tmp_path / "b", steps=(0, 10))])
    paired = comparison.paired[0]
    assert comparison.runs[1].state == "unfinished, step 10 of 20"
    assert paired.steps == (10, 10)
    assert paired.differences[0].mean == pytest.approx(-0.5)
    assert "step 10 is the newest that both evaluated" in paired.notes


def test_samples_without_partners_and_rewards_are_counted(tmp_path):
    first = make_run(tmp_path / "a")
    second = make_run(tmp_path / "b", num_prompts=5)
    failed = SampleRecord("text", "eval", "prompt 0", 1, 0, {"ocr": math.nan})
    others = [SampleRecord("text", "eval", f"prompt {i}", 1, i, {"ocr": 0.5}, 0.5) for i in range(1, 5)]
    save_samples(second, 20, [failed, *others])
    paired = compare_runs([first, second]).paired[0]
    assert paired.num_unpaired == 3
    assert {difference.num_failed for difference in paired.differences} == {1}
    assert {difference.num_pairs for difference in paired.differences} == {4}
    assert any("b kept 5 of its 8" in note for note in paired.notes)


def test_evaluations_with_other_seeds_are_not_paired(tmp_path, capsys):
    first = make_run(tmp_path / "a")
    second = make_run(tmp_path / "b")
    save_samples(second, 20, [SampleRecord("text", "eval", "prompt 0", 2, 0, {"ocr": 0.5}, 0.5)])
    paired = compare_runs([first, second]).paired[0]
    assert not paired.differences
    assert any("the evaluations differ" in note for note in paired.notes)
    assert main(["compare", str(first), str(second)]) == 0
    printed = capsys.readouterr().out
    assert "b against a: held-out results were not compared" in printed and "no difference" not in printed


def test_runs_of_different_tasks_are_said(tmp_path):
    first = make_run(tmp_path / "a")
    notes = compare_runs([first, make_run(tmp_path / "b", task="train_dit", weight=0.5)]).notes
    assert any("rl_diffusion, train_dit" in note for note in notes)
    assert any("not the same quantity" in note for note in notes)


def test_damaged_folders_are_named(tmp_path):
    first = make_run(tmp_path / "runs" / "a")
    with pytest.raises(DataError, match=f"it holds runs: {first}"):
        read_run(tmp_path / "runs")
    with pytest.raises(DataError, match="does not exist"):
        read_run(tmp_path / "typo")
    with pytest.raises(DataError, match="two run folders"):
        compare_runs([first])
    (first / "config.yaml").write_text("train: [")
    assert "the configuration is not compared" in read_run(first).problems[0]
    (first / "metrics.jsonl").write_text('{"step": 0}\nbroken\n{"step": 1}\n')
    with pytest.raises(DataError, match=r"metrics.jsonl:2 is broken"):
        read_run(first)


def test_a_step_that_was_not_evaluated_is_named(tmp_path):
    comparison = compare_runs([make_run(tmp_path / "a"), make_run(tmp_path / "b")], step=15)
    assert comparison.paired[0].notes[0] == "a has no evaluation at step 15, but at 0, 10, 20"


def test_fields():
    one = flatten_config({"reward": {"rewards": [{"type": "ocr"}]}, "a": {"b": 1}, "c": True})
    assert one == {"reward.rewards[0].type": "ocr", "a.b": 1, "c": True}
    other = {**one, "a.b": 1.0, "c": 1, "d": None}
    assert [(field.name, field.values) for field in differing_fields([one, other])] == [
        ("c", (True, 1)),
        ("d", (ABSENT, None)),
    ]
    assert not differing_fields([one, {}]), "a configuration that could not be read differs in nothing"


def test_secrets_are_hidden(tmp_path):
    folder = make_run(tmp_path / "a")
    (folder / "config.yaml").write_text("judge: {api_key: sk-abcdefghijklmnop1234}\ntrain: {lr: 1}\n")
    assert "sk-" not in repr(read_run(folder).config)


def test_directions():
    config = flatten_config({"reward": {"rewards": [{"type": "ocr", "weight": 2.0}, {"type": "b", "weight": -1.0}]}})
    metrics = ("eval/reward/ocr", "eval/reward/b", "eval/loss", "eval/exact_match", "eval/reward/c")
    assert [direction_of(name, config) for name in metrics] == [1, -1, -1, 1, 0]


def test_command_prints_and_writes_a_page(tmp_path, capsys):
    runs = [str(make_run(tmp_path / "a")), str(make_run(tmp_path / "b", lr=0.2, gain=0.3))]
    assert main(["compare", *runs]) == 0
    printed = capsys.readouterr().out
    assert "train.lr" in printed and "+0.3 [+0.3, +0.3]" in printed and re.search("▁[▄▅]█", printed)
    assert f"sfumato compare {' '.join(runs)} --html compare.html" in printed

    path = tmp_path / "compare.html"
    assert main(["compare", *runs, "--html", str(path)]) == 0
    page = Page(path.read_text(encoding="utf-8"))
    assert page.values("data-metric", "figure") == ["eval/reward/total", "loss"]
    assert "train.lr" in page.text and "text 20" in page.text and not page.open
    assert not {"script", "link", "img"} & {tag for tag, _ in page.tags}


def test_command_as_json(tmp_path, capsys):
    first = str(make_run(tmp_path / "a", num_prompts=1))
    assert main(["compare", first, str(make_run(tmp_path / "b", lr=0.2, num_prompts=1)), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["config"] == {"train.lr": [0.1, 0.2]}
    assert result["paired"][0]["differences"][0]["low"] is None, "one prompt has no interval"


@pytest.mark.parametrize("page", ["", "b/metrics.jsonl", "nowhere/compare.html"])
def test_command_overwrites_no_file_of_a_run(tmp_path, capsys, page):
    runs = [str(make_run(tmp_path / name)) for name in ("a", "b")]
    before = (tmp_path / "b" / "metrics.jsonl").read_bytes()
    assert main(["compare", *runs, "--html", str(tmp_path / page)]) == 2
    assert "--html" in capsys.readouterr().err
    assert (tmp_path / "b" / "metrics.jsonl").read_bytes() == before


def test_what_runs_have_logged_is_text_on_the_page(tmp_path, capsys):
    hostile = "<script>alert(1)</script>[bold]\x1b[31m"
    runs = []
    for name in ("a", "b"):
        folder = make_run(tmp_path / name)
        save_samples(folder, 20, [SampleRecord(hostile, "eval", hostile, 1, 0, {hostile: 0.5}, 0.5)])
        (folder / "metrics.jsonl").write_text(strict_json({"step": 20, f"eval/{hostile}": 1.0 + len(runs)}) + "\n")
        runs.append(str(folder))
    assert main(["compare", *runs, "--html", str(tmp_path / "compare.html")]) == 0
    html = (tmp_path / "compare.html").read_text(encoding="utf-8")
    assert "<script" not in html and "\x1b" not in html
    printed = capsys.readouterr().out
    assert "\x1b" not in printed and "[bold]" in printed


def test_many_runs_have_curves_of_their_own_style():
    styles = {line_style(number) for number in range(18)}
    assert len(styles) == 18


def test_sparklines():
    assert draw_sparkline([0.0, 1.0], 0.0, 1.0) == "▁█"
    assert draw_sparkline([2.0] * 100, 2.0, 2.0) == "▁" * 24
    assert draw_sparkline([], 0.0, 1.0) == ""
