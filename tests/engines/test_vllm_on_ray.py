"""Two processes of a sampler on Ray, each with a real vLLM: versions that both apply, what is drawn after one was lost,
and what a run leaves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import pytest

from sfumato.tracking.json_lines import read_jsonl
from tests.engines.served_model import CPU_ENVIRONMENT, NEEDS_VLLM, vllm_program, write_byte_model
from tests.engines.test_vllm_in_run import drawn_in
from tests.role_runs import RoleRun
from tests.tiny import tiny_text_rl_config, write_config

pytestmark = NEEDS_VLLM

STEPS = 5
LIMIT_S = 900.0


def config_of(folder: Path, model: Path, name: str = "run", **rollout: Any) -> dict[str, Any]:
    """A run of five iterations; weights are sent before the first and after each."""
    engine = {
        "type": "vllm",
        "program": vllm_program(),
        "arguments": ["--enforce-eager"],
        "environment": CPU_ENVIRONMENT,
        "dtype": "float32",
        "max_model_len": 256,
    }
    pools = {"actor": {"cpus": 0.5}, "sampler": {"processes": 2, "cpus": 0.5}, "scorer": {"cpus": 0.5}}
    return tiny_text_rl_config(
        folder,
        model={"config_path": None, "tokenizer_path": None, "model_path": str(model)},
        rollout={
            "hybrid_engine": False,
            "engine": engine,
            "temperature": 0.8,
            "max_new_tokens": 150,
            "dump": True,
            **rollout,
        },
        runtime={
            "backend": "ray",
            "weight_sync": "broadcast",
            "object_store_gb": 0.2,
            "heartbeat_s": 60.0,
            "pools": pools,
        },
        train={"max_steps": STEPS, "lr": 1e-2, "output_dir": str(folder / name)},
    )


class EngineRun(RoleRun):
    """A run whose processes, those of engines among them, are noted while it goes on: an engine's core overwrites the
    environment by which others are recognised."""

    def __init__(self, config_path: Path) -> None:
        super().__init__(config_path, script="tasks/rl_text.py")
        self.seen: dict[int, psutil.Process] = {}
        self._ended = Event()
        self._watcher = Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._watcher.join()
        super().__exit__(*exception)
        for process in self.alive():
            process.kill()

    def _watch(self) -> None:
        while not self._ended.wait(3):
            self.note()

    def note(self) -> None:
        """Adds those that run now."""
        for pid in self.marked():
            try:
                process = psutil.Process(pid)
                for member in (process, *process.children(recursive=True)):
                    self.seen.setdefault(member.pid, member)
            except psutil.NoSuchProcess:
                continue

    def alive(self) -> list[psutil.Process]:
        """Those of all that were seen which still run."""
        return [value for value in self.seen.values() if value.is_running() and value.status() != psutil.STATUS_ZOMBIE]

    def owners(self) -> list[psutil.Process]:
        """The owners of the engines that run now, the older first."""
        self.note()
        owners = [process for process in self.alive() if any("owner_process" in word for word in command_of(process))]
        return sorted((owner for owner in owners if owner.children()), key=psutil.Process.create_time)

    def wait_until(self, what: Callable[[], bool]) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not what():
            assert self.driver.poll() is None, f"it has ended with {self.driver.returncode}:\n{self.output}"
            assert time.monotonic() < deadline, self.output
            time.sleep(0.05)

    def assert_nothing_is_left(self) -> None:
        """That no process is there a while after the end, and no memory or folder of weights."""
        self.note()
        assert len(self.seen) > 8, "two engines of three processes, three roles, the driver"
        ended = time.monotonic()
        while remaining := [(process.pid, command_of(process)) for process in self.alive()]:
            # Ray's agents ask its dead head for a minute; without a command is what ends just now.
            agents_alone = all(not command or "agent" in " ".join(command).lower() for _, command in remaining)
            assert time.monotonic() - ended < (120 if agents_alone else 30), remaining
            time.sleep(0.2)
        print(f"{len(self.seen)} processes have gone {time.monotonic() - ended:.1f} s after the end")
        assert not [path for path in (self.folder / "weights").glob("*/*/*") if path.exists()]


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def is_drawing(owner: psutil.Process) -> bool:
    """Whether an engine works: its core uses a processor now."""
    cores = [child for child in owner.children(recursive=True) if "EngineCore" in " ".join(command_of(child))]
    return any(core.cpu_percent(0.1) > 20 for core in cores)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_byte_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    with EngineRun(write_config(config_of(folder, model), folder / "run.yaml")) as run:
        assert run.wait(LIMIT_S) == 0, run.output
        run.assert_nothing_is_left()
    return run.folder


def applied_versions(folder: Path, rank: int) -> list[int]:
    """The versions of the weights that a rank of the sampler received and applied, by the timeline."""
    lines = read_jsonl(folder / "timeline.jsonl")
    of_rank = [line for line in lines if (line["role"], line["rank"], line["kind"]) == ("sampler", rank, "sync")]
    return sorted({entry["version"] for entry in of_rank if "version" in entry})


def test_two_engines_on_ray_are_sent_four_updates_as_tensors(undisturbed: Path) -> None:
    lines = [line for line in read_jsonl(undisturbed / "metrics.jsonl") if "mismatch/log_ratio_max" in line]
    assert len(lines) == STEPS and all(0 < line["mismatch/log_ratio_max"] < 3e-5 for line in lines)
    assert [applied_versions(undisturbed, rank) for rank in (0, 1)] == [[0, 1, 2, 3, 4, 5]] * 2
    tokens = [drawn_in(undisturbed, step) for step in range(1, STEPS + 1)]
    assert all(len(of_step) == 16 for of_step in tokens)


def assert_same_tokens(folder: Path, undisturbed: Path) -> None:
    for step in range(1, STEPS + 1):
        assert drawn_in(folder, step) == drawn_in(undisturbed, step), f"iteration {step}"
    ours, theirs = (read_jsonl(path / "metrics.jsonl") for path in (folder, undisturbed))
    for line, expected in zip(ours, theirs, strict=True):  # batches of other sizes round otherwise
        assert line == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_engines_that_are_killed_one_after_the_other_draw_the_same_tokens(
    model: Path, undisturbed: Path, tmp_path: Path
) -> None:
    with EngineRun(write_config(config_of(tmp_path, model), tmp_path / "run.yaml")) as run:
        run.wait_until(lambda: run.step >= 1)
        first, second = run.owners()
        run.wait_until(lambda: is_drawing(first))
        for process in first.children(recursive=True):
            process.kill()
        run.wait_until(lambda: run.step >= 3)
        run.wait_until(lambda: is_drawing(second))
        second.kill()  # and nobody else: its server has to notice
        assert run.wait(LIMIT_S) == 0, run.output
        run.assert_nothing_is_left()
    assert run.output.count("it is started anew, 1 of 3 times") == 2, run.output
    assert_same_tokens(run.folder, undisturbed)


def test_a_sampler_that_is_killed_with_its_engine_draws_the_same_tokens(
    model: Path, undisturbed: Path, tmp_path: Path
) -> None:
    with EngineRun(write_config(config_of(tmp_path, model), tmp_path / "run.yaml")) as run:
        run.wait_until(lambda: run.step >= 2)
        owners = run.owners()
        run.wait_until(lambda: is_drawing(owners[0]))
        assert run.signal("sampler", signal.SIGKILL)
        assert run.wait(LIMIT_S) == 0, run.output
        run.assert_nothing_is_left()
    assert "role sampler" in run.output and "has died" in run.output, run.output
    assert_same_tokens(run.folder, undisturbed)


@pytest.mark.parametrize("ending", ["SIGKILL", "Ctrl-C"])
def test_nothing_is_left_of_a_run_that_is_ended(ending: str, model: Path, tmp_path: Path) -> None:
    with EngineRun(write_config(config_of(tmp_path, model), tmp_path / "run.yaml")) as run:
        run.wait_until(lambda: run.step >= 1)
        first, _ = run.owners()
        run.wait_until(lambda: is_drawing(first))
        if ending == "SIGKILL":
            run.driver.kill()
        else:  # the terminal signals all processes of the foreground
            os.killpg(run.driver.pid, signal.SIGINT)
        code = run.wait(LIMIT_S)
        assert code == {"SIGKILL": -9, "Ctrl-C": 143}[ending], run.output
        run.assert_nothing_is_left()
