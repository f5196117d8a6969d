"""Functions that tests run in the processes of roles."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from sfumato.errors import NonFiniteError, UserError
from sfumato.parallel.mesh import Mesh
from sfumato.runtime.cluster.worker import RoleRun


class State:
    def __init__(self, config: Any, mesh: Mesh, run: RoleRun) -> None:
        self.config, self.mesh, self.run, self.version = config, mesh, run, 3
        self.threads = torch.get_num_threads()
        self.numbers: list[int] = []


class OddError(UserError):
    exit_code = 77

    def __init__(self, text: str, row: int) -> None:
        super().__init__(text)
        self.row = row

    def __reduce__(self) -> Any:
        return OddError, (str(self), self.row)


class UnpicklableError(RuntimeError):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def build(config: Any, mesh: Mesh, run: RoleRun) -> State:
    run.say(f"built with {config}")
    return State(config, mesh, run)


def build_badly(config: Any, mesh: Mesh, run: RoleRun) -> State:
    raise UserError(f"cannot build {config}")


def sum_over_ranks(state: State, value: float) -> float:
    return state.mesh.sum(value * (state.mesh.rank + 1), over="world")


def environment(state: State) -> dict[str, str | None]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMP_NUM_THREADS", "MKL_CBWR")
    return {name: os.environ.get(name) for name in names} | {"threads": str(torch.get_num_threads())}


def data_rank_of(state: State, part: str, suffix: str) -> str:
    parts = state.mesh.gather((state.mesh.data_rank, part + suffix), over="world")
    return str(parts)


def remember(state: State, number: int, seconds: float = 0.0) -> list[int]:
    time.sleep(seconds)
    state.numbers.append(number)
    return state.numbers


def visible_gpus(state: State) -> list[str]:
    """By rank."""
    return state.mesh.gather(os.environ["CUDA_VISIBLE_DEVICES"], over="world")


def numbers(state: State) -> list[int]:
    return list(state.numbers)


def make(state: State, part: int, size: int) -> tuple[dict[str, Any], np.ndarray]:
    """A tensor and an array of so many float32."""
    tensor = torch.full((size,), float(part + 1), dtype=torch.bfloat16)
    return {"tensor": tensor, "rank": state.mesh.rank}, np.full(size, part + 10, np.float32)


def add_up(state: State, values: list[Any], factor: float) -> float:
    total = 0.0
    for first, (second,) in values:
        first["tensor"] += 1  # what arrives may be written to
        total += float(first["tensor"].float().sum()) + float(second.sum())
    return total * factor


def raise_error(state: State, kind: str) -> None:
    if kind == "odd":
        raise OddError("a row is broken", row=12)
    if kind == "nan":
        raise NonFiniteError("loss of step 3 is nan")
    if kind == "unpicklable":
        raise UnpicklableError(1, 2)
    if kind == "exit":
        sys.exit(3)
    {}["no such key"]


def fail_on_rank(state: State, rank: int) -> None:
    if state.mesh.rank == rank:
        raise UserError("only here")
    dist.barrier()


def where(state: State) -> int:
    return os.getpid()


def score(state: State, value: int, seconds: float, marker: str = "") -> int:
    """Twice the value. With a marker: the first process that gets there writes its id into that file."""
    if marker and not Path(marker).exists():
        path = Path(f"{marker}.{os.getpid()}")
        path.write_text(str(os.getpid()))
        path.rename(marker)
    time.sleep(seconds)
    return 2 * value


def sleep_in_rank(state: State, rank: int, seconds: float) -> int:
    if state.mesh.rank == rank:
        time.sleep(seconds)
    return state.mesh.rank


def crash(state: State) -> None:
    print("about to crash", file=sys.stderr, flush=True)
    ctypes.string_at(0)


def leave(state: State, code: int) -> None:
    print("last words", file=sys.stderr, flush=True)
    os._exit(code)


def talk(state: State, text: str) -> None:
    print(text, flush=True)
    state.run.say(f"said {text}")
    state.run.add_time("talk", 2.0)


def say_and_wait(state: State, text: str, seconds: float) -> None:
    state.run.say(f"said {text}")
    time.sleep(seconds)


def has_part(state: State, value: Any) -> Any:
    return value


def build_slowly(config: float, mesh: Mesh, run: RoleRun) -> State:
    time.sleep(config)
    return State(config, mesh, run)


def is_asked_to_stop(state: State) -> bool:
    return state.run.stop_requested


def crash_in(state: State, rank: int) -> None:
    if state.mesh.rank == rank:
        crash(state)
    time.sleep(1.0)


def sleep_or_raise(state: State, seconds: float) -> None:
    if seconds < 0:
        raise KeyError(seconds)
    time.sleep(seconds)


def lose_each_other(state: State) -> None:
    """As when the network between two machines is down."""
    raise RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection reset by peer [10.77.0.2]:1234")
