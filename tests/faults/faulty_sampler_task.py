"""``tasks/rl_diffusion.py`` with a sampler that gets one bit of the weights of a version wrong: see FLIPPED_VERSION."""

from __future__ import annotations

from typing import Any

from sfumato.config.diffusion_rl import TrajectoryRLConfig
from sfumato.tracking.task import run_task
from tests.tiny import load_task

FLIPPED_VERSION = 3

task = load_task("rl_diffusion")
build_whole_sampler = task.build_sampler


def build_sampler(config: Any, mesh: Any, run: Any, **prompts: Any) -> Any:
    """Runs in the sampler's process, whose receiver it makes faulty."""
    import torch

    from sfumato.runtime.weight_sync.receiver import MeshReceiver

    load = MeshReceiver.load

    def load_badly(self: Any, tensors: Any, version: int) -> None:
        load(self, tensors, version)
        if version == FLIPPED_VERSION:
            shard = next(iter(self.staged.values()))
            shard.view(-1)[:1].view(torch.int32).bitwise_xor_(1)

    MeshReceiver.load = load_badly
    return build_whole_sampler(config, mesh, run, **prompts)


if __name__ == "__main__":
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(task)  # its processes cannot import what load_task made
    task.build_sampler = build_sampler
    run_task(task.main, TrajectoryRLConfig)
