"""One completion of a prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from sfumato.data.text.prompt_template import PromptTemplate
from sfumato.data.text.prompts import TextPrompt
from sfumato.rollout.engines.base import Engine, Sampling
from sfumato.rollout.kinds.base import DrawnText, LengthLimits, RolloutKind, SampleKeys
from sfumato.rollout.text.tokens import GrowingSequence


@dataclass(frozen=True, kw_only=True)
class SingleTurn(RolloutKind):
    """One completion of the prompt, up to a stop token or the limit."""

    type: ClassVar[str] = "single_turn"
    takes_images: ClassVar[bool] = True

    async def draw(
        self,
        engine: Engine,
        prompt: TextPrompt,
        keys: SampleKeys,
        sampling: Sampling,
        template: PromptTemplate,
        limits: LengthLimits,
    ) -> DrawnText:
        sequence = GrowingSequence.after_prompt(prompt.token_ids, prompt.images)
        room = limits.room(len(sequence), len(sequence))
        if room:
            await sequence.draw(engine, keys.request_seed(), room, sampling)
        return make_answer(sequence, prompt, template, is_truncated=not room or sequence.finish_reason == "length")


def make_answer(
    sequence: GrowingSequence, prompt: TextPrompt, template: PromptTemplate, is_truncated: bool
) -> DrawnText:
    """The sample of a prompt whose answer is everything after the prompt in ``sequence``."""
    text = template.decode(sequence.token_ids[sequence.num_prompt_tokens :])
    messages = prompt.messages and [*prompt.messages, {"role": "assistant", "content": text}]
    return DrawnText([sequence.freeze()], text, messages, is_truncated)
