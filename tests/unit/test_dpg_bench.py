"""DPG-Bench by a judge: its table, its score against plain loops over the rows, and ``sfumato evaluate``."""

from __future__ import annotations

import csv
import json
import random
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sfumato.cli import main
from sfumato.errors import ConfigError, DataError
from sfumato.rewards.base import Failure, Sample
from sfumato.rewards.dpg_bench import DPGBench, PictureQuestion, read_questions, score_answers
from sfumato.tracking.json_lines import read_jsonl
from tests.reward_servers import start_judge_server
from tests.tiny import run_task_here, tiny_rl_config

COLUMNS = [
    "item_id", "text", "keywords", "proposition_id", "dependency", "category_broad", "category_detailed", "tuple",
    "question_natural_language",
]  # fmt: skip
CAT = 'A cat, grey and small, sits on "the" mat.'
ROWS = [
    ("1", CAT, "cat", "1", "0", "entity", "whole", "entity - whole (cat)", "Is there more than 30 %?"),
    ("1", CAT, "mat", "2", "0", "entity", "whole", "entity - whole (mat)", "Is there more than 60 %?"),
    ("1", CAT, "grey", "3", "1", "attribute", "color", "attribute - color (cat, grey)", "More than 10 %, if a cat?"),
    ("1", CAT, "on", "4", "1, 2", "relation", "spatial", "relation - spatial (cat, mat, on)", "More than 20 %?"),
    ("dark", "A photo\nat night", "photo", "1", "0", "global", "", "global - (photo)", "More than 0 %?"),
    ("dark", "A photo\nat night", "night", "2", "1", "global", "", "global - (night)", "Is it night?"),
]


def write_table(path: Path, rows: list[tuple[str, ...]] = ROWS, columns: list[str] = COLUMNS) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows([columns, *rows])
    return path


@pytest.fixture(scope="module")
def server():
    started = start_judge_server()
    yield started
    started.end(signal.SIGTERM)


@pytest.fixture
def table(tmp_path: Path) -> Path:
    return write_table(tmp_path / "dpg_bench.csv")


def reward(server, table: Path, model: str = "answer_questions", **fields: Any) -> DPGBench:
    patience = {"timeout_s": 20.0, "request_timeout_s": 10.0, "retry_for_s": 5.0, "allow_private": True}
    return DPGBench(questions=str(table), base_urls=(server.url,), model=model, **{**patience, **fields})


def grey(share: float, prompt: str = CAT, **metadata: Any) -> Sample:
    level = round(255 * share)
    return Sample(image=np.full((4, 4, 3), level, np.uint8), prompt=prompt, group_id=0, metadata=metadata)


def score_by_rows(path: Path, item: str, yes: dict[int, bool]) -> tuple[float, dict[str, list[float]]]:
    """The published evaluation of one picture: its score, and the answers by category, by loops over the rows."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["item_id"] == item]
    counted = {int(row["proposition_id"]): float(yes[int(row["proposition_id"])]) for row in rows}
    by_category = defaultdict(list)
    for row in rows:
        by_category[row["tuple"].split("(")[0].strip()].append(counted[int(row["proposition_id"])])
    for row in rows:
        for parent in row["dependency"].split(","):
            if int(parent) != 0 and counted[int(parent)] == 0:
                counted[int(row["proposition_id"])] = 0
    return sum(counted.values()) / len(counted), by_category


def test_a_question_counts_only_after_its_parents():
    """A chain of four whose second is answered with No: a Yes after it counts for nothing, however far it is."""
    chain = [PictureQuestion(n, "?", (n - 1,) if n > 1 else (), "entity/whole") for n in (1, 2, 3, 4)]
    assert score_answers(chain, [1.0, 0.0, 1.0, 1.0]) == 1 / 4
    assert score_answers(chain, [1.0, 1.0, 1.0, 0.0]) == 3 / 4
    assert score_answers(chain[::-1], [1.0, 1.0, 0.0, 1.0]) == 2 / 4, "a child before its parent, as published"


def test_random_tables_have_the_score_of_loops_over_their_rows(tmp_path):
    generator = random.Random(0)
    for number in range(50):
        rows, yes = [], {}
        for question in range(1, generator.randint(2, 9)):
            parents = [parent for parent in range(1, question) if generator.random() < 0.4] or [0]
            row = ("7", CAT, "", str(question), ",".join(map(str, parents)), "", "", "entity - part (a)", "?")
            rows.append(row)
            yes[question] = generator.random() < 0.7
        if generator.random() < 0.5:
            generator.shuffle(rows)
        path = write_table(tmp_path / f"{number}.csv", rows)
        questions = read_questions(str(path)).find(CAT, {})
        expected, _ = score_by_rows(path, "7", yes)
        assert score_answers(questions, [float(yes[question.number]) for question in questions]) == expected


def test_pictures_have_the_score_of_the_published_loops_and_categories_their_share(server, table):
    judge = reward(server, table, name="dpg")
    samples = [grey(0.5), grey(0.25), grey(0.9), grey(0.4, "A photo at  night"), grey(0.5, "other", item_id="dark")]
    items = ["1", "1", "1", "dark", "dark"]
    wanted = {"1": {1: 0.3, 2: 0.6, 3: 0.1, 4: 0.2}, "dark": {1: 0.0, 2: 2.0}}
    expected, by_category = [], defaultdict(list)
    for sample, item in zip(samples, items, strict=True):
        light = sample.pixels.mean() / 255
        value, answers = score_by_rows(table, item, {number: light > low for number, low in wanted[item].items()})
        expected.append(value)
        for category, of_picture in answers.items():
            by_category[category] += of_picture
    assert expected == [0.5, 0.0, 1.0, 0.5, 0.5]
    assert judge.score(samples) == expected
    counts = judge.take_counts()
    assert counts.pop("judge/dpg/parse_failures") == (0, 16)
    names = {"entity - whole": "entity/whole", "attribute - color": "attribute/color", "global -": "global",
             "relation - spatial": "relation/spatial"}  # fmt: skip
    for published, name in names.items():
        answers = by_category[published]
        assert counts[f"dpg/{name}"] == counts[f"dpg/{name.split('/')[0]}"] == (sum(answers), len(answers))
    assert set(counts) == {f"dpg/{part}" for name in names.values() for part in (name, name.split("/")[0])}
    assert all(count == (0, 0) for name, count in judge.take_counts().items()), "counted once"


def test_a_picture_without_all_answers_has_no_value_and_counts_in_no_category(server, table):
    judge = reward(server, table, "unsure")
    (value,) = judge.score([grey(0.5)])
    assert isinstance(value, Failure) and "does not begin with Yes or No" in value.reason
    counts = judge.take_counts()
    assert counts["judge/dpg_bench/parse_failures"] == (4, 4) and counts["dpg_bench/entity"] == (0, 0)


@pytest.mark.parametrize(
    ("change", "row", "message"),
    [
        ({3: "x"}, 1, "line 3: not a row of dpg_bench.csv: invalid literal"),
        ({4: ""}, 0, "line 2: not a row of dpg_bench.csv: invalid literal"),
        ({7: "(cat)"}, 0, "line 2: not a row of dpg_bench.csv: its tuple names no category"),
    ],
)
def test_a_table_with_a_broken_row_is_refused_by_its_line(server, tmp_path, change, row, message):
    rows = [list(row) for row in ROWS]
    for column, value in change.items():
        rows[row][column] = value
    path = write_table(tmp_path / "broken.csv", rows)
    with pytest.raises(ConfigError, match=rf"questions of reward 'dpg_bench': {path}, {message}"):
        reward(server, path).prepare()


def test_other_files_are_no_table(server, tmp_path):
    judge = reward(server, write_table(tmp_path / "other.csv", [], ["item_id", "text"]))
    with pytest.raises(ConfigError, match="has no column 'proposition_id'"):
        judge.check_installed()
    with pytest.raises(ConfigError, match=r"no file .*nowhere\.csv"):
        reward(server, tmp_path / "nowhere.csv").prepare()
    with pytest.raises(ConfigError, match="holds no question"):
        reward(server, write_table(tmp_path / "empty.csv", [])).prepare()


def test_prompts_without_questions_are_refused_before_anything_is_drawn(server, tmp_path):
    twice = [("2", *ROWS[0][1:]), ROWS[4], ("lost", "a", "", "1", "9", "", "", "other - text (a)", "?")]
    twice += [("same", "b", "", "1", "0", "", "", "other - text (a)", "?")] * 2
    judge = reward(server, write_table(tmp_path / "dpg.csv", [*ROWS[:4], *twice]))
    judge.check_row(CAT, {"item_id": 2})
    for prompt, metadata, message in (
        (CAT, {}, "that of 1, 2: give its row a column item_id"),
        ("a dog", {}, "has none about it"),
        (CAT, {"item_id": "3"}, "has none about it"),
        ("a", {}, "question 1 of item lost depends on 9, which is missing"),
        ("b", {}, "question 1 of item same is there twice"),
    ):
        with pytest.raises(DataError, match=message):
            judge.check_row(prompt, metadata)


def test_evaluate_has_the_score_and_its_categories_from_the_benchmarks_own_files(server, table, tmp_path, capsys):
    run = run_task_here("rl_diffusion", tiny_rl_config(tmp_path / "run", train={"max_steps": 1}))
    prompts = tmp_path / "prompts"
    prompts.mkdir()
    (prompts / "1.txt").write_text(f"{CAT}\n", encoding="utf-8")
    fields = {"type": "dpg_bench", "questions": str(table), "model": "answer_questions", "base_urls": [server.url]}
    chosen = json.dumps({**fields, "allow_private": True})
    out = tmp_path / "out"
    arguments = ["evaluate", run, "--no-base", "--prompts", prompts, "--samples", 3, "--reward", chosen, "--out", out]
    assert main([str(argument) for argument in arguments]) == 0
    rows = read_jsonl(out / "samples.jsonl")
    scores, spatial = [], []
    for row in rows:
        light = np.asarray(Image.open(out / row["file"])).mean() / 255
        score, by_category = score_by_rows(
            table, "1", {n: light > low for n, low in enumerate((0.3, 0.6, 0.1, 0.2), 1)}
        )
        scores.append(score)
        spatial += by_category["relation - spatial"]
    means = {row["metric"]: row["mean"] for row in json.loads((out / "evaluation.json").read_text())["results"]}
    assert len(scores) == 3 and means["dpg_bench"] == pytest.approx(np.mean(scores), abs=1e-12)
    assert means["dpg_bench/relation"] == means["dpg_bench/relation/spatial"] == np.mean(spatial)
    assert "dpg_bench/global" not in means and means["judge/dpg_bench/parse_failures"] == 0
    assert "dpg_bench/entity/whole" in capsys.readouterr().out
