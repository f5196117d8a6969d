"""SIGKILL at random points of whole runs: each resumes, loses little, and ends as the undisturbed run, bit for bit."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from sfumato.checkpoint.envelope import list_checkpoints, newest_intact
from sfumato.config.load import merge
from sfumato.tracking.trackers import read_jsonl
from tests.faults.test_resume import tensors_in, values_in
from tests.tiny import ROOT, run_task_here, tiny_dit_config, weights_in

KILLS = 25
"""For each way of saving."""
STEPS, EVERY = 120, 3

MAIN = "import sys; from tests.faults.test_kill_at_random import kill_again_and_again as main; main(*sys.argv[1:])"


def start(config: dict[str, Any], log: Path) -> int:
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
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def kill_again_and_again(config_path: str, undisturbed: str) -> None:
    """Starts runs and kills them until it has been done often enough; prints what happened as JSON."""
    config = json.loads(Path(config_path).read_text(encoding="utf-8"))
    output_dir = Path(config["train"]["output_dir"])
    root, log = output_dir / "checkpoints", output_dir.with_suffix(".log")
    rng, kills, finished, in_save, newest, lost = random.Random(0), 0, 0, 0, 0, []
    for number in range(2):  # the first imports what the copies of this process then have
        began = time.monotonic()
        run_task_here("train_dit", merge(config, {"train": {"max_steps": 1, "output_dir": f"{output_dir}.{number}"}}))
    usual = time.monotonic() - began  # what it takes to start
    while kills < KILLS:
        child = start(config, log)
        time.sleep(rng.uniform(0, 4 * usual))
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            assert status == 0, log.read_text(encoding="utf-8")
            assert_same(output_dir, Path(undisturbed))
            shutil.rmtree(output_dir)
            finished, newest = finished + 1, 0
            continue
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        kills += 1
        if not root.is_dir():
            continue
        in_save += bool(list(root.glob("*.tmp")))
        found = newest_intact(list_checkpoints(root), complain)
        step = 0 if found is None else found[0]
        assert step >= newest, f"from step {newest} back to {step}"
        newest = step
        lines = read_jsonl(output_dir / "metrics.jsonl") if (output_dir / "metrics.jsonl").exists() else []
        lost.append(max((line["step"] for line in lines), default=step) - step)
    assert os.waitpid(start(config, log), 0)[1] == 0, log.read_text(encoding="utf-8")
    assert_same(output_dir, Path(undisturbed))
    print(json.dumps({"finished": finished + 1, "in_save": in_save, "lost": lost, "log": log.read_text()}))


def complain(text: str) -> None:
    raise AssertionError(f"a kill has left a damaged checkpoint: {text}")


def assert_same(left: Path, right: Path) -> None:
    """Metrics, exported weights and the last checkpoint are equal byte by byte."""
    assert (left / "metrics.jsonl").read_bytes() == (right / "metrics.jsonl").read_bytes()
    assert weights_in(left / "hf_ckpt") == weights_in(right / "hf_ckpt")
    last = [list_checkpoints(each / "checkpoints")[STEPS] for each in (left, right)]
    assert tensors_in(last[0]) == tensors_in(last[1])
    assert values_in(last[0]) == values_in(last[1])
    assert not list((left / "checkpoints").glob("*.tmp"))


@pytest.mark.slow
@pytest.mark.parametrize("save_async", [False, True], ids=["waited for", "in the background"])
def test_a_run_that_is_killed_again_and_again_ends_as_the_undisturbed_one(tmp_path, save_async):
    train = {"max_steps": STEPS, "save_steps": EVERY, "save_async": save_async, "ema_decay": 0.9}
    config = tiny_dit_config(tmp_path, train={**train, "load_checkpoint_path": "auto"})
    undisturbed = run_task_here("train_dit", merge(config, {"train": {"output_dir": str(tmp_path / "undisturbed")}}))
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MAIN, str(path), str(undisturbed)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    log = result.pop("log")
    print(result)
    assert result["in_save"] >= 3, "the kills missed the saves, so this test shows little"
    assert log.count("resumed from") >= KILLS // 3, "the kills came before the first save"
    assert max(result["lost"]) <= (2 * EVERY if save_async else EVERY)
