"""Roles on a Ray cluster of three nodes: the bits of one node, whichever node is lost; what cannot be is refused."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sfumato.config.load import merge
from tests.nodes.namespaces import Nodes
from tests.nodes.runs import NodeProgram, RayNodes, hosts_of, last_step
from tests.role_runs import assert_same, role_config
from tests.tiny import write_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

CPUS = {"alfa": 1, "bravo": 2, "carol": 2}
POOLS = {"actor": {"processes": 2, "cpus": 1.0}, "scorer": {"cpus": 0.5}}
COLOCATED = {
    "runtime": {"backend": "ray", "pools": POOLS, "call_timeout_s": 300.0},
    "rollout": {"hybrid_engine": True},
}
SEPARATE = merge(COLOCATED, {"runtime": {"pools": {"sampler": {"cpus": 1.5}}}, "rollout": {"hybrid_engine": False}})
ONE_STEP_OFF = merge(SEPARATE, {"rollout": {"async_strategy": "one-step-off"}})
OTHER_CPUS = {"actor": {"cpus": 0.5}, "sampler": {"cpus": 1.0}, "scorer": {"cpus": 1.5}}
SCORER_APART = merge(ONE_STEP_OFF, {"runtime": {"pools": OTHER_CPUS}})
STEPS = 16


@pytest.fixture(scope="module")
def ray_nodes(nodes: Nodes) -> Iterator[RayNodes]:
    started = RayNodes(nodes, nodes.folder, CPUS)
    yield started
    started.close()


def config_in(nodes: Nodes, name: str, where: dict[str, Any], **overrides: Any) -> Path:
    folder = nodes.folder / name
    folder.mkdir()
    train = {"max_steps": STEPS, "output_dir": str(folder / "run")}
    return write_config(role_config(folder, where, **merge({"train": train}, overrides)), folder / "run.yaml")


def folder_of(config: Path) -> Path:
    return config.parent / "run"


@pytest.fixture(scope="module")
def one_node(nodes: Nodes) -> Any:
    """Runs a configuration on one node, with a Ray of its own; each once."""
    made: dict[str, Path] = {}

    def run(name: str, where: dict[str, Any], **overrides: Any) -> Path:
        if name not in made:
            roles = where["runtime"]["pools"]
            small = {"object_store_gb": 0.2, "pools": {role: {"cpus": 1.9 / (len(roles) + 1)} for role in roles}}
            config = config_in(nodes, f"one-{name}", merge(where, {"runtime": small}), **overrides)
            command = [sys.executable, "tasks/rl_diffusion.py", str(config)]
            program = NodeProgram(nodes["carol"], command, config.with_suffix(".log"))
            assert program.wait(400) == 0, program.output
            made[name] = folder_of(config)
        return made[name]

    return run


def lose(ray_nodes: RayNodes, name: str, *, power: bool = False) -> None:
    """A node with all its processes; with ``power`` nobody is told."""
    node = ray_nodes.nodes[name]
    node.lose() if power else node.close()
    ray_nodes.programs[name].process.wait(10)


def bring_back(ray_nodes: RayNodes, name: str) -> None:
    ray_nodes.nodes.start(name)
    ray_nodes.start(name)


@pytest.mark.parametrize("name", ["colocated", "separate"])
def test_three_nodes_equal_one(ray_nodes: RayNodes, one_node: Any, name: str) -> None:
    where, nodes = {"colocated": COLOCATED, "separate": SEPARATE}[name], ray_nodes.nodes
    config = config_in(nodes, name, where, train={"max_steps": 6})
    run = ray_nodes.run(config)
    assert run.wait() == 0, run.output
    assert len(hosts_of(folder_of(config), "actor")) == 1
    if name == "separate":
        assert hosts_of(folder_of(config), "actor") != hosts_of(folder_of(config), "sampler")
    assert_same(folder_of(config), one_node(f"{name}-6", where, train={"max_steps": 6}))


@pytest.mark.parametrize("name", ["sync", "one-step-off"])
def test_the_nodes_of_sampler_and_actor_and_driver_are_lost(ray_nodes: RayNodes, one_node: Any, name: str) -> None:
    where, nodes = {"sync": SEPARATE, "one-step-off": ONE_STEP_OFF}[name], ray_nodes.nodes
    config = config_in(nodes, f"lost-{name}", where)
    folder, run = folder_of(config), ray_nodes.run(config)
    run.wait_for_step(folder, 3)
    for role, power in (("sampler", False), ("actor", True)):
        (host,) = hosts_of(folder, role)
        before, began = last_step(folder), time.monotonic()
        lose(ray_nodes, host, power=power)
        run.wait_for_text(f"role {role}, rank")
        print(f"{name}: {role} on {host} was lost after step {before}; said after {time.monotonic() - began:.0f} s")
        bring_back(ray_nodes, host)
        run.wait_for_step(folder, before + 3)
        print(f"{name}: {role}: three steps later after {time.monotonic() - began:.0f} s")
    assert run.process.poll() is None, "the driver's node is lost while it works"
    before = last_step(folder)
    for node in reversed(list(CPUS)):
        lose(ray_nodes, node)
    for node in CPUS:
        nodes.start(node)
    ray_nodes.start(*CPUS)
    again = ray_nodes.run(config, "--train.load_checkpoint_path", "auto")
    assert again.wait(400) == 0, again.output
    assert int(re.findall(r"resumed from .*global_step_(\d+)", again.output)[-1]) >= before - 1, again.output
    assert_same(folder, one_node(name, where))


def test_the_node_of_the_scorer_is_lost(ray_nodes: RayNodes, one_node: Any) -> None:
    config = config_in(ray_nodes.nodes, "scorer", SCORER_APART)
    folder, run = folder_of(config), ray_nodes.run(config)
    run.wait_for_step(folder, 3)
    (host,) = hosts_of(folder, "scorer")
    assert host not in hosts_of(folder, "actor") | hosts_of(folder, "sampler")
    lose(ray_nodes, host)
    run.wait_for_text("role scorer, rank 0")
    bring_back(ray_nodes, host)
    assert run.wait(400) == 0, run.output
    assert_same(folder, one_node("one-step-off", ONE_STEP_OFF))


def test_a_folder_that_is_not_shared_is_refused(ray_nodes: RayNodes) -> None:
    config = config_in(ray_nodes.nodes, "private", SEPARATE, train={"output_dir": "/dev/shm/runs/private"})
    run = ray_nodes.run(config)
    assert run.wait(120) == 2, run.output
    assert "train.output_dir /dev/shm/runs/private: carol (actor rank 0) does not see what the first" in run.output
    assert "runs" not in ray_nodes.nodes["carol"].run("ls", "/dev/shm").split()


def test_places_that_cannot_be_are_refused_at_once_and_a_signal_ends_the_wait(ray_nodes: RayNodes) -> None:
    wide = merge(SEPARATE, {"runtime": {"pools": {"sampler": {"cpus": 2.5}}}})
    run = ray_nodes.run(config_in(ray_nodes.nodes, "wide", wide))
    assert run.wait(60) == 2, run.output
    assert "sampler 1 x (2.5 CPU, 0 GPU)" in run.output and "alfa 1 CPU, 0 GPU; bravo 2 CPU, 0 GPU; " in run.output
    run = ray_nodes.run(config_in(ray_nodes.nodes, "waits", wide), "--runtime.wait_for_nodes_s", "600")
    run.wait_for_text("waiting for machines to join, at most")
    run.signal("TERM")
    began = time.monotonic()
    assert run.wait(30) == 143, run.output
    assert time.monotonic() - began < 10
