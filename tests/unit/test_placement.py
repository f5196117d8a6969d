"""Places for all roles at once: found whenever there are some, and refused with what each machine has."""

from __future__ import annotations

import faulthandler
import itertools
import operator
import pickle
import random
import signal
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from sfumato.config.runtime import PoolConfig, RuntimeConfig
from sfumato.errors import ConfigError, PreemptedError
from sfumato.runtime.cluster import placement
from sfumato.runtime.cluster import process as process_module
from sfumato.runtime.cluster.loop import DriverLoop
from sfumato.runtime.cluster.packing import pack, unpack
from sfumato.runtime.cluster.placement import UNIT, Amount, Machine, Reserver, check_addresses, plan
from sfumato.runtime.cluster.worker import OnState, RoleWorker, place_of_gpu
from sfumato.tracking.lock import process_birth


def of(*cpus: float) -> list[Amount]:
    return [(round(count * UNIT), 0) for count in cpus]


def fits(free: list[Amount], roles: list[list[Amount]], places: list[list[int]]) -> bool:
    """Whether nothing is given away twice."""
    remaining = [list(amount) for amount in free]
    for some, machines in zip(roles, places, strict=True):
        assert len(some) == len(machines)
        for amount, machine in zip(some, machines, strict=True):
            for kind in range(2):
                remaining[machine][kind] -= amount[kind]
    return all(value >= 0 for amount in remaining for value in amount)


def exists(free: list[Amount], roles: list[list[Amount]]) -> bool:
    """Whether any of all assignments fits."""
    counts = [len(role) for role in roles]
    for choice in itertools.product(range(len(free)), repeat=sum(counts)):
        ends = list(itertools.accumulate(counts, initial=0))
        if fits(free, roles, [list(choice[a:b]) for a, b in itertools.pairwise(ends)]):
            return True
    return False


def test_roles_that_would_block_each_other_one_after_the_other() -> None:
    """1.5 of 3 CPUs would leave no place for 2.5."""
    places = plan(of(2, 3), [of(1.5), of(2.5), of(0.3)])
    assert places == [[0], [1], [0]] or places == [[0], [1], [1]]


@pytest.mark.parametrize("seed", range(8))
def test_a_plan_is_found_whenever_there_is_one(seed: int) -> None:
    rng, result = random.Random(seed), 0
    for _ in range(60):
        free = [(rng.randint(0, 6) * UNIT // 2, rng.randint(0, 3) * UNIT) for _ in range(rng.randint(1, 3))]
        roles = [
            [(rng.randint(0, 5) * UNIT // 2, rng.choice([0, 0, 1]) * UNIT)] * rng.randint(1, 2)
            for _ in range(rng.randint(1, 3))
        ]
        places = plan(free, roles)
        assert (places is not None) == exists(free, roles), (free, roles)
        if places is not None:
            assert fits(free, roles, places)
            result += 1
    assert 5 < result < 55, "both kinds were tried"


def test_processes_of_a_role_are_kept_together_and_those_without_gpus_leave_gpus_to_others() -> None:
    machines = [(8 * UNIT, 8 * UNIT)] * 4 + [(32 * UNIT, 0)]
    roles = [[(UNIT, UNIT)] * 16, [(UNIT, UNIT)] * 16, [(2 * UNIT, 0)] * 8]
    assert plan(machines, roles) == [[0] * 8 + [1] * 8, [2] * 8 + [3] * 8, [4] * 8]
    machines[4] = (UNIT, 0)
    assert plan(machines, roles) is None
    assert plan(of(2, 2), [of(1, 1), of(1.5), of(0.5)]) == [[1, 1], [0], [0]]
    assert plan(of(4, 4), [of(1, 1), of(3)]) == [[1, 1], [0]], "the tightest place would part the two"


def test_a_large_cluster_takes_no_time() -> None:
    started = time.monotonic()
    assert plan([(64 * UNIT, 8 * UNIT)] * 128, [[(4 * UNIT, UNIT)] * 512, [(4 * UNIT, UNIT)] * 512, [(UNIT, 0)] * 300])
    assert plan([(64 * UNIT, 8 * UNIT)] * 128, [[(33 * UNIT, UNIT)] * 129]) is None
    assert time.monotonic() - started < 20


class Asked:
    """A run that remembers what was said to it."""

    def __init__(self, stops_after: float = float("inf")) -> None:
        self.lines: list[str] = []
        self._stops_at = time.monotonic() + stops_after

    @property
    def stop_requested(self) -> bool:
        return time.monotonic() > self._stops_at

    def say(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture
def two_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two machines, of which one is partly taken."""
    free = [Machine("a" * 56, "alfa", *of(2, 2)), Machine("b" * 56, "bravo", *of(3, 1))]
    monkeypatch.setattr(placement, "list_machines", lambda: free)
    monkeypatch.setattr(placement, "check_addresses", lambda _: None)
    monkeypatch.setattr(placement, "LOOK_S", 0.01)


WANTED = {"actor": (PoolConfig(processes=2, cpus=1.5), True), "scorer": (PoolConfig(cpus=0.5), False)}


def reserver(run: Asked, is_own: bool = False, **settings: Any) -> Reserver:
    return Reserver(RuntimeConfig(backend="ray", **settings), run, is_own)


@pytest.mark.parametrize("is_own", [True, False])
def test_what_can_never_be_is_refused_at_once_with_what_each_machine_has(two_machines: None, is_own: bool) -> None:
    wanted = WANTED | {"sampler": (PoolConfig(cpus=2.5), True)}
    started = time.monotonic()
    with pytest.raises(ConfigError) as caught:
        reserver(Asked(), is_own).reserve(wanted)
    assert time.monotonic() - started < 1
    text = str(caught.value)
    assert "actor 2 x (1.5 CPU, 0 GPU), scorer 1 x (0.5 CPU, 0 GPU), sampler 1 x (2.5 CPU, 0 GPU)" in text
    assert "alfa 2 CPU, 0 GPU; bravo 3 CPU, 0 GPU (1 CPU, 0 GPU free)" in text
    assert ("runtime.address" if is_own else "runtime.wait_for_nodes_s") in text


def test_machines_that_may_still_join_are_waited_for(two_machines: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "SAY_PLACE_S", 0.05)
    run, started = Asked(), time.monotonic()
    with pytest.raises(ConfigError, match=r"no place for runtime\.pools"):
        reserver(run, wait_for_nodes_s=0.4).reserve({"actor": (PoolConfig(cpus=4), True)})
    assert 0.4 < time.monotonic() - started < 5
    assert len(run.lines) == 1 and "waiting for machines to join, at most 0 s more" in run.lines[0]


def test_what_others_have_taken_is_waited_for(two_machines: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "SAY_PLACE_S", 0.05)
    run = Asked()
    with pytest.raises(ConfigError, match="or wait until what else runs there has ended"):
        reserver(run, call_timeout_s=0.3).reserve({"actor": (PoolConfig(cpus=2.5), True)})
    assert "waiting until others give some back" in run.lines[0]


def test_a_signal_ends_the_wait(two_machines: None) -> None:
    started = time.monotonic()
    with pytest.raises(PreemptedError, match="waited for their places") as caught:
        reserver(Asked(stops_after=0.2), wait_for_nodes_s=60).reserve({"actor": (PoolConfig(cpus=4), True)})
    assert time.monotonic() - started < 5 and not caught.value.is_saved and caught.value.exit_code == 143


def test_a_loopback_address_among_several_machines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = [
        {"Alive": True, "NodeManagerHostname": "alfa", "NodeManagerAddress": "127.0.0.1"},
        {"Alive": True, "NodeManagerHostname": "bravo", "NodeManagerAddress": "10.77.0.2"},
    ]
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(nodes=lambda: nodes))
    results = [Machine("a", "alfa", *of(1, 1)), Machine("b", "bravo", *of(1, 1))]
    with pytest.raises(ConfigError, match=r"cannot reach alfa \(127\.0\.0\.1\): .*NODE_IP"):
        check_addresses(results)
    check_addresses(results[:1])


def test_a_process_is_killed_when_it_is_the_one_that_is_meant() -> None:
    """And not another that has got its number since."""
    sleeper = subprocess.Popen(["sleep", "600"])
    try:
        born = process_birth(sleeper.pid)
        process_module._kill_after(sleeper.pid, f"{born}1", 0.0)
        assert sleeper.poll() is None
        process_module._kill_after(sleeper.pid, born, 0.0)
        assert sleeper.wait(10) == -signal.SIGKILL
        process_module._kill_after(sleeper.pid, born, 0.0)  # it has gone already
    finally:
        sleeper.kill()


@pytest.mark.parametrize(
    ("gpu", "visible", "place"),
    [
        ("3", "3", 0),  # Ray has hidden the others
        ("3", None, 3),  # told not to
        ("3", "0,1,2,3", 3),
        ("6", "4,5,6,7", 2),
        ("GPU-b", "GPU-a, GPU-b", 1),
    ],
)
def test_a_process_takes_the_gpu_that_ray_gave_it(gpu, visible, place):
    assert place_of_gpu(gpu, visible) == place


def test_a_gpu_that_a_process_cannot_see_is_named():
    with pytest.raises(ConfigError, match="Ray gave this process GPU 5, but CUDA_VISIBLE_DEVICES is 0,1: unset it"):
        place_of_gpu("5", "0,1")


def test_a_reply_tells_the_memory_of_the_process_and_the_peak_of_its_device(tmp_path):
    signals = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        worker = RoleWorker("actor", 0, 1, str(tmp_path), True, [])
    finally:
        for number, handler in signals.items():
            signal.signal(number, handler)
        faulthandler.disable()
    worker.state, worker.peak_flops = SimpleNamespace(value=3), 1e12
    worker.is_built.set()
    packed = worker.run(1, "digest", pickle.dumps(OnState(operator.attrgetter("value"))), pack(()), 0, True, False, 0)
    reply, value = (unpack(part) for part in packed)
    assert reply.error is None and value == 3 and reply.peak_flops == 1e12
    assert min(reply.memory["memory/process_peak_mib"], reply.memory["memory/process_mib"]) > 50
    loop = SimpleNamespace(memory={}, peak_flops={})
    for reply.memory in ({"memory/gpu_mib": 5.0}, {"memory/gpu_mib": 3.0}):
        DriverLoop._remember(loop, "actor", reply)
    assert loop.memory == {"actor": {"memory/gpu_mib": 5.0}} and loop.peak_flops == {"actor": 1e12}
