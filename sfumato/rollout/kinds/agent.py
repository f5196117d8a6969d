"""Any program that speaks OpenAI's chat protocol: it gets the address of the policy and a key."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from sfumato.config.open_mappings import JsonObject
from sfumato.config.user_functions import import_function
from sfumato.data.text.prompt_template import PromptTemplate
from sfumato.data.text.prompts import TextPrompt
from sfumato.errors import ConfigError, UserError
from sfumato.rollout.agents.openai_endpoint import MODEL, check_packages, open_endpoint
from sfumato.rollout.agents.recorded_calls import Session
from sfumato.rollout.agents.user_calls import call_own, describe
from sfumato.rollout.engines.base import Engine, EngineError, Sampling
from sfumato.rollout.kinds.base import DrawnText, LengthLimits, RolloutKind, SampleKeys


@dataclass(frozen=True, kw_only=True)
class ChatAgent(RolloutKind):
    """A program that calls the policy through an endpoint on this machine, which records the drawn tokens."""

    timeout_s: float = 600.0
    """Seconds that one sample may take; then it has no reward."""

    def __post_init__(self) -> None:
        if not self.timeout_s > 0:
            raise ConfigError(f"rollout.kind.timeout_s must be positive, not {self.timeout_s}")

    def prepare(self, template: PromptTemplate) -> None:
        check_packages()

    async def run(self, prompt: TextPrompt, base_url: str, api_key: str, model: str) -> object:
        """Runs the program on one prompt.

        Args:
            prompt: with its metadata.
            base_url: where the policy is served, such as ``http://127.0.0.1:40001/v1``.
            api_key: identifies the sample that a call belongs to.
            model: name of the policy.

        Returns:
            None; a number, which is ``environment_reward``; a text, which is the answer that rewards see; or a mapping
            for the metadata of rewards, in which ``reward`` and ``text`` mean these.
        """
        raise NotImplementedError

    async def draw(
        self,
        engine: Engine,
        prompt: TextPrompt,
        keys: SampleKeys,
        sampling: Sampling,
        template: PromptTemplate,
        limits: LengthLimits,
    ) -> DrawnText:
        session = Session(engine, keys, sampling, template, limits)
        result = None
        damage = ""
        async with open_endpoint() as endpoint:
            with endpoint.serving(session):
                try:
                    result = await call_own(
                        self.run, prompt, endpoint.base_url, session.api_key, MODEL, timeout_s=self.timeout_s
                    )
                except (UserError, EngineError):
                    raise
                except Exception as error:
                    damage = f"the agent: {describe(error, self.timeout_s)}"
        if session.error is not None:
            raise session.error
        try:
            text, metadata, problem = _read(result)
        except Exception as error:  # of the object's own methods, or of an integer beyond the largest float
            text, metadata, problem = None, {}, f"what the agent returned cannot be read: {describe(error)}"
        sequences = session.sequences
        # The first cause counts: an agent that raised has returned nothing that could be read.
        damage = damage or problem or ("" if sequences else "the agent made no call of the policy that was answered")
        answer = session.text if text is None else text
        return DrawnText(sequences, answer, session.messages, session.is_truncated, metadata, damage)


@dataclass(frozen=True, kw_only=True)
class Agent(ChatAgent):
    """A function of your own that asks the policy with the openai client, or any other. Metadata for rewards: what it
    returns."""

    type: ClassVar[str] = "agent"

    path: str
    """Import path of a function (prompt, base_url, api_key, model), async or not, my_module:my_agent. It returns a
    number (the reward of type environment), a text (the answer), a mapping (metadata, with reward and text) or None."""

    def prepare(self, template: PromptTemplate) -> None:
        super().prepare(template)
        try:
            import_function(self.path)
        except ConfigError as error:
            raise ConfigError(f"rollout.kind.path: {error}") from error

    async def run(self, prompt: TextPrompt, base_url: str, api_key: str, model: str) -> object:
        named = {"base_url": base_url, "api_key": api_key, "model": model}
        return await call_own(import_function(self.path), prompt.copy_for_sample(), timeout_s=None, **named)


def _read(result: object) -> tuple[str | None, dict[str, object], str]:
    """Reads what an agent returned.

    Returns:
        The answer, or None if it returned none; metadata for rewards; and what is wrong, empty if nothing is.
    """
    text = None
    metadata: JsonObject = {}
    if isinstance(result, Mapping):
        metadata = dict(result)
        text = metadata.pop("text", None)
        result = metadata.pop("reward", None)
    elif isinstance(result, str):
        text = result
        result = None
    if text is not None and not isinstance(text, str):
        return None, {}, f"the agent returned a text of type {type(text).__name__}"
    if result is None:
        return text, metadata, ""
    if not isinstance(result, numbers.Real) or isinstance(result, bool) or not math.isfinite(float(result)):
        return None, {}, f"the agent returned {result!r:.100} as its reward, which is no finite number"
    return text, {**metadata, "environment_reward": float(result)}, ""
