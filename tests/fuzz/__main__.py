"""Gives mutated inputs to every reader in turn, and says what came out.

    python -m tests.fuzz --minutes 60
    python -m tests.fuzz --minutes 1 --only png --only yaml
    python -m tests.fuzz --again png FILE            # one input, in this process

Each reader works in a child process with a limit of memory, on inputs that each have a limit of processor time. What
goes wrong (an error that is none of those that the reader promises, a crash, too long, too much memory) is listed with
the input in a file. The end is a table in Markdown.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import mmap
import os
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

from sfumato.errors import LONGEST_LINE
from tests.fuzz.mutate import mutate
from tests.fuzz.readers import Reader, make_readers

LIMIT_S = 10.0
"""Processor time of one input; of those that compile or start something more is allowed (``Reader.limit_s``)."""
LIMIT_BYTES = 3 * 2**30
"""Address space of a child on top of what it was forked with."""
LIMIT_GROWTH = 2 * 2**30
"""Memory that one input may take at its highest: the largest picture that is read has 178 million pixels."""
SLICE_S = 15.0
"""Of a turn of a reader."""
LARGEST_INPUT = 8 * 2**20
STATE = struct.Struct("qdd")
"""Number of the input that is read, processor time of its beginning, wall clock of its beginning."""


class Totals:
    """What is known of a reader after all of its turns."""

    def __init__(self) -> None:
        self.num_inputs = 0
        self.slowest_s = 0.0
        self.most_bytes = 0
        self.kinds: Counter[str] = Counter()
        self.problems: dict[str, str] = {}
        """File of an input, by what went wrong."""

    def add(self, turn: dict[str, Any]) -> None:
        self.num_inputs += turn["num_inputs"]
        self.slowest_s = max(self.slowest_s, turn["slowest_s"])
        self.most_bytes = max(self.most_bytes, turn["most_bytes"])
        self.kinds.update(turn["kinds"])
        for problem, file in turn["problems"].items():
            self.problems.setdefault(problem, file)


def judge(reader: Reader, content: bytes, folder: Path) -> tuple[str, str | None]:
    """The kind of what came of an input, and what is wrong with it, if anything."""
    try:
        reader.read(content, folder)
    except MemoryError:
        return "MemoryError", f"MemoryError at {_place()}"
    except reader.errors as error:
        text = str(error)
        if len(text) > 3 * LONGEST_LINE:
            return type(error).__name__, f"a message of {len(text):,} letters at {_place()}"
        return type(error).__name__, None
    except BaseException as error:
        return type(error).__name__, f"{type(error).__name__}: {str(error)[:150]} at {_place()}"
    return "read", None


def _place() -> str:
    """Where the error that is handled was raised: the last line of sfumato, and the last of all."""
    frames = traceback.extract_tb(sys.exc_info()[2])
    ours = [frame for frame in frames if "/sfumato/" in frame.filename]
    shown = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in (*ours[-1:], *frames[-1:])]
    return " < ".join(dict.fromkeys(reversed(shown)))


def _highest_bytes() -> int:
    """The most memory since it was reset."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def work(reader: Reader, seed: int, seconds: float, state: mmap.mmap, out: Path, folder: Path) -> None:
    """Reads mutated inputs until the time is over, in a child; what is known stands in ``out/turn.json``."""
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + LIMIT_BYTES, size + LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**29, 2**29))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    log = os.open(out / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    draw, seeds = random.Random(seed), reader.seeds
    turn: dict[str, Any] = {"num_inputs": 0, "slowest_s": 0.0, "most_bytes": 0, "kinds": {}, "problems": {}}
    kinds: Counter[str] = Counter()
    ends = time.monotonic() + seconds
    unchanged = list(seeds)  # read first: a reader that refuses them all would be tried on one error alone
    while time.monotonic() < ends:
        content = unchanged.pop() if unchanged else mutate(draw.choice(seeds), seeds, draw)[:LARGEST_INPUT]
        (out / "current").write_bytes(content)
        began = time.process_time()
        state[: STATE.size] = STATE.pack(turn["num_inputs"], began, time.monotonic())
        Path("/proc/self/clear_refs").write_text("5")
        before = _highest_bytes()
        kind, problem = judge(reader, content, folder)
        spent_s, grown = time.process_time() - began, _highest_bytes() - before
        if problem is None and grown > LIMIT_GROWTH:
            problem = f"took {grown / 2**30:.1f} GiB ({kind})"
        if problem is not None and problem not in turn["problems"]:
            path = out / hashlib.sha256(content).hexdigest()[:16]
            path.write_bytes(content)
            turn["problems"][problem] = str(path)
        kinds[kind] += 1
        turn["num_inputs"] += 1
        if turn["num_inputs"] == len(seeds) and not kinds["read"]:
            turn["problems"]["reads none of its real inputs"] = str(out / "current")
        turn["slowest_s"], turn["most_bytes"] = max(turn["slowest_s"], spent_s), max(turn["most_bytes"], grown)
        if problem is not None or turn["num_inputs"] % 50 == 1 or time.monotonic() > ends:
            turn["kinds"] = dict(kinds)
            (out / "turn.tmp").write_text(json.dumps(turn))
            (out / "turn.tmp").rename(out / "turn.json")
        os.ftruncate(log, 0)


def take_turn(reader: Reader, seed: int, seconds: float, out: Path, totals: Totals) -> None:
    """One turn of a reader in a child, which is ended when an input takes too long."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "turn.json").unlink(missing_ok=True)
    state = mmap.mmap(-1, STATE.size)
    folder = Path(tempfile.mkdtemp(prefix="sfumato-fuzz-"))
    if (child := os.fork()) == 0:
        try:
            os.setsid()
            work(reader, seed, seconds, state, out, folder)
        except BaseException:
            (out / "failure.txt").write_text(traceback.format_exc())
            os._exit(1)
        os._exit(0)
    problem = None
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            break
        _, began, since = STATE.unpack(state[: STATE.size])
        waits_s = time.monotonic() - since if since else 0.0
        if since and (_cpu_s(child) - began > reader.limit_s or waits_s > 10 * reader.limit_s):
            problem = f"more than {reader.limit_s:.0f} s" if waits_s <= 10 * reader.limit_s else "waits without end"
            os.killpg(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            break
        time.sleep(0.05)
    if problem is None and (code := os.waitstatus_to_exitcode(status)) != 0:
        problem = f"the process ended with {code}"
    turn = json.loads((out / "turn.json").read_text()) if (out / "turn.json").exists() else None
    totals.add(turn or {"num_inputs": 0, "slowest_s": 0.0, "most_bytes": 0, "kinds": {}, "problems": {}})
    if problem is not None:
        content = (out / "current").read_bytes() if (out / "current").exists() else b""
        path = out / hashlib.sha256(content).hexdigest()[:16]
        path.write_bytes(content)
        totals.problems.setdefault(problem, str(path))
    shutil.rmtree(folder, ignore_errors=True)


def _cpu_s(process: int) -> float:
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def table(totals: dict[str, Totals], minutes: float) -> str:
    """What came out, in Markdown."""
    lines = [
        f"{minutes:.1f} minutes",
        "",
        "| reader | inputs | read | errors | slowest | memory more |",
        "|---|---|---|---|---|---|",
    ]
    for name, total in totals.items():
        errors = ", ".join(f"{kind} {count:,}" for kind, count in total.kinds.most_common() if kind != "read")
        lines.append(
            f"| {name} | {total.num_inputs:,} | {total.kinds['read']:,} | {errors} | {total.slowest_s:.1f} s | "
            f"{total.most_bytes / 2**20:.0f} MiB |"
        )
    for name, value in totals.items():
        lines += [f"- {name}: {problem} ({file})" for problem, file in value.problems.items()]
    return "\n".join(lines)


def main() -> int:
    """Runs the command line; the exit status is 1 when something is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--slice", type=float, default=SLICE_S, help="seconds of a turn of a reader")
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()) / "fuzz")
    parser.add_argument("--again", nargs=2, metavar=("NAME", "FILE"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="sfumato-fuzz-seeds-") as folder:
        names = arguments.only or ([arguments.again[0]] if arguments.again else [])
        readers = {reader.name: reader for reader in make_readers(Path(folder), names)}
        if arguments.again:
            name, file = arguments.again
            readers[name].read(Path(file).read_bytes(), Path(tempfile.mkdtemp(prefix="sfumato-fuzz-")))
            return 0
        totals = {name: Totals() for name in readers}
        began, turn = time.monotonic(), 0
        ends = began + 60 * arguments.minutes
        while time.monotonic() < ends:
            for name, reader in readers.items():
                seconds = min(arguments.slice, ends - time.monotonic())
                if seconds <= 0:
                    break
                take_turn(reader, arguments.seed + turn, seconds, arguments.out / name, totals[name])
                turn += 1
            minutes = (time.monotonic() - began) / 60
            (arguments.out / "table.md").write_text(table(totals, minutes) + "\n")
        print(table(totals, minutes))
    return int(any(total.problems for total in totals.values()))


if __name__ == "__main__":
    sys.exit(main())
