"""Answers that are under way between two iterations, on their way from process to process and in checkpoints."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sfumato.errors import DataError
from sfumato.rollout.engines.base import Completion
from sfumato.rollout.tokens import FinishReason

_ARRAYS = {"token_ids": np.int32, "log_probs": np.float32, "versions": np.int32}


@dataclass
class Answer:
    """What has been drawn of an answer. Its pickle takes 12 bytes a token."""

    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    """None while it is under way."""

    def take(self, completion: Completion) -> None:
        """Appends what was drawn."""
        self.token_ids += completion.token_ids
        self.log_probs += completion.log_probs
        self.versions += completion.versions

    def cut(self, length: int) -> None:
        """Forgets what was drawn beyond so many tokens, and that it ended there."""
        if len(self.token_ids) > length:
            del self.token_ids[length:], self.log_probs[length:], self.versions[length:]
            self.finish_reason = None

    def __getstate__(self) -> dict[str, Any]:
        arrays = {name: np.array(getattr(self, name), dtype) for name, dtype in _ARRAYS.items()}
        return {**arrays, "finish_reason": self.finish_reason}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, **{name: state[name].tolist() for name in _ARRAYS})


@dataclass
class Group:
    """The answers to a prompt, some of which may have ended."""

    number: int
    """Groups that were begun before it in the run."""
    prompt_id: int
    answers: list[Answer]

    @property
    def has_ended(self) -> bool:
        """Whether all answers have."""
        return all(answer.finish_reason is not None for answer in self.answers)

    @property
    def versions(self) -> list[int]:
        """Of all tokens."""
        return [version for answer in self.answers for version in answer.versions]


@dataclass
class Pool:
    """The groups that are under way between two iterations, of all ranks."""

    iteration: int = 0
    """That goes on from it."""
    begun: int = 0
    """Groups that the run has begun."""
    groups: list[Group] = field(default_factory=list)
    """Those that go on, oldest first."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the iteration that left them."""


class UnderWay:
    """The pool of a run's finished iterations. A checkpoint keeps it, whatever the number of ranks."""

    def __init__(self) -> None:
        self.pool = Pool()

    def state(self) -> dict[str, Any]:
        """See ``Resumable``: 16 letters a token."""
        groups = [
            {"number": group.number, "prompt_id": group.prompt_id, "answers": [_packed(one) for one in group.answers]}
            for group in self.pool.groups
        ]
        return {"under_way": {"iteration": self.pool.iteration, "begun": self.pool.begun, "groups": groups}}

    def restore(self, state: dict[str, Any]) -> None:
        """See ``Resumable``."""
        if "under_way" not in state:
            raise DataError(
                "the checkpoint is of a run without rollout.over_sampling_batch_size, and does not say which groups "
                "were under way: leave it out, or start a new run from the exported weights (model.model_path)"
            )
        try:
            found = state["under_way"]
            groups = [
                Group(int(each["number"]), int(each["prompt_id"]), [_unpacked(one) for one in each["answers"]])
                for each in found["groups"]
            ]
            self.pool = Pool(int(found["iteration"]), int(found["begun"]), groups)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the partial rollouts of the checkpoint do not hold together: {error}") from error


def _packed(answer: Answer) -> dict[str, Any]:
    found: dict[str, Any] = {"finish_reason": answer.finish_reason}
    for name, dtype in _ARRAYS.items():
        found[name] = base64.b64encode(np.array(getattr(answer, name), dtype).tobytes()).decode("ascii")
    return found


def _unpacked(state: dict[str, Any]) -> Answer:
    values = {name: np.frombuffer(base64.b64decode(state[name]), dtype).tolist() for name, dtype in _ARRAYS.items()}
    return Answer(**values, finish_reason=state["finish_reason"])
