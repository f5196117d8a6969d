"""What passes through the rollout stream: requests, micro-batches on their way, and whole iterations."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

from sfumato.errors import RoleLostError, ValuesLostError
from sfumato.rewards.scoring.scores import Scores
from sfumato.runtime.roles import Future, Handle


class Request(Protocol):
    """One sample that is to be made."""

    sample_id: int
    group_id: int


@dataclass
class Round:
    """A micro-batch for each of the sampler's data-parallel ranks, generated at the same time."""

    step: int
    requests: list[list[Any] | None]
    """For each of them, None where one has less to do than others."""
    version: int = 0
    """Of the policy that makes it."""
    made: list[tuple[Handle, ...]] | None = None
    """For each of them what was generated: for the update, and for the rewards."""
    scores: list[Future | None] = field(default_factory=list)
    """For each of them, once scoring has begun."""

    @property
    def handles(self) -> list[Handle]:
        """Of all ranks."""
        return [handle for handles in self.made or () for handle in handles]

    @property
    def is_generated(self) -> bool:
        """Whether all ranks have ended."""
        return self.made is not None and all(each.done() for each in self.handles)

    @property
    def is_whole(self) -> bool:
        """Whether all ranks have ended well."""
        try:
            for each in self.handles:
                each.check()
        except RoleLostError:
            return False
        return self.is_generated

    @property
    def is_complete(self) -> bool:
        """Whether samples and scores are there, or will never be."""
        return self.is_generated and bool(self.scores) and all(each is None or each.done() for each in self.scores)

    @property
    def lost(self) -> ValuesLostError | None:
        """Why it could not be scored, if its samples were lost."""
        for each in self.scores:
            try:
                if each is not None and each.done():
                    each.result()
            except ValuesLostError as error:
                return error
            except Exception:  # it rises where the scores are taken
                return None
        return None

    @property
    def scoring(self) -> list[Future]:
        """What is being scored, or waits for it."""
        return [each for each in self.scores if each is not None and not each.done()]

    @property
    def seconds(self) -> float:
        """Of its generation."""
        return max(each.seconds for each in self.handles)

    @property
    def nbytes(self) -> int:
        """That it takes up where samples are on their way."""
        return sum(each.nbytes for each in self.handles)


@dataclass(frozen=True)
class StreamBatch:
    """One iteration's samples."""

    parts: list[tuple[list[Handle], list[Handle], list[int]]]
    """For each of the actor's data-parallel ranks that this process drives: what ``generate`` returned of the
    micro-batches that hold its samples, as two lists of handles, and the ids of its samples."""
    scores: Scores
    """Of the samples of all ranks, in the order of their ids."""
    group_ids: list[int]
    """Of all samples."""
    versions: list[int]
    """Of all samples: the policy that made them."""
    num_driven: int
    """Samples that the actor's data-parallel ranks that this process drives learn from."""
    fraction_driven: float
    """Of the actor's data-parallel ranks, the fraction that this process drives."""
    generate_s: float
    """Seconds of generation."""
    wait_s: float
    """Seconds that scoring added: generation waited for it, or had ended."""

    def staleness(self, step: int) -> dict[str, float]:
        """How far the policy is ahead of the samples when it learns from them in iteration ``step``."""
        ages = [step - each for each in self.versions]
        return {"staleness/mean": sum(ages) / len(ages), "staleness/max": float(max(ages))}
