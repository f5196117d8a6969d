"""An engine that says what a test tells it to, where the protocol around it is the point."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sfumato.rollout.engines.base import Completion, GenerationRequest, Sampling


class ScriptedEngine:
    """Answers with texts of a script, token by token: it stops where a stop token or the limit comes first."""

    version = 3

    def __init__(self, tokenizer: Any, script: list[str] | Callable[[str], str]) -> None:
        """``script`` is the answers in order, or a function from the text before to the answer."""
        self.tokenizer, self.script = tokenizer, script
        self.requests: list[GenerationRequest] = []
        self.prompts: list[str] = []

    async def generate(self, request: GenerationRequest, sampling: Sampling) -> Completion:
        """The next answer of the script."""
        self.requests.append(request)
        self.prompts.append(self.tokenizer.decode(list(request.prompt_ids)))
        text = self.script(self.prompts[-1]) if callable(self.script) else self.script.pop(0)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        for place, token in enumerate(ids[: request.max_new_tokens]):
            if token in sampling.stop_token_ids:
                if not callable(self.script) and ids[place + 1 :]:  # what is left is said next
                    self.script.insert(0, self.tokenizer.decode(ids[place + 1 :]))
                return self._completion(ids[: place + 1], "stop")
        assert len(ids) >= request.max_new_tokens, f"the script ends without a stop token: {text!r}"
        return self._completion(ids[: request.max_new_tokens], "length")

    def _completion(self, ids: list[int], reason: str) -> Completion:
        return Completion(ids, [-0.5] * len(ids), [self.version] * len(ids), reason)
