"""Sections of tasks that learn from text: its rows, how they make a batch, and what is held out."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, model_validator

from sfumato.config.base import Section, Variant, refuse_needless
from sfumato.config.open_mappings import Keywords
from sfumato.config.paths import FilePath, FilePaths
from sfumato.config.row_limit import RowLimit
from sfumato.config.sections import EpochTrainConfig, TaskConfig

SHOWN_PROBLEMS = ("read", "digits")
HEARD_PROBLEMS = ("dial",)
"""Synthetic problems whose question is a picture, or a sound."""


class SyntheticTextConfig(Section):
    """Problems with one correct answer, made in code: nothing is downloaded."""

    problem: Literal["reverse", "sort", "add", "multiply", "read", "digits", "dial", "draw", "read_or_draw"] = "reverse"
    """reverse and sort the letters of a word, add or multiply two numbers, read a number from a picture (digits: from
    scikit-learn's handwritten digits), which needs data_type image_conversation, or image_prompts of RL, hear one in
    the tones of a telephone's keys (dial), which needs media_conversation or media_prompts, draw one, or either of
    both, which need omni_conversation."""
    min_length: int = Field(2, ge=1)
    """Fewest letters of a word, or digits of a number."""
    max_length: int = Field(6, ge=1, le=32)
    """Most letters of a word, or digits of a number."""
    num_rows: int = Field(20_000, ge=1)
    """Rows in one epoch."""
    held_out: float = Field(0.05, gt=0, lt=1)
    """Share of all problems, chosen by a hash, that training never shows; evaluation has only these."""
    turns: int = Field(1, ge=1, le=8)
    """Questions and answers in one conversation."""
    calculator_calls: float = Field(0.0, ge=0, le=1)
    """add and multiply: share of answers of the column messages that show a call, `calc(12*34)=408`, as rollout.kind
    tools with calls inline has it; the others are the bare number."""

    @model_validator(mode="after")
    def _fits(self) -> SyntheticTextConfig:
        if self.min_length > self.max_length:
            raise ValueError(f"min_length {self.min_length} is above max_length {self.max_length}")
        if self.calculator_calls and self.problem not in ("add", "multiply"):
            raise ValueError(
                f"calculator_calls has no meaning with problem {self.problem}: remove it, or take multiply"
            )
        return self


class TextDataConfig(Section):
    """Text, conversations, or pairs of a better and a worse answer."""

    train_path: FilePaths | None = None
    """A .jsonl, .json, .parquet, .arrow, .tar, .csv or .txt file, a folder of them, a URL such as s3://bucket/folder,
    FOLDER:NAME for a data set of a dataset_info.json, several with commas between, or a .yaml file with weighted
    sources."""
    eval_path: FilePaths | None = None
    """Validation set, like train_path; null evaluates nothing (synthetic problems: those that are held out)."""
    synthetic: SyntheticTextConfig | None = None
    """Problems made in code instead of train_path and eval_path."""
    data_type: Annotated[Any, Variant("sfumato.data.text.formats", short=True)] = "conversation"
    """plaintext learns every token, conversation those of assistant messages, preference compares two answers; a
    format of your own by import path, `my_module:MyFormat`."""
    datasets_type: Literal["mapping", "iterable"] = "mapping"
    """mapping tokenises everything before the first step, once, and counts the steps; iterable reads files from front
    to back and tokenises while training."""
    text_keys: list[str] = []
    """Columns of the text or messages, the first that a row has; empty tells rows by their columns: content_split,
    text, content; messages, conversations, prompt and completion, Alpaca, GSM8K; pairs; answers with a label."""
    chat_template: FilePath | None = None
    """A Jinja file, or by name `chatml`, `hermes` (ChatML that shows tools and calls of them) or `chatml_images` (with
    images); null takes the tokenizer's own."""
    chat_template_options: Keywords = {}
    """Values of variables of the chat template, such as `{enable_thinking: false}`; exports have them as defaults."""
    max_seq_len: int = Field(2048, ge=3)
    """Most tokens of a sample, and of a row under dynamic batching. Longer plain text is cut into several samples."""
    overlong: Literal["stop", "skip", "truncate"] = "stop"
    """What happens to conversations and pairs above max_seq_len: an error, or left out (counted like broken rows, each
    named), or cut at the end."""
    max_bad_rows: RowLimit = 0
    """Rows that are left out, each named in the log, before the run stops; 0 stops at the first. A number below 1, or
    `1%`, is a share of the rows."""
    train_size: int | None = Field(None, ge=1)
    """Tokens after which the run ends, when train.max_steps is null; null runs num_train_epochs."""
    shuffle: bool = True
    """false keeps the order of the files."""
    shuffle_buffer: int = Field(10_000, ge=1)
    """iterable: rows that are read together and shuffled among themselves."""
    num_workers: int = Field(1, ge=1)
    """Processes that tokenise a mapping dataset."""
    cache_dir: FilePath | None = None
    """Folder for the tokens of mapping datasets, used again when nothing has changed; null is output_dir/tokens."""
    cache_media: bool = False
    """Keep there, too, what the model's processor makes of images, videos and audio, made once before the first step:
    training neither decodes nor scales them again."""

    @model_validator(mode="after")
    def _one_source(self) -> TextDataConfig:
        if (self.train_path is None) == (self.synthetic is None):
            raise ValueError("set exactly one of data.train_path and data.synthetic")
        if self.synthetic is not None and self.eval_path is not None:
            raise ValueError(
                "data.eval_path has no meaning with data.synthetic, which has held-out problems of its own"
            )
        problem = None if self.synthetic is None else self.synthetic.problem
        hears = "audio" in getattr(self.data_type, "media", ())
        if problem in HEARD_PROBLEMS and not hears:
            raise ValueError(f"data.synthetic.problem {problem} needs data.data_type media_conversation")
        shown = (*SHOWN_PROBLEMS, *HEARD_PROBLEMS, "draw", "read_or_draw")
        if problem is not None and (problem in shown) != self.data_type.has_images:
            raise ValueError(
                f"data.synthetic.problem {' and '.join(SHOWN_PROBLEMS)} and data.data_type image_conversation need "
                "each other"
            )
        if problem in ("draw", "read_or_draw") and not self.data_type.draws:
            raise ValueError(f"data.synthetic.problem {problem} needs data.data_type omni_conversation")
        if self.synthetic is not None and self.data_type.documents_per_sample == 2 and self.synthetic.turns > 1:
            raise ValueError("data.synthetic.turns must be 1 when data.data_type is preference")
        return self

    @model_validator(mode="after")
    def _has_effect(self) -> TextDataConfig:
        why = f"with data.data_type {self.data_type.type}, which makes no use of it: remove it"
        refuse_needless(self, "data", self.data_type.ignores, why)
        if not self.data_type.has_images:
            why = f"with data.data_type {self.data_type.type}, which has no images: remove it"
            refuse_needless(self, "data", ("cache_media",), why)
        if self.datasets_type == "iterable":
            why = "with data.datasets_type iterable, which keeps no tokens: remove it, or take mapping"
            refuse_needless(self, "data", ("num_workers", "cache_dir", "cache_media"), why)
            if isinstance(self.max_bad_rows, float):
                raise ValueError(
                    "data.max_bad_rows is a share of the rows, which data.datasets_type iterable does not count: give "
                    "a number of rows"
                )
            if not self.shuffle:
                why = "without data.shuffle: remove it, or set shuffle to true"
                refuse_needless(self, "data", ("shuffle_buffer",), why)
        return self


class TextTrainConfig(EpochTrainConfig):
    """The optimiser, the batch, the run folder and the checkpoints.

    A step's samples are the same for any number of processes. With dyn_bsz they are those that follow each other up
    to global_batch_size x data.max_seq_len tokens; without it, global_batch_size samples.
    """

    rmpad_with_pos_ids: bool = True
    """Pack samples into one row without padding, told apart by position ids; false pads one sample a row."""
    dyn_bsz: bool = True
    """Fill micro-batches up to micro_batch_size x data.max_seq_len tokens; false: micro_batch_size samples in each."""
    chunked_loss: bool = False
    """Compute the logits for some tokens at a time: less memory; where losses are no plain sums, twice."""
    pad_to_multiple_of: int | None = Field(None, ge=1)
    """Fill rows up to a multiple of so many tokens, so that compiled blocks see few lengths; null: 256 where blocks are
    compiled, else 1. With micro_batch_size x data.max_seq_len nearly all rows have one length."""
    probe: Literal["stop", "warn"] = "stop"
    """What to do when, before the first step, a few documents as the run sends them through the model give something
    else than through transformers' own module one by one."""
    save_epochs: int = Field(0, ge=0)
    """Epochs between checkpoints, besides save_steps; 0 is none."""


class TextEvalConfig(Section):
    """Evaluation on the validation set, before the first step, during training and at the end."""

    every_steps: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates before the first step and after the last."""
    num_rows: int = Field(256, ge=1)
    """Most rows of the validation set that are used, from its beginning."""
    num_samples: int = Field(4, ge=0)
    """Prompts of the validation set that are answered (plain text: beginnings that are continued) by greedy decoding
    and written to the run folder."""
    max_new_tokens: int = Field(32, ge=1)
    """Longest answer in tokens."""
    stop: list[Annotated[str, Field(min_length=1)]] = []
    """Texts that end an answer once it holds them, besides the tokens that end one."""


class TextTaskConfig(TaskConfig, Protocol):
    """What the configurations of tasks that learn from files of text have."""

    @property
    def data(self) -> TextDataConfig: ...
    @property
    def train(self) -> TextTrainConfig: ...
    @property
    def eval(self) -> TextEvalConfig: ...
