"""What runs inside the sandbox for reasoning-gym: makes problems again, and scores answers with their own verifiers.

The first line of the standard input is JSON, ``{"paths": [...]}``, each further one a list of ``{task, size, seed,
index, parameters, answer, given, limit_s}``, which it answers with a line: a list with a number for each, or a text
that says why there is none. Verifiers may evaluate what they are given, so each runs in a process of its own, which can
neither look into this one nor leave processes; files that it leaves in /tmp stay for those after it.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import signal
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # this file runs alone in the sandbox, where sfumato is not
    from sfumato.config.open_mappings import JsonObject

PR_SET_DUMPABLE = 4


def make_problems(task: str, size: int, seed: int, parameters: dict[str, object]) -> Any:
    """The problems of a task, or why there are none."""
    from reasoning_gym.factory import create_dataset

    try:
        return create_dataset(task, size=size, seed=seed, **parameters)
    except Exception as error:
        return f"its problems cannot be made: {type(error).__name__}: {str(error)[:200]}"


def score(request: dict[str, object], problems: Any) -> float | str:
    """The verdict of the task's own verifier."""
    if isinstance(problems, str):
        return problems
    entry = problems[request["index"]]
    if str(entry["answer"]) != request["answer"]:
        return "this version of reasoning-gym makes another problem than the row's: make the rows again"
    return float(problems.score_answer(request["given"], entry))


def score_all(requests: list[JsonObject], problems: JsonObject) -> list[float | str]:
    """A score for each request, or the reason why there is none.

    Equal requests are scored once: a policy that is sure gives the same answer many times in a group.

    Args:
        requests: as the module describes them.
        problems: data sets by task, size, seed and parameters; those that are missing are added, since making them may
            take a while.
    """
    scores = []
    score_of = {}
    for request in requests:
        task = [request[name] for name in ("task", "size", "seed", "parameters")]
        task_key = json.dumps(task, sort_keys=True)
        if task_key not in problems:
            problems[task_key] = make_problems(*task)
            gc.freeze()  # memory that processes share stays shared
        request_key = json.dumps(request, sort_keys=True)
        if request_key not in score_of:
            score_of[request_key] = in_own_process(request, problems[task_key])
        scores.append(score_of[request_key])
    return scores


def in_own_process(request: JsonObject, problems: object) -> float | str:
    """``score`` in a forked process, which is killed after ``limit_s`` with all that it has started."""
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        null_fd = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):  # what it prints is no result
            os.dup2(null_fd, descriptor)
        try:
            result: float | str = score(request, problems)
        except BaseException as error:
            result = f"its verifier raised {type(error).__name__}: {str(error)[:200]}"
        os.write(writing, json.dumps(result).encode())
        os._exit(0)
    os.close(writing)
    ready, _, _ = select.select([reading], [], [], request["limit_s"])
    content = os.read(reading, 4096) if ready else b""
    os.close(reading)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with contextlib.suppress(ProcessLookupError):  # there mostly are none
        os.kill(-1, signal.SIGKILL)  # what it has started: all within the sandbox but this process and the first
    if not content:
        limit_s = request["limit_s"]
        return "its verifier ended without a score" if ready else f"its verifier took more than {limit_s:g} s"
    try:
        return json.loads(content)
    except ValueError:
        return "its verifier wrote no score"


if __name__ == "__main__":
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0)  # its processes have the same user
    sys.path.extend(json.loads(sys.stdin.readline())["paths"])
    import reasoning_gym  # noqa: F401  (once, before the processes that use it)

    print(json.dumps("ready"), flush=True)
    problems_of_tasks: JsonObject = {}
    for line in sys.stdin:
        print(json.dumps(score_all(json.loads(line), problems_of_tasks)), flush=True)
