"""Where the roles of an RL run live."""

from __future__ import annotations

from typing import Literal, TypeVar

from pydantic import Field, ValidationError, model_validator

from sfumato.config.base import Section
from sfumato.config.open_mappings import JsonObject
from sfumato.config.parallel import ParallelConfig, world_size

Train = TypeVar("Train", bound=ParallelConfig)

Strategy = Literal["sync", "one-step-off", "fully-async"]

STALENESS: dict[str, int] = {"sync": 0, "one-step-off": 1, "fully-async": 4}
"""``rollout.max_staleness`` of each ``rollout.async_strategy``."""


class PoolConfig(Section):
    """Processes of a role on Ray."""

    processes: int = Field(1, ge=1)
    """How many."""
    cpus: float = Field(1.0, ge=0)
    """CPU cores that each reserves, and threads that it computes with."""
    gpus: float = Field(0.0, ge=0)
    """GPUs that each reserves. Parts, such as 0.5 of actor and sampler: a process of each shares a GPU."""
    parallel: JsonObject = {}
    """Sampler: how its processes share the model, where that differs from the section train, such as
    {tensor_parallel_size: 2}."""

    @model_validator(mode="after")
    def _parallel_is_known(self) -> PoolConfig:
        try:
            ParallelConfig(**self.parallel)
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"parallel.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        return self


class PoolsConfig(Section):
    """Processes of every role on Ray."""

    actor: PoolConfig = PoolConfig()  # pyright: ignore[reportCallIssue]
    """Trains; with rollout.hybrid_engine it samples, too."""
    sampler: PoolConfig = PoolConfig()  # pyright: ignore[reportCallIssue]
    """Draws samples, without rollout.hybrid_engine."""
    scorer: PoolConfig = PoolConfig()  # pyright: ignore[reportCallIssue]
    """Scores samples; each process is on its own."""

    @property
    def shared_gpus(self) -> bool:
        """Whether the actor's and the sampler's processes of one number are on one GPU."""
        # fractions of a GPU that make up one at most, so that a process of each role fits on it
        parts = self.actor.gpus, self.sampler.gpus
        return min(parts) > 0 and sum(parts) <= 1 and self.actor.processes == self.sampler.processes


class RuntimeConfig(Section):
    """Where the roles of a run live: in this process (or torchrun's ranks), or in processes of their own on Ray."""

    backend: Literal["in_process", "ray"] = "in_process"
    """ray puts actor, sampler and scorer into processes of their own, on one machine or many."""
    address: str | None = None
    """Ray cluster to join: host:port, or auto for the one that runs here; null starts Ray on this machine."""
    pools: PoolsConfig = PoolsConfig()
    """Ray: processes of each role; one each if not given."""
    weight_sync: Literal["auto", "broadcast", "ipc", "files"] = "auto"
    """Ray: how weights reach a sampler of its own. broadcast sends them over the network (gloo, NCCL), ipc shares
    memory on one machine or GPU, files writes safetensors into the run folder; auto broadcasts."""
    object_store_gb: float | None = Field(None, ge=0.074)
    """Shared memory of a Ray that is started here, for samples on their way, in GiB, at least Ray's 75 MiB; null is
    Ray's share of the memory."""
    heartbeat_s: float = Field(30.0, gt=0)
    """Seconds after which a process that does not answer is taken for dead."""
    call_timeout_s: float = Field(3600.0, gt=0)
    """Seconds after which a call that does not end, or a process whose place others have taken, is given up."""
    wait_for_nodes_s: float = Field(0.0, ge=0)
    """Ray: seconds to wait for machines to join (autoscaling) when a cluster is too small; 0 refuses at once."""
    max_restarts: int = Field(3, ge=0)
    """How often the lost processes of a role are replaced in a run."""
    offload_idle: bool = False
    """Keep in CPU memory what a phase does not need: optimizer state and gradients during the rollout, and of roles
    that share GPUs the weights, too."""

    @property
    def shares_gpu_memory(self) -> bool:
        """Whether actors hand GPU memory to samplers: by ``ipc``, which auto takes for roles on one GPU."""
        near = self.weight_sync == "auto" and self.pools.shared_gpus
        return self.backend == "ray" and (self.weight_sync == "ipc" or near)

    @property
    def actor_processes(self) -> int:
        """Processes that train."""
        return self.pools.actor.processes if self.backend == "ray" else world_size()

    @model_validator(mode="after")
    def _fits(self) -> RuntimeConfig:
        if self.backend == "in_process":
            names = {
                "address",
                "pools",
                "weight_sync",
                "object_store_gb",
                "heartbeat_s",
                "call_timeout_s",
                "max_restarts",
            }
            for name in self.non_defaults:
                if name in names:
                    raise ValueError(f"runtime.{name} is for roles on Ray: set runtime.backend to ray, or remove it")
        elif world_size() > 1:
            raise ValueError(
                "runtime.backend ray starts its processes itself: start the task once, not with torchrun, and give "
                "their number in runtime.pools.actor.processes"
            )
        if self.address is not None and self.object_store_gb is not None:
            raise ValueError(
                "runtime.object_store_gb is for a Ray that is started here; that of runtime.address has its own: "
                "remove one of them, or start Ray there with --object-store-memory"
            )
        for name in ("actor", "sampler"):
            pool = getattr(self.pools, name)
            if 0 < pool.gpus < 1 and pool.processes > 1 and not self.pools.shared_gpus:
                raise ValueError(
                    f"runtime.pools.{name}: several of its {pool.processes} processes would come onto one GPU with "
                    f"gpus {pool.gpus:g}, which NCCL refuses: give each a whole GPU, or let actor and sampler share "
                    "GPUs, with as many processes each and parts that make up one GPU at most"
                )
        if self.pools.shared_gpus and self.weight_sync == "broadcast":
            raise ValueError(
                "runtime.weight_sync broadcast: actor and sampler share GPUs (runtime.pools), between whose processes "
                "NCCL sends nothing: leave it out, which takes ipc"
            )
        for name in ("actor", "scorer"):
            if getattr(self.pools, name).parallel:
                raise ValueError(
                    f"runtime.pools.{name}.parallel: only a sampler of its own is cut differently; the actor is as the "
                    "section train says, and scorers share nothing"
                )
        return self

    def sampler_train(self, train: Train) -> Train:
        """The section train as a sampler of its own sees it: cut as its pool says."""
        if self.backend == "in_process":
            return train
        return train.model_copy(update=ParallelConfig(**self.pools.sampler.parallel).non_defaults)
