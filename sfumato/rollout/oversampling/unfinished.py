"""Answers that are unfinished when an iteration ends: as they go from process to process, and in checkpoints."""

from __future__ import annotations

import base64
from dataclasses import dataclass, field

import numpy as np

from sfumato.config.open_mappings import JsonObject
from sfumato.errors import DataError
from sfumato.rollout.engines.base import Completion
from sfumato.rollout.text.tokens import GrowingSequence

_ARRAYS = {"token_ids": np.int32, "log_probs": np.float32, "versions": np.int32}


@dataclass
class Group:
    """The answers to a prompt, some of which may have ended."""

    number: int
    """How many groups of the run were begun before it."""
    prompt_id: int
    answers: list[GrowingSequence]
    """The tokens of each without the prompt."""

    @property
    def has_ended(self) -> bool:
        """Whether all answers have."""
        return all(answer.finish_reason is not None for answer in self.answers)

    @property
    def versions(self) -> list[int]:
        """The policy's version for each token of all answers."""
        return [version for answer in self.answers for version in answer.versions]


@dataclass
class UnfinishedGroups:
    """The unfinished groups of all ranks between two iterations."""

    iteration: int = 0
    """The iteration that goes on from them."""
    begun: int = 0
    """How many groups the run has begun, which is the number of the next one."""
    groups: list[Group] = field(default_factory=list)
    """Groups that go on, oldest first."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Of the iteration that left them."""


class UnfinishedRollouts:
    """The groups that the last finished iteration has left, as a part of checkpoints (``Resumable``).

    All ranks have all groups, so a run can be resumed with another number of ranks.
    """

    def __init__(self) -> None:
        self.groups = UnfinishedGroups()

    def state(self) -> dict[str, object]:
        """See ``Resumable``. A token takes 16 characters: its id, log-prob and version in base64, of 12 bytes."""
        groups = [
            {
                "number": group.number,
                "prompt_id": group.prompt_id,
                "answers": [_encode_answer(answer) for answer in group.answers],
            }
            for group in self.groups.groups
        ]
        return {"under_way": {"iteration": self.groups.iteration, "begun": self.groups.begun, "groups": groups}}

    def restore(self, state: JsonObject) -> None:
        """See ``Resumable``."""
        if "under_way" not in state:
            raise DataError(
                "the checkpoint is of a run without rollout.over_sampling_batch_size, and does not say which groups "
                "were under way: leave it out, or start a new run from the exported weights (model.model_path)"
            )
        try:
            under_way = state["under_way"]
            groups = [
                Group(
                    int(group["number"]),
                    int(group["prompt_id"]),
                    [_decode_answer(answer) for answer in group["answers"]],
                )
                for group in under_way["groups"]
            ]
            self.groups = UnfinishedGroups(int(under_way["iteration"]), int(under_way["begun"]), groups)
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"the partial rollouts of the checkpoint do not hold together: {error}") from error


def _encode_answer(answer: GrowingSequence) -> dict[str, object]:
    state: dict[str, object] = {"finish_reason": answer.finish_reason}
    for name, dtype in _ARRAYS.items():
        state[name] = base64.b64encode(np.array(getattr(answer, name), dtype).tobytes()).decode("ascii")
    return state


def _decode_answer(state: JsonObject) -> GrowingSequence:
    """The answer of ``_encode_answer``; all of its tokens were drawn, so which ones were is not kept."""
    values = {name: np.frombuffer(base64.b64decode(state[name]), dtype).tolist() for name, dtype in _ARRAYS.items()}
    answer = GrowingSequence(finish_reason=state["finish_reason"])
    answer.append_drawn(Completion(**values, finish_reason=answer.finish_reason or "abort"))
    return answer
