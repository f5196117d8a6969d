"""Processes of roles that hang, crash or end without notice: found in time, and explained."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from sfumato.config.runtime import PoolConfig
from sfumato.config.sections import TrainConfig
from sfumato.errors import ConfigError, RoleLostError
from sfumato.runtime.cluster import loop as loop_module
from sfumato.runtime.cluster.cluster import Cluster
from sfumato.runtime.cluster.role import RayGroup
from tests.ray import role_functions as functions

pytestmark = pytest.mark.slow

TRAIN = TrainConfig(output_dir="unused", data_parallel_mode="ddp", device="cpu")


@pytest.fixture
def group(cluster: Cluster, request: pytest.FixtureRequest) -> Iterator[RayGroup]:
    made = cluster.group("sampler", functions.build, "samplers", TRAIN, PoolConfig(processes=2))
    made.wait_ready()
    yield made
    made.close()


def patience(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, **seconds: float) -> None:
    monkeypatch.setattr(cluster.loop, "config", cluster.config.model_copy(update=seconds))


def test_a_stopped_process_is_found(cluster: Cluster, group: RayGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    patience(cluster, monkeypatch, heartbeat_s=2.0)
    running = group.call(functions.sum_over_ranks, 1.0)
    stopped = group.processes[1].identity
    assert stopped is not None and running.result() == 3.0
    os.kill(stopped.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(
        RoleLostError, match=f"rank 1: process {stopped.pid} on .* does not answer since [23] s"
    ) as lost:
        group.call(functions.sum_over_ranks, 1.0).result()
    assert 2.0 <= time.monotonic() - started < 8 and "it had been given sum_over_ranks" in lost.value.reason
    deadline = time.monotonic() + 5
    while Path(f"/proc/{stopped.pid}").exists():
        assert time.monotonic() < deadline, "it is killed although it is stopped"
        time.sleep(0.05)


def test_a_long_call_that_answers_is_left_alone(
    cluster: Cluster, group: RayGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    patience(cluster, monkeypatch, heartbeat_s=1.0)
    assert group.call(functions.sleep_in_rank, 1, 5.0).result() == 0
    running = group.call(functions.sleep_in_rank, 1, 4.0)
    time.sleep(3)  # the driver does something else, and hears nobody
    assert running.result() == 0


def test_a_hang_shows_the_stacks(cluster: Cluster, group: RayGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    patience(cluster, monkeypatch, call_timeout_s=3.0, heartbeat_s=2.0)
    with pytest.raises(RoleLostError, match=r"rank 1: sleep_in_rank has not ended after [345] s") as lost:
        group.call(functions.sleep_in_rank, 1, 1000.0).result()
    stacks = (cluster.run.output_dir / "stacks_sampler.txt").read_text()
    assert "in sleep_in_rank\n    time.sleep(seconds)" in stacks.partition("sampler rank 1")[2]
    assert "sampler rank 0" in stacks and stacks in (cluster.run.output_dir / "log.txt").read_text()
    assert "stacks_sampler.txt" in lost.value.reason


def test_a_late_start_is_found(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    patience(cluster, monkeypatch, call_timeout_s=6.0, max_restarts=0)
    role = cluster.group("reader", functions.build_slowly, 1000.0, TRAIN, PoolConfig())
    with pytest.raises(RoleLostError, match="build_state has not ended"):
        role.wait_ready()
    role.close()


def test_a_group_that_is_lost_while_it_starts_is_replaced(cluster: Cluster) -> None:
    role = cluster.group("reader", functions.build_slowly, 3.0, TRAIN, PoolConfig(processes=2))
    deadline = time.monotonic() + 60
    while not role.processes[1].identity:
        assert time.monotonic() < deadline
        cluster.loop.turn(0.1)
    os.kill(role.processes[1].identity.pid, signal.SIGKILL)
    role.wait_ready()
    assert role.num_restarts == 1 and role.call(functions.where).result()
    role.close()


@pytest.mark.parametrize(
    ("function", "args", "texts"),
    [
        (functions.crash, (), ["Segmentation fault", "about to crash", "role_functions.py", "in crash"]),
        (functions.leave, (3,), ["last words", "has died"]),
    ],
)
def test_the_last_words_of_a_dead_process(cluster: Cluster, group: RayGroup, function, args, texts) -> None:
    with pytest.raises(RoleLostError) as lost:
        group.call(function, *args).result()
    for text in texts:
        assert text in str(lost.value)


def test_a_call_that_kills_every_process_is_given_up(cluster: Cluster) -> None:
    pool = cluster.pool("scorer", functions.build, None, TRAIN, PoolConfig(processes=2))
    with pytest.raises(RoleLostError, match=r"replaced already \(runtime.max_restarts\)"):
        pool.submit(functions.crash).result()
    with pytest.raises(RoleLostError):
        pool.submit(functions.where).result()
    pool.close()


def test_restarts_are_counted(cluster: Cluster, group: RayGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    patience(cluster, monkeypatch, max_restarts=1)
    under_way = group.call(functions.sleep_in_rank, 1, 60.0)
    group.restart()
    with pytest.raises(RoleLostError, match="being replaced"):
        under_way.result()
    assert group.call(functions.sum_over_ranks, 1.0).result() == 3.0
    with pytest.raises(RoleLostError, match=r"replaced 1 times already \(runtime.max_restarts\)"):
        group.restart()


def test_a_pool_does_not_wait_together(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "GRACE_S", 1.0)
    pool = cluster.pool("scorer", functions.build, None, TRAIN, PoolConfig(processes=2))
    with pytest.raises(KeyError):
        pool.map(functions.sleep_or_raise, [5.0, -1.0]).result()
    assert pool.call(functions.where).result() and pool.num_restarts == 0
    pool.close()


def test_a_rank_that_waits_for_one_that_failed(cluster: Cluster, group: RayGroup) -> None:
    with pytest.raises(ValueError, match="only here"):
        group.call(functions.fail_on_rank, 1).result()
    with pytest.raises(RoleLostError, match="after another rank had raised an error"):
        group.call(functions.where).result()


def test_ranks_that_cannot_reach_each_other_are_a_lost_role(cluster: Cluster, group: RayGroup) -> None:
    """Not the traceback of their process group, with which the run would end."""
    with pytest.raises(
        RoleLostError, match=r"role sampler, ranks 0, 1: its ranks have lost each other: .*gloo/transport"
    ):
        group.call(functions.lose_each_other).result()
    group.restart()
    assert group.call(functions.sum_over_ranks, 1.0).result() == 3.0


def test_other_versions_are_refused(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sfumato.__version__", "0.0.7")
    role = cluster.group("reader", functions.build, None, TRAIN, PoolConfig())
    with pytest.raises(
        ConfigError, match=r"rank 0 of role reader runs, has sfumato .* \(0.0.7 here\): install the same"
    ):
        role.wait_ready()
    role.close()
