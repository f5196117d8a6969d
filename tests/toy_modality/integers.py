"""What a modality brings: its configuration, model, drawing, replay, and a reward. Here integers from 0 to 9.

Shapes: B samples, T positions, N = 10 integers.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from safetensors.torch import save_file
from torch import nn

from sfumato.algorithms.noise import keyed_uniform
from sfumato.config.base import Section, Variant
from sfumato.config.rl import AlgorithmConfig, RLConfig
from sfumato.parallel.parallelize import parallelize
from sfumato.parallel.plan import ParallelPlan
from sfumato.rewards.base import Reward, Sample
from sfumato.rollout.batch import Rollout, by_sample

INTEGERS = 10


class IntegerModelConfig(Section):
    """The network."""

    width: int = Field(16, ge=1)
    """Width of its one hidden layer."""
    length: int = Field(6, ge=2)
    """Integers of a sequence."""


class IntegerAlgorithmConfig(AlgorithmConfig):
    """The RL algorithm as parts."""

    objective: Annotated[Any, Variant("sfumato.algorithms.objectives")] = "clipped_ratio"
    """Policy loss on the integers that were drawn."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the distance from the policy before training."""


class IntegerRLConfig(RLConfig):
    """Reinforcement learning of a network that draws integers."""

    model: IntegerModelConfig = IntegerModelConfig()
    """Model."""
    algorithm: IntegerAlgorithmConfig
    """Algorithm."""


@dataclass(frozen=True, kw_only=True)
class Sequences(Rollout):
    """B sequences that were drawn."""

    integers: torch.Tensor = by_sample()
    """int64 ``[B, T + 1]``: the prompt's integer, and those that were drawn."""
    log_probs: torch.Tensor = by_sample()
    """float32 ``[B, T]``: of what was drawn, then."""

    @property
    def rows_per_sample(self) -> int:
        """T."""
        return self.log_probs.shape[1]


class IntegerModel:
    """Draws each integer by the one before it."""

    def __init__(self, config: IntegerModelConfig, device: torch.device, seed: int) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            layers = nn.Embedding(INTEGERS, config.width), nn.Tanh(), nn.Linear(config.width, INTEGERS)
            self.trained: nn.Module = nn.Sequential(*layers).to(device)

    def parallelize(self, mesh: Any, config: Any) -> None:
        self.trained = parallelize(self.trained, mesh, config, ParallelPlan(blocks=("Linear",)))

    def frozen_copy(self) -> IntegerModel:
        frozen = copy.copy(self)
        frozen.trained = copy.deepcopy(self.trained).requires_grad_(False)
        return frozen

    def without_adapter(self) -> AbstractContextManager[None]:
        return nullcontext()  # it has none

    def save_export(self, folder: Path, weights: dict[str, torch.Tensor], merge: bool = False) -> None:
        save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")

    def log_probs(self, before: torch.Tensor) -> torch.Tensor:
        """Of every integer that may come next: int64 ``[...]`` to float32 ``[..., N]``."""
        return self.trained(before).log_softmax(dim=-1)


@torch.no_grad()
def draw(
    model: IntegerModel, first: list[int], length: int, seed: int, iteration: int, ids: list[int]
) -> tuple[torch.Tensor, torch.Tensor]:
    """B sequences of T integers that begin after ``first``, and their log-probabilities. Noise is keyed by sample."""
    drawn, log_probs = [torch.tensor(first)], []
    for position in range(length):
        of_all = model.log_probs(drawn[-1])
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
    """The share of integers that are one more than the integer before, after 9 comes 0."""

    type: ClassVar[str] = "ascending"

    def score(self, samples: list[Sample]) -> list[float]:
        """Of each sequence."""
        found = []
        for sample in samples:
            integers = [int(word) for word in f"{sample.prompt} {sample.text}".split()]
            steps = [after == (before + 1) % INTEGERS for before, after in zip(integers, integers[1:], strict=False)]
            found.append(sum(steps) / len(steps))
        return found
