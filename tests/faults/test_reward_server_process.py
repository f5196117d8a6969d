"""The reward server as a process: what it serves, refuses and counts, and how it ends, dies and comes back."""

from __future__ import annotations

import http.client
import pickle
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor

import msgpack
import numpy as np
import pytest

from sfumato.errors import ConfigError
from sfumato.rewards.http import wire
from sfumato.rewards.http.caller import HttpError
from sfumato.rewards.scoring.scorer import Scorer
from tests.reward_servers import noise_samples, remote_reward, start_server
from tests.tiny import ROOT, write_config

MODULE = "rewards_of_a_server"
SOURCE = """
import time
from dataclasses import dataclass
from typing import ClassVar
from sfumato.errors import DataError
from sfumato.rewards.base import Reward

@dataclass(frozen=True, kw_only=True)
class Everything(Reward):
    "Depends on all that a sample has."
    type: ClassVar[str] = "everything"

    def score(self, samples):
        return [each.image.sum() / 7 + len(each.prompt) + each.metadata["depth"]["list"][1] / 3 for each in samples]

@dataclass(frozen=True, kw_only=True)
class Rank(Reward):
    "Place of a picture in its group."
    type: ClassVar[str] = "rank"
    groupwise: ClassVar[bool] = True

    def score(self, samples):
        assert len(samples) == 3
        means = [each.image.mean() for each in samples]
        return [float(sum(other < mean for other in means)) for mean in means]

@dataclass(frozen=True, kw_only=True)
class Moody(Reward):
    "Cannot stand some prompts."
    type: ClassVar[str] = "moody"

    def score(self, samples):
        for each in samples:
            if "curse" in each.prompt:
                raise RuntimeError("cursed")
            if "nobody" in each.prompt:
                raise DataError("the row has no target")
        return [1.0] * len(samples)

@dataclass(frozen=True, kw_only=True)
class Slow(Reward):
    "Takes its time."
    type: ClassVar[str] = "slow"
    seconds: float = 1.0
    load_s: float = 0.0

    def prepare(self):
        time.sleep(self.load_s)

    def score(self, samples):
        time.sleep(self.seconds)
        return [1.0] * len(samples)
"""


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    folder = tmp_path_factory.mktemp("modules")
    (folder / f"{MODULE}.py").write_text(SOURCE)
    return folder


@pytest.fixture(scope="module")
def served(modules, tmp_path_factory):
    rewards = [{"type": "brightness"}, *({"type": f"{MODULE}:{name}"} for name in ("Everything", "Rank", "Moody"))]
    settings = {"max_wait_ms": 300, "max_batch_size": 6, "max_request_mib": 1}
    server = start_server(tmp_path_factory.mktemp("served"), rewards, modules=modules, **settings)
    yield server
    server.end()


def reward_of_module(name, **fields):
    return {"type": f"{MODULE}:{name}", **fields}


def local_reward(modules, monkeypatch, name):
    monkeypatch.syspath_prepend(modules)
    return getattr(__import__(MODULE), name)()


@pytest.mark.parametrize("name", ["Everything", "Rank"])
def test_a_served_reward_gives_exactly_the_values_of_the_local_one(served, modules, monkeypatch, name):
    local = local_reward(modules, monkeypatch, name)
    remote = remote_reward(served.url, reward=local.type, groupwise=local.groupwise)
    samples = noise_samples(18, group_size=3)
    for scorer in (Scorer([local]), Scorer([remote])):
        scorer.prepare()
    here, there = (Scorer([reward]).score(samples) for reward in (local, remote))
    assert there.failures == here.failures == []
    assert there.total.tobytes() == here.total.tobytes()


def test_small_requests_are_scored_together_and_one_that_fails_takes_no_other_with_it(served):
    prompts = ["fine", "a curse", "fine too", "nobody"]
    reward = remote_reward(served.url, reward="moody")
    reward.prepare()
    calls = metric(served, 'sfumato_call_seconds_count{reward="moody"}')
    failed = metric(served, 'sfumato_failures_total{reward="moody"}')
    body = [wire.encode_request("moody", [{**wire.encode_sample(noise_samples(1)[0]), "prompt": p}]) for p in prompts]

    def ask(data):
        return reward.caller().post("/score", data, wire.MEDIA_TYPE, lambda answer: wire.decode_answer(answer, 1))[0]

    with ThreadPoolExecutor(4) as pool:
        fine, cursed, fine_too, nobody = pool.map(ask, body)
    assert fine == fine_too == 1.0
    assert "RuntimeError: cursed" in cursed.reason and nobody.reason == "the server says: the row has no target"
    assert metric(served, 'sfumato_call_seconds_count{reward="moody"}') - calls < 4
    assert metric(served, 'sfumato_failures_total{reward="moody"}') - failed == 2


def metric(server, name):
    return float(next(line for line in server.get("/metrics").splitlines() if line.startswith(name)).split()[-1])


def post(server, body, path="/score", method="POST", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request(method, path, body, {"Content-Type": wire.MEDIA_TYPE, **headers})
    answer = connection.getresponse()
    text = answer.read().decode(errors="replace")
    connection.close()
    return answer.status, text


def request_of(**changes):
    sample = wire.encode_sample(noise_samples(1)[0])
    return msgpack.packb({"version": 2, "reward": "brightness", "samples": [{**sample, **changes}]})


def png(width, height, mode=2, depth=8):
    """The beginning of a PNG that claims to be so large."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, depth, mode, 0, 0, 0)
    checked = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + checked + struct.pack(">I", 1000) + b"IDAT"


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (b"hello", 400, "not msgpack"),
        (b"", 400, "not msgpack"),
        (pickle.dumps({"version": 2}), 400, "not msgpack"),
        (msgpack.packb([1, 2]), 400, "Input should be a valid dictionary"),
        (msgpack.packb({"version": 3}), 400, "version 3 of the protocol, not 2"),
        (msgpack.packb({"version": 2, "reward": "brightness", "samples": []}), 400, "at least 1 item"),
        (msgpack.packb({"version": 2, "reward": "brightness", "samples": [{}]}), 400,
         "samples.0.image: Field required"),
        (msgpack.packb({"version": 2, "reward": "ocr", "samples": [msgpack.unpackb(request_of())["samples"][0]]}), 404,
         "no reward 'ocr' here; served are: brightness, everything, rank, moody"),
        (request_of(group_id="1"), 400, "samples.0.group_id: Input should be a valid integer"),
        (request_of(image=b"GIF89a"), 400, "samples.0: no readable PNG"),
        (request_of(image=[]), 400, "samples.0: a video without frames"),
        (request_of(image=png(8, 8)), 400, "samples.0: no readable PNG"),
        (request_of(image=png(8, 8, mode=6)), 400, "samples.0: a PNG of mode RGBA"),
        (request_of(image=png(12_000, 12_000)), 400, "samples.0: a PNG of 12000 x 12000 pixels, more than"),
        (request_of(image=png(60_000, 60_000)), 400, "samples.0: no readable PNG (DecompressionBombError)"),
        (request_of(metadata="[]"), 400, "samples.0: metadata is no JSON object"),
        (request_of(metadata="[" * 100_000), 400, "samples.0: nested more than 100 times"),
        (request_of(text="a"), 400, "samples.0: not either an image or a text"),
        (request_of(image=None), 400, "samples.0: not either an image or a text"),
        (request_of(extra=1), 400, "samples.0.extra: Extra inputs are not permitted"),
    ],
)  # fmt: skip
def test_a_request_that_is_none_is_refused_with_the_reason(served, body, status, reason):
    got, text = post(served, body)
    assert got == status and reason in text
    assert f'sfumato_requests_total{{status="{status}"}}' in served.get("/metrics")


def test_a_request_that_is_too_large_is_refused_before_it_is_read(served):
    http = remote_reward(served.url).caller()
    with pytest.raises(HttpError, match="HTTP status 413: the request is larger than max_request_mib 1"):
        http.post("/score", bytes(50 * 2**20), wire.MEDIA_TYPE, bytes)
    assert http.counters["status 413"] == 1


def test_other_methods_and_paths_are_not_found(served):
    assert post(served, b"", "/nothing")[0] == 404
    assert post(served, b"", method="GET")[0] == 405
    assert served.get("/health") == "alive\n" and served.get("/ready") == "ready\n"


def test_a_sample_that_is_too_large_for_the_server_is_named_and_the_others_are_scored(served):
    small, large = noise_samples(1)[0], noise_samples(1, size=700)[0]
    scores = Scorer([remote_reward(served.url, reward="brightness")]).score([small, large, small])
    assert np.isnan(scores.total).tolist() == [False, True, False]
    assert scores.failures == ["brightness: a sample is larger than max_request_mib 1 of the server (1 of 3 samples)"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward": "ocr"}, "serves no reward 'ocr'; it serves: brightness, everything, rank, moody"),
        ({}, "serves several rewards (brightness, everything, rank, moody): choose one with 'reward'"),
        ({"reward": "rank"}, "says that groupwise is true: set it so"),
        ({"reward": "moody", "groupwise": True}, "says that groupwise is false: set it so"),
    ],
)
def test_a_run_that_asks_for_something_else_than_what_is_served_does_not_start(served, fields, message):
    with pytest.raises(ConfigError) as caught:
        remote_reward(served.url, **fields).prepare()
    assert served.url in str(caught.value) and message in str(caught.value)


def test_servers_with_different_settings_are_refused(modules, tmp_path):
    servers = [
        start_server(tmp_path, [reward_of_module("Slow", seconds=value)], modules=modules) for value in (0.0, 0.1)
    ]
    with pytest.raises(ConfigError, match=r"serve 'slow' with different settings"):
        remote_reward(*(server.url for server in servers)).prepare()
    for server in servers:
        assert server.end(signal.SIGTERM)[0] == 0


def test_servers_with_different_files_are_refused(tmp_path):
    path, servers = tmp_path / "own.py", []
    for factor in (1, 1, 2):
        path.write_text(f"def score(sample):\n    return {factor} * sample.image.mean()\n")
        servers.append(start_server(tmp_path, [{"type": "function", "path": f"{path}:score", "process": False}]))
    urls = [server.url for server in servers]
    remote_reward(*urls[:2], timeout_s=50.0).prepare()
    with pytest.raises(ConfigError, match=r"serve 'score' with different settings"):
        remote_reward(*urls).prepare()
    for server in servers:
        assert server.end(signal.SIGTERM)[0] == 0


def test_a_server_that_dies_and_comes_back_costs_no_sample(tmp_path):
    server = start_server(tmp_path, [{"type": "brightness"}])
    reward = remote_reward(server.url)
    samples = noise_samples(4)
    right = reward.score(samples)
    server.end()
    started = []
    restart = threading.Timer(
        1.0, lambda: started.append(start_server(tmp_path, [{"type": "brightness"}], port=server.port))
    )
    restart.start()
    scores = Scorer([reward]).score(samples)
    restart.join()
    assert scores.total.tolist() == right and scores.failures == []
    assert reward.caller().counters["connection"] >= 1
    started[0].end()
    reward = remote_reward(server.url, retry_for_s=0.2)
    scores = Scorer([reward]).score(samples)
    assert np.isnan(scores.total).all() and f"{server.url}: Connection refused" in scores.failures[0]


def test_a_run_that_starts_before_its_server_has_loaded_waits_for_it(modules, tmp_path, monkeypatch):
    monkeypatch.setattr("sfumato.rewards.http.caller.MAX_DELAY_S", 0.1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(
            start_server, tmp_path, [reward_of_module("Slow", seconds=0.0, load_s=1.0)], port, modules
        )
        reward = remote_reward(f"http://127.0.0.1:{port}")
        reward.prepare()
        server = starting.result()
    failures = reward.caller().counters
    assert failures["connection"] >= 1 and failures["status 503"] >= 1
    assert reward.score(noise_samples(2)) == [1.0, 1.0]
    server.end()


def test_a_full_server_asks_for_patience_and_a_slow_one_is_not_waited_for(modules, tmp_path):
    server = start_server(
        tmp_path, [reward_of_module("Slow", seconds=0.3)], modules=modules, max_queue=1, max_batch_size=1
    )
    patient = remote_reward(server.url)
    with ThreadPoolExecutor(1) as pool:
        values = pool.submit(patient.score, noise_samples(4))
        states = {post(server, b"", "/ready", "GET")}
        while not values.done():
            states.add(post(server, b"", "/ready", "GET"))
            time.sleep(0.02)
        assert values.result() == [1.0] * 4
    assert (503, "full\n") in states
    assert patient.caller().counters["status 429"] >= 1
    hurried = remote_reward(server.url, request_timeout_s=0.2, retry_for_s=0.3)
    scores = Scorer([hurried]).score(noise_samples(1))
    assert np.isnan(scores.total).all() and server.url in scores.failures[0]
    server.wait_for_metric("sfumato_queue_length 0")
    assert 'status="499"' in server.get("/metrics"), "the server noticed that nobody waits"
    server.end()


def test_a_server_that_is_told_to_stop_finishes_what_it_accepted(modules, tmp_path):
    server = start_server(tmp_path, [reward_of_module("Slow", seconds=2.0)], modules=modules)
    reward = remote_reward(server.url)
    reward.prepare()
    with ThreadPoolExecutor(1) as pool:
        values = pool.submit(reward.score, noise_samples(2))
        server.wait_for_metric("sfumato_queue_length 1")
        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 10
        while post(server, b"", "/ready", "GET") == (200, "ready\n"):
            assert time.monotonic() < deadline
        assert post(server, b"", "/ready", "GET") == (503, "stopping\n")
        assert post(server, request_of()) == (503, "the server is stopping\n")
        assert values.result() == [1.0, 1.0]
    output, _ = server.process.communicate(timeout=30)
    assert server.process.returncode == 0 and output == "stopping: accepted requests are finished\n"


def test_a_second_signal_ends_the_server_at_once(modules, tmp_path):
    server = start_server(tmp_path, [reward_of_module("Slow", seconds=50.0)], modules=modules)
    reward = remote_reward(server.url, retry_for_s=0.1)
    reward.prepare()
    with ThreadPoolExecutor(1) as pool:
        values = pool.submit(reward.score, noise_samples(1))
        server.wait_for_metric("sfumato_queue_length 1")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.stdout.readline() == "stopping: accepted requests are finished\n"
        while post(server, b"", "/ready", "GET")[1] != "stopping\n":
            time.sleep(0.02)
        assert server.end(signal.SIGTERM)[0] == 128 + signal.SIGTERM
        assert server.url in values.result()[0].reason


def test_a_key_is_asked_for_and_never_shown(tmp_path, monkeypatch):
    monkeypatch.setenv("REWARD_KEY", "a-secret")
    monkeypatch.setenv("WRONG_KEY", "another-secret")
    server = start_server(tmp_path, [{"type": "brightness"}], token_env="REWARD_KEY")
    samples = noise_samples(2)
    right = [sample.image.mean() / 255 for sample in samples]
    assert remote_reward(server.url, api_key_env="REWARD_KEY").score(samples) == right
    for fields in ({}, {"api_key_env": "WRONG_KEY"}):
        with pytest.raises(ConfigError, match=r"HTTP status 401: the key is missing or wrong") as caught:
            remote_reward(server.url, **fields).prepare()
        assert "secret" not in str(caught.value)
    assert post(server, b"", "/metrics", "GET")[0] == 401 and post(server, b"", "/health", "GET")[0] == 200
    monkeypatch.delenv("REWARD_KEY")
    with pytest.raises(ConfigError, match=r"environment variable REWARD_KEY, which is not set"):
        remote_reward(server.url, api_key_env="REWARD_KEY", name="later").prepare()
    _, output = server.end()
    assert "secret" not in output


def test_a_server_that_cannot_serve_says_why_and_ends(served, modules, tmp_path):
    config = write_config({"rewards": [{"type": "brightness"}], "port": served.port}, tmp_path / "taken.yaml")
    command = [sys.executable, "-m", "sfumato.rewards.server", str(config)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and f"cannot listen on 127.0.0.1:{served.port}" in done.stderr
    config = write_config({"rewards": [{"type": "ocr", "engine": "tesseract"}], "port": 0}, tmp_path / "missing.yaml")
    command[-1] = str(config)
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=60, env={"PATH": "", "PYTHONPATH": str(ROOT)}
    )
    assert done.returncode == 2 and "apt-get install tesseract-ocr" in done.stderr
