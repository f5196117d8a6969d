"""What the roles of diffusion RL hold: the actor a policy and what updates it, the sampler one that is sent weights.

With ``runtime.offload_idle`` each brings what a call needs onto the device, and leaves what sampling does not need in
CPU memory (``RoleMemory``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from sfumato.checkpoint.checkpointer import Checkpointer
from sfumato.checkpoint.export import export_model
from sfumato.checkpoint.state import TrainState
from sfumato.config.rl import RLConfig
from sfumato.data.prompts import Prompt
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.policies import Policies
from sfumato.optim.ema import averaged_weights
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import all_parameters
from sfumato.rollout.costs import Costs, count_costs
from sfumato.rollout.row_probe import NOT_PROBED, RowProbe, probe_rows
from sfumato.runtime.memory import OPTIMIZER, PARAMETERS, RoleMemory

EMA = "ema_weights"
"""The part that holds the average which is evaluated; other policies have their names."""


@dataclass
class Sampler:
    """Draws samples with weights that it is sent."""

    model: DiffusionModel
    mesh: Mesh
    prompts: list[Prompt]
    memory: RoleMemory | None = None
    """None keeps everything where it is."""
    version: int = 0
    """Of the weights: iterations that they have been updated."""
    sync: Any = None
    """Where weights come in."""

    @contextmanager
    def policy(self) -> Iterator[DiffusionModel]:
        """What samples, inside the block."""
        self.wake()
        yield self.model

    @property
    def received_module(self) -> nn.Module:
        """What weights are sent to."""
        self.wake()
        return self.model.denoiser

    def wake(self) -> None:
        """Brings the weights back."""
        if self.memory is not None:
            self.memory.onload(PARAMETERS)

    def rest(self) -> None:
        """Leaves the device to another role."""
        if self.memory is not None:
            self.memory.offload(PARAMETERS)


@dataclass
class Actor:
    """The policy and what updates it. It samples, too, where there is no other sampler."""

    model: DiffusionModel
    mesh: Mesh
    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    policies: Policies
    state: TrainState
    checkpointer: Checkpointer
    memory: RoleMemory | None = None
    """None keeps everything where it is."""
    sync: Any = None
    """Where weights go out."""
    rows: RowProbe = NOT_PROBED
    """Whether rows depend on their batch, for the self-check."""

    @contextmanager
    def policy(self) -> Iterator[DiffusionModel]:
        """What samples, inside the block."""
        self._keep_only(self.policies.sample_with)
        with self.policies.sampling() as model:
            yield model

    @contextmanager
    def evaluated(self) -> Iterator[DiffusionModel]:
        """What is evaluated, inside the block: the averaged weights, where there are some."""
        self._keep_only(EMA)
        with averaged_weights(self.state.ema):
            yield self.model

    @contextmanager
    def sent_weights(self, version: int) -> Iterator[nn.Module]:
        """What a sampler is sent, inside the block: the weights of now, or those before the last update."""
        self._keep_only(self.policies.sample_with, "previous")
        with self.policies.sampling(previous=version < self.state.step) as model:
            yield model.denoiser

    def begin_update(self) -> None:
        """Call it before the forward passes of an update."""
        self.wake()
        self.policies.hold()

    def step(self) -> None:
        """One step of the optimiser, with what follows the policy step by step."""
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
        """Call it when the optimiser steps of an iteration are through, ``step`` of which are finished then."""
        self.policies.follow()
        self.state.schedule.step()
        self.state.step = step

    def wake(self) -> None:
        """Brings back all but the optimiser's state."""
        if self.memory is not None:
            self.memory.before_update()

    def rest(self) -> None:
        """Leaves the device to another role."""
        if self.memory is not None:
            self.memory.before_generation(sampled_here=False)

    def resume(self) -> int:
        """Loads the checkpoint that the configuration asks for. Returns the number of finished iterations."""
        self.checkpointer.resume(self.state)
        self.policies.begin()
        return self.state.step

    def probe_rows(self, config: RLConfig) -> RowProbe:
        """Measures whether rows depend on their batch, for the self-check of what is replayed."""
        with self.policy() as model:
            self.rows = probe_rows(model, config, self.mesh)
        return self.rows

    def count_costs(self, config: RLConfig) -> Costs:
        """What drawing and learning from samples takes."""
        return count_costs(self.model, config)

    def save(self) -> None:
        """Writes a checkpoint of the finished iterations."""
        self.checkpointer.save(self.state)

    def after_step(self, unwritten: str = "") -> None:
        """Writes a checkpoint when it is time; raises PreemptedError after it when the run was asked to stop.

        ``unwritten`` says why metrics of these steps cannot be written, which makes the checkpoint fail.
        """
        self.checkpointer.after_step(self.state, unwritten=unwritten)

    def export(self, config: RLConfig) -> None:
        """Writes the trained pipeline or adapter to ``hf_ckpt``."""
        self.wake_all()
        export_model(self.model, self.state.ema, Path(config.train.output_dir) / "hf_ckpt", self.mesh)

    def wake_all(self) -> None:
        """Brings everything back."""
        if self.memory is not None:
            self.memory.onload(*self.memory.parts)

    def _keep_only(self, *parts: str) -> None:
        """Leaves the weights and these parts on the device, and nothing else."""
        if self.memory is not None:
            kept = [each for each in parts if each in self.memory.parts]
            self.memory.onload(PARAMETERS, *kept)
            self.memory.before_generation(sampled_here=True, keep=kept)


def build_memory(actor: Actor) -> RoleMemory:
    """The actor's tensors as parts that can be moved: weights, optimiser, averages and other policies by name."""
    averages = {EMA: actor.state.ema} if actor.state.ema is not None else {}
    followers = {**averages, **actor.policies.saved}
    others = {name: (lambda each=each: each.averages.values()) for name, each in followers.items()}
    if actor.policies.frozen_weights is not None:
        frozen = actor.policies.frozen_weights
        others["reference_weights"] = lambda: [*all_parameters(frozen).values(), *frozen.buffers()]
    return RoleMemory(actor.model.denoiser, actor.state.optimizer, others, device=actor.model.device)
