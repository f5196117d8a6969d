"""The best and the worst answers in a run's report: whatever a model writes is shown, and nothing of it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sfumato.tracking.report import write_report
from sfumato.tracking.report_answers import MAX_ANSWERS, MAX_TEXT
from sfumato.tracking.samples import SampleRecord, save_samples, step_folder
from tests.tiny import run_task_here, tiny_text_rl_config
from tests.unit.test_report import Page

HOSTILE = "<script>alert(1)</script>\n</div></td></table><img src=x onerror=alert(2)> & \"'"


def record(text: str, total: float, sample_id: int, kind: Any = "eval", prompt: str = "1 + 1 =") -> SampleRecord:
    return SampleRecord(text, kind, prompt, 0, sample_id, {"correct": total, "length": -0.25}, total)


def page_of(folder: Path, records: list[SampleRecord], step: int = 4) -> tuple[Page, str]:
    save_samples(folder, step, records)
    html = write_report(folder).read_text(encoding="utf-8")
    return Page(html), html


def test_hostile_answers_are_shown_and_do_not_run(tmp_path: Path) -> None:
    page, html = page_of(tmp_path, [record(HOSTILE, 1.0, 0), record("2", 0.0, 1, prompt=HOSTILE)])
    assert "<script" not in html and "<img" not in html
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    assert not page.open, "what answers close was not open"
    assert page.text.count(HOSTILE) >= 3, (
        "and yet all of it can be read: in the grid, in the table as answer and prompt"
    )


def test_long_answers_are_folded_and_bounded(tmp_path: Path) -> None:
    long = "begin " + "<&>" * 1_000_000 + " end"
    page, html = page_of(tmp_path, [record(long, float(number), number) for number in range(40)])
    assert len(html) < 2 * MAX_ANSWERS * 3 * MAX_TEXT * len("&lt;")
    assert "begin <&>" in page.text and "<&> end" in page.text
    assert f"{len(long) - MAX_TEXT:,} characters left out" in page.text
    assert [tag for tag, _ in page.tags].count("summary") >= 2 * MAX_ANSWERS
    assert not any("open" in attributes for tag, attributes in page.tags if tag == "details")


def test_the_best_and_the_worst_of_the_last_step_with_their_rewards(tmp_path: Path) -> None:
    save_samples(tmp_path, 2, [record("earlier", 9.0, 0, "train")])
    records = [record(f"answer-{number:02d}", number / 8, number, "train") for number in range(20)]
    records += [record("nobody knows", float("nan"), 20, "train"), record("evaluated", 0.5, 0)]
    page, _ = page_of(tmp_path, records)
    kinds = page.values("data-kind", "table")
    assert kinds == ["eval", "train"]
    table = page.text[page.text.index("Best and worst answers of the last iteration") :]
    assert "Step 4 · 16 of the 21 samples that were kept, by their reward · 1 without a reward" in table
    order = [table.index(f"answer-{number:02d}") for number in [*range(19, 11, -1), *range(7, -1, -1)]]
    assert order == sorted(order)
    assert "answer-08" not in table and "answer-11" not in table and "earlier" not in table
    assert "reward 2.3750correct 2.3750length -0.2500" in table


def test_empty_answers_and_what_is_no_character(tmp_path: Path) -> None:
    page, html = page_of(tmp_path, [record("", 1.0, 0), record("a\x00\x1b[31m\u202egpj.exe\ufffd\r\n日本 😀", 0.0, 1)])
    assert "empty" in page.text
    assert "a⟨U+0000⟩⟨U+001B⟩[31m⟨U+202E⟩gpj.exe\ufffd⟨U+000D⟩\n日本 😀" in page.text
    assert not {"\x00", "\x1b", "\u202e", "\r"} & set(html)
    rows = [{"kind": "eval", "sample_id": 0, "prompt": "p", "seed": 0, "text": "\ud800", "total": 1.0, "rewards": {}}]
    (step_folder(tmp_path, 4) / "samples.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    assert "⟨U+D800⟩" in Page(write_report(tmp_path).read_text(encoding="utf-8")).text, "half a surrogate pair"


def test_texts_without_rewards_need_no_table(tmp_path: Path) -> None:
    page, _ = page_of(tmp_path, [SampleRecord("an answer", "eval", "a prompt", 0, 0)])
    assert "an answer" in page.text and "Best and worst" not in page.text


def test_a_run_has_both_tables(tmp_path: Path) -> None:
    folder = run_task_here("rl_text", tiny_text_rl_config(tmp_path, train={"max_steps": 2}), with_report=True)
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert page.values("data-kind", "table") == ["eval", "train"]
    assert "Step 2 · 16 of the 16 samples that were kept" in page.text, "all of the iteration"
