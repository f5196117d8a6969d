"""Reward servers that misbehave, each a real process: no sample is lost, none is scored 0, everything is counted."""

from __future__ import annotations

import math
import time
import tracemalloc

import numpy as np
import pytest

from sfumato.errors import ConfigError
from sfumato.rewards.pixels import Brightness
from sfumato.rewards.remote import RemoteReward
from sfumato.rewards.scoring.scorer import Scorer
from tests.reward_servers import noise_samples, remote_reward, start_faulty_server

SAMPLES = noise_samples(4)
RIGHT = [float(sample.image.mean()) / 255 for sample in SAMPLES]


@pytest.fixture(scope="module")
def bomb(tmp_path_factory):
    return tmp_path_factory.mktemp("bomb") / "unpickled"


@pytest.fixture(scope="module")
def faulty(bomb):
    server = start_faulty_server(bomb)
    yield server
    server.end()


@pytest.fixture(autouse=True)
def _quick_retries(monkeypatch):
    monkeypatch.setattr("sfumato.rewards.http.caller.FIRST_DELAY_S", 0.02)


def requests_seen(server, fault):
    return int(server.get(f"/count/{fault}"))


@pytest.mark.parametrize(
    ("fault", "kind", "fields"),
    [
        ("reset-2", "connection", {}),
        ("not_http-2", "connection", {}),
        ("half-2", "truncated", {}),
        ("half_chunk-2", "truncated", {}),
        ("broken-2", "status 500", {}),
        ("unavailable-2", "status 503", {}),
        ("busy-1", "status 429", {}),
        ("silent-1", "timeout", {"request_timeout_s": 2.0}),
        ("garbage-2", "bad answer", {}),
        ("page-2", "bad answer", {}),
        ("short-2", "bad answer", {}),
        ("gibibyte-2", "too large", {}),
    ],
)
def test_a_fault_that_passes_costs_time_and_nothing_else(faulty, fault, kind, fields):
    reward = remote_reward(f"{faulty.url}/{fault}", **fields)
    scores = Scorer([reward]).score(SAMPLES)
    assert scores.total.tolist() == RIGHT and scores.failures == []
    times = int(fault.rpartition("-")[2])
    assert reward.caller().counters == {kind: times}
    assert scores.notes == [f"remote: attempts that {faulty.url}/{fault} did not answer: {kind} ({times})"]
    assert Scorer([reward]).score(SAMPLES).notes == [], "told once"
    assert requests_seen(faulty, fault) == times + 2


def test_the_pause_that_a_busy_server_asks_for_is_kept(faulty):
    reward = remote_reward(f"{faulty.url}/busy-01")
    reward.prepare()
    started = time.monotonic()
    assert reward.score(SAMPLES) == RIGHT
    assert time.monotonic() - started >= 1.0


@pytest.mark.parametrize(
    ("fault", "kind", "reason", "attempts"),
    [
        ("reset", "connection", "closed connection", None),
        ("half", "truncated", "cut off", None),
        ("broken", "status 500", "HTTP status 500: <h1>internal server error</h1>; tried for 0.3 s", None),
        ("busy", "status 429", "HTTP status 429: come back later", 1),
        ("forbidden", "status 403", "HTTP status 403: not you", 1),
        ("redirect", "redirect", "redirects to 'http://169.254.169.254/latest/meta-data', which is refused", 1),
        ("compressed", "bad answer", "compressed (gzip)", 3),
        ("garbage", "bad answer", "not msgpack", 3),
        ("empty", "bad answer", "not msgpack", 3),
        ("page", "bad answer", "not msgpack", 3),
        ("short", "bad answer", "3 values for 4 samples", 3),
        ("long", "bad answer", "5 values for 4 samples", 3),
        ("texts", "bad answer", "values.0: Input should be a valid number", 3),
        ("truths", "bad answer", "values.0: Input should be a valid number", 3),
        ("one", "bad answer", "values: Input should be a valid list", 3),
        ("more", "bad answer", "extra: Extra inputs are not permitted", 3),
        ("newer", "bad answer", "version 3 of the protocol, not 2", 3),
        ("deep", "bad answer", "not msgpack", 3),
        ("huge_array", "bad answer", "not msgpack", 3),
        ("pickled", "bad answer", "not msgpack", 3),
        ("pickle_inside", "bad answer", "values: Input should be a valid list", 3),
    ],
)
def test_a_fault_that_stays_is_named_and_never_a_zero(faulty, bomb, fault, kind, reason, attempts):
    url = f"{faulty.url}/{fault}"
    reward = remote_reward(url, retry_for_s=0.3)
    scores = Scorer([reward, Brightness()]).score(SAMPLES)
    assert np.isnan(scores.components["remote"]).all() and np.isnan(scores.total).all()
    assert scores.components["brightness"].tolist() == RIGHT
    (failure,) = scores.failures
    assert failure.startswith(f"remote: {url}") and reason in failure and failure.endswith("(4 of 4 samples)")
    counters = reward.caller().counters
    assert set(counters) == {kind}
    assert counters[kind] == requests_seen(faulty, fault) == (attempts or counters[kind])
    assert not bomb.exists(), "a pickle was opened"


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("nan", "the server returned nan"),
        ("infinite", "the server returned inf"),
        ("null", "the server gave neither value nor reason"),
        ("named", "the server says: the picture is upside down"),
    ],
)
def test_one_value_that_is_none_loses_one_sample(faulty, fault, reason):
    scores = Scorer([remote_reward(f"{faulty.url}/{fault}")]).score(SAMPLES)
    assert math.isnan(scores.total[0]) and scores.total[1:].tolist() == RIGHT[1:]
    assert scores.failures == [f"remote: {reason} (1 of 4 samples)"]


@pytest.mark.parametrize("fault", ["gibibyte", "gibibyte_in_chunks", "gibibyte_unannounced"])
def test_a_body_of_a_gibibyte_does_not_fill_the_memory(faulty, fault):
    reward = remote_reward(f"{faulty.url}/{fault}")
    reward.prepare()
    tracemalloc.start()
    try:
        scores = Scorer([reward]).score(SAMPLES)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert np.isnan(scores.total).all() and "larger than 16 MiB" in scores.failures[0]
    assert reward.caller().counters == {"too large": 3}
    assert peak_bytes < (2 if fault == "gibibyte" else 40) * 2**20


@pytest.mark.parametrize("fault", ["silent", "trickle", "trickled_header"])
def test_a_server_that_takes_for_ever_is_left_in_time(faulty, fault):
    reward = remote_reward(f"{faulty.url}/{fault}", request_timeout_s=0.5, retry_for_s=0.6, timeout_s=20.0)
    reward.prepare()
    started = time.monotonic()
    scores = Scorer([reward]).score(SAMPLES)
    assert time.monotonic() - started < 8
    assert np.isnan(scores.total).all() and "no complete answer in time" in scores.failures[0]


def test_the_answers_that_arrived_before_the_time_of_the_call_was_over_count(faulty):
    reward = remote_reward(f"{faulty.url}/silent-01", request_timeout_s=1.99, retry_for_s=1.99, timeout_s=2.0)
    reward.prepare()
    samples = noise_samples(8)  # two requests, of which one hangs
    scores = Scorer([reward]).score(samples)
    assert np.isfinite(scores.total).sum() == 4
    assert not any("timed out after" in failure for failure in scores.failures), "the whole call was lost"


def test_an_outage_is_waited_out_once_and_not_once_per_request(faulty):
    reward = remote_reward(f"{faulty.url}/reset", retry_for_s=2.0)
    reward.prepare()
    for patient in (True, False, False):
        started = time.monotonic()
        assert np.isnan(Scorer([reward]).score(SAMPLES).total).all()
        waited_s = time.monotonic() - started
        assert waited_s > 1.0 if patient else waited_s < 1.0


def test_the_other_server_takes_over_without_a_pause(faulty, monkeypatch):
    monkeypatch.setattr("sfumato.rewards.http.caller.FIRST_DELAY_S", 100.0)
    monkeypatch.setattr("sfumato.rewards.http.caller.MAX_DELAY_S", 100.0)
    for fault in ("broken", "forbidden", "garbage", "reset"):
        reward = remote_reward(f"{faulty.url}/{fault}", f"{faulty.url}/fine", name=fault, retry_for_s=10.0)
        samples = noise_samples(16)
        values = reward.score(samples)
        assert values == [float(sample.image.mean()) / 255 for sample in samples]
        assert reward.caller().counters.total() >= 1


def test_a_server_that_is_not_there_is_named_before_the_run_starts(monkeypatch):
    monkeypatch.setattr("sfumato.rewards.remote.START_WAIT_S", 0.3)
    reward = remote_reward("http://127.0.0.1:9")
    with pytest.raises(ConfigError) as caught:
        Scorer([reward]).prepare()
    for part in ("http://127.0.0.1:9", "Connection refused", "python -m sfumato.rewards.server CONFIG", "base_urls"):
        assert part in str(caught.value)


def test_private_addresses_are_refused_unless_allowed(faulty):
    seen = requests_seen(faulty, "fine")
    for host in ("127.0.0.1", "localhost"):
        url = f"http://{host}:{faulty.port}/fine"
        reward = RemoteReward(base_urls=(url,))
        with pytest.raises(ConfigError, match=r"127\.0\.0\.1, which is refused: set allow_private: true"):
            reward.prepare()
        assert reward.caller(url).counters == {"private address": 1}
    assert requests_seen(faulty, "fine") == seen
