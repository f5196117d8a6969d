"""Text that is tokenised while the run goes on: rows in blocks that are shuffled, from any place on."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from sfumato.algorithms.noise import keyed_permutation
from sfumato.data.bad_rows import BadRows
from sfumato.data.mixing import Mixer
from sfumato.data.rows import JoinedRows
from sfumato.data.sources import Sources
from sfumato.data.text import Sample, TextTransform
from sfumato.data.text_steps import RunLength, State, Step, StepRule
from sfumato.errors import DataError


@dataclass(frozen=True)
class StreamSample:
    """A sample and where it comes from."""

    sample: Sample
    source: int
    lane: int
    after: tuple[int, int]
    """Where its lane goes on: rows that are through, over all epochs, and samples of the next row that are."""


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
        weighted = sources.weights is not None
        self.lanes = [JoinedRows([each]) for each in sources.rows] if weighted else [JoinedRows(sources.rows)]
        self._ends = [*accumulate(map(len, sources.rows))]
        self._first_row = [0, *accumulate(map(len, self.lanes))]

    def begin(self) -> State:
        """Where the stream starts: what each lane has given for its share, and its place in its rows."""
        return {name: [0] * len(self.lanes) for name in ("taken", "rows", "pieces")}

    def move(self, state: State, found: StreamSample) -> State:
        """The place after a sample, from the place before it."""
        state = {name: [*state[name]] for name in self.begin()}
        state["taken"][found.lane] += self._amount(found.sample)
        state["rows"][found.lane], state["pieces"][found.lane] = found.after
        return state

    def epochs(self, state: State) -> int:
        """Epochs that are through at a place."""
        passes = [rows // len(lane) for rows, lane in zip(state["rows"], self.lanes, strict=True)]
        return min(passes) if self.sources.stopping == "all_exhausted" else max(passes)

    def read(self, state: State) -> Iterator[StreamSample]:
        """Samples from a place on, without an end. Rows before it are not tokenised.

        Raises:
            DataError: for a row that cannot be used, beyond the limit, and when no row of a lane can.
        """
        places = zip(state["rows"], state["pieces"], strict=True)
        lanes = [self._samples(lane, *place) for lane, place in enumerate(places)]
        mixer = Mixer(self.sources.weights or [1.0], state["taken"], state["samples"])
        while True:
            lane = mixer.choose()
            found = next(lanes[lane])
            mixer.add(lane, self._amount(found.sample))
            yield found

    def _amount(self, sample: Sample) -> int:
        return sample.num_tokens if self.sources.level == "token" else 1

    def _samples(self, lane: int, from_row: int, from_piece: int) -> Iterator[StreamSample]:
        """The samples of a lane from a row, and a sample of that row, on."""
        rows, num_useless = self.lanes[lane], 0
        for row, index in self._row_order(lane, from_row):
            number = self._first_row[lane] + index
            try:
                samples = self.transform(rows[index], rows.describe(index))
            except DataError as error:
                self.bad_rows.add(number, error)
                num_useless += 1
                if num_useless == len(rows):
                    raise DataError(f"not one of {num_useless} rows can be used; the last reason: {error}") from error
                continue
            num_useless = 0
            for piece in range(from_piece if row == from_row else 0, len(samples)):
                after = (row, piece + 1) if piece + 1 < len(samples) else (row + 1, 0)
                yield StreamSample(samples[piece], bisect_right(self._ends, number), lane, after)

    def _row_order(self, lane: int, row: int) -> Iterator[tuple[int, int]]:
        """Rows from a place on: their number over all epochs, and within the lane."""
        size = len(self.lanes[lane])
        while True:
            epoch, offset = divmod(row, size)
            block, place = divmod(offset, self.block_rows)
            start = block * self.block_rows
            length = min(self.block_rows, size - start)
            order: Sequence[int] = range(length)
            if self.shuffle:
                order = keyed_permutation(length, self.seed, "text stream", lane, epoch, block).tolist()
            for each in order[place:]:
                yield row, start + each
                row += 1


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
            for each in taken:
                place = self.stream.move(place, each)
            epoch_ended = self.stream.epochs(place) > self.stream.epochs(state)
            state = {
                **place,
                "step": state["step"] + 1,
                "samples": state["samples"] + len(taken),
                "tokens": state["tokens"] + (self.rule.limit if self.rule.by_tokens else 0),
            }
            yield Step(
                document_lengths=np.array([[len(each.input_ids) for each in one.sample.documents] for one in taken]),
                sources=[each.source for each in taken],
                read=lambda position, taken=taken: taken[position].sample,
                epoch_ended=epoch_ended,
                after=state,
            )

    def _size(self, found: StreamSample) -> int:
        return found.sample.num_tokens if self.rule.by_tokens else 1
