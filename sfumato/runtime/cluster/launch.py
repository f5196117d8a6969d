"""The roles of a run on Ray."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.runtime.cluster.cluster import start_cluster
from sfumato.runtime.roles import ACTOR, SAMPLER, SCORER, Roles
from sfumato.runtime.weight_sync.sync import WeightSync
from sfumato.tracking.run import Run


def launch_on_ray(config: DiffusionRLConfig, run: Run, *, actor: Any, sampler: Any, scorer: Any) -> Roles:
    """Starts or joins Ray, and builds all roles at the same time. Args are those of ``launch_roles``.

    Raises:
        ConfigError: there is no cluster, or no place on it.
        RoleLostError: a process died while it was built.
        Exception: what building a role raised.
    """
    runtime, train, pools = config.runtime, config.train, config.runtime.pools
    with ExitStack() as stack:
        cluster = stack.enter_context(start_cluster(runtime, run))
        scorers = cluster.pool(SCORER, scorer, config, train, pools.scorer, config.reward.num_workers)
        actors = cluster.group(ACTOR, actor, config, train, pools.actor)
        run.set_devices(pools.actor.processes)
        samplers, weights = actors, None
        if not config.rollout.hybrid_engine:
            samplers = cluster.group(SAMPLER, sampler, config, runtime.sampler_train(train), pools.sampler)
            run.set_devices(pools.actor.processes + pools.sampler.processes)
            weights = WeightSync(
                actors, samplers, runtime.weight_sync, folder=run.output_dir, timeout_s=runtime.call_timeout_s
            )
        if cluster.num_gpus and not pools.actor.gpus:
            run.say(
                f"the cluster has {cluster.num_gpus:g} GPUs, but runtime.pools.actor.gpus is 0: the actor works on CPUs"
            )
        cluster.wait_ready()
        stack.pop_all()
    return Roles(actor=actors, sampler=samplers, scorer=scorers, weights=weights, driver=cluster)
