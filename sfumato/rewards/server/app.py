"""Serves rewards over HTTP: ``python -m sfumato.rewards.server CONFIG.yaml [--field VALUE ...]``.

    POST /score     values of samples; the messages are those of ``sfumato.rewards.http.wire``
    GET  /rewards   what is served
    GET  /health    200 while the process lives
    GET  /ready     200 when requests are welcome; 503 while it loads, is full, or stops
    GET  /metrics   counters for Prometheus

SIGTERM or Ctrl-C: requests that were accepted are finished, new ones refused; a second one ends it at once.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import hmac
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, cast

from pydantic import Field, model_validator

import sfumato
from sfumato.config.base import Section, Variant
from sfumato.config.characters import printable
from sfumato.config.open_mappings import JsonObject
from sfumato.errors import ConfigError, MissingDependencyError
from sfumato.rewards.base import Reward, Sample
from sfumato.rewards.http import wire
from sfumato.rewards.scoring.scorer import Scorer
from sfumato.rewards.server.batching import Batcher, RequestScores
from sfumato.rewards.server.metrics import ServerMetrics
from sfumato.serving.connections import trust_connection, uvicorn_config
from sfumato.serving.requests import (
    ByteBudget,
    ByteShare,
    RefusedRequestError,
    RequestGuard,
    check_media_type,
    read_body,
)

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response


class RewardServerConfig(Section):
    """Serves rewards to other processes and machines."""

    usage: ClassVar[str] = "python -m sfumato.rewards.server CONFIG.yaml [--field VALUE ...]"

    rewards: list[Annotated[Any, Variant("sfumato.rewards")]] = Field(min_length=1)
    """What is served, each under its label; weight and evaluation_only are the run's business and mean nothing here."""
    host: str = "127.0.0.1"
    """Address to listen on; 0.0.0.0 for every network of this machine, then set token_env."""
    port: int = Field(8642, ge=0, le=65535)
    """Port to listen on; 0 takes a free one and prints it."""
    token_env: str | None = None
    """Name of the environment variable with the key that clients must send (their api_key_env); null asks for none."""
    max_batch_size: int = Field(32, ge=1)
    """Samples in one call of a reward; a group is never cut."""
    max_wait_ms: float = Field(0.0, ge=0, le=10_000)
    """How long small requests wait to be scored together; 0 never joins requests, so that a value cannot depend on
    what else is scored at the time."""
    max_request_mib: int = Field(256, ge=1, le=4096)
    """Size of the body of one request."""
    host_names: list[str] = []
    """Names and addresses that requests may call this server by, besides its address and those of this machine."""
    max_queue: int = Field(32, ge=1)
    """Requests that are read, waiting or being scored; more are told to come again later (status 429)."""

    @model_validator(mode="after")
    def _token_is_set(self) -> RewardServerConfig:
        if self.token_env is not None and not os.environ.get(self.token_env, "").strip():
            raise ValueError(f"token_env names the environment variable {self.token_env}, which is not set: export it")
        return self


READ_TIMEOUT_S = 120.0
"""How long the body of a request may take to arrive, however fast."""
RETRY_AFTER_S = 1
ANY_ADDRESS = ("", "0.0.0.0", "::")
DECODED_BYTES = wire.MAX_PIXEL_BYTES + wire.MAX_METADATA_BYTES + wire.PICTURE_BYTES * wire.MAX_PICTURE_PIXELS
"""Memory of pictures and metadata of all requests that are decoded; others wait."""


class RewardServer:
    """The state behind the endpoints.

    Raises ConfigError when the rewards do not go together.
    """

    def __init__(self, config: RewardServerConfig) -> None:
        self.config = config
        self.scorer = Scorer(config.rewards, require_objective=False)
        self.state = "loading"  # then ready, then stopping
        self.num_accepted = 0
        """Requests that are being read, waiting, or being scored."""
        self.metrics = ServerMetrics([reward.label for reward in config.rewards])
        self._token = os.environ[config.token_env].strip().encode() if config.token_env else None
        self._fingerprints: dict[str, str] = {}
        self._batchers: dict[str, Batcher] = {}
        self._running: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()
        self._bodies = ByteBudget(2 * config.max_request_mib * 2**20)
        self._decoded = ByteBudget(DECODED_BYTES)

    def app(self) -> RequestGuard:
        """The ASGI application."""
        from starlette.applications import Starlette
        from starlette.responses import PlainTextResponse, Response
        from starlette.routing import Route

        async def health(_request: Request) -> Response:
            return PlainTextResponse("alive\n")

        async def ready(_request: Request) -> Response:
            is_full = self.num_accepted >= self.config.max_queue
            state = "full" if self.state == "ready" and is_full else self.state
            return PlainTextResponse(f"{state}\n", 200 if state == "ready" else 503)

        async def metrics(request: Request) -> Response:
            self._check_token(request)
            return PlainTextResponse(self.metrics.text(self.num_accepted))

        async def rewards(request: Request) -> Response:
            self._check_token(request)
            self._check_state()
            return Response(wire.encode_description(self.describe()), media_type=wire.MEDIA_TYPE)

        async def refuse(_request: Request, error: Exception) -> Response:
            assert isinstance(error, RefusedRequestError)
            headers = {"Retry-After": str(RETRY_AFTER_S)} if error.status in (429, 503) else {}
            return PlainTextResponse(f"{error}\n", error.status, headers)

        routes = [
            Route("/score", self.score, methods=["POST"]),
            Route("/rewards", rewards),
            Route("/health", health),
            Route("/ready", ready),
            Route("/metrics", metrics),
        ]
        app = Starlette(routes=routes, exception_handlers={RefusedRequestError: refuse})
        names = [*self.config.host_names, *([] if self.config.host in ANY_ADDRESS else [self.config.host])]
        return RequestGuard(app, names, ": add the name to its host_names")

    async def load(self) -> None:
        """Loads all engines and begins to score. Raises what ``prepare`` of a reward raises."""
        await asyncio.to_thread(self.scorer.prepare)
        if self.state != "loading":  # it was told to stop meanwhile
            return
        self._fingerprints = {reward.label: _fingerprint_reward(reward) for reward in self.scorer.rewards}
        for reward in self.scorer.rewards:
            batcher = Batcher(
                reward,
                self.config.max_batch_size,
                self.config.max_wait_ms / 1000,
                functools.partial(self._note_call, reward.label),
            )
            self._batchers[reward.label] = batcher
            self._running.append(asyncio.create_task(batcher.run()))
        self.state = "ready"

    def _note_call(self, label: str, reasons: list[str], seconds: float) -> None:
        self.metrics.count_call(label, reasons, seconds)
        for reason, count in Counter(filter(None, reasons)).items():
            print(printable(f"{label}: {reason} ({count} of {len(reasons)} samples)"), flush=True)

    async def stop(self) -> None:
        """Refuses new requests and waits until the accepted ones are finished."""
        self.state = "stopping"
        while self.num_accepted:
            self._idle.clear()
            await self._idle.wait()
        for task in self._running:
            task.cancel()

    def describe(self) -> wire.ServerDescription:
        """The description that clients are sent."""
        served = {
            reward.label: wire.ServedReward(groupwise=reward.groupwise, fingerprint=self._fingerprints[reward.label])
            for reward in self.scorer.rewards
        }
        limits = {"max_batch_size": self.config.max_batch_size, "max_request_mib": self.config.max_request_mib}
        return wire.ServerDescription(rewards=served, **limits)

    async def score(self, request: Request) -> Response:
        """Answers POST /score."""
        from starlette.responses import Response

        started = time.monotonic()
        status = 500
        # counted before anything is checked, so that ``stop`` waits for every request that was begun
        self.num_accepted += 1
        try:
            self._check_token(request)
            self._check_state()
            if self.num_accepted > self.config.max_queue:
                raise RefusedRequestError(429, f"{self.config.max_queue} requests are waiting already")
            check_media_type(request, wire.MEDIA_TYPE)
            outcome = await self._score(request)
            status = 200
            return Response(wire.encode_answer(*outcome), media_type=wire.MEDIA_TYPE)
        except RefusedRequestError as error:
            status = error.status
            raise
        finally:
            self.metrics.count_request(status, time.monotonic() - started)
            self.num_accepted -= 1
            self._idle.set()

    async def _score(self, request: Request) -> RequestScores:
        with self._bodies.share() as held, self._decoded.share() as decoded:
            max_mib = self.config.max_request_mib
            too_large = f"the request is larger than max_request_mib {max_mib}"
            body = await read_body(request, max_mib * 2**20, too_large, READ_TIMEOUT_S, held)
            self.metrics.bytes_received += len(body)
            # only once the body is read: both receive messages of the same connection
            hung_up = asyncio.create_task(_wait_for_hang_up(request))
            try:
                label, samples = await self._decode(body, decoded, hung_up.done)
                if label not in self._batchers:
                    raise RefusedRequestError(404, f"no reward {label!r} here; served are: {', '.join(self._batchers)}")
                job = self._batchers[label].put(samples)
                await asyncio.wait({job.outcome, hung_up}, return_when=asyncio.FIRST_COMPLETED)
                if not job.outcome.done():
                    job.is_abandoned = True
                    raise RefusedRequestError(499, "the client has hung up")
                return job.outcome.result()
            finally:
                hung_up.cancel()

    async def _decode(
        self, body: bytearray, decoded: ByteShare, is_given_up: Callable[[], bool]
    ) -> tuple[str, list[Sample]]:
        """The reward's label and the samples of a request.

        They are decoded in a thread, once the budget of decoded bytes has room. Between samples the thread asks
        ``is_given_up``, so that a request whose client has hung up takes no more time.
        """
        try:
            encoded = await asyncio.to_thread(wire.read_request, body, is_given_up)
            await decoded.wait_to_grow(encoded.decoded_bytes)
            return encoded.reward, await asyncio.to_thread(wire.decode_samples, encoded, is_given_up)
        except wire.WireError as error:
            if is_given_up():
                raise RefusedRequestError(499, "the client has hung up") from error
            raise RefusedRequestError(400, str(error)) from error

    def _check_token(self, request: Request) -> None:
        authorization = request.headers.get("authorization", "").encode()
        if self._token is not None and not hmac.compare_digest(authorization, b"Bearer " + self._token):
            raise RefusedRequestError(401, "the key is missing or wrong: set api_key_env of the remote reward")
        trust_connection(request.scope)

    def _check_state(self) -> None:
        if self.state != "ready":
            raise RefusedRequestError(503, f"the server is {self.state}")


async def _wait_for_hang_up(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _fingerprint_reward(reward: Reward) -> str:
    """A digest of the reward's fields, of the files that they name, and of sfumato's version.

    Fields that do not change a value are left out: the weight and the like are the client's.
    """
    fields = cast("JsonObject", Variant("sfumato.rewards").dump(reward) or {})  # a mapping, since not ``short``
    settings = {
        name: value
        for name, value in fields.items()
        if name not in ("weight", "evaluation_only", "normalise", "process")
    }
    files = {name: _file_hash(value) for name, value in settings.items()}
    return hashlib.sha256(json.dumps([sfumato.__version__, settings, files], sort_keys=True).encode()).hexdigest()


def _file_hash(value: object) -> str | None:
    """The digest of the file that a field names: a template, a rubric, a function's source. None when it names none."""
    # before the colon of path.py:function stands the file of a function
    for name in (value, value.rpartition(":")[0]) if isinstance(value, str) else ():
        try:
            return hashlib.sha256(Path(name).read_bytes()).hexdigest()
        except (OSError, ValueError):  # no file: a folder, or a text
            continue
    return None


async def serve(config: RewardServerConfig) -> None:
    """Serves until SIGTERM or Ctrl-C.

    Raises:
        UserError: the port is taken, a package is missing, or a reward cannot be loaded.
    """
    try:
        import uvicorn
    except ImportError as error:
        raise MissingDependencyError(
            f"the reward server needs a package that is missing ({error}): pip install starlette uvicorn msgpack"
        ) from error

    class StoppableServer(uvicorn.Server):
        """Asks the reward server to finish its work first; a second signal ends it at once."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if rewards.state == "stopping":
                os._exit(128 + sig)  # a thread that scores cannot be ended otherwise
            loop.call_soon_threadsafe(begin_stop)

    loop = asyncio.get_running_loop()
    rewards = RewardServer(config)
    server = StoppableServer(uvicorn_config(rewards.app(), grace_s=10))
    tasks: list[asyncio.Task[None]] = []

    def begin_stop() -> None:
        print("stopping: accepted requests are finished", flush=True)
        tasks.append(asyncio.create_task(finish()))

    async def finish() -> None:
        await rewards.stop()
        server.should_exit = True

    async def begin() -> None:
        try:
            await rewards.load()
            if rewards.state == "ready":
                print(f"serving {', '.join(rewards.metrics.call_s)} at {_shown_address(listening)}", flush=True)
        except BaseException:
            server.should_exit = True
            raise

    listening = _listen_at(config)
    tasks.append(asyncio.create_task(begin()))
    await server.serve(sockets=[listening])
    await asyncio.gather(*tasks)


def _listen_at(config: RewardServerConfig) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        listening = socket.socket(family, kind, protocol)
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port} ({error.strerror}): choose another host or port"
        ) from error
    return listening


def _shown_address(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
