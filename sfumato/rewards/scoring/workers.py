"""Processes that score: each holds one prepared reward, and is ended when it hangs.

They are started fresh (no CUDA context, no locks of this process), as many as there are calls at the same time. Nothing
that they do ends this process, and none outlives it, however it ends.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from typing import cast

from sfumato import errors
from sfumato.config.open_mappings import JsonObject
from sfumato.errors import ConfigError, UserError
from sfumato.rewards.base import Reward, Sample
from sfumato.rewards.scoring.calls import TIMED_OUT, Checked, Outcome, mark_failed

START_TIMEOUT_S = 900.0
"""How long loading a reward may take."""
NONSENSE = "answered with something that is no list of values"
_POLL_S = 0.1
_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1])\n"
    "from sfumato.rewards.scoring.worker_process import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)


class LostError(Exception):
    """A worker process is of no more use; the message says why."""


class Worker:
    """One process with one reward, which comes with its pickle.

    Raises:
        UserError: what ``prepare`` of the reward raised as such.
        LostError: the process could not be started, or has ended while it loaded the reward.
    """

    def __init__(self, reward: Reward, pickled: bytes) -> None:
        self.reward = reward
        self._num_asked = 0
        # pipes of their own and not stdin and stdout, which a reward's libraries may write to
        child_requests, self._requests = os.pipe()
        self._replies, child_replies = os.pipe()
        os.set_blocking(self._requests, False)  # a write that waits for a process that hangs would have no deadline
        command = [sys.executable, "-X", "faulthandler", "-c", _PROGRAM]
        try:
            self._process = subprocess.Popen(
                [*command, json.dumps(sys.path), str(child_requests), str(child_replies)],
                stdin=subprocess.DEVNULL,
                stdout=2,  # what a reward prints belongs to the log, not into this program's output
                pass_fds=(child_requests, child_replies),
                process_group=0,  # of its own, to be ended with all that it starts
            )
        except OSError as error:
            os.close(self._requests)
            os.close(self._replies)
            raise LostError(f"could not be started: {error}") from error
        finally:
            os.close(child_requests)
            os.close(child_replies)
        try:
            self._ask(pickled, 0, START_TIMEOUT_S)
        except LostError as error:
            self.end()
            raise LostError(f"could not be started: it {error}") from error
        except UserError:
            self.end()
            raise

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended by itself."""
        return self._process.poll() is None

    def score(self, samples: bytes, num_samples: int) -> tuple[Checked, bool]:
        """Scores a batch.

        Args:
            samples: the pickled list.
            num_samples: its length.

        Returns:
            The values, and whether the process can be asked again.

        Raises:
            UserError: what the reward raised as such.
            LostError: the process has ended, hangs, or answers nonsense; ``end`` it.
        """
        answer = self._ask(samples, num_samples, self.reward.call_timeout_s(num_samples))
        values = [(math.nan if value is None else value, reason) for value, reason in answer["values"]]
        return values, not answer["last"]

    def kill(self) -> None:
        """Kills the process and everything that it has started, which is its group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def end(self) -> None:
        """Kills the process and clears up after it."""
        self.kill()
        self._process.wait()
        os.close(self._requests)
        os.close(self._replies)

    def _ask(self, request: bytes, num_samples: int, timeout_s: float) -> JsonObject:
        """Sends a pickle and returns the answer; see ``score`` for the errors.

        Writing waits as reading does: a process that hangs before it reads leaves the pipe full.
        """
        deadline = time.monotonic() + timeout_s
        too_late = LostError(f"{TIMED_OUT} after {timeout_s:g} s")
        unsent = memoryview(request)
        number = self._num_asked
        self._num_asked += 1
        while unsent:
            self._wait(self._requests, select.POLLOUT, deadline, too_late)
            try:
                unsent = unsent[os.write(self._requests, unsent) :]
            except BrokenPipeError:
                raise LostError(self._describe_end()) from None
        answer = bytearray()
        max_bytes = 65536 + 8192 * num_samples  # a value and its reason take far less
        while not answer.endswith(b"\n"):
            self._wait(self._replies, select.POLLIN, deadline, too_late)
            part = os.read(self._replies, 65536)
            answer += part
            if not part:
                raise LostError(self._describe_end())
            if len(answer) > max_bytes:
                raise LostError(NONSENSE)
        return _parse_answer(bytes(answer), number, num_samples)

    def _wait(self, descriptor: int, event: int, deadline: float, too_late: LostError) -> None:
        """Waits until the pipe is ready or closed. Raises ``too_late`` at the deadline, LostError without a process."""
        ready = select.poll()
        ready.register(descriptor, event)
        while not ready.poll(max(min(_POLL_S, deadline - time.monotonic()), 0) * 1000):
            if time.monotonic() >= deadline:
                raise too_late
            if self._process.poll() is not None and not ready.poll(0):  # what it has started may keep the pipe open
                raise LostError(self._describe_end())

    def _describe_end(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.returncode
        if code is None:
            return "closed its connection"
        if code >= 0:
            return f"ended itself with exit code {code}"
        signal_names = {number.value: number.name for number in signal.Signals}
        return f"was ended by {signal_names.get(-code, f'signal {-code}')}"


def _parse_answer(line: bytes, number: int, num_samples: int) -> dict[str, object]:
    """Checks an answer line and returns it.

    Args:
        line: JSON, as ``worker_process`` describes it.
        number: of the request that it must answer.
        num_samples: values that it must hold, unless it holds an error.

    Raises:
        UserError: the class that an error names, with its text.
        LostError: the line is anything else.
    """
    try:
        answer = json.loads(line)
        if answer["request"] != number:
            raise ValueError(answer["request"])
        if "error" in answer:
            name, text = answer["error"]
            error_class = getattr(errors, str(name), None)
            is_known = isinstance(error_class, type) and issubclass(error_class, UserError)
            # a name that sfumato.errors does not hold is a subclass of the reward's own, or nonsense
            raise (cast("type[UserError]", error_class) if is_known else ConfigError)(str(text))
        rows = [(value, reason) for value, reason in answer["values"]]
        is_valid = len(rows) == num_samples and all(
            isinstance(reason, str) and (value is None if reason else _is_finite(value)) for value, reason in rows
        )
        if is_valid and isinstance(answer["last"], bool):
            return answer
    except UserError:
        raise
    except (ValueError, TypeError, KeyError) as error:
        raise LostError(NONSENSE) from error
    raise LostError(NONSENSE)


def _is_finite(value: object) -> bool:
    return type(value) is float and math.isfinite(value)


class WorkerPool:
    """The processes of one reward, which comes with its pickle."""

    def __init__(self, reward: Reward, pickled: bytes) -> None:
        self.reward = reward
        self._pickled = pickled
        self._idle: list[Worker] = []
        self._busy: set[Worker] = set()
        self._lock = threading.Lock()

    def start(self) -> None:
        """Loads the reward in a first process. Raises UserError as ``prepare`` of the reward does, or in its place."""
        try:
            self._put_back(self._take_worker())
        except LostError as error:
            raise ConfigError(f"reward {self.reward.label!r}: its process {error}") from error

    def call(self, samples: list[Sample]) -> Outcome:
        """Scores a batch in a process that is idle, or in a new one. Raises what is a UserError."""
        try:
            pickled = pickle.dumps(samples)
        except Exception as error:
            return Outcome(mark_failed(f"the samples cannot be sent to its process: {error}", len(samples)))
        worker = None
        keep = False
        try:
            worker = self._take_worker()
            values, keep = worker.score(pickled, len(samples))
            return Outcome(values)
        except LostError as error:
            reason = str(error)
            reason = reason if reason.startswith(TIMED_OUT) else f"its process {reason}"
            return Outcome(mark_failed(reason, len(samples)), is_lost=True)
        except UserError:
            keep = True
            raise
        finally:
            if worker is not None:
                self._put_back(worker, keep)

    def close(self) -> None:
        """Ends all processes, busy ones too."""
        with self._lock:
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for worker in idle:
            worker.end()
        for worker in busy:  # the thread that waits for it sees it end, and clears up
            worker.kill()

    def _take_worker(self) -> Worker:
        while (worker := self._pop_idle()) is not None and not worker.is_running:
            worker.end()
        worker = worker or Worker(self.reward, self._pickled)
        with self._lock:
            self._busy.add(worker)
        return worker

    def _pop_idle(self) -> Worker | None:
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _put_back(self, worker: Worker, keep: bool = True) -> None:
        with self._lock:
            self._busy.discard(worker)
            if keep:
                self._idle.append(worker)
        if not keep:
            worker.end()


_pools: dict[bytes, WorkerPool] = {}
_pools_lock = threading.Lock()


def close_workers() -> None:
    """Ends all processes; a later call starts new ones."""
    with _pools_lock:
        pools = list(_pools.values())
    for pool in pools:
        pool.close()


def pool_of(reward: Reward) -> WorkerPool:
    """The processes of equal rewards. Raises ConfigError when the reward cannot be pickled."""
    try:
        pickled = pickle.dumps(reward)
    except Exception as error:
        raise ConfigError(f"reward {reward.label!r} cannot be sent to a process: {error}") from error
    with _pools_lock:
        return _pools.setdefault(pickled, WorkerPool(reward, pickled))


atexit.register(close_workers)
