"""Ranks on several nodes: the bits of one node, a peer that is lost, a network that is down, folders not shared."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.nodes.namespaces import Nodes
from tests.nodes.runs import start_ranks
from tests.role_runs import assert_same
from tests.tiny import tiny_dit_config, write_config

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def config_in(folder: Path, name: str, **train: Any) -> Path:
    """A run in a folder of that name."""
    folder.mkdir(exist_ok=True)
    config = tiny_dit_config(folder, train={"output_dir": str(folder / name), "save_steps": 2, **train})
    return write_config(config, folder / f"{name}.yaml")


def test_two_nodes_with_a_rank_each_equal_one_node_with_two(nodes: Nodes) -> None:
    folder = nodes.folder / "equal"
    apart = start_ranks(nodes, ["alfa", "bravo"], config_in(folder, "apart"), task="train_dit")
    assert [process.wait() for process in apart] == [0, 0], apart[0].output
    together = start_ranks(nodes, ["carol"], config_in(folder, "together"), task="train_dit", processes=2)
    assert together[0].wait() == 0, together[0].output
    assert_same(folder / "apart", folder / "together")


def test_a_node_that_is_lost_is_named_and_the_run_resumed(nodes: Nodes) -> None:
    folder = nodes.folder / "lost"
    config = config_in(folder, "lost", max_steps=60)
    first, second = start_ranks(nodes, ["alfa", "bravo"], config, task="train_dit")
    first.wait_for_step(folder / "lost", 5)
    nodes["bravo"].close()
    began = time.monotonic()
    assert first.wait(60) == 8, first.output
    second.process.wait(10)
    print(f"the lost rank was named after {time.monotonic() - began:.0f} s")
    said = first.output.splitlines()[-1]
    assert re.fullmatch(
        r"stopped: rank 0 has lost rank 1 on bravo \(not heard of for \d+ s\); to go on, add "
        r"--train\.load_checkpoint_path auto",
        said,
    ), first.output
    assert "Traceback" not in first.output and "pair.cc" not in first.output
    nodes.start("bravo")
    again = start_ranks(nodes, ["alfa", "bravo"], config, "--train.load_checkpoint_path", "auto", task="train_dit")
    assert [process.wait() for process in again] == [0, 0], again[0].output
    whole = start_ranks(nodes, ["carol"], config_in(folder, "whole", max_steps=60), task="train_dit", processes=2)
    assert whole[0].wait() == 0, whole[0].output
    assert_same(folder / "lost", folder / "whole")


def test_a_network_that_is_down_is_said_and_waited_for(nodes: Nodes) -> None:
    folder = nodes.folder / "down"
    config = config_in(folder, "down", max_steps=60)
    ranks = start_ranks(nodes, ["alfa", "bravo"], config, task="train_dit")
    ranks[0].wait_for_step(folder / "down", 5)
    nodes["bravo"].link("down")
    began = time.monotonic()
    ranks[0].wait_for_text("rank 1 on bravo is silent since 1", 30)
    ranks[1].wait_for_text("rank 0 on alfa is silent since", 30)
    assert time.monotonic() - began < 25 and "s: is its machine or the network down?" in ranks[0].output
    nodes["bravo"].link("up")
    ranks[0].wait_for_text("rank 1 on bravo is heard again, after", 60)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].output
    whole = start_ranks(nodes, ["carol"], config_in(folder, "whole", max_steps=60), task="train_dit", processes=2)
    assert whole[0].wait() == 0, whole[0].output
    assert_same(folder / "down", folder / "whole")


def test_a_folder_that_is_not_shared_is_refused_before_the_first_step(nodes: Nodes) -> None:
    """Each node has a /dev/shm of its own."""
    folder = nodes.folder / "apart"
    config = config_in(folder, "private", output_dir="/dev/shm/runs/private")
    ranks = start_ranks(nodes, ["alfa", "bravo"], config, task="train_dit")
    assert [rank.wait(90) for rank in ranks] == [2, 2], ranks[0].output
    said = "error: train.output_dir /dev/shm/runs/private: bravo (rank 1) does not see what the first process"
    assert said in ranks[0].output
    assert nodes["alfa"].run("ls", "/dev/shm").strip() == "", "a refused start changes nothing"
