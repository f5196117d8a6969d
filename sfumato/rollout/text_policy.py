"""What the roles of an RL run of a language model hold, and how they draw texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import nn

from sfumato.config.text_rl import TextRLConfig
from sfumato.data.prompt_template import PromptTemplate
from sfumato.data.text_prompts import TextPrompt
from sfumato.models.flops import FlopCount
from sfumato.models.language import LanguageModel
from sfumato.models.language_load import build_language_model
from sfumato.models.plain import check_length
from sfumato.parallel.mesh import Mesh
from sfumato.rollout.engines.base import Engine, Sampling
from sfumato.rollout.engines.of_policy import PolicyEngine
from sfumato.rollout.turns import DrawnText, LengthLimits, SampleKeys


def build_text_policy(config: TextRLConfig) -> LanguageModel:
    """Loads the model that is trained.

    Raises:
        ConfigError: when it is missing, or knows fewer positions than a sample may have tokens.
    """
    model = build_language_model(config.model, config.train)
    check_length(model.module.config, config.max_seq_len)
    return model


class TextEngine:
    """Draws texts in a role, by weights of the policy in this process or by an engine's own."""

    def __init__(
        self,
        config: TextRLConfig,
        template: PromptTemplate,
        model: LanguageModel | None,
        flops: FlopCount | None = None,
        own: Any = None,
    ) -> None:
        """Makes the embedded engine when it is first needed.

        Args:
            config: of the task.
            template: of the prompts.
            model: the policy, on its mesh; None for an engine with weights of its own.
            flops: of the policy that is trained.
            own: that engine.
        """
        self.config, self.template, self.flops = config, template, flops
        self.receiver = own
        """What takes weights; None where the policy's model does."""
        self._policy = None if model is None else PolicyEngine(model, self._embedded)

    def _embedded(self, module: nn.Module) -> Engine:
        assert self._policy is not None
        model = self._policy.model
        return self.config.rollout.engine.of_module(module, model, self.config.max_seq_len)

    def draw(
        self,
        weights: Hashable,
        version: int,
        prompts: Sequence[TextPrompt],
        keys: Sequence[SampleKeys],
        sampling: Sampling,
        max_new_tokens: int,
    ) -> list[DrawnText]:
        """Draws one sample for each of B prompts, all at the same time.

        Args:
            weights: names the policy's weights of now; see ``PolicyEngine.ready``.
            version: of the policy.
            prompts: B prompts, equal ones for a group.
            keys: of the noise of each.
            sampling: how tokens are drawn.
            max_new_tokens: most tokens after a prompt.
        """
        engine: Engine = self.receiver if self._policy is None else self._policy.ready(weights, version)
        limits, kind = LengthLimits(max_new_tokens, self.config.max_seq_len), self.config.rollout.kind

        async def draw_all() -> list[DrawnText]:
            draws = [
                kind.draw(engine, prompt, key, sampling, self.template, limits)
                for prompt, key in zip(prompts, keys, strict=True)
            ]
            return await asyncio.gather(*draws)

        return asyncio.run(draw_all())

    def close(self) -> None:
        """Ends the engine."""
        (self._policy or self.receiver).close()


def sampling_of(template: PromptTemplate, temperature: float, top_p: float = 1.0, top_k: int = 0) -> Sampling:
    """How tokens are drawn; the tokenizer's end of a text or turn ends a completion."""
    return Sampling(temperature, top_p, top_k, tuple(sorted(stop_tokens(template.tokenizer))))


def stop_tokens(tokenizer: Any) -> set[int]:
    """Tokens that end an answer: that of the end of a text, and those that chat templates end a turn with."""
    ends = {tokenizer.eos_token_id} - {None}
    known = tokenizer.get_added_vocab()
    return ends | {known[name] for name in ("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|end|>") if name in known}


def summed(mesh: Mesh) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that sums a small tensor over data-parallel ranks."""

    def reduce(values: torch.Tensor) -> torch.Tensor:
        parts = mesh.gather(values)
        return torch.stack(parts).sum(dim=0)

    return reduce
