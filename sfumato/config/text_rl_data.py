"""The section ``data`` of reinforcement learning of language models: prompts, and what becomes of them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sfumato.config.base import Section, Variant, refuse_needless
from sfumato.config.open_mappings import Keywords
from sfumato.config.paths import FilePath, FilePaths
from sfumato.config.text_data import HEARD_PROBLEMS, SHOWN_PROBLEMS, SyntheticTextConfig

PLAIN = "none"
"""What ``chat_template`` says where there is to be none."""


class TextPromptDataConfig(Section):
    """Prompts to train and to evaluate on, as text or as messages, with what rewards need to know of them."""

    data_type: Annotated[Any, Variant("sfumato.data.text.prompt_formats", short=True)] = "prompts"
    """What rows hold: prompts (a column of texts or messages; else told by their columns), image_prompts (the same with
    images), media_prompts (with videos and audio, too), gsm8k (question and answer), verl (verl's and DAPO's parquet
    files), sharegpt, alpaca, reasoning_gym, verifiers; or a format of your own by import path, `my_module:MyFormat`."""
    train_path: FilePaths | None = None
    """Prompts: a .jsonl, .json, .parquet, .arrow, .tar, .csv or .txt file (one a line), a folder, a URL such as
    s3://bucket/folder, FOLDER:NAME of a dataset_info.json, or several of these with commas between; columns that the
    format does not read are metadata."""
    eval_path: FilePaths | None = None
    """Prompts of the evaluation, in the same format."""
    synthetic: SyntheticTextConfig | None = None
    """Problems made in code instead of train_path and eval_path; evaluation has only those that are held out."""
    chat_template: FilePath | None = None
    """A Jinja file, or by name `chatml`, `hermes` (ChatML that shows tools and calls of them) or `chatml_images` (with
    images); null takes the tokenizer's own; `none` leaves prompts as they are."""
    chat_template_options: Keywords = {}
    """Values of variables of the chat template, such as `{enable_thinking: false}`; exports have them as defaults."""
    system_prompt: str | None = Field(None, min_length=1)
    """First message of each conversation that does not begin with one of role system."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Most tokens of a prompt, chat template included."""
    overlong: Literal["error", "drop", "truncate_left"] = "error"
    """What becomes of longer prompts: an error, or left out, or their first tokens are; how many, is said."""
    curriculum: str | None = None
    """Import path of a function `(iteration, metadata, seed)` that returns row numbers in order, or a weight for each
    row; null shuffles anew in each epoch."""

    @model_validator(mode="after")
    def _has_source(self) -> TextPromptDataConfig:
        makes_rows = self.data_type.makes_rows or self.synthetic is not None
        if self.synthetic is not None:
            if self.synthetic.turns > 1:
                raise ValueError("data.synthetic.turns must be 1: a prompt is answered once")
            formats: dict[str, str] = dict.fromkeys(SHOWN_PROBLEMS, "image_prompts")
            formats |= dict.fromkeys(HEARD_PROBLEMS, "media_prompts")
            format_name = formats.get(self.synthetic.problem, "prompts")
            kind = self.data_type.type
            if kind != format_name and {kind, format_name} & {*formats.values()}:
                problems = " and ".join(name for name, data_type in formats.items() if data_type in (kind, format_name))
                raise ValueError(
                    f"data.synthetic.problem {problems} and data.data_type "
                    f"{format_name if format_name != 'prompts' else kind} need each other"
                )
            if kind != format_name:
                raise ValueError(
                    "data.data_type has no effect with data.synthetic, whose problems are no rows of a file: remove "
                    "one of them"
                )
        if makes_rows:
            source = "data.synthetic" if self.synthetic is not None else f"data.data_type {self.data_type.type}"
            why = f"with {source}, which makes prompts and holds some out for evaluation: remove one of them"
            refuse_needless(self, "data", ("train_path", "eval_path"), why)
        elif self.train_path is None or self.eval_path is None:
            raise ValueError("data.train_path and data.eval_path are required, or data.synthetic instead of both")
        return self

    @model_validator(mode="after")
    def _template_has_use(self) -> TextPromptDataConfig:
        if self.chat_template == PLAIN:
            why = "with data.chat_template none, which shows prompts as they are: remove one of them"
            refuse_needless(self, "data", ("chat_template_options", "system_prompt"), why)
        return self
