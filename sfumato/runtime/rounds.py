"""What passes through the rollout stream: units of work on their way, and whole iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import NamedTuple, Protocol

from sfumato.errors import ConfigError, RoleLostError, ValuesLostError
from sfumato.rewards.scoring.scores import Scores
from sfumato.rollout.batch import RankBatch
from sfumato.runtime.roles import Driver, Future, Handle


class Request(Protocol):
    """One sample that is to be made."""

    sample_id: int
    group_id: int


@dataclass
class Unit:
    """What one of the sampler's data-parallel ranks draws together: a micro-batch, or a group."""

    requests: Sequence[Request]
    made: tuple[Handle, ...] = ()
    """What was generated, for the update and for the rewards, and what is left to the next iteration, where something
    is; empty before it is begun."""
    scores: Future | None = None
    """Its scores, once scoring has begun."""

    @property
    def is_scored(self) -> bool:
        """Whether its scores are there; what went wrong is raised, but for samples that are lost."""
        try:
            return self.scores is not None and self.scores.done() and self.scores.result() is not None
        except ValuesLostError:
            return False


@dataclass
class Round:
    """A unit for each of the sampler's data-parallel ranks, generated at the same time by the same weights."""

    step: int
    by_rank: list[Unit | None]
    """None where a rank has less to do than others."""
    version: int = 0
    """Version of the policy that makes it."""

    @property
    def units(self) -> list[Unit]:
        """Those of the ranks that have something to do."""
        return [unit for unit in self.by_rank if unit is not None]

    @property
    def unfinished(self) -> Handle | None:
        """What it leaves to the next iteration; the first of the ranks that this process drives speaks for all."""
        handles = self.units[0].made
        return handles[2] if len(handles) > 2 else None

    @property
    def handles(self) -> list[Handle]:
        """What was generated, of all ranks."""
        return [handle for unit in self.units for handle in unit.made]

    @property
    def is_begun(self) -> bool:
        """Whether the sampler was asked for it."""
        return bool(self.handles)

    @property
    def is_generated(self) -> bool:
        """Whether all ranks have ended."""
        return self.is_begun and all(handle.done() for handle in self.handles)

    @property
    def is_whole(self) -> bool:
        """Whether all ranks have ended well."""
        try:
            for handle in self.handles:
                handle.check()
        except RoleLostError:
            return False
        return self.is_generated

    @property
    def is_being_scored(self) -> bool:
        """Whether scoring has begun."""
        return any(unit.scores is not None for unit in self.units)

    @property
    def scoring(self) -> list[Future]:
        """What is being scored, or waits for it."""
        return [unit.scores for unit in self.units if unit.scores is not None and not unit.scores.done()]

    @property
    def is_complete(self) -> bool:
        """Whether samples and scores are there, or will never be."""
        return self.is_generated and self.is_being_scored and not self.scoring

    @property
    def lost(self) -> ValuesLostError | None:
        """Why it could not be scored, if its samples were lost."""
        for unit in self.units:
            try:
                if unit.scores is not None and unit.scores.done():
                    unit.scores.result()
            except ValuesLostError as error:
                return error
            except Exception:  # it rises where the scores are taken
                return None
        return None

    @property
    def seconds(self) -> float:
        """Seconds that its generation took."""
        return max(handle.seconds for handle in self.handles)

    @property
    def nbytes(self) -> int:
        """Memory that it takes up where samples are on their way."""
        return sum(handle.nbytes for handle in self.handles)

    def forget_samples(self, and_scores: bool = False) -> None:
        """Has it drawn again."""
        for unit in self.units:
            unit.made = ()
            unit.scores = None if and_scores else unit.scores


class ScoredGroup(NamedTuple):
    """A group that has been drawn and scored while others of its iteration are under way."""

    requests: Sequence[Request]
    scores: Scores
    """Scores of its samples, in the order of ``requests``."""


@dataclass
class Iteration:
    """An iteration that has been planned and was not delivered yet."""

    step: int
    rounds: list[Round]
    scored: list[ScoredGroup] = field(default_factory=list)
    """Groups that were shown to whoever may ask for more, in the order in which they were asked for."""
    added: list[Sequence[Request]] = field(default_factory=list)
    """Groups that were asked for in addition."""

    @classmethod
    def planned(cls, step: int, by_rank: Sequence[Sequence[Request]], unit_size: int | None) -> Iteration:
        """Cuts the samples of each rank into units of that size, or without one into groups."""
        cut = [_groups(requests) if unit_size is None else _slices(requests, unit_size) for requests in by_rank]
        rounds = [[None if unit is None else Unit(unit) for unit in units] for units in zip_longest(*cut)]
        return cls(step, [Round(step, units) for units in rounds])

    @property
    def units(self) -> list[Unit]:
        """All units, in the order in which they were asked for."""
        return [unit for round_ in self.rounds for unit in round_.units]

    @property
    def is_generated(self) -> bool:
        """Whether all has been drawn."""
        return all(round_.is_generated for round_ in self.rounds)

    @property
    def is_complete(self) -> bool:
        """Whether samples and scores are there, or will never be."""
        return all(round_.is_complete for round_ in self.rounds)

    @property
    def is_shown(self) -> bool:
        """Whether nobody can ask for more any more."""
        return len(self.scored) == len(self.units)

    def add(self, groups: Sequence[Sequence[Request]], num_ranks: int) -> None:
        """Takes up groups that are asked for in addition; the ranks take turns."""
        for number, group in enumerate(groups):
            rank = len(self.added) % num_ranks
            if number == 0 or rank == 0:
                self.rounds.append(Round(self.step, [None] * num_ranks))
            self.rounds[-1].by_rank[rank] = Unit(group)
            self.added.append(group)


class InFlight:
    """Iterations that are under way, and the memory that their samples take."""

    def __init__(self, driver: Driver, *, max_queued: int, max_pending: int, store_fraction: float) -> None:
        """Args as of ``RolloutStream``."""
        self.driver, self.max_queued, self.max_pending = driver, max_queued, max_pending
        self.store_fraction = store_fraction
        self.iterations: list[Iteration] = []
        self.delivered_bytes = 0
        """Memory of the iteration that is being learned from."""
        self._round_bytes = 0
        """Memory of the largest round so far; 0 before the first."""

    @property
    def rounds(self) -> list[Round]:
        """Rounds of all iterations, in the order in which they are drawn."""
        return [round_ for iteration in self.iterations for round_ in iteration.rounds]

    def pending(self) -> list[Future | Handle]:
        """What is being drawn or scored."""
        handles = [handle for round_ in self.rounds for handle in round_.handles if not handle.done()]
        return handles + [scores for round_ in self.rounds for scores in round_.scoring]

    def to_score(self, with_reward: bool) -> Round | None:
        """A round that has been generated, and may be scored. Raises what generating one has raised."""
        for iteration in self.iterations:
            for round_ in iteration.rounds:
                if not round_.is_generated:
                    continue
                for handle in round_.handles:
                    handle.check()
                if not round_.is_being_scored and (with_reward or iteration.is_generated):
                    self._round_bytes = max(self._round_bytes, round_.nbytes)
                    return round_
        return None

    def has_room(self, is_needed: bool) -> bool:
        """Whether neither the sampler nor the scorer has enough to do, and samples of another round have a place.

        Args:
            is_needed: the round is of the iteration that is waited for.

        Raises:
            ConfigError: when that iteration can never fit.
        """
        store_bytes = self.driver.store_bytes
        making = sum(round_.is_begun and not round_.is_generated for round_ in self.rounds)
        is_size_unknown = store_bytes is not None and self._round_bytes == 0
        if making >= (1 if is_size_unknown else self.max_queued):
            return False
        if sum(len(round_.scoring) for round_ in self.rounds) >= self.max_pending:
            return False
        if store_bytes is None:
            return True
        free = self.store_fraction * store_bytes - self.delivered_bytes
        needed = sum(round_.nbytes for round_ in self.rounds if round_.is_generated) + (making + 1) * self._round_bytes
        if needed > free and not making and is_needed and not self.delivered_bytes:
            raise ConfigError(
                f"the samples of an iteration do not fit into Ray's object store: {needed / 2**30:.1f} GiB before its "
                f"last micro-batch, and {free / 2**30:.1f} GiB of {store_bytes / 2**30:.1f} GiB are for samples: raise "
                "runtime.object_store_gb (its place is /dev/shm), or lower rollout.num_prompts or rollout.n"
            )
        return needed <= free


class DrawnSample(NamedTuple):
    """A sample of an iteration."""

    sample_id: int
    group_id: int
    version: int


@dataclass(frozen=True)
class StreamBatch:
    """One iteration's samples."""

    rank_batches: list[RankBatch]
    """What each of the actor's data-parallel ranks learns from that this process drives."""
    scores: Scores
    """Scores of the samples of all ranks, in the order of their ids."""
    group_ids: list[int]
    """The group of each sample."""
    versions: list[int]
    """The version of the policy that made each sample."""
    num_driven: int
    """Number of samples that this process's data-parallel ranks of the actor learn from."""
    fraction_driven: float
    """Fraction of the actor's data-parallel ranks that this process drives."""
    generate_s: float
    """Seconds of generation."""
    wait_s: float
    """Seconds that scoring added: generation waited for it, or had ended."""

    def staleness(self, step: int) -> dict[str, float]:
        """How far the policy is ahead of the samples when it learns from them in iteration ``step``."""
        ages = [step - version for version in self.versions]
        return {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))}


def _slices(requests: Sequence[Request], size: int) -> list[Sequence[Request]]:
    return [requests[start : start + size] for start in range(0, len(requests), size)]


def _groups(requests: Sequence[Request]) -> list[Sequence[Request]]:
    requests_by_group: dict[int, list[Request]] = {}
    for request in requests:
        requests_by_group.setdefault(request.group_id, []).append(request)
    return list(requests_by_group.values())
