"""What rewards that run a pretrained model have in common: where it lies, where it runs, and in which batches."""

from __future__ import annotations

import re
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, Literal

from sfumato.config.paths import FilePath
from sfumato.errors import ConfigError
from sfumato.rewards.base import Reward, Sample

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


@dataclass(frozen=True, kw_only=True)
class PretrainedReward(Reward):
    """Base of rewards with a model from a local folder, which is loaded once per process and setting.

    A subclass defines ``load`` and ``score_batch``. Raises ConfigError when ``device`` or ``batch_size`` is wrong.
    """

    model_path: FilePath
    """Folder of the model; docs/rewards.md says for each reward what must lie in it."""
    device: str = "auto"
    """Where the model runs: cpu, cuda, cuda:1 and so on; auto is this process's GPU, else the CPU."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of the model's weights."""
    batch_size: int = 16
    """Samples in one forward pass."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device of reward {self.label!r} must be auto, cpu, cuda or cuda:N, not {self.device!r}")
        if self.batch_size < 1:
            raise ConfigError(f"batch_size of reward {self.label!r} must be at least 1, not {self.batch_size}")

    @staticmethod
    @abstractmethod
    def load(folder: str, device: str, dtype: str) -> Any:
        """The network, with a ``lock``, one per process and arguments. Raises ConfigError for a wrong folder."""

    @abstractmethod
    def score_batch(self, network: Any, samples: list[Sample]) -> Any:
        """Scores of at most ``batch_size`` samples, a float tensor [B]; no other thread uses the network meanwhile."""

    def prepare(self) -> None:
        """Loads the model. Raises ConfigError that names what the folder lacks."""
        self._network()

    def score(self, samples: list[Sample]) -> list[float]:
        """The model's score of each sample."""
        import torch

        network = self._network()
        values: list[float] = []
        for start in range(0, len(samples), self.batch_size):
            with network.lock, torch.inference_mode():
                values += self.score_batch(network, samples[start : start + self.batch_size]).tolist()
        return values

    def _network(self) -> Any:
        try:
            return self.load(self.model_path, self.device, self.dtype)
        except ConfigError as error:
            raise ConfigError(f"reward {self.label!r}: {error}") from error
