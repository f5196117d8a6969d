"""Questions to the models of a playground, which programs and pages ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from sfumato.errors import ConfigError

NUMBERS = ("seed", "steps", "guidance", "max_new_tokens", "temperature")
NAMES = ("prompt", "messages", "checkpoint", "with_base", *NUMBERS)
"""What a question may say."""
MOST_STEPS = 1000
MOST_GUIDANCE = 100.0
MOST_TOKENS = 16_384
MOST_TEMPERATURE = 100.0
LONGEST_PROMPT = 20_000
"""Characters."""
MOST_TURNS = 64
"""Messages of a conversation."""

Message = dict[str, str]
Choice = Literal["newest", "all", "base"]


@dataclass(frozen=True)
class Question:
    """What is asked of one model or several."""

    prompt: str | tuple[Message, ...]
    """A text; of a language model also a conversation that ends with the user."""
    choice: Choice | int = "newest"
    """The newest weights, those after that many steps, those of the run's start, or all."""
    with_base: bool = False
    """Whether the model that the run started from answers, too."""
    seed: int | None = None
    steps: int | None = None
    guidance: float | None = None
    max_new_tokens: int | None = None
    temperature: float | None = None

    @property
    def text(self) -> str:
        """The prompt, or the last message."""
        return self.prompt if isinstance(self.prompt, str) else self.prompt[-1]["content"]

    def __post_init__(self) -> None:
        """Raises ConfigError for a value out of its range."""
        for name, value, most in (
            ("seed", self.seed, 2**62),
            ("steps", self.steps, MOST_STEPS),
            ("guidance", self.guidance, MOST_GUIDANCE),
            ("max_new_tokens", self.max_new_tokens, MOST_TOKENS),
            ("temperature", self.temperature, MOST_TEMPERATURE),
        ):
            least = 0 if name in ("seed", "temperature") else 1
            if value is not None and not least <= value <= most:
                raise ConfigError(f"{name} must be from {least} to {most:g}, not {value}")
        if not self.text.strip() or len(self.text) > LONGEST_PROMPT:
            raise ConfigError(f"a prompt must have 1 to {LONGEST_PROMPT:,} characters")

    def check_fits(self, draws_pictures: bool) -> None:
        """Raises ConfigError for what a model of this kind does not take, or what changes nothing."""
        if draws_pictures and not isinstance(self.prompt, str):
            raise ConfigError("a model that draws takes one text as its prompt, and no conversation")
        ignored = ("max_new_tokens", "temperature") if draws_pictures else ("steps", "guidance")
        for name in ignored:
            if getattr(self, name) is not None:
                kind = "models that draw pictures" if draws_pictures else "language models"
                raise ConfigError(f"{name} has no effect on {kind}: leave it out")


def parse_question(value: Mapping[str, object]) -> Question:
    """A question of a program or a page. Raises ConfigError for anything else."""
    if not set(value) <= set(NAMES):
        raise ConfigError(f"a question is an object with no other names than {', '.join(NAMES)}")
    prompt = value.get("prompt")
    messages = value.get("messages")
    choice = value.get("checkpoint")
    if (prompt is None) == (messages is None) or not isinstance(prompt, str | None):
        raise ConfigError("a question has either prompt, a text, or messages")
    if messages is not None and not isinstance(messages, list):
        raise ConfigError("messages must be a list")
    is_step = isinstance(choice, int) and not isinstance(choice, bool)
    if not is_step and choice not in (None, "newest", "all", "base"):
        raise ConfigError('checkpoint must be a step, "newest", "all" or "base"')
    with_base = value.get("with_base", False)
    if not isinstance(with_base, bool):
        raise ConfigError("with_base must be true or false")
    numbers = {name: value[name] for name in NUMBERS if value.get(name) is not None}
    for name, number in numbers.items():
        kinds = (int,) if name in ("seed", "steps", "max_new_tokens") else (int, float)
        if isinstance(number, bool) or not isinstance(number, kinds):
            raise ConfigError(f"{name} must be a {'whole ' if kinds == (int,) else ''}number")
    asked = prompt if messages is None else parse_messages(messages)
    return Question(asked, "newest" if choice is None else choice, with_base, **numbers)  # pyright: ignore[reportArgumentType]


def parse_messages(value: Sequence[object]) -> tuple[Message, ...]:
    """A conversation of strangers. Raises ConfigError for anything but texts of user, assistant and system."""
    if not 0 < len(value) <= MOST_TURNS:
        raise ConfigError(f"a conversation has 1 to {MOST_TURNS} messages")
    messages: list[Message] = []
    for message in value:
        role = message.get("role") if isinstance(message, dict) else None
        content = message.get("content") if isinstance(message, dict) else None
        if role not in ("system", "user", "assistant") or not isinstance(content, str) or len(content) > LONGEST_PROMPT:
            raise ConfigError(
                "a message must be {role: user, assistant or system, content: a text of at most "
                f"{LONGEST_PROMPT:,} characters}}"
            )
        messages.append({"role": role, "content": content})
    if messages[-1]["role"] != "user":
        raise ConfigError("a conversation must end with a message of the user")
    return tuple(messages)
