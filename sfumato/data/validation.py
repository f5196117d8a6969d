"""A validation set of text: packed micro-batches to score, and prompts to answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from sfumato.config.text_data import TextDataConfig, TextEvalConfig, TextTrainConfig
from sfumato.data.packing import pack
from sfumato.data.sources import Sources
from sfumato.data.text import Sample, TextTransform
from sfumato.data.text_batch import TextBatch, make_batch, placeholder_tokens
from sfumato.errors import DataError
from sfumato.parallel.mesh import Mesh


@dataclass(frozen=True)
class Prompt:
    """The beginning of a validation sample, and how it goes on."""

    input_ids: list[int]
    answer: list[int]


@dataclass(frozen=True)
class Validation:
    """What is evaluated."""

    batches: list[TextBatch]
    """This rank's micro-batches, as many as on the other ranks."""
    prompts: list[Prompt]
    """The same on every rank."""


def build_validation(
    sources: Sources | None,
    data: TextDataConfig,
    train: TextTrainConfig,
    evaluation: TextEvalConfig,
    transform: TextTransform,
    pad_token_id: int,
    mesh: Mesh,
    say: Callable[[str], None],
) -> Validation | None:
    """Reads the first rows of each validation source. Broken rows are left out and named; they stop no run.

    Returns:
        None when there is no validation set.

    Raises:
        DataError: when no row of it can be used.
    """
    if sources is None:
        return None
    samples: list[Sample] = []
    origins: list[int] = []
    for number, rows in enumerate(sources.rows):
        for index in range(min(len(rows), -(-evaluation.num_rows // len(sources.rows)))):
            try:
                found = transform(rows[index], rows.describe(index))
            except DataError as error:
                say(f"validation row left out: {error}")
                continue
            samples += found
            origins += [number] * len(found)
    if not samples:
        raise DataError("data.eval_path: no row of the validation set can be used")
    lengths = [each.num_tokens for each in samples]
    capacity = train.micro_batch_size * data.max_seq_len * transform.documents_per_sample
    if not train.rmpad_with_pos_ids:  # padded rows cost their number times the longest
        lengths, capacity = [1] * len(samples), train.micro_batch_size
    shares = pack(lengths, [float(each) for each in lengths], capacity, mesh.data_size)
    batches = [
        make_batch(
            [samples[each] for each in part],
            part,
            [origins[each] for each in part],
            train.rmpad_with_pos_ids,
            pad_token_id,
            placeholder_tokens(mesh),
        )
        for part in shares[mesh.data_rank]
    ]
    prompts = [_prompt(each) for each in samples[: evaluation.num_samples]]
    return Validation(batches, prompts)


def _prompt(sample: Sample) -> Prompt:
    """Splits the first document where its last run of learned tokens begins; plain text in its middle."""
    document = sample.documents[0]
    ids, learned = document.input_ids.tolist(), document.learned.tolist()
    start = len(ids) // 2
    if not all(learned[1:]):
        last = max(index for index, each in enumerate(learned) if each)
        start = last
        while learned[start - 1]:
            start -= 1
        return Prompt(ids[:start], ids[start : last + 1])
    return Prompt(ids[:start], ids[start:])
