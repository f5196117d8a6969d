"""What a kind of rollout is: a frozen dataclass that makes a sample of a prompt with an engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from sfumato.data.text.prompt_template import PromptTemplate, Tools
from sfumato.data.text.prompts import TextPrompt
from sfumato.rollout.agents.turns import DrawnText, LengthLimits, SampleKeys
from sfumato.rollout.engines.base import Engine, Sampling


@dataclass(frozen=True, kw_only=True)
class RolloutKind(ABC):
    """Base of every kind. A subclass states ``type: ClassVar[str]`` and defines ``draw``.

    One from elsewhere is named by import path, ``kind: {type: my_module:MyKind}``.
    """

    type: ClassVar[str]
    modality: ClassVar[str] = "text"
    """What rewards are given."""
    takes_images: ClassVar[bool] = False
    """Whether images of a prompt reach the engine."""

    def prepare(self, template: PromptTemplate) -> None:  # noqa: B027  (most kinds need nothing)
        """Loads what ``draw`` needs, so that what is missing is found before the first step.

        Raises:
            ConfigError: when the kind does not fit tokenizer and chat template, or an import path leads nowhere.
            MissingDependencyError: holds the command that installs what is missing.
        """

    def tools(self) -> Tools | None:
        """JSON schemas that the chat template shows with each prompt; None where there are none."""
        return None

    @abstractmethod
    async def draw(
        self,
        engine: Engine,
        prompt: TextPrompt,
        keys: SampleKeys,
        sampling: Sampling,
        template: PromptTemplate,
        limits: LengthLimits,
    ) -> DrawnText:
        """Draws one sample. Many wait at a time in one event loop, so that the engine works on all of them together.

        Args:
            engine: that draws tokens.
            prompt: with its tokens.
            keys: of the sample's noise.
            sampling: how tokens are drawn.
            template: has the tokenizer.
            limits: of its length.

        Returns:
            What was drawn. What goes wrong with this sample alone (a tool, an environment, an agent) is its ``damage``.

        Raises:
            UserError: a mistake that a person has to mend, such as an import path that leads nowhere.
            EngineError: when the engine died.
        """
