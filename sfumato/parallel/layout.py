"""How many ranks each kind of parallelism has: arithmetic only, so that it can be checked before anything starts."""

from __future__ import annotations

import math
from dataclasses import dataclass

from sfumato.config.parallel import ParallelConfig
from sfumato.errors import ConfigError

AXES = ("pp", "dp_replicate", "dp_shard", "cfg", "ring", "ulysses", "tp")
"""Axes of the dense layout, slowest first: tensor-parallel ranks are neighbours, pipeline stages are far apart."""

WEIGHT_AXES = ("pp", "dp_replicate", "fsdp", "tp")
"""Axes over which weights lie: fsdp = dp_shard x cfg x ring x ulysses."""

EXPERT_AXES = ("pp", "dp_replicate", "efsdp", "ep")
"""Axes over which experts lie: efsdp x ep = fsdp. Without tensor parallelism."""

FIELDS = {
    "pp": "pipeline_parallel_size",
    "cfg": "cfg_parallel_size",
    "ring": "context_parallel_size",
    "ulysses": "ulysses_parallel_size",
    "tp": "tensor_parallel_size",
}
"""The field of the configuration that holds the size of an axis; the remaining factor of the processes is data
parallelism."""

VIEWS = {
    "data": ("dp_replicate", "dp_shard"),
    "cp": ("ring", "ulysses"),
    "fsdp": ("dp_shard", "cfg", "ring", "ulysses"),
    "loss": ("dp_replicate", "dp_shard", "ring", "ulysses"),
    "gradient": ("dp_replicate", "dp_shard", "cfg", "ring", "ulysses"),
    "copies": ("cfg", "ring", "ulysses", "tp"),
    "world": AXES,
}
"""Axes that are used as one. data: different samples. cp: parts of the same sequences. fsdp: shards of the weights.
loss: different tokens. gradient: ranks whose gradients of a weight are summed. copies: ranks that make the same
samples."""


@dataclass(frozen=True)
class Layout:
    """Sizes of all axes; their product is the number of processes."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cfg: int = 1
    ring: int = 1
    ulysses: int = 1
    tp: int = 1
    ep: int = 1

    @classmethod
    def resolve(cls, config: ParallelConfig, world_size: int) -> Layout:
        """The layout of a configuration on ``world_size`` processes.

        Raises:
            ConfigError: when the sizes do not fit, with the arithmetic.
        """
        sizes = {axis: getattr(config, field) for axis, field in FIELDS.items()}
        used = math.prod(sizes.values())
        if world_size % used:
            factors = " x ".join(f"train.{FIELDS[axis]} {size}" for axis, size in sizes.items() if size > 1)
            raise ConfigError(
                f"{factors} = {used} does not divide {world_size} processes: {world_size} / {used} = "
                f"{world_size / used:g}; start a multiple of {used} processes or lower a size"
            )
        data_ranks = world_size // used
        replicate = config.data_parallel_replicate_size
        if data_ranks % replicate:
            raise ConfigError(
                f"train.data_parallel_replicate_size {replicate} does not divide the {data_ranks} data-parallel ranks "
                f"({world_size} processes / {used} of the other axes)"
            )
        if config.data_parallel_mode == "ddp":
            replicate = data_ranks
        layout = cls(dp_replicate=replicate, dp_shard=data_ranks // replicate, ep=config.expert_parallel_size, **sizes)
        layout._check(config)
        return layout

    def _check(self, config: ParallelConfig) -> None:
        mode = config.data_parallel_mode
        if mode == "ddp" and config.data_parallel_replicate_size > 1:
            raise ConfigError(
                "train.data_parallel_replicate_size is for fsdp1 and fsdp2; with train.data_parallel_mode ddp every "
                "rank is a replica already: remove one of them"
            )
        if self.fsdp % self.ep:
            raise ConfigError(
                f"train.expert_parallel_size {self.ep} does not divide the {self.fsdp} ranks of a replica "
                f"(dp_shard {self.dp_shard} x cfg {self.cfg} x ring {self.ring} x ulysses {self.ulysses}); "
                "experts are shared among the ranks that shard the data and the sequence"
                + ("; with train.data_parallel_mode ddp there are none, take fsdp2" if mode == "ddp" else "")
            )
        is_set = {
            "fsdp1": mode == "fsdp1",
            "tensor parallelism": self.tp > 1,
            "expert parallelism": self.ep > 1,
            "pipeline parallelism": self.pp > 1,
        }
        for first, second, reason in REFUSED:
            if is_set[first] and is_set[second]:
                raise ConfigError(f"train: {first} and {second} do not go together: {reason}")
        if config.sequence_parallel and self.tp == 1:
            raise ConfigError(
                "train.sequence_parallel shares activations among tensor-parallel ranks: "
                "set train.tensor_parallel_size above 1"
            )

    def size_of(self, axis: str) -> int:
        """Ranks in an axis or view."""
        if axis in VIEWS:
            return math.prod(getattr(self, single_axis) for single_axis in VIEWS[axis])
        return getattr(self, axis)

    def rank_in(self, axis: str, rank: int) -> int:
        """The rank within an axis or view of the process with this global rank."""
        if axis in ("efsdp", "ep"):
            position = self.rank_in("fsdp", rank)
            return position // self.ep if axis == "efsdp" else position % self.ep
        place = {}
        for single_axis in reversed(AXES):  # the last axis is the fastest
            rank, place[single_axis] = divmod(rank, getattr(self, single_axis))
        position = 0
        for single_axis in VIEWS.get(axis, (axis,)):
            position = position * getattr(self, single_axis) + place[single_axis]
        return position

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.size_of("world")

    @property
    def fsdp(self) -> int:
        """Ranks that shard one replica's weights: dp_shard x cfg x ring x ulysses."""
        return self.size_of("fsdp")

    @property
    def data(self) -> int:
        """Ranks with different samples: dp_replicate x dp_shard."""
        return self.size_of("data")

    @property
    def cp(self) -> int:
        """Ranks with different parts of the same sequences: ring x ulysses."""
        return self.size_of("cp")

    @property
    def efsdp(self) -> int:
        """Copies of each expert that FSDP shards further: fsdp / ep."""
        return self.fsdp // self.ep


REFUSED = (
    ("fsdp1", "tensor parallelism", "fsdp1's flat parameters know no DTensor; take fsdp2"),
    ("fsdp1", "expert parallelism", "fsdp1's flat parameters know no second mesh; take fsdp2"),
    ("fsdp1", "pipeline parallelism", "take fsdp2"),
    ("expert parallelism", "tensor parallelism", "experts are not cut along both; raise one of the two sizes"),
)
"""Pairs of settings that exclude each other, and why."""
