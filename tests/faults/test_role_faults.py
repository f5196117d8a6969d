"""What may happen to a run with roles on Ray: it goes on with the same results, or ends soon, with a reason."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from sfumato.config.load import merge
from sfumato.tracking.atomic_folders import list_checkpoints, verify_checkpoint
from sfumato.tracking.json_lines import read_jsonl
from tests.role_runs import COLOCATED, ONE_STEP_OFF, SEPARATE, RoleRun, assert_same, role_config, undisturbed
from tests.tiny import tiny_pipeline_description, write_config, write_tiny_pipeline

HANG = """
import pathlib, time
def shade(sample):
    while pathlib.Path(__file__).with_name("hang").exists():
        time.sleep(0.1)
    return float(sample.image.mean()) / 255
"""


def start(config: dict[str, Any], tmp_path: Path, *overrides: str, **options: Any) -> RoleRun:
    return RoleRun(write_config(config, tmp_path / "run.yaml"), *overrides, **options)


def newest(run: RoleRun) -> tuple[int, Path]:
    """The last checkpoint, which is whole."""
    checkpoints = list_checkpoints(run.folder / "checkpoints")
    verify_checkpoint(checkpoints[max(checkpoints)])
    return max(checkpoints), checkpoints[max(checkpoints)]


@pytest.mark.slow
def test_a_sampler_and_a_scorer_are_killed(tmp_path: Path) -> None:
    config = role_config(tmp_path, SEPARATE, train={"max_steps": 8, "save_steps": 0})
    with start(config, tmp_path) as run:
        for step, role in ((1, "sampler"), (3, "scorer")):
            run.wait_for_step(step)
            assert json.loads((run.folder / "run.lock").read_text())["pid"] == run.driver.pid
            assert run.signal(role, signal.SIGKILL)
        assert run.wait() == 0, run.output
        said = run.output
        assert run.left() == {}
    assert not (run.folder / "run.lock").exists()
    assert re.search(r"role sampler, rank 0: process \d+ on .* has died", said)
    assert "role sampler: its processes are replaced (1 of 3)" in said
    assert_same(run.folder, undisturbed(config, tmp_path / "undisturbed"))


@pytest.mark.slow
def test_an_actor_is_killed_before_and_after_a_checkpoint(tmp_path: Path) -> None:
    config = role_config(tmp_path, COLOCATED, train={"max_steps": 12, "save_steps": 5})
    with start(config, tmp_path) as run:
        run.wait_for_step(2)
        assert run.signal("actor", signal.SIGKILL)
        while "no checkpoint in" not in run.output:
            assert run.driver.poll() is None, run.output
            time.sleep(0.1)
        run.wait_for_step(6)
        assert run.signal("actor", signal.SIGKILL)
        assert run.wait() == 0, run.output
        assert re.search("resumed from .*global_step_5 at step 5", run.output)
        assert run.left() == {}
    assert_same(run.folder, undisturbed(config, tmp_path / "undisturbed"))


@pytest.mark.slow
def test_a_process_that_is_stopped_is_found_in_time(tmp_path: Path) -> None:
    config = role_config(tmp_path, SEPARATE, runtime={"heartbeat_s": 3.0}, train={"max_steps": 24})
    with start(config, tmp_path) as run:
        for step, role in ((1, "sampler"), (4, "scorer"), (7, "actor")):
            run.wait_for_step(step)
            stopped, began = run.signal(role, signal.SIGSTOP), time.monotonic()
            assert stopped
            while f"process {stopped['pid']} on" not in run.output:
                assert time.monotonic() - began < 20, run.output
                time.sleep(0.05)
            assert f"role {role}, rank 0: process {stopped['pid']}" in run.output
            assert "(runtime.heartbeat_s); it had been given" in run.output
            print(f"{role} was found after {time.monotonic() - began:.1f} s")
        assert run.wait() == 0, run.output
        assert run.left() == {}, "stopped processes are ended, too"
    assert_same(run.folder, undisturbed(config, tmp_path / "undisturbed"))


@pytest.mark.slow
def test_a_call_that_hangs(tmp_path: Path) -> None:
    """Once its reason is gone the run can be resumed."""
    (tmp_path / "own.py").write_text(HANG)
    rewards = [{"type": "function", "path": f"{tmp_path}/own.py:shade", "timeout_s": 3600, "process": False}]
    patience = {"runtime": {"call_timeout_s": 60.0, "max_restarts": 0}}
    config = role_config(tmp_path, SEPARATE, **patience, reward={"rewards": rewards}, train={"max_steps": 8})
    with start(config, tmp_path) as run:
        run.wait_for_step(2)
        (tmp_path / "hang").touch()
        assert run.wait() == 8, run.output
        assert "has not ended after 6" in run.output and "(runtime.call_timeout_s)" in run.output
        stacks = run.folder / "stacks_scorer.txt"
        assert str(stacks) in run.output and "own.py" in stacks.read_text()
        assert run.left() == {}
    assert run.step <= newest(run)[0] <= run.step + 1
    (tmp_path / "hang").unlink()
    with start(config, tmp_path, "--train.load_checkpoint_path", "auto") as run:
        assert run.wait() == 0, run.output
    assert_same(run.folder, undisturbed(config, tmp_path / "undisturbed"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("where", [SEPARATE, ONE_STEP_OFF], ids=["separate", "one-step-off"])
def test_a_run_that_is_asked_to_stop_or_killed_can_be_resumed(where: dict[str, Any], tmp_path: Path) -> None:
    config = role_config(tmp_path, where, train={"max_steps": 30, "save_steps": 3, "load_checkpoint_path": "auto"})
    path, last = write_config(config, tmp_path / "run.yaml"), 0
    for role in ("driver", "actor", "sampler", "scorer"):
        with RoleRun(path) as run:
            run.wait_for_step(last + 2)
            if role == "driver":
                run.driver.terminate()
            else:
                assert run.signal(role, signal.SIGTERM)
            assert run.wait(60) == 143, run.output
            assert run.left() == {}
        last = run.step
        assert newest(run)[0] == last, f"SIGTERM of the {role} saves the last step"
    with RoleRun(path) as run:
        run.wait_for_step(last + 2)
        run.driver.kill()
        run.driver.wait()
        assert run.left() == {}
    with RoleRun(path) as run:
        assert run.wait() == 0, run.output
    assert_same(run.folder, undisturbed(config, tmp_path / "undisturbed"))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["raylet", "gcs_server"])
def test_ray_itself_is_killed(part: str, tmp_path: Path) -> None:
    config = role_config(tmp_path, SEPARATE, train={"max_steps": 12})
    with start(config, tmp_path) as run:
        run.wait_for_step(2)
        pids = [pid for pid, command in run.marked().items() if command.split()[0].endswith(f"/{part}")]
        assert len(pids) == 1, run.marked()
        os.kill(pids[0], signal.SIGKILL)
        assert run.wait() == 0, run.output
        assert f"ray: its {part} (process {pids[0]}) has died" in run.output
        assert run.left() == {}
    assert_same(run.folder, undisturbed(config, tmp_path / "undisturbed"))


@pytest.mark.slow
def test_a_role_is_not_replaced_for_ever(tmp_path: Path) -> None:
    config = role_config(tmp_path, SEPARATE, runtime={"max_restarts": 1}, train={"max_steps": 500, "save_steps": 1000})
    with start(config, tmp_path) as run:
        run.wait_for_step(2)
        assert run.signal("sampler", signal.SIGKILL)
        run.wait_for_step(run.step + 2)
        assert run.signal("sampler", signal.SIGKILL)
        assert run.wait() == 8, run.output
        assert run.left() == {}
    assert re.search(
        r"stopped: role sampler, rank 0: replaced 1 times already \(runtime.max_restarts\); it was: .* has died",
        run.output,
    )
    assert run.step <= newest(run)[0] <= run.step + 1 and run.step >= 4, "what is finished is saved"


@pytest.mark.slow
def test_an_actor_is_not_replaced_for_ever(tmp_path: Path) -> None:
    config = role_config(tmp_path, COLOCATED, runtime={"max_restarts": 0}, train={"max_steps": 500})
    with start(config, tmp_path) as run:
        run.wait_for_step(3)
        assert run.signal("actor", signal.SIGKILL)
        assert run.wait() == 8, run.output
        assert run.left() == {}
    assert re.search(r"stopped: role actor, rank 0: process \d+ on .* has died", run.output)
    assert newest(run)[0] >= run.step - 1


def large_config(tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    """Images of 1024x1024 pixels from 32x32 latents: 50 MB in an iteration."""
    described = tiny_pipeline_description()
    described["vae"] = {"channels": [8, 8, 8, 8, 8, 8], "latent_channels": 4, "norm_groups": 4}
    described["transformer"] |= {"sample_size": 32, "pos_embed_max_size": 32}
    pipeline = write_tiny_pipeline(tmp_path / "large", described=described)
    base = {
        "model": {"model_path": str(pipeline)},
        "rollout": {"height": 1024, "width": 1024, "async_strategy": "fully-async", "num_inference_steps": 4},
        "runtime": {"object_store_gb": 0.1},
        "train": {"max_steps": 5, "save_steps": 0},
    }
    return role_config(tmp_path, SEPARATE, **merge(base, overrides))


@pytest.mark.slow
def test_generation_waits_while_the_store_is_full(tmp_path: Path) -> None:
    """Four iterations ahead would be 200 MB in a store of 100."""
    with start(large_config(tmp_path), tmp_path) as run:
        assert run.wait(400) == 0, run.output
    assert [entry["step"] for entry in read_jsonl(run.folder / "metrics.jsonl")] == list(range(6))
    assert max(entry.get("staleness/max", 0) for entry in read_jsonl(run.folder / "metrics.jsonl")) <= 2


@pytest.mark.slow
def test_samples_that_will_never_fit(tmp_path: Path) -> None:
    with start(large_config(tmp_path, rollout={"num_prompts": 8}, train={"max_steps": 3}), tmp_path) as run:
        assert run.wait(400) == 2, run.output
    assert "do not fit into Ray's object store" in run.output and "raise runtime.object_store_gb" in run.output


@pytest.mark.slow
def test_a_bit_of_the_weights_is_wrong(tmp_path: Path) -> None:
    config = role_config(tmp_path, SEPARATE, train={"max_steps": 8, "save_steps": 0})
    with start(config, tmp_path, script="tests/faults/faulty_sampler_task.py") as run:
        assert run.wait() == 7, run.output
        assert run.left() == {}
    assert "weights of version 3 in the sampler" in run.output
    assert newest(run)[0] == 3 and run.step in (2, 3), "what is finished is saved"
