"""Text that is tokenised while the run goes on: rows in blocks that are shuffled, from any place on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np

from sfumato.algorithms.noise import keyed_permutation
from sfumato.data.bad_rows import BadRows
from sfumato.data.mixing import Mixer
from sfumato.data.row_blocks import FilePlace, RowBlocks
from sfumato.data.sources import Sources
from sfumato.data.text import TextSample, TextTransform
from sfumato.data.text_steps import RunLength, State, Step, StepRule
from sfumato.errors import DataError


class LanePlace(NamedTuple):
    """Where a lane goes on, as JSON can hold it."""

    epoch: int = 0
    row: int = 0
    """Rows of the epoch that are through."""
    sample: int = 0
    """Samples of the next row that are through."""
    block: FilePlace = FilePlace()
    """Where the block of the next row begins in the files."""


@dataclass(frozen=True)
class StreamSample:
    """A sample and where it comes from."""

    sample: TextSample
    source: int
    lane: int
    after: LanePlace


class TextStream:
    """The endless order of samples of some sources.

    Rows are taken in blocks that follow each other in the files; within a block their order is a function of (seed,
    epoch, block). Sources with weights are lanes that are mixed; without weights all rows are one lane.
    """

    def __init__(
        self,
        sources: Sources,
        transform: TextTransform,
        seed: int,
        shuffle: bool,
        block_rows: int,
        bad_rows: BadRows,
    ) -> None:
        """Reads nothing yet.

        Args:
            sources: the data.
            transform: what makes samples of rows.
            seed: key of the order.
            shuffle: false keeps the order of the files.
            block_rows: rows that are shuffled among themselves.
            bad_rows: takes note of rows that cannot be used, or raises their DataError.
        """
        self.sources, self.transform, self.bad_rows = sources, transform, bad_rows
        self.seed, self.shuffle, self.block_rows = seed, shuffle, block_rows
        tables = [[(number, table) for table in tables] for number, tables in enumerate(sources.tables)]
        self.lanes = [*map(RowBlocks, tables)] if sources.weights is not None else [RowBlocks([*chain(*tables)])]

    def begin(self) -> State:
        """Where the stream starts: what each lane has given for its share, and its place in its rows."""
        return {"taken": [0] * len(self.lanes), "places": [LanePlace()] * len(self.lanes)}

    def move(self, state: State, found: StreamSample) -> State:
        """The place after a sample, from the place before it."""
        state = {name: [*state[name]] for name in self.begin()}
        state["taken"][found.lane] += self._amount(found.sample)
        state["places"][found.lane] = found.after
        return state

    def epochs(self, state: State) -> int:
        """Epochs that are through at a place."""
        passes = [epoch for epoch, *_ in state["places"]]
        return min(passes) if self.sources.stopping == "all_exhausted" else max(passes)

    def read(self, state: State) -> Iterator[StreamSample]:
        """Samples from a place on, without an end. Rows before the block that it lies in are not read.

        Raises:
            DataError: for a row that cannot be used, beyond the limit, when no row of a lane can, and when a file is
                broken.
        """
        places = (LanePlace(*counts, FilePlace(*block)) for *counts, block in state["places"])
        lanes = [self._samples(lane, place) for lane, place in enumerate(places)]
        mixer = Mixer(self.sources.weights or [1.0], state["taken"], state["samples"])
        while True:
            lane = mixer.choose()
            found = next(lanes[lane])
            mixer.add(lane, self._amount(found.sample))
            yield found

    def _amount(self, sample: TextSample) -> int:
        return sample.num_tokens if self.sources.level == "token" else 1

    def _samples(self, lane: int, place: LanePlace) -> Iterator[StreamSample]:
        """The samples of a lane from a place on."""
        is_any_useful = place.row > 0  # what was before is not looked at
        while True:
            block = self.lanes[lane].read(place.block, self.block_rows)
            done = place.row % self.block_rows
            for index in self._order(lane, place, len(block.rows))[done:]:
                where, row = block.rows.describe(index), place.row
                done += 1
                after = place._replace(row=row + 1, sample=0)
                if done == len(block.rows):
                    after = LanePlace(place.epoch + 1) if block.is_last else after._replace(block=block.after)
                try:
                    samples = self.transform(block.rows[index], where)
                except DataError as error:
                    self.bad_rows.add(where, error)
                    if after.epoch > place.epoch and not is_any_useful:
                        raise DataError(f"not one of {row + 1} rows can be used; the last reason: {error}") from error
                    is_any_useful &= after.epoch == place.epoch
                    place = after
                    continue
                is_any_useful = after.epoch == place.epoch
                for number in range(place.sample, len(samples)):
                    inside = place._replace(sample=number + 1)
                    goes_on = inside if number + 1 < len(samples) else after
                    yield StreamSample(samples[number], block.source(index), lane, goes_on)
                place = after

    def _order(self, lane: int, place: LanePlace, length: int) -> Sequence[int]:
        """The rows of the block that a place lies in, in the order in which they come."""
        if not self.shuffle:
            return range(length)
        block = place.row // self.block_rows
        return keyed_permutation(length, self.seed, "text stream", lane, place.epoch, block).tolist()


class StreamSteps:
    """Steps over a stream."""

    def __init__(self, stream: TextStream, fingerprint: str, rule: StepRule, length: RunLength) -> None:
        self.stream, self.fingerprint, self.rule, self.length = stream, fingerprint, rule, length
        self.num_samples = self.tokens_per_epoch = None

    def begin(self) -> State:
        """Where a run starts."""
        return {"step": 0, "samples": 0, "tokens": 0, **self.stream.begin()}

    def epochs(self, state: State) -> int:
        """Epochs that are through at a state."""
        return self.stream.epochs(state)

    def num_steps(self, state: State) -> int:
        """Steps that are left of the run. How long samples are is not known: a step counts as full."""
        if self.length.steps is not None:
            return max(self.length.steps - state["step"], 0)
        return max(-(-((self.length.tokens or 0) - state["tokens"]) // self.rule.limit), 0)

    def steps(self, state: State) -> Iterator[Step]:
        """The steps that are left of the run. A sample that does not fit into a step waits for the next one."""
        samples = self.stream.read(state)
        waiting: list[StreamSample] = []
        for _ in range(self.num_steps(state)):
            taken, waiting = waiting, []
            room = self.rule.limit - sum(map(self._size, taken))
            while room > 0:
                found = next(samples)
                room -= self._size(found)
                if room < 0 and taken:
                    waiting = [found]
                else:
                    taken.append(found)
            place = state
            for sample in taken:
                place = self.stream.move(place, sample)
            epoch_ended = self.stream.epochs(place) > self.stream.epochs(state)
            state = {
                **place,
                "step": state["step"] + 1,
                "samples": state["samples"] + len(taken),
                "tokens": state["tokens"] + (self.rule.limit if self.rule.by_tokens else 0),
            }
            yield Step(
                document_lengths=np.array(
                    [[len(document.input_ids) for document in one.sample.documents] for one in taken]
                ),
                sources=[sample.source for sample in taken],
                read=lambda position, taken=taken: taken[position].sample,
                epoch_ended=epoch_ended,
                after=state,
            )

    def _size(self, found: StreamSample) -> int:
        return found.sample.num_tokens if self.rule.by_tokens else 1
