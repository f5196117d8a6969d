"""What comes next after a run: commands with real paths, and going on from a run folder with other settings."""

import shlex
import sys

import pytest

from sfumato.config.paths import find_checkpoint
from sfumato.errors import FolderError, PreemptedError, StoppedError
from sfumato.tracking import next_steps
from sfumato.tracking.exit import ending_of
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.next_steps import fork_command, rerun_command, resume_command
from tests.tiny import run_task_here, tiny_dit_config


@pytest.fixture
def started(monkeypatch):
    """As if a task had been started, within a checkout."""
    command = ["tasks/train_dit.py", "my run.yaml", "--train.lr", "1e-4", "--train.load_checkpoint_path=new"]
    monkeypatch.setattr(sys, "argv", command)
    monkeypatch.chdir(next_steps.Path(next_steps.sfumato.__file__).parent.parent)


def test_the_command_goes_on_with_the_same_settings(started):
    assert shlex.split(resume_command()) == [
        *("bash", "train.sh", "tasks/train_dit.py", "my run.yaml", "--train.lr", "1e-4"),
        *("--train.load_checkpoint_path", "auto"),
    ]


def test_an_installed_copy_has_another_command(started, monkeypatch, tmp_path):
    monkeypatch.setattr(next_steps.sfumato, "__file__", str(tmp_path / "site-packages" / "sfumato" / "__init__.py"))
    assert resume_command().startswith("sfumato launch tasks/train_dit.py 'my run.yaml'")


def test_a_process_that_runs_no_task_has_no_command(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["pytest", "-x"])
    assert rerun_command() == resume_command() == fork_command(next_steps.Path("c.yaml"), next_steps.Path("b"), 3) == ""


@pytest.mark.parametrize(
    ("error", "first", "second"),
    [
        (PreemptedError("stopped by signal after step 3"), "stopped by signal after step 3", "to go on: bash train.sh"),
        (StoppedError("stopped before"), "stopped before", "to start it again: bash train.sh"),
        (KeyboardInterrupt(), "stopped at once", "to go on from what was saved last: bash train.sh"),
    ],
)
def test_each_end_names_a_command(started, error, first, second):
    lines = ending_of(error).text.splitlines()
    assert lines[0] == first
    assert lines[1].startswith(second)


def test_a_run_folder_stands_for_its_newest_checkpoint(tmp_path):
    for name in ("global_step_9", "global_step_10", "global_step_11.tmp"):
        (tmp_path / "run" / "checkpoints" / name).mkdir(parents=True)
    assert find_checkpoint(str(tmp_path / "run")) == str(tmp_path / "run" / "checkpoints" / "global_step_10")
    named = str(tmp_path / "run" / "checkpoints" / "global_step_9")
    assert find_checkpoint(f"{named}/") == named, "a shell completes the name of a folder with a slash"
    with pytest.raises(ValueError, match="holds checkpoints: name one of them, or its run folder"):
        find_checkpoint(str(tmp_path / "run" / "checkpoints"))
    assert find_checkpoint("auto") == "auto"
    assert find_checkpoint("no/such/folder") == "no/such/folder", "the run says that it does not exist"
    (tmp_path / "empty" / "checkpoints").mkdir(parents=True)
    with pytest.raises(ValueError, match="the run has saved nothing"):
        find_checkpoint(str(tmp_path / "empty"))
    (tmp_path / "hf_ckpt").mkdir()
    (tmp_path / "hf_ckpt" / "model_index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"exported weights.*model\.model_path"):
        find_checkpoint(str(tmp_path / "hf_ckpt"))


def test_going_on_with_another_rate(tmp_path, monkeypatch, capsys):
    config = tiny_dit_config(tmp_path, train={"max_steps": 2, "lr_warmup_steps": 0})
    run = run_task_here("train_dit", config)
    said = capsys.readouterr().err
    assert f"try it: sfumato sample {run} " in said and f"sfumato compare {run} OTHER_RUN" in said
    assert said.count("report.html") == 1, "where the report is, is said once"
    monkeypatch.setattr(sys, "argv", ["tasks/train_dit.py", "my.yaml", "--train.lr", "2e-3"])
    other = tmp_path / "other"

    config["train"]["lr"] = 2e-3
    with pytest.raises(FolderError, match=f"--train.load_checkpoint_path {run} .*--train.max_steps 4"):
        run_task_here("train_dit", config)

    config["train"] |= {"load_checkpoint_path": str(run), "output_dir": str(other)}
    with pytest.raises(FolderError, match="is of step 2, and this run ends after 2: nothing is left to do") as caught:
        run_task_here("train_dit", config)
    assert "--train.max_steps 4" in str(caught.value)
    assert not (other / "metrics.jsonl").exists()

    config["train"]["max_steps"] = 4
    run_task_here("train_dit", config)
    lines = read_jsonl(other / "metrics.jsonl")
    assert [line["step"] for line in lines] == [3, 4]
    assert lines[0]["lr"] == pytest.approx(1e-3), "half of the new rate, at half of a cosine"
    assert f"{run}/checkpoints/global_step_2" in (other / "config.yaml").read_text()
