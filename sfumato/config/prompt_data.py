"""The section data of tasks that learn from prompts by reinforcement."""

from __future__ import annotations

from typing import Literal

from pydantic import model_validator

from sfumato.config.base import Section
from sfumato.config.needless import refuse_needless
from sfumato.config.paths import FilePath
from sfumato.config.sections import GlyphConfig


class PromptDataConfig(Section):
    """Prompts to train and to evaluate on."""

    data_type: Literal["prompts", "glyphs"] = "prompts"
    """prompts reads files; glyphs makes captions of words, training on some and evaluating on held-out ones."""
    train_path: FilePath | None = None
    """Prompts: a .txt file with one a line, or .jsonl / .parquet with a column `prompt`; other columns are metadata."""
    eval_path: FilePath | None = None
    """Prompts of the evaluation, in the same format."""
    prompt_key: str = "prompt"
    """Column of the prompt."""
    source_image_key: str = "source_image"
    """Column of the image that is edited or animated, if the model takes one: a path relative to the file, or bytes."""
    glyphs: GlyphConfig = GlyphConfig()
    """Words when data_type is glyphs."""

    @model_validator(mode="after")
    def _has_source(self) -> PromptDataConfig:
        if self.data_type == "prompts" and (self.train_path is None or self.eval_path is None):
            raise ValueError("data.train_path and data.eval_path are required when data.data_type is prompts")
        if self.data_type == "glyphs":
            why = "when data.data_type is glyphs, which makes words and reads no file: remove it, or take prompts"
            refuse_needless(self, "data", ("train_path", "eval_path"), why)
        return self
