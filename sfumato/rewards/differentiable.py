"""Rewards that have a gradient with respect to the pixels of a picture."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sfumato.rewards.base import Reward

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class DifferentiableReward(Reward):
    """Base of rewards that a policy can follow by their gradient: they define ``score_pixels`` besides ``score``.

    Both give the same value but for the rounding of pixels to 256 levels, which has no gradient.

    A subclass whose value depends on the prompt says so by ``reads_prompt``.
    """

    @property
    def reads_prompt(self) -> bool:
        """Whether the value depends on the prompt."""
        return False

    @abstractmethod
    def score_pixels(self, pixels: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """Scores pictures so that gradients flow to their pixels.

        Args:
            pixels: float32 ``[B, 3, H, W]`` from 0 to 1.
            prompts: B texts.

        Returns:
            float32 ``[B]``, on the device of ``pixels``.
        """


def score_differentiably(
    rewards: Sequence[DifferentiableReward],
    pixels: torch.Tensor,
    prompts: Sequence[str],
    control_words: Sequence[str] | None = None,
    gains: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The weighted sum of rewards, through which gradients flow.

    Args:
        rewards: those that are optimised.
        pixels: float32 ``[B, 3, H, W]`` from 0 to 1, of videos ``[B, F, 3, H, W]``: the mean over every
            ``frame_step``-th frame is scored.
        prompts: B texts.
        control_words: two texts that are put in front of each prompt; the value for the second is subtracted from that
            for the first (SRPO, arXiv 2509.06942, section 3.2).
        gains: float ``[B]``: the value for the first is multiplied by 1 + gain before; None is 0.

    Returns:
        float32 ``[B]``, and the values of each reward by label as it gave them, ``[B]``, detached.
    """
    total = pixels.new_zeros(len(pixels))
    values: dict[str, torch.Tensor] = {}
    for reward in rewards:
        if control_words is None:
            value = _score_frames(reward, pixels, prompts)
        else:
            wanted, unwanted = control_words
            value = _score_frames(reward, pixels, [f"{wanted} {prompt}" for prompt in prompts])
            if gains is not None:
                value = (1 + gains) * value
            value = value - _score_frames(reward, pixels, [f"{unwanted} {prompt}" for prompt in prompts])
        values[reward.label] = value.detach()
        if not isinstance(reward.normalise, str):  # a range that is mapped to 0 to 1
            low, high = reward.normalise
            value = (value - low) / (high - low)
        total = total + reward.weight * value
    return total, values


def _score_frames(reward: DifferentiableReward, pixels: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
    """Values of pictures, or the mean over the frames of videos that are looked at, ``[B]``."""
    if pixels.ndim == 4:
        return reward.score_pixels(pixels, prompts)
    frames = pixels[:, :: reward.frame_step]
    prompt_of_frame = [prompt for prompt in prompts for _ in range(frames.shape[1])]
    return reward.score_pixels(frames.flatten(0, 1), prompt_of_frame).view(frames.shape[:2]).mean(dim=1)
