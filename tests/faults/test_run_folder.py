"""A folder with a run in it: what is refused leaves every byte as it was, and says what to do; in every task."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from sfumato.config.load import merge
from sfumato.config.yaml_text import read_yaml
from sfumato.errors import CheckpointError, ConfigError, DataError, FolderError, PreemptedError, UserError
from sfumato.tracking.atomic_folders import MANIFEST, list_checkpoints, list_files, read_values
from sfumato.tracking.folder import read_environment, write_json
from sfumato.tracking.json_lines import read_jsonl
from tests.faults.test_resume import contents
from tests.tiny import (
    load_task,
    run_task_here,
    tiny_dit_config,
    tiny_dit_dpo_config,
    tiny_language_description,
    tiny_pipeline_description,
    tiny_rl_config,
    tiny_text_config,
    weights_in,
    write_config,
)

STEPS = 2
LORA = {"rank": 2, "alpha": 4}


def autoencoder_config(folder: Path, **overrides: Any) -> dict[str, Any]:
    config = tiny_dit_config(folder)
    del config["sample"]
    return merge(config, overrides)


def dpo_config(folder: Path, **overrides: Any) -> dict[str, Any]:
    return tiny_text_config(folder, **merge({"data": {"data_type": "preference"}}, overrides))


TASKS = {
    "train_text": tiny_text_config,
    "train_text_dpo": dpo_config,
    "train_dit": tiny_dit_config,
    "train_dit_dpo": tiny_dit_dpo_config,
    "train_autoencoder": autoencoder_config,
    "rl_diffusion": tiny_rl_config,
}


class Finished:
    """A run of a task that has ended, and a configuration of it."""

    def __init__(self, task: str, folder: Path) -> None:
        self.task, self.folder = task, folder
        self.config = TASKS[task](folder, train={"max_steps": STEPS, "save_steps": 1, "lr_warmup_steps": 0})
        self.output_dir = run_task_here(task, self.config)
        self.is_text = task.startswith("train_text")
        self.other_data = {"synthetic": {"num_rows": 201}} if self.is_text else {"glyphs": {"characters": "ABCDEG"}}

    def start(self, wanted: str | None = None, **overrides: Any) -> Path:
        return run_task_here(
            self.task, merge(self.config, merge(overrides, {"train": {"load_checkpoint_path": wanted}}))
        )

    def other_model(self) -> dict[str, Any]:
        """One whose weights have other shapes."""
        path = self.folder / "other.yaml"
        if self.task == "train_autoencoder":
            wider = tiny_pipeline_description() | {
                "vae": {"channels": [16, 16], "latent_channels": 4, "norm_groups": 4}
            }
            return {"model_path": None, "config_path": str(write_config(wider, path))}
        if not self.is_text:
            return {"lora": LORA}
        return {"config_path": str(write_config(tiny_language_description() | {"intermediate_size": 96}, path))}

    def refused(self, kind: type[Exception], *parts: str, wanted: str | None = None, **overrides: Any) -> str:
        """A start that must raise one line with these parts, and must change nothing; the line."""
        before = contents(self.folder)
        with pytest.raises(kind) as caught:
            self.start(wanted, **overrides)
        after = contents(self.folder)
        assert after.keys() == before.keys()
        assert [name for name in after if after[name] != before[name]] == []
        assert not (self.folder / "run.1").exists()
        text = str(caught.value)
        assert isinstance(caught.value, UserError) and "\n" not in text
        for part in parts:
            assert part in text, text
        return text


@pytest.fixture(scope="module", params=list(TASKS))
def finished(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Finished:
    return Finished(request.param, tmp_path_factory.mktemp(request.param))


def test_a_finished_run_stays_and_another_folder_is_named(finished: Finished) -> None:
    names = (str(finished.output_dir), "a finished run (2 steps)", f"--train.output_dir {finished.folder}/run_2")
    text = finished.refused(FolderError, *names, "--train.load_checkpoint_path new")
    assert "differs" not in text
    finished.refused(FolderError, *names, "train.lr (0.001 there, 0.002 here)", train={"lr": 2.0e-3})


def test_what_is_finished_does_not_become_another_configurations(finished: Finished) -> None:
    parts = ("a finished run", "nothing is left to do", "train.lr (0.001 there, 0.002 here)", "run_2")
    finished.refused(FolderError, *parts, wanted="auto", train={"lr": 2.0e-3})


def test_a_finished_run_that_is_given_again_with_auto_makes_the_same(finished: Finished) -> None:
    """As a second ``make quickstart`` does."""
    lines = (finished.output_dir / "metrics.jsonl").read_bytes()
    weights, environment = weights_in(finished.output_dir / "hf_ckpt"), read_environment(finished.output_dir)
    finished.start("auto")
    assert (finished.output_dir / "metrics.jsonl").read_bytes() == lines
    assert weights_in(finished.output_dir / "hf_ckpt") == weights
    assert read_environment(finished.output_dir)["run_id"] == environment["run_id"]
    assert not (finished.folder / "run.1").exists()


def test_a_finished_run_of_rl_starts_no_roles_while_its_weights_are_there(
    finished: Finished, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if finished.task != "rl_diffusion":
        pytest.skip("a task without roles")
    weights = weights_in(finished.output_dir / "hf_ckpt")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("roles were started")

    with monkeypatch.context() as patched:
        patched.setattr("sfumato.runtime.launch.launch_roles", refuse)
        before = contents(finished.output_dir)
        capsys.readouterr()
        finished.start("auto")
        assert contents(finished.output_dir) == before
        said = capsys.readouterr().err
        assert "nothing is left to do" in said and "sfumato sample " in said
        with pytest.raises(AssertionError, match="roles were started"):
            finished.start("auto", train={"max_steps": STEPS + 1})
    shutil.rmtree(finished.output_dir / "hf_ckpt")
    finished.start("auto")
    assert weights_in(finished.output_dir / "hf_ckpt") == weights


def test_a_resume_with_other_data_is_refused_in_every_task(finished: Finished) -> None:
    field = "data.synthetic.num_rows was 200, is 201"
    if not finished.is_text:
        field = "data.glyphs.characters was 'ABCDEF', is 'ABCDEG'"
    more = {"train": {"max_steps": STEPS + 1}}
    parts = (field, "Restore that", "model.model_path")
    finished.refused(CheckpointError, *parts, wanted="auto", data=finished.other_data, **more)
    first = str(finished.output_dir / "checkpoints/global_step_1")
    finished.refused(CheckpointError, field, wanted=first, data=finished.other_data)


def test_a_resume_with_another_seed_or_size_of_a_step_is_refused(finished: Finished) -> None:
    more = {"max_steps": STEPS + 1}
    finished.refused(CheckpointError, "train.seed was 42, is 7", wanted="auto", train={"seed": 7, **more})
    if finished.task == "rl_diffusion":
        parts = ("rollout.num_prompts was 4, is 8",)
        finished.refused(CheckpointError, *parts, wanted="auto", train=more, rollout={"num_prompts": 8})
    elif not finished.is_text:  # the position of text counts samples
        parts = ("train.global_batch_size was 4, is 8",)
        finished.refused(CheckpointError, *parts, wanted="auto", train={"global_batch_size": 8, **more})
    else:
        data = {"max_seq_len": 65}
        finished.refused(CheckpointError, "data.max_seq_len was 64, is 65", wanted="auto", train=more, data=data)


def test_a_resume_of_another_model_is_refused(finished: Finished) -> None:
    overrides = {"model": finished.other_model(), "train": {"max_steps": STEPS + 1}}
    text = finished.refused(CheckpointError, "checkpoints/global_step_2", wanted="auto", **overrides)
    said = "is of another model", "but this configuration wants none", "has another content"
    assert any(part in text for part in said)


def test_what_lies_in_the_earlier_run_is_not_moved_away(finished: Finished) -> None:
    inside = str(finished.output_dir / "hf_ckpt")
    model = {"model_path": inside} | ({"config_path": None, "tokenizer_path": None} if finished.is_text else {})
    parts = (f"model.model_path {inside} lies in {finished.output_dir}", "--train.output_dir")
    finished.refused(FolderError, *parts, wanted="new", model=model)


def test_a_mistake_behind_a_new_start_moves_nothing(finished: Finished) -> None:
    missing = str(finished.folder / "absent")
    model = {"model_path": missing} | ({"config_path": None, "tokenizer_path": None} if finished.is_text else {})
    finished.refused(ConfigError, missing, wanted="new", model=model)
    if finished.task != "rl_diffusion":
        data = {"train_path": missing} | ({"synthetic": None} if finished.is_text else {"data_type": "image_text"})
        data |= {"data_type": "pairs", "eval_path": missing} if finished.task == "train_dit_dpo" else {}
        data |= {"eval_path": missing} if finished.is_text else {}
        finished.refused(DataError, missing, wanted="new", data=data)


def test_a_checkpoint_of_another_run_does_not_go_into_this_ones_folder(finished: Finished, tmp_path: Path) -> None:
    foreign = tmp_path / "foreign"
    shutil.copytree(finished.output_dir / "checkpoints/global_step_1", foreign)
    rewrite_run_id(foreign, "another")
    finished.refused(FolderError, str(foreign), "is of another one", "--train.output_dir", wanted=str(foreign))


def test_the_rest_may_change_and_the_run_stays_the_same_one(finished: Finished, tmp_path: Path) -> None:
    """Last of this task's tests, since it goes on with the run."""
    output_dir = Path(shutil.copytree(finished.output_dir, tmp_path / "more"))
    run_id = read_environment(output_dir)["run_id"]
    changed = {"output_dir": str(output_dir), "max_steps": STEPS + 1, "lr": 5.0e-4, "micro_batch_size": 1}
    if finished.task == "rl_diffusion":
        changed["micro_batch_size"] = 2
    finished.start("auto", train=changed)
    assert [line["step"] for line in read_jsonl(output_dir / "metrics.jsonl")][-1] == STEPS + 1
    environment = read_environment(output_dir)
    assert environment["run_id"] == run_id and environment["finished"]
    assert {
        read_values(checkpoint)["run_id"] for checkpoint in list_checkpoints(output_dir / "checkpoints").values()
    } == {run_id}
    assert read_yaml(output_dir / "config.yaml")["train"]["lr"] == 5.0e-4
    assert not (output_dir / "run.lock").exists()


def rewrite_run_id(checkpoint: Path, run_id: str) -> None:
    """Makes a checkpoint one of another run, intact all the same."""
    path = checkpoint / "state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "run_id": run_id}))
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["files"] |= list_files(checkpoint, [path])
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))


class Crash(Exception):  # noqa: N818
    """Stands for one."""


@pytest.fixture(scope="module")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """A run of 4 steps that broke off after the third, with checkpoints of each."""
    folder = tmp_path_factory.mktemp("crashed")
    config = tiny_dit_config(folder, train={"max_steps": 4, "save_steps": 1})
    return config, crash(config, at_step=3)


def crash(config: dict[str, Any], at_step: int) -> Path:
    task = load_task("train_dit")
    losses = task.denoising_losses

    def failing(*args: Any) -> Any:
        if args[-1] == at_step:
            raise Crash
        return losses(*args)

    task.denoising_losses = failing
    with pytest.raises(Crash):
        run_task_here(task, config)
    return Path(config["train"]["output_dir"])


def copied(crashed: tuple[dict[str, Any], Path], folder: Path, **train: Any) -> dict[str, Any]:
    """A copy of the crashed run, and a configuration that starts in it."""
    shutil.copytree(crashed[1], folder / "run")
    return merge(crashed[0], {"train": {"output_dir": str(folder / "run"), **train}})


def test_an_unfinished_run_is_offered_to_be_gone_on_with(crashed: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    config = copied(crashed, tmp_path, lr=2.0e-3)
    before = contents(tmp_path)
    with pytest.raises(FolderError) as caught:
        run_task_here("train_dit", config)
    assert contents(tmp_path) == before
    text = str(caught.value)
    assert "an unfinished run (step 3 of 4, newest checkpoint of step 3)" in text and "\n" not in text
    assert "train.lr (0.001 there, 0.002 here)" in text
    assert "--train.load_checkpoint_path auto goes on with it" in text and "load_checkpoint_path new" in text
    run_task_here("train_dit", merge(config, {"train": {"load_checkpoint_path": "auto"}}))
    assert read_jsonl(tmp_path / "run/metrics.jsonl")[-1]["step"] == 4


def test_a_mistake_in_the_first_start_leaves_no_folder(tmp_path: Path) -> None:
    config = tiny_dit_config(tmp_path, train={"output_dir": str(tmp_path / "runs/of/mine")})
    before = contents(tmp_path)
    for mistake in (
        {"data": {"data_type": "image_text", "train_path": str(tmp_path / "absent")}},
        {"model": {"model_path": str(tmp_path / "absent")}},
        {"train": {"load_checkpoint_path": str(tmp_path / "absent")}},
    ):
        with pytest.raises(UserError, match="absent"):
            run_task_here("train_dit", merge(config, mistake))
        assert contents(tmp_path) == before and not (tmp_path / "runs").exists()


def test_a_run_that_saved_nothing_gives_way(tmp_path: Path) -> None:
    config = tiny_dit_config(tmp_path, train={"max_steps": 2})
    crash(config, at_step=1)
    lines = read_jsonl(tmp_path / "run/metrics.jsonl")
    run_task_here("train_dit", config)
    assert read_jsonl(tmp_path / "run.1/metrics.jsonl") == lines and len(lines) == 1
    assert f"it is now {tmp_path / 'run.1'}" in (tmp_path / "run/log.txt").read_text()
    assert read_environment(tmp_path / "run")["run_id"] != read_environment(tmp_path / "run.1")["run_id"]


def test_auto_passes_over_checkpoints_of_another_run(crashed: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    config = copied(crashed, tmp_path, load_checkpoint_path="auto")
    root = tmp_path / "run/checkpoints"
    rewrite_run_id(root / "global_step_3", "another")
    run_task_here("train_dit", config)
    said = (tmp_path / "run/log.txt").read_text()
    assert f"checkpoint passed over: {root}/global_step_3 is of another run (another)" in said
    assert f"resumed from {root / 'global_step_2'} at step 2" in said


def test_auto_does_not_start_anew_beside_checkpoints_of_another_run(
    crashed: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    config = copied(crashed, tmp_path, load_checkpoint_path="auto")
    for folder in list_checkpoints(tmp_path / "run/checkpoints").values():
        rewrite_run_id(folder, "another")
    before = contents(tmp_path)
    with pytest.raises(CheckpointError, match=r"is of the run that stands there.*train\.output_dir") as caught:
        run_task_here("train_dit", config)
    assert caught.value.exit_code == 3 and contents(tmp_path) == before


def test_a_checkpoint_of_another_run_begins_a_fork(crashed: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    source = crashed[1] / "checkpoints/global_step_2"
    train = {"output_dir": str(tmp_path / "fork"), "load_checkpoint_path": str(source), "lr": 2.0e-3}
    fork = merge(crashed[0], {"train": train})
    run_task_here("train_dit", fork)
    origin, environment = read_environment(crashed[1])["run_id"], read_environment(tmp_path / "fork")
    assert environment["run_id"] != origin
    assert environment["forked_from"] == {"run_id": origin, "checkpoint": str(source)}
    said = (tmp_path / "fork/log.txt").read_text()
    assert "this one is a fork of it" in said and "metrics from step 3 on" in said
    assert [line["step"] for line in read_jsonl(tmp_path / "fork/metrics.jsonl")] == [3, 4]
    ids = {read_values(checkpoint)["run_id"] for checkpoint in list_checkpoints(tmp_path / "fork/checkpoints").values()}
    assert ids == {environment["run_id"]}
    run_task_here("train_dit", merge(fork, {"train": {"load_checkpoint_path": "auto", "max_steps": 5}}))
    again = read_environment(tmp_path / "fork")
    assert [again[name] for name in ("run_id", "forked_from")] == [environment["run_id"], environment["forked_from"]]
    shutil.rmtree(tmp_path / "fork/checkpoints")  # as one that was killed before its first save
    run_task_here("train_dit", merge(fork, {"train": {"load_checkpoint_path": "auto", "max_steps": 5}}))
    assert f"resumed from {source} at step 2" in (tmp_path / "fork/log.txt").read_text()
    assert [line["step"] for line in read_jsonl(tmp_path / "fork/metrics.jsonl")] == [3, 4, 5]
    back = {"load_checkpoint_path": str(tmp_path / "fork/checkpoints/global_step_4"), "max_steps": 5}
    run_task_here("train_dit", merge(fork, {"train": back}))
    assert read_environment(tmp_path / "fork")["forked_from"] == environment["forked_from"]
    shutil.rmtree(tmp_path / "fork/checkpoints")
    moved = {**environment, "forked_from": {"run_id": origin, "checkpoint": str(source.with_name("global_step_9"))}}
    write_json(tmp_path / "fork/environment.json", moved)
    with pytest.raises(CheckpointError, match=r"began from .*global_step_9, which is not there any more: name"):
        run_task_here("train_dit", merge(fork, {"train": {"load_checkpoint_path": "auto", "max_steps": 5}}))


def test_a_new_run_keeps_the_tokens_that_it_made_before_it_began(tmp_path: Path) -> None:
    (tmp_path / "large_disk/run").mkdir(parents=True)
    (tmp_path / "run").symlink_to(tmp_path / "large_disk/run")
    config = tiny_text_config(tmp_path, train={"max_steps": 1})
    run_task_here("train_text", config)
    made = {name for name in contents(tmp_path / "run") if name.startswith("tokens/")}
    run_task_here("train_text", merge(config, {"train": {"load_checkpoint_path": "new"}}))
    assert {name for name in contents(tmp_path / "run") if name.startswith("tokens/")} == made
    # the run that a link leads to is moved, and not the link: both runs stay on that disk
    earlier = tmp_path / "large_disk/run.1"
    assert (earlier / "metrics.jsonl").exists() and not (earlier / "run.lock").exists()
    assert (tmp_path / "run").is_symlink() and (tmp_path / "large_disk/run/metrics.jsonl").exists()
    assert f"it is now {earlier}" in (tmp_path / "run/log.txt").read_text()


def test_the_part_that_makes_the_model_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    first = tiny_text_config(tmp_path / "first", train={"max_steps": 3, "save_steps": 1})
    path = write_config(first, tmp_path / "first.yaml")
    made = tmp_path / "first/run/hf_ckpt"
    model = {"config_path": None, "tokenizer_path": None, "model_path": str(made), "made_by": str(path)}
    config = tiny_text_config(tmp_path / "second", model=model, train={"max_steps": 1})
    task = load_task("train_text")
    loss_of, calls = task.next_token_loss, []

    def stopped(*args: Any, **more: Any) -> Any:
        if not calls and list_checkpoints(tmp_path / "first/run/checkpoints"):
            calls.append("stop")
            signal.raise_signal(signal.SIGINT)  # Ctrl-C in the second step
        return loss_of(*args, **more)

    task.next_token_loss = stopped
    with pytest.raises(PreemptedError):
        run_task_here(task, config)
    assert not (tmp_path / "second/run").exists()
    assert not made.exists()
    run_task_here("train_text", config)
    root = tmp_path / "first/run"
    assert f"resumed from {root}/checkpoints/global_step_2 at step 2" in (root / "log.txt").read_text()
    assert read_jsonl(tmp_path / "second/run/metrics.jsonl")[-1]["step"] == 1
