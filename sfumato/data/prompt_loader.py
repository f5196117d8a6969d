"""Which prompts an iteration of RL samples groups for, in any modality: a function of (seed, iteration)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from sfumato.data.epoch_order import EpochOrder, refuse_repetition
from sfumato.errors import DataError


class AnyPrompt(Protocol):
    """A prompt of any modality."""

    @property
    def text(self) -> str: ...

    @property
    def metadata(self) -> dict[str, object]: ...

    @property
    def where(self) -> str: ...


def check_prompts(
    prompts: Sequence[AnyPrompt], checks: Sequence[Callable[[str, Mapping[str, object]], object]]
) -> None:
    """Runs the rewards' checks of a row on every prompt, before anything is sampled.

    Args:
        prompts: to check.
        checks: each is given a prompt's text and metadata, and raises DataError when the reward cannot use them.

    Raises:
        DataError: names file and row.
    """
    for prompt in prompts:
        for check in checks:
            try:
                check(prompt.text, copy.deepcopy(prompt.metadata))  # a reward's check may change what it is given
            except DataError as error:
                raise DataError(f"{prompt.where}: {error}") from error


class PromptLoader:
    """The prompts of each iteration, in an order that is shuffled anew each epoch; each prompt is sampled n times."""

    def __init__(self, count: int, num_prompts: int, group_size: int, seed: int) -> None:
        """Plans the groups.

        Args:
            count: how many prompts there are.
            num_prompts: groups of one iteration.
            group_size: samples of a group.
            seed: of the order.

        Raises:
            DataError: when an iteration takes each prompt over ``MOST_TIMES`` times.
        """
        refuse_repetition("rollout.num_prompts", num_prompts, count)
        self.num_prompts = num_prompts
        self.group_size = group_size
        self._order = EpochOrder(count, seed, "prompts")

    def groups(self, iteration: int) -> list[int]:
        """Indices of the prompts of one iteration; the i-th is that of group i."""
        first = iteration * self.num_prompts
        return [self._order[position] for position in range(first, first + self.num_prompts)]
