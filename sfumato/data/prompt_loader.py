"""Which groups an iteration of RL samples, of any modality: a function of (seed, iteration)."""

from __future__ import annotations

from sfumato.data.epoch_order import EpochOrder, refuse_repetition


class PromptLoader:
    """Groups of an iteration: prompts in an order that is shuffled anew each epoch, each sampled n times."""

    def __init__(self, count: int, num_prompts: int, group_size: int, seed: int) -> None:
        """Args are how many prompts there are, the groups of one iteration, the samples of a group, and the order's
        seed."""
        refuse_repetition("rollout.num_prompts", num_prompts, count)
        self.num_prompts = num_prompts
        self.group_size = group_size
        self._order = EpochOrder(count, seed, "prompts")

    def groups(self, iteration: int) -> list[int]:
        """The prompts of one iteration by number; the i-th is group i."""
        first = iteration * self.num_prompts
        return [self._order[position] for position in range(first, first + self.num_prompts)]
