"""Micro-batches of text for each step of a run, the same samples whatever the number of processes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from sfumato.config.text_data import TextDataConfig, TextTrainConfig
from sfumato.data.background import in_background
from sfumato.data.bad_rows import BadRows
from sfumato.data.loader import refuse_repetition
from sfumato.data.mixing import Order
from sfumato.data.packing import micro_batch_rule, pack
from sfumato.data.row_blocks import RowFile
from sfumato.data.sources import Sources
from sfumato.data.text import TextTransform
from sfumato.data.text_batch import TextBatch, make_batch, placeholder_tokens
from sfumato.data.text_steps import RunLength, State, Step, StepRule, Steps, StoreSteps
from sfumato.data.text_stream import StreamSteps, TextStream
from sfumato.data.token_store import Watch, build_token_store
from sfumato.errors import ConfigError, DataError
from sfumato.parallel.mesh import Mesh

ATTENTION_LENGTH = 24_576
"""Tokens of a document at which attention costs as much as everything else: 12 x a hidden width of 2048."""

STEPS_AHEAD = 2
"""Steps that a thread prepares before they are asked for."""


def default_cost(length: int) -> float:
    """Work that a document of so many tokens makes, in units of that of a token without attention."""
    return length + length**2 / ATTENTION_LENGTH


class TextLoader:
    """This rank's micro-batches, step by step, from any step on.

    The samples of a step are those that follow each other in the order of the data, from the position that the steps
    before it have come to. Ranks and micro-batches only share them out.
    """

    def __init__(
        self,
        steps: Steps,
        source_names: list[str],
        data: TextDataConfig,
        train: TextTrainConfig,
        pad_token_id: int,
        mesh: Mesh,
        cost: Callable[[int], float],
    ) -> None:
        """Use ``build_text_loader``."""
        self.source_names = source_names
        """Names of the sources, which ``TextBatch.tensors["sources"]`` numbers."""
        self.epoch_ended = False
        """Whether an epoch ended within the step that was yielded last."""
        self._steps, self._data, self._train = steps, data, train
        self._pad, self._mesh, self._cost = pad_token_id, mesh, cache(cost)
        self._state = steps.begin()
        self._total_steps: int | None = None

    @property
    def total_steps(self) -> int:
        """Steps of the whole run: those before ``restore`` and those that are left after it."""
        if self._total_steps is None:
            self._total_steps = self._state["step"] + self._steps.num_steps(self._state)
        return self._total_steps

    @property
    def fingerprint(self) -> str:
        """Identifies the samples and their order."""
        return self._steps.fingerprint

    @property
    def num_samples(self) -> int | None:
        """Samples of the data; None for streams."""
        return self._steps.num_samples

    @property
    def tokens_per_epoch(self) -> int | None:
        """Tokens of the first epoch; None for streams."""
        return self._steps.tokens_per_epoch

    def state(self) -> State:
        """Where the run is after the step that was yielded last, as JSON, whatever the ranks and batch sizes.

        ``samples`` is the position: the samples that were used so far. ``step`` and ``tokens`` count with it. A stream
        adds its place in the rows of each source.
        """
        return {"fingerprint": self.fingerprint, **self._state}

    def restore(self, state: State) -> None:
        """Goes on from a state; call it before ``steps``. Afterwards ``total_steps`` counts what is left from there.

        Raises:
            DataError: when it is the state of other data, or of another order.
        """
        if "rows" in state:
            raise DataError(
                "the checkpoint counts the rows of data.datasets_type iterable, as versions did that read all files "
                "before the first step: where it is in the files cannot be told. Go on with that version, or start a "
                "new run from the exported weights (model.model_path)"
            )
        if state["fingerprint"] != self.fingerprint:
            raise DataError(
                f"the data is not what the checkpoint was trained on: position {state['samples']} would mean other "
                "samples, so that some would be lost or seen twice. Restore data.train_path, data.max_seq_len, the "
                "tokenizer, train.seed and the like; or start a new run from the exported weights (model.model_path)"
            )
        self._state = {name: each for name, each in state.items() if name != "fingerprint"}
        self._total_steps = None

    def steps(self, from_step: int = 0) -> Iterator[tuple[int, list[TextBatch]]]:
        """Steps, counted from 0, with this rank's micro-batches: as many on each rank, some may be placeholders.

        Args:
            from_step: the step of the state that was restored; 0 without one.
        """
        if from_step != self._state["step"]:
            raise ValueError(f"the data is at step {self._state['step']}, not {from_step}: restore the loader's state")
        prepared = ((step, self._micro_batches(step)) for step in self._steps.steps(self._state))
        for number, (step, batches) in enumerate(in_background(prepared, STEPS_AHEAD), start=from_step):
            self._state, self.epoch_ended = step.after, step.epoch_ended
            yield number, batches

    def is_epoch_due(self, every: int) -> bool:
        """Whether the step that was yielded last ended an epoch, of which each ``every``-th counts; 0 is none."""
        return bool(every) and self.epoch_ended and self._steps.epochs(self._state) % every == 0

    def _micro_batches(self, step: Step) -> list[TextBatch]:
        """This rank's share of a step."""
        train, count = self._train, step.document_lengths.shape[1]
        lengths = step.document_lengths.sum(axis=1).tolist() if train.dyn_bsz else [1] * len(step.sources)
        capacity = train.micro_batch_size * (self._data.max_seq_len * count if train.dyn_bsz else 1)
        costs = [sum(map(self._cost, each)) for each in step.document_lengths.tolist()]
        shares = pack(lengths, costs, capacity, self._mesh.data_size, *micro_batch_rule(train))
        first = step.after["samples"] - len(step.sources)
        return [
            make_batch(
                [step.read(position) for position in part],
                [first + position for position in part],
                [step.sources[position] for position in part],
                train.rmpad_with_pos_ids,
                self._pad,
                placeholder_tokens(self._mesh),
            )
            for part in shares[self._mesh.data_rank]
        ]


def build_text_loader(
    data: TextDataConfig,
    train: TextTrainConfig,
    tokenizer_pad_id: int,
    transform: TextTransform,
    sources: Sources,
    mesh: Mesh,
    say: Callable[[str], None],
    watch: Watch | None = None,
    cost: Callable[[int], float] = default_cost,
) -> TextLoader:
    """The loader that a configuration asks for. Every rank must call it.

    Data of the kind ``mapping`` is tokenised here, by rank 0, unless that was done before. Data of the kind
    ``iterable`` is read and tokenised while steps are taken, by every rank, of which each trains its share.

    Args:
        data, train: the task's sections.
        tokenizer_pad_id: token that fills rows up.
        transform, sources: what makes samples of which rows.
        mesh: the ranks.
        say, watch: for messages and a progress bar, see ``build_token_store``.
        cost: work that a document of some tokens makes, by which ranks are balanced.

    Raises:
        ConfigError: when the end of the run cannot be known.
        DataError: when rows cannot be used.
    """
    global_batch = train.global_batch_size or train.micro_batch_size * mesh.data_size
    num_tokens = data.max_seq_len * transform.documents_per_sample
    rule = StepRule(global_batch * (num_tokens if train.dyn_bsz else 1), by_tokens=train.dyn_bsz)
    length = RunLength(train.max_steps, data.train_size, train.num_train_epochs)
    if data.datasets_type == "mapping":
        with mesh.first_rank_first():
            steps: Steps = _store_steps(data, train, transform, sources, rule, length, say, watch)
    else:
        steps = _stream_steps(data, train, transform, sources, rule, length, say)
    return TextLoader(steps, list(sources.names), data, train, tokenizer_pad_id, mesh, cost)


def _store_steps(
    data: TextDataConfig,
    train: TextTrainConfig,
    transform: TextTransform,
    sources: Sources,
    rule: StepRule,
    length: RunLength,
    say: Callable[[str], None],
    watch: Watch | None,
) -> StoreSteps:
    folder = Path(data.cache_dir or Path(train.output_dir) / "tokens")
    store = build_token_store(sources, transform, folder, data.num_workers, data.max_bad_rows, say, watch)
    taken = rule.limit * len(store) // int(store.lengths.sum()) if rule.by_tokens else rule.limit
    refuse_repetition("train.global_batch_size", taken, len(store))
    mixing = (sources.weights, sources.level, sources.stopping)
    order = Order(store.lengths, store.source_of, store.names, *mixing, train.seed, data.shuffle)
    return StoreSteps(store, order, _digest([store.fingerprint, *_order_key(data, train, sources)]), rule, length)


def _stream_steps(
    data: TextDataConfig,
    train: TextTrainConfig,
    transform: TextTransform,
    sources: Sources,
    rule: StepRule,
    length: RunLength,
    say: Callable[[str], None],
) -> StreamSteps:
    if train.max_steps is None and not train.dyn_bsz:
        raise ConfigError(
            "data.train_size counts tokens, but how many the samples of data.datasets_type iterable have is not known "
            "before: set train.max_steps, or train.dyn_bsz true"
        )
    bad_rows = BadRows(data.max_bad_rows, say)
    stream = TextStream(sources, transform, train.seed, data.shuffle, data.shuffle_buffer, bad_rows)
    sizes = [[table.size if isinstance(table, RowFile) else len(table) for table in each] for each in sources.tables]
    content = [transform.fingerprint, sources.names, sizes]
    order = [data.shuffle_buffer if data.shuffle else None, *_order_key(data, train, sources)]
    return StreamSteps(stream, _digest(["stream", content, order]), rule, length)


def _order_key(data: TextDataConfig, train: TextTrainConfig, sources: Sources) -> list[object]:
    """What the order of samples depends on, besides the samples."""
    mixing = [sources.weights, sources.level, sources.stopping] if sources.weights is not None else None
    return [train.seed if data.shuffle else None, mixing]


def _digest(parts: list[object]) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=10).hexdigest()
