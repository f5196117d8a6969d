"""Machines made of Linux namespaces: each has a network, a host name, process ids, /dev/shm and /tmp of its own.

They are joined by a bridge in a namespace of its own, so that nothing of theirs reaches the network of this machine,
and have no default route. All of it goes with the processes that hold the namespaces, which end with this one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.tiny import ROOT

TOOLS = ("ip", "unshare", "nsenter", "setpriv", "mount", "hostname")
HOLD = ["setpriv", "--pdeathsig", "KILL", "unshare", "--kill-child"]


def refusal() -> str:
    """Why nodes cannot be made here; empty when they can."""
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return f"not installed: {', '.join(missing)} (packages iproute2, util-linux)"
    made = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "--pid", "--fork", "ip", "link", "add", "probe", "type", "veth"],
        capture_output=True,
        text=True,
        check=False,
    )
    return f"namespaces are not permitted: {made.stderr.strip()}" if made.returncode else ""


class Node:
    """One machine. Its first process holds the namespaces; when that is killed, all its processes are."""

    def __init__(self, name: str, address: str, switch: int, shared: Sequence[Path], hosts: Path) -> None:
        """Starts it.

        Args:
            name: host name.
            address: within 10.77.0.0/24.
            switch: process id of the holder of the bridge.
            shared: folders that it sees besides those outside /tmp and /dev/shm.
            hosts: takes the place of /etc/hosts; ``names`` beside it that of /etc/nsswitch.conf.
        """
        self.name, self.address, self._switch = name, address, switch
        mounted = [
            str(path) for path in (*shared, ROOT, Path(sys.prefix)) if str(path).startswith(("/tmp/", "/dev/shm/"))
        ]
        binds = "".join(f'mkdir -p "/mnt{path}"; mount --bind "{path}" "/mnt{path}"; ' for path in mounted)
        script = (
            f"hostname {name}; mount -t tmpfs -o mode=1777 tmpfs /mnt; mkdir -p /mnt/tmp /mnt/dev/shm; {binds}"
            "mount --rbind /mnt/tmp /tmp; chmod 1777 /tmp; mount -t tmpfs -o size=1g tmpfs /dev/shm; "
            f"mount --bind {hosts} /etc/hosts; mount --bind {hosts.with_name('names')} /etc/nsswitch.conf; "
            "ip link set lo up; echo ready; exec sleep infinity"
        )
        private = ["--net", "--mount", "--uts", "--pid", "--ipc", "--fork", "--mount-proc"]
        self._holder = subprocess.Popen(
            [*HOLD, *private, "sh", "-ec", script], stdout=subprocess.PIPE, text=True, process_group=0
        )
        assert self._holder.stdout is not None and self._holder.stdout.readline() == "ready\n", "the node has no start"
        (self.pid,) = map(int, Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split())
        self._port = f"to-{name}"
        bridge = [f"ip link add {self._port} type veth peer name eth0 netns {self.pid}", f"ip link set {self._port} up"]
        enter(switch, "net", "sh", "-ec", "; ".join([*bridge, f"ip link set {self._port} master switch"]))
        enter(self.pid, "net", "sh", "-ec", f"ip addr add {address}/24 dev eth0; ip link set eth0 up")

    @property
    def is_alive(self) -> bool:
        """Whether it was not lost."""
        return self._holder.poll() is None

    def popen(self, command: Sequence[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """Starts a program on it, whose output goes to a file."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_CBWR": "AUTO,STRICT"}
        with log.open("ab") as file:
            return subprocess.Popen(
                ["nsenter", f"--target={self.pid}", "--all", f"--wd={ROOT}", *command],
                env={**environment, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0", **variables},
                stdout=file,
                stderr=subprocess.STDOUT,
                process_group=0,
            )

    def run(self, *command: str) -> str:
        """Runs a short program on it. Returns what it wrote."""
        return enter(self.pid, "all", *command)

    def signal(self, name: str, pids: Sequence[int]) -> None:
        """Sends a signal to processes, by their ids on the node."""
        self.run("kill", f"-{name}", *map(str, pids))

    def link(self, state: str) -> None:
        """Takes its cable out (``down``), or puts it in (``up``)."""
        enter(self._switch, "net", "ip", "link", "set", self._port, state)

    def lose(self) -> None:
        """As if its power failed: nobody hears of it any more."""
        if self.is_alive:
            self.link("down")
        self.close()

    def close(self) -> None:
        """Ends all its processes; the system closes their connections, and then there is no link any more."""
        self._holder.kill()
        self._holder.wait()
        if self._holder.stdout is not None:
            self._holder.stdout.close()
        deadline = time.monotonic() + 10
        while self._has_processes() and time.monotonic() < deadline:
            time.sleep(0.02)
        delete = ["nsenter", f"--target={self._switch}", "--net", "ip", "link", "del", self._port]
        subprocess.run(delete, capture_output=True, check=False)  # which the kernel does some time later

    def _has_processes(self) -> bool:
        """The first process of a namespace becomes a zombie when all others have ended."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        return state not in "ZX"


class Nodes:
    """Several machines and the bridge between them."""

    def __init__(self, folder: Path, names: Sequence[str], shared: Sequence[Path] = ()) -> None:
        """Starts them.

        Args:
            folder: that all see, and where the file of their names is written.
            names: host names; the addresses are 10.77.0.1 and so on.
            shared: further folders that all see.
        """
        self.folder, self._shared = folder, [folder, *shared]
        self._addresses = {name: f"10.77.0.{number}" for number, name in enumerate(names, start=1)}
        self._hosts = folder / "hosts"
        lines = ["127.0.0.1 localhost", *(f"{address} {name}" for name, address in self._addresses.items())]
        self._hosts.write_text("".join(f"{line}\n" for line in lines), encoding="ascii")
        script = "ip link add switch type bridge; ip link set switch up; echo ready; exec sleep infinity"
        (folder / "names").write_text(
            "passwd: files\ngroup: files\nhosts: files\n", encoding="ascii"
        )  # nobody is asked
        self._switch = subprocess.Popen(
            [*HOLD, "--net", "--fork", "sh", "-ec", script], stdout=subprocess.PIPE, text=True, process_group=0
        )
        assert self._switch.stdout is not None and self._switch.stdout.readline() == "ready\n"
        children = Path(f"/proc/{self._switch.pid}/task/{self._switch.pid}/children").read_text()
        self._switch_pid = int(children)
        self.nodes: dict[str, Node] = {}
        for name in names:
            self.start(name)

    def start(self, name: str, shared: Sequence[Path] | None = None) -> Node:
        """Starts a node; one that was lost comes back as it was before it did anything."""
        folders = self._shared if shared is None else [self.folder, *shared]
        self.nodes[name] = Node(name, self._addresses[name], self._switch_pid, folders, self._hosts)
        return self.nodes[name]

    def __getitem__(self, name: str) -> Node:
        return self.nodes[name]

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *exception: object) -> None:
        for node in self.nodes.values():
            node.close()
        self._switch.kill()
        self._switch.wait()
        if self._switch.stdout is not None:
            self._switch.stdout.close()


def enter(pid: int, spaces: str, *command: str) -> str:
    """Runs a program in namespaces of a process (``net`` or ``all``). Returns what it wrote."""
    done = subprocess.run(
        ["nsenter", f"--target={pid}", f"--{spaces}", *command], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout
