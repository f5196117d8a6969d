"""Code of other people's that a rollout calls: tools, environments, agents. It may be async or not, and may hang."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any


class OwnCallError(Exception):
    """Such code raised what is no ``Exception``, such as SystemExit; it ends the call and not the run."""


async def call_own(function: Callable[..., Any], *args: Any, timeout_s: float | None, **named: Any) -> Any:
    """What a function returns, whether it is async or not.

    One that is not async runs in a thread of its own, so that others go on meanwhile; a timeout leaves the thread
    behind.

    Args:
        function: to be called.
        args, named: its arguments.
        timeout_s: seconds that it may take; None waits for as long as it takes.

    Raises:
        TimeoutError: when it takes longer.
        Exception: whatever it raises.
    """
    async with asyncio.timeout(timeout_s):
        if inspect.iscoroutinefunction(function):
            return await function(*args, **named)
        result = await _in_thread(lambda: function(*args, **named))
        return await result if inspect.isawaitable(result) else result


def _in_thread(call: Callable[[], Any]) -> asyncio.Future[Any]:
    """Runs a call in a thread that does not keep the process alive, unlike those of asyncio's own executor."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if not future.done():
            future.set_result(result) if error is None else future.set_exception(error)

    def work() -> None:
        result, error = None, None
        try:
            result = call()
        except StopIteration as raised:  # which no future takes
            error = OwnCallError(f"StopIteration: {raised}")
        except Exception as raised:
            error = raised
        except BaseException as raised:
            error = OwnCallError(f"{type(raised).__name__}: {raised}")
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True).start()
    return future


def describe(error: BaseException, timeout_s: float | None = None) -> str:
    """An error in one line."""
    if isinstance(error, TimeoutError) and timeout_s is not None and not str(error):
        return f"took longer than {timeout_s:g} s"
    try:
        text = " ".join(str(error).split())
    except Exception:  # of an error whose text cannot be had, the kind must do
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
