"""``sfumato playground``: one model in memory answers by the weights of each checkpoint, and of the run's start."""

import asyncio
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio.from_thread
import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from sfumato.cli import main
from sfumato.studio.app import Studio, build_app
from sfumato.studio.control import Control
from sfumato.studio.model_process import PlaygroundProcess
from sfumato.studio.thumbnails import Thumbnails
from tests.studio_runs import HOST, TOKEN
from tests.tiny import run_task_here, tiny_rl_config, tiny_text_config


@pytest.fixture(autouse=True)
def _folder_of_its_own(tmp_path, monkeypatch):
    """Pictures go into the calling folder where no other is named."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def pictures_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rl")
    settings = {"train": {"max_steps": 2, "lr": 0.05, "save_steps": 1, "ema_decay": 0.5}, "eval": {"every_steps": 2}}
    return run_task_here("rl_diffusion", tiny_rl_config(folder, **settings))


@pytest.fixture(scope="module")
def text_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    return run_task_here("train_text", tiny_text_config(folder, train={"max_steps": 2, "save_steps": 1, "lr": 0.1}))


def ask(monkeypatch, capsys, run, *questions, code=0, options=()):
    lines = "".join(f"{json.dumps(question) if isinstance(question, dict) else question}\n" for question in questions)
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert main(["playground", str(run), "--json", *map(str, options)]) == code
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def sampled(folder):
    rows = [json.loads(line) for line in (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    return {row["model"]: row.get("text") or np.asarray(Image.open(folder / row["file"])) for row in rows}


@pytest.mark.exact
def test_pictures_are_those_of_sfumato_sample_whatever_was_asked_before(pictures_run, tmp_path, monkeypatch, capsys):
    settings = ("--prompt", 'write "AB"', "--seed", "7", "--steps", "2", "--guidance-scale", "2")
    assert main(["sample", str(pictures_run / "checkpoints"), *settings, "--out", str(tmp_path / "sampled")]) == 0
    expected = sampled(tmp_path / "sampled")
    capsys.readouterr()
    question = {"prompt": 'write "AB"', "seed": 7, "steps": 2, "guidance": 2}
    lines = ask(
        monkeypatch,
        capsys,
        pictures_run,
        question | {"id": 1, "checkpoint": "all"},
        question | {"id": 2, "checkpoint": 1, "with_base": True},
        question | {"id": 3},
        options=("--out", tmp_path),
    )
    assert lines[0]["checkpoints"] == [1, 2] and lines[0]["memory"]["process_mib"] > 10
    answers = [line for line in lines[1:] if "done" not in line]
    labels = [(answer["id"], answer["label"], answer["checkpoint"]) for answer in answers]
    assert labels == [
        *((1, "base", None), (1, "step 1", 1), (1, "step 2", 2)),
        *((2, "base", None), (2, "step 1", 1)),
        (3, "step 2", 2),
    ]
    for answer in answers:
        np.testing.assert_array_equal(np.asarray(Image.open(answer["file"])), expected[answer["label"]])
    assert (expected["base"] != expected["step 2"]).any()


@pytest.mark.exact
def test_answers_are_those_of_sfumato_sample_and_a_conversation_goes_on(text_run, tmp_path, monkeypatch, capsys):
    settings = ("--prompt", "3 + 4 =", "--seed", "5", "--temperature", "1", "--max-new-tokens", "6")
    assert main(["sample", str(text_run / "checkpoints"), *settings, "--out", str(tmp_path / "sampled")]) == 0
    expected = sampled(tmp_path / "sampled")
    capsys.readouterr()
    question = {"prompt": "3 + 4 =", "seed": 5, "temperature": 1, "max_new_tokens": 6}
    lines = ask(
        monkeypatch,
        capsys,
        text_run,
        question | {"id": 1, "checkpoint": "all"},
        question | {"id": 2, "checkpoint": "base"},
    )
    answers = [line for line in lines[1:] if "done" not in line]
    assert [answer["label"] for answer in answers] == ["base", "step 1", "step 2", "base"]
    assert all(answer["text"] == expected[answer["label"]] for answer in answers)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("not json", "one line of JSON"),
        ({"id": 9, "prompt": "a", "colour": 1}, "no other names than"),
        ({"prompt": " "}, "1 to 20,000 characters"),
        ({"prompt": "a" * 20_001}, "1 to 20,000 characters"),
        ({"prompt": "a", "messages": []}, "either prompt"),
        ({"messages": [{"role": "user", "content": "a"}]}, "no conversation"),
        ({"messages": [{"role": "root", "content": "a"}]}, "a message must be"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "end with a message of the user"),
        ({"prompt": "a", "checkpoint": 7}, "no checkpoint of step 7; there are those of 1, 2"),
        ({"prompt": "a", "checkpoint": 0}, "no checkpoint of step 0"),
        ({"prompt": "a", "checkpoint": "../.."}, "checkpoint must be"),
        ({"prompt": "a", "steps": 10**9}, "steps must be from 1 to 1000"),
        ({"prompt": "a", "steps": 1.5}, "steps must be a whole number"),
        ({"prompt": "a", "seed": -1}, "seed must be from 0"),
        ({"prompt": "a", "guidance": True}, "guidance must be a number"),
        ({"prompt": "a", "temperature": 1}, "temperature has no effect on models that draw pictures"),
    ],
)
def test_what_is_refused_ends_nothing(loaded, question, message):
    lines = loaded(question, {"id": 2, "prompt": "b", "steps": 1})
    assert message in lines[0]["error"]
    assert lines[0]["id"] == lines[1]["id"] == (question.get("id") if isinstance(question, dict) else None)
    assert sorted(lines[1]) == ["done", "id", "memory"]
    assert lines[2]["label"] == "step 2" and lines[3]["done"]


@pytest.fixture(scope="module")
def loaded(pictures_run, tmp_path_factory):
    """Asks a process that has loaded the run once."""
    folder = tmp_path_factory.mktemp("answers")
    process = start(pictures_run, folder)
    assert json.loads(process.stdout.readline())["has_base"]

    def ask_it(*questions):
        lines = []
        for question in questions:
            print(json.dumps(question) if isinstance(question, dict) else question, file=process.stdin, flush=True)
            lines.append(json.loads(process.stdout.readline()))
            while "done" not in lines[-1]:
                lines.append(json.loads(process.stdout.readline()))
        return lines

    yield ask_it
    process.stdin.close()
    assert process.wait(30) == 0


def start(run, folder):
    command = [sys.executable, "-m", "sfumato.cli", "playground", str(run), "--json", "--out", str(folder)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_a_checkpoint_that_is_damaged_or_removed_meanwhile(pictures_run, tmp_path, monkeypatch, capsys):
    run = shutil.copytree(pictures_run, tmp_path / "run")
    next((run / "checkpoints" / "global_step_1").rglob("*.distcp")).write_bytes(b"damaged")
    lines = ask(monkeypatch, capsys, run, {"prompt": "a", "checkpoint": 1}, {"prompt": "a", "steps": 1})
    assert "global_step_1" in lines[1]["error"] and lines[3]["label"] == "step 2"
    shutil.rmtree(run / "checkpoints")
    shutil.rmtree(run / "hf_ckpt")
    lines = ask(monkeypatch, capsys, run, code=3)
    assert "saved nothing" in lines[0]["error"]


def test_a_line_that_is_no_text_is_an_error_and_the_others_are_answered(text_run, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n3 + 4 =\n"), encoding="utf-8"))
    assert main(["playground", str(text_run), "--max-new-tokens", "4"]) == 0
    output = capsys.readouterr()
    assert "not text in UTF-8" in output.err and output.out.startswith("base: ")


def test_lines_of_a_person(text_run, pictures_run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("3 + 4 =\n\n"))
    assert main(["playground", str(text_run), "--max-new-tokens", "4"]) == 0
    output = capsys.readouterr()
    assert output.out.startswith("base: ") and "\nstep 2: " in output.out and "MiB of memory" in output.err
    monkeypatch.setattr(sys, "stdin", io.StringIO("a\n"))
    assert (
        main(
            [
                "playground",
                str(pictures_run / "checkpoints" / "global_step_1"),
                "--no-base",
                "--out",
                str(tmp_path / "o"),
            ]
        )
        == 0
    )
    assert capsys.readouterr().out.split() == ["step", "1:", str(tmp_path / "o" / "0001_step_1.png")]
    assert main(["playground", str(pictures_run / "checkpoints")]) == 2
    assert "give the run folder, or one of them" in capsys.readouterr().err
    assert main(["playground", str(pictures_run), "--temperature", "1"]) == 2


def children_of(parent):
    results = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            results.append(int(status.parent.name))
    return results


def is_alive(process):
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_a_page_asks_and_the_model_stays_for_the_next_question(pictures_run, tmp_path):
    pictures_run = shutil.copytree(pictures_run, tmp_path / "runs" / "run")
    studio = Studio(pictures_run.parent, Thumbnails(tmp_path / "thumbnails"))
    control = Control(studio.runs, True)
    client = TestClient(build_app(studio, TOKEN, more=control.routes()), base_url=HOST)
    with anyio.from_thread.start_blocking_portal() as portal:
        client.portal = portal
        client.get("/", params={"token": TOKEN})
        question = {"run": pictures_run.name, "prompt": "a", "steps": 1, "checkpoint": "all"}
        before = set(children_of(os.getpid()))
        result = client.post("/api/playground", json=question).json()
        (model,) = set(children_of(os.getpid())) - before
        assert [answer["label"] for answer in result["answers"]] == ["base", "step 1", "step 2"]
        assert result["memory"]["process_mib"] > 10 and "file" not in json.dumps(result)
        for answer in result["answers"]:
            content = client.get(answer["picture"]).content
            assert np.asarray(Image.open(io.BytesIO(content))).shape == (16, 16, 3)
        refused = client.post("/api/playground", json=question | {"steps": 0})
        assert refused.status_code == 400 and "steps must be from 1 to 1000" in refused.text
        result = client.post("/api/playground", json=question | {"checkpoint": 77}).json()
        assert "no checkpoint of step 77" in result["answers"][0]["error"]
        assert model in children_of(os.getpid())
        assert client.post("/api/playground/end", json={}).status_code == 200
        assert not is_alive(model)
        client.post("/api/playground", json=question)
        (model,) = set(children_of(os.getpid())) - before
        # moved aside, and another run begun in its folder
        environment = pictures_run / "environment.json"
        environment.write_text(json.dumps(json.loads(environment.read_text()) | {"run_id": "another"}))
        client.post("/api/playground", json=question)
        assert not is_alive(model)
        (model,) = set(children_of(os.getpid())) - before
        portal.call(control.close)
    assert not is_alive(model) and not control.outputs.exists()


def test_memory_is_freed_while_an_answer_is_computed(tmp_path, monkeypatch):
    run = tmp_path / "runs" / "run"
    run.mkdir(parents=True)
    (run / "environment.json").write_text('{"run_id": "one"}')
    (run / "config.yaml").write_text("")

    async def start(reader, outputs, options):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return PlaygroundProcess(reader, await asyncio.create_subprocess_exec("sleep", "600", **pipes), {})

    monkeypatch.setattr(PlaygroundProcess, "start", start)
    studio = Studio(run.parent, Thumbnails(tmp_path / "thumbnails"))
    control = Control(studio.runs, True)
    client = TestClient(build_app(studio, TOKEN, more=control.routes()), base_url=HOST)
    with anyio.from_thread.start_blocking_portal() as portal, ThreadPoolExecutor(1) as threads:
        client.portal = portal
        client.get("/", params={"token": TOKEN})
        answer = threads.submit(client.post, "/api/playground", json={"run": "run", "prompt": "a"})
        while control._playground is None and not answer.done():
            time.sleep(0.01)
        assert client.post("/api/playground/end", json={}).status_code == 200
        assert answer.result(10).status_code == 500 and "has ended" in answer.result().text
        portal.call(control.close)


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
def test_the_model_ends_with_a_studio_that_is_killed(tmp_path):
    program = (
        "import asyncio, sys\n"
        "from sfumato.studio.model_process import end_with_parent\n"
        "async def main():\n"
        "    process = await asyncio.create_subprocess_exec('sleep', '600', preexec_fn=end_with_parent)\n"
        "    print(process.pid, flush=True)\n"
        "    await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    studio = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child = int(studio.stdout.readline())
    assert is_alive(child)
    studio.send_signal(signal.SIGKILL)
    studio.wait(10)
    deadline = time.monotonic() + 10
    while is_alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(child)
