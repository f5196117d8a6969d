"""Calls of a user's functions: tools, environments, agents. They may be async or not, and may hang."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from typing import Any


class OwnCallError(Exception):
    """A user's function raised StopIteration, or what is no ``Exception``, such as SystemExit: the call has failed.

    It stands in the place of these, which would end the event loop, or the run.
    """


async def call_own(function: Callable[..., Any], *args: object, timeout_s: float | None, **named: object) -> Any:
    """Awaits the result of a function, whether it is async or not.

    One that is not async runs in a thread, so that the event loop goes on meanwhile. A thread cannot be ended: after a
    timeout it goes on until the function returns, and its result is dropped.

    Args:
        function: to be called.
        args, named: its arguments.
        timeout_s: seconds that it may take; None sets no limit.

    Raises:
        TimeoutError: when it takes longer.
        Exception: whatever the function raises.
    """
    async with asyncio.timeout(timeout_s):
        if inspect.iscoroutinefunction(function):
            return await _await_own(function(*args, **named))
        result = await _in_thread(lambda: function(*args, **named))
        return await _await_own(result) if inspect.isawaitable(result) else result


async def _await_own(awaitable: Awaitable[object]) -> object:
    """Awaits a user's coroutine. Raises OwnCallError where it exits, or is cancelled though nobody cancelled it."""
    try:
        return await awaitable
    except SystemExit as raised:  # as argparse raises it
        raise OwnCallError(f"SystemExit: {raised}") from raised
    except asyncio.CancelledError as raised:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise OwnCallError(f"CancelledError: {raised}") from raised


def _in_thread(call: Callable[[], object]) -> asyncio.Future[object]:
    """Runs a call in a daemon thread: one that hangs does not keep the process alive, as asyncio's executor would."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[object] = loop.create_future()

    def settle(result: object, error: Exception | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    def work() -> None:
        result = None
        error: Exception | None = None
        try:
            result = call()
        except StopIteration as raised:  # a future refuses it, since it would end a coroutine
            error = OwnCallError(f"StopIteration: {raised}")
        except Exception as raised:
            error = raised
        except BaseException as raised:
            error = OwnCallError(f"{type(raised).__name__}: {raised}")
        if not loop.is_closed():  # the run may have ended while the function hung
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True).start()
    return future


def describe(error: BaseException, timeout_s: float | None = None) -> str:
    """An error in one line."""
    if isinstance(error, TimeoutError) and timeout_s is not None and not str(error):
        return f"took longer than {timeout_s:g} s"
    try:
        text = " ".join(str(error).split())
    except Exception:  # its own __str__ raises: the class must do
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
