"""Two runs in one folder: one is at work, the other is refused by name; nothing of the first is lost."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from sfumato.config.load import merge
from sfumato.errors import FolderError
from sfumato.tracking.atomic_folders import list_checkpoints, read_values
from sfumato.tracking.folder import read_environment
from sfumato.tracking.json_lines import read_jsonl
from tests.faults.test_resume import tensors_in, values_in
from tests.tiny import ROOT, run_task_here, tiny_dit_config, weights_in, write_config

ROUNDS, STEPS, EVERY = 20, 40, 2

ENDED = os.WEXITED | os.WNOHANG | os.WNOWAIT

MAIN = "import sys; from tests.faults.test_two_runs import meet_again_and_again as main; main(*sys.argv[1:])"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def assert_same(left: Path, right: Path) -> None:
    """Metrics, exported weights and the last checkpoint are equal, and all is of one run."""
    assert (left / "metrics.jsonl").read_bytes() == (right / "metrics.jsonl").read_bytes()
    assert weights_in(left / "hf_ckpt") == weights_in(right / "hf_ckpt")
    last = [list_checkpoints(path / "checkpoints") for path in (left, right)]
    newest = [checkpoints[max(checkpoints)] for checkpoints in last]
    assert tensors_in(newest[0]) == tensors_in(newest[1]) and values_in(newest[0]) == values_in(newest[1])
    environment = read_environment(left)
    assert environment["finished"]
    assert {read_values(value)["run_id"] for value in last[0].values()} == {environment["run_id"]}
    assert not list((left / "checkpoints").glob("*.tmp"))
    assert not (left / "run.lock").exists() and not list(left.parent.glob(f"{left.name}.*[0-9]"))


@pytest.mark.slow
def test_of_two_runs_that_start_at_once_one_is_refused_by_name(tmp_path: Path) -> None:
    config = tiny_dit_config(tmp_path, train={"max_steps": 300, "save_steps": 100, "max_checkpoints": 9})
    path = write_config(config, tmp_path / "run.yaml")
    command = [sys.executable, "tasks/train_dit.py", str(path)]
    both = [
        subprocess.Popen(
            command, cwd=ROOT, env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        for _ in range(2)
    ]
    errors = [process.communicate(timeout=240)[1] for process in both]
    codes = [process.returncode for process in both]
    assert sorted(codes) == [0, 2], errors
    winner, loser = (both[codes.index(code)] for code in (0, 2))
    lines = [line for line in errors[codes.index(2)].splitlines() if line.startswith("error")]
    assert len(lines) == 1 and errors[codes.index(2)].strip() == lines[0]
    refused = f"error: {tmp_path}/run is in use by another run (process {winner.pid} on "
    assert lines[0].startswith(refused) and "since 20" in lines[0] and "train.output_dir" in lines[0]
    assert str(loser.pid) not in lines[0]
    assert [line["step"] for line in read_jsonl(tmp_path / "run/metrics.jsonl")] == list(range(1, 301))
    ids = {read_values(checkpoint)["run_id"] for checkpoint in list_checkpoints(tmp_path / "run/checkpoints").values()}
    assert ids == {read_environment(tmp_path / "run")["run_id"]}
    assert sorted(list_checkpoints(tmp_path / "run/checkpoints")) == [100, 200, 300]
    assert not (tmp_path / "run.1").exists() and not (tmp_path / "run/run.lock").exists()


def fork(config: dict[str, Any], log: Path) -> int:
    """The run in a copy of this process, which has everything imported. Returns the process id."""
    child = os.fork()
    if child:
        return child
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    code = 1
    try:
        run_task_here("train_dit", config)
        code = 0
    except FolderError as error:
        print(f"error: {error}", flush=True)
        code = 2
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def kill_holder(lock: Path, children: list[int], delay_s: float) -> None:
    """Kills the one that is at work, some time after it began, if it has not ended by then."""
    while not lock.exists() and any(os.waitid(os.P_PID, child, ENDED) is None for child in children):
        time.sleep(0.01)
    time.sleep(delay_s)
    with contextlib.suppress(FileNotFoundError):
        holder = json.loads(lock.read_text(encoding="utf-8"))["pid"]
        assert holder in children
        os.kill(holder, signal.SIGKILL)


def meet_again_and_again(config_path: str, undisturbed: str) -> None:
    """Starts pairs of runs with random delays, kills every second first one; prints what happened as JSON."""
    config = json.loads(Path(config_path).read_text(encoding="utf-8"))
    folder, rng = Path(config["train"]["output_dir"]).parent, random.Random(0)
    for number in range(2):  # the first imports what the copies of this process then have
        began = time.monotonic()
        run_task_here("train_dit", merge(config, {"train": {"output_dir": str(folder / f"warm{number}")}}))
    usual = time.monotonic() - began
    refused = killed = taken_over = 0
    for number in range(ROUNDS):
        output_dir, log = folder / f"round{number}", folder / f"round{number}.log"
        mine = merge(config, {"train": {"output_dir": str(output_dir), "load_checkpoint_path": "auto"}})
        first = fork(mine, log)
        time.sleep(rng.choice([0.0, rng.uniform(0, usual)]))
        second = fork(mine, log)
        children = [first, second]
        if number % 2:
            kill_holder(output_dir / "run.lock", children, rng.uniform(0, usual / 2))
        ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        said = log.read_text(encoding="utf-8")
        assert set(ends) <= {0, 2, -signal.SIGKILL}, (number, ends, said)
        assert said.count("is in use by another run (process ") == ends.count(2), (number, ends, said)
        refused, killed = refused + ends.count(2), killed + ends.count(-signal.SIGKILL)
        last = os.waitstatus_to_exitcode(os.waitpid(fork(mine, log), 0)[1])
        assert last == 0, log.read_text(encoding="utf-8")
        taken_over += "taken over" in (output_dir / "log.txt").read_text(encoding="utf-8")
        assert_same(output_dir, Path(undisturbed))
    print(json.dumps({"refused": refused, "killed": killed, "taken_over": taken_over, "seconds": usual}))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_two_runs_meet_again_and_again_in_one_folder(tmp_path: Path) -> None:
    config = tiny_dit_config(tmp_path, train={"max_steps": STEPS, "save_steps": EVERY, "ema_decay": 0.9})
    undisturbed = run_task_here("train_dit", merge(config, {"train": {"output_dir": str(tmp_path / "undisturbed")}}))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    command = [sys.executable, "-c", MAIN, str(path), str(undisturbed)]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    print(result)
    assert result["refused"] >= ROUNDS // 3, "the runs hardly met"
    assert result["killed"] >= ROUNDS // 4 and result["taken_over"] >= 2, "hardly a run was killed at work"
