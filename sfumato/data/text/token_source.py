"""Which samples each step trains on: consecutive ones up to a limit, from any position in the data.

They come from a store of tokens, or from a stream of rows that are tokenised during the run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count
from typing import NamedTuple

import numpy as np

from sfumato.algorithms.noise import keyed_permutation
from sfumato.config.open_mappings import JsonObject
from sfumato.data.files.bad_rows import BadRows
from sfumato.data.files.mixing import Mixer, Order
from sfumato.data.files.row_blocks import FilePlace, RowBlocks
from sfumato.data.files.sources import Sources
from sfumato.data.text.document import TextSample
from sfumato.data.text.format import TextTransform
from sfumato.data.text.row_samples import SharedWork, samples_of
from sfumato.data.text.token_store import TokenStore
from sfumato.errors import DataError

State = JsonObject
"""A run's position in its data, as values that JSON can hold: ``step``, and the ``samples`` and ``tokens`` used so far;
a stream adds more."""


@dataclass(frozen=True)
class StepRule:
    """How many samples a step takes: as many as fit the limit, and at least one."""

    limit: int
    """Most tokens, or samples, of a step."""
    by_tokens: bool
    """Whether the limit counts tokens."""


@dataclass(frozen=True)
class RunLength:
    """When the data of a run ends: after ``steps`` if set, else after ``tokens`` if set, else after ``epochs``."""

    steps: int | None
    tokens: int | None
    """The run ends with the step that reaches so many tokens."""
    epochs: int

    def is_over(self, state: State) -> bool:
        """Whether the run has reached its steps or tokens. False where it is epochs that end it."""
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
    """Reads a sample, given its position in the step."""
    image_shapes: Callable[[int], list[np.ndarray]]
    """``MediaRefs.shapes`` of those documents of a sample that have images, given its position; opens no file."""
    epoch_ended: bool
    """Whether an epoch ended within the step."""
    after: State
    """The run's position after the step."""


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
        """The state in which a run starts."""
        return {"step": 0, "samples": 0, "tokens": 0}

    def num_steps(self, state: State) -> int:
        """Steps that are left of the run."""
        if self.length.steps is not None:
            return max(self.length.steps - state["step"], 0)
        return sum(1 for _ in self._cut_steps(state))

    def epochs(self, state: State) -> int:
        """Epochs that are complete at a state."""
        return self.order.locate(state["samples"])[0]

    def steps(self, state: State) -> Iterator[Step]:
        """The steps that are left of the run."""
        for indices, epoch_ended, after in self._cut_steps(state):
            yield Step(
                document_lengths=self.store.document_lengths[indices],
                sources=self.store.source_of[indices].tolist(),
                # The default argument binds the indices of this step: the loop goes on while the step is in use.
                read=lambda position, indices=indices: self.store.sample(int(indices[position])),
                image_shapes=lambda position, indices=indices: self.store.image_shapes(int(indices[position])),
                epoch_ended=epoch_ended,
                after=after,
            )

    def _cut_steps(self, state: State) -> Iterator[tuple[np.ndarray, bool, State]]:
        """Sample indices of each step, whether an epoch ended in it, and the state after it."""
        lengths = self.store.lengths
        sizes = lengths if self.rule.by_tokens else np.broadcast_to(np.int64(1), len(lengths))
        ahead = _UpcomingSamples(self._iterate_epochs(state["samples"]), sizes)
        while not self.length.is_over(state):
            indices, epoch_ended = ahead.take_samples(self.rule.limit)
            if len(indices) == 0:
                return
            state = {
                "step": state["step"] + 1,
                "samples": state["samples"] + len(indices),
                "tokens": state["tokens"] + int(lengths[indices].sum()),
            }
            yield indices, epoch_ended, state

    def _iterate_epochs(self, position: int) -> Iterator[np.ndarray]:
        """Sample indices from a position on, epoch by epoch; endless where steps or tokens end the run."""
        first, offset = self.order.locate(position)
        endless = self.length.steps is not None or self.length.tokens is not None
        for number in count(first) if endless else range(first, self.length.epochs):
            yield self.order.epoch(number)[offset:]
            offset = 0


class _UpcomingSamples:
    """The indices of the samples that come next, of which whole epochs are fetched at a time."""

    def __init__(self, epochs: Iterator[np.ndarray], sizes: np.ndarray) -> None:
        """Takes sample indices by epoch, and how much each sample of the data counts towards a limit."""
        self._epochs = epochs
        self._sizes = sizes
        self._indices = self._cumulative_sizes = np.empty(0, np.int64)
        """Running sum of the sizes of the samples in ``_indices``."""
        self._next = 0
        """Position of the next sample in ``_indices``."""
        self._epoch_ends: deque[int] = deque()
        """Positions in ``_indices`` at which epochs end."""

    def take_samples(self, limit: int) -> tuple[np.ndarray, bool]:
        """Takes samples up to a limit, at least one while there are any.

        Returns:
            Their indices, int64 ``[n]``, empty at the end of the data; and whether the last one of an epoch is among
            them.
        """
        used = self._fill(limit)
        # The last position whose running sum stays within the limit. One sample larger than the limit is still taken.
        stop = max(int(np.searchsorted(self._cumulative_sizes, used + limit, side="right")), self._next + 1)
        indices = self._indices[self._next : stop]
        self._next += len(indices)
        epoch_ended = False
        while self._epoch_ends and self._epoch_ends[0] <= self._next:
            self._epoch_ends.popleft()
            epoch_ended = True
        return indices, epoch_ended

    def _fill(self, limit: int) -> int:
        """Fetches epochs until more than ``limit`` is ahead, as long as there are epochs.

        Returns:
            The running sum of the sizes before the next sample.
        """
        used = int(self._cumulative_sizes[self._next - 1]) if self._next else 0
        ahead = (int(self._cumulative_sizes[-1]) if len(self._cumulative_sizes) else 0) - used
        new_epochs = []
        while ahead <= limit and (epoch := next(self._epochs, None)) is not None:
            ahead += int(self._sizes[epoch].sum())
            new_epochs.append(epoch)
        if not new_epochs:
            return used
        end = len(self._indices) - self._next
        self._epoch_ends = deque(epoch_end - self._next for epoch_end in self._epoch_ends)
        for epoch in new_epochs:
            end += len(epoch)
            self._epoch_ends.append(end)
        self._indices = np.concatenate([self._indices[self._next :], *new_epochs])
        self._next = 0
        self._cumulative_sizes = np.cumsum(self._sizes[self._indices])
        return 0


class ReaderPlace(NamedTuple):
    """A reader's position in its rows, as values that JSON can hold."""

    epoch: int = 0
    row: int = 0
    """Rows of the epoch that have been used."""
    sample: int = 0
    """Samples of the next row that have been used."""
    block: FilePlace = FilePlace()
    """Where the block of the next row begins in the files."""


@dataclass(frozen=True)
class StreamSample:
    """A sample and where it comes from."""

    sample: TextSample
    source: int
    """Number of its source."""
    reader: int
    """Number of the reader that gave it."""
    after: ReaderPlace
    """The reader's position after it."""


class TextStream:
    """The endless sequence of samples of some sources.

    Rows are read in blocks of consecutive rows of the files; within a block they are shuffled by (seed, epoch, block).
    With weights each source has a reader of its own, and the readers are mixed; without weights one reader reads all
    sources in turn.
    """

    def __init__(
        self,
        sources: Sources,
        transform: TextTransform,
        seed: int,
        shuffle: bool,
        block_rows: int,
        bad_rows: BadRows,
        shared: SharedWork | None = None,
    ) -> None:
        """Reads nothing yet.

        Args:
            sources: the data.
            transform: what makes samples of rows.
            seed: key of the order.
            shuffle: false keeps the order of the files.
            block_rows: rows that are shuffled among themselves.
            bad_rows: counts the rows that cannot be used, and raises their DataError beyond its limit.
            shared: the ranks that share the work on the rows, each of which reads the same stream; None where each of
                them does it for itself.
        """
        self._samples_of = samples_of if shared is None else shared.samples_of
        self.sources = sources
        self.transform = transform
        self.bad_rows = bad_rows
        self.seed = seed
        self.shuffle = shuffle
        self.block_rows = block_rows
        tables = [[(number, table) for table in tables] for number, tables in enumerate(sources.tables)]
        self.readers = [*map(RowBlocks, tables)] if sources.weights is not None else [RowBlocks([*chain(*tables)])]

    def begin(self) -> State:
        """The state in which the stream starts: what each reader has given, and its position in its rows."""
        return {"taken": [0] * len(self.readers), "places": [ReaderPlace()] * len(self.readers)}

    def move(self, state: State, stream_sample: StreamSample) -> State:
        """The stream's state after a sample, from the state before it. The latter stays as it is."""
        state = {name: [*state[name]] for name in self.begin()}
        state["taken"][stream_sample.reader] += self._sample_amount(stream_sample.sample)
        state["places"][stream_sample.reader] = stream_sample.after
        return state

    def epochs(self, state: State) -> int:
        """Epochs that are complete at a state, as the sources' stopping strategy counts them."""
        passes = [epoch for epoch, *_ in state["places"]]
        return min(passes) if self.sources.stopping == "all_exhausted" else max(passes)

    def read(self, state: State) -> Iterator[StreamSample]:
        """Yields samples from a state on, without an end. Rows before the block that it lies in are not read.

        Raises:
            DataError: when more rows than the limit cannot be used, no row of a reader can be used, or a file is
                broken.
        """
        # JSON has turned the named tuples into lists.
        places = (
            ReaderPlace(*counts, FilePlace(*block))  # pyright: ignore[reportCallIssue]
            for *counts, block in state["places"]
        )
        samples = [self._iterate_samples(reader, place) for reader, place in enumerate(places)]
        mixer = Mixer(self.sources.weights or [1.0], state["taken"], state["samples"])
        while True:
            reader = mixer.choose()
            stream_sample = next(samples[reader])
            mixer.add(reader, self._sample_amount(stream_sample.sample))
            yield stream_sample

    def _sample_amount(self, sample: TextSample) -> int:
        return sample.num_tokens if self.sources.level == "token" else 1

    def _iterate_samples(self, reader: int, place: ReaderPlace) -> Iterator[StreamSample]:
        """Yields the samples of a reader from a place on."""
        is_any_useful = place.row > 0  # rows before the place are not read again, and are taken to be usable
        while True:
            block = self.readers[reader].read(place.block, self.block_rows)
            num_done = place.row % self.block_rows
            order = self._order_block(reader, place, len(block.rows))[num_done:]
            for index, samples in self._samples_of(self.transform, block.rows, order):
                where = block.rows.describe(index)
                row = place.row
                num_done += 1
                after = place._replace(row=row + 1, sample=0)
                if num_done == len(block.rows):  # the place after the last row is the beginning of the next block
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
                    place_in_row = place._replace(sample=number + 1)
                    next_place = place_in_row if number + 1 < len(samples) else after
                    yield StreamSample(samples[number], block.source(index), reader, next_place)
                place = after

    def _order_block(self, reader: int, place: ReaderPlace, length: int) -> Sequence[int]:
        """Indices of the rows of the block that a place lies in, in the order in which they are read."""
        if not self.shuffle:
            return range(length)
        block = place.row // self.block_rows
        return keyed_permutation(length, self.seed, "text stream", reader, place.epoch, block).tolist()


class StreamSteps:
    """Steps over a stream, as ``StoreSteps``. The samples and tokens of an epoch are unknown."""

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
        """Steps that are left of the run. The lengths of samples are unknown, so every step is taken to be full."""
        if self.length.steps is not None:
            return max(self.length.steps - state["step"], 0)
        # Rounded up: the step that reaches the number of tokens still belongs to the run.
        return max(-(-((self.length.tokens or 0) - state["tokens"]) // self.rule.limit), 0)

    def steps(self, state: State) -> Iterator[Step]:
        """The steps that are left of the run. A sample that does not fit into a step waits for the next one."""
        samples = self.stream.read(state)
        waiting: list[StreamSample] = []
        for _ in range(self.num_steps(state)):
            taken = waiting
            waiting = []
            room = self.rule.limit - sum(map(self._sample_size, taken))
            while room > 0:
                streamed = next(samples)
                room -= self._sample_size(streamed)
                if room < 0 and taken:
                    waiting = [streamed]
                else:
                    taken.append(streamed)
            place = state
            for streamed in taken:
                place = self.stream.move(place, streamed)
            epoch_ended = self.stream.epochs(place) > self.stream.epochs(state)
            state = {
                **place,
                "step": state["step"] + 1,
                "samples": state["samples"] + len(taken),
                # As ``num_steps``, a step counts as full.
                "tokens": state["tokens"] + (self.rule.limit if self.rule.by_tokens else 0),
            }
            yield Step(
                document_lengths=np.array(
                    [[len(document.input_ids) for document in streamed.sample.documents] for streamed in taken]
                ),
                sources=[streamed.source for streamed in taken],
                read=lambda position, taken=taken: taken[position].sample,
                image_shapes=lambda position, taken=taken: taken[position].sample.image_shapes,
                epoch_ended=epoch_ended,
                after=state,
            )
            if epoch_ended:
                self.stream.bad_rows.sum_up()
        self.stream.bad_rows.sum_up()

    def _sample_size(self, stream_sample: StreamSample) -> int:
        return stream_sample.sample.num_tokens if self.rule.by_tokens else 1
