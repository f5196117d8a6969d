"""Reward models for text: classifiers of conversations with one output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from sfumato.errors import DataError
from sfumato.rewards.base import Sample
from sfumato.rewards.pretrained import PretrainedReward


@dataclass(frozen=True, kw_only=True)
class TextRewardModel(PretrainedReward):
    """Output of a reward model on the conversation that the generated text ends, such as Skywork-Reward."""

    type: ClassVar[str] = "text_reward_model"

    @staticmethod
    def load(folder: str, device: str, dtype: str) -> Any:
        """A model for sequence classification with one label, and a tokenizer with a chat template."""
        from sfumato.rewards.networks.classifier import load_classifier

        return load_classifier(folder, device, dtype)

    def score_batch(self, network: Any, samples: list[Sample]) -> Any:
        """The single logit of each conversation, [B]; NaN for one that is longer than the model can read."""
        return network([self._conversation(sample) for sample in samples])

    def _conversation(self, sample: Sample) -> list[dict[str, Any]]:
        if sample.text is None:
            raise DataError(f"reward {self.label!r} scores texts, but the sample of prompt {sample.prompt!r} has none")
        question = sample.metadata.get("messages") or [{"role": "user", "content": sample.prompt}]
        return [*question, {"role": "assistant", "content": sample.text}]
