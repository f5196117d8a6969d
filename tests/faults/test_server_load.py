"""Servers under floods: who has the key is answered within two seconds, files can be written, memory is bounded."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from sfumato.rewards.http import wire
from sfumato.rollout.agents.openai_endpoint import Endpoint
from sfumato.rollout.agents.recorded_calls import PolicyReply
from tests.reward_servers import noise_samples, start_server

KEY = "the key of the load test"
SECONDS, LIMIT_S = 8.0, 2.0
MAPS = b"\x83\xa7version\x02\xa6reward\xaabrightness\xa7samples\xdd\x00\x00\xff\xff" + b"\x81\xa1a\xc0" * 2**20
NILS = b"\x83\xa7version\x02\xa6reward\xaabrightness\xa7samples\xdd\x00\x00\xff\xff" + b"\xc0" * 2**22


def head(port: int, path: str, kind: str, length: int, key: str = "") -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Host: 127.0.0.1:{port}", f"Content-Type: {kind}", f"Content-Length: {length}"]
    return "\r\n".join([*lines, *([f"Authorization: Bearer {key}"] if key else []), "", ""]).encode()


def flood(port: int, path: str, kind: str, what: str, until: float, key: str) -> None:
    """Does one thing to a server again and again, in bounded time and number."""
    opened: list[socket.socket] = []
    for _ in range(4000):
        if time.monotonic() > until:
            break
        with contextlib.suppress(OSError):
            connection = socket.create_connection(("127.0.0.1", port), timeout=2)
            opened.append(connection)
            if what == "half-open":
                connection.sendall(b"POST /score HTTP/1.1\r\nHost: 127.0.0.1\r\nX")
            elif what == "large":
                connection.sendall(head(port, path, kind, 2**30) + bytes(2**16))
            elif what == "deep":
                body = (MAPS if kind == wire.MEDIA_TYPE else b'{"a":' * 400_000)[: 2**20]
                connection.sendall(head(port, path, kind, len(body), key) + body)
                connection.recv(1000)
            elif what == "slow":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
                connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 200)
        while len(opened) > 400:
            opened.pop(0).close()
        time.sleep(0.002 if what == "half-open" else 0.02)
    for connection in opened:
        connection.close()


@contextlib.contextmanager
def flooded(port: int, path: str, kind: str, key: str = "") -> Iterator[float]:
    """Four floods at once, for ``SECONDS``."""
    until = time.monotonic() + SECONDS
    threads = [
        threading.Thread(target=flood, args=(port, path, kind, what, until, key))
        for what in ("half-open", "large", "deep", "slow")
    ]
    for thread in threads:
        thread.start()
    try:
        yield until
    finally:
        for thread in threads:
            thread.join()


def longest(ask, until: float) -> tuple[float, int]:
    """The longest time of an answer, and how many there were."""
    times = []
    time.sleep(1.0)
    while time.monotonic() < until:
        started = time.monotonic()
        ask()
        times.append(time.monotonic() - started)
        time.sleep(0.05)
    return max(times), len(times)


@pytest.mark.slow
def test_a_flooded_reward_server_answers_who_has_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOAD_KEY", KEY)
    server = start_server(tmp_path, [{"type": "brightness"}], token_env="LOAD_KEY")
    body = wire.encode_request("brightness", [wire.encode_sample(noise_samples(1)[0])])
    process, peaks = psutil.Process(server.process.pid), []
    before = process.memory_info().rss

    def ask() -> None:
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
        connection.request("POST", "/score", body, {"Content-Type": wire.MEDIA_TYPE, "Authorization": f"Bearer {KEY}"})
        assert connection.getresponse().status == 200
        connection.close()
        peaks.append((process.memory_info().rss, process.num_fds()))

    try:
        with flooded(server.port, "/score", wire.MEDIA_TYPE) as until:
            slowest_s, count = longest(ask, until)
        with flooded(server.port, "/score", wire.MEDIA_TYPE, KEY) as until:  # deep bodies of somebody with the key
            slowest_with_key_s, _ = longest(ask, until)
    finally:
        server.end()
    memory_mib, descriptors = max(rss for rss, _ in peaks) - before >> 20, max(number for _, number in peaks)
    print(f"reward server: {count} answers, slowest {slowest_s:.2f} s and {slowest_with_key_s:.2f} s,", end=" ")
    print(f"{memory_mib} MiB more, {descriptors} descriptors")
    assert slowest_s < LIMIT_S and slowest_with_key_s < LIMIT_S
    assert memory_mib < 512 and descriptors < 900


@pytest.mark.slow
@pytest.mark.parametrize("what", ["maps", "nils"])
def test_under_a_limit_of_memory_no_request_ends_the_server(tmp_path: Path, what: str) -> None:
    server = start_server(tmp_path, [{"type": "brightness"}])
    resource.prlimit(server.process.pid, resource.RLIMIT_AS, (5 * 2**30, 5 * 2**30))
    for body in [MAPS if what == "maps" else NILS] * 3:
        started = time.monotonic()
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
        connection.request("POST", "/score", body, {"Content-Type": wire.MEDIA_TYPE})
        assert connection.getresponse().status == 400
        connection.close()
        assert time.monotonic() - started < LIMIT_S
    assert server.get("/ready") == "ready\n"
    peak_kib = next(
        line for line in Path(f"/proc/{server.process.pid}/status").read_text().splitlines() if "VmHWM" in line
    )
    print(peak_kib)
    server.end()


class _Session:
    """What a sample answers without a model."""

    api_key = KEY
    is_over = False
    error = None

    def __init__(self) -> None:
        self.tasks: set = set()

    async def chat(self, messages, tools, most) -> PolicyReply:
        return PolicyReply("yes", {"role": "assistant", "content": "yes"}, "stop", [1], [-1.0], 3)

    def end(self) -> None:
        self.is_over = True


@pytest.mark.slow
def test_a_flooded_endpoint_answers_its_agents_and_the_run_can_write(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
    ready, ended, port = threading.Event(), threading.Event(), []

    async def serve() -> None:
        endpoint = Endpoint()
        await endpoint.start()
        with endpoint.serving(_Session()):
            port.append(int(endpoint.base_url.rpartition(":")[2].partition("/")[0]))
            ready.set()
            while not ended.is_set():
                await asyncio.sleep(0.05)
        await endpoint.stop()

    thread = threading.Thread(target=lambda: asyncio.run(serve()))
    thread.start()
    assert ready.wait(20)
    num_written, before = 0, psutil.Process().memory_info().rss
    body = json.dumps({"messages": [{"role": "user", "content": "?"}]})

    def ask() -> None:
        nonlocal num_written
        connection = http.client.HTTPConnection("127.0.0.1", port[0], timeout=10)
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        assert connection.getresponse().status == 200
        connection.close()
        (tmp_path / f"checkpoint_{num_written}").write_bytes(b"x")
        num_written += 1

    flooding = os.fork()  # strangers have descriptors of their own
    if flooding == 0:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
        with flooded(port[0], "/v1/chat/completions", "application/json", KEY):
            pass
        os._exit(0)
    try:
        slowest_s, count = longest(ask, time.monotonic() + SECONDS)
    finally:
        os.waitpid(flooding, 0)
        ended.set()
        thread.join()
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    memory_mib = psutil.Process().memory_info().rss - before >> 20
    print(f"endpoint: {count} answers, slowest {slowest_s:.2f} s, {memory_mib} MiB more")
    assert slowest_s < LIMIT_S and num_written == count and memory_mib < 512
