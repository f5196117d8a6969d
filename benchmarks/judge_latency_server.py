"""A judge over HTTP that takes a given time for each batch of images, for measurements of what hides that time.

    python benchmarks/judge_latency_server.py --latency-s 0.2 [--jitter-s 0.1] [--concurrency 4] [--port 0]

Speaks the protocol of ``python -m sfumato.rewards.server`` (docs/reward_server.md), so a run asks it by

    {type: remote, base_urls: ["http://127.0.0.1:PORT"], allow_private: true}

The score of an image is its mean brightness in [0, 1], so that runs can be compared. Requests overlap up to
``--concurrency``, further ones wait for their turn; a wait takes no processor time. It prints ``serving brightness at
URL`` when it is ready, and at SIGTERM or SIGINT how many requests it answered.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from types import FrameType

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from sfumato.rewards.base import Sample
from sfumato.rewards.http import wire

LABEL = "brightness"


class Judge:
    """Scores batches after a pause.

    Args:
        latency_s: seconds of one batch, whatever its size.
        jitter_s: up to so many more, drawn anew for each batch.
        concurrency: batches that are judged at the same time.
        seed: of the jitter; the scores do not depend on it.
        max_batch_size: images of one request, which the client keeps to.
    """

    def __init__(self, latency_s: float, jitter_s: float, concurrency: int, seed: int, max_batch_size: int) -> None:
        self.latency_s, self.jitter_s, self.max_batch_size = latency_s, jitter_s, max_batch_size
        self._free = asyncio.Semaphore(concurrency)
        self._random = random.Random(seed)
        self.num_requests = self.num_samples = 0
        self.busy_s = 0.0
        """Sum over requests of the seconds from their arrival to their answer."""

    async def rewards(self, _request: Request) -> Response:
        """GET /rewards."""
        served = {LABEL: wire.ServedReward(groupwise=False, fingerprint=LABEL)}
        description = wire.ServerDescription(rewards=served, max_batch_size=self.max_batch_size, max_request_mib=1024)
        return Response(wire.encode_description(description), media_type=wire.MEDIA_TYPE)

    async def score(self, request: Request) -> Response:
        """POST /score."""
        arrived = time.monotonic()
        try:
            label, samples = await asyncio.to_thread(wire.decode_request, await request.body())
        except wire.WireError as error:
            return PlainTextResponse(f"{error}\n", 400)
        if label != LABEL:
            return PlainTextResponse(f"no reward {label!r} here; served is {LABEL}\n", 404)
        extra = self._random.uniform(0, self.jitter_s)
        async with self._free:
            await asyncio.sleep(self.latency_s + extra)
        values = [brightness(sample) for sample in samples]
        self.num_requests += 1
        self.num_samples += len(samples)
        self.busy_s += time.monotonic() - arrived
        return Response(wire.encode_answer(values, [""] * len(values)), media_type=wire.MEDIA_TYPE)

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [Route("/rewards", self.rewards), Route("/score", self.score, methods=["POST"])]
        return Starlette(routes=routes)


def brightness(sample: Sample) -> float:
    """Mean of an image's or video's pixels in [0, 1]; 0 for a text."""
    return 0.0 if sample.image is None else float(np.mean(sample.image, dtype=np.float64)) / 255


class StoppableServer(uvicorn.Server):
    """Ends with its last line and code 0; uvicorn's own raises the signal again."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT."""
        self.should_exit = True


async def serve(options: argparse.Namespace) -> None:
    """Serves until it is told to stop."""
    judge = Judge(options.latency_s, options.jitter_s, options.concurrency, options.seed, options.max_batch_size)
    config = uvicorn.Config(
        judge.app(), options.host, options.port, log_level="warning", access_log=False, lifespan="off"
    )
    server = StoppableServer(config)
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    if server.started:
        host, port = server.servers[0].sockets[0].getsockname()[:2]
        print(f"serving {LABEL} at http://{host}:{port}", flush=True)
    try:
        await serving
    finally:
        print(f"{judge.num_requests} requests, {judge.num_samples} samples, {judge.busy_s:.3f} s busy", flush=True)


def main() -> None:
    """Parses arguments and serves."""
    parser = argparse.ArgumentParser(description="a judge over HTTP with a given latency")
    parser.add_argument("--latency-s", type=float, default=0.2, help="seconds of one batch (default 0.2)")
    parser.add_argument("--jitter-s", type=float, default=0.0, help="up to so many seconds more, at random (default 0)")
    parser.add_argument("--concurrency", type=int, default=8, help="batches at the same time (default 8)")
    parser.add_argument("--seed", type=int, default=0, help="of the jitter (default 0)")
    parser.add_argument("--max-batch-size", type=int, default=256, help="images of one request (default 256)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (default)")
    options = parser.parse_args()
    if options.latency_s < 0 or options.jitter_s < 0 or min(options.concurrency, options.max_batch_size) < 1:
        parser.error("times must not be negative, and --concurrency and --max-batch-size be at least 1")
    asyncio.run(serve(options))


if __name__ == "__main__":
    main()
