"""Configuration of ``tasks/train_dit_dpo.py``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from sfumato.config.base import Section
from sfumato.config.dit import TrainDitConfig
from sfumato.config.image_data import PairDataConfig
from sfumato.config.needless import refuse_needless


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
