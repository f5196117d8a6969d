"""Programs per second that the sandbox runs, by how many at the same time, beside the same without it.

python benchmarks/sandbox_rate.py --programs 200
"""

import argparse
import subprocess
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from sfumato.rewards.base import Sample
from sfumato.rewards.code import CodeReward
from sfumato.sandbox.sandbox import PYTHON, Sandbox


def rate(run: Callable[[int], object], programs: int, threads: int) -> float:
    """Programs per second."""
    run(0)
    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        list(pool.map(run, range(programs)))
        return programs / (time.perf_counter() - began)


def main() -> None:
    """Prints a row for each kind of program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", type=int, default=200, help="how many of each kind")
    programs = parser.parse_args().programs
    sandbox = Sandbox()
    sandbox.check()
    tests = {"tests": ["assert f(1) == 2", "assert f(2) == 3"]}
    answer = Sample(text="def f(x): return x + 1", prompt="", metadata=tests, group_id=0)
    reward = CodeReward(concurrency=1)
    kinds = {
        "python -I -S, no sandbox": lambda _: subprocess.run(
            [PYTHON, "-I", "-S", "-c", "print(1)"], capture_output=True
        ),
        "python in the sandbox": lambda _: sandbox.run_python("print(1)"),
        "/bin/true in the sandbox": lambda _: sandbox.run(["/bin/true"]),
        "reward code, assertions": lambda _: reward.score([answer]),
    }
    print(f"{'programs per second':28}" + "".join(f"{f'{threads} at a time':>14}" for threads in (1, 2, 4)))
    for name, run in kinds.items():
        print(f"{name:28}" + "".join(f"{rate(run, programs, threads):14.0f}" for threads in (1, 2, 4)))


if __name__ == "__main__":
    main()
