"""Says whether the nodes of a Ray cluster fit together.

    python cluster/check_nodes.py ADDRESS --nodes N --shared DIR

Waits until so many nodes have joined, then asks each of them which versions it runs and whether it sees the folder
that runs are written to. Exit code 0 when all agree, 2 with one line for each difference.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import resource
import secrets
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sfumato.runtime.cluster.token import send_token, token_file

send_token()  # Ray reads the environment when it is imported

import ray  # noqa: E402
from ray.exceptions import AuthenticationError  # noqa: E402
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: E402

PACKAGES = ("sfumato", "torch", "ray", "transformers", "diffusers", "numpy")
SMALL_SHARED_MIB = 512
FEW_OPEN_FILES = 4096


def describe_node(folder: str | None, mark: str) -> dict[str, Any]:
    """What one node is; runs there.

    Args:
        folder: of the runs; None when it is not looked at.
        mark: name of a file in it that the driver has just made.
    """
    import sfumato

    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    code = Path(sfumato.__file__).parent
    found = subprocess.run(["git", "-C", str(code), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    versions["commit of sfumato"] = found.stdout.strip() or "unknown"
    return {
        "host": socket.gethostname(),
        "versions": versions,
        "folder": None if folder is None else _see(Path(folder), mark),
        "shared_mib": shutil.disk_usage("/dev/shm").total / 2**20,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    }


def _see(folder: Path, mark: str) -> str:
    """What is wrong with a folder; empty when the mark lies there and the node can write."""
    if not (folder / mark).is_file():
        return "is another folder there, or none"
    try:
        own = folder / f"{mark}.{os.getpid()}.{socket.gethostname()}"
        own.touch(exist_ok=False)
        own.unlink()
    except OSError as error:
        return f"cannot be written to: {error.strerror}"
    return ""


def main(arguments: list[str] | None = None) -> int:
    """Runs the check and returns its exit code."""
    parser = argparse.ArgumentParser(description="whether the nodes of a Ray cluster fit together")
    parser.add_argument("address", help="HEAD:PORT, as start_head.sh says it")
    parser.add_argument("--nodes", type=int, default=1, help="how many must have joined (default 1)")
    parser.add_argument("--shared", type=Path, help="folder that every node must see, such as that of train.output_dir")
    parser.add_argument("--wait-s", type=float, default=300.0, help="how long to wait for them (default 300)")
    given = parser.parse_args(arguments)
    try:
        ray.init(address=given.address, log_to_driver=False, logging_level="warning")
    except (ConnectionError, AuthenticationError) as error:
        print(
            f"error: cannot connect to {given.address} ({str(error).splitlines()[0]}): this machine must be one of its "
            f"nodes, and {token_file()} (mode 600) the token of the cluster, where RAY_AUTH_MODE is not disabled",
            file=sys.stderr,
        )
        return 2
    try:
        nodes = _wait(given.nodes, given.wait_s)
        if len(nodes) < given.nodes:
            names = ", ".join(each["NodeManagerHostname"] for each in nodes)
            print(
                f"error: {len(nodes)} of {given.nodes} nodes have joined in {given.wait_s:g} s ({names}): see the logs "
                "of start_worker.sh on the others; firewalls must let every TCP port pass between nodes",
                file=sys.stderr,
            )
            return 2
        found = _ask(nodes, given.shared)
    finally:
        ray.shutdown()
    for node, each in zip(nodes, found, strict=True):
        counts = ", ".join(f"{node['Resources'].get(kind, 0):g} {kind}s" for kind in ("CPU", "GPU"))
        print(f"{each['host']} {node['NodeManagerAddress']}: {counts}, {each['shared_mib']:,.0f} MiB of /dev/shm")
    for line in _warnings(found):
        print(f"warning: {line}", file=sys.stderr)
    wrong = _differences(found, given.shared)
    for line in wrong:
        print(f"error: {line}", file=sys.stderr)
    return 2 if wrong else 0


def _wait(count: int, seconds: float) -> list[dict[str, Any]]:
    until = time.monotonic() + seconds
    while True:
        nodes = [each for each in ray.nodes() if each["Alive"]]
        if len(nodes) >= count or time.monotonic() > until:
            return nodes
        time.sleep(0.5)


def _ask(nodes: list[dict[str, Any]], shared: Path | None) -> list[dict[str, Any]]:
    folder, mark = None, f".nodes-{secrets.token_hex(8)}"
    if shared is not None:
        shared.mkdir(parents=True, exist_ok=True)
        folder = str(shared.resolve())
        (shared / mark).touch(exist_ok=False)
    try:
        calls = []
        for node in nodes:
            here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            remote = ray.remote(num_cpus=0, scheduling_strategy=here, max_retries=0)(describe_node)
            calls.append(remote.remote(folder, mark))
        return ray.get(calls, timeout=120)
    finally:
        if shared is not None:
            (shared / mark).unlink()


def _differences(found: list[dict[str, Any]], shared: Path | None) -> list[str]:
    """One line for each thing in which a node differs from the first one."""
    lines = [f"{each['host']}: {shared} {each['folder']}" for each in found if each["folder"]]
    first = found[0]
    for each in found[1:]:
        for name, version in each["versions"].items():
            if version != first["versions"][name]:
                lines.append(
                    f"{name} is {version} on {each['host']} but {first['versions'][name]} on {first['host']}: "
                    "install the same environment on every node (pip install -c constraints.txt)"
                )
    return lines


def _warnings(found: list[dict[str, Any]]) -> list[str]:
    lines = []
    for each in found:
        if each["shared_mib"] < SMALL_SHARED_MIB:
            lines.append(f"{each['host']}: /dev/shm is small, so objects go to disk: raise it (docker run --shm-size)")
        if each["open_files"] < FEW_OPEN_FILES:
            lines.append(f"{each['host']}: {each['open_files']} open files at most: raise 'ulimit -n'")
    return lines


if __name__ == "__main__":
    sys.exit(main())
