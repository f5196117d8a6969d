"""SIGKILL at random points of whole runs of every task, in one process and on two ranks.

Each resumes, loses little, and ends as the undisturbed run, bit for bit.
"""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import pytest
import yaml

from sfumato.config.load import merge
from sfumato.launcher import GRACE_S
from sfumato.parallel.mesh import close_mesh
from sfumato.rollout.text import policy as text_policy
from sfumato.tracking.atomic_folders import list_checkpoints, newest_intact
from sfumato.tracking.json_lines import read_jsonl
from tests.faults.test_resume import tensors_in, values_in
from tests.tiny import (
    ROOT,
    run_task_here,
    tiny_dit_config,
    tiny_dit_dpo_config,
    tiny_pipeline_description,
    tiny_rl_config,
    tiny_text_config,
    tiny_text_rl_config,
    weights_in,
)

KILLS = {1: 20, 2: 20}
"""Of each case, by number of ranks."""

MAIN = "import sys; from tests.faults.test_kill_at_random import kill_again_and_again as main; main(*sys.argv[1:])"


def tiny_autoencoder_config(tmp_path: Path, **overrides: Any) -> dict[str, Any]:
    """A run of ``tasks/train_autoencoder.py`` on a pipeline that is made from scratch."""
    description = tmp_path / "description.yaml"
    description.write_text(yaml.safe_dump(tiny_pipeline_description()), encoding="utf-8")
    config = tiny_dit_config(tmp_path, **overrides)
    del config["sample"]
    return config | {"model": {"config_path": str(description), "max_sequence_length": 7}}


EMA = {"ema_decay": 0.9}
TEXT_RL = {
    "train": EMA,
    "eval": {"every_steps": 10},
    "rollout": {
        "n": 2,
        "max_new_tokens": 24,
        "kind": {"type": "environment", "path": "tests.text_rewards:Echo", "max_turns": 3},
    },
    "reward": {"rewards": [{"type": "environment"}]},
}
"""Several turns, and a moving average."""
MORE_GROUPS = {"rollout": {"max_extra_groups": 8}}
UNDER_WAY = {
    "rollout": {"over_sampling_batch_size": 7, "partial_rollout": True, "max_new_tokens": 16},
    "eval": {"every_steps": 10},
}
CASES: dict[str, tuple[str, Any, int, int, dict[str, Any]]] = {
    "train_dit": ("train_dit", tiny_dit_config, 1, 120, {"train": EMA}),
    "train_dit, saved in the background": (
        "train_dit",
        tiny_dit_config,
        1,
        120,
        {"train": {**EMA, "save_async": True}},
    ),
    "train_dit_dpo": ("train_dit_dpo", tiny_dit_dpo_config, 1, 60, {"eval": {"every_steps": 20}}),
    "train_autoencoder": ("train_autoencoder", tiny_autoencoder_config, 1, 120, {}),
    "train_text": ("train_text", tiny_text_config, 1, 60, {"train": EMA, "eval": {"every_steps": 20}}),
    "train_text_dpo": (
        "train_text_dpo",
        tiny_text_config,
        1,
        60,
        {"data": {"data_type": "preference"}, "eval": {"every_steps": 20}},
    ),
    "train_text_kto": (
        "train_text_kto",
        tiny_text_config,
        1,
        60,
        {"data": {"data_type": "unpaired"}, "eval": {"every_steps": 20}},
    ),
    "train_text_reward": (
        "train_text_reward",
        tiny_text_config,
        1,
        60,
        {
            "data": {"data_type": "preference"},
            "reward": {"objective": "bradley_terry"},
            "eval": {"every_steps": 20},
        },
    ),
    "rl_diffusion": ("rl_diffusion", tiny_rl_config, 1, 30, {"train": EMA, "eval": {"every_steps": 10}}),
    "rl_text": ("rl_text", tiny_text_rl_config, 1, 30, merge(TEXT_RL, MORE_GROUPS)),
    "rl_text with a critic": (
        "rl_text",
        tiny_text_rl_config,
        1,
        30,
        merge(TEXT_RL, {"algorithm": {"recipe": "ppo"}, "train": {"global_batch_size": 4}}),
    ),
    "rl_text on two ranks": ("rl_text", tiny_text_rl_config, 2, 30, merge(TEXT_RL, MORE_GROUPS)),
    "rl_text, partial rollouts": ("rl_text", tiny_text_rl_config, 1, 30, UNDER_WAY),
    "rl_text, partial rollouts on two ranks": ("rl_text", tiny_text_rl_config, 2, 30, UNDER_WAY),
    "train_text on two ranks": ("train_text", tiny_text_config, 2, 60, {"train": EMA, "eval": {"every_steps": 20}}),
}
"""Task, configuration, ranks, steps and what else is set."""
EVERY = 3


def start(task: str, config: dict[str, Any], log: Path, num_ranks: int) -> list[int]:
    """The run in copies of this process, which has everything imported. Returns the process ids of its ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    return [_start_rank(task, config, log, rank, num_ranks, port) for rank in range(num_ranks)]


def _start_rank(task: str, config: dict[str, Any], log: Path, rank: int, num_ranks: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    if num_ranks > 1:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "MASTER_PORT": port}
        os.environ.update({"MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in place.items()}})
    code = 1
    try:
        run_task_here(task, config)
        close_mesh()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def kill_some(ranks: list[int], some: list[int]) -> int | None:
    """Kills some of the ranks; the others end by themselves, or as the launcher ends them.

    Returns how many were ended so, None when the run had ended before.
    """
    if all(os.waitid(os.P_PID, rank, os.WEXITED | os.WNOHANG | os.WNOWAIT) for rank in ranks):
        assert not any(os.waitpid(rank, 0)[1] for rank in ranks), "the run failed by itself"
        return None
    for rank in some:
        os.kill(rank, signal.SIGKILL)
    deadline = time.monotonic() + GRACE_S
    running = set(ranks)
    while running:
        running -= {rank for rank in running if os.waitpid(rank, os.WNOHANG)[0]}
        if time.monotonic() > deadline:
            for rank in running:
                os.kill(rank, signal.SIGKILL)
                os.waitpid(rank, 0)
            return len(running)
        time.sleep(0.005)
    return 0


def end_answers_early(patch: pytest.MonkeyPatch) -> None:
    """Answers of a model with random weights end at many lengths, since many tokens end them."""
    patch.setattr(text_policy, "stop_tokens", lambda template: {*range(60), *template.answer_end.stop_token_ids})


def kill_again_and_again(case: str, config_path: str, undisturbed: str) -> None:
    """Starts runs and kills them until it has been done often enough; prints what happened as JSON."""
    end_answers_early(pytest.MonkeyPatch())
    task, _, num_ranks, steps, _ = CASES[case]
    config = json.loads(Path(config_path).read_text(encoding="utf-8"))
    output_dir = Path(config["train"]["output_dir"])
    root, log = output_dir / "checkpoints", output_dir.with_suffix(".log")
    rng, kills, finished, in_save, newest, lost, waited = random.Random(0), 0, 0, 0, 0, [], 0
    short = {"train": {"max_steps": 1, "output_dir": f"{output_dir}.short"}}
    run_task_here(task, merge(config, short))  # imports what the copies of this process then have
    began = time.monotonic()
    whole = merge(config, {"train": {"output_dir": undisturbed}})
    assert all(os.waitpid(rank, 0)[1] == 0 for rank in start(task, whole, log, num_ranks)), log.read_text()
    whole_s = time.monotonic() - began
    while kills < KILLS[num_ranks]:
        ranks = start(task, config, log, num_ranks)
        time.sleep(rng.uniform(0, whole_s))
        ended = kill_some(ranks, ranks if kills % 2 else [rng.choice(ranks)])
        if ended is None:
            assert_same(output_dir, Path(undisturbed), steps)
            shutil.rmtree(output_dir)
            finished, newest = finished + 1, 0
            continue
        kills, waited = kills + 1, waited + ended
        if not root.is_dir():
            continue
        in_save += bool(list(root.glob("*.tmp")))
        actual = newest_intact(list_checkpoints(root), complain)
        step = 0 if actual is None else actual[0]
        assert step >= newest, f"from step {newest} back to {step}"
        newest = step
        lines = read_jsonl(output_dir / "metrics.jsonl") if (output_dir / "metrics.jsonl").exists() else []
        lost.append(max((line["step"] for line in lines), default=step) - step)
    assert all(os.waitpid(rank, 0)[1] == 0 for rank in start(task, config, log, num_ranks)), log.read_text()
    assert_same(output_dir, Path(undisturbed), steps)
    result = {"kills": kills, "finished": finished + 1, "in_save": in_save, "lost": lost, "waited": waited}
    print(json.dumps({**result, "log": log.read_text()}))


def complain(text: str) -> None:
    raise AssertionError(f"a kill has left a damaged checkpoint: {text}")


def assert_same(left: Path, right: Path, steps: int) -> None:
    """Metrics, exported weights and the last checkpoint are equal byte by byte."""
    assert (left / "metrics.jsonl").read_bytes() == (right / "metrics.jsonl").read_bytes()
    assert weights_in(left / "hf_ckpt") == weights_in(right / "hf_ckpt")
    last = [list_checkpoints(path / "checkpoints")[steps] for path in (left, right)]
    assert tensors_in(last[0]) == tensors_in(last[1])
    assert values_in(last[0]) == values_in(last[1])
    assert not list((left / "checkpoints").glob("*.tmp"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("case", CASES)
def test_a_run_that_is_killed_again_and_again_ends_as_the_undisturbed_one(tmp_path, case):
    _, make, num_ranks, steps, settings = CASES[case]
    settings = merge(settings, {"train": {"max_steps": steps, "save_steps": EVERY, "load_checkpoint_path": "auto"}})
    config = make(tmp_path, **settings)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MAIN, case, str(path), str(tmp_path / "undisturbed")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    log = result.pop("log")
    print(case, result)
    assert result["waited"] <= KILLS[num_ranks] // 4, "ranks whose peer was killed do not notice"
    assert log.count("resumed from") >= KILLS[num_ranks] // 3, "the kills came before the first save"
    assert max(result["lost"]) <= (2 * EVERY if config["train"].get("save_async") else EVERY)
