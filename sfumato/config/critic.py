"""The section of a critic: what predicts the return at every token of PPO."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from sfumato.config.base import Section
from sfumato.config.paths import ModelPath
from sfumato.config.sections import LoraConfig
from sfumato.config.text import LanguageModelConfig


class CriticConfig(Section):
    """The critic, a language model with a scalar head that has an optimiser of its own."""

    model_path: ModelPath | None = None
    """Folder of a language model, or of a reward model, whose head is kept; null begins from the policy's."""
    head: Literal["random", "zero"] = "zero"
    """Of a model without a scalar head: zero, so that all values begin at 0 and the first advantages are the returns;
    or random, normal with variance 1 / (hidden width + 1), whose values of size 1 the critic has to unlearn first."""
    lora: LoraConfig | None = None
    """Train low-rank adapters and the head; null trains all weights."""
    lr: float = Field(9e-6, gt=0)
    """Peak learning rate; everything else of the optimiser and of its schedule is as in train."""

    def derive_from(self, policy: LanguageModelConfig) -> LanguageModelConfig:
        """The critic's model section: the policy's with what the critic has of its own.

        ``model.freeze`` is about the policy.
        """
        changes: dict[str, object] = {"lora": self.lora, "freeze": []}
        if self.model_path is not None:
            tokenizer = policy.tokenizer_path or policy.model_path
            changes |= {"model_path": self.model_path, "config_path": None, "tokenizer_path": tokenizer}
        return policy.model_copy(update=changes)
