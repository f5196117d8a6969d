"""Connections to a server that strangers can reach: how many, how long each may take, and which gives way.

uvicorn has limits for headers that are too large and for connections that rest between two requests. What it has not
is here: a first request that never becomes complete, readers that stop, and a bound on connections that does not shut
out whoever comes next. A new connection is always taken; where there is no room the oldest gives way that has shown no
key, then one that rests between two requests.
"""

from __future__ import annotations

import asyncio
import functools
import ipaddress
import math
import resource
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    import uvicorn
    from starlette.types import ASGIApp, Scope
    from uvicorn.server import ServerState

MAX_CONNECTIONS = 512
RESERVED_DESCRIPTORS = 256
"""Open files that connections leave to whatever else the process does."""
BACKLOG = 128
"""Connections that wait to be taken. asyncio takes as many at once, before it is known who gives way."""
HEADERS_S = 10.0
"""How long the headers of a request may take, from the connection or from the answer before."""
STALLED_S = 10.0
"""How long a reader may take nothing of an answer that does not fit into the buffers."""
MIN_BYTES_PER_S = 65536
"""How fast an answer must be read, and the body of a request sent, beyond the first seconds."""
MAX_HEADER_BYTES = 16384


def max_connections() -> int:
    """Connections that the limit of open files of this process allows.

    Each counts twice, since its client may be in this process, too.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return MAX_CONNECTIONS
    return max(min((soft - RESERVED_DESCRIPTORS) // 2, MAX_CONNECTIONS), 8)


def uvicorn_config(app: ASGIApp, *, grace_s: int) -> uvicorn.Config:
    """The settings of uvicorn for a server of sfumato.

    Args:
        app: the ASGI application.
        grace_s: how long answers may take to be sent when the server ends.
    """
    import uvicorn

    return uvicorn.Config(
        app,
        http=_connection_class(),
        ws="none",
        lifespan="off",
        log_level="critical",  # others are what strangers do
        access_log=False,
        server_header=False,
        proxy_headers=False,  # who asks is who is connected
        backlog=BACKLOG,
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        timeout_graceful_shutdown=grace_s,
    )


def trust_connection(scope: Scope) -> None:
    """Notes that the connection of a request has shown the key, or whatever the server asks for."""
    connection = scope.get("state", {}).get("connection")
    if connection is not None:
        connection.is_trusted = True


def is_trusted(scope: Scope) -> bool:
    """Whether the connection of a request has shown the key."""
    connection = scope.get("state", {}).get("connection")
    return connection is not None and connection.is_trusted


def network_of(address: str) -> str:
    """What counts as one peer: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if isinstance(ip, ipaddress.IPv6Address):
        return str(ip.ipv4_mapped or ipaddress.ip_network((ip, 64), strict=False))
    return str(ip)


@functools.cache
def _connection_class() -> type[asyncio.Protocol]:
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class BoundedConnection(H11Protocol):
        """A connection with deadlines, which gives way to a new one where there are too many."""

        def __init__(
            self,
            config: uvicorn.Config,
            server_state: ServerState,
            app_state: Mapping[str, object],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            # uvicorn copies the state into the scope of each request, where ``trust_connection`` and ``is_trusted``
            # find it
            super().__init__(config, server_state, {**app_state, "connection": self}, _loop)
            self.is_trusted = False
            self._deadline: asyncio.TimerHandle | None = None
            self._stalled: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
            super().connection_made(transport)
            self.opened = self.loop.time()
            self.network = network_of(self.client[0]) if self.client else ""
            self._set_deadline(HEADERS_S)
            self._make_room()

        def _make_room(self) -> None:
            connections = cast("set[BoundedConnection]", self.connections)  # uvicorn makes all of one class
            others = [other for other in connections if other is not self and other.transport is not None]
            limit = max_connections()
            same_network = [other for other in others if other.network == self.network]
            # one network may hold three quarters; beyond that one of its own connections gives way
            if len(same_network) >= max(limit * 3 // 4, 8):
                others = same_network
            elif len(others) < limit:
                return
            oldest = min(others, key=lambda other: (other.is_trusted, other.is_busy, other.opened))
            # where all are trusted and busy, the new one is refused
            victim = self if oldest.is_trusted and oldest.is_busy else oldest
            victim.connections.discard(victim)  # the loop calls connection_lost later
            victim.transport.abort()

        @property
        def is_busy(self) -> bool:
            """Whether a request is being answered."""
            return self.cycle is not None and not self.cycle.response_complete

        def handle_events(self) -> None:
            cycle = self.cycle
            super().handle_events()
            if self.cycle is not cycle and self.is_busy:  # a request is complete: its answer may take its time
                self._set_deadline(math.inf)

        def on_response_complete(self) -> None:
            unread = self.transport.get_write_buffer_size()
            self._set_deadline(HEADERS_S + unread / MIN_BYTES_PER_S)
            super().on_response_complete()  # which may begin with the next request

        def pause_writing(self) -> None:
            super().pause_writing()
            self._stalled = self.loop.call_later(
                STALLED_S + self.transport.get_write_buffer_size() / MIN_BYTES_PER_S, self.transport.abort
            )

        def resume_writing(self) -> None:
            super().resume_writing()
            if self._stalled is not None:
                self._stalled.cancel()

        def connection_lost(self, exc: Exception | None) -> None:
            super().connection_lost(exc)
            self._set_deadline(math.inf)
            if self._stalled is not None:
                self._stalled.cancel()

        def _set_deadline(self, seconds: float) -> None:
            """Has the connection ended in so many seconds, in the place of an earlier deadline; infinity sets none."""
            if self._deadline is not None:
                self._deadline.cancel()
            self._deadline = None if seconds == math.inf else self.loop.call_later(seconds, self.transport.abort)

    return BoundedConnection
