"""Environment variables that an engine must not have from the run that starts it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from sfumato.config.environment import environment_with
from sfumato.errors import ConfigError

GROUP_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
GROUP_PREFIXES = ("LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC_", "PET_", "SFUMATO_")
"""Which process of the run this is and where the others are: an engine that makes a process group of its own would wait
for the run's (``TORCHELASTIC_USE_AGENT_STORE`` alone has it look for a store that nobody opens)."""
GROUP_SUFFIXES = ("RANK", "WORLD_SIZE", "NAME")
"""How names with the first three prefixes go on."""

ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def is_of_the_run(name: str) -> bool:
    """Whether a variable says what place a process has in the run's own process group."""
    if name in GROUP_VARIABLES or name.startswith(GROUP_PREFIXES[3:]):
        return True
    return any(name == prefix + suffix for prefix in GROUP_PREFIXES[:3] for suffix in GROUP_SUFFIXES)


def engine_environment(*, sleeps: bool, tensor_parallel_size: int) -> dict[str, str]:
    """The environment of this process without what an engine must not have, and with the rank's own device.

    Args:
        sleeps: whether the engine gives its memory away while nothing is drawn, which memory that grows in place
            (``expandable_segments``) does not allow.
        tensor_parallel_size: GPUs of the engine.

    Raises:
        ConfigError: as ``visible_devices``.
    """
    variables = {name: value for name, value in os.environ.items() if not is_of_the_run(name)}
    for name in ALLOCATORS if sleeps else ():
        if "expandable_segments:true" in variables.get(name, "").lower():
            del variables[name]
    return variables | visible_devices(tensor_parallel_size)


def visible_devices(tensor_parallel_size: int) -> dict[str, str]:
    """CUDA_VISIBLE_DEVICES of the engine of a rank: an engine alone would take the first GPU of each that it sees.

    Raises:
        ConfigError: when ranks that see the same GPUs would each start an engine on several of them.
    """
    num_visible = torch.cuda.device_count()
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or num_visible <= 1:
        return {}
    if tensor_parallel_size == num_visible:  # on Ray, which shows each process its own
        return {}
    if tensor_parallel_size > 1:
        raise ConfigError(
            f"rollout.engine.tensor_parallel_size {tensor_parallel_size}: each rank starts an engine, and all see the "
            f"same {num_visible} GPUs: put the sampler into processes of its own (runtime.backend ray, with "
            f"runtime.pools.sampler.gpus {tensor_parallel_size}), or set tensor_parallel_size to 1"
        )
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    place = int(os.environ.get("LOCAL_RANK", "0"))
    return {"CUDA_VISIBLE_DEVICES": names[place].strip() if place < len(names) and names[place] else str(place)}


@contextmanager
def replace_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """Has this process, and what it starts, these variables alone inside the block, for an engine whose processes are
    its children. Those that the block sets stay."""
    removed = {name: value for name, value in os.environ.items() if name not in environment}
    changed = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    for name in removed:
        del os.environ[name]
    try:
        with environment_with(changed):
            yield
    finally:
        os.environ.update(removed)
