"""The run folder: what is kept, what is written, who writes it."""

from __future__ import annotations

import importlib.metadata
import json
import logging
import os
import signal
import subprocess
import sys
import time
import types
from pathlib import Path

import pytest
import torch

from sfumato.config.diffusion_rl import TrajectoryRLConfig
from sfumato.config.dit import TrainDitConfig
from sfumato.config.load import load_config
from sfumato.errors import CheckpointError, FolderError, NonFiniteError, PreemptedError, RoleLostError, StoppedError
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.alerts import Alert
from sfumato.tracking.atomic_folders import list_checkpoints
from sfumato.tracking.exit import Ending, ending_of
from sfumato.tracking.folder import read_environment
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.lock import NAME
from sfumato.tracking.progress import quiet_other_bars
from sfumato.tracking.run import Run, start_run
from sfumato.tracking.task import after_requeue, report_ending, run_again_when_lost
from sfumato.tracking.trackers import Trackers
from tests.tiny import tiny_dit_config, tiny_rl_config

ALONE = Mesh(Layout(), torch.device("cpu"))


@pytest.fixture(autouse=True)
def _signals():
    """A run listens to signals; give them back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def start(tmp_path: Path, **train: object) -> Run:
    config = load_config(TrainDitConfig, overrides=tiny_dit_config(tmp_path, train=train))
    return start_run(config, ALONE, "test")


def test_a_checkpoint_that_does_not_exist_is_named_before_there_is_a_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        start(tmp_path, load_checkpoint_path=str(tmp_path / "nowhere"))
    with pytest.raises(CheckpointError, match=r"has no manifest.json: not a finished checkpoint"):
        start(tmp_path, load_checkpoint_path=str(tmp_path))
    assert not (tmp_path / "run").exists()


def test_a_run_that_never_took_a_step_is_not_kept(tmp_path: Path) -> None:
    for _ in range(3):
        start(tmp_path).begin(10, 0, [])
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("run")] == ["run"]


def test_what_the_library_logs_is_said_while_the_run_is_at_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("sfumato.rollout.engines.served.server_process")
    run = start(tmp_path)
    logger.info("starting %s", "the server")
    run.begin(10, 0, [])
    logger.warning("it is started anew")
    logger.debug("a detail")
    run.close()
    logger.info("after the end")
    said = (tmp_path / "run" / "log.txt").read_text(encoding="utf-8").splitlines()
    assert said[-2:] == ["starting the server", "it is started anew"]
    shown = capsys.readouterr().err
    assert shown.count("starting the server") == 1 and shown.count("it is started anew") == 1
    assert "after the end" not in shown and "a detail" not in shown


def test_a_run_knows_whether_its_process_starts_it_again(tmp_path: Path) -> None:
    assert [start(tmp_path).is_started_again for _ in range(2)] == [False, True]
    assert not start(tmp_path, output_dir=str(tmp_path / "another")).is_started_again


def test_earlier_runs_are_kept_under_numbers(tmp_path: Path) -> None:
    for number in range(3):
        run = start(tmp_path)
        run.begin(10, 0, [])
        run.log(1, {"loss": float(number)}, show={})
        run.close()
    losses = {name: read_jsonl(tmp_path / name / "metrics.jsonl")[0]["loss"] for name in ("run.1", "run.2", "run")}
    assert losses == {"run.1": 0.0, "run.2": 1.0, "run": 2.0}


def test_a_folder_of_runs_is_not_moved_aside(tmp_path: Path) -> None:
    for folder in (tmp_path / "run", tmp_path / "run" / "series" / "a"):
        run = start(tmp_path, output_dir=str(folder))
        run.begin(10, 0, [])
        run.log(1, {"loss": 1.0}, show={})
        run.close()
    with pytest.raises(FolderError, match=r"other runs \(series/a\), which would be moved with it"):
        start(tmp_path)
    assert not (tmp_path / "run" / NAME).exists()


def test_a_run_that_ends_early_reports_the_steps_that_it_made_and_why(tmp_path: Path) -> None:
    run = start(tmp_path, max_steps=400)
    report_ending(Ending("error: not begun", 2))
    assert not (tmp_path / "run" / "report.html").exists(), "nothing was written yet"
    run.begin(400, 0, [])
    run.log(0, {"eval/loss": 3.0}, show={})
    run.write_report()
    for step in range(1, 5):
        run.log(step, {"loss": 1.0}, show={})
    run.close()
    report_ending(Ending("stopped by signal after step 4; the state is saved", 143))
    html = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert "step 4 of 400" in html and "stopped by signal after step 4; the state is saved" in html
    assert (tmp_path / "run" / "log.txt").read_text().endswith("stopped by signal after step 4; the state is saved\n")
    report_ending(Ending("Traceback\n  File x\nValueError: <b>", 1))
    assert "ValueError: &lt;b&gt;" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")


def test_bars_of_libraries_that_come_later_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    for name in ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS"):
        monkeypatch.delenv(name, raising=False)
    was_off = datasets.are_progress_bars_disabled()
    datasets.enable_progress_bars()
    try:
        quiet_other_bars()
        assert datasets.are_progress_bars_disabled()
    finally:
        (datasets.disable_progress_bars if was_off else datasets.enable_progress_bars)()
    assert os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] == os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] == "1"


def test_metrics_are_what_was_computed_and_timings_what_it_took(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.begin(10, 0, ["tensorboard"])
    with run.timed("update"):
        pass
    run.add_time("update", 2.0)
    run.log(1, {"loss": 0.1 + 0.2, "broken": float("nan")}, show={"loss": "loss"})
    run.log(2, {"loss": 0.25, "eval/reward/total": 0.5}, show={})
    run.log(3, {"loss": 0.25, "eval/reward/total": 0.75, "eval/reward/std": 1.0}, show={})
    assert run.changes("eval/reward/") == "total 0.500 -> 0.750"
    run.close()
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert lines[0] == '{"broken": null, "loss": 0.30000000000000004, "step": 1}'
    first = read_jsonl(tmp_path / "run" / "timings.jsonl")[0]
    assert 2.0 <= first["time/update_s"] < 3.0
    assert first["memory/process_peak_mib"] > 10
    assert "time/update_s" not in read_jsonl(tmp_path / "run" / "timings.jsonl")[1], "times belong to their step"
    environment = json.loads((tmp_path / "run" / "environment.json").read_text())
    assert environment["packages"]["torch"] == importlib.metadata.version("torch")
    assert list((tmp_path / "run" / "tensorboard").iterdir())


def test_the_resolved_configuration_runs_again(tmp_path: Path) -> None:
    start(tmp_path).begin(10, 0, [])
    again = load_config(TrainDitConfig, tmp_path / "run" / "config.yaml")
    assert again == load_config(TrainDitConfig, overrides=tiny_dit_config(tmp_path))


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in its folder", "as a fork"])
def test_a_resume_says_which_settings_are_others(tmp_path: Path, elsewhere: bool) -> None:
    run = start(tmp_path)
    run.begin(10, 0, [])
    run.log(1, {"loss": 1.0}, show={})
    run.close()
    wanted = {"load_checkpoint_path": "auto"}
    if elsewhere:
        checkpoint = tmp_path / "run/checkpoints/global_step_1"
        checkpoint.mkdir(parents=True)
        (checkpoint / "manifest.json").write_text("{}")
        wanted = {"load_checkpoint_path": str(checkpoint), "output_dir": str(tmp_path / "fork")}
    log = tmp_path / ("fork" if elsewhere else "run") / "log.txt"
    run = start(tmp_path, **wanted, betas=(0.8, 0.99))
    run.begin(10, 1, [])
    run.close()
    changed = "train.betas ([0.9, 0.999] there, [0.8, 0.99] here)"
    assert f"step 2 and later have other settings than {tmp_path / 'run'}: {changed}\n" in log.read_text()
    if not elsewhere:
        said = log.read_text().count("other settings")
        run = start(tmp_path, **wanted, betas=(0.8, 0.99))
        run.begin(10, 1, [])
        run.close()
        assert log.read_text().count("other settings") == said, "nothing has changed since"


def test_a_resume_whose_settings_before_are_lost_names_none_and_one_beyond_the_end_says_so(tmp_path: Path) -> None:
    run = start(tmp_path)
    run.begin(10, 0, [])
    run.log(1, {"loss": 1.0}, show={})
    run.close()
    (tmp_path / "run/config.yaml").write_text("")
    run = start(tmp_path, load_checkpoint_path="auto")
    run.begin(10, 1, [])
    run.close()
    assert "other settings" not in (tmp_path / "run/log.txt").read_text()
    run = start(tmp_path, load_checkpoint_path="auto")
    run.begin(3, 4, [])
    run.close()
    assert (
        "the checkpoint is of step 4, and this run ends after 3: nothing is trained"
        in (tmp_path / "run/log.txt").read_text()
    )


@pytest.mark.parametrize(
    ("output_dir", "present", "left"),
    [("run", (1, 2, 10), [1]), ("fork", (1, 2, 10), [1, 2, 10]), ("run", (2, 10), [2, 10])],
    ids=["gone back", "a fork", "to a copy elsewhere"],
)
def test_what_a_run_goes_back_behind_is_not_gone_on_from(
    tmp_path: Path, output_dir: str, present: tuple[int, ...], left: list[int]
) -> None:
    run = start(tmp_path)
    run.begin(10, 0, [])
    run.log(1, {"loss": 1.0}, show={})
    run.close()
    values = json.dumps({"run_id": read_environment(tmp_path / "run")["run_id"]})
    for folder in ("copy/global_step_1", *(f"run/checkpoints/global_step_{step}" for step in present)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "state.json").write_text(values)
        (tmp_path / folder / "manifest.json").write_text("{}")
    named = tmp_path / ("run/checkpoints" if 1 in present else "copy") / "global_step_1"
    run = start(tmp_path, load_checkpoint_path=str(named), output_dir=str(tmp_path / output_dir))
    run.begin(10, 1, [])  # and is killed before it saves
    run.close()
    assert list(list_checkpoints(tmp_path / "run/checkpoints")) == left


def test_within_steps_sigterm_and_the_first_interrupt_only_ask(tmp_path: Path) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        run = start(tmp_path)
        for step in run.steps(range(2)):
            assert run.stop_requested == (step > 0)
            if step == 0:
                os.kill(os.getpid(), number)
        if number == signal.SIGINT:
            with pytest.raises(KeyboardInterrupt) as stop:
                os.kill(os.getpid(), signal.SIGINT)
            assert not isinstance(stop.value, StoppedError)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_before_the_first_step_a_signal_stops_at_once(tmp_path: Path, number: int) -> None:
    start(tmp_path)
    with pytest.raises(StoppedError, match="before the first step; nothing was trained yet") as stop:
        os.kill(os.getpid(), number)
    assert stop.value.exit_code == 143
    assert not isinstance(stop.value, Exception), "code that makes the best of broken rows would catch it"


def test_a_stop_that_was_swallowed_is_heeded_at_the_first_step(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints" / "global_step_8").mkdir(parents=True)
    run = start(tmp_path, load_checkpoint_path="auto")
    run.stop_requested = True
    with pytest.raises(StoppedError, match="since the start; the checkpoint of step 8 is untouched"):
        next(run.steps(range(3)))


def test_a_stop_while_the_model_was_made_stops_the_run_that_it_is_made_for(tmp_path: Path) -> None:
    made_by = start(tmp_path)
    assert list(made_by.steps([])) == []
    os.kill(os.getpid(), signal.SIGTERM)  # during its export
    with pytest.raises(StoppedError, match="before the first step"):
        start(tmp_path)


def test_ranks_wait_less_long_once_a_step_is_done(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, waits = start(tmp_path, timeout_s=5), []
    monkeypatch.setattr(run.mesh, "set_timeout", waits.append, raising=False)
    assert [list(waits) for _ in run.steps(range(3))] == [[], [5.0], [5.0]]


INTERRUPTED = """
import time
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar
from sfumato.config.base import Section
from sfumato.tracking.task import run_task

class Empty(Section):
    "Nothing."
    usage: ClassVar[str] = ""

def main(config):
    ThreadPoolExecutor(1).submit(time.sleep, 100)
    raise KeyboardInterrupt

run_task(main, Empty)
"""


def test_an_interrupted_run_does_not_wait_for_its_threads(tmp_path: Path) -> None:
    (tmp_path / "empty.yaml").write_text("{}")
    command = [sys.executable, "-c", INTERRUPTED, str(tmp_path / "empty.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (130, "stopped at once\n")


def test_other_ranks_write_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    run = Run(tmp_path / "run", "test", Mesh(Layout(dp_shard=2), torch.device("cpu"), rank=1))
    run.begin(10, 0, ["tensorboard"])
    run.log(1, {"loss": 1.0}, show={})
    run.say("hello")
    run.write_report()
    run.close()
    assert list((tmp_path / "run").iterdir()) == []


def test_reports_before_the_last_are_left_out_where_they_would_take_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, written = [100.0], []

    def write(output_dir: Path, ending: str) -> None:
        now[0] += 2.0
        written.append(now[0])

    monkeypatch.setattr("sfumato.tracking.report.write_report", write)
    monkeypatch.setattr("sfumato.tracking.run.time.monotonic", lambda: now[0])
    run = Run(tmp_path, "test", Mesh(Layout(), torch.device("cpu")))
    run.begin(10, 0, [])
    for later in (0.0, 30.0, 11.0, 1.0):  # 2 s of 40 are the share
        now[0] += later
        run.write_report(if_cheap=True)
    assert written == [102.0, 145.0]
    run.write_report()
    assert len(written) == 3, "the last is always written"


def test_runs_start_from_equal_generators(tmp_path: Path) -> None:
    draws = []
    for _ in range(2):
        start(tmp_path, seed=5)
        draws.append(torch.rand(3))
    assert torch.equal(*draws)


AGAIN = [
    (None, "", None),
    (None, "begins", "auto"),
    ("new", "", "new"),
    ("new", "begins", "auto"),
    ("auto", "", "auto"),
    ("elsewhere/global_step_3", "begins", "elsewhere/global_step_3"),
    ("elsewhere/global_step_3", "saves", "auto"),
]


@pytest.mark.parametrize(("named", "done", "again"), AGAIN)
def test_a_run_whose_actor_is_lost_goes_on_with_its_own_checkpoints_only(
    tmp_path: Path, named: str | None, done: str, again: str | None
) -> None:
    """Before it has begun, what stands in the folder is an earlier run's."""
    config = load_config(TrajectoryRLConfig, overrides=tiny_rl_config(tmp_path, train={"load_checkpoint_path": named}))
    root, seen = tmp_path / "run", []
    (root / "checkpoints/global_step_1").mkdir(parents=True)
    (root / "environment.json").write_text('{"run_id": "earlier"}')

    def main(config: TrajectoryRLConfig) -> None:
        seen.append(config.train.load_checkpoint_path)
        if len(seen) == 1:
            if done:
                (root / "environment.json").write_text('{"run_id": "mine"}')
            if done == "saves":
                (root / "checkpoints/global_step_2").mkdir()
            raise RoleLostError("actor", [0], "it died")

    run_again_when_lost(main, config)
    assert seen == [named, again]


def test_a_run_that_is_stopped_while_its_trackers_start_has_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*arguments: object) -> None:
        raise StoppedError("stopped by signal before the first step")

    monkeypatch.setattr("sfumato.tracking.run.build_trackers", stop)
    run = start(tmp_path)
    with pytest.raises(StoppedError):
        run.begin(10, 0, [])
    run.write_report(ending="stopped")
    run.alert(Alert("stopped", "the run was stopped"))
    run.end_trackers(143)
    run.close()
    assert (tmp_path / "run" / "report.html").is_file()


@pytest.mark.parametrize(
    ("wanted", "restarts", "job", "goes_on_with"),
    [
        ("runs/a", "1", "17", "auto"),
        ("new", "2", "17", "auto"),
        ("runs/a", "0", "17", "runs/a"),
        ("runs/a", "1", "18", "runs/a"),
        (None, "1", "17", None),
    ],
)
def test_a_job_that_slurm_queues_again_goes_on_with_its_own_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: str | None, restarts: str, job: str, goes_on_with: str
) -> None:
    """It went back to the named checkpoint each time, or with ``new`` to the first step."""
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    start(tmp_path).begin(10, 0, [])
    monkeypatch.setenv("SLURM_JOB_ID", job)
    monkeypatch.setenv("SLURM_RESTART_COUNT", restarts)
    config = load_config(TrainDitConfig, overrides=tiny_dit_config(tmp_path))
    train = config.train.model_copy(update={"load_checkpoint_path": wanted})
    assert after_requeue(config.model_copy(update={"train": train})).train.load_checkpoint_path == goes_on_with


def test_trackers_are_told_how_a_run_ends_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task without ``with`` is ended by ``run_task``: wandb lost its last steps, mlflow showed the run as running."""
    told: list[int] = []
    tracker = types.SimpleNamespace(close=told.append, log=lambda *step: None)
    monkeypatch.setattr("sfumato.tracking.run.build_trackers", lambda *arguments: [tracker])
    for error in (PreemptedError("stopped by signal after step 3"), NonFiniteError("the loss is NaN")):
        run = start(tmp_path, load_checkpoint_path="new")
        run.begin(10, 0, [])
        report_ending(ending_of(error))
        run.close()
    run = start(tmp_path, load_checkpoint_path="new")
    run.begin(10, 0, [])
    run.__exit__(NonFiniteError, NonFiniteError("the loss is NaN"), None)
    run = start(tmp_path, load_checkpoint_path="new")
    run.begin(10, 0, [])
    run.finish()
    assert told == [143, 4, 4, 0]


def test_a_tracker_that_hangs_does_not_hold_the_end_of_a_failed_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfumato.tracking.trackers.CLOSING_S", 0.05)
    said: list[str] = []
    hanging = types.SimpleNamespace(close=lambda exit_code: time.sleep(1.0))
    trackers = Trackers([], said.append)
    trackers.all = [hanging]  # pyright: ignore[reportAttributeAccessIssue]
    started = time.monotonic()
    trackers.close(4)
    assert time.monotonic() - started < 0.9 and "not told the end" in said[0]
