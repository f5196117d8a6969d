"""Weights reach an engine of another role on Ray, whole, in buckets, while it draws; wrong ones are noticed."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from sfumato.config.runtime import PoolConfig
from sfumato.errors import WeightSyncError
from sfumato.rollout.engines.served.environment import engine_environment
from sfumato.rollout.engines.served.server_process import ServerProcess
from sfumato.runtime.cluster.cluster import Cluster
from sfumato.runtime.weight_sync.fixed_tokens import Rescoring
from sfumato.runtime.weight_sync.sync import WeightSync
from tests import fused_engine
from tests.engines.test_outside_engines import SERVER, wait_for_end
from tests.ray.test_ray_roles import TRAIN


@pytest.mark.slow
def test_an_engine_on_ray_is_sent_weights_and_verified_by_rescoring(cluster: Cluster) -> None:
    pool_config = PoolConfig(processes=1, cpus=0.5)
    actor = cluster.group("actor", fused_engine.Actor, None, TRAIN, pool_config)
    sampler = cluster.group("sampler", fused_engine.Sampler, "", TRAIN, pool_config)
    cluster.wait_ready()
    rescoring = Rescoring(fused_engine.TOKENS, tolerance=0.01)
    sync = WeightSync(actor, sampler, bucket_mb=1e-4, timeout_s=60.0, rescoring=rescoring)
    for version in (1, 2):
        assert sync.publish(version).transport == "broadcast"
        result = sampler.call(fused_engine.rescored).result()
        torch.testing.assert_close(result, fused_engine.expected(version), rtol=0, atol=0.01)
    sampler.call(fused_engine.break_engine, "swaps").result()
    with pytest.raises(WeightSyncError, match=r"version 3: the log-probs of fixed tokens .* differ"):
        sync.publish(3)
    sync.reconnect()
    for role in (sampler, actor):
        role.close()


class WithServer:
    """The state of a process that has started a server, which has a child and writes into a folder."""

    def __init__(self, folder: str, _mesh: Any, _run: Any) -> None:
        self.folder = Path(folder, str(os.getpid()))
        self.folder.mkdir()
        log = self.folder.with_suffix(".log")
        command = [sys.executable, "-c", SERVER, "0"]
        environment = engine_environment(sleeps=False, tensor_parallel_size=1)
        self.server = ServerProcess("it", command, environment, log, 60, [self.folder])
        self.server.start(lambda: log.exists() and "children" in log.read_text())
        self.engine = SimpleNamespace(close=self.server.stop)


def processes_of(state: WithServer) -> tuple[int, list[int], dict[str, str], Path]:
    """This process, those of the server, the server's environment, and the folder."""
    assert state.server.pid is not None
    owner = psutil.Process(state.server.pid)
    pids = [owner.pid, *(child.pid for child in owner.children(recursive=True))]
    return os.getpid(), pids, owner.children()[0].environ(), state.folder


@pytest.mark.slow
@pytest.mark.parametrize("ends", ["is closed", "is killed by Ray", "is killed"])
def test_nothing_of_a_server_is_left_when_a_process_of_ray(ends: str, cluster: Cluster, tmp_path: Path) -> None:
    pair = PoolConfig(processes=2, cpus=0.5)
    role = cluster.group(f"server that {ends}", WithServer, str(tmp_path), TRAIN, pair)
    cluster.wait_ready()
    pid, pids, environment, folder = role.call(processes_of).result()
    assert len(pids) == 3 and folder.is_dir()
    assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"} & environment.keys()
    if ends == "is killed by Ray":
        for process in role.processes:
            process.end()
    elif ends == "is killed":
        os.kill(pid, signal.SIGKILL)
    wait = time.monotonic()
    role.close()
    wait_for_end(pids)
    print(f"ended after {time.monotonic() - wait:.1f} s")
    if ends != "is closed":  # then the run is there, and removes it
        deadline = time.monotonic() + 5
        while folder.exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
