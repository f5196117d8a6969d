"""Reward servers in processes of their own, as a run meets them."""

from __future__ import annotations

import atexit
import dataclasses
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.rewards.base import Sample
from sfumato.rewards.remote import RemoteReward
from tests.tiny import ROOT, write_config

FAULTY = Path(__file__).parent / "faults" / "faulty_server.py"


@dataclasses.dataclass
class ServerProcess:
    """A process that listens at ``url``."""

    url: str
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def get(self, path: str) -> str:
        """The body of an answer with status 200."""
        with urllib.request.urlopen(self.url + path, timeout=30) as answer:
            return answer.read().decode()

    def wait_for_metric(self, line: str, timeout_s: float = 30) -> None:
        """Until GET /metrics shows this line."""
        deadline = time.monotonic() + timeout_s
        while line not in self.get("/metrics").splitlines():
            assert time.monotonic() < deadline, f"no {line!r} in\n{self.get('/metrics')}"
            time.sleep(0.02)

    def end(self, number: signal.Signals = signal.SIGKILL) -> tuple[int, str]:
        """Sends a signal and waits. Returns the exit code and the rest of the output."""
        self.process.send_signal(number)
        output, _ = self.process.communicate(timeout=60)
        return self.process.returncode, output


def start_server(
    folder: Path, rewards: list[dict[str, Any]], port: int = 0, modules: Path | None = None, **settings: Any
) -> ServerProcess:
    """Starts ``python -m sfumato.rewards.server`` and waits until it serves.

    Args:
        folder: where its configuration is written.
        rewards: what it serves.
        port: 0 for a free one.
        modules: folder of modules with rewards of one's own.
        settings: other fields of its configuration.
    """
    path = write_config({"rewards": rewards, "port": port, **settings}, folder / f"server_{port}.yaml")
    command = [sys.executable, "-m", "sfumato.rewards.server", str(path)]
    paths = [str(ROOT), *([str(modules)] if modules else [])]
    process = _start(command, {"PYTHONPATH": os.pathsep.join(paths)})
    line = process.stdout.readline()
    assert line.startswith("serving "), line + process.communicate(timeout=60)[0]
    return ServerProcess(line.split()[-1], process)


def start_faulty_server(bomb: Path) -> ServerProcess:
    """Starts ``faulty_server.py``; unpickling what it sends would make the folder ``bomb``."""
    process = _start([sys.executable, str(FAULTY), str(bomb)], {})
    return ServerProcess(f"http://127.0.0.1:{process.stdout.readline().strip()}", process)


def start_judge_server() -> ServerProcess:
    """Starts ``judge_server.py``; the address ends in /v1."""
    process = _start([sys.executable, str(Path(__file__).parent / "judge_server.py")], {})
    return ServerProcess(f"http://127.0.0.1:{process.stdout.readline().strip()}/v1", process)


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    atexit.register(process.kill)  # for tests that fail half-way
    return process


def remote_reward(*urls: str, **fields: Any) -> RemoteReward:
    """A client that gives up within seconds."""
    patience = {"timeout_s": 60.0, "request_timeout_s": 30.0, "retry_for_s": 20.0}
    return RemoteReward(base_urls=urls, allow_private=True, **{**patience, **fields})


def noise_samples(count: int, group_size: int = 1, size: int = 8) -> list[Sample]:
    """Pictures of random pixels with prompts, in groups."""
    generator = np.random.default_rng(0)
    return [
        Sample(
            image=generator.integers(0, 256, (size, size, 3), dtype=np.uint8),
            prompt=f'prompt {number} "é"',
            metadata={"target": "é", "depth": {"list": [1, 2.5, None]}},
            group_id=number // group_size,
        )
        for number in range(count)
    ]
