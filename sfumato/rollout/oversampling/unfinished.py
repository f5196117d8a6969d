"""Answers that are under way between two iterations, on their way from process to process and in checkpoints."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from sfumato.errors import DataError
from sfumato.rollout.engines.base import Completion
from sfumato.rollout.text.growing_sequence import GrowingSequence

_ARRAYS = {"token_ids": np.int32, "log_probs": np.float32, "versions": np.int32}


@dataclass
class Group:
    """The answers to a prompt, some of which may have ended."""

    number: int
    """Groups that were begun before it in the run."""
    prompt_id: int
    answers: list[GrowingSequence]
    """Without their prompt."""

    @property
    def has_ended(self) -> bool:
        """Whether all answers have."""
        return all(answer.finish_reason is not None for answer in self.answers)

    @property
    def versions(self) -> list[int]:
        """Of all tokens."""
        return [version for answer in self.answers for version in answer.versions]


@dataclass
class UnfinishedGroups:
    """The groups that are under way between two iterations, of all ranks."""

    iteration: int = 0
    """That goes on from it."""
    begun: int = 0
    """Groups that the run has begun."""
    groups: list[Group] = field(default_factory=list)
    """Those that go on, oldest first."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the iteration that left them."""


class UnfinishedRollouts:
    """The unfinished groups of a run's finished iterations. A checkpoint keeps it, whatever the number of ranks."""

    def __init__(self) -> None:
        self.groups = UnfinishedGroups()

    def state(self) -> dict[str, Any]:
        """See ``Resumable``: 16 letters a token."""
        groups = [
            {
                "number": group.number,
                "prompt_id": group.prompt_id,
                "answers": [_encode_answer(one) for one in group.answers],
            }
            for group in self.groups.groups
        ]
        return {"under_way": {"iteration": self.groups.iteration, "begun": self.groups.begun, "groups": groups}}

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
                Group(int(each["number"]), int(each["prompt_id"]), [_decode_answer(one) for one in each["answers"]])
                for each in found["groups"]
            ]
            self.groups = UnfinishedGroups(int(found["iteration"]), int(found["begun"]), groups)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the partial rollouts of the checkpoint do not hold together: {error}") from error


def _encode_answer(answer: GrowingSequence) -> dict[str, Any]:
    found: dict[str, Any] = {"finish_reason": answer.finish_reason}
    for name, dtype in _ARRAYS.items():
        found[name] = base64.b64encode(np.array(getattr(answer, name), dtype).tobytes()).decode("ascii")
    return found


def _decode_answer(state: dict[str, Any]) -> GrowingSequence:
    values = {name: np.frombuffer(base64.b64decode(state[name]), dtype).tolist() for name, dtype in _ARRAYS.items()}
    answer = GrowingSequence(finish_reason=state["finish_reason"])
    answer.append_drawn(Completion(**values, finish_reason=answer.finish_reason or "abort"))
    return answer
