"""Starts the ranks of a task on this node, passes signals on to them, and answers for them.

    python -m sfumato.launcher --nproc-per-node 2 tasks/train_dit.py my.yaml

Ranks find each other through the variables that torchrun sets, too. What differs is how a run ends: a rank that was
asked to stop gets as long as its step takes, the exit code is that of the rank that ended first, and what ranks say
when they end is said once, without what only followed from it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.config.characters import printable
from sfumato.config.writing import open_to_append
from sfumato.tracking.terminal import hangup_signals, outlive_readers

if TYPE_CHECKING:
    from types import FrameType

GRACE_S = 10.0
"""Seconds that the other ranks have when one has ended with an error; they notice by themselves, unless they hang."""

DUMP_S = 1.0
"""Seconds in which a rank that hangs writes its stacks."""

LOST = 8
"""Exit code where processes died or hang."""


@dataclass
class End:
    """How a rank ended."""

    rank: int
    code: int
    text: str = ""
    kind: str = "own"
    """Cause of the end. own; lost: what another rank did; hang: it has waited for another rank for too long."""
    at: float = 0.0
    """Wall-clock seconds at which the rank ended."""
    stacks: str = ""


class RankProcesses:
    """The ranks of a task on this node."""

    def __init__(self, command: Sequence[str], environments: Sequence[dict[str, str]], folder: Path) -> None:
        """Starts them; each may write into the folder how it ended."""
        self.folder = folder
        self.ranks = [int(environment["RANK"]) for environment in environments]
        self.processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **environment, "SFUMATO_ENDS": str(folder)},
                start_new_session=True,  # Ctrl-C reaches the launcher, and each rank once
                preexec_fn=_end_with_parent,
            )
            for environment in environments
        ]
        self.ends: dict[int, End] = {}
        self.was_asked = False

    def forward(self, number: int, _frame: FrameType | None) -> None:
        """Passes a signal on to the ranks; SIGHUP, which a lost terminal sends, as SIGTERM."""
        self.was_asked = True
        self.send(signal.SIGTERM if number == signal.SIGHUP else number)

    def send(self, number: int) -> None:
        """Sends a signal to the ranks that have not ended."""
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def wait(self) -> list[End]:
        """Waits until all ranks have ended, and returns how, in the order of the ranks.

        Once a rank has failed the others have ``GRACE_S`` to end; what still runs then writes its stacks and is killed.
        """
        # no deadline while all is well: a step may take as long as it takes, also after a signal to stop
        deadline = None
        while self._note_ended():
            if deadline is None and any(end.code for end in self.ends.values()):
                deadline = time.monotonic() + GRACE_S
            if deadline is not None and time.monotonic() > deadline:
                self._kill()
                break
            time.sleep(0.05)
        return [self.ends[rank] for rank in self.ranks]

    def _note_ended(self) -> bool:
        """Notes the ranks that have ended since the last call; returns whether some still run."""
        for rank, process in zip(self.ranks, self.processes, strict=True):
            code = process.poll()
            if code is not None and rank not in self.ends:
                self.ends[rank] = self._read_end(rank, code)
        return len(self.ends) < len(self.processes)

    def _read_end(self, rank: int, code: int) -> End:
        stacks = _read_text(self.folder / f"{rank}.stacks")
        record = _read_text(self.folder / f"{rank}.json")
        if record:
            return End(rank, code, **{"stacks": stacks, **json.loads(record)})
        # without a record the rank ended before it could write one, or was killed
        if code >= 0:
            return End(rank, code, at=time.time())
        if code == -signal.SIGTERM and self.was_asked:
            # A run that is at work takes the signal itself, so that one that began has ended: what it said holds.
            text = (
                "stopped by signal after the run had ended"
                if (self.folder / "log").is_file()
                else "stopped by signal before the run began; nothing was trained"
            )
            return End(rank, 128 + signal.SIGTERM, text, at=time.time())
        name = signal.Signals(-code).name
        hint = ", as the system does when memory runs out" if code == -signal.SIGKILL else ""
        text = f"stopped: rank {rank} was ended by {name}{hint}; to go on, add --train.load_checkpoint_path auto"
        return End(rank, LOST, text, at=time.time(), stacks=stacks)

    def _kill(self) -> None:
        self.send(signal.SIGQUIT)  # faulthandler writes stacks
        time.sleep(DUMP_S)
        for rank, process in zip(self.ranks, self.processes, strict=True):
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self.ends[rank] = End(rank, LOST, kind="killed", stacks=_read_text(self.folder / f"{rank}.stacks"))
        self._note_ended()


def summarise_ends(ends: Sequence[End]) -> tuple[int, str]:
    """The exit code of the run, and its message.

    Both are those of the cause: a rank that failed by itself goes before one that hung, and this before those that only
    lost another rank, however early they noticed. Within a kind the rank that ended first counts.
    """
    failed = sorted((end for end in ends if end.code and end.kind != "killed"), key=lambda end: end.at)
    if not failed:
        return 0, ""
    # a rank that lost another one may end before the one that is the cause
    order = {"own": 0, "hang": 1, "lost": 2}
    first = min(failed, key=lambda end: order[end.kind])
    text = first.text
    if text and first.rank and f"rank {first.rank}" not in text and any(end.text != text for end in ends):
        text = f"rank {first.rank}: {text}"
    silent = [end.rank for end in ends if end.kind == "killed"]
    with_stacks = [end for end in ends if end.stacks and (first.kind == "hang" or end is first)]
    if first.kind == "hang" and silent:
        text += f"; {'rank' if len(silent) == 1 else 'ranks'} {', '.join(map(str, silent))} did not answer"
    parts = [text, *(f"stacks of rank {end.rank}:\n{end.stacks.rstrip()}" for end in with_stacks)]
    return first.code, "\n".join(part for part in parts if part)


def launch(nnodes: int, node_rank: int, nproc: int, address: str, port: int, command: Sequence[str]) -> int:
    """Runs the ranks of a node to their end and returns the exit code of the run."""
    environment = {
        "WORLD_SIZE": str(nnodes * nproc),
        "LOCAL_WORLD_SIZE": str(nproc),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "SFUMATO_STORE": "",  # that of a run within whose ranks this one was started
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),  # all cores in each rank would be too many threads
        "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),  # no C++ stacks when a rank has ended
    }
    # here ranks of this node leave how they ended and which log is the run's; on one node their store lies here, too
    folder = Path(tempfile.mkdtemp(prefix="sfumato_ends_"))
    if nnodes == 1:
        environment |= {"SFUMATO_STORE": str(folder / "store"), **_loopback_only()}
    places = [{"RANK": str(node_rank * nproc + local), "LOCAL_RANK": str(local)} for local in range(nproc)]
    try:
        ranks = RankProcesses([sys.executable, *command], [environment | place for place in places], folder)
        for number in (signal.SIGTERM, signal.SIGINT, *hangup_signals()):
            signal.signal(number, ranks.forward)
        code, text = summarise_ends(ranks.wait())
        if text:
            print(printable(text), file=sys.stderr, flush=True)
            _append_to_log(folder / "log", text)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return code


def _loopback_only() -> dict[str, str]:
    """Environment that binds NCCL's ports to loopback, unless NCCL_SOCKET_IFNAME is set.

    gloo takes its address where process groups are made.
    """
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    return {"NCCL_SOCKET_IFNAME": names[0]} if names and "NCCL_SOCKET_IFNAME" not in os.environ else {}


def _append_to_log(pointer: Path, text: str) -> None:
    """Appends the text to the run's log, if the ranks have written the path of that log into ``pointer``."""
    log = Path(_read_text(pointer))
    try:
        if log.name and log.parent.is_dir():
            with open_to_append(log) as file:
                file.write(f"{printable(text)}\n".encode("utf-8", errors="replace"))
    except OSError as error:
        print(f"{log}: {error.strerror}", file=sys.stderr)


def _read_text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _end_with_parent() -> None:
    """Ranks do not outlive a launcher that is killed (Linux)."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def main(arguments: Sequence[str] | None = None) -> int:
    """Reads the command line of ``train.sh``."""
    outlive_readers()
    parser = argparse.ArgumentParser("sfumato.launcher", description=__doc__, allow_abbrev=False)
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--node-rank", type=int, default=0)
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("--master-addr", default="127.0.0.1")
    parser.add_argument("--master-port", type=int, default=0, help="0 takes one that is free")
    parser.add_argument("command", nargs=argparse.REMAINDER, help="task with its arguments")
    options = parser.parse_args(arguments)
    with socket.socket() as reserved:  # bound, so that nobody else is given the port before rank 0 listens at it
        port = options.master_port
        if port == 0:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(("", 0))
            port = reserved.getsockname()[1]
        return launch(
            options.nnodes, options.node_rank, options.nproc_per_node, options.master_addr, port, options.command
        )


if __name__ == "__main__":
    sys.exit(main())
