"""One HTTP request over a connection of its own: to a checked address, before a deadline, with a bounded answer.

Every request opens a connection: none is ever stale after a restart, and the address that was checked is the one that
is connected to. Redirects are refused, proxies of the environment are not used, nothing is decompressed.
"""

from __future__ import annotations

import http.client
import io
import ipaddress
import re
import socket
import ssl
import time
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import cast

from sfumato.errors import ConfigError

DOCUMENTATION_V6 = ipaddress.ip_network("3fff::/20")
RELAYS_6TO4 = ipaddress.ip_network("192.88.99.0/24")
"""Networks that belong to nobody on the internet (RFC 9637, RFC 7526), which older versions of Python do not know."""

_TRANSIENT_STATUSES = (408, 425, 429)  # and everything from 500
_EXCERPT_BYTES = 500


@dataclass(frozen=True)
class BaseUrl:
    """The part of a server's address that all its paths share."""

    text: str
    scheme: str
    host: str
    port: int
    path: str
    """The path that all requests begin with, without slash at the end; mostly empty."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What one request may do."""

    deadline: float | Callable[[], float]
    """Value of ``time.monotonic()`` at which it ends, whatever has arrived by then; a function gives one that moves."""
    max_response_bytes: int
    allow_private: bool
    """Whether addresses that are not reachable from the internet may be connected to."""


class AttemptError(Exception):
    """A request brought no answer. ``kind`` is a few words for counting, the message is for people."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class TransientError(AttemptError):
    """The next try may succeed, after ``retry_after_s`` if the server said so."""

    def __init__(self, kind: str, message: str, retry_after_s: float = 0.0) -> None:
        super().__init__(kind, message)
        self.retry_after_s = retry_after_s


class BadAnswerError(AttemptError):
    """What came back is not what was asked for; trying again hardly helps."""

    def __init__(self, message: str, kind: str = "bad answer") -> None:
        super().__init__(kind, message)


class RefusedError(AttemptError):
    """The server refuses this request, or may not be asked; trying again never helps."""


def parse_base_url(text: str) -> BaseUrl:
    """Splits ``http[s]://host[:port][/path]``.

    Raises ConfigError for anything else; a name or password in the address is refused since addresses are logged.
    """
    try:
        parts = urllib.parse.urlsplit(text)
        port = parts.port or {"http": 80, "https": 443}.get(parts.scheme, 0)
        (parts.hostname or "").encode("idna")  # what connecting would do
    except ValueError as error:
        raise ConfigError(f"base_urls: {text!r} is no address of a server: {error}") from error
    if parts.username is not None or parts.password is not None:
        raise ConfigError(
            f"base_urls: the address of {parts.hostname} holds a name or password: put the key into an environment "
            "variable and name that in api_key_env"
        )
    is_plain = not (parts.query or parts.fragment) and re.fullmatch(r"[!-~]+", text)
    if not (port and parts.scheme in ("http", "https") and parts.hostname and is_plain):
        raise ConfigError(f"base_urls: {text!r} must be of the form http[s]://host[:port][/path]")
    return BaseUrl(text.rstrip("/"), parts.scheme, parts.hostname, port, parts.path.rstrip("/"))


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the internet, and not to this machine, its network, or a cloud's own services.

    Addresses that wrap an IPv4 address (mapped, 6to4, NAT64) count as what they wrap.
    """
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        wrapped = ip.ipv4_mapped or ip.sixtofour
        if ip in ipaddress.ip_network("64:ff9b::/96"):
            wrapped = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        if wrapped is not None:
            return is_public(str(wrapped))
        if ip in DOCUMENTATION_V6:
            return False
        if ip.is_site_local:
            return False
    elif ip in RELAYS_6TO4:
        return False
    return ip.is_global and not ip.is_multicast and not ip.is_reserved


def exchange(
    base: BaseUrl,
    method: str,
    path: str,
    body: bytes,
    headers: Mapping[str, str],
    limits: Limits,
    tls: ssl.SSLContext | None = None,
) -> bytes:
    """Sends one request and returns the body of the answer with status 200.

    Args:
        base: the server.
        method: ``GET`` or ``POST``.
        path: begins with a slash; appended to the path of ``base``.
        body: what is sent, as it is.
        headers: besides ``Host``, ``Accept-Encoding`` and ``Connection``. An ``Authorization`` is only sent over
            https or to private addresses.
        limits: deadline, size, addresses.
        tls: needed for https.

    Raises:
        TransientError: no connection, too slow, cut off, busy, or a fault of the server.
        BadAnswerError: the answer is too large or in another encoding.
        RefusedError: a redirect, a private address, a wrong certificate, or a status that blames the request.
    """
    try:
        # http.client is given an open socket: it would look the name up by itself, and knows no deadline over a request
        with _connect(base, limits, tls, has_key="Authorization" in headers) as opened:
            connection = http.client.HTTPConnection(base.host, base.port)
            connection.sock = _TimedSocket(opened, limits.deadline)  # type: ignore[assignment]
            host = urllib.parse.urlsplit(base.text).netloc
            fixed = {"Host": host, "Accept-Encoding": "identity", "Connection": "close"}
            response = _send(connection, method, base.path + path, body, {**headers, **fixed})
            with response:
                _check_status(response, base, path)
                return _read(response, base, limits.max_response_bytes)
    except ssl.SSLCertVerificationError as error:
        raise RefusedError("certificate", f"{base.text}: {error.verify_message or error}") from error
    except TimeoutError as error:
        raise TransientError("timeout", f"{base.text}: no complete answer in time") from error
    except http.client.IncompleteRead as error:
        raise TransientError("truncated", f"{base.text}: the answer was cut off") from error
    except (OSError, http.client.HTTPException) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise TransientError("connection", f"{base.text}: {why}") from error


def _connect(base: BaseUrl, limits: Limits, tls: ssl.SSLContext | None, has_key: bool) -> socket.socket:
    """A connection to the first address of the host that answers and may be used."""
    addresses = socket.getaddrinfo(base.host, base.port, type=socket.SOCK_STREAM)
    usable = [entry for entry in addresses if limits.allow_private or is_public(cast("str", entry[4][0]))]
    if not usable:
        raise RefusedError(
            "private address",
            f"{base.text}: {base.host} is the private address {addresses[0][4][0]}, which is refused: set "
            "allow_private: true if the server is yours",
        )
    # The checked address is connected to itself: a second look-up of the name could give another one.
    failed: OSError = OSError("no address")
    for family, kind, protocol, _, address in usable:
        if has_key and base.scheme == "http" and is_public(cast("str", address[0])):
            raise RefusedError("key in clear text", f"{base.text}: a key is not sent over http://: use https://")
        opened = socket.socket(family, kind, protocol)
        try:
            opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            opened.settimeout(_seconds_left(limits.deadline))
            opened.connect(address)
            if tls is None:
                return opened
            opened.settimeout(_seconds_left(limits.deadline))
            return tls.wrap_socket(opened, server_hostname=base.host)
        except OSError as error:
            opened.close()
            failed = error
    raise failed


def _send(
    connection: http.client.HTTPConnection, method: str, target: str, body: bytes, headers: Mapping[str, str]
) -> http.client.HTTPResponse:
    try:
        connection.request(method, target, body or None, headers)
    except (BrokenPipeError, ConnectionResetError) as error:
        try:  # a server that refuses a request may answer and hang up before it has read all of it
            return connection.getresponse()
        except (OSError, http.client.HTTPException):
            raise error from None
    return connection.getresponse()


def _check_status(response: http.client.HTTPResponse, base: BaseUrl, path: str) -> None:
    """Raises what the status stands for, unless it is 200."""
    status = response.status
    if 300 <= status < 400:
        target = (response.getheader("Location") or "nowhere")[:200]
        raise RefusedError(
            "redirect", f"{base.text}{path} redirects to {target!r}, which is refused: set base_urls to the final place"
        )
    if status == 200:
        return
    message = f"{base.text}: HTTP status {status}{_read_excerpt(response)}"
    if status in _TRANSIENT_STATUSES or status >= 500:
        raise TransientError(f"status {status}", message, _retry_after_s(response.getheader("Retry-After")))
    if status < 300:
        raise BadAnswerError(message)
    raise RefusedError(f"status {status}", message)


def _read_excerpt(response: http.client.HTTPResponse) -> str:
    """The beginning of the text that explains a status, as one line; empty when there is none."""
    try:
        text = response.read(_EXCERPT_BYTES).decode("utf-8", errors="replace")
    except (OSError, http.client.HTTPException):  # the status alone says enough
        return ""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return f": {line}" if line else ""


def _retry_after_s(header: str | None) -> float:
    """Seconds of a ``Retry-After`` header: a number or a date; 0 without a readable one."""
    if header is None:
        return 0.0
    if header.strip().isdigit():
        return float(header[:9])
    try:
        return max(0.0, parsedate_to_datetime(header).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0


def _read(response: http.client.HTTPResponse, base: BaseUrl, max_bytes: int) -> bytes:
    """The body, read against the limit; one that is announced to be larger is not read at all."""
    encoding = (response.getheader("Content-Encoding") or "identity").strip().lower()
    if encoding != "identity":
        raise BadAnswerError(f"{base.text}: the answer is compressed ({encoding[:40]}) though that was not asked for")
    too_large = f"{base.text}: the answer is larger than {max_bytes / 2**20:g} MiB"
    if response.length is not None and response.length > max_bytes:
        raise BadAnswerError(too_large, kind="too large")
    pieces = []
    size = 0
    while piece := response.read(min(65536, max_bytes + 1 - size)):
        pieces.append(piece)
        size += len(piece)
        if size > max_bytes:
            raise BadAnswerError(too_large, kind="too large")
    if response.length:  # bytes that were announced and did not come
        raise TransientError("truncated", f"{base.text}: the answer was cut off")
    return b"".join(pieces)


def _seconds_left(deadline: float | Callable[[], float]) -> float:
    remaining_s = (deadline() if callable(deadline) else deadline) - time.monotonic()
    if remaining_s <= 0:
        raise TimeoutError("the deadline has passed")
    return remaining_s


class _TimedSocket:
    """As much of a socket as http.client uses, with one deadline over all it does, however small the pieces."""

    def __init__(self, opened: socket.socket, deadline: float | Callable[[], float]) -> None:
        self._opened = opened
        self._deadline = deadline

    def sendall(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            self._opened.settimeout(_seconds_left(self._deadline))
            rest = rest[self._opened.send(rest[:1_048_576]) :]

    def makefile(self, mode: str) -> io.BufferedReader:
        assert mode == "rb", mode
        return io.BufferedReader(_TimedStream(self._opened, self._deadline), 65536)

    def close(self) -> None:
        """Whoever opened the socket closes it: http.client does so before the body is read."""


class _TimedStream(io.RawIOBase):
    def __init__(self, opened: socket.socket, deadline: float | Callable[[], float]) -> None:
        self._opened = opened
        self._deadline = deadline

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while True:
            self._opened.settimeout(_seconds_left(self._deadline))
            try:
                return self._opened.recv_into(buffer)
            except TimeoutError:  # unless the deadline has moved meanwhile, ``_seconds_left`` raises it again
                continue
