"""How long it takes until a command has an answer: help, a wrong key, a plan of a large model.

    python benchmarks/start_up.py [--repeats 3]

Prints the processor time (user and system, of all processes of the command) and the wall-clock time of each, the
smallest of the repeats.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
TRAIN = ["bash", "train.sh"]
SFUMATO = [sys.executable, "-m", "sfumato.cli"]
COMMANDS = {
    "train.sh tasks/rl_diffusion.py --help": [*TRAIN, "tasks/rl_diffusion.py", "--help"],
    "the same with a wrong key": [*TRAIN, "tasks/rl_diffusion.py", "configs/quickstart/rl.yaml", "--train.sead", "1"],
    "train.sh tasks/train_text.py --help": [*TRAIN, "tasks/train_text.py", "--help"],
    "the same with a wrong key ": [*TRAIN, "tasks/train_text.py", "configs/quickstart/text_sft.yaml", "--sead", "1"],
    "sfumato --help": [*SFUMATO, "--help"],
    "sfumato check --help": [*SFUMATO, "check", "--help"],
    "sfumato check with a wrong key": [*SFUMATO, "check", "configs/quickstart/rl.yaml", "--train.sead", "1"],
    "sfumato check configs/text/deepseek_v3_pretrain.yaml --skip-data": [
        *SFUMATO,
        "check",
        "configs/text/deepseek_v3_pretrain.yaml",
        "--skip-data",
    ],
}
"""The last one looks at a model of 671 billion parameters on 512 ranks."""


def measure(command: list[str]) -> tuple[float, float]:
    """Processor seconds and seconds of a command with its children."""
    environment = {**os.environ, "PYTHON": sys.executable, "PYTHONPATH": str(ROOT), "NPROC_PER_NODE": "1"}
    before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, check=False)
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    print("| command | CPU s | s |\n|---|---|---|")
    for name, command in COMMANDS.items():
        measured = [measure(command) for _ in range(repeats)]
        cpu, wall = (min(values) for values in zip(*measured, strict=True))
        print(f"| `{name.strip()}` | {cpu:.2f} | {wall:.2f} |", flush=True)


if __name__ == "__main__":
    main()
