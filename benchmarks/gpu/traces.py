"""Traced steps of fine-tuning and of RL: how long the GPU is busy, with what, and the traces themselves."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.gpu.cells import Bound, Cell, Setting
from benchmarks.gpu.rl import rl_config
from benchmarks.gpu.sft import sft_config
from benchmarks.gpu.watched import run_steps

KINDS = {
    "attention": r"flash|fmha|cudnn.*attention|attention|_efficient",
    "products": r"gemm|cutlass|nvjet|cublas|xmma|matmul|::mm|addmm|bmm",
    "copies": r"memcpy|memset|copy",
    "norms and softmax": r"norm|softmax|logsumexp",
    "optimiser": r"adam|foreach|multi_tensor",
    "compiled": r"^triton",
}
"""By what a kernel's name contains, the first that fits; all else is elementwise and others."""

NAMED, NAME = 12, 90
"""Kernels that a line names with their share, and characters of a name."""

MAX_BYTES = 15 * 2**20
"""Larger traces are not kept."""

BOUNDS = (
    Bound(
        "busy",
        0.9,
        "the host does not keep up: open trace_*.json.gz at a gap, and see which line of syncs waits there",
        least=True,
        real=True,
    ),
)


def cells(setting: Setting) -> dict[str, Cell]:
    modes = ("compile", "eager")[1 if setting.tiny else 0 :]
    return {
        f"{task}/{mode}": lambda given, t=task, m=mode: trace(given, t, m) for mode in modes for task in ("sft", "rl")
    }


def trace(setting: Setting, task: str, mode: str) -> dict[str, Any]:
    """Shares of two steps (RL: of one, of eight images), after some that do not count."""
    folder = setting.scratch / f"{task}_{mode}"
    warm_up, traced = setting.size((4, 2), (1, 1)) if task == "sft" else (setting.size(2, 1), 1)
    profile = {"compile": mode == "compile", "profile_steps": [warm_up + 1, warm_up + traced]}
    if task == "sft":
        config = sft_config(folder, setting, 2, **profile)
    else:
        config = rl_config(folder, setting, "2 steps", "jpeg", setting.size(4, 2))
        config["train"] |= profile
        if not setting.tiny:  # one pass of each kind
            config["rollout"]["num_prompts"] = 1
    steps = run_steps("train_text" if task == "sft" else "rl_diffusion", config, setting, warm_up, traced)
    result = next((folder / "run" / "traces").glob("rank0.json.gz"))
    events = json.loads(gzip.decompress(result.read_bytes()))["traceEvents"]
    values = shares(events, setting.on_gpu) | {"traced_s": steps.seconds, "trace_mib": result.stat().st_size / 2**20}
    keep(result, setting.output / f"trace_{task}_{mode}.json.gz")
    return values


def keep(path: Path, target: Path) -> None:
    """Copies a file beside the results, unless it is too large."""
    if path.stat().st_size <= MAX_BYTES:
        shutil.copyfile(path, target)


def shares(events: list[dict[str, Any]], on_gpu: bool) -> dict[str, Any]:
    """Share of the traced time in which the GPU runs something, its parts by kind and by name, the number of kernels.

    Args:
        events: of a Chrome trace; times in microseconds.
        on_gpu: whether kernels count; else operations of the CPU do, whose times include those they call.
    """
    wanted = ("kernel", "gpu_memcpy", "gpu_memset") if on_gpu else ("cpu_op",)
    spans = [event for event in events if event.get("ph") == "X" and event.get("cat") in wanted]
    assert spans, "the trace has no kernels"
    whole = [
        event
        for event in events
        if event.get("ph") == "X" and "dur" in event and event.get("cat") in (*wanted, "cpu_op")
    ]
    begin, end = min(event["ts"] for event in whole), max(event["ts"] + event["dur"] for event in whole)
    actual = {"busy": busy(spans) / (end - begin), "kernels": len(spans)}
    total, by_name = sum(span["dur"] for span in spans), Counter[str]()
    for span in spans:
        by_name[span["name"][:NAME]] += span["dur"] / total
        if on_gpu:
            kind = kind_of(span["name"])
            actual[kind] = actual.get(kind, 0.0) + span["dur"] / total
    return actual | {"longest": dict(by_name.most_common(NAMED))}


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if re.search(pattern, name, re.IGNORECASE)), "others")


def busy(spans: list[dict[str, Any]]) -> float:
    """Length of the union of intervals."""
    total, end = 0.0, float("-inf")
    for start, stop in sorted((span["ts"], span["ts"] + span["dur"]) for span in spans):
        total += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return total
