"""Which prompts an iteration of RL samples groups for, in any modality: a function of (seed, iteration)."""

from __future__ import annotations

from sfumato.data.epoch_order import EpochOrder, refuse_repetition


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
