"""An engine without a cache or batches, for tests: a real tiny model, one pass of it for each token."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import torch

from sfumato.algorithms.noise import keyed_generator
from sfumato.rollout.engines.base import Completion, GenerationRequest, Sampling
from tests.tiny import tiny_language_description


def tiny_model(seed: int = 0) -> torch.nn.Module:
    """A Qwen3 of width 32 with two layers, for the tokenizer of bytes; its tokens are far from equally likely."""
    from transformers import AutoConfig, AutoModelForCausalLM

    description = tiny_language_description()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(description.pop("model_type"), **description)).eval()
    model.lm_head.weight.data *= 4.0
    return model


class PlainEngine:
    """Draws a token from the softmax of the logits, with noise keyed by (seed, position)."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model, self.version = model, 0
        self.requests: list[GenerationRequest] = []
        self.abort_after: int | None = None
        """Tokens after which the next completion is aborted, once."""

    async def generate(self, request: GenerationRequest, sampling: Sampling) -> Completion:
        """Draws a completion, giving others their turn after each token."""
        assert request.max_new_tokens >= 1 and len(request.prompt_ids) >= 1
        self.requests.append(request)
        abort_after, self.abort_after = self.abort_after, None
        ids, log_probs = [], []
        while len(ids) < request.max_new_tokens:
            if len(ids) == abort_after:
                self.version += 1
                return Completion(ids, log_probs, [self.version - 1] * len(ids), "abort")
            token, log_prob = self.next_token([*request.prompt_ids, *ids], request, len(ids), sampling)
            ids.append(token)
            log_probs.append(log_prob)
            if token in sampling.stop_token_ids:
                return Completion(ids, log_probs, [self.version] * len(ids), "stop")
            await asyncio.sleep(0)
        return Completion(ids, log_probs, [self.version] * len(ids), "length")

    def next_token(
        self, ids: Sequence[int], request: GenerationRequest, position: int, sampling: Sampling
    ) -> tuple[int, float]:
        """The token after ``ids``, and its log-probability."""
        with torch.no_grad():
            logits = self.model(torch.tensor([list(ids)])).logits[0, -1] / sampling.temperature
        generator = keyed_generator(request.seed, "token", request.first_position + position)
        log_probs = logits.log_softmax(-1)
        token = int(torch.multinomial(log_probs.exp(), 1, generator=generator))
        return token, float(log_probs[token])


def log_probs_of(model: torch.nn.Module, token_ids: Sequence[int], temperature: float = 1.0) -> torch.Tensor:
    """Of given tokens but the first, in one pass: float32 ``[L - 1]``."""
    ids = torch.tensor([list(map(int, token_ids))])
    with torch.no_grad():
        log_probs = (model(ids).logits[0, :-1] / temperature).log_softmax(-1)
    return log_probs.gather(-1, ids[0, 1:, None])[:, 0]
