"""Answers to prompts that somebody watches while a run is under way."""

from __future__ import annotations

from typing import Any, cast

from sfumato.config.text_rl import TextRLConfig
from sfumato.data.text.prompt_template import PromptTemplate
from sfumato.data.text.prompts import TextPrompt
from sfumato.errors import ConfigError
from sfumato.rollout.kinds.base import SampleKeys
from sfumato.rollout.text.policy import EVALUATION
from sfumato.tracking.samples import SampleRecord


def answer_watched(state: Any, prompts: list[str], config: TextRLConfig) -> list[SampleRecord]:
    """Records of an answer to each watched prompt, drawn as in an evaluation, and not scored.

    Args:
        state: of the actor, which draws with its averaged weights, or of a sampler.
        prompts: texts of a user.
        config: of the task.

    Raises:
        ConfigError: for a kind of rollout whose prompts are more than a text, and prompts that are too long.
    """
    if config.rollout.kind.type != "single_turn":
        raise ConfigError(f"rollout.kind {config.rollout.kind.type} needs more than a text as its prompt")
    encoded = encode_watched(prompts, state.engine.template, config.data.max_prompt_tokens)
    rows = range(len(encoded))
    keys = [SampleKeys(config.eval.seed, 0, row, EVALUATION) for row in rows]
    with state.evaluated():
        _, samples = state.engine.draw((EVALUATION, state.updates), state.updates, encoded, list(rows), keys)
    return [
        SampleRecord(
            content=cast("str", sample.text),
            kind="watched",
            prompt=sample.prompt,
            seed=config.eval.seed,
            sample_id=row,
            policy_version=state.updates,
        )
        for row, sample in zip(rows, samples, strict=True)
    ]


def encode_watched(prompts: list[str], template: PromptTemplate, max_tokens: int) -> list[TextPrompt]:
    """The prompts, rendered as those of the data are. Raises ConfigError for one without tokens or with too many."""
    encoded = []
    for prompt in prompts:
        messages = template.messages_of(prompt, "watched prompt")
        token_ids = template.encode_one(prompt, "watched prompt")
        if not 0 < len(token_ids) <= max_tokens:
            raise ConfigError(f"a watched prompt has {len(token_ids)} tokens, and data.max_prompt_tokens {max_tokens}")
        encoded.append(TextPrompt(tuple(token_ids), prompt, messages))
    return encoded
