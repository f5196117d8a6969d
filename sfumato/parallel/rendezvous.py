"""Where the processes of a run find each other, and which network their connections are bound to.

Neither torch's stores nor gloo authenticate: whoever reaches them can read and change their contents. So processes of
one machine meet in a file that only their user can open, or at loopback, where their process groups listen, too; on
several machines the store listens at the address of MASTER_ADDR only, and not on every network of its machine.
"""

# torch.distributed offers its stores without naming them in __all__.
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import resource
import socket
import sys
import threading
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from sfumato.errors import ConfigError, RanksMissingError

STORE_VARIABLE = "SFUMATO_STORE"
"""Environment variable with the file in which ranks of one machine meet; only their user can open its folder."""
LOOPBACK = "127.0.0.1"
BACKLOG = 1024

NOTICE_S = 15.0
"""Seconds after which a rank says that it waits for others, and where."""

OPEN_FILES = 1024
"""Descriptors of a rank besides its connections: files of data and weights, logs, libraries."""

CONNECTIONS_PER_RANK = 3
"""Descriptors of rank 0 for each rank: at the store, for its heartbeats, and for what it sends rank 0 itself."""


def is_loopback(address: str) -> bool:
    """Whether only processes of the same machine reach the address, or name."""
    if address.partition("%")[0] in ("localhost", "::1"):
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return False


def is_on_one_machine() -> bool:
    """Whether all ranks of this process group are on this machine, by the environment variables."""
    return bool(os.environ.get(STORE_VARIABLE)) or is_loopback(os.environ.get("MASTER_ADDR", ""))


def join_store(rank: int, size: int, timeout: timedelta) -> dist.Store:
    """The store of the process group that the environment describes; rank 0 serves it unless an agent does.

    Args:
        rank: of this process.
        size: number of ranks.
        timeout: longest wait for the others.

    Raises:
        DistNetworkError: its port is taken.
        RanksMissingError: the others have not come, or rank 0 does not answer.
    """
    if path := os.environ.get(STORE_VARIABLE):
        file_store = dist.FileStore(path, size)
        file_store.set_timeout(timeout)
        return file_store
    address = os.environ["MASTER_ADDR"]
    port = int(os.environ["MASTER_PORT"])
    agent_serves = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    serves = rank == 0 and not agent_serves
    others = "the other ranks" if serves else "rank 0"
    waiting = f"rank {rank} of {size} on {socket.gethostname()} waits for {others} at {address}:{port}"
    remedy = (
        "start the run on every node with the same NNODES, MASTER_ADDR and MASTER_PORT and its own NODE_RANK, and let "
        "that port pass between them; for one process alone unset WORLD_SIZE"
    )
    try:
        with announced_after(NOTICE_S, f"{waiting}; where nothing follows, {remedy}"):
            if serves:
                return serve_store(address, port, timeout, size)
            store = dist.TCPStore(address, port, size, is_master=False, timeout=timeout)
            # torchrun without --rdzv-backend keeps its store when it starts ranks anew, with the addresses of those
            # before. Its count of restarts tells them apart where no other node counts for itself.
            if agent_serves and os.environ.get("LOCAL_WORLD_SIZE") == str(size):
                return dist.PrefixStore(f"restart {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
            return store
    except dist.DistError as error:
        if "EADDRINUSE" in str(error):
            raise
        reason = str(error).partition("\n")[0].rstrip(".")
        raise RanksMissingError(f"{waiting} in vain ({reason}): {remedy}") from error


@contextlib.contextmanager
def announced_after(seconds: float, message: str) -> Iterator[None]:
    """Prints a message if what is inside takes longer; of the ranks of a machine the first does."""
    timer = threading.Timer(seconds, print, [message], {"file": sys.stderr, "flush": True})
    timer.daemon = True
    if os.environ.get("LOCAL_RANK", "0") == "0":
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def serve_store(address: str, port: int, timeout: timedelta, size: int | None = None) -> dist.TCPStore:
    """A store in this process that listens at one address.

    Args:
        address: of this machine, or a name of it. Where this machine cannot listen at it, since a router translates it
            or the name leads to another address elsewhere, every network of this machine is taken.
        port: 0 takes a free one.
        timeout: of waits at the store.
        size: number of processes that must connect before this returns; None waits for none.

    Raises:
        DistNetworkError: the port is taken.
    """
    listening = _listen_at(address, port)
    number = listening.getsockname()[1]
    store = dist.TCPStore(
        LOOPBACK if listening.getsockname()[0] in ("0.0.0.0", "::") else listening.getsockname()[0],
        number,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=size is not None,
        master_listen_fd=listening.fileno(),
    )
    listening.detach()  # the store owns the socket now, and closes it
    return store


def _listen_at(address: str, port: int) -> socket.socket:
    """A socket that listens at an address, or on every network where this machine does not have the address."""
    family, place = _address_of(address)
    try:
        return _open_socket(family, place, port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise dist.DistNetworkError(f"EADDRINUSE: {place}:{port}") from error
        if error.errno != errno.EADDRNOTAVAIL:
            raise
    return _open_socket(socket.AF_INET, "0.0.0.0", port)


def _open_socket(family: socket.AddressFamily, address: str, port: int) -> socket.socket:
    opened = socket.socket(family, socket.SOCK_STREAM)
    try:
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        opened.bind((address, port))
        opened.listen(BACKLOG)
    except BaseException:
        opened.close()
        raise
    return opened


def _address_of(name: str) -> tuple[socket.AddressFamily, str]:
    """Family and address to listen at for a name; every network where the name resolves to loopback, or not at all."""
    try:
        family, *_, place = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0]
    except socket.gaierror:
        return socket.AF_INET, "0.0.0.0"
    address = str(place[0])
    # /etc/hosts may map a machine's own name to loopback, where other machines could not reach it.
    if is_loopback(address) and not is_loopback(name):
        return socket.AF_INET, "0.0.0.0"
    return family, address


def raise_descriptors(size: int) -> None:
    """Raises this process's limit of open files to what a run of ``size`` ranks needs.

    Raises:
        ConfigError: when the hard limit is below the number of connections.
    """
    connections = CONNECTIONS_PER_RANK * size
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < connections:
        raise ConfigError(
            f"a run of {size} ranks needs {connections + OPEN_FILES} open files in one process, and the limit of this "
            f"machine is {hard} (ulimit -Hn): raise it (limits.conf, LimitNOFILE of a service, --ulimit nofile of a "
            "container)"
        )
    wanted = connections + OPEN_FILES if hard == resource.RLIM_INFINITY else min(connections + OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@contextlib.contextmanager
def bound_to_loopback() -> Iterator[None]:
    """Makes gloo process groups created inside listen at loopback only, unless the user has chosen an interface."""
    name = loopback_interface()
    if "GLOO_SOCKET_IFNAME" in os.environ or not name:
        yield
        return
    os.environ["GLOO_SOCKET_IFNAME"] = name
    try:
        yield
    finally:
        del os.environ["GLOO_SOCKET_IFNAME"]


def loopback_interface() -> str:
    """Name of the loopback interface of this machine; empty where there is none."""
    return next((name for _, name in socket.if_nameindex() if name in ("lo", "lo0")), "")
