"""Clusters: whatever ends a run, no process of it stays behind; one that was there is joined, and left running."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from sfumato.config.runtime import PoolConfig, RuntimeConfig
from sfumato.config.sections import TrainConfig
from sfumato.errors import RoleLostError
from sfumato.runtime.cluster.cluster import start_cluster
from tests.ray import role_functions as functions
from tests.ray.conftest import run_in
from tests.tiny import ROOT

pytestmark = pytest.mark.slow

TRAIN = TrainConfig(output_dir="unused", data_parallel_mode="ddp", device="cpu")
DRIVER = """
import os, sys
from pathlib import Path
from sfumato.config.runtime import PoolConfig, RuntimeConfig
from sfumato.config.sections import TrainConfig
from sfumato.runtime.cluster.cluster import start_cluster
from tests.ray import role_functions as functions
from tests.ray.conftest import run_in
config = RuntimeConfig(backend="ray", object_store_gb=0.2)
train = TrainConfig(output_dir="unused", data_parallel_mode="ddp", device="cpu")
if sys.argv[2] == "starts twice":  # as a run does whose actor was lost
    with start_cluster(config, run_in(Path(sys.argv[1])), num_cpus=1) as cluster:
        role = cluster.group("actor", functions.build, None, train, PoolConfig())
        cluster.wait_ready()
        role.call(functions.score, 1, 0.0).result()
with start_cluster(config, run_in(Path(sys.argv[1])), num_cpus=2) as cluster:
    role = cluster.group("sampler", functions.build, None, train, PoolConfig(processes=2))
    cluster.wait_ready()
    running = role.call(functions.sleep_in_rank, 1, 600.0)
    print("running", flush=True)
    if sys.argv[2] == "leaves":
        os._exit(3)
    if sys.argv[2] == "raises":
        raise OSError("no reason")
    if sys.argv[2] == "waits":
        running.result()
"""


def marked(mark: str) -> dict[int, str]:
    """Processes that inherited the mark, by id."""
    results = {}
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (path / "environ").read_bytes():
                results[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:100]
        except (OSError, ProcessLookupError):
            continue
    return results


@pytest.mark.parametrize("end", ["finishes", "starts twice", "raises", "leaves", signal.SIGKILL, signal.SIGINT])
def test_nothing_stays_behind(end: str | signal.Signals, tmp_path: Path) -> None:
    mark = f"MARK_{uuid.uuid4().hex}"
    ends_itself = isinstance(end, str)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(tmp_path), end if ends_itself else "waits"],
        env={**os.environ, mark: "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        process_group=0,
    )
    assert driver.stdout is not None
    assert "running" in driver.stdout.readline()
    if not ends_itself:
        time.sleep(0.5)
        assert len(marked(mark)) > 4
        if end == signal.SIGINT:
            os.killpg(driver.pid, signal.SIGINT)  # as Ctrl-C at a terminal does
        else:
            driver.kill()
    driver.wait(60)
    gone = time.monotonic()
    while remaining := marked(mark):
        waited = time.monotonic() - gone
        # agents ask Ray's dead head for a minute
        idle = {pid: value for pid, value in remaining.items() if "Agent" in value}
        assert waited < 20 or (remaining == idle and waited < 120), remaining
        time.sleep(0.1)


def start_node(mark: str, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    command = [str(Path(sys.executable).with_name("ray")), "start", "--block", "--num-cpus=2", *arguments]
    env = {**os.environ, mark: "1", "RAY_USAGE_STATS_ENABLED": "0"}
    env.pop("PYTHONPATH", None)  # the driver says where its modules are
    with (folder / f"node{len(list(folder.iterdir()))}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, "--object-store-memory=200000000"], env=env, stdout=log, stderr=log, process_group=0
        )


def test_two_nodes_of_a_cluster_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raylets of one machine stand for two; processes beyond the driver's own node are killed and read through Ray."""
    import ray

    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    mark = f"MARK_{uuid.uuid4().hex}"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    nodes = [start_node(mark, tmp_path, "--head", f"--port={address.partition(':')[2]}", "--include-dashboard=false")]
    try:
        wait_for_port(address)
        nodes.append(start_node(mark, tmp_path, f"--address={address}"))
        config = RuntimeConfig(backend="ray", address=address, heartbeat_s=3.0, call_timeout_s=120.0)
        with start_cluster(config, run_in(tmp_path)) as cluster:
            deadline = time.monotonic() + 60
            while sum(node["Alive"] for node in ray.nodes()) < 2:  # what no node has room for is refused at once
                assert time.monotonic() < deadline
                time.sleep(0.1)
            role = cluster.group("sampler", functions.build, None, TRAIN, PoolConfig(processes=3))
            role.wait_ready()
            assert role.call(functions.sum_over_ranks, 1.0).result() == 6.0
            node_id = ray.get_runtime_context().get_node_id()
            far = next(
                process for process in role.processes if process.identity and process.identity.node_id != node_id
            )
            assert far.identity is not None
            os.kill(far.identity.pid, signal.SIGSTOP)
            with pytest.raises(RoleLostError, match=f"process {far.identity.pid} .* does not answer"):
                role.call(functions.sum_over_ranks, 1.0).result()
            deadline = time.monotonic() + 20
            while Path(f"/proc/{far.identity.pid}").exists():
                assert time.monotonic() < deadline
                time.sleep(0.1)
            role.restart()
            rank = next(
                process.rank for process in role.processes if process.identity and process.identity.node_id != node_id
            )
            with pytest.raises(RoleLostError, match=r"Segmentation fault[\s\S]*about to crash"):
                role.call(functions.crash_in, rank).result()
        assert all(node.poll() is None for node in nodes), "a cluster that was joined is left running"
    finally:
        for node in reversed(nodes):
            node.terminate()
        for node in nodes:
            node.wait(60)
    assert not marked(mark)


def wait_for_port(address: str) -> None:
    host, _, port = address.partition(":")
    deadline = time.monotonic() + 60
    while True:
        with socket.socket() as tried:
            if tried.connect_ex((host, int(port))) == 0:
                return
        assert time.monotonic() < deadline
        time.sleep(0.2)
