"""Rewards in processes: the same bits as in threads, in the order of the samples, and mistakes by their name."""

from __future__ import annotations

import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from sfumato.errors import ConfigError, DataError, MissingDependencyError
from sfumato.rewards.base import Reward, Sample
from sfumato.rewards.function import FunctionReward
from sfumato.rewards.pixels import JpegIncompressibility, Sharpness
from sfumato.rewards.scoring.scorer import Scorer
from sfumato.rewards.scoring.scores import Scores
from sfumato.rewards.scoring.workers import close_workers
from sfumato.runtime.roles import ThreadRole
from tests.odd_rewards import Awkward, Rank


@pytest.fixture(scope="module", autouse=True)
def _end_workers():
    yield
    close_workers()


def noise(count: int, video: bool = False) -> list[Sample]:
    rng = np.random.default_rng(0)
    shape = (5, 12, 16, 3) if video else (12, 16, 3)
    return [
        Sample(image=rng.integers(0, 256, shape, np.uint8), prompt=f"red {k}", metadata={"k": k}, group_id=k // 4)
        for k in range(count)
    ]


def rewards(process: bool) -> list[Reward]:
    fields = {"process": process}
    return [
        JpegIncompressibility(**fields),
        Rank(evaluation_only=True, **fields),
        FunctionReward(path="tests.odd_rewards:redness", **fields),
    ]


def score(process: bool, num_threads: int, samples: list[Sample]) -> Scores:
    scorer = Scorer(rewards(process))
    role = ThreadRole(scorer, "scorer", num_threads)
    parts = [role.call(Scorer.score, samples[at : at + 4]) for at in range(0, len(samples), 4)]
    return Scores.cat([part.result() for part in parts])


def test_threads_and_processes_give_the_same_bits_however_many_there_are():
    samples = noise(16)
    expected = score(False, 1, samples)
    for process, num_threads in ((False, 4), (True, 1), (True, 4)):
        got = score(process, num_threads, samples)
        assert got.total.tobytes() == expected.total.tobytes(), (process, num_threads)
        assert {name: component.tobytes() for name, component in got.components.items()} == {
            name: component.tobytes() for name, component in expected.components.items()
        }
        assert got.failures == []


def test_videos_go_to_processes_frame_by_frame():
    samples = noise(2, video=True)
    fields = {"frame_step": 2}
    inside = Scorer([JpegIncompressibility(process=True, **fields)]).score(samples)
    np.testing.assert_array_equal(inside.total, Scorer([JpegIncompressibility(**fields)]).score(samples).total)


def test_one_process_is_used_again_and_calls_at_the_same_time_have_one_each():
    scorer = Scorer([Awkward(process=True, name="pids")])
    scorer.prepare()
    sample = noise(1)
    pids = {scorer.score(sample).total[0] for _ in range(3)}
    assert len(pids) == 1 and os.getpid() not in pids
    barrier = threading.Barrier(2)

    def together(_):
        barrier.wait()
        return scorer.score(sample).total[0]

    with ThreadPoolExecutor(2) as pool:
        pids |= set(pool.map(together, range(2)))
    assert len(pids) == 2
    scorer.close()
    assert not any(Path(f"/proc/{int(pid)}").exists() for pid in pids)
    assert scorer.score(sample).total[0] not in pids, "a later call starts anew"


def test_a_process_that_ended_between_two_calls_costs_nothing():
    scorer = Scorer([Awkward(process=True, name="idle")])
    pid = int(scorer.score(noise(1)).total[0])
    os.kill(pid, signal.SIGKILL)
    time.sleep(0.2)
    scores = scorer.score(noise(1))
    assert scores.failures == [] and scores.total[0] != pid


def test_a_mistake_in_a_process_is_raised_as_what_it_is():
    scorer = Scorer([Awkward(process=True)])
    broken = Sample(image=np.zeros((2, 2, 3), np.uint8), prompt="no row", group_id=0)
    with pytest.raises(DataError, match="the row of 'no row' is broken"):
        scorer.score([broken])
    assert scorer.score(noise(1)).failures == []


@pytest.mark.parametrize(
    ("how", "error", "message"),
    [
        ("missing", MissingDependencyError, "pip install it"),
        ("broken", ConfigError, "cannot be loaded in its process: RuntimeError: out of luck"),
        ("gone", ConfigError, "'Awkward': its process could not be started: it ended itself with exit code 7"),
        (threading.Lock(), ConfigError, "'Awkward' cannot be sent to a process"),
    ],
)
def test_what_cannot_be_loaded_is_known_before_the_run(how, error, message):
    with pytest.raises(error, match=message):
        Scorer([Awkward(how=how, process=True)]).prepare()


def test_samples_that_cannot_be_sent_are_a_failure():
    sample = Sample(image=np.zeros((2, 2, 3), np.uint8), prompt="", metadata={"lock": threading.Lock()}, group_id=0)
    scores = Scorer([Awkward(process=True)]).score([sample])
    assert np.isnan(scores.total).all() and "the samples cannot be sent" in scores.failures[0]


def test_a_large_batch_goes_through_the_pipe():
    rng = np.random.default_rng(0)
    large = [Sample(image=rng.integers(0, 256, (700, 800, 3), np.uint8), prompt="", group_id=0) for _ in range(3)]
    assert (
        Scorer([Sharpness(process=True)]).score(large).total.tolist()
        == Scorer([Sharpness()]).score(large).total.tolist()
    )


ASYNC = """
import asyncio
RUNNING, MOST = 0, 0
async def most_at_once(sample):
    global RUNNING, MOST
    RUNNING += 1
    MOST = max(MOST, RUNNING)
    await asyncio.sleep(0.01 * (3 - sample.metadata["k"] % 3))
    RUNNING -= 1
    return sample.metadata["k"] + MOST / 100
def plain(sample): return sample.image.mean()
def group(samples): return [len(samples) + each.metadata["k"] for each in samples]
"""


def test_async_functions_run_side_by_side_within_the_limit_and_keep_the_order(tmp_path: Path):
    (tmp_path / "own.py").write_text(ASYNC)
    for concurrency in (1, 3):
        reward = FunctionReward(path=f"{tmp_path}/own.py:most_at_once", concurrency=concurrency)
        values = Scorer([reward]).score(noise(8)).total
        np.testing.assert_array_equal(np.floor(values), np.arange(8))
        assert np.round(100 * (values % 1)).max() == concurrency


def test_functions_by_module_and_of_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own_module.py").write_text(ASYNC)
    monkeypatch.syspath_prepend(str(tmp_path))
    samples = noise(6)
    rewards = [
        FunctionReward(path="own_module:plain"),
        FunctionReward(path="own_module:group", groupwise=True, process=False),
    ]
    scorer = Scorer(rewards)
    scorer.prepare()
    scores = scorer.score(samples)
    assert list(scores.components) == ["plain", "group"]
    assert scores.components["plain"].tolist() == [sample.image.mean() for sample in samples]
    assert scores.components["group"].tolist() == [4, 5, 6, 7, 6, 7]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"concurrency": 0}, "concurrency of reward 'f'"),
        ({"concurrency": 2, "groupwise": True}, "concurrency of reward 'f'"),
        ({"memory_mib": -1}, "memory_mib of reward 'f'"),
        ({"memory_mib": 512, "process": False}, "memory_mib of reward 'f'"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        FunctionReward(path="m:f", **fields)


def test_concurrency_needs_an_async_function(tmp_path: Path):
    (tmp_path / "own.py").write_text(ASYNC)
    with pytest.raises(ConfigError, match=r"'plain' is 4, but .* is no async function"):
        Scorer([FunctionReward(path=f"{tmp_path}/own.py:plain", concurrency=4)]).prepare()
