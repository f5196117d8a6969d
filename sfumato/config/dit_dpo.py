"""Configuration of ``tasks/train_dit_dpo.py``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from sfumato.config.base import Section
from sfumato.config.dit import ImageDataConfig, TrainDitConfig
from sfumato.config.needless import refuse_needless
from sfumato.config.paths import FilePath


class PairDataConfig(ImageDataConfig):
    """Pairs of a better and a worse image for one prompt."""

    data_type: Literal["pairs", "glyphs"] = "pairs"
    """pairs reads train_path; glyphs renders words in code: the right one, and another one as the worse image."""
    train_path: FilePath | None = None
    """A .jsonl or .parquet file, a folder of them, or a folder with metadata.jsonl."""
    eval_path: FilePath | None = None
    """Held-out pairs, like train_path; null evaluates nothing (glyphs: pairs of held-out words)."""
    text_key: str = "prompt"
    """Column of the prompt."""
    chosen_key: str = "chosen"
    """Column of the better image: a path relative to the file, or in parquet the bytes."""
    rejected_key: str = "rejected"
    """Column of the worse image."""
    label_key: str | None = None
    """Column that says which is which: 1 leaves them so, 0 makes rejected_key's image the better one, and rows with
    any other number are ties, which are left out. null: all are so."""

    @model_validator(mode="after")
    def _fits(self) -> PairDataConfig:
        if self.data_type == "glyphs" and self.eval_path is not None:
            raise ValueError("data.eval_path has no meaning when data.data_type is glyphs: remove one of them")
        if self.chosen_key == self.rejected_key:
            raise ValueError(f"data.chosen_key and data.rejected_key are both {self.chosen_key!r}")
        return self


class DitDpoConfig(Section):
    """Diffusion-DPO (arXiv 2311.12908) on existing pairs."""

    beta: float = Field(2000.0, gt=0)
    """Strength of the pull towards the reference. Published: 2000 to 5000."""
    loss: Literal["sigmoid", "hinge"] = "sigmoid"
    """sigmoid: DPO; hinge: SLiC, arXiv 2305.10425."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed share of pairs whose preference is the wrong way round (conservative DPO); for sigmoid."""


class PairEvalConfig(Section):
    """Evaluation on held-out pairs, before the first step, during training and at the end."""

    every_steps: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates before the first step and after the last."""
    num_rows: int = Field(256, ge=1)
    """Most held-out pairs that are used, from their beginning."""


class TrainDitDpoConfig(TrainDitConfig):
    """Preference training of diffusion models from existing pairs."""

    data: PairDataConfig
    """Data."""
    dpo: DitDpoConfig = DitDpoConfig()
    """Objective."""
    eval: PairEvalConfig = PairEvalConfig()
    """Evaluation."""

    @model_validator(mode="after")
    def _has_effect(self) -> TrainDitDpoConfig:
        if self.dpo.loss != "sigmoid":
            why = f"with dpo.loss {self.dpo.loss}: remove it, or take sigmoid"
            refuse_needless(self.dpo, "dpo", ("label_smoothing",), why)
        if self.data.eval_path is None and self.data.data_type != "glyphs":
            why = "without data.eval_path: remove it, or set data.eval_path"
            refuse_needless(self.eval, "eval", ("every_steps", "num_rows"), why)
        return self
