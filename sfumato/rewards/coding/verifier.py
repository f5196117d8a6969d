"""What runs inside the sandbox for reasoning-gym: makes problems again, and scores answers with their own verifiers.

Standard input is JSON, ``{"paths": [...], "asked": [{task, size, seed, index, parameters, answer, given, limit_s}]}``;
the standard output a list with a number for each, or a text that says why there is none. Verifiers may evaluate what
they are given, so each runs in a process of its own; files that it leaves in /tmp stay for those after it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from typing import Any


def score(asked: dict[str, Any]) -> float | str:
    """The verdict of the task's own verifier."""
    from reasoning_gym.factory import create_dataset

    problems = create_dataset(asked["task"], size=asked["size"], seed=asked["seed"], **asked["parameters"])
    entry = problems[asked["index"]]
    if str(entry["answer"]) != asked["answer"]:
        return "this version of reasoning-gym makes another problem than the row's: make the rows again"
    return float(problems.score_answer(asked["given"], entry))


def in_own_process(asked: dict[str, Any]) -> float | str:
    """The same in a fork, which is ended after its time."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        nothing = os.open(os.devnull, os.O_RDWR)
        for each in (0, 1, 2):  # what it prints is no result
            os.dup2(nothing, each)
        try:
            result: float | str = score(asked)
        except BaseException as error:
            result = f"its verifier raised {type(error).__name__}: {str(error)[:200]}"
        os.write(writing, json.dumps(result).encode())
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], asked["limit_s"])
    content = os.read(reading, 4096) if ready else b""
    os.close(reading)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    if not content:
        return "its verifier ended without a score" if ready else f"its verifier took more than {asked['limit_s']:g} s"
    try:
        return json.loads(content)
    except ValueError:
        return "its verifier wrote no score"


if __name__ == "__main__":
    request = json.load(sys.stdin)
    sys.path.extend(request["paths"])
    import reasoning_gym  # noqa: F401  (once, before the processes that use it)

    print(json.dumps([in_own_process(each) for each in request["asked"]]))
