"""Which samples each step trains on: those that follow each other up to a limit, from any position in the data.

They come from a store of tokens, or from a stream of rows that are tokenised while the run goes on.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, NamedTuple

import numpy as np

from sfumato.algorithms.noise import keyed_permutation
from sfumato.data.files.bad_rows import BadRows
from sfumato.data.files.mixing import Mixer, Order
from sfumato.data.files.row_blocks import FilePlace, RowBlocks
from sfumato.data.files.sources import Sources
from sfumato.data.text.format import TextSample, TextTransform
from sfumato.data.text.row_samples import samples_of
from sfumato.data.text.token_store import TokenStore
from sfumato.errors import DataError

State = dict[str, Any]
"""Where a run is in its data, as JSON: ``step``, ``samples`` and ``tokens`` that it has used; a stream adds more."""


@dataclass(frozen=True)
class StepRule:
    """How many samples a step takes. It takes one at least."""

    limit: int
    """Most tokens, or samples, of a step."""
    by_tokens: bool


@dataclass(frozen=True)
class RunLength:
    """When the data of a run ends: the first of these that is set says."""

    steps: int | None
    tokens: int | None
    """The run ends with the step in which so many have been used."""
    epochs: int

    def is_over(self, state: State) -> bool:
        """Whether no step follows, as far as steps and tokens say."""
        if self.steps is not None:
            return state["step"] >= self.steps
        return self.tokens is not None and state["tokens"] >= self.tokens


@dataclass(frozen=True)
class Step:
    """The samples of one step."""

    document_lengths: np.ndarray
    """Tokens of each document, int64 ``[n, documents_per_sample]``."""
    sources: list[int]
    """Number of the source of each sample."""
    read: Callable[[int], TextSample]
    """A sample by its position in the step."""
    image_shapes: Callable[[int], list[np.ndarray]]
    """``Images.shapes`` of the documents of a sample that have images; nothing is opened."""
    epoch_ended: bool
    """Whether an epoch ended within the step."""
    after: State
    """Where the run is when the step is done."""


class StoreSteps:
    """Steps over the samples of a store."""

    def __init__(self, store: TokenStore, order: Order, fingerprint: str, rule: StepRule, length: RunLength) -> None:
        self.store = store
        self.order = order
        self.fingerprint = fingerprint
        self.rule = rule
        self.length = length
        self.num_samples = len(store)
        self.tokens_per_epoch = int(store.lengths[order.epoch(0)].sum())

    def begin(self) -> State:
        """Where a run starts."""
        return {"step": 0, "samples": 0, "tokens": 0}

    def num_steps(self, state: State) -> int:
        """Steps that are left of the run."""
        if self.length.steps is not None:
            return max(self.length.steps - state["step"], 0)
        return sum(1 for _ in self._cuts(state))

    def epochs(self, state: State) -> int:
        """Epochs that are through at a state."""
        return self.order.locate(state["samples"])[0]

    def steps(self, state: State) -> Iterator[Step]:
        """The steps that are left of the run."""
        for indices, epoch_ended, after in self._cuts(state):
            yield Step(
                document_lengths=self.store.document_lengths[indices],
                sources=self.store.source_of[indices].tolist(),
                read=lambda position, indices=indices: self.store.sample(int(indices[position])),
                image_shapes=lambda position, indices=indices: self.store.image_shapes(int(indices[position])),
                epoch_ended=epoch_ended,
                after=after,
            )

    def _cuts(self, state: State) -> Iterator[tuple[np.ndarray, bool, State]]:
        """Sample indices of each step, whether an epoch ended in it, and the state after it."""
        lengths = self.store.lengths
        sizes = lengths if self.rule.by_tokens else np.broadcast_to(np.int64(1), len(lengths))
        ahead = _Ahead(self._epochs(state["samples"]), sizes)
        while not self.length.is_over(state):
            indices, epoch_ended = ahead.take(self.rule.limit)
            if len(indices) == 0:
                return
            state = {
                "step": state["step"] + 1,
                "samples": state["samples"] + len(indices),
                "tokens": state["tokens"] + int(lengths[indices].sum()),
            }
            yield indices, epoch_ended, state

    def _epochs(self, position: int) -> Iterator[np.ndarray]:
        """Sample indices from a position on, epoch by epoch; without an end when steps or tokens end the run."""
        first, offset = self.order.locate(position)
        endless = self.length.steps is not None or self.length.tokens is not None
        for number in count(first) if endless else range(first, self.length.epochs):
            yield self.order.epoch(number)[offset:]
            offset = 0


class _Ahead:
    """The samples that come next, whole epochs at a time."""

    def __init__(self, epochs: Iterator[np.ndarray], sizes: np.ndarray) -> None:
        """``sizes`` are what each sample of the data counts."""
        self._epochs = epochs
        self._sizes = sizes
        self._indices = self._filled = np.empty(0, np.int64)
        self._next = 0
        self._ends: deque[int] = deque()  # where epochs end in the indices

    def take(self, limit: int) -> tuple[np.ndarray, bool]:
        """Indices ``[n]`` of samples up to a limit, one at least, and whether the last of an epoch is among them."""
        used = self._fill(limit)
        stop = max(int(np.searchsorted(self._filled, used + limit, side="right")), self._next + 1)
        taken = self._indices[self._next : stop]
        self._next += len(taken)
        epoch_ended = False
        while self._ends and self._ends[0] <= self._next:
            self._ends.popleft()
            epoch_ended = True
        return taken, epoch_ended

    def _fill(self, limit: int) -> int:
        """Sees to more than ``limit`` ahead, if there is so much. Returns what the samples before the next count."""
        used = int(self._filled[self._next - 1]) if self._next else 0
        ahead = (int(self._filled[-1]) if len(self._filled) else 0) - used
        fresh = []
        while ahead <= limit and (epoch := next(self._epochs, None)) is not None:
            ahead += int(self._sizes[epoch].sum())
            fresh.append(epoch)
        if not fresh:
            return used
        end = len(self._indices) - self._next
        self._ends = deque(end - self._next for end in self._ends)
        for epoch in fresh:
            end += len(epoch)
            self._ends.append(end)
        self._indices = np.concatenate([self._indices[self._next :], *fresh])
        self._next = 0
        self._filled = np.cumsum(self._sizes[self._indices])
        return 0


class ReaderPlace(NamedTuple):
    """Where a reader goes on, as JSON can hold it."""

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
    reader: int
    after: ReaderPlace


class TextStream:
    """The endless order of samples of some sources.

    Rows are taken in blocks that follow each other in the files; within a block their order is a function of (seed,
    epoch, block). Sources with weights have a reader each, which are mixed; without weights one reader has all rows.
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
        self.sources = sources
        self.transform = transform
        self.bad_rows = bad_rows
        self.seed = seed
        self.shuffle = shuffle
        self.block_rows = block_rows
        tables = [[(number, table) for table in tables] for number, tables in enumerate(sources.tables)]
        self.readers = [*map(RowBlocks, tables)] if sources.weights is not None else [RowBlocks([*chain(*tables)])]

    def begin(self) -> State:
        """Where the stream starts: what each reader has given for its share, and its place in its rows."""
        return {"taken": [0] * len(self.readers), "places": [ReaderPlace()] * len(self.readers)}

    def move(self, state: State, found: StreamSample) -> State:
        """The place after a sample, from the place before it."""
        state = {name: [*state[name]] for name in self.begin()}
        state["taken"][found.reader] += self._amount(found.sample)
        state["places"][found.reader] = found.after
        return state

    def epochs(self, state: State) -> int:
        """Epochs that are through at a place."""
        passes = [epoch for epoch, *_ in state["places"]]
        return min(passes) if self.sources.stopping == "all_exhausted" else max(passes)

    def read(self, state: State) -> Iterator[StreamSample]:
        """Samples from a place on, without an end. Rows before the block that it lies in are not read.

        Raises:
            DataError: for a row that cannot be used, beyond the limit, when no row of a reader can, and when a file is
                broken.
        """
        places = (ReaderPlace(*counts, FilePlace(*block)) for *counts, block in state["places"])
        samples = [self._samples(reader, place) for reader, place in enumerate(places)]
        mixer = Mixer(self.sources.weights or [1.0], state["taken"], state["samples"])
        while True:
            reader = mixer.choose()
            found = next(samples[reader])
            mixer.add(reader, self._amount(found.sample))
            yield found

    def _amount(self, sample: TextSample) -> int:
        return sample.num_tokens if self.sources.level == "token" else 1

    def _samples(self, reader: int, place: ReaderPlace) -> Iterator[StreamSample]:
        """The samples of a reader from a place on."""
        is_any_useful = place.row > 0  # what was before is not looked at
        while True:
            block = self.readers[reader].read(place.block, self.block_rows)
            done = place.row % self.block_rows
            order = self._order(reader, place, len(block.rows))[done:]
            for index, samples in samples_of(self.transform, block.rows, order):
                where = block.rows.describe(index)
                row = place.row
                done += 1
                after = place._replace(row=row + 1, sample=0)
                if done == len(block.rows):
                    after = ReaderPlace(place.epoch + 1) if block.is_last else after._replace(block=block.after)
                if isinstance(samples, DataError):
                    self.bad_rows.add(where, samples)
                    if after.epoch > place.epoch and not is_any_useful:
                        raise DataError(
                            f"not one of {row + 1} rows can be used; the last reason: {samples}"
                        ) from samples
                    is_any_useful &= after.epoch == place.epoch
                    place = after
                    continue
                is_any_useful = after.epoch == place.epoch
                for number in range(place.sample, len(samples)):
                    inside = place._replace(sample=number + 1)
                    goes_on = inside if number + 1 < len(samples) else after
                    yield StreamSample(samples[number], block.source(index), reader, goes_on)
                place = after

    def _order(self, reader: int, place: ReaderPlace, length: int) -> Sequence[int]:
        """The rows of the block that a place lies in, in the order in which they come."""
        if not self.shuffle:
            return range(length)
        block = place.row // self.block_rows
        return keyed_permutation(length, self.seed, "text stream", reader, place.epoch, block).tolist()


class StreamSteps:
    """Steps over a stream, as ``StoreSteps``; samples and tokens of an epoch are not counted."""

    def __init__(self, stream: TextStream, fingerprint: str, rule: StepRule, length: RunLength) -> None:
        self.stream = stream
        self.fingerprint = fingerprint
        self.rule = rule
        self.length = length
        self.num_samples = self.tokens_per_epoch = None

    def begin(self) -> State:
        return {"step": 0, "samples": 0, "tokens": 0, **self.stream.begin()}

    def epochs(self, state: State) -> int:
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
            taken = waiting
            waiting = []
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
                image_shapes=lambda position, taken=taken: taken[position].sample.image_shapes,
                epoch_ended=epoch_ended,
                after=state,
            )
            if epoch_ended:
                self.stream.bad_rows.sum_up()
        self.stream.bad_rows.sum_up()

    def _size(self, found: StreamSample) -> int:
        return found.sample.num_tokens if self.rule.by_tokens else 1
