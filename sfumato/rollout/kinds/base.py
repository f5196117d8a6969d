"""Base class of the kinds of rollout: frozen dataclasses that draw a sample for a prompt with an engine."""

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

    A kind from outside of the library is named by its import path, ``kind: {type: my_module:MyKind}``.
    """

    type: ClassVar[str]
    modality: ClassVar[str] = "text"
    """What rewards are given."""
    takes_images: ClassVar[bool] = False
    """Whether the images of a prompt are passed to the engine."""

    def prepare(self, template: PromptTemplate) -> None:  # noqa: B027  (most kinds need nothing)
        """Loads what ``draw`` needs, so that a missing piece is noticed before the first step.

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
        """Draws one sample. Many calls are awaited at a time in one event loop, and the engine batches them.

        Args:
            engine: draws the tokens.
            prompt: text and tokens.
            keys: key the sample's noise.
            sampling: how tokens are drawn.
            template: the tokenizer with the chat template.
            limits: of the sample's length.

        Returns:
            The sample. An error of this sample alone (of a tool, an environment, an agent) is in its ``damage``.

        Raises:
            UserError: a mistake that a person has to mend, such as an import path that leads nowhere.
            EngineError: when the engine died.
        """
