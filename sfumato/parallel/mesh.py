"""The processes of a run as an object that is passed, never a global."""

# torch.distributed offers its stores without naming them in __all__.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from sfumato.config.parallel import read_launched
from sfumato.config.sections import TrainConfig
from sfumato.errors import ConfigError, DataError, UserError
from sfumato.parallel.layout import AXES, EXPERT_AXES, VIEWS, WEIGHT_AXES, Layout
from sfumato.parallel.plain_values import from_bytes, to_bytes
from sfumato.parallel.rendezvous import bound_to_loopback, is_on_one_machine, join_store, raise_descriptors

if TYPE_CHECKING:
    Value = TypeVar("Value")

BEFORE_THE_FIRST_STEP = 3
"""Factor of ``train.timeout_s`` for the wait of ranks for each other while they load and compile."""

POLL_S = 0.1
"""Longest pause in seconds between two queries of the store, for each 64 ranks: one process answers all of them."""

PATIENCE_S = 120.0
"""Seconds that a rank with a problem waits for the others in ``first_problem``."""

LEAVE_S = 30.0
"""Seconds that a rank waits for the others in ``close_mesh``."""

CONNECTED_AT_ONCE = 64
"""Most ranks that gloo connects with each other at the start, each with all, so that every rank sees at once when
another one dies. Of more ranks two are connected when they first send each other something: all connections would be
O(ranks^2) messages through the store, and O(ranks) descriptors for each process group of a rank."""

CONNECTING = 5
"""How many times longer gloo waits for such a connection than the timeout with which the group was made, whatever its
timeout is then (``Pair::waitUntilConnected`` in gloo/transport/tcp/pair.cc; measured: 20 s for 4 s)."""


class Mesh:
    """The rank of this process, and its process groups.

    With one process every method is the identity and there is no process group.
    """

    def __init__(self, layout: Layout, device: torch.device, rank: int = 0) -> None:
        """Makes the process groups; call it on every rank of an initialised process group, in the same order."""
        self.layout = layout
        self.device = device
        self.rank = rank
        self.distributed = dist.is_initialized()
        """Whether there is a process group (it may have one rank)."""
        if not self.distributed:
            return
        self._roots: dict[tuple[str, ...], DeviceMesh] = {axes: self._root_mesh(axes) for axes in (AXES, WEIGHT_AXES)}
        if layout.ep > 1:
            self._roots[EXPERT_AXES] = self._root_mesh(EXPERT_AXES)
        views = {name: axes for name, axes in VIEWS.items() if name not in ("fsdp", "world")}  # torch has those two
        self._views = {name: self._roots[AXES][axes]._flatten(name) for name, axes in views.items()}

    def _root_mesh(self, axes: tuple[str, ...]) -> DeviceMesh:
        """The mesh of all processes over these axes."""
        sizes = tuple(getattr(self.layout, axis) for axis in axes)
        return init_device_mesh(self.device.type, sizes, mesh_dim_names=axes)

    @property
    def size(self) -> int:
        """Number of processes."""
        return self.layout.size

    @property
    def _poll_s(self) -> float:
        return POLL_S * max(1.0, self.size / 64)

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which writes files."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Which of the ``data_size`` ranks with different samples this is."""
        return self.rank_in("data")

    @property
    def data_size(self) -> int:
        """Ranks with different samples; ranks of the other axes see the same ones."""
        return self.layout.data

    def device_mesh(self, *axes: str) -> DeviceMesh:
        """The torch mesh of one or several axes, or of a view, for DTensor and FSDP. Only with a process group.

        Axes of weights (dp_replicate, fsdp, tp) come from one root, and those of experts (dp_replicate, efsdp, ep)
        from another, so that DTensors of two axes can be made from them.
        """
        if axes[0] in self._views:
            return self._views[axes[0]]
        # Roots are searched from the last to the first, so that axes that several of them have (dp_replicate, tp) come
        # from the weights', or with experts from the experts' root.
        root = next(root for root_axes, root in reversed(self._roots.items()) if set(axes) <= set(root_axes))
        return root[axes[0] if len(axes) == 1 else axes]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of an axis or view. Only with a process group."""
        return cast("dist.ProcessGroup", dist.group.WORLD) if axis == "world" else self.device_mesh(axis).get_group()

    def rank_in(self, axis: str) -> int:
        """This process's rank in an axis or view."""
        return self.layout.rank_in(axis, self.rank)

    def size_of(self, axis: str) -> int:
        """Ranks in an axis or view."""
        return self.layout.size_of(axis)

    def sum(self, value: float, over: str = "data") -> float:
        """Sum of a number over the ranks of an axis or view."""
        if self.size_of(over) == 1:
            return value
        tensor = torch.tensor(float(value), dtype=torch.float64)  # on the CPU: gloo does not wait for a GPU
        dist.all_reduce(tensor, group=self.group(over))
        return float(tensor)

    def max(self, value: float, over: str = "data") -> float:
        """Largest of a number over the ranks of an axis or view."""
        return max(self.gather(value, over))

    def sum_dict(self, values: dict[str, float], over: str = "data") -> dict[str, float]:
        """Sums of named numbers over ranks; a name may be missing on some."""
        total: dict[str, float] = {}
        for rank_values in self.gather(values, over):
            for name, value in rank_values.items():
                total[name] = total.get(name, 0.0) + value
        return total

    def any(self, value: bool) -> bool:
        """Whether the value is true on some process."""
        return self.sum(float(value), over="world") > 0

    def first_problem(self, problem: str | None) -> str | None:
        """The problem of the rank that reported one first, on every rank; None where no rank has one.

        Every rank must call it. It is no collective operation: where a rank fails alone, the others may be stuck in
        one that never ends. So ranks meet at the store, and a rank with a problem waits for a limited time.

        Raises:
            ConfigError: with the problem of this rank, when other ranks do not call it in time.
        """
        if not self.distributed:
            return problem
        store = distributed_c10d._get_default_store()
        # Each rank counts its own calls, so equal numbers on all ranks name one meeting.
        place = f"sfumato/problem/{store.add(f'sfumato/problems/{self.rank}', 1)}"
        if problem is not None:
            store.compare_set(place, "", problem)  # only the first rank sets it
        store.add(f"{place}/ranks", 1)
        deadline = time.monotonic() + PATIENCE_S
        pause = POLL_S / 128
        while store.add(f"{place}/ranks", 0) < self.size:
            if problem is not None and time.monotonic() > deadline:
                raise ConfigError(f"rank {self.rank}, and not every rank: {problem}")
            time.sleep(pause)
            pause = min(2 * pause, self._poll_s)
        return store.get(place).decode() if store.check([place]) else None

    def gather(self, value: Value, over: str = "data") -> list[Value]:
        """The value of every rank of an axis or view, in rank order, on each of them."""
        size = self.size_of(over)
        if size == 1:
            return [value]
        payload = torch.frombuffer(bytearray(to_bytes(value)), dtype=torch.uint8)
        lengths = [torch.empty(1, dtype=torch.int64) for _ in range(size)]
        # On the CPU, as in ``sum``. Tensors of a gather must be of one size: all are padded to the longest.
        dist.all_gather(lengths, torch.tensor([len(payload)]), group=self.group(over))
        longest = max(int(length) for length in lengths)
        padded = torch.nn.functional.pad(payload, (0, longest - len(payload)))
        values = [torch.empty(longest, dtype=torch.uint8) for _ in range(size)]
        dist.all_gather(values, padded, group=self.group(over))
        return [from_bytes(data.numpy()[: int(length)].tobytes()) for data, length in zip(values, lengths, strict=True)]

    def exchange(self, values: Sequence[Value], over: str = "data") -> list[Value]:
        """Sends the i-th of ``values`` to rank i of an axis or view.

        Returns:
            The values that the ranks sent to this one, in rank order.
        """
        if self.size_of(over) == 1:
            return list(values)
        sent = [torch.frombuffer(bytearray(to_bytes(value)), dtype=torch.uint8) for value in values]
        sizes = self.gather([len(payload) for payload in sent], over)
        received_sizes = [rank_sizes[self.rank_in(over)] for rank_sizes in sizes]
        received = torch.empty(sum(received_sizes), dtype=torch.uint8)
        dist.all_to_all_single(received, torch.cat(sent), received_sizes, sizes[self.rank_in(over)], self.group(over))
        return [from_bytes(payload.numpy().tobytes()) for payload in received.split(received_sizes)]

    def merge(self, values: Mapping[str, Value], over: str) -> dict[str, Value]:
        """Named values of all ranks of an axis or view; where several ranks have a name, the last rank's value."""
        return {name: value for rank_values in self.gather(values, over) for name, value in rank_values.items()}

    def first(self, value: object, among: str) -> Any:
        """The value of the first rank of an axis or view, on each of them. Values of the others are not used."""
        if self.size_of(among) == 1:
            return value
        # a broadcast: gathering a value from each rank, for one to be used, costs O(ranks) on every rank
        payload = torch.frombuffer(bytearray(to_bytes(value)), dtype=torch.uint8)
        length = torch.tensor([len(payload)])
        dist.broadcast(length, group=self.group(among), group_src=0)
        received = payload if len(payload) == int(length) else torch.empty(int(length), dtype=torch.uint8)
        dist.broadcast(received, group=self.group(among), group_src=0)
        return from_bytes(received.numpy().tobytes())

    def range_of_rank(self, count: int) -> range:
        """This data-parallel rank's part of ``count`` items, contiguous and as even as possible."""
        return range_of_rank(count, self.data_rank, self.data_size)

    def barrier(self) -> None:
        """Waits until every process is here."""
        if self.size > 1:
            dist.barrier()

    def take_device(self) -> None:
        """Selects this rank's GPU in the calling thread. A new thread would use GPU 0, and open a context there."""
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)

    def set_timeout(self, seconds: float) -> None:
        """How long this rank waits for others in a collective, in all groups, from now on."""
        if not self.distributed:
            return
        meshes = (*self._roots.values(), *self._views.values())
        for group in {dist.group.WORLD, *(group for mesh in meshes for group in mesh.get_all_groups())}:
            group.set_timeout(timedelta(seconds=seconds))

    def value_of_first(self, make: Callable[[], Value]) -> Value:
        """What ``make`` returns on rank 0, on every rank. Other ranks wait for it, however long it takes.

        Raises:
            UserError: on every rank, what ``make`` raises on rank 0.
        """
        value: Value | None = None
        cause: UserError | None = None
        with self.first_rank_first():
            if self.is_first:
                try:
                    value = make()
                except UserError as error:
                    cause = error
        value, problem = self.first((value, "" if cause is None else str(cause)), among="world")
        if problem:
            raise cause or DataError(problem)
        return cast("Value", value)

    @contextmanager
    def first_rank_first(self) -> Iterator[None]:
        """Rank 0 runs the block before the others, such as one that writes files that the others then only read.

        The others wait at the store, however long it takes: a collective would time out.
        """
        if not self.distributed:
            yield
            return
        store = distributed_c10d._get_default_store()
        key = f"sfumato/first/{store.add(f'sfumato/turns/{self.rank}', 1)}"
        while not (self.is_first or store.check([key])):
            time.sleep(self._poll_s)  # not store.wait, which signals cannot interrupt
        try:
            yield
        finally:
            if self.is_first:
                store.set(key, "done")


def range_of_rank(count: int, rank: int, num_ranks: int) -> range:
    """One of several parts of ``count`` items, contiguous and as even as possible."""
    base, extra = divmod(count, num_ranks)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def build_mesh(config: TrainConfig, replays: bool = False) -> Mesh:
    """Joins the process group that torchrun describes, or stands alone.

    Args:
        config: of the run.
        replays: whether what is computed without gradients is computed again with them, and compared (RL).

    Raises:
        ConfigError: when a GPU is asked for and there is none, the sizes do not fit the number of processes, the
            environment does not say how these find each other, or their port is taken.
    """
    launched = read_launched()
    size = launched.world_size
    rank = launched.rank
    layout = Layout.resolve(config, size)
    if config.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "train.device is cuda, but torch finds no GPU: install a CUDA build of torch, or set it to auto"
        )
    use_gpu = torch.cuda.is_available() and config.device != "cpu"
    device = torch.device("cuda", launched.local_rank) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
        if replays:
            # cuDNN takes another attention plan with gradients than without, so a replay would differ from its rollout.
            torch.backends.cuda.enable_cudnn_sdp(False)
    if size == 1 and config.enable_fsdp_offload and config.data_parallel_mode == "fsdp1":
        raise ConfigError(
            "train.enable_fsdp_offload in one process needs train.data_parallel_mode fsdp2: fsdp1 shards nothing there"
        )
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it before its first product
        torch.use_deterministic_algorithms(True)
        # Filling memory helps to find defects only, and costs a pass over it.
        torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]
    if (threads := cpu_threads(config, use_gpu)) is not None:
        torch.set_num_threads(threads)
    raise_descriptors(size)
    is_local = size == 1 or is_on_one_machine()
    # One process has a group, too, where fsdp is to keep its weights in CPU memory.
    if size > CONNECTED_AT_ONCE:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    is_lazy = size > 1 and os.environ.get("TORCH_GLOO_LAZY_INIT") == "1"
    waits = timedelta(seconds=BEFORE_THE_FIRST_STEP * config.timeout_s)
    if (size > 1 or config.shards(1)) and not dist.is_initialized():
        try:
            store = dist.PrefixStore("default_pg", join_store(rank, size, waits)) if size > 1 else dist.HashStore()
            with bound_to_loopback() if is_local else nullcontext():
                dist.init_process_group(
                    "cpu:gloo,cuda:nccl" if use_gpu else "gloo",
                    store=store,
                    rank=rank,
                    world_size=size,
                    timeout=waits / CONNECTING if is_lazy else waits,
                )
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise ConfigError(
                f"MASTER_PORT {os.environ['MASTER_PORT']} is in use on {socket.gethostname()}, maybe by a run that has "
                "not ended: end that, or set another MASTER_PORT on all nodes"
            ) from error
    with bound_to_loopback() if is_local else nullcontext(), connecting_within(waits) if is_lazy else nullcontext():
        mesh = Mesh(layout, device, rank)
    if is_lazy:
        mesh.set_timeout(waits.total_seconds())
    return mesh


@contextmanager
def connecting_within(limit: timedelta) -> Iterator[None]:
    """Inside, groups are made whose ranks wait no longer for each other's first message: torch makes those of a mesh
    with its default of 30 minutes, so that a rank which hangs before that would be noticed after 150."""
    before = distributed_c10d.default_pg_timeout
    distributed_c10d.default_pg_timeout = limit / CONNECTING
    try:
        yield
    finally:
        distributed_c10d.default_pg_timeout = before


def cpu_threads(config: TrainConfig, use_gpu: bool) -> int | None:
    """CPU threads of this process; None leaves the default, which is one thread in each of several ranks.

    Where the CPU updates the weights of a GPU (``enable_fsdp_offload``), ranks share all cores of the machine.
    """
    if config.num_threads is None and use_gpu and config.enable_fsdp_offload:
        return max((os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
    return config.num_threads


def close_mesh() -> None:
    """Leaves the process group, if this process is in one, together with the others.

    A rank that left while another still writes would break that one's connections.
    """
    if not dist.is_initialized():
        return
    dist.barrier()
    store = distributed_c10d._get_default_store()  # a rank may be out of the barrier while another is still in it
    store.add("sfumato/left", 1)
    deadline = time.monotonic() + LEAVE_S
    try:
        while store.add("sfumato/left", 0) < dist.get_world_size() and time.monotonic() < deadline:
            time.sleep(0.01)
    except dist.DistError:  # the process with the store has ended: it saw that all ranks had arrived
        pass
    dist.destroy_process_group()


@contextmanager
def pretended_mesh(layout: Layout, rank: int = 0) -> Iterator[Mesh]:
    """Inside, this process is one rank of a mesh whose other ranks do not exist.

    For modules on meta and fake tensors: collectives return at once without writing their results, so that shapes are
    correct and values are not. Not within a process group.

    Args:
        layout: the mesh.
        rank: the rank to be.
    """
    if layout.size == 1:
        yield Mesh(layout, torch.device("cpu"), 0)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.size)
    try:
        yield Mesh(layout, torch.device("cpu"), rank)
    finally:
        dist.destroy_process_group()
