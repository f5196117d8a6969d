"""Refuses requests before a server handles them: for another host, from a web page, too large, or too slow."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sfumato.serving.connections import MIN_BYTES_PER_S, is_trusted

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

BODY_START_S = 10.0
"""How long a body may take besides what its size allows it."""


class RefusedRequestError(Exception):
    """A request that is refused; its sender is told the status and the text."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class ByteBudget:
    """Bytes that all requests of a server may hold together. Used by one event loop."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.held = 0
        self.in_turn = asyncio.Lock()
        """Of those that wait for room, the first one holds it."""
        self.was_freed = asyncio.Event()

    @contextlib.contextmanager
    def share(self) -> Iterator[ByteShare]:
        """A share for one request, which is given back at the end of the block."""
        share = ByteShare(self)
        try:
            yield share
        finally:
            self.held -= share.held
            self.was_freed.set()


class ByteShare:
    """What one request holds of a budget."""

    def __init__(self, budget: ByteBudget) -> None:
        self.budget = budget
        self.held = 0

    def grow_to(self, num_bytes: int) -> None:
        """Grows the share to ``num_bytes``. Raises RefusedRequestError when other requests leave too little."""
        missing = max(num_bytes - self.held, 0)
        if self.budget.held + missing > self.budget.num_bytes:
            raise RefusedRequestError(429, "other requests are too large just now: come back later")
        self.budget.held += missing
        self.held += missing

    async def wait_to_grow(self, num_bytes: int) -> None:
        """Adds ``num_bytes`` to the share, once other requests have freed enough; requests get them in turn.

        ``num_bytes`` must not be more than the whole budget: the wait would never end.
        """
        budget = self.budget
        async with budget.in_turn:
            while budget.held + num_bytes > budget.num_bytes:
                budget.was_freed.clear()
                await budget.was_freed.wait()
            budget.held += num_bytes
            self.held += num_bytes


class RequestGuard:
    """An ASGI application that refuses what is not for this server, and passes on the rest.

    A browser that was led to this server by a name of somebody else (DNS rebinding) sends that name as ``Host``; a page
    of somebody else sends its ``Origin``, or says that it is another site. Both are refused, also with a key.

    Args:
        app: what is guarded.
        names: hosts that requests may name, besides those that mean this machine and the address that was connected to.
        remedy: what a person is told whose host is not among them.
        has_pages: whether the server has pages of its own, whose ``Origin`` is the host that they came from.
    """

    def __init__(self, app: ASGIApp, names: Sequence[str] = (), remedy: str = "", *, has_pages: bool = False) -> None:
        self.app = app
        self.has_pages = has_pages
        self.remedy = remedy
        self.names = {name.lower().rstrip(".") for name in (*names, "localhost", socket.gethostname())}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_and_close(message: Message) -> None:
            """Sends an answer, and has the connection closed after it if it failed or has shown no key."""
            if message["type"] == "http.response.start" and (message["status"] >= 400 or not is_trusted(scope)):
                others = [pair for pair in message.get("headers", ()) if pair[0].lower() != b"connection"]
                message = {**message, "headers": [*others, (b"connection", b"close")]}
            await send(message)

        problem = self._find_problem(scope)
        if problem is None:
            await self.app(scope, receive, send_and_close)
            return
        from starlette.responses import PlainTextResponse

        status, text = problem
        await PlainTextResponse(f"{text}\n", status)(scope, receive, send_and_close)

    def _find_problem(self, scope: Scope) -> tuple[int, str] | None:
        """Status and text of a refusal; None where there is nothing to refuse."""
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host = host_of(headers.get(b"host", ""))
        if not self._is_this_server(host, (scope.get("server") or ("",))[0]):
            return 421, f"this server is not {host[:100]!r}{self.remedy}"
        # a page that came through a proxy with TLS says https, and the proxy's name as host
        own_origins = {scheme + headers[b"host"].lower() for scheme in ("http://", "https://")}
        if b"origin" in headers and not (self.has_pages and headers[b"origin"].lower() in own_origins):
            return 403, "requests of web pages are refused (Origin)"
        if headers.get(b"sec-fetch-site", "none") not in ("none", "same-origin"):
            return 403, "requests of web pages are refused (Sec-Fetch-Site)"
        return None

    def _is_this_server(self, host: str, connected: str) -> bool:
        if host in self.names:
            return True
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return False
        return address.is_loopback or str(address) in self.names or address == ipaddress.ip_address(connected)


def host_of(header: str) -> str:
    """The host of a ``Host`` header, in lower case and without port, brackets and final dot; empty where it is none."""
    text = header.strip().lower()
    if text.startswith("["):
        host, bracket, port = text[1:].partition("]")
        return host if bracket and (not port or port[0] == ":") else ""
    host, _, port = text.partition(":")
    return host.rstrip(".") if not port or port.isdecimal() else ""


def check_media_type(request: Request, wanted: str) -> None:
    """Raises RefusedRequestError for a body of another type: web pages may send some types without being asked."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != wanted:
        raise RefusedRequestError(415, f"Content-Type must be {wanted}")


async def read_body(
    request: Request, max_bytes: int, too_large: str, timeout_s: float, share: ByteShare | None = None
) -> bytearray:
    """The body of a request, held against its limits while it arrives.

    Args:
        request: whose body was not read yet.
        max_bytes: its largest size.
        too_large: what is said of a larger one.
        timeout_s: longest time for all of it, however fast it comes.
        share: what it may hold of a server's memory.

    Raises:
        RefusedRequestError: 413 too large, 408 too slow, 429 no memory left, 499 the sender hung up.
    """
    from starlette.requests import ClientDisconnect

    announced = request.headers.get("content-length", "")
    if announced.isdigit():
        _check_size(int(announced), max_bytes, too_large, share)
    body = bytearray()
    started = time.monotonic()
    pieces = aiter(request.stream())
    while True:
        may_take_s = min(BODY_START_S + len(body) / MIN_BYTES_PER_S, timeout_s)
        try:
            async with asyncio.timeout(max(started + may_take_s - time.monotonic(), 0.0)):
                piece = await anext(pieces, None)
        except TimeoutError as error:
            raise RefusedRequestError(
                408,
                f"the request did not arrive within {BODY_START_S:g} s, {MIN_BYTES_PER_S // 1024} KiB more a second "
                f"and {timeout_s:g} s altogether",
            ) from error
        except ClientDisconnect as error:
            raise RefusedRequestError(499, "the client has hung up") from error
        if piece is None:
            return body
        _check_size(len(body) + len(piece), max_bytes, too_large, share)
        body += piece


def _check_size(num_bytes: int, max_bytes: int, too_large: str, share: ByteShare | None) -> None:
    if num_bytes > max_bytes:
        raise RefusedRequestError(413, too_large)
    if share is not None:
        share.grow_to(num_bytes)
