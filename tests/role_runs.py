"""Runs of ``tasks/rl_diffusion.py`` with roles on Ray, in a process of their own, that a test disturbs from outside.

with RoleRun(write_config(config, path)) as run:
    run.wait_for_step(2)
    run.signal("sampler", signal.SIGKILL)
    assert run.wait() == 0
assert run.left() == {}
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

from sfumato.config.load import merge
from sfumato.tracking.atomic_folders import list_checkpoints
from sfumato.tracking.json_lines import read_jsonl
from tests.faults.test_resume import tensors_in, values_in
from tests.tiny import ROOT, run_task_here, tiny_rl_config, weights_in

HALF = {"cpus": 0.5}
ON_RAY = {
    "runtime": {"backend": "ray", "object_store_gb": 0.2, "pools": {"actor": HALF, "scorer": HALF}},
    "rollout": {"hybrid_engine": False},
}
SEPARATE = merge(ON_RAY, {"runtime": {"pools": {"sampler": HALF}}})
COLOCATED = merge(ON_RAY, {"rollout": {"hybrid_engine": True}})
ONE_STEP_OFF = merge(SEPARATE, {"rollout": {"async_strategy": "one-step-off"}})

LEFT_S, IDLE_S = 20.0, 120.0
"""Seconds that processes may take to go once the run has ended; those of Ray's agents, which ask its dead head."""


def role_config(tmp_path: Path, where: dict[str, Any], **overrides: Any) -> dict[str, Any]:
    """A tiny RL run that evaluates at its end only and saves after every step."""
    base = {"train": {"save_steps": 1, "max_checkpoints": 2}, "eval": {"every_steps": 1000}}
    return tiny_rl_config(tmp_path, **merge(merge(base, where), overrides))


def undisturbed(config: dict[str, Any], folder: Path) -> Path:
    """The same run in one process, which is not disturbed."""
    plain = {key: value for key, value in config.items() if key != "runtime"}
    return run_task_here("rl_diffusion", merge(plain, {"train": {"output_dir": str(folder), "save_steps": 0}}))


def assert_same(left: Path, right: Path) -> None:
    """Metrics, exported weights and the last checkpoint are equal byte by byte."""
    assert (left / "metrics.jsonl").read_bytes() == (right / "metrics.jsonl").read_bytes()
    assert weights_in(left / "hf_ckpt") == weights_in(right / "hf_ckpt")
    results = [list_checkpoints(path / "checkpoints") for path in (left, right)]
    last = [checkpoints[max(checkpoints)] for checkpoints in results]
    assert tensors_in(last[0]) == tensors_in(last[1])
    assert values_in(last[0]) == values_in(last[1])
    assert not list((left / "checkpoints").glob("*.tmp"))


class RoleRun:
    """A task in a process of its own, and all processes that it started."""

    def __init__(self, config_path: Path, *overrides: str, script: str = "tasks/rl_diffusion.py") -> None:
        """Starts it."""
        import yaml

        settings = yaml.safe_load(config_path.read_text(encoding="utf-8"))
        self.folder = Path(settings["train"]["output_dir"])
        self.log = config_path.with_suffix(".log")
        self.mark = f"MARK_{uuid.uuid4().hex}"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", self.mark: "1"}
        self._began = time.time()
        with self.log.open("wb") as file:
            self.driver = subprocess.Popen(
                [sys.executable, script, str(config_path), *overrides],
                cwd=ROOT,
                env=environment,
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def __enter__(self) -> RoleRun:
        return self

    def __exit__(self, *exception: object) -> None:
        if self.driver.poll() is None:
            self.driver.kill()
            self.driver.wait()
        for pid in self.left():
            os.kill(pid, signal.SIGKILL)

    @property
    def output(self) -> str:
        """What it wrote so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def step(self) -> int:
        """Last step in metrics.jsonl of this run; -1 before the first."""
        path = self.folder / "metrics.jsonl"
        if not path.exists() or path.stat().st_mtime < self._began:
            return -1
        return max((line["step"] for line in read_jsonl(path)), default=-1)

    def processes(self, role: str | None = None) -> list[dict[str, Any]]:
        """The live processes of a role, or of all: those in ``processes.json`` that belong to this run."""
        path = self.folder / "processes.json"
        if not path.exists():
            return []
        processes = [load for load in json.loads(path.read_text()) if role in (None, load["role"])]
        return [entry for entry in processes if is_alive(entry["pid"]) and self.mark in _text(entry["pid"], "environ")]

    def wait_for_step(self, step: int, timeout_s: float = 180.0) -> None:
        """Until metrics.jsonl has that step."""
        deadline = time.monotonic() + timeout_s
        while self.step < step:
            assert self.driver.poll() is None, f"it has ended with {self.driver.returncode}:\n{self.output}"
            assert time.monotonic() < deadline, f"step {step} does not come:\n{self.output}"
            time.sleep(0.02)

    def signal(self, role: str, number: signal.Signals, rng: random.Random | None = None) -> dict[str, Any] | None:
        """Sends a signal to a process of a role, or None when there is none. Returns which it was, and what it did."""
        if not (alive := self.processes(role)):
            return None
        chosen = (rng or random).choice(alive)
        chosen["title"] = _text(chosen["pid"], "cmdline").strip()
        try:
            os.kill(chosen["pid"], number)
        except ProcessLookupError:
            return None
        return chosen

    def wait(self, timeout_s: float = 180.0) -> int:
        """Until it ends. Returns its exit code."""
        try:
            return self.driver.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended after {timeout_s} s:\n{self.output}") from None

    def marked(self) -> dict[int, str]:
        """Processes that it started and that are alive, by id, with their commands."""
        pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        return {pid: _text(pid, "cmdline")[:100] for pid in pids if self.mark in _text(pid, "environ")}

    def left(self) -> dict[int, str]:
        """Processes that are still there some time after it has ended."""
        ended = time.monotonic()
        while result := self.marked():
            waited = time.monotonic() - ended
            agents = all("Agent" in value for value in result.values())
            if waited > (IDLE_S if agents else LEFT_S):
                break
            time.sleep(0.1)
        return result


def is_alive(pid: int) -> bool:
    """Whether a process runs, or is stopped, and is no corpse."""
    state = _text(pid, "stat").rpartition(")")[2].split()
    return bool(state) and state[0] not in "ZX"


def _text(pid: int, name: str) -> str:
    try:
        return Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
    except (OSError, ProcessLookupError):
        return ""
