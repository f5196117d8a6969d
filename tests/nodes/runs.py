"""Runs whose processes are on several nodes: ranks of ``train.sh``, and roles on a Ray cluster."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from sfumato.tracking.json_lines import read_jsonl
from tests.nodes.namespaces import Node, Nodes

RAY_PORT = 6379


class NodeProgram:
    """A program on a node."""

    def __init__(self, node: Node, command: Sequence[str], log: Path, **variables: str) -> None:
        self.node, self.log = node, log
        self.process = node.popen(command, log, **variables)

    @property
    def output(self) -> str:
        """What it wrote so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def wait(self, timeout_s: float = 300.0) -> int:
        """Until it ends. Returns its exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it has not ended after {timeout_s} s:\n{self.output}") from None

    def wait_until(self, condition: Callable[[], bool], what: str, timeout_s: float = 240.0) -> None:
        """Until something holds while it runs."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert self.process.poll() is None, f"it has ended with {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < deadline, f"{what} does not come:\n{self.output}"
            time.sleep(0.05)

    def wait_for_text(self, text: str, timeout_s: float = 240.0) -> None:
        """Until it has written that."""
        self.wait_until(lambda: text in self.output, repr(text), timeout_s)

    def wait_for_step(self, folder: Path, step: int, timeout_s: float = 300.0) -> None:
        """Until metrics.jsonl has that step."""
        self.wait_until(lambda: last_step(folder) >= step, f"step {step}", timeout_s)

    def signal(self, name: str) -> None:
        """Sends it a signal: to the first process of the program on the node, whose wrapper stands outside."""
        wrapper = self.process.pid
        (child,) = Path(f"/proc/{wrapper}/task/{wrapper}/children").read_text().split()
        inside = next(line for line in Path(f"/proc/{child}/status").read_text().splitlines() if "NSpid" in line)
        self.node.signal(name, [int(inside.split()[-1])])


PORTS = itertools.count(29500)
"""Each run has its own, so that one that a test has left does not fail the next."""


def last_step(folder: Path) -> int:
    """In metrics.jsonl; -1 before the first."""
    path = folder / "metrics.jsonl"
    return max((line["step"] for line in read_jsonl(path)), default=-1) if path.exists() else -1


def start_ranks(
    nodes: Nodes, names: Sequence[str], config: Path, *overrides: str, task: str, processes: int = 1
) -> list[NodeProgram]:
    """So many ranks of a task on each of the nodes."""
    common = {"NNODES": str(len(names)), "NPROC_PER_NODE": str(processes), "MASTER_ADDR": nodes[names[0]].address}
    common["MASTER_PORT"] = str(next(PORTS))
    return [
        NodeProgram(
            nodes[name],
            ["bash", "train.sh", f"tasks/{task}.py", str(config), *overrides],
            config.with_name(f"{config.stem}.{name}.log"),
            PYTHON=sys.executable,
            NODE_RANK=str(rank),
            **common,
        )
        for rank, name in enumerate(names)
    ]


class RayNodes:
    """Ray on nodes: its head on the first."""

    def __init__(self, nodes: Nodes, folder: Path, cpus: dict[str, int]) -> None:
        self.nodes, self.folder, self.cpus = nodes, folder, cpus
        self.head = next(iter(cpus))
        self.address = f"{nodes[self.head].address}:{RAY_PORT}"
        self.programs: dict[str, NodeProgram] = {}
        self.start(*cpus)

    def start(self, *names: str) -> None:
        """Starts Ray on nodes that have none, and waits until they have joined."""
        for name in names:
            node, is_head = self.nodes[name], name == self.head
            head = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
            where = head if is_head else [f"--address={self.address}"]
            options = ["--block", f"--num-cpus={self.cpus[name]}", "--object-store-memory=100000000"]
            log = self.folder / f"ray.{name}.log"
            log.unlink(missing_ok=True)
            command = [sys.executable, "-m", "ray.scripts.scripts", "start", *where, *options]
            self.programs[name] = NodeProgram(node, [*command, f"--node-ip-address={node.address}"], log)
            if is_head:
                self.programs[name].wait_for_text("block forever")
        for name in names:
            self.programs[name].wait_for_text("block forever")

    def run(self, config: Path, *overrides: str) -> NodeProgram:
        """A driver on the head's node."""
        command = [sys.executable, "tasks/rl_diffusion.py", str(config), "--runtime.address", self.address, *overrides]
        return NodeProgram(self.nodes[self.head], command, config.with_suffix(".log"))

    def close(self) -> None:
        """Ends Ray; the nodes stay."""
        for name, program in reversed(self.programs.items()):
            if self.nodes[name].is_alive and program.process.poll() is None:
                program.signal("TERM")
        for program in self.programs.values():
            program.wait(60)


def hosts_of(folder: Path, role: str) -> set[str]:
    """Where a role's processes are, by ``processes.json``."""
    path = folder / "processes.json"
    messages: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    return {message["host"] for message in messages if message["role"] == role}
