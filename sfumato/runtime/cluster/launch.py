"""The roles of a run on Ray."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from sfumato.config.rl import RLConfig
from sfumato.runtime.cluster.cluster import start_cluster
from sfumato.runtime.roles import ACTOR, SAMPLER, SCORER, Roles
from sfumato.runtime.weight_sync.sync import GRACE_S, WeightSync
from sfumato.tracking.run import Run


def launch_on_ray(config: RLConfig, run: Run, *, actor: Any, sampler: Any, scorer: Any) -> Roles:
    """Starts or joins Ray, and builds all roles at the same time. Args are those of ``launch_roles``.

    Raises:
        ConfigError: there is no cluster, or no place on it.
        PreemptedError: the run was asked to stop before the roles were built.
        RoleLostError: a process died while it was built.
        Exception: what building a role raised.
    """
    runtime, train, pools = config.runtime, config.train, config.runtime.pools
    with ExitStack() as stack:
        cluster = stack.enter_context(start_cluster(runtime, run))
        groups = {ACTOR: pools.actor} | ({} if config.rollout.hybrid_engine else {SAMPLER: pools.sampler})
        cluster.reserve(groups=groups, pools={SCORER: pools.scorer})
        scorers = cluster.pool(SCORER, scorer, config, train, pools.scorer, config.reward.num_workers)
        actors = cluster.group(ACTOR, actor, config, train, pools.actor, sees_folder=True)
        run.set_devices(pools.actor.processes)
        samplers, weights = actors, None
        if not config.rollout.hybrid_engine:
            by_files = runtime.weight_sync == "files"
            sampler_train = runtime.sampler_train(train)
            samplers = cluster.group(SAMPLER, sampler, config, sampler_train, pools.sampler, sees_folder=by_files)
            run.set_devices(pools.actor.processes + pools.sampler.processes)
            weights = WeightSync(
                actors,
                samplers,
                runtime.weight_sync,
                folder=run.output_dir,
                timeout_s=runtime.call_timeout_s,
                grace_s=runtime.heartbeat_s + GRACE_S,
            )
        if cluster.num_gpus and not pools.actor.gpus:
            run.say(
                f"the cluster has {cluster.num_gpus:g} GPUs, but runtime.pools.actor.gpus is 0: the actor works on CPUs"
            )
        cluster.wait_ready()
        stack.pop_all()
    return Roles(actor=actors, sampler=samplers, scorer=scorers, weights=weights, driver=cluster)
