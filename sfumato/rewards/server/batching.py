"""Feeds one reward of a server: requests in order of arrival, small ones together if that is wanted."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from sfumato.errors import UserError
from sfumato.rewards.base import Reward, Sample
from sfumato.rewards.scoring.calls import TIMED_OUT
from sfumato.rewards.scoring.one_reward import score_with

RequestScores = tuple[list[float], list[str]]
"""Values of a request's samples, NaN without one, and the reasons why there is none ("" where there is one)."""


@dataclass
class Job:
    """The samples of one request, and where their values will be."""

    samples: list[Sample]
    outcome: asyncio.Future[RequestScores]
    is_abandoned: bool = False
    """Whether nobody waits for the values any more."""


class Batcher:
    """Scores jobs with one reward, one call at a time.

    Args:
        reward: prepared.
        max_batch_size: samples of one call, unless the reward is of whole groups.
        max_wait_s: how long a job waits for others to be scored with; 0 keeps jobs apart.
        on_call: told of each batch the reasons of failure ("" for a sample with a value) and the seconds.
    """

    def __init__(
        self, reward: Reward, max_batch_size: int, max_wait_s: float, on_call: Callable[[list[str], float], None]
    ) -> None:
        self.reward = reward
        self._max_batch_size = max_batch_size
        self._max_wait_s = max_wait_s
        self._on_call = on_call
        self._queue: asyncio.Queue[Job] = asyncio.Queue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=reward.label)  # one that hangs keeps no other waiting
        self._held_over: Job | None = None

    def put(self, samples: list[Sample]) -> Job:
        """Queues the samples of one request."""
        job = Job(samples, asyncio.get_running_loop().create_future())
        self._queue.put_nowait(job)
        return job

    async def run(self) -> None:
        """Scores until it is cancelled."""
        while True:
            jobs = [job for job in await self._next_jobs() if not job.is_abandoned]
            if not jobs:
                continue
            started = time.monotonic()
            requests = [job.samples for job in jobs]
            try:
                outcomes = await asyncio.get_running_loop().run_in_executor(
                    self._thread, score_requests, self.reward, requests, self._max_batch_size
                )
            except Exception as error:  # a fault of this program: the requests fail with it, the next ones are tried
                for job in jobs:
                    job.outcome.set_exception(error)
                continue
            self._on_call([reason for _, reasons in outcomes for reason in reasons], time.monotonic() - started)
            for job, outcome in zip(jobs, outcomes, strict=True):
                job.outcome.set_result(outcome)

    async def _next_jobs(self) -> list[Job]:
        """The next job, and those that arrive in time and still fit into a batch with it."""
        first, self._held_over = self._held_over or await self._queue.get(), None
        jobs = [first]
        num_samples = len(first.samples)
        wait_until = time.monotonic() + self._max_wait_s
        while self._max_wait_s and num_samples < self._max_batch_size:
            try:
                job = await asyncio.wait_for(self._queue.get(), max(wait_until - time.monotonic(), 0))
            except TimeoutError:
                break
            if num_samples + len(job.samples) > self._max_batch_size:
                self._held_over = job
                break
            jobs.append(job)
            num_samples += len(job.samples)
        return jobs


def score_requests(reward: Reward, requests: Sequence[list[Sample]], max_batch_size: int) -> list[RequestScores]:
    """Scores several requests in common calls; one that fails takes no other with it.

    Args:
        reward: prepared.
        requests: their samples; group ids mean something only within a request.
        max_batch_size: samples of one call, unless the reward is of whole groups.

    Returns:
        For each request what it would be given alone, but for rounding where a reward computes a batch at once.
    """
    numbers: dict[tuple[int, int], int] = {}
    merged = [
        dataclasses.replace(sample, group_id=numbers.setdefault((request, sample.group_id), len(numbers)))
        for request, samples in enumerate(requests)
        for sample in samples
    ]
    size = len(merged) if reward.groupwise else max_batch_size
    values = []
    reasons = []
    for start in range(0, len(merged), size):
        part_values, part_reasons = _score(reward, merged[start : start + size])
        # A call that failed as a whole may have done so for the samples of one request, so each is scored alone then;
        # not after a timeout, which every one of them might wait for again.
        if len(requests) > 1 and all(part_reasons) and not part_reasons[0].startswith(TIMED_OUT):
            return [outcome for samples in requests for outcome in score_requests(reward, [samples], max_batch_size)]
        values += part_values
        reasons += part_reasons
    ends = list(itertools.accumulate(map(len, requests), initial=0))
    return [(values[start:end], reasons[start:end]) for start, end in itertools.pairwise(ends)]


def _score(reward: Reward, samples: list[Sample]) -> RequestScores:
    """Scores samples; a UserError, which ends a training run, is a reason of failure here: it must not end a server."""
    try:
        if any(sample.image is not None and sample.image.ndim == 4 for sample in samples):
            reward.check_video()
        values, reasons = score_with(reward, samples)
    except UserError as error:
        return [math.nan] * len(samples), [str(error)] * len(samples)
    return values.tolist(), reasons
