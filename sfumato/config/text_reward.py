"""Configuration of ``tasks/train_text_reward.py``."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from sfumato.config.base import Section, refuse_needless
from sfumato.config.text import LanguageModelConfig, TrainTextConfig, check_scored_answers


class ScalarModelConfig(LanguageModelConfig):
    """The model: a language model with a scalar head, or a classifier of sequences with one output, which has one."""

    head: Literal["random", "zero"] = "random"
    """Of a model without a scalar head: random, normal with variance 1 / (hidden width + 1); or zero."""


class RewardObjectiveConfig(Section):
    """What a reward model learns."""

    objective: Literal["bradley_terry", "process"]
    """bradley_terry: which of two answers is better (arXiv 2203.02155, eq. 1); process: which steps of an answer are
    right (arXiv 2305.20050)."""
    center_coef: float = Field(0.0, ge=0)
    """bradley_terry: weight of the square of the sum of a pair's rewards, which keeps their mean near 0 (arXiv
    2312.09244)."""


class TrainTextRewardConfig(TrainTextConfig):
    """Training of reward models."""

    model: ScalarModelConfig
    """Model."""
    reward: RewardObjectiveConfig
    """Objective."""

    @model_validator(mode="after")
    def _fits(self) -> TrainTextRewardConfig:
        kind = self.data.data_type
        if self.reward.objective == "bradley_terry" and kind.documents_per_sample != 2:
            raise ValueError(
                "reward.objective bradley_terry needs pairs: set data.data_type to preference or preference_margin"
            )
        if self.reward.objective == "process":
            if kind.numbers != "steps":
                raise ValueError("reward.objective process needs labelled steps: set data.data_type to process")
            refuse_needless(self.reward, "reward", ("center_coef",), "with reward.objective process: remove it")
        if self.train.pipeline_parallel_size > 1:
            raise ValueError("a model with a scalar head is not cut into stages: set train.pipeline_parallel_size to 1")
        if self.train.chunked_loss:
            raise ValueError("train.chunked_loss is for logits, and a scalar head makes none: set it to false")
        check_scored_answers(self, "training of reward models", "a reward model")
        return self
