"""vLLM on one GPU, started by the ranks of a process group of two as ``train.sh`` makes it.

What it draws beside the training forward pass, in bf16; an update of all weights; its sleep mode; a restart; what is
left when it has been closed. In this process's environment where vLLM is installed there, else as the server of the
python that ``SFUMATO_VLLM_PYTHON`` names. Each rank starts an engine of its own, one after the other.

    python -m benchmarks.gpu.served FOLDER DEVICE KIND [--tiny]     # one rank, with RANK and WORLD_SIZE
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.gpu.cells import Bound, Cell, NotHereError, Setting
from benchmarks.gpu.results import ROOT
from benchmarks.gpu.sft import QWEN3_0_6B
from sfumato.parallel.weights import build_on_meta
from sfumato.rollout.engines.base import GenerationRequest, Sampling
from sfumato.rollout.engines.embedded.complete import complete_requests
from sfumato.rollout.engines.vllm import VllmEngine, VllmSettings
from tests.engines.served_model import CPU_ENVIRONMENT, PYTHON_VARIABLE, log_probs, tiny_config, write_model

MARK = "SFUMATO_GPU_SUITE_MARK"
"""Environment variable by which what a cell has started is found."""

NUM_REQUESTS, PROMPT = 16, 8

BOUNDS = (
    Bound(
        "mean_nats",
        0.03,
        "the engine computes otherwise than training: rollout.engine.dtype, attention backend of vLLM",
    ),
    Bound("quantile_99_nats", 0.15, "as mean_nats; rare tokens differ, which off_policy corrections bound"),
    Bound(
        "updated_mean_nats", 0.03, "an update does not arrive as it was sent: runtime.weight_sync files, and compare"
    ),
    Bound("of_stale", 0.2, "after an update it still draws by the weights before: do not train with it"),
    Bound("start_s", 180, "--enforce-eager in rollout.engine.arguments spares its compiling", real=True),
    Bound("update_s", 5, "1.2 GB should take less: rollout.engine.weights_folder in /dev/shm", real=True),
    Bound("wake_s", 5, "sleeping costs more than it gives: leave rollout.engine.sleep out, share memory", real=True),
    Bound("not_freed", 0.25, "sleep keeps memory: another share of gpu_memory_utilization for training", real=True),
    Bound("restart_s", 180, "as start_s", real=True),
    Bound("processes_left", 0, "processes of vLLM outlive the run and hold memory: end them by their ids, see left"),
)


def cells(setting: Setting) -> dict[str, Cell]:
    return {kind: partial(measure, kind=kind) for kind in ("in process", "server")}


def measure(setting: Setting, kind: str) -> dict[str, Any]:
    """Starts two ranks, and returns the worst of their figures."""
    if kind == "in process" and importlib.util.find_spec("vllm") is None:
        raise NotHereError("vLLM is not installed beside torch here")
    if kind == "server" and not program():
        raise NotHereError(f"there is no program vllm here, and {PYTHON_VARIABLE} names no python that has one")
    folder = setting.scratch / kind.replace(" ", "_")
    folder.mkdir(parents=True)
    save_model(folder / "model", setting.tiny)
    mark, port = uuid.uuid4().hex, free_port()
    shared = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    command = [sys.executable, "-m", "benchmarks.gpu.served", str(folder), setting.device, kind]
    ranks = []
    try:
        for rank in range(2):
            of_rank = {"RANK": str(rank), "LOCAL_RANK": str(rank), MARK: mark}
            environment = {**os.environ, **shared, **of_rank}
            ranks.append(subprocess.Popen([*command, *["--tiny"] * setting.tiny], cwd=ROOT, env=environment))
        codes = [process.wait(max(setting.left_s - 10, 20)) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0, 0], f"ranks ended with exit codes {codes}: see log.txt"
    reports = [json.loads((folder / f"rank{rank}.json").read_text(encoding="utf-8")) for rank in range(2)]
    worst = {name: max(report[name] for report in reports) for name in reports[0]}
    remaining = wait_for_end(mark)
    return worst | {"processes_left": len(remaining), "left": remaining}


def program() -> str:
    """vLLM's program; empty where there is none."""
    if python := os.environ.get(PYTHON_VARIABLE):
        return str(Path(python).parent / "vllm")
    return shutil.which("vllm") or ""


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])


def wait_for_end(mark: str, within_s: float = 15.0) -> list[str]:
    """Command lines of processes that still have the mark after some seconds."""
    deadline = time.monotonic() + within_s
    while (alive := marked_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return alive


def marked_processes(mark: str) -> list[str]:
    alive = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):  # a process that ends while it is looked at, or another user's
            if folder.name.isdecimal() and f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:200]
                alive += [command] if command else []  # one that has ended and waits for its parent has none
    return alive


def model_config(tiny: bool) -> Any:
    """transformers' configuration; the vocabulary is that of the tests' tokenizer."""
    from transformers import Qwen3Config

    config = tiny_config()
    if tiny:
        return config
    size = {name: value for name, value in QWEN3_0_6B.items() if name not in ("model_type", "tie_word_embeddings")}
    ends = {name: getattr(config, name) for name in ("vocab_size", "bos_token_id", "eos_token_id", "pad_token_id")}
    return Qwen3Config(**{**size, **ends, "initializer_range": 0.05, "tie_word_embeddings": False})


def make_model(tiny: bool, version: int, device: str) -> nn.Module:
    """The model of a version, in bf16: random weights, other ones for each version."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(version)
    with torch.device(device):
        return Qwen3ForCausalLM(model_config(tiny)).to(torch.bfloat16).eval()


def save_model(folder: Path, tiny: bool) -> None:
    """A folder of transformers with version 0, and a tokenizer."""
    write_model(folder)  # of which the tokenizer stays
    for weights in folder.glob("*.safetensors*"):
        weights.unlink()
    make_model(tiny, 0, "cpu").save_pretrained(folder)


class Rank:
    """One rank with its engine."""

    def __init__(self, engine: VllmEngine, device: str, tiny: bool) -> None:
        self.engine, self.device, self.tiny = engine, device, tiny
        self.figures: dict[str, float] = {}

    def time(self, name: str, work: Callable[[], object]) -> None:
        started = time.perf_counter()
        work()
        self.figures[name] = time.perf_counter() - started

    def distances(self, version: int) -> torch.Tensor:
        """Of the log-probs of drawn tokens from those of the training forward pass of a version, in nats."""
        prompts = [[5 + number, 6, 7 + number, 9, 11, 3 + number, 8, 4] for number in range(NUM_REQUESTS)]
        requests = [GenerationRequest(prompt, 77 + number, 48) for number, prompt in enumerate(prompts)]
        completions = complete_requests(self.engine, requests, Sampling())
        module = make_model(self.tiny, version, self.device)
        parts = []
        for request, completion in zip(requests, completions, strict=True):
            tokens = torch.tensor([[*request.prompt_ids, *completion.token_ids]], device=self.device)
            expected = log_probs(module, tokens)[0, PROMPT - 1 :].cpu()
            parts.append((torch.tensor(completion.log_probs) - expected).abs())
        return torch.cat(parts)

    def update(self, version: int) -> None:
        """Sends all weights of a version, in the way of the engine itself."""
        weights = dict(make_model(self.tiny, version, self.device).named_parameters())
        names = self.engine.describe()
        self.engine.load(((name, weights[name].detach()) for name in names), version)
        self.engine.apply(version)

    def measure_all(self) -> None:
        nats = self.distances(0)
        self.figures |= {"mean_nats": float(nats.mean()), "quantile_99_nats": float(nats.quantile(0.99))}
        self.figures["largest_nats"] = float(nats.max())
        self.time("update_s", lambda: self.update(1))
        self.figures["updated_mean_nats"] = float(self.distances(1).mean())
        self.figures["of_stale"] = self.figures["updated_mean_nats"] / float(self.distances(0).mean())
        if self.engine.can_sleep:
            self.measure_sleep()
        self.time("restart_s", self.engine.restart)
        self.figures["restarted_mean_nats"] = float(self.distances(1).mean())

    def measure_sleep(self) -> None:
        """How much memory of the GPU it gives back, how long that takes, and whether it draws the same afterwards."""
        free, total = torch.cuda.mem_get_info()
        self.time("sleep_s", self.engine.release)
        freed = torch.cuda.mem_get_info()[0] - free
        self.time("wake_s", self.engine.restore)
        self.figures |= {"freed_gib": freed / 2**30, "not_freed": 1 - freed / (SHARE * total)}
        self.figures["woken_mean_nats"] = float(self.distances(1).mean())


SHARE = 0.3
"""Of the GPU's memory that an engine takes."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("device")
    parser.add_argument("kind")
    parser.add_argument("--tiny", action="store_true")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    on_gpu = arguments.device == "cuda"
    settings = VllmSettings(
        program=program() if arguments.kind == "server" else "",
        environment=CPU_ENVIRONMENT if arguments.kind == "server" and not on_gpu else {},
        arguments=("--enforce-eager",),
        max_model_len=1024,
        max_requests=NUM_REQUESTS,
        gpu_memory_utilization=SHARE if on_gpu else None,
        sleep=on_gpu,
        timeout_s=120,
    )
    from transformers import Qwen3ForCausalLM

    template = build_on_meta(lambda: Qwen3ForCausalLM(model_config(arguments.tiny)))
    for turn in range(dist.get_world_size()):  # two that start at once would both count the same free memory
        dist.barrier()
        if turn != rank:
            continue
        started = time.perf_counter()
        engine = settings.build(str(arguments.folder / "model"), template, arguments.folder / f"run{rank}")
        try:
            work = Rank(engine, arguments.device, arguments.tiny)
            work.figures["start_s"] = time.perf_counter() - started
            work.measure_all()
        finally:
            engine.close()
        (arguments.folder / f"rank{rank}.json").write_text(json.dumps(work.figures), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
