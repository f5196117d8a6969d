"""Builds the roles of a run: in this process, or on Ray, as its configuration says."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from sfumato.config.rl import RLConfig
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh, build_mesh
from sfumato.runtime.roles import ACTOR, SAMPLER, SCORER, Build, Driver, LocalRole, Record, Roles, ThreadRole
from sfumato.tracking.run import Run

if TYPE_CHECKING:
    from sfumato.runtime.weight_sync.fixed_tokens import Rescoring


def main_mesh(config: RLConfig) -> Mesh:
    """The processes that run the task's script: torchrun's ranks, or with roles on Ray this one.

    Raises:
        ConfigError: as ``build_mesh`` does.
    """
    if config.runtime.backend == "ray":
        # The driver computes nothing: roles on Ray build meshes of their own.
        return Mesh(Layout(), torch.device("cpu"))
    return build_mesh(config.train, replays=True)


def launch_roles(
    config: RLConfig, run: Run, *, actor: Build, sampler: Build, scorer: Build, rescoring: Rescoring | None = None
) -> Roles:
    """Builds all roles; use what it returns in a ``with``.

    Args:
        config: of the task.
        run: of this process.
        actor: makes the state of the actor, which also samples with ``rollout.hybrid_engine``.
        sampler: makes the state of a sampler of its own.
        scorer: makes the state of the scorer, before the others: a missing reward engine is then known before a model
            is loaded.
        rescoring: how weights are verified in an engine that has its own (``Rescoring``).
    """
    if config.runtime.backend == "ray":
        from sfumato.runtime.cluster.cluster import launch_on_ray

        return launch_on_ray(config, run, actor=actor, sampler=sampler, scorer=scorer, rescoring=rescoring)
    record = Record()
    mesh = run.mesh
    data_rank = mesh.data_rank, mesh.data_size
    scorer_role = ThreadRole(scorer(config, mesh, run), SCORER, config.reward.num_workers, record)
    actor_role = LocalRole(actor(config, mesh, run), ACTOR, *data_rank, record)
    sampler_role = actor_role
    weights = None
    if not config.rollout.hybrid_engine:
        from sfumato.runtime.weight_sync.sync import WeightSync

        sampler_role = LocalRole(sampler(config, mesh, run), SAMPLER, *data_rank, record)
        weights = WeightSync(actor_role, sampler_role, "local", rescoring=rescoring)
    return Roles(
        actor=actor_role,
        sampler=sampler_role,
        scorer=scorer_role,
        weights=weights,
        driver=Driver(record),
        # Ranks that share a sequence have the same samples; their first one's scores count, so that all ranks agree.
        together=lambda mine: mesh.gather(mesh.first(mine, among="copies")),
    )
