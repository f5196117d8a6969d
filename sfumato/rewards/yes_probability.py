"""How probable is the answer Yes? From the log-probabilities of a vision-language model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from sfumato.errors import ConfigError
from sfumato.rewards.base import Sample
from sfumato.rewards.http.chat_completions import Reply
from sfumato.rewards.judge import Judge
from sfumato.rewards.judging.replies import UnreadableError

_NUM_CANDIDATES = 20  # as many as OpenAI's API and vLLM give
_AROUND_A_WORD = " \t\n▁Ġ\"'*_.,!"


@dataclass(frozen=True, kw_only=True)
class YesProbability(Judge):
    """Probability that the answer begins with Yes and not with No, from 0 to 1."""

    type: ClassVar[str] = "yes_probability"
    options: ClassVar[Mapping[str, Any]] = {"logprobs": True, "top_logprobs": _NUM_CANDIDATES}

    max_tokens: int = 1
    """Length of a reply, of which only the first token counts."""

    def check_reply(self, reply: Reply) -> None:
        """Raises ConfigError when there are no log-probabilities."""
        if not reply.first_token:
            raise ConfigError(
                f"reward {self.label!r}: the server of model {self.model!r} gives no top_logprobs: use one that does, "
                "such as vLLM"
            )

    def read(self, reply: Reply, *samples: Sample) -> float:
        """``P(Yes) / (P(Yes) + P(No))``, each the sum over the ways to write it among the 20 likeliest tokens."""
        if not reply.first_token:
            raise UnreadableError("no top_logprobs")
        words = [(token.strip(_AROUND_A_WORD).casefold(), logprob) for token, logprob in reply.first_token]
        yes, no = (math.fsum(math.exp(p) for word, p in words if word == wanted) for wanted in ("yes", "no"))
        if yes + no == 0:
            raise UnreadableError(f"neither Yes nor No among the {len(words)} likeliest first tokens")
        return yes / (yes + no)
