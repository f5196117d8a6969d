"""The studio's answers: what is read of run folders that grow, resume, are moved or are broken."""

from __future__ import annotations

import json
import math
import os
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from sfumato.studio import samples
from sfumato.studio.app import Studio, build_app
from sfumato.studio.gallery import key_of_prompt
from sfumato.studio.secrets import hide_in_text, hide_secrets
from sfumato.studio.series import Curve, MetricTable, reduce_curve
from sfumato.studio.tail import LineTail
from sfumato.studio.thumbnails import Thumbnails
from sfumato.tracking.curves import smooth_values
from sfumato.tracking.lock import Owner
from sfumato.tracking.samples import SampleRecord, save_samples, step_folder
from sfumato.tracking.waveforms import Waveform
from tests.studio_runs import HOST, PROMPTS, TOKEN, add_decisions, eval_records, picture, write_run, write_steps


def client_of(root, tmp_path):
    studio = Studio(root, Thumbnails(tmp_path / "thumbnails"))
    client = TestClient(build_app(studio, TOKEN), base_url=HOST)
    assert client.get("/", params={"token": TOKEN}).status_code == 200
    return client


@pytest.fixture
def runs(tmp_path):
    root = tmp_path / "runs"
    write_run(root / "a")
    return root


@pytest.fixture
def client(runs, tmp_path):
    return client_of(runs, tmp_path)


def read(client, path, status=200, **parameters):
    answer = client.get(path, params=parameters)
    assert answer.status_code == status, answer.text
    return answer.json()


def pause():
    time.sleep(0.55)  # files are looked at twice a second


def test_whole_lines_alone_are_read_and_another_file_is_a_reset(tmp_path):
    path, records, resets = tmp_path / "m.jsonl", [], []
    tail = LineTail(path)

    def look():
        return tail.read_new(lambda: (resets.append(1), records.clear()), records.extend)

    assert not look()
    path.write_bytes(b'{"step": 1}\n{"st')
    assert look() and records == [{"step": 1}]
    with path.open("ab") as file:
        file.write(b'ep": 2}\nno json\n[1]\n{"text": "half a \\ud83d pair"}\n')
    assert look() and records == [{"step": 1}, {"step": 2}, {"text": "half a \ud83d pair"}] and tail.num_broken == 2
    assert not look()
    replacement = tmp_path / "new"
    replacement.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3}\n{"step": 4}\n{"step": 5}\n{"step": 6}\n')
    os.replace(replacement, path)
    assert look() and len(resets) == 1 and records[-1] == {"step": 6} and tail.num_broken == 0
    with path.open("r+b") as file:  # written over in place: the same inode, and no fewer bytes
        file.write(b'{"step": 9}\n')
    assert look() and len(resets) == 2 and records[0] == {"step": 9}
    path.unlink()
    assert look() and records == [] and not look()


def test_numbers_of_lines_with_other_names_or_in_another_order_are_all_held():
    table = MetricTable()
    lines = [{"step": step, "loss": step / 7, "lr": 1.0} for step in range(5)]
    lines += [{"lr": 2, "step": 5, "loss": None}, {"step": 6, "loss": "high", "lr": True}, {"step": -1, "loss": 9.0}]
    lines += [{"loss": 5.0, "step": 7}, {"loss": 3.0, "step": 3}, {"loss": 8.0, "step": 8}, {"loss": 8.5, "step": 8}]
    table.add(lines)
    loss, lr = (dict(zip(*map(list, table.curves[name].arrays()), strict=True)) for name in ("loss", "lr"))
    assert math.isnan(loss.pop(5.0))
    assert loss == {0: 0, 1: 1 / 7, 2: 2 / 7, 3: 3, 4: 4 / 7, 7: 5, 8: 8.5} and list(loss) == sorted(loss)
    assert lr == {0: 1, 1: 1, 2: 1, 3: 1, 4: 1, 5: 2} and table.last_step == 8


def test_a_file_that_is_a_link_or_may_not_be_read_is_said(tmp_path, runs, client):
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"step": 99, "loss": 1}\n')
    (runs / "a" / "metrics.jsonl").unlink()
    (runs / "a" / "metrics.jsonl").symlink_to(secret)
    overview = read(client, "/api/overview", run="a")
    assert overview["step"] == 0 and any("metrics.jsonl cannot be read" in text for text in overview["problems"])


def test_the_list_of_runs_says_what_each_does(client, runs):
    write_run(runs / "deep" / "b", steps=20)
    environment = json.loads((runs / "deep" / "b" / "environment.json").read_text())
    (runs / "deep" / "b" / "environment.json").write_text(json.dumps(environment | {"finished": True}))
    (runs / "no run").mkdir()
    (runs / "a" / "samples" / "x").mkdir()
    lines = {line["run"]: line for line in read(client, "/api/runs")["runs"]}
    assert set(lines) == {"a", "deep/b"}
    assert lines["a"]["state"] == "stopped" and lines["deep/b"]["state"] == "finished"
    assert (lines["a"]["step"], lines["a"]["total_steps"], lines["a"]["eta_s"]) == (12, 20, None)
    figure = lines["a"]["figures"][-1]
    assert figure["name"] == "eval/reward/total" and figure["first"] == [4, 0.2] and figure["change"] == "better"
    assert [line["run"] for line in read(client, "/api/runs", search="DEEP")["runs"]] == ["deep/b"]


def write_lock(folder, **changes):
    from sfumato.tracking import lock

    here = {"host": "h", "pid": os.getpid(), "born": lock.process_birth(os.getpid()), "place": lock._machine_id()}
    owner = Owner(**(here | {"since": "now", "token": "t"} | changes))
    (folder / "run.lock").write_text(json.dumps(vars(owner)))


def test_a_run_that_is_at_work_died_or_stands_still(client, runs):
    stopped = read(client, "/api/overview", run="a")
    assert stopped["last_line"] == "step 3: reward failed: sharp: timed out (2 of 8 samples)"
    write_lock(runs / "a")
    alive = read(client, "/api/overview", run="a")
    assert alive["last_line"] == ""
    assert alive["state"] == "running" and alive["eta_s"] == pytest.approx(8 * 0.5)
    old = time.time() - 3600
    for name in ("metrics.jsonl", "timings.jsonl", "log.txt"):
        os.utime(runs / "a" / name, (old, old))
    still = read(client, "/api/status", run="a")
    assert still["state"] == "standing still" and [alert["kind"] for alert in still["alerts"]] == ["standing still"]
    answer = {"command": "pause", "result": "done", "step": 12, "time": time.time()}
    (runs / "a" / "control.jsonl").write_text(json.dumps(answer) + "\n")
    write_lock(runs / "a", since="2026-11-25 10:00:00+00:00")
    paused = read(client, "/api/overview", run="a")
    assert (paused["state"], paused["eta_s"]) == ("running", None) and "paused" in paused["state_text"]
    write_lock(runs / "a", since="2999-11-25 10:00:00+00:00")  # the process that was paused is another one
    assert read(client, "/api/status", run="a")["state"] == "standing still"
    write_lock(runs / "a", born="another process of that number")
    died = read(client, "/api/status", run="a")
    assert died["state"] == "died" and "gone" in died["alerts"][0]["text"]
    write_lock(runs / "a", place="another machine")
    os.utime(runs / "a" / "run.lock", (old, old))
    assert "not renewed" in read(client, "/api/status", run="a")["alerts"][0]["text"]


def test_the_overview_holds_what_the_report_does(client):
    overview = read(client, "/api/overview", run="a")
    assert [line["reason"] for line in overview["failed"]] == ["sharp: timed out"] and overview["failed"][0][
        "train"
    ] == 2
    assert overview["curves"][:2] == ["reward/total", "eval/reward/total"] and overview["has_signs"]
    assert ["task", "rl_diffusion"] in overview["facts"] and overview["last_sample_step"] == 12


def test_curves_of_a_resumed_run_are_those_of_its_file(client, runs):
    assert read(client, "/api/curves", run="a", name="loss")["curves"]["a"]["loss"]["x"][-1] == 12
    write_steps(runs / "a", 7, 8)
    pause()
    curve = read(client, "/api/curves", run="a", name="loss")["curves"]["a"]["loss"]
    assert curve["x"] == list(range(1, 9)) and curve["y"] == [1 / step for step in range(1, 9)]
    metrics = {line["name"]: line for line in read(client, "/api/metrics", run="a")["metrics"]}
    assert metrics["lr"]["is_flat"] and not metrics["loss"]["is_flat"] and metrics["time/step_s"]["last"] == 0.5


def test_a_metric_that_is_no_number_any_more_is_neither_flat_nor_as_it_was(client, runs):
    with (runs / "a" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 13, "lr": None, "eval/reward/total": None}) + "\n")
    metrics = {line["name"]: line for line in read(client, "/api/metrics", run="a")["metrics"]}
    assert not metrics["lr"]["is_flat"] and metrics["lr"]["last"] is None
    figures = {figure["name"]: figure for figure in read(client, "/api/overview", run="a")["figures"]}
    assert figures["eval/reward/total"]["lost_at"] == 13 and figures["eval/reward/total"]["last"][0] == 12
    assert figures["eval/reward/small"]["lost_at"] is None


def test_the_mean_of_a_reduced_curve_is_that_of_the_whole():
    values = np.random.default_rng(1).normal(size=3_000)
    values[1000] = 1e9  # leaves nothing of itself in means that do not hold it
    curve = Curve()
    for step, value in enumerate(values):
        curve.add(step, float(value))
    reduced = reduce_curve(curve, 100)
    np.testing.assert_allclose(reduced["smooth"], smooth_values(values)[np.array(reduced["x"], dtype=int)], rtol=1e-9)


def test_runs_are_listed_before_they_are_read(runs, tmp_path, monkeypatch):
    write_run(runs / "b")
    monkeypatch.setattr("sfumato.studio.app.LIST_S", 0.0)
    client = client_of(runs, tmp_path)
    quick = {line["run"]: line for line in read(client, "/api/runs", quick="true")["runs"]}
    assert quick == {name: {"run": name, "is_pending": True} for name in ("a", "b")}
    assert sum("is_pending" in line for line in read(client, "/api/runs")["runs"]) == 1
    assert not any("is_pending" in line for line in read(client, "/api/runs")["runs"])
    assert not any("is_pending" in line for line in read(client, "/api/runs", quick="true")["runs"])
    assert set(read(client, "/api/names")["names"]) == {"a", "b"}


def test_pages_share_an_answer_until_there_is_something_new(client, runs, monkeypatch):
    calls = []

    def describe_overview(reader):
        calls.append(reader.metrics.last_step)
        return {"step": reader.metrics.last_step}

    monkeypatch.setattr("sfumato.studio.app.describe_overview", describe_overview)
    assert [read(client, "/api/overview", run="a")["step"] for _ in range(3)] == [12] * 3 and calls == [12]
    write_steps(runs / "a", 13, 13)
    pause()
    assert read(client, "/api/overview", run="a")["step"] == 13 and calls == [12, 13]


def test_a_reduced_curve_keeps_the_extremes_of_each_pixel():
    generator = np.random.default_rng(0)
    curve = Curve()
    values = generator.normal(size=20_000)
    values[777], values[15_000] = 90.0, -90.0
    values[123] = np.nan
    for step, value in enumerate(values):
        curve.add(step, float(value))
    reduced = reduce_curve(curve, 100)
    assert len(reduced["x"]) <= 202 and reduced["total"] == 20_000
    assert reduced["x"] == sorted(reduced["x"]) and {0, 777, 15_000, 19_999} <= set(reduced["x"])
    for column in range(100):
        inside = values[200 * column : 200 * (column + 1)]
        shown = [y for x, y in zip(reduced["x"], reduced["y"], strict=True) if 200 * column <= x < 200 * (column + 1)]
        assert np.nanmax(inside) == max(shown) and np.nanmin(inside) == min(shown)
    gap = Curve()
    for step in [*range(500), *range(10_000, 10_500)]:
        gap.add(step, math.nan if step < 300 else 1.0)
    reduced = reduce_curve(gap, 50)  # columns without a point, and with NaN alone
    assert {0, 420, 10_000, 10_499} <= set(reduced["x"]) and set(reduced["y"]) == {None, 1.0}
    part = reduce_curve(curve, 100, 500, 600)
    assert part["x"] == list(range(500, 601)) and part["smooth"] is None
    curve.add(19_999, 5.0)
    curve.add(100, 6.0)
    assert curve.values[-1] == 5.0 and curve.values[100] == 6.0


def test_the_gallery_has_each_prompt_and_seed_at_each_step(client, runs):
    gallery = read(client, "/api/gallery", run="a")
    assert gallery["repeated_steps"] == [1, 4, 8, 12] and gallery["is_complete"]
    assert {prompt["prompt"] for prompt in gallery["prompts"]} == set(PROMPTS)
    column = read(client, "/api/cells", run="a", steps="4,8,5")
    assert set(column) == {"4", "8"}
    by_prompt = {gallery["prompts"][cell[0]]["id"]: cell for cell in column["8"]["cells"]}
    assert by_prompt[0][1:3] == ["eval_0000.png", 0.4] and by_prompt[2][2] == 0.6
    # a resumed run makes the step again: its files have other addresses
    write_steps(runs / "a", 5, 8)
    save_samples(runs / "a", 8, eval_records(16)[:2])
    pause()
    again = read(client, "/api/gallery", run="a")
    assert again["generation"] > gallery["generation"]
    new = read(client, "/api/cells", run="a", steps="8")["8"]
    assert new["version"] != column["8"]["version"] and len(new["cells"]) == 2


def test_a_new_step_has_the_others_looked_at_only_now_and_then(tmp_path, monkeypatch):
    for step in range(1, 41):
        save_samples(tmp_path, step, eval_records(step)[:1])
    looked_at = []
    stamp_of = samples._stamp_of
    monkeypatch.setattr(samples, "_stamp_of", lambda folder: (looked_at.append(Path(folder).name), stamp_of(folder))[1])
    index = samples.SampleIndex(tmp_path)
    assert index.refresh() and len(looked_at) == 40 and index.index(10.0)
    looked_at.clear()
    assert not index.refresh() and not looked_at, "nothing is new"
    save_samples(tmp_path, 41, eval_records(41)[:1])
    assert index.refresh() and max(index.steps) == 41
    assert len(looked_at) == samples.NEWEST_STEPS and looked_at[-1] == "step_000041"
    # a folder that was replaced has another number, or is seen when all are looked at again
    os.rename(step_folder(tmp_path, 3), tmp_path / "old")
    save_samples(tmp_path, 3, eval_records(3)[:2])
    os.utime(step_folder(tmp_path, 5) / "samples.jsonl", ns=(7, 7))
    generation = index.generation
    assert index.refresh() and index.generation == generation + 1
    assert len(index.entry(3).repeated) == 2 and index.entry(5).version != "7"
    index._look_again_at = 0.0
    assert index.refresh() and index.generation == generation + 2 and index.entry(5).version == "7"
    assert not index.refresh()


def test_groups_and_samples_say_what_they_taught(client, runs):
    step = read(client, "/api/step", run="a", step=4)
    assert [len(group["samples"]) for group in step["groups"]] == [3, 3] and not step["groups"][0]["is_computed"]
    assert step["groups"][0]["mean"] == pytest.approx(1 / 6)
    read(client, "/api/step", run="a", step=8)
    add_decisions(runs / "a", 8)  # an update writes the rows anew in their folder
    computed = read(client, "/api/step", run="a", step=8)["groups"][1]
    assert computed["group"] == "1" and computed["mean"] == 0.25 and computed["is_computed"]
    sample = read(client, "/api/sample", run="a", step=8, kind="train", id=4)
    assert sample["ids"] == [3, 4, 5]
    assert sample["sample"]["log_ratio"] == [0.0, 0.02] and sample["largest_advantage"] == 1.0
    assert read(client, "/api/sample", 404, run="a", step=8, kind="train", id=77)["error"].startswith("a has no sample")


def test_a_prompt_over_training_is_never_mixed_with_another_one(client, runs):
    film = read(client, "/api/frames", run="a", id=0, seed=7, prompt_key=key_of_prompt(PROMPTS[0]))
    assert [frame["step"] for frame in film["frames"]] == [1, 4, 8, 12]
    assert [frame["total"] for frame in film["frames"]] == [0.05, 0.2, 0.4, 0.6]
    assert read(client, "/api/frames", run="a", id=0, seed=7, prompt_key=key_of_prompt("a cat"))["frames"] == []
    assert read(client, "/api/frames", run="a", id=0, seed=8)["frames"] == []


def test_prompts_with_the_same_id_seed_and_beginning_are_told_apart(client, runs):
    """A run may go on with other prompts, and those of agents begin with the same instructions."""
    folder = write_run(runs / "changed", steps=1)
    first, second = ("do as you are told. " * 40 + end for end in ("draw", "sing"))
    for step, prompt in ((2, first), (4, first), (6, second)):
        save_samples(folder, step, [replace(eval_records(step)[0], prompt=prompt)])
    pause()
    prompts = read(client, "/api/gallery", run="changed")["prompts"]
    alike = [prompt for prompt in prompts if (prompt["id"], prompt["seed"]) == (0, 7)]
    assert len(alike) == 3 and len({entry["prompt"] for entry in alike}) == 2
    assert len({entry["prompt_key"] for entry in alike}) == 3
    for prompt, steps in ((PROMPTS[0], [1]), (first, [2, 4]), (second, [6])):
        key = key_of_prompt(prompt)
        film = read(client, "/api/frames", run="changed", id=0, seed=7, prompt_key=key)
        assert [frame["step"] for frame in film["frames"]] == steps
        sample = read(client, "/api/sample", run="changed", step=steps[-1], kind="eval", id=0)
        assert sample["prompt_key"] == key


def test_why_pairs_the_samples_of_two_steps(client):
    why = read(client, "/api/why", run="a", first=4, last=12)
    total = why["differences"][0]
    assert total["reward"] == "total" and total["mean"] == pytest.approx(0.0) and total["num_prompts"] == 3
    assert total["low"] < 0 < total["high"]
    assert [mover["before"]["id"] for mover in why["risen"]] == [0] and why["risen"][0]["change"] == pytest.approx(0.4)
    assert [mover["after"]["id"] for mover in why["fallen"]] == [2]
    watched = {line["reward"] for line in why["differences"] if line["is_watched"]}
    assert "small" in watched and "total" not in watched


def test_runs_are_compared_and_a_broken_one_is_said(client, runs):
    config = (runs / "a" / "config.yaml").read_text().replace("max_steps: 20", "max_steps: 30\n  lr: 0.1")
    write_run(runs / "b", config=config)
    compared = read(client, "/api/compare", run=["a", "b"])
    assert {line["name"]: line["values"] for line in compared["config"]}["train.max_steps"] == ["20", "30"]
    assert compared["results"]["eval/reward/total"][1]["last"] == 0.6 and compared["paired"][0]["steps"] == [12, 12]
    (runs / "b" / "metrics.jsonl").write_text('broken\n{"step": 1, "loss": 7.0}\n')
    pause()
    compared = read(client, "/api/compare", run=["a", "b"])
    assert compared["results"]["loss"][1]["last"] == 7.0
    assert compared["runs"][1]["problems"] == ["metrics.jsonl: 1 broken lines are left out"]
    read(client, "/api/compare", 400, run=["a"])


def test_a_small_copy_is_made_once_and_a_small_picture_keeps_its_pixels(client, runs, tmp_path):
    answer = client.get("/thumbnail", params={"run": "a", "step": 4, "file": "eval_0000.png", "width": 128})
    assert answer.headers["content-type"] == "image/webp" and "immutable" in answer.headers["cache-control"]
    copies = list((tmp_path / "thumbnails").rglob("*.webp"))
    assert len(copies) == 1 and np.array_equal(np.asarray(Image.open(copies[0]).convert("RGB")), picture(40))
    assert not any((runs / "a").rglob("*.webp"))
    large = np.random.default_rng(0).integers(0, 255, (600, 900, 3), dtype=np.uint8)
    save_samples(runs / "a", 16, [SampleRecord(large, "eval", "p", 7, 0)])
    pause()
    for width in (64, 512):
        answer = client.get("/thumbnail", params={"run": "a", "step": 16, "file": "eval_0000.png", "width": width})
        (tmp_path / "copy.webp").write_bytes(answer.content)
        assert Image.open(tmp_path / "copy.webp").size == (width, round(width * 2 / 3))
    (runs / "a" / "samples" / "step_000016" / "eval_0000.png").write_bytes(b"\x89PNG\r\n\x1a\n broken")
    assert "broken" in read(client, "/thumbnail", 404, run="a", step=16, file="eval_0000.png", width=256)["error"]
    Thumbnails(tmp_path / "thumbnails").trim(0)
    assert not list((tmp_path / "thumbnails").rglob("*.webp"))


def test_a_video_is_sent_as_it_is_and_has_a_still(client, runs):
    film = np.stack([picture(value) for value in (10, 90, 200)])
    save_samples(runs / "a", 16, [SampleRecord(film, "eval", "p", 7, 0)])
    pause()
    whole = client.get("/file", params={"run": "a", "step": 16, "file": "eval_0000.webp"})
    assert whole.content == (runs / "a" / "samples" / "step_000016" / "eval_0000.webp").read_bytes()
    part = client.get(
        "/file", params={"run": "a", "step": 16, "file": "eval_0000.webp"}, headers={"range": "bytes=0-3"}
    )
    assert part.status_code == 206 and part.content == b"RIFF"
    still = client.get("/thumbnail", params={"run": "a", "step": 16, "file": "eval_0000.webp", "width": 128})
    assert still.status_code == 200


def test_a_sound_is_sent_and_has_a_spectrum(client, runs, tmp_path):
    soundfile = pytest.importorskip("soundfile")
    folder = runs / "a" / "samples" / "step_000012"
    rate = 16_000
    seconds = np.arange(rate) / rate
    soundfile.write(folder / "tone.wav", 0.5 * np.sin(2 * np.pi * 2000 * seconds), rate)
    (folder / "noise.wav").write_bytes(b"RIFF no sound")
    rows = [{"kind": "eval", "sample_id": 40, "prompt": "a tone", "seed": 7, "file": "tone.wav"}]
    rows.append(rows[0] | {"sample_id": 41, "file": "noise.wav"})
    with (folder / "samples.jsonl").open("a") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    (runs / "a" / "samples" / "touched").mkdir()
    pause()
    place = {"run": "a", "step": 12, "file": "tone.wav"}
    sound = client.get("/file", params=place)
    assert sound.headers["content-type"] == "audio/wav" and sound.content == (folder / "tone.wav").read_bytes()
    (tmp_path / "spectrum.webp").write_bytes(client.get("/spectrum", params=place).content)
    shades = np.asarray(Image.open(tmp_path / "spectrum.webp").convert("L"), float)
    # 2 kHz of the 8 kHz that are shown, counted from below
    assert abs((len(shades) - 1 - shades.mean(axis=1).argmax()) - len(shades) * 2000 / 8000) <= 2
    assert "no sound" in read(client, "/spectrum", 404, **(place | {"file": "noise.wav"}))["error"]


def test_a_sound_that_a_run_has_drawn_can_be_heard(client, runs):
    tone = Waveform((9000 * np.sin(np.arange(4000) / 3)).astype(np.int16)[None], 8000)
    save_samples(runs / "a", 16, [SampleRecord(tone, "eval", "a tone", 7, 0)])
    pause()
    sample = read(client, "/api/sample", run="a", step=16, kind="eval", id=0)["sample"]
    sound = client.get("/file", params={"run": "a", "step": 16, "file": sample["sound"]})
    assert sound.headers["content-type"] == "audio/wav" and sound.content == tone.wav()
    spectrum = client.get("/thumbnail", params={"run": "a", "step": 16, "file": sample["file"], "width": 128})
    assert spectrum.headers["content-type"] == "image/webp"


def test_texts_of_a_language_model_and_broken_rows(client, runs):
    rows = [SampleRecord("an answer\n" * 9000, "eval", "question \x1b[31m", 7, 0, {"exact": 1.0}, 1.0)]
    folder = save_samples(runs / "a", 16, rows)
    with (folder / "samples.jsonl").open("a") as file:
        file.write(
            '{"kind": "eval", "prompt": 5, "seed": "x", "sample_id": [1], "total": "high", "file": 3}\nno json\n'
        )
    pause()
    step = read(client, "/api/step", run="a", step=16)
    assert "\x1b" not in json.dumps(step["evaluation"], ensure_ascii=False) and step["problem"] == "1 broken lines"
    sample = read(client, "/api/sample", run="a", step=16, kind="eval", id=0)["sample"]
    assert "characters left out" in sample["text"] and len(sample["text"]) < 21_000
    assert read(client, "/api/gallery", run="a")["problems"] == ["step 16: 1 broken lines"]


def test_the_log_is_read_from_its_end(client, runs):
    lines = [f"line {number} é\n" for number in range(20_000)]
    (runs / "a" / "log.txt").write_text("".join(lines))
    last = read(client, "/api/log", run="a")
    assert last["text"].endswith("line 19999 é\n") and last["first"] > 0
    text, first = last["text"], last["first"]
    with (runs / "a" / "log.txt").open("a") as file:
        file.write("a new line\n")
    new = read(client, "/api/log", run="a", after=last["last"])
    assert new["text"] == "a new line\n" and new["first"] == last["last"]
    assert read(client, "/api/log", run="a", after=first - 10**5)["first"] > first, "too much for one answer"
    while first:
        part = read(client, "/api/log", run="a", before=first)
        text, first = part["text"] + text, part["first"]
    assert text == "".join(lines)


def test_secrets_are_never_sent(client, runs):
    key = "sk-" + "a1" * 12
    (runs / "a" / "config.yaml").write_text(
        f"train: {{max_steps: 20}}\nreward: {{api_key: hunter2hunter2, note: {key}}}\n"
    )
    environment = {
        "run_id": "a",
        "command": ["t.py", "--judge.api_key", "hunter2hunter2"],
        "url": "http://me:pass@host/",
    }
    (runs / "a" / "environment.json").write_text(json.dumps(environment))
    (runs / "a" / "log.txt").write_text(f"using {key} and OPENAI_API_KEY=hunter2hunter2 at http://me:pass@host/x\n")
    for path in ("/api/files", "/api/log", "/api/overview"):
        text = client.get(path, params={"run": "a"}).text
        assert "hunter2" not in text and key not in text and "pass@" not in text and "hidden" in text, path
    (runs / "a" / "config.yaml").write_text(f"broken: [{key}\npassword: hunter2hunter2\n")
    text = client.get("/api/files", params={"run": "a"}).text
    assert "hunter2" not in text and key not in text
    write_run(runs / "b", config=f"train: {{max_steps: 20}}\nreward: {{api_key: another-secret-word, note: {key}}}\n")
    (runs / "a" / "config.yaml").write_text("train: {max_steps: 20}\nreward: {api_key: hunter2hunter2}\n")
    compared = client.get("/api/compare", params={"run": ["a", "b"]}).text
    assert "hunter2" not in compared and "another-secret" not in compared and key not in compared


def test_plain_texts_are_not_taken_for_secrets():
    plain = {"token_env": "HF_TOKEN", "max_new_tokens": 8, "pad_token": "<pad>", "path": "runs/a", "key": "prompt"}
    assert hide_secrets(plain) == plain
    assert hide_in_text("max_new_tokens=2048 tokens: 4096") == "max_new_tokens=2048 tokens: 4096"


def test_the_stream_says_what_is_new_and_where_it_is(client, runs, tmp_path):
    import asyncio

    from sfumato.studio.live import Live
    from sfumato.studio.runs import RunsFolder

    async def follow():
        live = Live(RunsFolder(runs))
        stream = await live.events("a", "")
        assert (await anext(stream)).startswith("retry:")
        first = await anext(stream)
        cursor = first.partition("id: ")[2].partition("\n")[0]
        assert "event: change" in first and ".12." in cursor
        write_steps(runs / "a", 13, 13)
        second = await asyncio.wait_for(anext(stream), 10)
        assert ".13." in second
        (runs / "a").rename(runs / "a.1")
        third = await asyncio.wait_for(anext(stream), 10)
        write_run(runs / "a", steps=2)
        fourth = await asyncio.wait_for(anext(stream), 10)
        assert third != second and ".2." in fourth
        await stream.aclose()
        assert live.num_streams == 0

    asyncio.run(follow())


def test_a_run_moved_aside_is_another_run(client, runs):
    assert read(client, "/api/overview", run="a")["step"] == 12
    (runs / "a").rename(runs / "a.1")
    write_run(runs / "a", steps=3)
    time.sleep(1.1)
    assert read(client, "/api/overview", run="a")["step"] == 3
    time.sleep(2.5)
    assert {line["run"] for line in read(client, "/api/runs")["runs"]} == {"a", "a.1"}
    assert read(client, "/api/overview", run="a.1")["step"] == 12


def test_a_run_that_has_just_begun_or_vanished(client, runs):
    (runs / "new").mkdir()
    (runs / "new" / "config.yaml").write_text("")
    (runs / "new" / "run.lock").write_text("")
    overview = read(client, "/api/overview", run="new")
    assert overview["step"] == 0 and overview["state"] == "running"
    for path in ("/api/gallery", "/api/metrics", "/api/files", "/api/log", "/api/timeline", "/api/checkpoints"):
        read(client, path, run="new")
    read(client, "/api/overview", 404, run="gone")
