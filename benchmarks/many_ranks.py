"""What a run of many ranks costs beside its tensors: ranks that do not exist, at real stores, in one process.

    unshare --map-root-user --net sh -c 'ip link set lo up && python -m benchmarks.many_ranks --ranks 64 256 1024'

For each number of ranks: the process groups of one rank; the start, at which each rank connects to the store of rank
0, twice, and says that it has no problem; a second of heartbeats of all ranks; which samples each rank takes in a step,
as one rank finds out; and the plan of a checkpoint of a language model of 8 billion weights with AdamW, cut over all
ranks: that of one rank, and at rank 0 that of all. CPU seconds are those of this process, bytes those that pass its
loopback device, which is why it has one of its own.
"""

from __future__ import annotations

import argparse
import pickle
import resource
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import MetadataIndex

from sfumato.checkpoint.parts import SavePlanner, TensorPart
from sfumato.parallel.bin_packing import pack
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import pretended_mesh
from sfumato.parallel.peers import Heartbeats
from sfumato.parallel.rendezvous import raise_descriptors, serve_store

SOON = timedelta(seconds=120)
THREADS = 32
SAMPLES_PER_RANK, TOKENS = 8, 4096
"""Samples of a step for each rank, of up to so many tokens."""
LAYER = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (12288, 4096), (12288, 4096), (4096, 12288)]
"""Matrices of one of the 36 layers of Qwen3 8B; its two norms are left out."""
TENSORS = [*LAYER * 36, (151936, 4096), (151936, 4096)]


@dataclass
class Cost:
    """CPU seconds and bytes of something."""

    seconds: float = 0.0
    bytes: int = 0


@contextmanager
def measured() -> Iterator[Cost]:
    """Fills in the CPU seconds of the block, and the bytes that passed loopback meanwhile."""
    cost, started, before = Cost(), time.process_time(), loopback_bytes()
    yield cost
    cost.seconds, cost.bytes = time.process_time() - started, loopback_bytes() - before


def loopback_bytes() -> int:
    """Bytes that this machine, or network namespace, has received over loopback."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.strip().startswith("lo:"))


def everywhere(act: Callable[[int], object], size: int) -> None:
    """Calls a function for each rank, some at a time, as requests of one rank wait for answers."""
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(act, range(size)))


def start_and_beat(size: int) -> tuple[Cost, Cost]:
    """The meeting of all ranks at a store, and a second of their heartbeats."""
    raise_descriptors(2 * size)  # clients and server are one process here
    server = serve_store("127.0.0.1", 0, SOON)

    def connect(_rank: int) -> dist.Store:
        return dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=SOON)

    stores: list[dist.Store] = [server] * size
    lines: list[dist.Store] = [server] * size

    def join(rank: int) -> None:
        stores[rank], lines[rank] = connect(rank), connect(rank)
        stores[rank].add("problems/1/ranks", 1)  # as Mesh.first_problem does

    with measured() as start:
        everywhere(join, size)
    ranks = [Heartbeats(rank, size) for rank in range(size)]
    for _ in range(2):  # the first time rank 0 looks for each rank
        everywhere(lambda rank: ranks[rank].write_heartbeat(lines[rank]), size)
    with measured() as second:
        everywhere(lambda rank: ranks[rank].write_heartbeat(lines[rank]), size)
    return start, second


def process_groups(size: int) -> Cost:
    """The process groups of one rank: copies of shards, in nodes of eight."""
    with measured() as cost, pretended_mesh(Layout(dp_replicate=2, dp_shard=size // 2), size // 2):
        pass
    return cost


def data_order(size: int) -> Cost:
    """Which samples each rank takes in one step, as every rank finds out by itself."""
    lengths = np.random.default_rng(0).integers(64, TOKENS, SAMPLES_PER_RANK * size).tolist()
    with measured() as cost:
        pack(lengths, [length**1.1 for length in lengths], 2 * TOKENS, size)
    return cost


def checkpoint_plans(size: int) -> tuple[Cost, Cost]:
    """The plan of one rank, and what rank 0 makes of all of them; bytes are those of the plans, as they are sent."""

    def plan(rank: int) -> SavePlanner:
        parts = {}
        for number, shape in enumerate(TENSORS):
            rows = -(-shape[0] // size)
            if (first := rank * rows) >= shape[0]:
                continue
            chunk = torch.empty(min(rows, shape[0] - first), shape[1], device="meta")
            for kind in ("model", "exp_avg", "exp_avg_sq"):
                index = MetadataIndex(f"{kind}/{number}", torch.Size([first, 0]))
                parts[index] = TensorPart(torch.Size(shape), chunk)
        return SavePlanner(parts)

    with measured() as local:
        first = plan(0)
        first.create_local_plan()
    local.bytes = len(pickle.dumps(first.plan))
    plans = [plan(rank).create_local_plan() for rank in range(size)]
    with measured() as together:
        first.create_global_plan(plans)
    together.bytes = local.bytes * size
    return local, together


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[64, 256, 1024])
    titles = (
        "process groups of a rank",
        "start, all ranks",
        "a second of heartbeats, all ranks",
        "samples of a step, a rank",
    )
    rows = {title: [] for title in (*titles, "checkpoint's plan, a rank", "checkpoint's plan, rank 0")}
    sizes = parser.parse_args().ranks
    for size in sizes:
        costs = (process_groups(size), *start_and_beat(size), data_order(size), *checkpoint_plans(size))
        for row, cost in zip(rows.values(), costs, strict=True):
            row.append(f"{cost.seconds:.2f} s, {cost.bytes / 1e6:.2f} MB")
        print(f"{size} ranks: done, {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20:.1f} GiB", flush=True)
    print("| | " + " | ".join(f"{size} ranks" for size in sizes) + " |\n|---" * 1 + "|---" * len(sizes) + "|")
    for title, row in rows.items():
        print(f"| {title} | {' | '.join(row)} |")


if __name__ == "__main__":
    main()
