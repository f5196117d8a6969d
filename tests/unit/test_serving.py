"""What servers are held to: which requests they look at, how long connections last, how large JSON may be."""

import asyncio
import gc
import json
import resource
import socket
import time

import msgpack
import pytest

from sfumato.rewards.base import Failure
from sfumato.rewards.http import wire
from sfumato.rewards.http.chat_completions import decode_reply
from sfumato.serving import connections
from sfumato.serving.bounded_json import JSONLimitError, load_json
from sfumato.serving.connections import max_connections, network_of, trust_connection, uvicorn_config
from sfumato.serving.outgoing import BadAnswerError
from sfumato.serving.requests import ByteBudget, RefusedRequestError, RequestGuard, host_of, read_body
from tests.reward_servers import noise_samples


@pytest.mark.parametrize(
    ("header", "host"),
    [("Node7:80", "node7"), ("[::1]:8642", "::1"), ("[::1]", "::1"), ("a.example.", "a.example"), ("", ""),
     ("::1", ""), ("a:b", ""), ("[::1]x", ""), ("[::1", ""), ("127.0.0.1:1:2", "")],
)  # fmt: skip
def test_the_host_of_a_header(header, host):
    assert host_of(header) == host


HOSTS = [  # headers, and the status of the answer
    ({"Host": "127.0.0.1:{port}"}, 200),
    ({"Host": "localhost"}, 200),
    ({"Host": "LOCALHOST.:{port}"}, 200),
    ({"Host": "[::1]:{port}"}, 200),
    ({"Host": socket.gethostname()}, 200),
    ({"Host": "scores.example"}, 200),
    ({"Host": "10.1.2.3:{port}"}, 200),
    ({"Host": "evil.example"}, 421),
    ({"Host": "localhost.evil.example"}, 421),
    ({"Host": "evil.example@localhost"}, 421),
    ({"Host": "10.1.2.4"}, 421),
    ({"Host": "0.0.0.0"}, 421),
    ({"Host": "2130706433"}, 421),
    ({"Host": "127.0.0.1.nip.io"}, 421),
    ({"Host": ""}, 421),
    ({"Host": "localhost", "Origin": "http://localhost"}, 403),
    ({"Host": "localhost", "Origin": "null"}, 403),
    ({"Host": "localhost", "Sec-Fetch-Site": "cross-site"}, 403),
    ({"Host": "localhost", "Sec-Fetch-Site": "same-site"}, 403),
    ({"Host": "localhost", "Sec-Fetch-Site": "none"}, 200),
]


def test_requests_for_other_hosts_and_of_web_pages_are_refused():
    async def ask(port):
        requests = [
            "".join(f"{name}: {value.format(port=port)}\r\n" for name, value in headers.items()) for headers, _ in HOSTS
        ]
        return [await exchange(port, f"GET / HTTP/1.1\r\n{lines}\r\n".encode()) for lines in requests]

    answers = asyncio.run(served(RequestGuard(hello, ["scores.example", "10.1.2.3"], ": add it"), ask))
    for (headers, status), answer in zip(HOSTS, answers, strict=True):
        assert answer.startswith(f"HTTP/1.1 {status} ".encode()), headers
        assert (b": add it" in answer) == (status == 421), headers


async def hello(scope, receive, send):
    trust_connection(scope)
    if scope["method"] == "POST":
        try:
            from starlette.requests import Request

            await read_body(Request(scope, receive), 1000, "too large", 60.0)
        except RefusedRequestError as error:
            await send({"type": "http.response.start", "status": error.status, "headers": [(b"connection", b"close")]})
            await send({"type": "http.response.body"})
            return
    size = int(scope["query_string"] or b"2")
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % size)]})
    await send({"type": "http.response.body", "body": b"x" * size})


async def served(app, do):
    """What ``do`` returns, which is given the port of a server of the application."""
    import uvicorn

    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn_config(app, grace_s=1))
    serving = asyncio.create_task(server._serve([listening]))
    try:
        return await do(listening.getsockname()[1])
    finally:
        server.should_exit = True
        await serving


async def exchange(port, request, wait_s=10.0):
    """What comes back until the connection ends or rests."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await asyncio.wait_for(reader.read(100_000), wait_s)
    finally:
        writer.close()


@pytest.fixture
def short_times(monkeypatch):
    monkeypatch.setattr(connections, "HEADERS_S", 0.4)
    monkeypatch.setattr(connections, "STALLED_S", 0.4)
    monkeypatch.setattr(connections, "MIN_BYTES_PER_S", 2**26)
    monkeypatch.setattr("sfumato.serving.requests.BODY_START_S", 0.4)


@pytest.mark.parametrize(
    "beginning",
    [
        b"",
        b"GET / HTTP/1.1\r\nHost: local",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP/1.1\r\n",  # a second one that does not come
        b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 900\r\n\r\nabc",
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n384\r\nab",
    ],
)
def test_what_never_becomes_complete_ends_within_seconds_also_when_it_drips(short_times, beginning):
    async def drip(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(beginning)
        reading, started = asyncio.ensure_future(reader.read()), time.monotonic()
        while not reading.done() and time.monotonic() - started < 5:
            await asyncio.wait([reading], timeout=0.1)
            writer.write(b"a")
        writer.transport.abort()
        await asyncio.wait([reading])
        reading.exception()  # or the end of the stream
        return time.monotonic() - started

    assert asyncio.run(served(RequestGuard(hello), drip)) < 4


def test_an_answer_that_nobody_reads_is_given_up(short_times):
    size = 30_000_000

    async def wait_and_read(port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
        writer.write(b"GET /?%d HTTP/1.1\r\nHost: localhost\r\n\r\n" % size)
        await asyncio.sleep(2)
        num_bytes = 0
        try:
            while piece := await asyncio.wait_for(reader.read(2**20), 2):
                num_bytes += len(piece)
        except ConnectionError:
            pass
        writer.transport.abort()
        return num_bytes

    assert asyncio.run(served(RequestGuard(hello), wait_and_read)) < size


def test_of_too_many_connections_the_oldest_without_a_key_gives_way(monkeypatch):
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 12)

    async def ask(port):
        friend = await asyncio.open_connection("127.0.0.1", port)
        friend[1].write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await friend[0].read(1000)).startswith(b"HTTP/1.1 200 OK")
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(40)]
        await asyncio.sleep(0.2)
        friend[1].write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        again = await asyncio.wait_for(friend[0].read(1000), 2)
        new = await exchange(port, b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", 2)
        ended = [reader.at_eof() or reader.exception() is not None for reader, _ in strangers]
        for _, writer in [friend, *strangers]:
            writer.transport.abort()
        return again, new, ended

    again, new, ended = asyncio.run(served(RequestGuard(hello), ask))
    assert b"200 OK" in again and b"200 OK" in new
    assert sum(ended) >= 28 and all(ended[:28])


def test_connections_leave_descriptors_to_the_process(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 4096))
    assert max_connections() == 384
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert max_connections() == 512
    monkeypatch.setattr(resource, "getrlimit", lambda _: (100, 100))
    assert max_connections() == 8


def test_addresses_of_one_network_are_one_peer():
    assert network_of("10.0.0.1") != network_of("10.0.0.2")
    assert network_of("2001:db8::1") == network_of("2001:db8::ffff:1%eth0") != network_of("2001:db8:0:1::1")
    assert network_of("::ffff:10.0.0.1") == network_of("10.0.0.1") and network_of("a path") == "a path"


def test_a_budget_of_bytes_is_shared_and_freed_in_turn():
    async def use():
        budget, order = ByteBudget(10), []

        async def hold(name, size, seconds):
            with budget.share() as share:
                await share.wait_to_grow(size)
                order.append(name)
                await asyncio.sleep(seconds)

        waiting = [hold("a", 6, 0.05), hold("b", 10, 0.01), hold("c", 1, 0.01)]
        await asyncio.gather(*waiting)
        assert order == ["a", "b", "c"] and budget.held == 0
        with budget.share() as first, budget.share() as second:
            first.grow_to(7)
            first.grow_to(5)
            with pytest.raises(RefusedRequestError, match="come back later"):
                second.grow_to(4)
        assert budget.held == 0

    asyncio.run(use())


@pytest.mark.parametrize(
    "text", ["[" * 101 + "]" * 101, '{"a":' * 101 + "1" + "}" * 101, "[" * 100_000, "[0,0,0,0,0]", b"[0,0,0,0,0]"]
)
def test_json_that_is_too_deep_or_too_long_is_refused(text):
    with pytest.raises(JSONLimitError, match="more than"):
        load_json(text, max_values=5 if len(text) < 20 else 10**6)


def test_json_within_the_limits_is_what_json_makes_of_it():
    text = json.dumps({"a": ["[[[[", 1, {"b": None}], "deep": [[[[1.5]]]] * 60})
    assert load_json(text, max_values=1000) == load_json(text.encode(), max_values=1000) == json.loads(text)


def sample(**changes):
    return {**wire.encode_sample(noise_samples(1)[0]), **changes}


def request_of(*samples):
    return msgpack.packb({"version": 2, "reward": "r", "samples": list(samples)})


HOSTILE = {
    "small maps": b"\x83\xa7version\x02\xa6reward\xa1r\xa7samples\xdd\x00\x05\x55\x55" + b"\x81\xa1a\xc0" * 2**18,
    "nils": b"\x83\xa7version\x02\xa6reward\xa1r\xa7samples\xdd\x00\x00\xff\xff" + b"\xc0" * 2**22,
    "a map of nils": b"\xdf\x00\x20\x00\x00" + b"\xa1a\xc0" * 2**20,
    "lists in lists": b"\x83\xa7version\x02\xa6reward\xa1r\xa7samples" + b"\xdd\x00\x10\x00\x00" * 2**20,
    "lists in a text": request_of(sample()).replace(b"\xa6prompt", b"\xa6prompt" + b"\x9f" * 2**20),
    "frames": request_of(sample(image=[b""] * 20_000)),
    "metadata": request_of(sample(metadata='{"a":[' + "{}," * 2**21 + "0]}")),
    "metadata of many": request_of(*[sample(metadata='{"a":[' + "{}," * 2**18 + "0]}") for _ in range(9)]),
    "messages": request_of(sample(messages='[{"a":[' + "{}," * 2**21 + "0]}]")),
    "messages of another kind": request_of(sample(messages='["a"]')),
    "deep metadata": request_of(sample(metadata='{"a":' * 500 + "0" + "}" * 500)),
    "pickle": b"\x80\x04" + b"N" * 2**20,
    "an extension": request_of(sample(prompt=msgpack.ExtType(5, b"x" * 2**20))),
    "twice": b"\x83\xa7version\x02\xa7version\x02\xa7version\x02",
    "more after it": request_of(sample()) + b"\xc0" * 2**20,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_request_is_refused_at_its_first_mistake_in_little_memory(name):
    import tracemalloc

    gc.collect()
    tracemalloc.start()
    started = time.monotonic()
    try:
        with pytest.raises(wire.WireError) as caught:
            wire.decode_request(HOSTILE[name])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(str(caught.value)) < 200
    assert time.monotonic() - started < 2
    assert peak < 3 * len(HOSTILE[name]) + 2**20


def test_reading_ends_when_nobody_waits_any_more():
    data = request_of(*[sample()] * 100)
    asked = []
    with pytest.raises(wire.WireError, match="nobody waits"):
        wire.read_request(data, lambda: asked.append(1) or len(asked) > 10)
    with pytest.raises(wire.WireError, match="nobody waits"):
        wire.decode_samples(wire.read_request(data), lambda: True)


@pytest.mark.parametrize(
    "data",
    [
        msgpack.packb({"version": 2, "values": [None] * 2**20, "failures": [None] * 4}),
        msgpack.packb({"version": 2, "values": [[[]]] * 4, "failures": [None] * 4}),
        msgpack.packb({"version": 2, "values": [1.0] * 4, "failures": [{"a": 1}] * 4}),
        b"\xdf\xff\xff\xff\xff",
    ],
    ids=["long", "deep", "maps", "size"],
)
def test_a_hostile_answer_is_bad_at_once(data):
    with pytest.raises(wire.WireError):
        wire.decode_answer(data, 4)


def test_a_description_of_very_many_rewards_is_refused():
    served = {f"reward {number}": {"groupwise": False, "fingerprint": "x"} for number in range(2000)}
    with pytest.raises(wire.WireError, match="2000 keys"):
        wire.decode_description(
            msgpack.packb({"version": 2, "rewards": served, "max_batch_size": 1, "max_request_mib": 1})
        )


def test_values_of_an_answer_are_what_they_were():
    answer = msgpack.packb({"failures": [None, "why"], "values": [1, None], "version": 2})
    assert wire.decode_answer(answer, 2) == [1.0, Failure("the server says: why")]


@pytest.mark.parametrize(
    "content", ['{"choices":[' + "1," * 2**20 + "1]}", '{"a":' * 2000, '{"choices":[{"message":' + "[" * 5000]
)
def test_a_hostile_reply_of_a_judge_is_a_bad_answer(content):
    # Python 3.14 reads on to where the text breaks off
    with pytest.raises(BadAnswerError, match=r"Invalid JSON: .*(more than|nested|Expecting value)") as caught:
        decode_reply(content.encode())
    assert len(str(caught.value)) < 500


def test_of_a_long_reply_only_what_is_read_is_checked():
    tokens = [{"top_logprobs": [{"token": "a", "logprob": -1.0}]}, *[{}] * 200_000]
    reply = {"choices": [{"message": {"content": "yes"}, "logprobs": {"content": tokens}}, *[3] * 1000]}
    assert decode_reply(json.dumps(reply).encode()).first_token == (("a", -1.0),)
