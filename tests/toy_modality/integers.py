"""What a modality brings: configuration, model, drawing, replay, reward. B samples, T positions, N = 10 integers."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from safetensors.torch import save_file
from torch import nn

from sfumato.algorithms.noise import keyed_uniform
from sfumato.algorithms.rows import by_row
from sfumato.config.base import Section, Variant
from sfumato.config.rl import AlgorithmConfig, RLConfig
from sfumato.data.images.prompts import Prompt
from sfumato.parallel.parallelize import parallelize
from sfumato.parallel.plan import ParallelPlan
from sfumato.rewards.base import Reward, Sample
from sfumato.rollout.batch import Rollout

INTEGERS = 10


class IntegerModelConfig(Section):
    width: int = 16
    length: int = 6


class IntegerAlgorithmConfig(AlgorithmConfig):
    objective: Annotated[Any, Variant("sfumato.algorithms.objectives")] = "clipped_ratio"
    kl_coef: float = 0.0


class IntegerRLConfig(RLConfig):
    model: IntegerModelConfig = IntegerModelConfig()
    algorithm: IntegerAlgorithmConfig


@dataclass(frozen=True, kw_only=True)
class Sequences(Rollout):
    integers: torch.Tensor = by_row()
    """int64 ``[B, T + 1]``: the prompt's integer, and those that were drawn."""
    log_probs: torch.Tensor = by_row()
    """float32 ``[B, T]``: the log-probabilities of what was drawn."""

    @property
    def num_rows(self) -> list[int]:
        return [self.log_probs.shape[1]] * len(self)


class IntegerModel:
    """Draws each integer by the one before it."""

    def __init__(self, config: IntegerModelConfig, device: torch.device, seed: int) -> None:
        torch.manual_seed(seed)
        layers = nn.Embedding(INTEGERS, config.width), nn.Tanh(), nn.Linear(config.width, INTEGERS)
        self.trained: nn.Module = nn.Sequential(*layers).to(device)

    def parallelize(self, mesh: Any, config: Any) -> None:
        self.trained = parallelize(self.trained, mesh, config, ParallelPlan(blocks=("Linear",)))

    def frozen_copy(self) -> IntegerModel:
        frozen = copy.copy(self)
        frozen.trained = copy.deepcopy(self.trained).requires_grad_(False)
        return frozen

    def save_export(self, folder: Path, weights: dict[str, torch.Tensor], merge: bool = False) -> None:
        save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")

    def log_probs(self, before: torch.Tensor) -> torch.Tensor:
        """Log-probabilities of every integer that may come next: int64 ``[...]`` to float32 ``[..., N]``."""
        return self.trained(before).log_softmax(dim=-1)


@torch.no_grad()
def draw(model: IntegerModel, prompts: list[Prompt], length: int, *keys: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences ``[B, T + 1]`` and log-probabilities ``[B, T]``; keys: seed, iteration and B ids of the samples."""
    drawn, log_probs = [torch.tensor([int(prompt.text) for prompt in prompts])], []
    for position in range(length):
        of_all, (seed, iteration, ids) = model.log_probs(drawn[-1]), keys
        uniform = keyed_uniform(seed, f"integer {position}", iteration, ids)[:, None]
        drawn.append((of_all.double().exp().cumsum(dim=1) < uniform).sum(dim=1).clamp(max=INTEGERS - 1))
        log_probs.append(of_all.gather(1, drawn[-1][:, None])[:, 0])
    return torch.stack(drawn, dim=1), torch.stack(log_probs, dim=1)


def replay(model: IntegerModel, sequences: Sequences) -> torch.Tensor:
    """Log-probabilities now, with gradients: float32 ``[R]`` of R = B x T integers, sample by sample."""
    of_all = model.log_probs(sequences.integers[:, :-1])
    return of_all.gather(2, sequences.integers[:, 1:, None]).flatten()


@dataclass(frozen=True, kw_only=True)
class Ascending(Reward):
    """The share of integers that are one more than the integer before; after 9 comes 0."""

    type: ClassVar[str] = "ascending"

    def score(self, samples: list[Sample]) -> list[float]:
        whole = [[int(word) for word in f"{sample.prompt} {sample.text}".split()] for sample in samples]
        return [sum(b == (a + 1) % INTEGERS for a, b in pairwise(numbers)) / (len(numbers) - 1) for numbers in whole]
