"""Client of an inference server over HTTP: JSON in both directions, many requests at a time, each with a deadline.

Connections are those of ``serving/outgoing.py``, one for each request. Requests wait in threads, so that the
event loop is not blocked. No request is repeated: an error is raised, and the caller decides.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from sfumato.errors import ConfigError
from sfumato.rollout.engines.base import EngineError
from sfumato.rollout.engines.served.deadlines import CompletionDeadlines
from sfumato.rollout.engines.served.server_process import ServerProcess, free_port
from sfumato.serving.bounded_json import JSONLimitError, load_json
from sfumato.serving.outgoing import AttemptError, BaseUrl, Limits, RefusedError, exchange, parse_base_url

LOGGER = logging.getLogger(__name__)

MAX_RESPONSE_BYTES = 256 * 2**20
MAX_VALUES = 2**23
"""Values in the JSON of an answer, brackets and commas in texts included."""


ANSWER_S = 5.0
"""Within which a server that has started answers."""

SEEN_S = 3.0
"""Within which the end of a process is seen after its connections were closed."""

LOOPBACK = "http://127.0.0.1"

NUM_PORTS = 3
"""Ports that a start tries: until a server listens, any connection of this machine may be given its port."""

NOT_SENT = object()
"""Returned in place of an answer for a request that was dropped before it was sent."""


class RefusedByServerError(EngineError):
    """The server answered that it will not do what it was asked to; asking again does not help."""


@dataclass(frozen=True)
class Target:
    """Where requests are sent."""

    base: BaseUrl
    headers: Mapping[str, str]
    tls: ssl.SSLContext | None


class HttpServer:
    """The client of one server."""

    def __init__(
        self,
        name: str,
        url: str,
        *,
        api_key: str = "",
        timeout_s: float,
        max_requests: int = 256,
        process: ServerProcess | None = None,
    ) -> None:
        """
        Args:
            name: what messages call it.
            url: ``http[s]://host[:port][/path]``.
            api_key: sent as bearer token; empty: none.
            timeout_s: longest that a request may take; of completions, see ``ask_async``.
            max_requests: most requests that are sent at a time; others wait here.
            process: the server, if this run started it: errors then say how it ended.

        Raises:
            ConfigError: when ``url`` is no address.
        """
        self.move_to(url, api_key)
        self.name = name
        self.timeout_s = timeout_s
        self.process = process
        self._lock = threading.Lock()
        self._num_open = 0  # requests of ``ask_async`` that were sent and are not answered
        self._num_ends = 0  # calls of ``end_all``
        self._deadlines = CompletionDeadlines(timeout_s)
        self._threads = ThreadPoolExecutor(max_requests, thread_name_prefix="engine-request")

    def move_to(self, url: str, api_key: str = "") -> None:
        """Sends requests to this address from now on. Raises ConfigError when it is none."""
        try:
            base = parse_base_url(url)
        except ConfigError as error:
            raise ConfigError(str(error).replace("base_urls", "url")) from error
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.target = Target(base, headers, ssl.create_default_context() if base.scheme == "https" else None)

    def start(self, path: str, timeout_s: float = ANSWER_S, key_variable: str = "") -> None:
        """Starts the server, or starts it again, and waits until it answers.

        It gets another port each time, and another key: what is left of one that was killed must neither answer nor
        hold the port.

        Args:
            path: what a server that is ready answers.
            timeout_s: longest that such an answer may take.
            key_variable: environment variable that the server reads its key from, since other users of the machine can
                read a command's arguments; empty: it takes no key.

        Raises:
            ConfigError: when this run did not start it.
            EngineError: when it does not start.
        """
        if self.process is None:
            raise ConfigError(f"{self.name} was not started by this run, so it cannot be started again: do it there")
        api_key = secrets.token_hex(32) if key_variable else ""
        variables = {key_variable: api_key} if key_variable else {}
        for num_ports in range(1, NUM_PORTS + 1):
            port = free_port()
            self.move_to(f"{LOOPBACK}:{port}", api_key)
            try:
                self.process.start(lambda: self.answers(path, timeout_s), ["--port", str(port)], variables)
                return
            except EngineError as error:
                if num_ports == NUM_PORTS or "address already in use" not in str(error).lower():
                    raise
                LOGGER.warning("%s: another program took a port meanwhile: it is started at another one", self.name)

    def ask(
        self,
        method: str,
        path: str,
        body: object = None,
        timeout_s: float | None = None,
        deadline: Callable[[], float] | None = None,
    ) -> Any:
        """Sends a request and waits.

        Args:
            method: GET or POST.
            path: begins with a slash.
            body: what is sent as JSON; None sends nothing.
            timeout_s: longest that it may take; None: the client's own limit.
            deadline: gives the value of ``time.monotonic()`` at which it ends now, in the place of ``timeout_s``.

        Returns:
            The decoded JSON of the answer; None if it is empty, the text if it is no JSON.

        Raises:
            RefusedByServerError: when the server refuses the request.
            EngineError: when there is no answer, or its JSON is too large.
        """
        data = b"" if body is None else json.dumps(body).encode()
        target = self.target
        headers = {**target.headers, **({} if body is None else {"Content-Type": "application/json"})}
        limits = Limits(
            deadline=deadline or time.monotonic() + (timeout_s or self.timeout_s),
            max_response_bytes=MAX_RESPONSE_BYTES,
            allow_private=True,
        )
        try:
            answer = exchange(target.base, method, path, data, headers, limits, target.tls)
        except RefusedError as error:
            raise RefusedByServerError(f"{self.name}: {method} {path}: {error}") from error
        except AttemptError as error:
            timeout_text = f" ({timeout_s or self.timeout_s:g} s)" if error.kind == "timeout" else ""
            is_gone = error.kind in ("connection", "truncated")
            # A dying server closes its connections before the process has ended: wait for its exit code.
            problem = self.process.problem(SEEN_S if is_gone else 0.0) if self.process is not None else ""
            message = f"{self.name}: {method} {path}: {error}{timeout_text}" + (f": {problem}" if problem else "")
            raise EngineError(message) from error
        try:
            return load_json(answer, max_values=MAX_VALUES) if answer else None
        except JSONLimitError as error:
            raise EngineError(f"{self.name}: {method} {path}: the answer is JSON with {error}") from error
        except ValueError:
            return answer.decode(errors="replace")

    async def ask_async(self, method: str, path: str, body: object = None) -> Any:
        """As ``ask``, without blocking the event loop, for a completion, whose deadline is ``CompletionDeadlines``'s.

        Returns:
            As ``ask``; ``NOT_SENT`` when ``end_all`` was called before.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._send, self._num_ends, method, path, body
        )

    def _send(self, num_ends: int, method: str, path: str, body: object) -> object:
        """Runs in a thread. ``num_ends``: calls of ``end_all`` when the request was made; a later one drops it."""
        with self._lock:
            if self._num_ends != num_ends:
                return NOT_SENT
            self._num_open += 1
        try:
            with self._deadlines.begin() as deadline:
                return self.ask(method, path, body, deadline=deadline)
        finally:
            with self._lock:
                self._num_open -= 1

    def end_all(self, end: Callable[[], None]) -> None:
        """Ends all requests of ``ask_async``: those that wait here, and those that the server works on.

        Args:
            end: has the server abort its requests; called again for those that reached it meanwhile.

        Raises:
            EngineError: when some do not end.
        """
        with self._lock:
            self._num_ends += 1
        deadline = time.monotonic() + self.timeout_s
        while self._num_open:
            end()
            if time.monotonic() > deadline:
                raise EngineError(f"{self.name}: {self._num_open} requests were aborted and do not end")
            time.sleep(0.02)

    def answers(self, path: str, timeout_s: float = ANSWER_S) -> bool:
        """Whether GET of a path is answered with status 200."""
        try:
            self.ask("GET", path, timeout_s=timeout_s)
        except EngineError:
            return False
        return True

    def close(self) -> None:
        """Ends the server, if this run started it, and drops requests that have not been sent."""
        if self.process is not None:
            self.process.stop()
        self._threads.shutdown(wait=False, cancel_futures=True)
