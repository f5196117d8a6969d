"""Where processes are: machine, process, GPU, and the address under which others reach them."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sfumato.errors import ConfigError, WeightSyncError
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.rendezvous import LOOPBACK, is_loopback, serve_store

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

BOOT = Path("/proc/sys/kernel/random/boot_id")
"""Its content differs between machines, also where all have the same name."""

GIVEN_UP = "given up"
"""The key that a process sets when it cannot go on."""

LONGEST_PAUSE_S = 0.01
"""Longest pause between two checks of a store, in seconds."""

ADDRESS_VARIABLE = "SFUMATO_NODE_ADDRESS"
"""Environment variable with the address under which other machines reach this one, set by whoever knows it."""

ADDRESS_REMEDY = (
    "start its Ray node with the address of its network (NODE_IP=ADDRESS bash cluster/start_head.sh, or "
    "start_worker.sh; ray start --node-ip-address ADDRESS)"
)


@dataclass(frozen=True)
class Place:
    """Where a process is."""

    machine: str
    process: int
    gpu: str | None
    """UUID; None on a CPU."""

    @property
    def host(self) -> str:
        """Name of the machine."""
        return self.machine.partition("/")[0]

    def __str__(self) -> str:
        return f"{self.machine}, process {self.process}" + (f", GPU {self.gpu}" if self.gpu else "")


def places_of(mesh: Mesh) -> list[Place]:
    """Places of all ranks. Every rank must call it."""
    boot = BOOT.read_text(encoding="ascii").strip() if BOOT.is_file() else ""
    gpu = str(torch.cuda.get_device_properties(mesh.device).uuid) if mesh.device.type == "cuda" else None
    return mesh.gather(Place(f"{socket.gethostname()}/{boot}", os.getpid(), gpu), over="world")


def first_of_each_machine(places: Sequence[Place]) -> tuple[int, ...]:
    """For each rank the first one on its machine."""
    machines = [place.machine for place in places]
    return tuple(machines.index(machine) for machine in machines)


def own_address() -> str:
    """The address under which other machines reach this one: ADDRESS_VARIABLE, or that of the network interface."""
    if address := os.environ.get(ADDRESS_VARIABLE):
        return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # nothing is sent: it asks which of the networks would be taken
        except OSError:
            return "127.0.0.1"  # no way out of this machine is known
        return probe.getsockname()[0]


def check_reachable(address: str, places: Sequence[Place]) -> None:
    """Refuses a loopback address where processes are on several machines: it would lead each machine to itself.

    Args:
        address: of the machine of the first place.
        places: of processes that are to talk to each other.

    Raises:
        ConfigError: names the machine and the remedy.
    """
    others = {place.machine: place.host for place in places if place.machine != places[0].machine}
    if others and is_loopback(address):
        raise ConfigError(
            f"{places[0].host} has told {address} as its address, under which {', '.join(others.values())} cannot "
            f"reach it: {ADDRESS_REMEDY}"
        )


def are_on_one_machine(places: Sequence[Place]) -> bool:
    """Whether processes that are to talk to each other need no network."""
    return len({place.machine for place in places}) == 1


def open_store(places: Sequence[Place], timeout_s: float) -> tuple[TCPStore, tuple[str, int]]:
    """Opens a store in this process.

    Args:
        places: of all processes that will use it, this one first. If all are on one machine, it listens at loopback
            alone.
        timeout_s: of its waits.

    Returns:
        The store, and its address and port.

    Raises:
        ConfigError: others cannot reach this machine at its address.
    """
    address = LOOPBACK if are_on_one_machine(places) else own_address()
    check_reachable(address, places)
    store = serve_store(address, 0, timedelta(seconds=timeout_s))
    return store, (address, store.port)


def reach_store(address: tuple[str, int], timeout_s: float) -> TCPStore:
    """Connects to the store of another process.

    Raises:
        WeightSyncError: when it does not answer in time.
    """
    try:
        timeout = timedelta(seconds=timeout_s)
        return dist.TCPStore(*address, is_master=False, timeout=timeout)  # pyright: ignore[reportPrivateImportUsage]
    except dist.DistError as error:
        raise WeightSyncError(
            f"the actor cannot be reached at {address[0]}:{address[1]} within {timeout_s:g} s: is it alive, and do the "
            "machines see each other? runtime.weight_sync files needs a shared folder only"
        ) from error


def wait_for(store: Store, keys: Sequence[str], timeout_s: float, stop: threading.Event) -> list[str]:
    """Waits until keys are in a store.

    It asks again and again, since a store's own wait can neither be broken off nor time out without noise.

    Args:
        store: a connection that no other thread uses meanwhile.
        keys: that others set.
        timeout_s: longest wait; it ends earlier when another process gives up (``GIVEN_UP``).
        stop: ends the wait when set.

    Returns:
        The keys that are missing: none if all were set.

    Raises:
        DistNetworkError: when the process of the store has gone.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.0005
    while not store.check(list(keys)):
        if stop.wait(pause_s) or time.monotonic() > deadline or store.check([GIVEN_UP]):
            return [key for key in keys if not store.check([key])]
        pause_s = min(LONGEST_PAUSE_S, pause_s * 1.5)
    return []


def wait_for_all(
    store: Store, own_name: str, all_names: Sequence[str], timeout_s: float, stop: threading.Event
) -> None:
    """A barrier through a store: waits until all processes have called it.

    Args:
        store: that all of them use.
        own_name: name of this process.
        all_names: the processes that are waited for.
        timeout_s: longest wait.
        stop: ends the wait when set.

    Raises:
        WeightSyncError: names the processes that did not come.
    """
    try:
        store.set(f"here/{own_name}", "1")
        keys = {f"here/{name}": name for name in all_names}
        lacking = wait_for(store, list(keys), timeout_s, stop)
    except dist.DistNetworkError as error:
        raise WeightSyncError(f"{own_name} has lost the actor while the roles were being connected: {error}") from error
    if lacking:
        raise WeightSyncError(
            f"{own_name} waited (at most {timeout_s:g} s) to be connected with "
            f"{', '.join(keys[key] for key in lacking)}, who did not come: look for what stopped them, or raise the "
            "time that the sync may take"
        )
