"""The work that passes through the rollout stream: units, rounds of units, and whole iterations."""

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
    """One sample that is to be drawn."""

    sample_id: int
    group_id: int


@dataclass
class Unit:
    """Samples that one of the sampler's data-parallel ranks draws together: a micro-batch, or a group."""

    requests: Sequence[Request]
    made: tuple[Handle, ...] = ()
    """Handles of what ``generate`` returns: what the update needs, what rewards see, and where an iteration leaves
    something to the next, that. Empty before it is begun."""
    scores: Future | None = None
    """The scores of its samples, once scoring has begun."""

    @property
    def is_scored(self) -> bool:
        """Whether its scores are there. Errors of scoring are raised, except that samples were lost."""
        try:
            return self.scores is not None and self.scores.done() and self.scores.result() is not None
        except ValuesLostError:
            return False


@dataclass
class Round:
    """A unit for each of the sampler's data-parallel ranks, which are drawn at the same time by the same weights."""

    step: int
    by_rank: list[Unit | None]
    """The units by rank; None for a rank that has fewer than others."""
    version: int = 0
    """Version of the policy that draws it."""

    @property
    def units(self) -> list[Unit]:
        """The units of the ranks that have one."""
        return [unit for unit in self.by_rank if unit is not None]

    @property
    def unfinished(self) -> Handle | None:
        """Handle of what the iteration leaves to the next, such as unfinished answers; None where it leaves nothing.

        The first rank that this process drives returns it for all ranks.
        """
        handles = self.units[0].made
        return handles[2] if len(handles) > 2 else None

    @property
    def handles(self) -> list[Handle]:
        """Handles of what all ranks generate."""
        return [handle for unit in self.units for handle in unit.made]

    @property
    def is_begun(self) -> bool:
        """Whether the sampler was given it."""
        return bool(self.handles)

    @property
    def is_generated(self) -> bool:
        """Whether all ranks have ended, well or with an error."""
        return self.is_begun and all(handle.done() for handle in self.handles)

    @property
    def is_whole(self) -> bool:
        """Whether all ranks have ended, and none was lost."""
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
        """Scores that are not done."""
        return [unit.scores for unit in self.units if unit.scores is not None and not unit.scores.done()]

    @property
    def is_complete(self) -> bool:
        """Whether samples and scores are there, or will never be."""
        return self.is_generated and self.is_being_scored and not self.scoring

    @property
    def lost(self) -> ValuesLostError | None:
        """The error of a unit whose samples were lost before they were scored; None if there is none."""
        for unit in self.units:
            try:
                if unit.scores is not None and unit.scores.done():
                    unit.scores.result()
            except ValuesLostError as error:
                return error
            except Exception:  # raised again where the scores are used
                return None
        return None

    @property
    def seconds(self) -> float:
        """Seconds that its generation took."""
        return max(handle.seconds for handle in self.handles)

    @property
    def nbytes(self) -> int:
        """Memory of its samples in Ray's object store."""
        return sum(handle.nbytes for handle in self.handles)

    def forget_samples(self, and_scores: bool = False) -> None:
        """Drops what was drawn, so that it is drawn again; its scores are kept unless ``and_scores``."""
        for unit in self.units:
            unit.made = ()
            unit.scores = None if and_scores else unit.scores


class ScoredGroup(NamedTuple):
    """A group that has been drawn and scored, while others of its iteration may still be drawn."""

    requests: Sequence[Request]
    scores: Scores
    """Scores of its samples, in the order of ``requests``."""


@dataclass
class Iteration:
    """An iteration that was planned and is not delivered yet."""

    step: int
    rounds: list[Round]
    scored: list[ScoredGroup] = field(default_factory=list)
    """Groups that were shown to ``more_groups``, in the order in which they were requested."""
    added: list[Sequence[Request]] = field(default_factory=list)
    """Groups that ``more_groups`` requested in addition."""

    @classmethod
    def planned(cls, step: int, by_rank: Sequence[Sequence[Request]], unit_size: int | None) -> Iteration:
        """Cuts the requests of each rank into units of ``unit_size``, or if that is None into groups."""
        cut = [
            _group_requests(requests) if unit_size is None else _slice_requests(requests, unit_size)
            for requests in by_rank
        ]
        rounds = [[None if unit is None else Unit(unit) for unit in units] for units in zip_longest(*cut)]
        return cls(step, [Round(step, units) for units in rounds])

    @property
    def units(self) -> list[Unit]:
        """All units, in the order in which they were requested."""
        return [unit for round_ in self.rounds for unit in round_.units]

    @property
    def is_generated(self) -> bool:
        """Whether all rounds are generated."""
        return all(round_.is_generated for round_ in self.rounds)

    @property
    def is_complete(self) -> bool:
        """Whether samples and scores are there, or will never be."""
        return all(round_.is_complete for round_ in self.rounds)

    @property
    def is_closed(self) -> bool:
        """Whether every group was shown to ``more_groups``, so that no more can be requested."""
        return len(self.scored) == len(self.units)

    def add(self, groups: Sequence[Sequence[Request]], num_ranks: int) -> None:
        """Adds groups that were requested in addition; the ranks take turns."""
        for number, group in enumerate(groups):
            rank = len(self.added) % num_ranks
            # A new round for each call and when all ranks have a unit: a round that was begun cannot get more.
            if number == 0 or rank == 0:
                self.rounds.append(Round(self.step, [None] * num_ranks))
            self.rounds[-1].by_rank[rank] = Unit(group)
            self.added.append(group)


class InFlight:
    """The iterations that are being drawn and scored, and the memory that their samples take."""

    def __init__(self, driver: Driver, *, max_queued: int, max_pending: int, store_fraction: float) -> None:
        """Args as of ``RolloutStream``."""
        self.driver = driver
        self.max_queued = max_queued
        self.max_pending = max_pending
        self.store_fraction = store_fraction
        self.iterations: list[Iteration] = []
        self.delivered_bytes = 0
        """Memory of the samples of the iteration that the actor learns from now."""
        self._round_bytes = 0
        """Memory of the largest round so far; 0 before the first."""

    @property
    def rounds(self) -> list[Round]:
        """Rounds of all iterations, in the order in which they are drawn."""
        return [round_ for iteration in self.iterations for round_ in iteration.rounds]

    def pending(self) -> list[Future | Handle]:
        """Everything that is being drawn or scored."""
        handles = [handle for round_ in self.rounds for handle in round_.handles if not handle.done()]
        return handles + [scores for round_ in self.rounds for scores in round_.scoring]

    def to_score(self, with_reward: bool) -> Round | None:
        """A generated round that may be scored now, or None. Errors of generation are raised here.

        With ``with_reward`` rounds are scored while others are drawn, else only when their iteration is generated.
        """
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
        """Whether another round may begin: sampler and scorer have few enough rounds, and there is memory for it.

        Args:
            is_needed: whether the round belongs to the iteration that is waited for.

        Raises:
            ConfigError: when that iteration can never fit into the memory.
        """
        store_bytes = self.driver.store_bytes
        making = sum(round_.is_begun and not round_.is_generated for round_ in self.rounds)
        # Before the first round is done nobody knows how large one is: they are drawn one by one.
        is_size_unknown = store_bytes is not None and self._round_bytes == 0
        if making >= (1 if is_size_unknown else self.max_queued):
            return False
        if sum(len(round_.scoring) for round_ in self.rounds) >= self.max_pending:
            return False
        if store_bytes is None:
            return True
        free = self.store_fraction * store_bytes - self.delivered_bytes
        needed = sum(round_.nbytes for round_ in self.rounds if round_.is_generated) + (making + 1) * self._round_bytes
        # Nothing that is being drawn or learned from can give memory back: it would wait for ever.
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
    """What each of the actor's data-parallel ranks that this process drives learns from."""
    scores: Scores
    """Scores of the samples of all ranks, in the order of the samples' ids."""
    group_ids: list[int]
    """The group of each sample."""
    versions: list[int]
    """The version of the policy that drew each sample."""
    num_driven: int
    """Number of samples that this process's data-parallel ranks of the actor learn from."""
    fraction_driven: float
    """Fraction of the actor's data-parallel ranks that this process drives."""
    generate_s: float
    """Seconds of generation."""
    wait_s: float
    """Seconds in which nothing was generated, because generation waited for scores or had ended."""

    def staleness(self, step: int) -> dict[str, float]:
        """Metrics of how many versions the policy is ahead of the samples when it learns from them at ``step``."""
        ages = [step - version for version in self.versions]
        return {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))}


def _slice_requests(requests: Sequence[Request], size: int) -> list[Sequence[Request]]:
    return [requests[start : start + size] for start in range(0, len(requests), size)]


def _group_requests(requests: Sequence[Request]) -> list[Sequence[Request]]:
    requests_by_group: dict[int, list[Request]] = {}
    for request in requests:
        requests_by_group.setdefault(request.group_id, []).append(request)
    return list(requests_by_group.values())
