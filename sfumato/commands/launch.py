"""``sfumato launch``: starts a task with one process per device. ``train.sh`` calls it with a checkout's own Python."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.config.environment import environment_with
from sfumato.config.shipped import find_shipped, shipped_folder
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from sfumato.commands.options import Commands

NEEDED = ("yaml", "pydantic", "torch", "transformers", "diffusers")
"""Packages without which no task starts; the first two read the configuration."""

AMD_VARIABLES = ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"]
"""Variables that choose GPUs of AMD: the first two choose among those that the last, which Slurm sets, leaves."""

HINT = "sfumato launch TASK.py CONFIG.yaml [--section.field VALUE ...]"


def add_parser(commands: Commands) -> None:
    """Adds the command and its options."""
    parser = commands.add_parser(
        "launch",
        help="start a task: one process per device, or ranks on several nodes",
        description="Starts a task with one process, or where there are more devices (NPROC_PER_NODE) or nodes "
        "(NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT) with one per device. Without arguments it says what it would "
        "start on this machine.",
        usage=HINT,
        allow_abbrev=False,
    )
    parser.add_argument(
        "command",
        nargs=argparse.REMAINDER,
        metavar="TASK.py CONFIG.yaml ...",
        help="a script, or the name of a task that comes with sfumato such as train_text; its configuration; overrides",
    )
    parser.set_defaults(run=run)


@dataclass(frozen=True)
class Processes:
    """What a launch starts on this node."""

    nodes: int
    of_node: int
    reason: str
    """Why there are so many on a node."""


def run(options: argparse.Namespace) -> int:
    """Reads the configuration, and becomes the task, or the launcher of its ranks.

    Raises:
        ConfigError: when script, configuration or environment are wrong; nothing was started.
    """
    if not options.command:
        return _describe()
    script = find_script(options.command[0])
    arguments = _with_shipped_config(options.command[1:])
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        raise ConfigError(
            f"{sys.executable} has no {', '.join(lacking)}: install sfumato there with {sys.executable} -m pip install "
            f"{_pip_argument()}, or set PYTHON to the Python that has it"
        )
    processes = count_processes(arguments)
    ranks = processes.nodes * processes.of_node
    _refuse_tasks_of_srun()
    if ranks > 1:
        _refuse_second_launcher(processes)
    command = [sys.executable, str(script), *arguments]
    if ranks > 1:
        command[1:1] = _launcher_options(processes)
    _let_processes_import(Path.cwd())
    # the configuration is read before anything heavy is imported or any process is started
    code = _read_configuration(script, arguments, ranks if ranks > 1 else int(os.environ.get("WORLD_SIZE") or 1))
    if code != 0:
        return code
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command)


def find_script(name: str) -> Path:
    """The file of a task: a path, or the name of one that comes with sfumato.

    Raises:
        ConfigError: when there is none; a configuration in its place is told from a typo.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        raise ConfigError(f"{name} is a configuration, and the task is missing before it: {_suggest_command(path)}")
    if path.is_file():
        return path
    tasks = sorted((shipped_folder() / "tasks").glob("*.py"))
    for shipped in tasks:
        if name in (shipped.stem, f"tasks/{shipped.name}"):
            return shipped
    from sfumato.errors import suggest

    raise ConfigError(f"task not found: {name}{suggest(path.stem, [task.stem for task in tasks])}\nusage: {HINT}")


def _suggest_command(config: Path) -> str:
    """The whole command for a configuration that was given without its task."""
    from sfumato.commands.find_task import load_for_task

    try:
        task, _ = load_for_task(config, {})
    except ConfigError:
        return HINT
    return f"sfumato launch tasks/{task}.py {config}"


def _with_shipped_config(arguments: list[str]) -> list[str]:
    """The arguments, with the path of a shipped configuration that is given as ``configs/...`` from another folder."""
    if not arguments or arguments[0].startswith("-"):
        return arguments
    return [str(find_shipped(arguments[0])), *arguments[1:]]


def _pip_argument() -> str:
    root = shipped_folder()
    return f"-e {root}" if (root / "pyproject.toml").is_file() else "sfumato"


def count_processes(arguments: list[str]) -> Processes:
    """How many processes this node starts, by environment, configuration and devices.

    Args:
        arguments: of the task, the configuration first.

    Raises:
        ConfigError: when NNODES or NPROC_PER_NODE is no positive whole number.
    """
    nodes = _read_count("NNODES") or 1
    of_node = _read_count("NPROC_PER_NODE")
    if of_node is not None:
        return Processes(nodes, of_node, "NPROC_PER_NODE")
    if is_on_ray(arguments):
        return Processes(nodes, 1, "with its roles on Ray a task is started once and starts the others itself")
    program, devices = count_devices()
    if devices == 0:
        return Processes(nodes, 1, "no GPU is visible, so it computes on the CPU")
    return Processes(nodes, devices, f"visible devices of {program}")


def _read_count(name: str) -> int | None:
    value = os.environ.get(name, "")
    if not value:
        return None
    if not re.fullmatch(r"[1-9][0-9]*", value):
        raise ConfigError(f"{name} must be a whole number above 0, not {value!r}")
    return int(value)


def is_on_ray(arguments: list[str]) -> bool:
    """Whether the configuration under its overrides puts the roles on Ray; False where it cannot be read, which is said
    when it is validated."""
    from sfumato.config.load import merge, parse_overrides
    from sfumato.config.yaml_text import read_yaml

    try:
        fields = merge(read_yaml(arguments[0]), parse_overrides(arguments[1:])) if arguments else {}
    except ConfigError:
        return False
    runtime = fields.get("runtime")
    return isinstance(runtime, dict) and runtime.get("backend") == "ray"


def count_devices() -> tuple[str, int]:
    """The driver's program that lists GPUs, and how many of them are visible; no torch is imported."""
    for program, arguments, prefix, variables in (
        ("nvidia-smi", ["--list-gpus"], "GPU", ["CUDA_VISIBLE_DEVICES"]),
        ("rocm-smi", ["--showid", "--csv"], "card", AMD_VARIABLES),
    ):
        path = shutil.which(program)
        if path is None:
            continue
        try:
            done = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=60, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            print(f"{program} does not answer, so no GPU is counted (NPROC_PER_NODE says how many): {error}")
            return program, 0
        total = sum(line.startswith(prefix) for line in done.stdout.splitlines())
        variable = next((name for name in variables if name in os.environ), None)
        return program, total if variable is None or total == 0 else count_visible(os.environ[variable], total)
    return "", 0


def count_visible(entries: str, total: int) -> int:
    """How many of ``total`` devices a variable such as CUDA_VISIBLE_DEVICES leaves: those before the first that is
    none."""
    count = 0
    for entry in entries.replace(",", " ").split():
        if re.fullmatch(r"-?[0-9]+", entry) and not 0 <= int(entry) < total:
            break
        count += 1
    return count


def _refuse_tasks_of_srun() -> None:
    """Refuses to start in several tasks of srun that know nothing of each other: one would train, on its part of the
    GPUs alone, and the others find its folder taken.

    Raises:
        ConfigError: when srun has started several, and the environment does not say what each is.
    """
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS", "1")
    if tasks != "1" and not os.environ.get("NNODES") and not os.environ.get("WORLD_SIZE"):
        raise ConfigError(
            f"srun has started this {tasks} times, and each would be a run of its own: start it once on each node "
            "(srun --ntasks-per-node=1) with NNODES, NODE_RANK=$SLURM_NODEID and MASTER_ADDR, as "
            "cluster/slurm_sft.sbatch does, or with srun --ntasks=1 on one"
        )


def _refuse_second_launcher(processes: Processes) -> None:
    """Refuses to start processes within those of another launcher, of which each would train a run of its own.

    Raises:
        ConfigError: when WORLD_SIZE says that there are others, and NNODES does not say which they are.
    """
    size = os.environ.get("WORLD_SIZE", "1")
    if size != "1" and not os.environ.get("NNODES"):
        raise ConfigError(
            f"WORLD_SIZE is {size} in the environment, as another launcher sets it, and {processes.of_node} processes "
            f"would start here ({processes.reason}), which know nothing of the others: where it counts nodes, as "
            "Kubeflow's may, set NNODES=$WORLD_SIZE and NODE_RANK=$RANK; where it counts processes, such as those of "
            "torchrun, set NPROC_PER_NODE=1; else unset it"
        )


def _launcher_options(processes: Processes) -> list[str]:
    options = ["-m", "sfumato.launcher", "--nproc-per-node", str(processes.of_node)]
    if processes.nodes == 1:
        return options
    for name, what in (("NODE_RANK", "the number of this node, from 0 on"), ("MASTER_ADDR", "the first node")):
        if not os.environ.get(name):
            raise ConfigError(f"NNODES is {processes.nodes}: set {name} to {what}")
    address = ["--master-addr", os.environ["MASTER_ADDR"], "--master-port", os.environ.get("MASTER_PORT") or "29500"]
    return [*options, "--nnodes", str(processes.nodes), "--node-rank", os.environ["NODE_RANK"], *address]


def _read_configuration(script: Path, arguments: list[str], ranks: int) -> int:
    """Reads the configuration as the task will, for so many ranks, without torch; the exit code, 0 if it is right."""
    from sfumato.config import __main__ as reading

    reading.defer("torch")
    mistakes = io.StringIO()
    with environment_with({"WORLD_SIZE": str(ranks)}):
        with contextlib.redirect_stderr(mistakes):
            code = reading.main([str(script), *arguments])
        if code != 0 and (other := _other_task(script, arguments)):
            raise ConfigError(f"{arguments[0]} is a configuration of another task: {other}")
    print(mistakes.getvalue(), end="", file=sys.stderr)
    return code


def _other_task(script: Path, arguments: list[str]) -> str:
    """The command for a configuration that the script does not read, but another task; empty if there is none."""
    from sfumato.config.__main__ import schema_of_script
    from sfumato.config.load import load_config
    from sfumato.config.tasks import TASKS, schema_of

    script_schema = schema_of_script(script)
    if script_schema is None or not arguments or not Path(arguments[0]).is_file():
        return ""
    for schema, task in [(script_schema, ""), *((schema_of(task), task) for task in TASKS)]:
        try:
            load_config(schema, arguments[0])
        except ConfigError:
            continue
        return f"sfumato launch tasks/{task}.py {arguments[0]}" if task else ""
    return ""


def _let_processes_import(folder: Path) -> None:
    """Lets the task import from a folder, which may hold rewards of one's own."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(folder) not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *(path for path in paths if path)])
        sys.path.insert(1, str(folder))


def _describe() -> int:
    """Says what a launch would start on this machine."""
    processes = count_processes([])
    start = "1 process" if processes.of_node == 1 else f"{processes.of_node} processes"
    nodes = f" on each of {processes.nodes} nodes (NNODES)" if processes.nodes > 1 else ""
    print(f"usage: {HINT}")
    print(f"This machine would start {start}{nodes}: {processes.reason}.")
    print("NPROC_PER_NODE sets how many; for several nodes set NNODES, NODE_RANK and MASTER_ADDR on each.")
    print("sfumato recipes lists tasks and configurations; sfumato new copies them to a folder of your own.")
    return 0
