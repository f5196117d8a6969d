"""Requests to one or several equal HTTP servers: balanced, tried again through an outage, counted."""

from __future__ import annotations

import itertools
import math
import random
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from sfumato.serving.outgoing import (
    AttemptError,
    BadAnswerError,
    Limits,
    RefusedError,
    TransientError,
    exchange,
    parse_base_url,
)

AnswerT = TypeVar("AnswerT")

MAX_RESPONSE_BYTES = 16 * 2**20
FIRST_DELAY_S = 0.25
MAX_DELAY_S = 5.0
MAX_BAD_ANSWERS = 3


class HttpError(RuntimeError):
    """No server gave an answer; the message names each and what it did last."""


class _Server:
    """One of the servers, and how it did lately. Guarded by the caller's lock."""

    def __init__(self, url: str) -> None:
        self.base = parse_base_url(url)
        self.outstanding = 0
        self.last_turn = 0
        self.failures = 0
        """Failed rounds since the last success."""
        self.rests_until = 0.0
        """The time before which it is preferably not asked."""
        self.closed_until = 0.0
        """The time before which it is not to be asked, as it said itself."""


@dataclass
class _Request(Generic[AnswerT]):
    """One request on its way through its attempts."""

    method: str
    path: str
    body: bytes
    headers: dict[str, str]
    parse: Callable[[bytes], AnswerT]
    deadline: float
    started: float = field(default_factory=time.monotonic)
    first_failure: float | None = None
    tries: Counter[_Server] = field(default_factory=Counter)
    not_before: dict[_Server, float] = field(default_factory=dict)
    refused_by: set[_Server] = field(default_factory=set)
    num_bad_answers: int = 0
    last: dict[_Server, str] = field(default_factory=dict)
    """What each server did last, in words."""


class HttpCaller:
    """Sends requests to one or several servers that give equal answers. May be used by many threads.

    The server with the fewest requests on their way is asked first; one that fails rests for a while, growing from a
    quarter of a second to five seconds with random jitter, or for as long as its ``Retry-After`` says. What is
    transient (no connection, too slow, cut off, status 408, 425, 429, 5xx) is tried again until the outage has lasted
    ``retry_for_s``; an answer that makes no sense twice more; what a server refuses only with the other servers.

    An outage begins with the first failure after the last success of any request, so it is waited out once, not once
    per request.

    Args:
        base_urls: the servers.
        api_key: sent as bearer token; empty: none.
        retry_for_s: how long an outage is waited out, in seconds.
        request_timeout_s: seconds that one attempt may take from the connection to the last byte.
        allow_private: also connect to this machine and to private networks.

    Raises:
        ConfigError: one of ``base_urls`` is no address.
    """

    def __init__(
        self,
        base_urls: tuple[str, ...],
        *,
        api_key: str = "",
        retry_for_s: float,
        request_timeout_s: float,
        allow_private: bool = False,
    ) -> None:
        self._servers = [_Server(url) for url in base_urls]
        self._key = api_key
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._retry_for_s = retry_for_s
        self._request_timeout_s = request_timeout_s
        self._allow_private = allow_private
        has_tls = any(server.base.scheme == "https" for server in self._servers)
        self._tls = ssl.create_default_context() if has_tls else None
        self._lock = threading.Lock()
        self._turns = itertools.count(1)
        self._failing_since: float | None = None
        self._jitter = random.Random()  # a generator of its own: training must not notice retries
        self.counters: Counter[str] = Counter()
        """Attempts without an answer, by kind: connection, timeout, truncated, status 429, bad answer, ..."""
        self._told: Counter[str] = Counter()

    def take_failures(self) -> Counter[str]:
        """Attempts that failed since this was last asked, by kind."""
        with self._lock:
            failures = self.counters - self._told
            self._told = self.counters.copy()
        return failures

    def post(
        self, path: str, body: bytes, content_type: str, parse: Callable[[bytes], AnswerT], deadline: float = math.inf
    ) -> AnswerT:
        """Sends a body and returns what ``parse`` makes of the answer.

        Args:
            path: begins with a slash; appended to the base URL.
            body: sent as it is.
            content_type: its media type.
            parse: turns the answer's bytes into a result; raises BadAnswerError if they make no sense.
            deadline: value of ``time.monotonic()`` at which to give up; infinity: only the outage's end counts.

        Raises:
            HttpError: no server gave an answer.
        """
        return self._send_until_answered(_Request("POST", path, body, {"Content-Type": content_type}, parse, deadline))

    def get(self, path: str, parse: Callable[[bytes], AnswerT], deadline: float = math.inf) -> AnswerT:
        """Like ``post``, without a body."""
        return self._send_until_answered(_Request("GET", path, b"", {}, parse, deadline))

    def _send_until_answered(self, request: _Request[AnswerT]) -> AnswerT:
        while True:
            server = self._take_server(request)
            try:
                return self._attempt(server, request)
            except AttemptError as error:
                self._note_failure(server, request, error)
            finally:
                with self._lock:
                    server.outstanding -= 1

    def _attempt(self, server: _Server, request: _Request[AnswerT]) -> AnswerT:
        limits = Limits(
            deadline=min(time.monotonic() + self._request_timeout_s, request.deadline),
            max_response_bytes=MAX_RESPONSE_BYTES,
            allow_private=self._allow_private,
        )
        tls = self._tls if server.base.scheme == "https" else None
        request.tries[server] += 1
        headers = {**self._headers, **request.headers}
        data = exchange(server.base, request.method, request.path, request.body, headers, limits, tls)
        try:
            answer = request.parse(data)
        except BadAnswerError as error:
            raise BadAnswerError(f"{server.base.text}: {error}") from error
        # any success ends the outage for all requests
        with self._lock:
            server.failures = 0
            self._failing_since = None
        return answer

    def _take_server(self, request: _Request) -> _Server:
        """Waits until a server may be asked, and takes the best one. Raises HttpError when it is time to give up."""
        with self._lock:
            if request.num_bad_answers >= MAX_BAD_ANSWERS or len(request.refused_by) == len(self._servers):
                raise HttpError("; ".join(request.last.values()))
            now = time.monotonic()
            server, wait_s = self._pick_server(request, now)
            give_up = self._give_up_at(request)
            # In an outage that was waited out already, a request still asks each server once.
            is_over = now >= give_up and request.tries[server] > 0
            if is_over or server.closed_until > max(give_up, now) or now + wait_s >= request.deadline:
                last_words = request.last or {server: f"{server.base.text} asked for a pause of {wait_s:.0f} s"}
                tried_s = min(self._retry_for_s, request.deadline - request.started)
                raise HttpError(f"{'; '.join(last_words.values())}; tried for {tried_s:.3g} s")
        time.sleep(min(wait_s, max(give_up - now, 0.0)))  # the last try is at the end of the time
        # picked again: while this request slept, others may have taken the server or found it down
        with self._lock:
            server, _ = self._pick_server(request, time.monotonic())
            server.outstanding += 1
            server.last_turn = next(self._turns)
        return server

    def _pick_server(self, request: _Request, now: float) -> tuple[_Server, float]:
        """The server that may be asked first, of those the least busy one, and in how many seconds.

        Once the outage has lasted too long, one that this request has not asked yet goes before those that it has.
        """
        is_late = now >= self._give_up_at(request)
        waits = {
            server: max(max(server.closed_until, server.rests_until, request.not_before.get(server, now)) - now, 0.0)
            for server in self._servers
            if server not in request.refused_by
        }
        server = min(
            waits,
            key=lambda server: (
                is_late and request.tries[server] > 0,
                waits[server],
                server.outstanding,
                server.last_turn,
            ),
        )
        return server, waits[server]

    def _give_up_at(self, request: _Request) -> float:
        """When the outage has lasted too long; infinity when there is none."""
        begins = [begin for begin in (request.first_failure, self._failing_since) if begin is not None]
        return min(begins, default=math.inf) + self._retry_for_s

    def _note_failure(self, server: _Server, request: _Request, error: AttemptError) -> None:
        message = str(error)  # which may quote what a server that should not has sent back
        request.last[server] = message.replace(self._key, "***") if self._key else message
        with self._lock:
            self.counters[error.kind] += 1
            now = time.monotonic()
            request.not_before[server] = now + self._delay_s(request.tries[server])
            if isinstance(error, RefusedError):
                request.refused_by.add(server)
            elif isinstance(error, BadAnswerError):
                request.num_bad_answers += 1
            elif isinstance(error, TransientError):
                request.first_failure = request.first_failure or now
                self._failing_since = self._failing_since or now
                if now >= server.rests_until:  # requests that fail together are one failure
                    server.failures += 1
                    server.rests_until = now + self._delay_s(server.failures)
                # a little later than the server asked for, so that not all requests come back at once
                server.closed_until = max(
                    server.closed_until, now + error.retry_after_s * self._jitter.uniform(1.0, 1.25)
                )

    def _delay_s(self, num_failures: int) -> float:
        return min(FIRST_DELAY_S * 2.0 ** min(num_failures - 1, 10), MAX_DELAY_S) * self._jitter.uniform(0.5, 1.0)
