"""How much memory of this machine a process may still take."""

from __future__ import annotations

import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")
"""Where a container, or whoever else limits the memory of processes, tells the limit."""

MEMINFO = Path("/proc/meminfo")


def free_host_bytes() -> int:
    """Bytes that are free, or become free when they are needed; by the machine and by a limit of this container.

    macOS tells how much memory there is, but not how much is free: half of it is taken to be.
    """
    try:
        machine = _read_fields(MEMINFO)["MemAvailable:"] * 1024  # told in KiB
    except FileNotFoundError:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    limit = CGROUP / "memory.max"
    if not limit.is_file() or not (text := limit.read_text(encoding="ascii").strip()).isdecimal():
        return machine  # no limit
    used = int((CGROUP / "memory.current").read_text(encoding="ascii"))
    reclaimable = _read_fields(CGROUP / "memory.stat").get("inactive_file", 0)
    return max(0, min(machine, int(text) - used + reclaimable))


def _read_fields(path: Path) -> dict[str, int]:
    """The lines of a file of the kernel: a name and a number."""
    words = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    return {line[0]: int(line[1]) for line in words if len(line) > 1}
