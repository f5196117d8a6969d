"""States of the roles of an RL run: the actor's policy with its optimiser, and the sampler's policy.

A task builds both from a model of its modality. With ``runtime.offload_idle`` each call brings what it needs onto the
device, and what sampling does not need waits in CPU memory (``RoleMemory``).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any, Generic

import torch
from torch import nn

from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.export import export_model
from sfumato.checkpoint.state import TrainState
from sfumato.config.rl import RLConfig
from sfumato.models.policies import Model, Policies
from sfumato.optim.ema import averaged_weights
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import all_parameters
from sfumato.runtime.decisions import Decisions
from sfumato.runtime.memory import OPTIMIZER, PARAMETERS, RoleMemory

EMA = "ema_weights"
"""Name of the memory part with the averaged weights that are evaluated; other policies' parts have their names."""


@dataclass
class Sampler(Generic[Model]):
    """State of a sampler of its own: draws samples with weights that it is sent."""

    model: Model
    mesh: Mesh
    prompts: Sequence[Any]
    """Training prompts, whose rows requests name."""
    offload_idle: InitVar[bool] = False
    """Whether weights wait in CPU memory while nothing is sampled."""
    engine: Any = None
    """What draws, where the model does not by itself."""
    version: int = 0
    """Number of iterations that the weights have been updated."""
    sync: Any = None
    """The receiver of weights, once there is one."""
    eval_prompts: Sequence[Any] = ()
    """Held-out prompts, where it draws evaluations, too."""

    def __post_init__(self, offload_idle: bool) -> None:
        self._takes_turns = offload_idle  # whether actor and sampler use one device in turns
        has_weights = offload_idle and self.model is not None
        self.memory = RoleMemory(self.model.trained, device=self.mesh.device) if has_weights else None
        self.offload()

    @contextmanager
    def policy(self) -> Iterator[Model]:
        """The model that samples, inside the block."""
        self.onload()
        yield self.model

    evaluated = policy
    """The model that is evaluated, inside the block: the sampler's policy, if it draws evaluations."""

    @property
    def updates(self) -> int:
        """Number of iterations that the weights have been updated."""
        return self.version

    @property
    def received_module(self) -> nn.Module:
        """The module whose weights are replaced by those that are sent."""
        self.onload()
        return self.model.trained

    def onload(self) -> None:
        """Brings the weights onto the device."""
        if self.memory is not None:
            self.memory.onload(PARAMETERS)
        if self._takes_turns and self.engine is not None:
            self.engine.onload()

    def offload(self) -> None:
        """Frees the device for another role."""
        if self._takes_turns and self.engine is not None:
            self.engine.offload()
        if self.memory is not None:
            self.memory.offload(PARAMETERS)


@dataclass
class Actor(Generic[Model]):
    """State of the actor: the policy and what updates it. It also samples, unless there is a sampler of its own."""

    model: Model
    mesh: Mesh
    prompts: Sequence[Any]
    """Training prompts, whose rows requests name."""
    eval_prompts: Sequence[Any]
    """Held-out prompts."""
    policies: Policies[Model]
    state: TrainState
    checkpointer: Checkpointer
    offload_idle: InitVar[bool] = False
    """Whether what a call does not need waits in CPU memory."""
    engine: Any = None
    """What draws, where the model does not by itself."""
    critic: Any = None
    """A model with an optimiser of its own that predicts returns, where the advantages need one."""
    dumps: Any = None
    """What keeps rollouts in files, where the task can."""
    sync: Any = None
    """The sender of weights, once there is one."""
    decisions: Decisions | None = None
    """What the last update made of decisions."""

    def __post_init__(self, offload_idle: bool) -> None:
        self.memory = build_memory(self) if offload_idle else None
        if offload_idle:
            self.checkpointer.before_save = self.onload_all

    @contextmanager
    def policy(self) -> Iterator[Model]:
        """The model that samples, inside the block."""
        self._keep_only(self.policies.sample_with)
        with self.policies.sampling() as model:
            yield model

    @contextmanager
    def evaluated(self) -> Iterator[Model]:
        """The model that is evaluated, inside the block: with the averaged weights, if the run has some."""
        self._keep_only(EMA)
        with averaged_weights(self.state.ema):
            yield self.model

    @property
    def updates(self) -> int:
        """Iterations that the policy has learned from."""
        return self.state.step

    @contextmanager
    def sent_weights(self, version: int) -> Iterator[nn.Module]:
        """The module whose weights are sent as ``version``, inside the block.

        They are the current ones or, for an earlier version, those before the last update.
        """
        self._keep_only(self.policies.sample_with, "previous")
        with self.policies.sampling(previous=version < self.state.step) as model:
            yield model.trained

    def rescore(self, module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """Log-probs of fixed tokens ``[N, T]`` by the policy, which has the weights that are sent: ``[N, T - 1]``."""
        del module
        return self.engine.rescore(self.model, tokens)

    def rescore_rounded(self, module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        """As ``rescore``, off by what rounding does to the model."""
        del module
        return self.engine.rescore_rounded(self.model, tokens)

    def unfinished_groups(self, _nothing: object = None) -> Any:
        """Groups that the last iteration left unfinished, which the next one goes on from."""
        return self.engine.unfinished.groups

    def begin_update(self) -> None:
        """Call it before the forward passes of an update."""
        self.onload()
        self.policies.snapshot_previous()

    def step(self) -> None:
        """Takes one step of the optimiser, and updates the averages that follow the policy."""
        if self.memory is not None:
            self.memory.before_step()
        self.state.optimizer.step()
        self.state.optimizer.zero_grad()
        if self.memory is not None:
            self.memory.offload(OPTIMIZER)
        self.policies.policy_changed()
        if self.state.ema is not None:
            self.state.ema.update()

    def end_update(self, step: int) -> None:
        """Call it after the optimiser steps of an iteration; ``step`` iterations are finished then."""
        self.policies.update_averages()
        # torch warns about a schedule that moves before the first optimiser step, which an iteration without anything
        # to learn from does not take.
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Detected call of `lr_scheduler.step\\(\\)` before", UserWarning)
            self.state.schedule.step()
        self.state.step = step

    def onload(self) -> None:
        """Brings everything but the optimiser's state onto the device."""
        if self.memory is not None:
            self.memory.before_update()

    def offload(self) -> None:
        """Frees the device for another role."""
        if self.memory is not None:
            self.memory.before_generation(sampled_here=False)

    def resume(self) -> int:
        """Loads the checkpoint that the configuration asks for. Returns the number of finished iterations."""
        self.checkpointer.resume(self.state)
        self.policies.begin()
        return self.state.step

    def save(self) -> None:
        """Writes a checkpoint of the finished iterations."""
        self.checkpointer.save(self.state)

    def after_step(self, unwritten: str = "") -> None:
        """Writes a checkpoint if one is due, and raises PreemptedError after it if the run was asked to stop.

        Args:
            unwritten: why the metrics of these steps could not be written, which makes the checkpoint fail; empty if
                they were.
        """
        self.checkpointer.after_step(self.state, unwritten=unwritten)

    def export(self, config: RLConfig) -> None:
        """Writes the trained model or adapter to ``hf_ckpt``."""
        self.onload_all()
        export_model(self.model, self.state.ema, Path(config.train.output_dir) / "hf_ckpt", self.mesh)

    def onload_all(self) -> None:
        """Brings everything onto the device."""
        if self.memory is not None:
            self.memory.onload(*self.memory.parts)

    def _keep_only(self, *parts: str) -> None:
        """Offloads all but the weights and these parts; names of parts that do not exist are ignored."""
        if self.memory is not None:
            sampling_parts = [part for part in parts if part in self.memory.parts]
            self.memory.onload(PARAMETERS, *sampling_parts)
            self.memory.before_generation(sampled_here=True, keep=sampling_parts)


def build_memory(actor: Actor[Any]) -> RoleMemory:
    """The actor's tensors as parts that can be offloaded: weights, optimiser, averages and other policies by name."""
    averages = {EMA: actor.state.ema} if actor.state.ema is not None else {}
    averages_by_name = {**averages, **actor.policies.saved}
    others: dict[str, Callable[[], Iterable[torch.Tensor]]] = {
        name: (lambda ema=ema: ema.averages.values()) for name, ema in averages_by_name.items()
    }
    if actor.policies.frozen_weights is not None:
        frozen = actor.policies.frozen_weights
        others["reference_weights"] = lambda: [*all_parameters(frozen).values(), *frozen.buffers()]
    return RoleMemory(actor.model.trained, actor.state.optimizer, others, device=actor.mesh.device)
