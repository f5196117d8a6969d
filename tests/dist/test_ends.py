"""What a rank notices of others that hang or have gone, and how that is told from a mistake of its own."""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from sfumato.config.sections import TrainConfig
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh, build_mesh, connecting_within
from sfumato.tracking.exit import ending_of
from tests.dist.ranks import RankPool


def wait_for_a_rank_that_hangs(axis: str) -> tuple[str, str, float]:
    mesh = Mesh(Layout(dp_shard=2), torch.device("cpu"), dist.get_rank())
    mesh.set_timeout(0.5)
    started = time.monotonic()
    if mesh.rank == 1:
        time.sleep(1.5)
        return "", "", 0.0
    os.environ["RANK"] = "0"
    try:
        mesh.sum(1.0, over=axis)
    except RuntimeError as error:
        ending = ending_of(error)
        return ending.kind, f"{ending.code} {ending.text} {ending.stacks}", time.monotonic() - started
    finally:
        del os.environ["RANK"]
    raise AssertionError("the other rank did not take part")


def test_a_rank_that_hangs_ends_the_wait_in_every_group(ranks):
    for axis in ("world", "data"):
        (kind, text, seconds), _ = ranks.run(2, wait_for_a_rank_that_hangs, axis)
        assert kind == "hang" and 0.4 < seconds < 1.4
        assert text.startswith("8 stopped: rank 0 has waited for another rank for longer than train.timeout_s allows")
        assert "in sum" in text  # where it waited


def wait_for_a_first_message(limit_s: float) -> tuple[str, str, float]:
    """In a group of ranks that gloo connects when they first send each other something."""
    with connecting_within(timedelta(seconds=limit_s)):
        group = dist.new_group([0, 1])
    group.set_timeout(timedelta(seconds=0.5))  # of which a connection knows nothing
    if dist.get_rank() == 1:
        time.sleep(1.3 * limit_s)
        return "", "", 0.0
    os.environ["RANK"] = "0"
    started = time.monotonic()
    try:
        dist.all_reduce(torch.ones(1), group=group)
    except RuntimeError as error:
        ending = ending_of(error)
        return ending.kind, f"{ending.code} {ending.text}", time.monotonic() - started
    finally:
        del os.environ["RANK"]
    raise AssertionError("the other rank did not take part")


@pytest.mark.slow
def test_a_rank_that_hangs_before_its_first_message_ends_the_wait(monkeypatch):
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")  # torch reads it once in a process
    pool = RankPool(2)
    try:
        (kind, text, seconds), _ = pool.run(2, wait_for_a_first_message, 20.0)
    finally:
        pool.close()
    assert kind == "hang" and 19 < seconds < 25
    assert text.startswith("8 stopped: rank 0 has waited for another rank for longer than train.timeout_s allows")


def test_a_rank_that_has_gone_is_no_mistake_of_this_one(tmp_path):
    """The other one is a copy of this process, which sums once and is gone."""

    def group(rank: int) -> dist.ProcessGroupGloo:
        return dist.ProcessGroupGloo(dist.FileStore(str(tmp_path / "store"), 2), rank, 2, timedelta(seconds=20))

    other = os.fork()
    if not other:
        try:
            group(1).allreduce([torch.ones(1)]).wait()
        finally:
            os._exit(0)
    group_of_this = group(0)
    group_of_this.allreduce([torch.ones(1)]).wait()
    os.waitpid(other, 0)
    with pytest.raises(RuntimeError) as error:
        group_of_this.allreduce([torch.ones(1)]).wait()
    ending = ending_of(error.value)
    assert (ending.kind, ending.code) == ("lost", 8), error.value
    assert ending.text.startswith("stopped: rank 0 has lost the connection to another rank")


def wait_for_the_first(timeout_s: float) -> float:
    mesh = Mesh(Layout(dp_shard=2), torch.device("cpu"), dist.get_rank())
    mesh.set_timeout(timeout_s)
    started = time.monotonic()
    with mesh.first_rank_first():
        if mesh.is_first:
            time.sleep(3 * timeout_s)
    return time.monotonic() - started


def test_work_of_the_first_rank_alone_may_take_longer_than_a_collective(ranks):
    assert min(ranks.run(2, wait_for_the_first, 0.3)) >= 0.9


class Captured(Exception):  # noqa: N818
    """The group is not made."""


def test_until_the_first_step_ranks_wait_three_times_as_long(monkeypatch, tmp_path):
    group_settings = {}

    def capture(*_, **settings):
        group_settings.update(settings)
        raise Captured

    monkeypatch.setattr(dist, "init_process_group", capture)
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("SFUMATO_STORE", str(tmp_path / "store"))
    with pytest.raises(Captured):
        build_mesh(TrainConfig(output_dir="unused", timeout_s=70, device="cpu"))
    assert group_settings["timeout"].total_seconds() == 210
