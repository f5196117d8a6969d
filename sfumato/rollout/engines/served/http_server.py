"""Asks an inference server over HTTP: JSON there and back, many requests at a time, each with a deadline.

Connections are those of ``rewards/http/connection.py``, one for each request. Requests wait in threads, so that the
event loop goes on. Nothing is asked twice: what failed is said, and whoever asked decides.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from sfumato.errors import ConfigError
from sfumato.rewards.http.connection import AttemptError, Limits, RefusedError, exchange, parse_base_url
from sfumato.rollout.engines.base import EngineError
from sfumato.rollout.engines.served.server_process import ServerProcess
from sfumato.serving.bounded_json import JSONLimitError, load_json

MAX_RESPONSE_BYTES = 256 * 2**20
MAX_VALUES = 2**23
"""Values in the JSON of an answer, brackets and commas in texts included."""


SEEN_S = 3.0
"""In which the end of a process is seen, after its connections were closed."""

NOT_SENT = object()
"""Instead of an answer: a request that was given up before it was sent."""


class RefusedByServerError(EngineError):
    """The server answered that it will not do what it was asked to; asking again does not help."""


class HttpServer:
    """One server."""

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
            timeout_s: longest that a request may take.
            max_requests: requests that are on their way at a time; others wait here.
            process: the server, if it is ours: errors say how it ended.

        Raises:
            ConfigError: when ``url`` is no address.
        """
        try:
            self.base = parse_base_url(url)
        except ConfigError as error:
            raise ConfigError(str(error).replace("base_urls", "url")) from error
        self.name, self.timeout_s, self.process = name, timeout_s, process
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._tls = ssl.create_default_context() if self.base.scheme == "https" else None
        self._lock, self._num_open, self._num_ends = threading.Lock(), 0, 0
        self._threads = ThreadPoolExecutor(max_requests, thread_name_prefix="engine-request")

    def ask(self, method: str, path: str, body: Any = None, timeout_s: float | None = None) -> Any:
        """Sends a request and waits.

        Args:
            method: GET or POST.
            path: begins with a slash.
            body: what is sent as JSON; None sends nothing.
            timeout_s: longest that it may take; None: as long as any.

        Returns:
            The JSON of the answer; None of an empty one, a text where it is no JSON.

        Raises:
            RefusedByServerError: when the server refuses it.
            EngineError: without an answer.
        """
        data = b"" if body is None else json.dumps(body).encode()
        headers = {**self._headers, **({} if body is None else {"Content-Type": "application/json"})}
        limits = Limits(
            deadline=time.monotonic() + (timeout_s or self.timeout_s),
            max_response_bytes=MAX_RESPONSE_BYTES,
            allow_private=True,
        )
        try:
            answer = exchange(self.base, method, path, data, headers, limits, self._tls)
        except RefusedError as error:
            raise RefusedByServerError(f"{self.name}: {method} {path}: {error}") from error
        except AttemptError as error:
            timeout_text = f" ({timeout_s or self.timeout_s:g} s)" if error.kind == "timeout" else ""
            is_gone = error.kind in ("connection", "truncated")
            problem = self.process.problem(SEEN_S if is_gone else 0.0) if self.process is not None else ""
            message = f"{self.name}: {method} {path}: {error}{timeout_text}" + (f": {problem}" if problem else "")
            raise EngineError(message) from error
        try:
            return load_json(answer, max_values=MAX_VALUES) if answer else None
        except JSONLimitError as error:
            raise EngineError(f"{self.name}: {method} {path}: the answer is JSON with {error}") from error
        except ValueError:
            return answer.decode(errors="replace")

    async def ask_async(self, method: str, path: str, body: Any = None) -> Any:
        """As ``ask``; the event loop goes on meanwhile. The time counts from when the request is sent.

        Returns:
            As ``ask``; ``NOT_SENT`` when ``end_all`` was called before.
        """
        return await asyncio.get_running_loop().run_in_executor(
            self._threads, self._send, self._num_ends, method, path, body
        )

    def _send(self, num_ends: int, method: str, path: str, body: Any) -> Any:
        with self._lock:
            if self._num_ends != num_ends:
                return NOT_SENT
            self._num_open += 1
        try:
            return self.ask(method, path, body)
        finally:
            with self._lock:
                self._num_open -= 1

    def end_all(self, end: Callable[[], None]) -> None:
        """Has all requests of ``ask_async`` ended: those that wait here, and those that the server has.

        Args:
            end: has the server end what it has; called again for what was on its way meanwhile.

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

    def answers(self, path: str, timeout_s: float = 5.0) -> bool:
        """Whether GET of a path is answered with status 200."""
        try:
            self.ask("GET", path, timeout_s=timeout_s)
        except EngineError:
            return False
        return True

    def close(self) -> None:
        """Requests that have not been sent are given up; those on their way end by themselves."""
        self._threads.shutdown(wait=False, cancel_futures=True)
