"""Who can reach what runs here: the ports at which processes of this user listen that belong to sfumato."""

from __future__ import annotations

import ipaddress
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sfumato.runtime.cluster.token import token_file

PROGRAMS = re.compile(r"sfumato|(^|[ /])tasks/\w+\.py|^ray::|gcs_server|raylet|/ray/|vllm|sglang")
"""Commands of runs, reward servers, Ray and the engines that runs start."""

LISTENING = "0A"


@dataclass(frozen=True)
class Port:
    """A port at which a process listens."""

    pid: int
    command: str
    address: str
    number: int

    @property
    def reach(self) -> str:
        """Who can connect, in words."""
        address = ipaddress.ip_address(self.address)
        if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped:
            address = address.ipv4_mapped
        if address.is_loopback:
            return "everybody on this machine, and nobody else"
        if address.is_unspecified:
            return "every network of this machine"
        return f"whoever reaches {address}"

    @property
    def is_open(self) -> bool:
        """Whether other machines can connect."""
        return "nobody else" not in self.reach


def open_ports(proc: Path = Path("/proc")) -> Iterator[Port]:
    """Ports at which processes of this user listen that belong to sfumato, in the order of the processes.

    Args:
        proc: the file system of processes, in which the kernel lists connections by inode and open files by process.
    """
    listening: dict[str, tuple[str, int]] = {}
    for name in ("tcp", "tcp6"):
        table = proc / "net" / name
        for row in [line.split() for line in table.read_text().splitlines()[1:]] if table.is_file() else ():
            if row[3] == LISTENING:
                listening[row[9]] = _parse_kernel_address(row[1])
    for folder in sorted((path for path in proc.glob("[0-9]*")), key=lambda path: int(path.name)):
        try:
            if folder.stat().st_uid != os.geteuid():
                continue
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if not PROGRAMS.search(command):
                continue
            # an open socket is a link to "socket:[inode]", by which it is found in the kernel's tables
            links = {os.readlink(link) for link in (folder / "fd").iterdir()}
        except OSError:  # it has ended, or may not be looked into
            continue
        for inode, (address, number) in sorted(listening.items(), key=lambda item: item[1][1]):
            if f"socket:[{inode}]" in links:
                yield Port(int(folder.name), command, address, number)


def token_problem() -> str:
    """What is wrong with the authentication of Ray, or with the file of its token; empty where nothing is."""
    path = token_file()
    if os.environ.get("RAY_AUTH_MODE", "token") != "token":
        return f"RAY_AUTH_MODE is {os.environ['RAY_AUTH_MODE']}: whoever reaches a port of Ray runs programs as you"
    if path.is_file() and stat.S_IMODE(path.stat().st_mode) & 0o077:
        return f"others may read {path}, and with it run programs as you"
    return ""


def _parse_kernel_address(text: str) -> tuple[str, int]:
    """Address and port as the kernel writes them: words of four bytes in the order of the processor."""
    digits, _, port = text.partition(":")
    words = [bytes.fromhex(digits[start : start + 8])[::-1] for start in range(0, len(digits), 8)]
    return str(ipaddress.ip_address(b"".join(words))), int(port, 16)
