"""What rewards over HTTP may connect to, how they spread the load, and the fields that they refuse."""

from __future__ import annotations

import socket
import ssl
import subprocess
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sfumato.errors import ConfigError
from sfumato.rewards.http.caller import HttpCaller, HttpError
from sfumato.rewards.remote import RemoteReward
from sfumato.serving.outgoing import is_public, parse_base_url


@pytest.mark.parametrize(
    "address",
    ["127.0.0.1", "127.8.8.8", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1",
     "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "::", "::1", "fe80::1", "fe80::1%eth0", "fc00::1",
     "fec0::1", "ff02::1", "::ffff:127.0.0.1", "::ffff:a9fe:a9fe", "64:ff9b::7f00:1", "2002:7f00:1::", "2001:db8::1",
     "192.88.99.1", "192.88.99.255", "::ffff:192.88.99.1", "64:ff9b::c058:6301",
     "2002:c058:6301::1", "3fff::1", "3fff:fff::"],
)  # fmt: skip
def test_private_addresses_are_known(address):
    assert not is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "8.8.8.8",
        "172.15.0.1",
        "192.88.98.1",
        "192.88.100.1",
        "2a00::1",
        "2606:4700::1111",
        "::ffff:8.8.8.8",
        "64:ff9b::808:808",
    ],
)
def test_public_addresses_are_known(address):
    assert is_public(address)


@pytest.mark.parametrize(
    ("text", "host", "port", "path"),
    [
        ("http://example.com", "example.com", 80, ""),
        ("https://example.com/v1/", "example.com", 443, "/v1"),
        ("http://127.0.0.1:8642", "127.0.0.1", 8642, ""),
        ("http://[::1]:80/a/b", "::1", 80, "/a/b"),
    ],
)
def test_addresses_of_servers(text, host, port, path):
    base = parse_base_url(text)
    assert (base.host, base.port, base.path) == (host, port, path)


@pytest.mark.parametrize(
    "text",
    ["", "example.com", "ftp://example.com", "http://", "http://example.com:0x50", "http://example.com:99999",
     "http://example.com/?key=1", "http://example.com/#a", "http://exa mple.com", "http://example.com/\r\nHost: a",
     f"http://{'a' * 70}.com", "file:///etc/passwd"],
)  # fmt: skip
def test_what_is_no_address_of_a_server(text):
    with pytest.raises(ConfigError, match="base_urls: "):
        parse_base_url(text)


def test_a_password_in_an_address_is_refused_and_not_shown():
    with pytest.raises(ConfigError, match="api_key_env") as caught:
        parse_base_url("https://me:hidden@example.com")
    assert "hidden" not in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"base_urls": ()}, "base_urls of reward 'remote' is empty"),
        ({"retry_for_s": 700.0}, "retry_for_s 700 of reward 'remote' must be from 0 to below its timeout_s 600"),
        ({"timeout_s": 300.0}, "retry_for_s 300 of reward 'remote' must be from 0 to below its timeout_s 300"),
        ({"request_timeout_s": 0.0}, "request_timeout_s 0 of reward 'remote'"),
        ({"request_timeout_s": 601.0}, "request_timeout_s 601 of reward 'remote'"),
        ({"retry_for_s": float("nan")}, "retry_for_s nan of reward 'remote'"),
    ],
)
def test_fields_that_do_not_go_together(fields, message):
    with pytest.raises(ConfigError) as caught:
        RemoteReward(**{"base_urls": ("http://example.com",), **fields})
    assert message in str(caught.value)


class Answering(BaseHTTPRequestHandler):
    """Says what it was asked, and by which name."""

    def log_message(self, *_args):
        """Quiet."""

    def do_POST(self):
        if self.path == "/echo":
            self.send_error(400, f"what is {self.headers['Authorization']}?")
            return
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.seen.append((self.headers["Host"], self.headers["Authorization"]))
        time.sleep(self.server.delay_s)
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.fixture
def serve():
    servers = []

    def start(context=None, delay_s=0.0):
        server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
        server.daemon_threads = True
        server.seen, server.delay_s = [], delay_s
        if context is not None:
            server.socket = context.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def caller(*urls, **settings):
    return HttpCaller(urls, **{"retry_for_s": 5.0, "request_timeout_s": 30.0, "allow_private": True, **settings})


def ask(http, body=b"hello"):
    return http.post("/x", body, "text/plain", bytes)


def resolving(monkeypatch, names):
    """Names that lead to the given addresses, one after another when they are asked for repeatedly."""
    original, asked = socket.getaddrinfo, []

    def getaddrinfo(host, *args, **more):
        if host in names:
            asked.append(host)
            host = names[host][min(asked.count(host), len(names[host])) - 1]
        return original(host, *args, **more)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


def test_the_address_that_was_checked_is_the_one_that_is_connected_to(monkeypatch, serve):
    server = serve()
    port = server.server_address[1]
    asked = resolving(monkeypatch, {"rewards.example": ["127.0.0.1", "127.0.0.2"]})
    assert ask(caller(f"http://rewards.example:{port}")) == b"hello"
    assert asked == ["rewards.example"], "looked up once, so a second answer cannot lead elsewhere"
    assert server.seen == [(f"rewards.example:{port}", None)]


@pytest.mark.parametrize("address", ["127.0.0.1", "::ffff:127.0.0.1", "169.254.169.254"])
def test_a_name_that_leads_to_a_private_address_is_refused(monkeypatch, serve, address):
    server = serve()
    resolving(monkeypatch, {"rewards.example": [address]})
    http = caller(f"http://rewards.example:{server.server_address[1]}", allow_private=False)
    with pytest.raises(HttpError, match=r"rewards\.example is the private address"):
        ask(http)
    assert server.seen == [] and http.counters == {"private address": 1}


def test_a_key_is_sent_to_the_server_but_not_over_http_to_the_internet(monkeypatch, serve):
    server = serve()
    assert ask(caller(f"http://127.0.0.1:{server.server_address[1]}", api_key="secret")) == b"hello"
    assert server.seen[0][1] == "Bearer secret"
    resolving(monkeypatch, {"rewards.example": ["8.8.8.8"]})
    with pytest.raises(HttpError, match="a key is not sent over http://: use https://") as caught:
        ask(caller("http://rewards.example", api_key="secret"))
    assert "secret" not in str(caught.value)


def test_a_key_that_a_server_sends_back_is_in_no_message(serve):
    http = caller(f"http://127.0.0.1:{serve().server_address[1]}", api_key="secret")
    with pytest.raises(HttpError, match=r"what is Bearer \*\*\*\?") as caught:
        http.post("/echo", b"", "text/plain", bytes)
    assert "secret" not in str(caught.value)


def test_proxies_of_the_environment_are_not_used(monkeypatch, serve):
    for name in ("http_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert ask(caller(f"http://127.0.0.1:{serve().server_address[1]}")) == b"hello"


@pytest.fixture
def certificate(tmp_path):
    """A certificate for rewards.example that nobody has signed."""
    key, path = tmp_path / "key.pem", tmp_path / "certificate.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
         "-subj", "/CN=rewards.example", "-addext", "subjectAltName=DNS:rewards.example", "-keyout", key, "-out", path],
        check=True, capture_output=True,
    )  # fmt: skip
    return key, path


def test_certificates_are_checked_against_the_name_and_not_the_address(monkeypatch, serve, certificate):
    key, path = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path, key)
    names = []
    context.sni_callback = lambda _socket, name, _context: names.append(name)
    port = serve(context).server_address[1]
    resolving(monkeypatch, {"rewards.example": ["127.0.0.1"], "other.example": ["127.0.0.1"]})
    with pytest.raises(HttpError, match="self-signed certificate"):
        ask(caller(f"https://rewards.example:{port}"))
    monkeypatch.setenv("SSL_CERT_FILE", str(path))
    assert ask(caller(f"https://rewards.example:{port}")) == b"hello" and names[-1] == "rewards.example"
    http = caller(f"https://other.example:{port}")
    with pytest.raises(HttpError, match="Hostname mismatch"):
        ask(http)
    assert http.counters == {"certificate": 1}


def test_the_load_is_spread_over_the_servers(serve):
    servers = [serve(delay_s=0.2) for _ in range(3)]
    http = caller(*(f"http://127.0.0.1:{server.server_address[1]}" for server in servers))
    threads = [threading.Thread(target=ask, args=(http,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(server.seen) for server in servers] == [2, 2, 2]
    assert http.counters == {}


def test_after_an_outage_every_request_asks_each_server_once():
    http = caller("http://127.0.0.1:1", "http://127.0.0.1:2", retry_for_s=0.2)
    for number in range(6):
        before = http.counters["connection"]
        with pytest.raises(HttpError, match=r"127\.0\.0\.1:[12]: .*; http://127\.0\.0\.1:[12]: "):
            ask(http)
        assert number == 0 or http.counters["connection"] == before + 2


def test_a_body_goes_out_as_a_whole(serve):
    body = bytes(range(256)) * 20_000
    assert ask(caller(f"http://127.0.0.1:{serve().server_address[1]}"), body) == body
