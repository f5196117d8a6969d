"""Looks at the data of a configuration as the task will: opens files, reads and transforms some rows of each."""

from __future__ import annotations

from collections.abc import Callable, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.config.dit import TrainAutoencoderConfig, TrainDitConfig, TrainDitDpoConfig
from sfumato.config.text import TrainTextConfig
from sfumato.config.text_reward import TrainTextRewardConfig
from sfumato.config.text_rl import TextRLConfig
from sfumato.data.files.row_table import RowTable, read_row_with_folder
from sfumato.data.files.sources import Sources, open_sources, open_validation
from sfumato.data.images.image_text import open_held_out_pairs, open_image_pairs
from sfumato.data.images.prompts import load_prompts
from sfumato.data.images.shared_pairs import describe_shared_pairs
from sfumato.data.loader import IndexLoader
from sfumato.data.media.pictures import is_enlarged
from sfumato.data.media.vision import MediaProcessor, check_head
from sfumato.data.prompt_loader import check_prompts
from sfumato.data.sounds.sound_text import SoundTextDataset, open_captioned
from sfumato.data.sounds.video_sound import VideoSoundDataset
from sfumato.data.synthetic.glyphs import GlyphDataset
from sfumato.data.text.answer_end import AnswerEnd, facts_of
from sfumato.data.text.format import TextTransform, build_transform, has_media
from sfumato.data.text.loader import adopt_answer_end, build_text_loader
from sfumato.data.text.notes import describe_text_data
from sfumato.data.text.prompt_template import build_prompt_template
from sfumato.data.text.prompts import TextPrompt, describe_shared_prompts, load_text_prompts
from sfumato.data.text.token_store import find_token_store
from sfumato.errors import DataError
from sfumato.models.diffusion.encoded import Dataset
from sfumato.models.language.model_folder import describe_export
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import pretended_mesh

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sfumato.config.image_data import PairDataConfig
    from sfumato.config.omni import TrainImageTokenizerConfig
    from sfumato.data.media.image_conversation import ImageConversationTransform

FIRST_ROWS = 64
"""Rows that are looked at from the beginning of each source, and as many spread over the rest."""

LOOKED_AT_RATE = 16000
"""Samples per second at which files of sound are read; any rate shows whether they can be read."""

LOOKED_AT_FRAME_RATE = 24.0
"""Frames per second at which videos with sound are read: that of LTX-2, on which their least length depends."""

NAMED = 5
"""Bad rows that are named."""


@dataclass
class SourceFindings:
    """What was seen of one source."""

    name: str
    num_rows: int
    num_looked_at: int = 0
    bad_rows: list[str] = field(default_factory=list)
    is_fatal: bool = False
    """Whether one of them stops the run however many may be left out."""
    num_samples: int = 0
    num_tokens: int = 0
    num_learned: int = 0
    """Tokens that the loss masks hold."""
    num_heads: int = 0
    """Further rows of which the heads of media files were read."""
    longest: int = 0
    """Tokens of the longest sample that was seen."""

    @property
    def tokens(self) -> float:
        """Tokens of the whole source, estimated from the rows that were looked at."""
        return self.num_tokens / max(self.num_looked_at, 1) * self.num_rows

    @property
    def samples(self) -> float:
        """Samples of the whole source, estimated from the rows that were looked at."""
        return self.num_samples / max(self.num_looked_at, 1) * self.num_rows


@dataclass
class DataFindings:
    """What was seen of the data."""

    training: list[SourceFindings] = field(default_factory=list)
    validation: list[SourceFindings] = field(default_factory=list)
    num_steps: int | None = None
    steps_are_exact: bool = True
    """Whether the steps are given or counted, and not estimated."""
    tokens: float | None = None
    """Tokens of one pass over the data."""
    tokens_are_exact: bool = False
    """Whether they are counted, which they are when the data has been tokenised before."""
    notes: list[str] = field(default_factory=list)
    """What the run's log would say of the data: what is not read, evaluation rows that are training rows."""
    tokens_per_step: int | None = None
    """Most tokens of one step."""
    images_per_step: int | None = None
    answers: list[str] = field(default_factory=list)
    """How the answers of a language model end, and what its export says of it."""


def check_text_data(
    config: TrainTextConfig, tokenizer: PreTrainedTokenizerBase, reader: MediaProcessor | None, layout: Layout
) -> DataFindings:
    """Looks at text, and with ``reader`` at the images, videos and audio that stand in it.

    Steps and tokens are counted when the text has been tokenised before, and otherwise estimated from some rows. Of
    media files the head is read, of every row; those of the rows that are looked at are decoded.

    Raises:
        UserError: when a file or a setting is wrong. Bad rows raise nothing: they are in the findings.
    """
    data = config.data
    train = config.train
    transform = build_transform(data, tokenizer, reader)
    sources = open_sources(data.model_copy(update={"datasets_type": "mapping"}))  # rows are looked at everywhere
    validation = open_validation(data)
    findings = DataFindings([_look_at_text(*table, transform) for table in _list_tables(sources)])
    findings.notes = describe_text_data(data, sources, validation, transform, config.eval.num_rows)
    findings.validation = [_look_at_text(*table, transform) for table in _list_tables(validation)]
    end = adopt_answer_end(transform, tokenizer)
    if isinstance(config, TrainTextRewardConfig):
        findings.notes += end.notes
    else:
        findings.answers = _describe_answer_end(end, tokenizer)
    global_batch = train.global_batch_size or train.micro_batch_size * layout.data
    per_sample = data.max_seq_len * transform.documents_per_sample
    findings.tokens_per_step = global_batch * per_sample
    store = None
    if data.datasets_type == "mapping" and reader is None:
        folder = Path(data.cache_dir or Path(train.output_dir) / "tokens")
        store = find_token_store(sources, transform, folder) if folder.exists() else None
    if store is not None:
        with pretended_mesh(layout) as mesh:
            loader = build_text_loader(data, train, 0, transform, sources, mesh, lambda text: None)
        findings.num_steps = loader.total_steps
        findings.tokens = loader.tokens_per_epoch
        findings.tokens_are_exact = True
        return findings
    # no store of tokens yet: the rows that were looked at stand for the rest of their source
    findings.tokens = sum(source.tokens for source in findings.training)
    samples = max(sum(source.samples for source in findings.training), 1)
    tokens_per_step = findings.tokens_per_step if train.dyn_bsz else global_batch * findings.tokens / samples
    findings.steps_are_exact = train.max_steps is not None
    total_tokens = data.train_size or train.num_train_epochs * findings.tokens
    findings.num_steps = train.max_steps or max(round(total_tokens / max(tokens_per_step, 1)), 1)
    return findings


def check_image_data(
    config: TrainDitConfig | TrainAutoencoderConfig | TrainImageTokenizerConfig, layout: Layout
) -> DataFindings:
    """Looks at images or videos, or pairs, their captions and perhaps source images. Raises as ``check_text_data``."""
    data = config.data
    seed = config.train.seed
    held_out = None
    notes: list[str] = []
    if isinstance(config, TrainDitDpoConfig):
        dataset: Dataset = open_image_pairs(config.data, seed, notes.append)
        held_out = open_held_out_pairs(config.data, seed, config.eval.num_rows)
        notes += describe_shared_pairs(dataset, held_out)
    else:
        dataset = open_captioned(data, seed, notes.append)
    findings = DataFindings([_look_at_images(data.train_path or "glyphs", dataset, notes)], notes=notes)
    if held_out is not None:
        eval_path = cast("PairDataConfig", data).eval_path
        findings.validation = [_look_at_images(eval_path or "glyphs", held_out, notes)]
    # the run's own loader counts the steps, on a mesh that only pretends to have processes
    with pretended_mesh(layout) as mesh:
        loader = IndexLoader(len(dataset), config.train, mesh, say=notes.append)
    findings.num_steps = loader.total_steps
    findings.images_per_step = loader.global_batch_size * (2 if dataset.is_paired else 1)
    return findings


def check_prompt_data(config: DiffusionRLConfig) -> DataFindings:
    """Looks at all prompts, as the rewards do. Raises as ``check_text_data``."""
    findings = DataFindings(num_steps=config.train.max_steps)
    findings.images_per_step = config.rollout.num_prompts * config.rollout.n
    for split, sources in (("train", findings.training), ("eval", findings.validation)):
        prompts = load_prompts(config.data, split, config.eval.num_prompts if split == "eval" else None)
        check_prompts(prompts, [reward.check_row for reward in config.reward.rewards])
        for prompt in prompts:
            if prompt.source is not None:
                prompt.check_source(*config.rollout.size[:2])
        path = config.data.train_path if split == "train" else config.data.eval_path
        sources.append(SourceFindings(path or "glyphs", len(prompts), len(prompts)))
    return findings


def check_text_prompt_data(
    config: TextRLConfig, tokenizer: PreTrainedTokenizerBase, reader: MediaProcessor | None = None
) -> DataFindings:
    """Looks at all prompts of RL of language models, as the rewards do. Arguments and errors as ``check_text_data``."""
    data = config.data
    kind = config.rollout.kind
    findings = DataFindings(num_steps=config.train.max_steps)
    template = build_prompt_template(data, tokenizer, reader)
    kind.prepare(template)
    if template.chat is not None:
        template.chat.adopt()
    findings.answers = _describe_answer_end(template.answer_end, tokenizer)
    if config.rollout.stop:
        findings.answers.append(f"drawing stops at the texts {', '.join(map(repr, config.rollout.stop))}, too")
    loaded: list[list[TextPrompt]] = []
    for split, sources in (("train", findings.training), ("eval", findings.validation)):
        limit = config.eval.num_prompts if split == "eval" else None
        settings = {"seed": config.train.seed, "limit": limit, "tools": kind.tools()}
        prompts = load_text_prompts(data, template, split, **settings, log=findings.notes.append)
        check_prompts(prompts, [reward.check_row for reward in config.reward.rewards])
        lengths = [len(prompt.token_ids) for prompt in prompts]
        path = data.train_path if split == "train" else data.eval_path
        source = SourceFindings(path or "problems made in code", len(prompts), len(prompts))
        source.num_samples = len(prompts)
        source.num_tokens = sum(lengths)
        source.longest = max(lengths)
        sources.append(source)
        loaded.append(prompts)
    findings.notes += describe_shared_prompts(*loaded)
    return findings


def _describe_answer_end(end: AnswerEnd, tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Lines about the tokens that end an answer, and what an export will say of them."""
    lines = [*end.describe(), describe_export(tokenizer)]
    if facts_of(tokenizer).is_pad_added:
        lines.append("the tokenizer has no padding token; the run pads with the end of a text, and exports none")
    return lines


def sampled_rows(count: int) -> list[int]:
    """Indices of the first rows, and of as many spread evenly over the rest, with the last row."""
    first = min(count, FIRST_ROWS)
    spread = np.linspace(first, count - 1, min(FIRST_ROWS, count - first)).round().astype(int) if count > first else []
    return [*range(first), *dict.fromkeys(map(int, spread))]


def _list_tables(sources: Sources | None) -> list[tuple[str, RowTable]]:
    return [] if sources is None else list(zip(sources.names, sources.rows, strict=True))


def _look_at_text(name: str, rows: RowTable, transform: TextTransform) -> SourceFindings:
    """Transforms some rows of a source of text, and reads the heads of the media files of all others."""

    def look(index: int, findings: SourceFindings) -> None:
        row = read_row_with_folder(rows, index) if has_media(transform) else rows[index]
        for sample in transform(row, rows.describe(index)):
            findings.num_samples += 1
            findings.num_tokens += sample.num_tokens
            findings.longest = max(findings.longest, *(len(document.input_ids) for document in sample.documents))
            findings.num_learned += sum(int(document.loss_mask.sum()) for document in sample.documents)

    findings = _look_at(name, rows, look)
    if has_media(transform):
        _look_at_heads(findings, rows, cast("ImageConversationTransform", transform))
    return findings


def _look_at_heads(findings: SourceFindings, rows: RowTable, transform: ImageConversationTransform) -> None:
    """Reads the heads of the media files in the rows that ``sampled_rows`` leaves out; no picture is decoded."""
    read_whole = {*sampled_rows(len(rows))}
    for index in range(len(rows)):
        if index in read_whole:
            continue
        where = rows.describe(index)
        try:
            row = read_row_with_folder(rows, index)
            for medium in transform.files(row, where):
                check_head(medium, where)
        except DataError as error:
            findings.bad_rows.append(str(error))
            findings.is_fatal |= error.fatal
    findings.num_heads = len(rows) - len(read_whole)


def _look_at_images(name: str, dataset: Dataset, notes: list[str]) -> SourceFindings:
    """Reads captions, pictures and source images of some rows; a note says how many pictures would be enlarged."""
    enlarged: list[bool] = []
    if isinstance(dataset, SoundTextDataset):
        return _look_at_sounds(name, dataset, notes)
    if isinstance(dataset, VideoSoundDataset):
        dataset.take_format(LOOKED_AT_RATE, 1, LOOKED_AT_FRAME_RATE)

    def look(index: int, findings: SourceFindings) -> None:
        dataset.caption(index)
        picture = dataset.picture(index)
        enlarged.append(bool(is_enlarged(picture.framing, picture.pixels.shape[-2:]).any()))
        if not isinstance(dataset, GlyphDataset) and dataset.count_sources(index):
            dataset.source(index, picture.pixels)

    findings = _look_at(name, dataset, look)
    if any(enlarged):
        notes.append(f"{name}: {sum(enlarged)} of {len(enlarged)} pictures that were looked at would be enlarged")
    return findings


def _look_at_sounds(name: str, dataset: SoundTextDataset, notes: list[str]) -> SourceFindings:
    """Reads captions and files of sound of some rows; notes say how many are cut or filled up."""
    lengths: list[int] = []
    dataset.take_format(LOOKED_AT_RATE, 1)  # whatever the model's: the files are the same

    def look(index: int, findings: SourceFindings) -> None:
        dataset.caption(index)
        lengths.append(int(dataset.picture(index).framing[1]))

    findings = _look_at(name, dataset, look)
    wanted = dataset.size[1]
    if shorter := sum(length < wanted for length in lengths):
        notes.append(f"{name}: {shorter} of {len(lengths)} sounds that were looked at are filled up with silence")
    if longer := sum(length > wanted for length in lengths):
        notes.append(f"{name}: {longer} of {len(lengths)} sounds that were looked at are longer, and cut")
    return findings


def _look_at(name: str, rows: Sized, look: Callable[[int, SourceFindings], None]) -> SourceFindings:
    """Calls ``look`` with the indices of ``sampled_rows``; a DataError that it raises names a bad row."""
    findings = SourceFindings(name, len(rows))
    for index in sampled_rows(len(rows)):
        findings.num_looked_at += 1
        try:
            look(index, findings)
        except DataError as error:
            findings.bad_rows.append(str(error))
            findings.is_fatal |= error.fatal
    return findings


def bad_rows_of(findings: list[SourceFindings], max_bad_rows: int) -> tuple[list[str], bool]:
    """Lines about bad rows, and whether they stop the run.

    Args:
        findings: of all sources.
        max_bad_rows: how many may be left out.
    """
    bad = [row for source in findings for row in source.bad_rows]
    if not bad:
        return [], False
    looked_at = sum(source.num_looked_at + source.num_heads for source in findings)
    lines = bad[:NAMED]
    if len(bad) > NAMED or max_bad_rows:
        lines.append(
            f"{len(bad)} of the {looked_at} rows that were looked at are bad; data.max_bad_rows {max_bad_rows}"
        )
    return lines, len(bad) > max_bad_rows or any(source.is_fatal for source in findings)
