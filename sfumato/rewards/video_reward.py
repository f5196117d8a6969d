"""VideoReward of VideoAlign: how people would rate a video's looks, its motion and its likeness to the prompt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from sfumato.errors import ConfigError, DataError
from sfumato.rewards.base import Sample
from sfumato.rewards.pretrained import ChatModelReward

if TYPE_CHECKING:
    import torch

    from sfumato.rewards.networks.video_reward import VideoRewardNetwork


@dataclass(frozen=True, kw_only=True)
class VideoReward(ChatModelReward):
    """Sum of the chosen dimensions of VideoReward, each standardised by the published mean and deviation.

    A Qwen2-VL-2B with a head that rates the video (Liu et al., 2025, https://arxiv.org/abs/2501.13918).
    """

    type: ClassVar[str] = "video_reward"
    modality: ClassVar[str] = "image"
    takes_video: ClassVar[bool] = True
    needs_video: ClassVar[bool] = True
    loader: ClassVar[str] = "sfumato.rewards.networks.video_reward:load_video_reward"

    frame_rate: float | None = None
    """Frames per second at which the videos are meant to be played; None takes what the model's family has, such as 16
    of Wan 2.1, which a reward server is not told."""
    dimensions: tuple[Literal["VQ", "MQ", "TA"], ...] = ("VQ", "MQ", "TA")
    """What is added up: visual quality VQ, motion quality MQ, text alignment TA."""
    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Type of the model's weights; the head's are float32."""
    batch_size: int = 1
    """Videos in one forward pass."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.frame_rate is not None and not (math.isfinite(self.frame_rate) and self.frame_rate > 0):
            raise ConfigError(
                f"frame_rate of reward {self.label!r} must be a positive number of frames per second, not "
                f"{self.frame_rate}"
            )
        if not self.dimensions or len(set(self.dimensions)) < len(self.dimensions):
            raise ConfigError(
                f"dimensions of reward {self.label!r} must be one or more of VQ, MQ and TA, none of them twice, not "
                f"{list(self.dimensions)}"
            )

    def score_batch(self, network: VideoRewardNetwork, samples: list[Sample]) -> torch.Tensor:
        """The sum of the dimensions for each video, [B]."""
        from sfumato.rewards.networks.video_reward import DIMENSIONS

        for sample in samples:  # those of a reward server come without check_row
            self.check_row(sample.prompt, sample.metadata)
            if len(sample.frames) < 2:
                raise DataError(
                    f"reward {self.label!r} scores videos, but the sample of prompt {sample.prompt!r} is a picture"
                )
        scores = network(
            [sample.frames for sample in samples],
            [self._frame_rate_of(sample) for sample in samples],
            [sample.prompt for sample in samples],
        )
        return scores[:, [DIMENSIONS.index(dimension) for dimension in self.dimensions]].sum(dim=1)

    def _frame_rate_of(self, sample: Sample) -> float:
        """Raises DataError where neither the reward nor the sample says it."""
        frame_rate = self.frame_rate or sample.frame_rate
        if not frame_rate:
            raise DataError(
                f"reward {self.label!r} is not told the frames per second of the videos: set its frame_rate"
            )
        return frame_rate
