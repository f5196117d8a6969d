"""A discrete-event simulation of an RL run whose phases take the times that were measured.

Assumptions:

- A worker is one process (with tensor parallelism: the processes that share their samples). Its phase times do not
  depend on which strategy runs, and roles on other processes take nothing from it.
- An iteration is a fixed number of micro-batches. A free sampler takes the next one in order; a free scorer takes the
  one that has waited longest. An update begins when its iteration's last score is there.
- On n times as many processes an update takes 1/n of the time, and a given share of that speed is kept per doubling.
  Generation needs no such number: it is cut into whole micro-batches, and samplers idle where these are not enough.
- Stragglers: a factor of mean 1 is drawn for each micro-batch, score and actor process, the same for all strategies.
  An update lasts as long as its slowest process, which counts all of them as busy.
- Up to a staleness of 1 the weights change between iterations: actor and samplers wait for each other and for the sync,
  though a run may send weights while samplers still generate: with own pools the simulation is cautious.
  Above it the actor publishes by itself, and each sampler takes the newest version before its next micro-batch; an
  iteration still learns from its own micro-batches, so a slow one holds it up.
- Colocated workers share their weights: no sync, but a time per iteration to move memory between phases.
- Scorers are beside the workers: CPU processes, or requests to a server that are answered at the same time.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from sfumato.errors import ConfigError
from sfumato.tracking.timeline import RUN, STEP, Event, union_seconds


@dataclass(frozen=True)
class Phases:
    """Seconds of the phases of an iteration."""

    generate_s: float
    """A micro-batch on one sampler."""
    score_s: float
    """A micro-batch at one scorer: a reward's latency."""
    update_s: float
    """An iteration on ``update_processes`` processes."""
    sync_s: float = 0.0
    """Weights from the actor to all samplers."""
    switch_s: float = 0.0
    """Moving memory between the phases of an iteration, where processes share them."""
    micro_batches: int = 6
    """Of an iteration."""
    update_processes: int = 1
    efficiency: float = 1.0
    """Of the update's speed that is kept with each doubling of its processes."""

    def update_on(self, processes: int) -> float:
        """Seconds of an update on so many processes."""
        ratio = processes / self.update_processes
        return self.update_s / ratio / self.efficiency ** math.log2(ratio)

    def times(self, factor: float) -> Phases:
        """An iteration of more samples."""
        count = round(self.micro_batches * factor)
        return replace(self, micro_batches=count, update_s=self.update_s * count / self.micro_batches)


@dataclass(frozen=True)
class Strategy:
    """How far roles may run ahead of each other."""

    name: str
    colocated: bool
    """The actor's processes sample."""
    max_staleness: int
    with_reward: bool = True
    """Score while the rest of the iteration is generated."""


SYNC = Strategy("synchronous, rewards after rollout", True, 0, with_reward=False)
SYNC_REWARD = Strategy("synchronous, rewards during rollout", True, 0)
DECOUPLED = Strategy("own pools, synchronous", False, 0)
ONE_STEP_OFF = Strategy("one-step-off", False, 1)
FULLY_ASYNC = Strategy("fully async (4)", False, 4)
STRATEGIES = (SYNC, SYNC_REWARD, DECOUPLED, ONE_STEP_OFF, FULLY_ASYNC)


@dataclass(frozen=True)
class Pools:
    """Processes of each role. Where actor and sampler are colocated, ``samplers`` is not counted."""

    actors: int
    samplers: int
    scorers: int


@dataclass(frozen=True)
class Result:
    """What a simulation of many iterations comes to."""

    seconds: float
    """Per iteration, once the pipeline is full."""
    utilisation: dict[str, float]
    """Share of busy time by role."""
    staleness_mean: float
    """Versions that the policy was ahead of the one that made the samples it learnt from."""
    staleness_max: int
    events: list[Event]


Stragglers = Callable[[str, int, int], float]
"""Factor on the time of a call, by kind, iteration and index."""


def utilisation(
    events: Iterable[Event], start: float, end: float, processes: Mapping[str, int] | None = None
) -> dict[str, float]:
    """Share of a stretch of time in which the processes of each role worked; the rest they were idle.

    Args:
        events: of any time; those of the role "run" are no work.
        start: of the stretch, wall-clock seconds.
        end: of the stretch; after ``start``.
        processes: of each role; those of a role that is left out are the ranks that have an event here.

    Returns:
        ``utilisation/<role>`` in [0, 1].

    Raises:
        ValueError: for a stretch that is empty.
    """
    if not end > start:
        raise ValueError(f"utilisation from {start} to {end}: the end must be after the start")
    spans: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for event in events:
        if event.role != RUN:
            within = spans.setdefault((event.role, event.rank), [])
            if event.start < end and event.end > start:
                within.append((max(event.start, start), min(event.end, end)))
    shares = {}
    for role in sorted({role for role, _ in spans}):
        busy = sum(union_seconds(worked) for (owner, _), worked in spans.items() if owner == role)
        count = max((processes or {}).get(role, 0), sum(owner == role for owner, _ in spans))
        shares[f"utilisation/{role}"] = busy / (count * (end - start))
    return shares


def no_stragglers(kind: str, iteration: int, index: int) -> float:
    """Every call takes its median."""
    return 1.0


def stragglers(text: str, seed: int = 0) -> Stragglers:
    """Reads ``none``, ``lognormal:SIGMA`` or ``tail:SHARE:FACTOR`` (some calls take so many times as long).

    Factors have mean 1 and depend on nothing but their arguments. Raises ConfigError for anything else.
    """
    name, *numbers = text.split(":")
    try:
        values = [float(number) for number in numbers]
    except ValueError:
        values = []
    if text == "none":
        return no_stragglers
    if name == "lognormal" and len(values) == 1 and values[0] >= 0:
        sigma = values[0]

        def draw(rng: random.Random) -> float:
            return rng.lognormvariate(-(sigma**2) / 2, sigma)

    elif name == "tail" and len(values) == 2 and 0 <= values[0] < 1 <= values[1]:
        share, slow = values

        def draw(rng: random.Random) -> float:
            return (slow if rng.random() < share else 1.0) / (1 + share * (slow - 1))

    else:
        raise ConfigError(f"--stragglers {text}: write none, lognormal:SIGMA or tail:SHARE:FACTOR, as in tail:0.05:4")

    @cache
    def factor(kind: str, iteration: int, index: int) -> float:
        return draw(random.Random(f"{seed} {kind} {iteration} {index}"))

    return factor


class Pipeline:
    """A discrete-event simulation of one run."""

    def __init__(
        self, phases: Phases, pools: Pools, strategy: Strategy, iterations: int, factor: Stragglers = no_stragglers
    ) -> None:
        self.phases, self.pools, self.strategy = phases, pools, strategy
        self.iterations, self.factor = iterations, factor
        self.now, self.ends, self._calls = 0.0, [0.0], 0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.idle_samplers = deque(range(pools.actors if strategy.colocated else pools.samplers))
        self.sampler_versions = [0] * len(self.idle_samplers)
        self.idle_scorers, self.to_score = deque(range(pools.scorers)), deque[tuple[int, int]]()
        self.next_request = (0, 0)
        self.planned = iterations + strategy.max_staleness + 1
        self.generated, self.scored = [0] * self.planned, [0] * self.planned
        self.ages: list[int] = []
        self.made_by: dict[tuple[int, int], int] = {}
        self.version, self.published, self.actor_is_free = 0, 0, True
        self.events: list[Event] = []

    def run(self) -> Result:
        """Simulates the run and looks at its iterations but the first quarter."""
        self._advance()
        while self.version < self.iterations:
            self.now, _, done = heapq.heappop(self.queue)
            done()
            self._advance()
        first = max(1, self.iterations // 4)
        start, end = self.ends[first], self.ends[-1]
        processes = {"actor": self.pools.actors, "scorer": self.pools.scorers}
        ages = self.ages[first * self.phases.micro_batches :]
        seconds = (end - start) / (self.iterations - first)
        shares = utilisation(self.events, start, end, processes)
        return Result(seconds, shares, statistics.fmean(ages), max(self.ages), self.events)

    def _advance(self) -> None:
        """Starts whatever can start now."""
        self._start_sync()
        self._start_update()
        self._start_generation()
        self._start_scoring()

    def _work(self, who: Sequence[tuple[str, int]], kind: str, seconds: float, iteration: int, then: Callable) -> None:
        version = self.sampler_versions[who[0][1]] if kind == "generate" else None
        for role, rank in who if seconds else ():
            self.events.append(Event(role, rank, kind, self.now, self.now + seconds, iteration + 1, version))
        self._calls += 1  # calls that end together end in the order in which they began
        heapq.heappush(self.queue, (self.now + seconds, self._calls, then))

    def _actors(self) -> list[tuple[str, int]]:
        return [("actor", rank) for rank in range(self.pools.actors)]

    def _start_sync(self) -> None:
        """The barrier between iterations; without one the actor publishes as part of its update."""
        if self.strategy.colocated or self.strategy.max_staleness > 1 or self.published == self.version:
            return
        begun_last = self.version - 1 + self.strategy.max_staleness
        if not self.actor_is_free or self.generated[begun_last] < self.phases.micro_batches:
            return

        def done() -> None:
            self.published, self.actor_is_free = self.version, True
            self.sampler_versions = [self.version] * len(self.sampler_versions)

        self.actor_is_free = False
        samplers = [("sampler", rank) for rank in self.idle_samplers]
        self._work(self._actors() + samplers, "sync", self.phases.sync_s, self.version - 1, done)

    def _start_update(self) -> None:
        iteration = self.version
        if not self.actor_is_free or self.published < iteration or iteration == self.iterations:
            return
        if self.scored[iteration] < self.phases.micro_batches:
            return
        self.actor_is_free = False
        for micro in range(self.phases.micro_batches):
            self.ages.append(iteration - self.made_by.pop((iteration, micro)))
        slowest = max(self.factor("update", iteration, rank) for rank in range(self.pools.actors))
        seconds = self.phases.update_on(self.pools.actors) * slowest
        self._work(self._actors(), "update", seconds, iteration, self._updated)

    def _updated(self) -> None:
        self.version += 1
        self.events.append(Event(RUN, 0, STEP, self.ends[-1], self.now, self.version))
        self.ends.append(self.now)

        def published() -> None:
            self.published, self.actor_is_free = self.version, True
            if self.strategy.colocated:
                self.sampler_versions = [self.version] * len(self.sampler_versions)

        if self.strategy.colocated:
            self._work(self._actors(), "load", self.phases.switch_s, self.version - 1, published)
        elif self.strategy.max_staleness > 1:
            self._work(self._actors(), "sync", self.phases.sync_s, self.version - 1, published)
        else:
            self.actor_is_free = True

    def _start_generation(self) -> None:
        for _ in range(len(self.idle_samplers)):
            sampler = self.idle_samplers[0]
            iteration, micro = self.next_request
            fresh = self.sampler_versions[sampler] == self.published
            if iteration == self.planned:
                return
            if self.strategy.max_staleness > 1 and not fresh:
                self.idle_samplers.popleft()
                self._take_weights(sampler, iteration)
                continue
            if not self._may_generate(iteration, self.sampler_versions[sampler]):
                return
            self.idle_samplers.popleft()
            self.next_request = (iteration, micro + 1) if micro + 1 < self.phases.micro_batches else (iteration + 1, 0)
            self._generate(sampler, iteration, micro)

    def _may_generate(self, iteration: int, version: int) -> bool:
        if self.strategy.max_staleness > 1:
            return iteration - version <= self.strategy.max_staleness
        # Nothing may start while the weights change, and each iteration has one version.
        ready = self.actor_is_free or self.published == self.version
        return ready and version == max(0, iteration - self.strategy.max_staleness)

    def _take_weights(self, sampler: int, iteration: int) -> None:
        version = self.published

        def done() -> None:
            self.sampler_versions[sampler] = version
            self.idle_samplers.appendleft(sampler)

        self._work([("sampler", sampler)], "sync", self.phases.sync_s, iteration, done)

    def _generate(self, sampler: int, iteration: int, micro: int) -> None:
        self.made_by[iteration, micro] = self.sampler_versions[sampler]

        def done() -> None:
            self.idle_samplers.append(sampler)
            self.generated[iteration] += 1
            if self.strategy.with_reward:
                self.to_score.append((iteration, micro))
            elif self.generated[iteration] == self.phases.micro_batches:
                self.to_score.extend((iteration, index) for index in range(self.phases.micro_batches))

        seconds = self.phases.generate_s * self.factor("generate", iteration, micro)
        role = "actor" if self.strategy.colocated else "sampler"
        self._work([(role, sampler)], "generate", seconds, iteration, done)

    def _start_scoring(self) -> None:
        while self.to_score and self.idle_scorers:
            scorer = self.idle_scorers.popleft()
            iteration, micro = self.to_score.popleft()

            def done(scorer: int = scorer, iteration: int = iteration) -> None:
                self.idle_scorers.append(scorer)
                self.scored[iteration] += 1

            seconds = self.phases.score_s * self.factor("score", iteration, micro)
            self._work([("scorer", scorer)], "score", seconds, iteration, done)
