"""Runs that are killed, stopped, damaged or poisoned: k steps + resume + (n - k) steps equal n steps bit for bit.

The undisturbed run and the resumed ones run in this process, those that are killed in a process of their own.
"""

import math
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from sfumato.checkpoint.parts import StoredCheckpoint
from sfumato.config.load import merge
from sfumato.errors import CheckpointError, NonFiniteError
from sfumato.tracking.atomic_folders import list_checkpoints, verify_checkpoint
from tests.tiny import (
    DEVICE,
    load_task,
    rl_task,
    run_task_here,
    run_task_process,
    tiny_dit_config,
    tiny_rl_config,
    weights_in,
    write_config,
)

STEPS, EVERY, KILLED_AFTER = 12, 3, 7
TRAIN: dict[str, Any] = {"max_steps": STEPS, "save_steps": EVERY}
if DEVICE == "cuda":  # kernels that add in one order; a resumed run would compile for another first length
    TRAIN |= {"deterministic": True, "compile": False}
CONFIGS = {"train_dit": tiny_dit_config, "rl_diffusion": tiny_rl_config}
SETTINGS = {
    "train_dit": {
        "train": {**TRAIN, "ema_decay": 0.9, "ema_interval": 2},
        "flow": {"prompt_dropout": 0.3},
        "sample": {"every_steps": 5},
    },
    "rl_diffusion": {"model": {"keep_encoders": False}, "train": TRAIN, "eval": {"every_steps": 8}},
}


class Runs:
    """An undisturbed run of a task, and one that was killed with SIGKILL in the middle."""

    def __init__(self, folder: Path, task: str) -> None:
        self.folder, self.task = folder, task
        self.config = CONFIGS[task](folder, **SETTINGS[task])
        self.undisturbed = run_task_here(task, self.config)
        killed = folder / "killed"
        config_path = write_config(self.at(killed), folder / "killed.yaml")
        self.killed = run_task_process(task, config_path, kill_after=KILLED_AFTER)

    def at(self, output_dir: Path, **train) -> dict:
        """The configuration with another run folder and other settings of training."""
        return merge(self.config, {"train": {"output_dir": str(output_dir), **train}})

    def copy_of_killed(self, output_dir: Path) -> Path:
        """Another copy of what the kill left behind."""
        return Path(shutil.copytree(self.killed.output_dir, output_dir))

    def resume(self, output_dir: Path, **train) -> Path:
        """Runs it to its end from the newest intact checkpoint."""
        return run_task_here(self.task, self.at(output_dir, load_checkpoint_path="auto", **train))


@pytest.fixture(scope="module", params=[pytest.param("train_dit", marks=pytest.mark.slow), "rl_diffusion"])
def runs(request, tmp_path_factory):
    return Runs(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def dit_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dit")
    config = tiny_dit_config(folder, train=TRAIN)
    return folder, config, run_task_here("train_dit", config)


def assert_same_run(left: Path, right: Path) -> None:
    """Metrics, exported weights, the last checkpoint and the samples are equal byte by byte."""
    assert (left / "metrics.jsonl").read_bytes() == (right / "metrics.jsonl").read_bytes()
    assert weights_in(left / "hf_ckpt") == weights_in(right / "hf_ckpt")
    last_left, last_right = (list(list_checkpoints(path / "checkpoints").items())[-1] for path in (left, right))
    assert last_left[0] == last_right[0] == STEPS
    assert tensors_in(last_left[1]) == tensors_in(last_right[1])
    assert values_in(last_left[1]) == values_in(last_right[1])
    samples = [
        {str(path.relative_to(folder)): path.read_bytes() for path in (folder / "samples").rglob("*") if path.is_file()}
        for folder in (left, right)
    ]
    assert samples[0] == samples[1] != {}


def values_in(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint holds besides tensors, but for the run's id."""
    return {name: value for name, value in StoredCheckpoint(checkpoint).values.items() if name != "run_id"}


def tensors_in(checkpoint: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Every tensor of a checkpoint: dtype, shape and bytes."""
    stored = StoredCheckpoint(checkpoint)
    whole = stored.read_whole({key: key for key in stored.tensors})
    return {key: (str(value.dtype), list(value.shape), value.numpy().tobytes()) for key, value in whole.items()}


def test_a_killed_run_goes_on_as_if_nothing_had_happened(runs, tmp_path):
    assert runs.killed.returncode == -signal.SIGKILL, runs.killed.output
    assert KILLED_AFTER <= runs.killed.metrics()[-1]["step"] < STEPS
    checkpoints = runs.killed.output_dir / "checkpoints"
    assert max(list_checkpoints(checkpoints)) >= KILLED_AFTER - EVERY
    assert (runs.killed.output_dir / "run.lock").is_file(), "what a kill leaves"
    output_dir = runs.resume(runs.copy_of_killed(tmp_path / "resumed"))
    said = (output_dir / "log.txt").read_text(encoding="utf-8")
    assert "resumed from" in said and f"{output_dir}/run.lock: its run (process " in said and "taken over" in said
    assert not (output_dir / "run.lock").exists()
    assert_same_run(output_dir, runs.undisturbed)
    assert not list((output_dir / "checkpoints").glob("*.tmp"))


@pytest.mark.slow
def test_a_flipped_bit_in_the_newest_checkpoint_costs_one_interval(runs, tmp_path):
    output_dir = runs.copy_of_killed(tmp_path / "damaged")
    *_, previous, newest = list_checkpoints(output_dir / "checkpoints").items()
    path = newest[1] / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[random.Random(0).randrange(len(content))] ^= 4
    path.write_bytes(content)
    runs.resume(output_dir)
    said = (output_dir / "log.txt").read_text(encoding="utf-8")
    assert f"checkpoint passed over: {path} is damaged" in said
    assert f"at step {previous[0]}" in said
    assert_same_run(output_dir, runs.undisturbed)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew(runs, tmp_path):
    output_dir = runs.copy_of_killed(tmp_path / "lost")
    for folder in list_checkpoints(output_dir / "checkpoints").values():
        (folder / "__0_0.distcp").unlink()
    metrics = (output_dir / "metrics.jsonl").read_bytes()
    with pytest.raises(CheckpointError, match=r"train\.output_dir"):
        runs.resume(output_dir)
    assert (output_dir / "metrics.jsonl").read_bytes() == metrics


def test_a_finished_run_that_is_resumed_changes_nothing(dit_runs, tmp_path):
    _, config, undisturbed = dit_runs
    output_dir = Path(shutil.copytree(undisturbed, tmp_path / "again"))
    shutil.rmtree(output_dir / "hf_ckpt")  # as if it had been killed just before the export
    again = {"output_dir": str(output_dir), "load_checkpoint_path": "auto"}
    run_task_here("train_dit", merge(config, {"train": again}))
    assert_same_run(output_dir, undisturbed)


def test_resuming_where_there_is_no_checkpoint_starts_from_the_first_step(dit_runs, tmp_path):
    _, config, undisturbed = dit_runs
    fresh = merge(config, {"train": {"output_dir": str(tmp_path / "fresh"), "load_checkpoint_path": "auto"}})
    output_dir = run_task_here("train_dit", fresh)
    assert "starting from the first step" in (output_dir / "log.txt").read_text(encoding="utf-8")
    assert_same_run(output_dir, undisturbed)


def test_a_named_checkpoint_is_resumed_from_and_later_ones_give_way(dit_runs, tmp_path):
    _, config, undisturbed = dit_runs
    output_dir = Path(shutil.copytree(undisturbed, tmp_path / "back"))
    first = next(iter(list_checkpoints(output_dir / "checkpoints").values()))
    again = {"output_dir": str(output_dir), "load_checkpoint_path": str(first), "max_checkpoints": 1}
    run_task_here("train_dit", merge(config, {"train": again}))
    assert "removed by the next save: global_step_" in (output_dir / "log.txt").read_text(encoding="utf-8")
    assert_same_run(output_dir, undisturbed)


def test_a_named_checkpoint_that_is_missing_or_damaged_is_an_error(dit_runs, tmp_path):
    _, config, undisturbed = dit_runs
    damaged = Path(shutil.copytree(list(list_checkpoints(undisturbed / "checkpoints").values())[-1], tmp_path / "ckpt"))
    (damaged / "__0_0.distcp").write_bytes(b"")
    for path, message in ((damaged, "has 0 bytes"), (tmp_path / "absent", "does not exist")):
        train = {"output_dir": str(tmp_path / "run"), "load_checkpoint_path": str(path)}
        with pytest.raises(CheckpointError, match=message):
            run_task_here("train_dit", merge(config, {"train": train}))


RL_MODELS = [
    pytest.param({"lora": {"rank": 4, "alpha": 8}, "keep_encoders": False}, id="lora"),
    pytest.param({"keep_encoders": False}, id="all weights"),
    pytest.param({"keep_encoders": True}, id="prompts embedded on the way"),
]


class Interrupted(Exception):  # noqa: N818
    """Stands for a crash."""


@pytest.mark.slow
@pytest.mark.parametrize("model", RL_MODELS)
def test_rl_with_average_and_kl_penalty_resumes_exactly(tmp_path, model):
    config = tiny_rl_config(
        tmp_path,
        model=model,
        algorithm={"kl": {"type": "flow_grpo", "coef": 0.5}},
        train={**TRAIN, "ema_decay": 0.9},
        eval={"every_steps": STEPS},
    )
    kinds = resumed_exactly(tmp_path, config)
    assert "ema" in kinds
    with_lora = "lora" in model  # then the base weights are the reference
    assert ("reference" in kinds) != with_lora


OLD = {"type": "linear", "slope": 0.1, "limit": 0.7}
SAMPLED = [
    pytest.param({"recipe": "diffusion_nft", "old": OLD}, {"old_policy"}, id="nft", marks=pytest.mark.slow),
    pytest.param(
        {"recipe": "awm", "old": OLD, "ema": OLD}, {"old_policy", "ema_policy"}, id="awm", marks=pytest.mark.slow
    ),
    pytest.param(
        {"recipe": "flow_dpo", "reference": {"every": 3}}, {"reference_policy"}, id="dpo", marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize(("algorithm", "policies"), SAMPLED)
def test_rl_with_other_policies_resumes_exactly(tmp_path, algorithm, policies):
    config = tiny_rl_config(tmp_path, model={"lora": {"rank": 4, "alpha": 8}}, train=TRAIN, eval={"every_steps": STEPS})
    kinds = resumed_exactly(tmp_path, {**config, "algorithm": algorithm})
    assert {kind for kind in kinds if kind.endswith("_policy")} == policies


def resumed_exactly(tmp_path, config):
    """Compares a run with one that crashed and was resumed; returns what its checkpoints hold."""
    name = rl_task(config["algorithm"]["recipe"])
    undisturbed = run_task_here(name, config)

    broken = merge(config, {"train": {"output_dir": str(tmp_path / "broken")}})
    task = load_task(name)
    update = task.update_policy

    def crash_at_step_8(actor, batch, advantages, config, step, *probe):
        if step == KILLED_AFTER:
            raise Interrupted
        return update(actor, batch, advantages, config, step, *probe)

    task.update_policy = crash_at_step_8
    with pytest.raises(Interrupted):
        run_task_here(task, broken)
    resumed = run_task_here(name, merge(broken, {"train": {"load_checkpoint_path": "auto"}}))
    assert_same_run(resumed, undisturbed)
    return {key.split("/")[0] for key in tensors_in(list(list_checkpoints(resumed / "checkpoints").values())[-1])}


def test_sigterm_finishes_the_step_saves_and_exits_with_143(dit_runs, tmp_path):
    _, config, undisturbed = dit_runs
    stopped = merge(config, {"train": {"output_dir": str(tmp_path / "run"), "save_steps": 0}})
    config_path = write_config(stopped, tmp_path / "run.yaml")
    result = run_task_process("train_dit", config_path, kill_after=5, kill_signal=signal.SIGTERM)
    assert result.returncode == 143, result.output
    step = result.metrics()[-1]["step"]
    assert 5 <= step < STEPS
    assert f"stopped by signal after step {step}" in result.output
    assert "Traceback" not in result.output
    assert list(list_checkpoints(result.output_dir / "checkpoints")) == [step]
    assert not (result.output_dir / "hf_ckpt").exists()
    resumed = merge(stopped, {"train": {"load_checkpoint_path": "auto"}})
    assert_same_run(run_task_here("train_dit", resumed), undisturbed)


def test_weights_that_explode_stop_the_run_with_exit_code_4(dit_runs, tmp_path):
    _, config, _ = dit_runs
    exploding = merge(config, {"train": {"output_dir": str(tmp_path / "run"), "lr_warmup_steps": 0, "save_steps": 1}})
    result = run_task_process("train_dit", write_config(exploding, tmp_path / "run.yaml"), "--train.lr", "1e30")
    assert result.returncode == 4, result.output
    assert "stopped: step 2, rank 0, samples 4 to 5: the loss is nan. Nothing was updated" in result.output
    assert "Traceback" not in result.output
    assert [line["step"] for line in result.metrics()] == [1]
    assert list(list_checkpoints(result.output_dir / "checkpoints")) == [1]
    verify_checkpoint(result.output_dir / "checkpoints" / "global_step_1")


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_stops_before_the_update(dit_runs, tmp_path, value):
    _, config, undisturbed = dit_runs
    config = merge(config, {"train": {"output_dir": str(tmp_path / "run")}})
    task = load_task("train_dit")
    loss_of, calls, before = task.denoising_losses, [], {}

    def poisoned(model, batch, flow, seed, step):
        losses = loss_of(model, batch, flow, seed, step)
        calls.append(step)
        if calls.count(7) == 2:  # the second micro-batch of step 8
            before["model"] = {
                name: parameter.detach().clone() for name, parameter in model.denoiser.named_parameters()
            }
            before["checkpoint"] = contents(tmp_path / "run" / "checkpoints")
            before["module"] = model.denoiser
            return losses * losses.new_tensor([1.0, value])
        return losses

    task.denoising_losses = poisoned
    with pytest.raises(NonFiniteError, match=r"step 8, rank 0, samples 30 to 31: the loss is"):
        run_task_here(task, config)
    assert all(torch.equal(parameter, before["model"][name]) for name, parameter in before["module"].named_parameters())
    assert contents(tmp_path / "run" / "checkpoints") == before["checkpoint"]
    assert max(list_checkpoints(tmp_path / "run" / "checkpoints")) == 6

    resumed = merge(config, {"train": {"load_checkpoint_path": "auto"}})
    assert_same_run(run_task_here("train_dit", resumed), undisturbed)


def test_a_loss_that_is_not_finite_stops_rl_and_names_the_samples(tmp_path):
    config = tiny_rl_config(tmp_path, train={**TRAIN, "max_steps": 3, "save_steps": 1})
    task = load_task("rl_diffusion")
    replay, update = task.replay_trajectories, task.update_policy
    steps = []

    def watched(actor, batch, advantages, config, step, probe):
        steps.append(step)
        return update(actor, batch, advantages, config, step, probe)

    def poisoned(*arguments):
        new = replay(*arguments)
        if steps[-1] == 1:
            new.mean.data[0] = math.nan
        return new

    task.replay_trajectories, task.update_policy = poisoned, watched
    with pytest.raises(RuntimeError) as error:
        run_task_here(task, merge(config, {"algorithm": {"self_check": False}}))
    assert isinstance(error.value, NonFiniteError), error.value
    assert str(error.value).startswith("step 2, rank 0, samples [")
    assert list(list_checkpoints(tmp_path / "run" / "checkpoints")) == [1]
    verify_checkpoint(tmp_path / "run" / "checkpoints" / "global_step_1")


def test_an_earlier_run_is_moved_aside_on_purpose_and_not_deleted(tmp_path, capsys):
    config = tiny_dit_config(tmp_path, train={"max_steps": 1})
    output_dir = run_task_here("train_dit", config)
    contents_before, anew = contents(output_dir), merge(config, {"train": {"load_checkpoint_path": "new"}})
    run_task_here("train_dit", anew)
    assert contents(tmp_path / "run.1") == contents_before
    assert f"an earlier run stood in {output_dir}; it is now {tmp_path / 'run.1'}" in capsys.readouterr().err
    (tmp_path / "run" / "mark").write_text("second", encoding="utf-8")
    run_task_here("train_dit", anew)
    assert (tmp_path / "run.2" / "mark").is_file()
    assert contents(tmp_path / "run.1") == contents_before
    assert not (tmp_path / "run" / "mark").exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
