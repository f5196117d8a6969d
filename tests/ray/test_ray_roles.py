"""Groups and pools on a real Ray cluster: the verbs, the values' ways, errors, and replacement of dead processes."""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from sfumato.commands.doctor_reach import open_ports
from sfumato.config.runtime import PoolConfig, RuntimeConfig
from sfumato.config.sections import TrainConfig
from sfumato.errors import ConfigError, NonFiniteError, PreemptedError, RoleLostError, UserError
from sfumato.runtime.cluster import loop as loop_module
from sfumato.runtime.cluster import placement as placement_module
from sfumato.runtime.cluster import role as role_module
from sfumato.runtime.cluster.cluster import Cluster, start_cluster
from sfumato.runtime.cluster.packing import pack, size_of, unpack
from sfumato.runtime.cluster.placement import Reserver
from sfumato.runtime.cluster.role import RayGroup, RayPool
from sfumato.runtime.roles import label_calls
from sfumato.tracking.shared_folder import Token
from tests.ray import role_functions as functions
from tests.ray.role_functions import OddError

TRAIN = TrainConfig(output_dir="unused", data_parallel_mode="ddp", device="cpu")
TWO = PoolConfig(processes=2, cpus=0.5)


@pytest.fixture(scope="module")
def pool(cluster: Cluster) -> RayPool:
    return cluster.pool("scorer", functions.build, "scorers", TRAIN, TWO)


@pytest.fixture(scope="module")
def group(cluster: Cluster, pool: RayPool) -> RayGroup:
    made = cluster.group("sampler", functions.build, "samplers", TRAIN, TWO)
    cluster.wait_ready()
    return made


@pytest.fixture(scope="module")
def tensor_parallel(cluster: Cluster, group: RayGroup) -> Iterator[RayGroup]:
    """Both processes belong to the same data-parallel rank."""
    train = TRAIN.model_copy(update={"tensor_parallel_size": 2, "data_parallel_mode": "fsdp2"})
    made = cluster.group("actor", functions.build, "actors", train, TWO)
    yield made
    made.close()


def test_a_group_has_a_process_group_of_its_own(group: RayGroup, pool: RayPool) -> None:
    assert group.num_data_ranks == 2 and group.data_ranks == range(2)
    assert group.call(functions.sum_over_ranks, 1.5).result() == 1.5 + 3.0
    seen = group.call(functions.environment).result()
    assert (seen["RANK"], seen["WORLD_SIZE"], seen["OMP_NUM_THREADS"], seen["threads"]) == ("0", "2", "1", "1")
    assert seen["MKL_CBWR"] == "AUTO,STRICT"
    processes = [psutil.Process(process.identity.pid) for process in group.processes]
    assert {process.nice() for process in processes} == {psutil.Process().nice()}, "they train: nothing comes first"
    alone = pool.call(functions.environment).result()
    assert (alone["RANK"], alone["WORLD_SIZE"]) == ("0", "1")
    assert group.call(functions.sum_over_ranks, 2.0).result() == 6.0, "the function is known by now"


def test_what_is_said_at_the_start_is_said_once(cluster: Cluster, group: RayGroup) -> None:
    said = (cluster.run.output_dir / "log.txt").read_text().splitlines()
    assert said.count("built with scorers") == said.count("built with samplers") == 1


def test_calls_run_in_the_order_of_issue(group: RayGroup) -> None:
    waited = [group.call(functions.remember, number, 0.05 * (number == 0)) for number in range(4)]
    assert waited[-1].result() == [0, 1, 2, 3]
    assert all(future.done() for future in waited)


@pytest.mark.slow
def test_parts_go_to_their_data_parallel_ranks(group: RayGroup, tensor_parallel: RayGroup) -> None:
    assert group.map(functions.data_rank_of, ["a", "b"], "!").result() == "[(0, 'a!'), (1, 'b!')]"
    assert tensor_parallel.num_data_ranks == 1
    assert tensor_parallel.map(functions.data_rank_of, ["a"], "!").result() == "[(0, 'a!'), (0, 'a!')]"
    with pytest.raises(ValueError, match="2 data-parallel ranks, but there are 1 parts"):
        group.map(functions.data_rank_of, ["a"], "!")


def test_values_stay_where_they_are_made(cluster: Cluster, group: RayGroup, pool: RayPool) -> None:
    """What the driver handles does not grow with the values, which may be nested anywhere among arguments."""

    def through_the_driver(size: int) -> int:
        before = sum(cluster.loop.driver_bytes.values())
        handles = group.map_remote(functions.make, [0, 1], size, num_values=2)
        total = pool.submit(functions.add_up, [(first, (second,)) for first, second in handles], 2.0).result()
        assert total == 2 * size * (2.0 + 10 + 3.0 + 11)
        assert all(second.done() and second.nbytes >= 4 * size for _, second in handles)
        return sum(cluster.loop.driver_bytes.values()) - before

    through_the_driver(100_000)  # functions travel the first time
    small, large = through_the_driver(100_000), through_the_driver(1_000_000)
    assert small == large < 10_000


@pytest.mark.parametrize(
    ("processes", "role"), [("group", "sampler"), pytest.param("tensor_parallel", "actor", marks=pytest.mark.slow)]
)
def test_a_value_can_be_fetched(processes: str, role: str, cluster: Cluster, request: pytest.FixtureRequest) -> None:
    group = request.getfixturevalue(processes)
    (first, second), *_ = group.map_remote(functions.make, [5] * group.num_data_ranks, 70_000, num_values=2)
    before = cluster.loop.driver_bytes[role]
    assert torch.equal(first.fetch()["tensor"], torch.full((70_000,), 6.0, dtype=torch.bfloat16))
    assert cluster.loop.driver_bytes[role] - before > 140_000
    assert second.nbytes > 280_000


def test_a_value_whose_call_failed(group: RayGroup, pool: RayPool) -> None:
    ((first,), _) = group.map_remote(functions.raise_error, ["nan", "nan"])
    with pytest.raises(NonFiniteError, match="loss of step 3"):
        pool.submit(functions.has_part, [first]).result()
    with pytest.raises(ValueError, match="returned 2 values, 3 were to be kept"):
        group.map_remote(functions.make, [0, 1], 4, num_values=3)[0][0].fetch()


def test_a_concurrent_call_runs_beside_the_others(group: RayGroup) -> None:
    busy = group.call(functions.score, 1, 1.0)
    assert group.call_concurrently(functions.numbers).result() is not None
    assert not busy.done()
    assert busy.result() == 2


def test_a_pool_shares_the_work_and_overtakes(group: RayGroup, pool: RayPool) -> None:
    ((slow,), _) = group.map_remote(functions.score, [1, 1], 1.0)
    waiting = pool.submit(functions.has_part, slow)
    pids = {pool.submit(functions.where).result() for _ in range(2)}
    both = [pool.submit(functions.score, value, 0.3) for value in range(2)]
    assert [future.result() for future in both] == [0, 2]
    assert not waiting.done(), "others do not wait for its argument"
    assert waiting.result() == 2 and pids <= {process.identity.pid for process in pool.processes if process.identity}


@pytest.mark.parametrize(
    ("kind", "expected", "text"),
    [
        ("odd", OddError, "a row is broken"),
        ("nan", NonFiniteError, "loss of step 3 is nan"),
        ("unpicklable", RuntimeError, "UnpicklableError: 1 and 2"),
        ("exit", RuntimeError, r"SystemExit\(3\)"),
        ("key", KeyError, "no such key"),
    ],
)
def test_errors_keep_their_class_and_name_the_place(
    group: RayGroup, kind: str, expected: type[Exception], text: str
) -> None:
    with pytest.raises(expected, match=text) as caught:
        group.call(functions.raise_error, kind).result()
    assert type(caught.value) is expected
    assert "in role sampler, rank" in caught.value.__notes__[0] and "raise_error" in str(caught.value.__cause__)
    if isinstance(caught.value, OddError):
        assert caught.value.row == 12 and caught.value.exit_code == 77


def test_what_a_process_says_and_does_is_heard(
    cluster: Cluster, group: RayGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: dict[str, float] = {}
    monkeypatch.setattr(cluster.run, "add_time", lambda name, seconds: timed.update({name: seconds}))
    cluster.record.pop_events()
    told: list[str] = []
    cluster.on_progress(lambda: told.append("progress"))
    before = time.time()
    with label_calls(cluster.record, 7, 2):
        future = group.call(functions.talk, "hello", kind="update")
    future.result()
    cluster.on_progress(None)
    assert (cluster.run.output_dir / "log.txt").read_text().count("said hello\n") == 1
    assert timed == {"talk": 2.0} and told == ["progress"]
    events = sorted(cluster.record.pop_events(), key=lambda event: event.rank)
    assert [(event.role, event.rank, event.kind, event.step, event.version) for event in events] == [
        ("sampler", rank, "update", 7, 2) for rank in range(2)
    ]
    assert all(before - 0.1 <= event.start <= event.end <= time.time() + 0.1 for event in events)
    cluster.take_timings()
    group.call(functions.has_part, b"x" * 1000).result()
    measured = cluster.take_timings()
    assert 3000 < measured["driver_bytes/sampler"] < 6000
    assert min(measured["memory/sampler_process_peak_mib"], measured["memory/sampler_process_mib"]) > 50
    assert not any("gpu" in name for name in measured), "no process has touched a GPU"
    assert cluster.take_timings()["driver_bytes/sampler"] == 0


def test_a_line_whose_heartbeat_nobody_reads_is_heard_with_the_next_reply(
    cluster: Cluster, group: RayGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer to a heartbeat may come after the reply, or be dropped when the process has no more open calls."""
    import ray

    heard: list[str] = []
    monkeypatch.setattr(cluster.run, "say", heard.append)
    first = group.processes[0]
    group.call(functions.say_and_wait, "hello", 0.0).result()
    future = group.call(functions.say_and_wait, "early", 0.5)
    time.sleep(0.2)
    _, said, _ = ray.get(first.ask_for_heartbeat())
    assert said.lines == ["said early"], "what was heard with a reply is not repeated"
    future.result()
    _, said, _ = ray.get(first.ask_for_heartbeat())
    assert said.lines == []
    assert heard == ["said hello", "said early"]


def test_a_data_parallel_rank_without_work(cluster: Cluster, group: RayGroup) -> None:
    cluster.record.pop_events()
    none, (first, second) = group.map_remote(functions.make, [None, 3], 5, num_values=2)
    assert none == ()
    while not first.done():
        cluster.wait([first])
    second.check()
    assert first.fetch()["rank"] == 1 and second.fetch().tolist() == [13.0] * 5
    assert first.seconds > 0 and second.nbytes > 20
    assert [event.rank for event in cluster.record.pop_events()] == [1], "its processes are not called"


def test_values_are_freed_at_once(cluster: Cluster, group: RayGroup, pool: RayPool) -> None:
    """Not when Python looks for cycles of references: the object store would be full by then."""
    gc.disable()
    try:
        (made, _) = group.map_remote(functions.make, [0, 1], 100_000, num_values=2)
        pool.submit(functions.has_part, made[0]).result()
        values = [weakref.ref(handle) for handle in made]
        del made
        assert [value() for value in values] == [None, None]
    finally:
        gc.enable()


def test_values_of_some_kilobytes_stay_away_too(cluster: Cluster, group: RayGroup) -> None:
    import ray

    ((_, second), _) = group.map_remote(functions.make, [0, 1], 5_000, num_values=2)
    second.check()
    assert ray.experimental.get_object_locations([second.reference])[second.reference]["node_ids"], "in no reply"


def test_a_killed_scorer_is_replaced(cluster: Cluster, pool: RayPool, tmp_path: Path) -> None:
    marker = tmp_path / "victim"
    futures = [pool.submit(functions.score, value, 0.5, str(marker)) for value in range(4)]
    while not marker.exists():
        assert not futures[-1].done()
    killed = int(marker.read_text())
    os.kill(killed, signal.SIGKILL)
    assert [future.result() for future in futures] == [0, 2, 4, 6]
    assert pool.num_restarts == 1
    cluster.wait_ready()
    pids = {load["pid"] for load in json.loads((cluster.run.output_dir / "processes.json").read_text())}
    assert pids == {process.identity.pid for role in cluster.loop.roles for process in role.processes}
    assert killed not in pids
    assert "it is replaced (1 of 3 times)" in (cluster.run.output_dir / "log.txt").read_text()


def test_a_group_is_lost_with_one_of_its_processes(cluster: Cluster, group: RayGroup) -> None:
    (_, (_, made)) = group.map_remote(functions.make, [0, 1], 50_000, num_values=2)
    made.check()
    running = group.call(functions.sleep_in_rank, 0, 60.0)
    behind = group.call(functions.where)
    killed = group.processes[1].identity
    while group.processes[1].unanswered:  # it has done its part, and rank 0 is still busy
        assert killed is not None and not running.done()
    started = time.monotonic()
    assert killed is not None
    os.kill(killed.pid, signal.SIGKILL)
    with pytest.raises(RoleLostError, match=f"role sampler, rank 1: process {killed.pid} on .* has died") as caught:
        running.result()
    assert time.monotonic() - started < 10 and caught.value.ranks == (1,) and caught.value.exit_code == 8
    for future in (behind, group.call(functions.where)):
        with pytest.raises(RoleLostError, match="rank 1"):
            future.result()
    cluster.run.stop_requested = False
    num_restarts = group.num_restarts  # not 0 if a process was lost while the group started, which then starts again
    group.restart()
    assert group.call(functions.sum_over_ranks, 1.0).result() == 3.0
    assert group.num_restarts == num_restarts + 1
    assert made.fetch()[0] == 11.0, "values outlive the process that made them"


def test_no_place(cluster: Cluster, group: RayGroup) -> None:
    text = r"no place for runtime\.pools: asked for are actor 3 x \(1 CPU, 1 GPU\); the machines have: .* 4 CPU, 2 GPU"
    with pytest.raises(ConfigError, match=text):
        cluster.group("actor", functions.build, None, TRAIN, PoolConfig(processes=3, gpus=1))
    with pytest.raises(ConfigError, match=r"tensor_parallel_size 3.* does not divide 2 processes"):
        cluster.group("actor", functions.build, None, TRAIN.model_copy(update={"tensor_parallel_size": 3}), TWO)


@pytest.mark.slow
def test_two_roles_share_each_gpu(cluster: Cluster, group: RayGroup) -> None:
    """Process i of both is on one GPU, also after one role was started anew; the places end with the second role."""
    half = PoolConfig(processes=2, cpus=0.25, gpus=0.5)
    cluster.reserve(groups={"actor": half, "reader": half}, pools={}, share_gpus=True)
    actor, reader = (cluster.group(name, functions.build, None, TRAIN, half) for name in ("actor", "reader"))
    cluster.wait_ready()
    gpus = actor.call(functions.visible_gpus).result()
    assert sorted(gpus) == ["0", "1"] and reader.call(functions.visible_gpus).result() == gpus
    with pytest.raises(ConfigError, match=r"4 CPU, 2 GPU \(.*, 0 GPU free\)"):
        Reserver(cluster.config.model_copy(update={"call_timeout_s": 0.0}), cluster.run, is_own=True).reserve(
            {"third": (PoolConfig(gpus=0.1), True)}
        )
    reader.restart()
    assert reader.call(functions.visible_gpus).result() == gpus
    reader.close()
    assert actor.call(functions.visible_gpus).result() == gpus, "the places are the actor's still"
    actor.close()


def test_waiting_for_a_place(cluster: Cluster, group: RayGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a cluster that others share, or that may grow, a place may become free."""
    config = cluster.config.model_copy(update={"call_timeout_s": 1.0, "wait_for_nodes_s": 1.0})
    monkeypatch.setattr(cluster, "_reserver", Reserver(config, cluster.run, is_own=False))
    monkeypatch.setattr(placement_module, "SAY_PLACE_S", 0.3)
    for cpus, what in ((64, "for machines to join"), (3.9, "until others give some back")):
        with pytest.raises(ConfigError, match=r"no place for runtime\.pools.*Lower processes, cpus or gpus"):
            cluster.group("actor", functions.build, None, TRAIN, PoolConfig(cpus=cpus))
        said = (cluster.run.output_dir / "log.txt").read_text()
        assert said.count(f"actor 1 x ({cpus:g} CPU, 0 GPU)") == 1 and f"waiting {what}" in said


@pytest.mark.slow
def test_processes_must_see_the_run_folder(cluster: Cluster, group: RayGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    half = PoolConfig(cpus=0.5)
    role = cluster.group("writer", functions.build, None, TRAIN, half, sees_folder=True)
    role.wait_ready()
    assert not list(cluster.run.output_dir.glob(".seen-*"))
    role.close()
    monkeypatch.setattr(role_module, "Token", lambda folder: Token(folder / "of another machine"))
    role = cluster.group("writer", functions.build, None, TRAIN, half, sees_folder=True)
    with pytest.raises(ConfigError, match=r"another machine: \S+ \(writer rank 0\) does not see .* that all machines"):
        role.wait_ready()
    role.close()


def test_processes_have_the_code_of_the_run(
    cluster: Cluster, group: RayGroup, pool: RayPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = {**role_module.package_versions("ray"), role_module.CODE: "0123"}
    monkeypatch.setattr(role_module, "package_versions", lambda *packages: others)
    refused = cluster.group("other", functions.build, "others", TRAIN, PoolConfig(cpus=0.1))
    with pytest.raises(ConfigError, match=r"role other runs, has source code of sfumato \w+ \(0123 here\): install"):
        refused.call(functions.remember, 1, 0.0).result()
    refused.close()
    os.kill(pool.processes[0].identity.pid, signal.SIGKILL)
    assert [pool.call(functions.environment).result()["WORLD_SIZE"] for _ in range(4)] == ["1"] * 4
    said = (cluster.run.output_dir / "log.txt").read_text()
    assert "has other source code of sfumato now than the run was begun with" in said
    # a run whose actor was lost starts all roles anew, in the process of the driver
    monkeypatch.setattr(cluster.run, "is_started_again", True)
    actor = cluster.group("again", functions.build, "others", TRAIN, PoolConfig(cpus=0.1))
    actor.wait_ready()
    actor.close()


def test_a_run_that_is_stopped_while_a_role_is_built(cluster: Cluster, group: RayGroup) -> None:
    role = cluster.group("reader", functions.build, None, TRAIN, PoolConfig(cpus=0.5))
    cluster.run.stop_requested = True
    try:
        with pytest.raises(PreemptedError, match="stopped by signal while role reader was being built"):
            role.wait_ready()
    finally:
        cluster.run.stop_requested = False
        role.close()


def test_a_long_wait_says_what_for(cluster: Cluster, group: RayGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "SAY_S", 0.5)
    monkeypatch.setattr(cluster.loop, "config", cluster.config.model_copy(update={"heartbeat_s": 0.8}))
    assert group.call(functions.sleep_in_rank, 1, 1.4).result() == 0
    said = (cluster.run.output_dir / "log.txt").read_text()
    assert re.search(r"waiting for sampler sleep_in_rank since \d s: ranks 1 have run it for 1 s", said)


@pytest.mark.slow
def test_a_state_that_cannot_be_built(cluster: Cluster, group: RayGroup) -> None:
    role = cluster.group("reader", functions.build_badly, "that", TRAIN, PoolConfig(cpus=0.5))
    with pytest.raises(UserError, match="cannot build that"):
        role.wait_ready()
    with pytest.raises(UserError, match="cannot build that"):
        role.call(functions.where).result()
    role.close()


def test_only_one_cluster_and_no_client(cluster: Cluster) -> None:
    with pytest.raises(ConfigError, match="through Ray Client all values would pass through this process"):
        start_cluster(RuntimeConfig(backend="ray", address="ray://head:10001"), cluster.run)
    with pytest.raises(RuntimeError, match="joined a Ray cluster already"):
        start_cluster(RuntimeConfig(backend="ray"), cluster.run)


def test_all_of_ray_listens_at_loopback_alone(cluster: Cluster) -> None:
    processes = {process.pid for process in psutil.Process().children(recursive=True)}
    ports = [port for port in open_ports() if port.pid in processes]
    assert len(ports) > 3 and not [port for port in ports if port.is_open], ports


def test_signals_belong_to_the_run(cluster: Cluster) -> None:
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sigterm_of_a_process_asks_the_run_to_stop(cluster: Cluster, group: RayGroup, pool: RayPool) -> None:
    """The last test of the cluster: heartbeats of its processes go on to say that the run is to stop."""
    pid = group.call(functions.where).result()
    assert not cluster.run.stop_requested
    os.kill(pid, signal.SIGTERM)
    deadline = time.monotonic() + 20
    while not cluster.run.stop_requested and time.monotonic() < deadline:
        assert group.call(functions.where).result() == pid, "it goes on"
    assert cluster.run.stop_requested
    assert pool.call(functions.is_asked_to_stop).result(), "it reaches all roles"


def test_packing_keeps_nothing_alive() -> None:
    gc.disable()
    try:
        value = torch.zeros(3)
        seen = weakref.ref(value)
        packed = pack([value, functions], lambda item: 0 if item is functions else None)
        del value
        assert seen() is None and packed
        again = functions.State(None, None, None)  # type: ignore[arg-type]
        seen = weakref.ref(again)
        assert type(unpack(packed, [pack(again)])[1]) is functions.State
        del again
        assert seen() is None
    finally:
        gc.enable()


def test_packing_keeps_tensors_of_every_kind() -> None:
    transposed = torch.arange(12).reshape(3, 4).t()
    narrow = torch.zeros(1_000_000)[:3]
    values = [torch.randn(3).bfloat16(), torch.tensor(True), torch.zeros(0, 3), transposed, narrow, torch.tensor(2j)]
    packed = pack({"tensors": values, "array": np.arange(5)})
    assert size_of(packed) < 10_000, "a slice leaves without its storage"
    result = unpack(packed)
    for value, other in zip(values, result["tensors"], strict=True):
        assert torch.equal(value, other) and value.dtype == other.dtype
    result["tensors"][0] += 1
    assert not torch.equal(result["tensors"][0], values[0]), "its own memory"
    assert unpack(pack([1, {"deep": (values,)}], lambda item: 0 if item is values else None), [pack("there")]) == [
        1,
        {"deep": ("there",)},
    ]
