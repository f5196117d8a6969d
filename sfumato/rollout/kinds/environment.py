"""A user's environment: the policy acts by texts, and gets observations in return."""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from sfumato.config.open_mappings import JsonObject
from sfumato.config.user_functions import import_function
from sfumato.data.text.prompt_template import PromptTemplate
from sfumato.data.text.prompts import TextPrompt
from sfumato.errors import ConfigError, UserError
from sfumato.rollout.agents.tools import cut_text
from sfumato.rollout.agents.user_calls import call_own, describe
from sfumato.rollout.engines.base import Engine, EngineError, Sampling
from sfumato.rollout.kinds.base import DrawnText, LengthLimits, RolloutKind, SampleKeys
from sfumato.rollout.text.tokens import GrowingSequence
from sfumato.rollout.text.turn_tokens import defuse_tokens, end_token, tokens_after, tokens_between

if TYPE_CHECKING:
    from sfumato.data.text.chat_message import Message


@dataclass(frozen=True, kw_only=True)
class Environment(RolloutKind):
    """Turns of the policy, each answered by an environment. Metadata for rewards: environment_reward (the sum over the
    steps), environment_rewards, environment_done."""

    type: ClassVar[str] = "environment"

    path: str
    """Import path of a class, my_module:MyEnvironment. For each sample one is made with `arguments`; `reset(prompt)`
    returns the first observation (None: the prompt as it stands), `step(action)` returns (observation, reward, done).
    Both may be async; `close()` is called at the end where there is one."""
    arguments: JsonObject = field(default_factory=dict)
    """Named arguments of the class."""
    max_turns: int = 8
    """Most steps."""
    timeout_s: float = 60.0
    """Seconds of one call; a sample whose environment takes longer has no reward."""
    max_output_chars: int = 4000
    """Letters of an observation that the policy sees; that the rest was cut off is said."""

    def __post_init__(self) -> None:
        if self.max_turns < 1 or self.max_output_chars < 1 or not self.timeout_s > 0:
            raise ConfigError("rollout.kind: max_turns, max_output_chars and timeout_s must be positive")

    def prepare(self, template: PromptTemplate) -> None:
        environment_class = self._load_class()
        missing = [name for name in ("reset", "step") if not callable(getattr(environment_class, name, None))]
        if missing:
            raise ConfigError(f"rollout.kind.path {self.path} has no method {missing[0]}")
        if template.chat is not None:
            tokens_between(template, [{"role": "user", "content": "."}], None)

    def _load_class(self) -> Callable[..., object]:
        try:
            return import_function(self.path)
        except ConfigError as error:
            raise ConfigError(f"rollout.kind.path: {error}") from error

    async def draw(
        self,
        engine: Engine,
        prompt: TextPrompt,
        keys: SampleKeys,
        sampling: Sampling,
        template: PromptTemplate,
        limits: LengthLimits,
    ) -> DrawnText:
        play = _Play(self, template, prompt)
        try:
            await play.reset(self._load_class())
            is_truncated = await self._play_turns(play, engine, keys, sampling, limits)
        except (UserError, EngineError):
            raise
        except _EnvironmentError as error:
            play.damage = str(error)
            is_truncated = False
        finally:
            await play.close()
        sequences = [play.sequence.freeze()] if play.sequence is not None else []
        return DrawnText(sequences, play.text, play.messages, is_truncated, play.metadata, play.damage)

    async def _play_turns(
        self, play: _Play, engine: Engine, keys: SampleKeys, sampling: Sampling, limits: LengthLimits
    ) -> bool:
        """Plays turn after turn. Returns whether it ended at a limit of tokens or turns."""
        assert play.sequence is not None
        sequence = play.sequence
        for turn in range(self.max_turns):
            room = limits.room(sequence.num_prompt_tokens, len(sequence))
            if not room:
                return True
            drawn = await sequence.draw(engine, keys.request_seed(turn), room, sampling)
            observation = await play.step(drawn, sampling)
            if play.is_done:
                return False
            if sequence.finish_reason == "length":
                return True
            # An observation is appended only if the policy has room for a token after it.
            tokens = play.tokens_of(observation, drawn, sampling)
            if len(tokens) >= limits.room(sequence.num_prompt_tokens, len(sequence)):
                return True
            if turn < self.max_turns - 1:
                play.tell(observation, tokens)
        return True


class _EnvironmentError(Exception):
    """An error of a sample's environment, which becomes the sample's damage."""


class _Play:
    """A sample's environment, with the conversation so far."""

    def __init__(self, kind: Environment, template: PromptTemplate, prompt: TextPrompt) -> None:
        self.kind = kind
        self.template = template
        self.prompt = prompt
        self.environment: Any = None
        self.sequence: GrowingSequence | None = None
        self.messages = None if prompt.messages is None else list(prompt.messages)
        self.text = ""  # of the policy's last turn
        self.damage = ""
        self.is_done = False
        self.rewards: list[float] = []

    @property
    def metadata(self) -> JsonObject:
        """Metadata for rewards."""
        rewards = {"environment_reward": math.fsum(self.rewards), "environment_rewards": self.rewards}
        return rewards | {"environment_done": self.is_done}

    async def reset(self, cls: Callable[..., object]) -> None:
        """Builds the environment from the user's class, and the sequence from its first observation."""
        self.environment = await self._call(cls, **copy.deepcopy(self.kind.arguments))
        first = await self._call(self.environment.reset, self.prompt.copy_for_sample())
        ids = self.prompt.token_ids
        if first is not None:
            with self._blame_environment("reset"):
                first = self._check_observation(first)
            content: str | list[Message] = first
            if self.messages is not None:
                system_messages = [message for message in self.messages if message["role"] in ("system", "developer")]
                content = self.messages = [*system_messages, {"role": "user", "content": first}]
            ids = tuple(self.template.encode_one(content, self.prompt.where, self.prompt.tools))
        self.sequence = GrowingSequence.after_prompt(ids)

    async def step(self, drawn: list[int], sampling: Sampling) -> str:
        """Passes the drawn text to the environment. Returns the observation; empty at the end."""
        self.text = self.template.decode(drawn, sampling.stop_token_ids)
        if self.messages is not None:
            self.messages.append({"role": "assistant", "content": self.text})
        result = await self._call(self.environment.step, self.text)
        with self._blame_environment("step"):
            return self._read_step(result)

    def _read_step(self, result: object) -> str:
        """Notes reward and end of a step. Returns the observation; empty at the end."""
        if not isinstance(result, tuple) or len(result) != 3:
            raise _EnvironmentError(
                f"{self.kind.path}: step must return (observation, reward, done), not {result!r:.200}"
            )
        observation, reward, done = result
        try:
            number = float(reward)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise _EnvironmentError(
                f"{self.kind.path}: step gave the reward {reward!r:.200}, which is no finite number"
            )
        self.rewards.append(number)
        self.is_done = bool(done)
        return "" if self.is_done else self._check_observation(observation)

    @contextlib.contextmanager
    def _blame_environment(self, method: str) -> Iterator[None]:
        """Inside the block, an error of what a method has returned is the environment's, as one of the method is.

        Such are the truth of an array of several elements, and objects that cannot be printed.
        """
        try:
            yield
        except _EnvironmentError:
            raise
        except Exception as error:
            raise _EnvironmentError(
                f"{self.kind.path}: what {method} returned cannot be read: {describe(error)}"
            ) from error

    def tokens_of(self, observation: str, drawn: list[int], sampling: Sampling) -> list[int]:
        """The tokens of an observation, with the beginning of the policy's next turn."""
        if self.messages is None:
            return tokens_after(self.template, drawn[-1], defuse_tokens(observation, self.template.tokenizer))
        message = {"role": "user", "content": observation}
        return tokens_between(self.template, [message], end_token(drawn, sampling), self.prompt.tools)

    def tell(self, observation: str, tokens: list[int]) -> None:
        """Appends an observation to the sequence and the messages."""
        assert self.sequence is not None
        self.sequence.append_given(tokens)
        if self.messages is not None:
            self.messages.append({"role": "user", "content": observation})

    async def close(self) -> None:
        """Closes the environment if it has ``close``. An error of that is the sample's damage."""
        close = getattr(self.environment, "close", None)
        if close is None:
            return
        try:
            await self._call(close)
        except _EnvironmentError as error:
            self.damage = self.damage or str(error)

    def _check_observation(self, observation: object) -> str:
        """The observation, cut to ``max_output_chars``. Raises _EnvironmentError when it is no text."""
        if not isinstance(observation, str) or not observation:
            raise _EnvironmentError(f"{self.kind.path}: an observation must be a text, not {observation!r:.200}")
        return cut_text(observation, self.kind.max_output_chars)

    async def _call(self, function: Callable[..., object], *args: object, **named: object) -> object:
        """Calls the user's code, with the timeout. Its errors become _EnvironmentError, but for UserError."""
        try:
            return await call_own(function, *args, timeout_s=self.kind.timeout_s, **named)
        except UserError:
            raise
        except Exception as error:
            name = getattr(function, "__name__", "it")
            raise _EnvironmentError(f"{self.kind.path}: {name}: {describe(error, self.kind.timeout_s)}") from error
