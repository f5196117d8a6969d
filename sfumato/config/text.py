"""Configuration of ``tasks/train_text.py`` and ``tasks/train_text_dpo.py``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from sfumato.config.base import Section
from sfumato.config.needless import refuse_needless
from sfumato.config.paths import FilePath, FilePaths
from sfumato.config.sections import LoraConfig, TrainConfig


class LanguageModelConfig(Section):
    """The model: which folder or which description it comes from, and what of it is trained."""

    model_path: FilePath | None = None
    """Folder of a transformers model (config.json, safetensors files, tokenizer)."""
    config_path: FilePath | None = None
    """YAML file with the fields of a transformers configuration (model_type, hidden_size, ...): a model made from
    scratch with random weights; instead of model_path."""
    made_by: FilePath | None = None
    """YAML file of this task that makes model_path; it is run first when that folder is missing."""
    tokenizer_path: FilePath | None = None
    """Folder of the tokenizer; null takes model_path. `bytes` is one of 259 tokens that needs no folder."""
    lora: LoraConfig | None = None
    """Train low-rank adapters; null trains all weights."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of what is frozen: with LoRA the base weights, and the reference of preference training."""
    attention: Literal["packed", "sdpa", "eager", "flex_attention", "flash_attention_2"] = "packed"
    """packed computes attention within each document of a packed row only, by torch's kernels on CPU and GPU; the
    others are transformers' own; flash_attention_2 needs the package flash-attn."""
    trust_remote_code: bool = False
    """Whether Python code that lies in model_path may run."""

    @model_validator(mode="after")
    def _one_source(self) -> LanguageModelConfig:
        if (self.model_path is None) == (self.config_path is None):
            raise ValueError("set exactly one of model.model_path (a model folder) and model.config_path (a YAML file)")
        if self.config_path is not None and self.tokenizer_path is None:
            raise ValueError("model.config_path needs model.tokenizer_path, the folder of the tokenizer")
        if self.made_by is not None and self.model_path is None:
            raise ValueError("model.made_by is the configuration that makes model.model_path: set both")
        return self


class SyntheticTextConfig(Section):
    """Problems with one right answer, made in code: nothing is downloaded."""

    problem: Literal["reverse", "sort", "add"] = "reverse"
    """reverse and sort the letters of a word, or add two numbers."""
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

    @model_validator(mode="after")
    def _ordered(self) -> SyntheticTextConfig:
        if self.min_length > self.max_length:
            raise ValueError(f"min_length {self.min_length} is above max_length {self.max_length}")
        return self


class TextDataConfig(Section):
    """Text, conversations, or pairs of a better and a worse answer."""

    train_path: FilePaths | None = None
    """A .jsonl, .json, .parquet, .arrow, .csv or .txt file, a folder of them, several of these with commas between, or
    a .yaml file with weighted sources."""
    eval_path: FilePaths | None = None
    """Validation set, like train_path; null evaluates nothing (synthetic problems: those that are held out)."""
    synthetic: SyntheticTextConfig | None = None
    """Problems made in code instead of train_path and eval_path."""
    data_type: Literal["plaintext", "conversation", "preference"] = "conversation"
    """plaintext learns every token, conversation those of assistant messages, preference compares two answers."""
    datasets_type: Literal["mapping", "iterable"] = "mapping"
    """mapping tokenises everything before the first step, once, and counts the steps; iterable streams."""
    text_keys: list[str] = []
    """Columns of the text or messages, the first that a row has; empty takes content_split, text, content; messages,
    conversations; prompt, chosen and rejected."""
    chat_template: FilePath | None = None
    """A Jinja file, or `chatml`; null takes the tokenizer's own."""
    max_seq_len: int = Field(2048, ge=3)
    """Most tokens of a sample, and of a row under dynamic batching. Longer plain text is cut into several samples."""
    overlong: Literal["stop", "skip", "truncate"] = "stop"
    """What happens to conversations and pairs above max_seq_len: an error, or left out (counted like broken rows, each
    named), or cut at the end."""
    max_bad_rows: int = Field(0, ge=0)
    """Rows that are left out, each named in the log, before the run stops; 0 stops at the first."""
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

    @model_validator(mode="after")
    def _one_source(self) -> TextDataConfig:
        if (self.train_path is None) == (self.synthetic is None):
            raise ValueError("set exactly one of data.train_path and data.synthetic")
        if self.synthetic is not None and self.eval_path is not None:
            raise ValueError(
                "data.eval_path has no meaning with data.synthetic, which has held-out problems of its own"
            )
        if self.synthetic is not None and self.data_type == "preference" and self.synthetic.turns > 1:
            raise ValueError("data.synthetic.turns must be 1 when data.data_type is preference")
        return self

    @model_validator(mode="after")
    def _has_effect(self) -> TextDataConfig:
        if self.data_type == "plaintext":
            why = "with data.data_type plaintext, whose texts are learned as they are and cut into pieces: remove it"
            refuse_needless(self, "data", ("chat_template", "overlong"), why)
        if self.datasets_type == "iterable":
            why = "with data.datasets_type iterable, which keeps no tokens: remove it, or take mapping"
            refuse_needless(self, "data", ("num_workers", "cache_dir"), why)
            if not self.shuffle:
                why = "without data.shuffle: remove it, or set shuffle to true"
                refuse_needless(self, "data", ("shuffle_buffer",), why)
        return self


class TextTrainConfig(TrainConfig):
    """The optimiser, the batch, the run folder and the checkpoints.

    A step's samples are the same for any number of processes. With dyn_bsz they are those that follow each other up
    to global_batch_size x data.max_seq_len tokens; without it, global_batch_size samples.
    """

    num_train_epochs: int = Field(1, ge=1)
    """Passes over the data when neither train.max_steps nor data.train_size is set."""
    rmpad_with_pos_ids: bool = True
    """Pack samples into one row without padding, told apart by position ids; false pads one sample a row."""
    dyn_bsz: bool = True
    """Fill micro-batches up to micro_batch_size x data.max_seq_len tokens; false: micro_batch_size samples in each."""
    chunked_loss: bool = False
    """Compute the logits for some tokens at a time, twice: less memory, some more time."""
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


class TrainTextConfig(Section):
    """Pretraining and fine-tuning of language models."""

    model: LanguageModelConfig
    """Model."""
    data: TextDataConfig
    """Data."""
    train: TextTrainConfig
    """Training."""
    eval: TextEvalConfig = TextEvalConfig()
    """Evaluation."""

    @model_validator(mode="after")
    def _fits(self) -> TrainTextConfig:
        if self.data.data_type == "preference":
            raise ValueError("data.data_type preference is trained by tasks/train_text_dpo.py")
        if self.model.lora is None:
            why = (
                "without model.lora, since nothing is frozen: remove it, or set train.mixed_precision to bf16, which "
                "computes in bf16"
            )
            refuse_needless(self.model, "model", ("dtype",), why)
        _check_text(self.data, self.train, self.eval)
        return self


class DpoConfig(Section):
    """Direct preference optimisation (arXiv 2305.18290) and its relatives, on existing pairs."""

    beta: float = Field(0.1, gt=0)
    """Strength of the pull towards the reference."""
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """sigmoid: DPO; ipo: arXiv 2310.12036; hinge: SLiC, arXiv 2305.10425."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed share of pairs whose preference is the wrong way round (conservative DPO)."""
    sft_coef: float = Field(0.0, ge=0)
    """Weight of the mean negative log-likelihood of the better answers, added to the loss (arXiv 2404.19733)."""


class TrainTextDpoConfig(Section):
    """Preference training of language models from existing pairs."""

    model: LanguageModelConfig
    """Model."""
    data: TextDataConfig
    """Data."""
    dpo: DpoConfig = DpoConfig()
    """Objective."""
    train: TextTrainConfig
    """Training."""
    eval: TextEvalConfig = TextEvalConfig()
    """Evaluation."""

    @model_validator(mode="after")
    def _fits(self) -> TrainTextDpoConfig:
        if self.data.data_type != "preference":
            raise ValueError("data.data_type must be preference")
        if self.train.ema_decay:
            raise ValueError("train.ema_decay: preference training keeps no moving average; leave it at 0")
        if self.model.made_by is not None:
            raise ValueError(
                "model.made_by is for tasks/train_text.py: run the configuration that makes the model first"
            )
        if self.dpo.loss != "sigmoid":
            why = f"with dpo.loss {self.dpo.loss}: remove it, or take sigmoid"
            refuse_needless(self.dpo, "dpo", ("label_smoothing",), why)
        why = "here: preference training scores the answers of the data and writes none: remove it"
        refuse_needless(self.eval, "eval", ("num_samples", "max_new_tokens"), why)
        _check_text(self.data, self.train, self.eval)
        return self


def _check_text(data: TextDataConfig, train: TextTrainConfig, evaluation: TextEvalConfig) -> None:
    if data.eval_path is None and data.synthetic is None:
        names = list(type(evaluation).model_fields)
        refuse_needless(evaluation, "eval", names, "without data.eval_path: remove it, or set data.eval_path")
    if data.datasets_type == "iterable" and train.max_steps is None and data.train_size is None:
        raise ValueError(
            "data.datasets_type iterable does not know how long the data is: set train.max_steps or data.train_size"
        )
    if train.dyn_bsz and not train.rmpad_with_pos_ids:
        raise ValueError("train.dyn_bsz needs train.rmpad_with_pos_ids, since it packs samples into rows")
