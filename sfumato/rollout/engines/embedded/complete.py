"""Completions of many requests at a time, for synchronous code that waits for all of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from sfumato.rollout.engines.base import Completion, Engine, GenerationRequest, Sampling


def complete_requests(engine: Engine, requests: Sequence[GenerationRequest], sampling: Sampling) -> list[Completion]:
    """Draws completions of all requests, in an event loop of its own.

    Args:
        engine: it must have no open requests in another event loop.
        requests: any number.
        sampling: the same for all.

    Returns:
        Their completions in the same order.

    Raises:
        ConfigError, EngineError: the first error of a request; the other requests are cancelled.
    """

    async def all_of_them() -> list[Completion]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine.generate(request, sampling)) for request in requests]
        return [task.result() for task in tasks]

    try:
        return asyncio.run(all_of_them())
    except ExceptionGroup as errors:
        first = errors.exceptions[0]  # callers know the errors of ``Engine``, not groups of them
        raise first from first.__cause__
