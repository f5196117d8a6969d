"""Actor and sampler of RL of a language model on one GPU, in processes of their own under Ray: does it run, what do
weights and memory cost, is anything left.

What is measured here runs in a process of its own, so that nothing else imports Ray.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import uuid
from functools import partial
from typing import Any

import yaml

from benchmarks.gpu.cells import Bound, Cell, NotHereError, Setting
from benchmarks.gpu.results import ROOT
from benchmarks.gpu.served import MARK, wait_for_end
from benchmarks.gpu.text_rl import text_rl_config
from sfumato.tracking.json_lines import read_jsonl

STEPS = 3

BOUNDS = (
    Bound("steps", STEPS, "the run stopped early: log.txt has why, and run/*.txt the logs of its roles", least=True),
    Bound("sync_s", 3, "1.2 GB on one GPU should be shared, not copied: is runtime.weight_sync ipc taken?", real=True),
    Bound("mismatch_kl", 0.01, "the sampler draws by other weights than the actor has: do not train with it"),
    Bound("processes_left", 0, "roles outlive their run and hold memory: end them by their ids, see left"),
)


def cells(setting: Setting) -> dict[str, Cell]:
    return {
        "actor and sampler, half a GPU each": partial(measure, offloaded=False),
        "the same, idle roles offloaded": partial(measure, offloaded=True),
    }


def measure(setting: Setting, offloaded: bool) -> dict[str, Any]:
    """Three steps of ``tasks/rl_text.py``."""
    if importlib.util.find_spec("ray") is None:
        raise NotHereError("ray is not installed here")
    folder = setting.scratch / f"offloaded_{offloaded}"
    config = text_rl_config(folder, setting)
    half = {"processes": 1, "gpus": 0.5} if setting.on_gpu else {"processes": 1, "cpus": 0.5}
    scorer = {"processes": 1, "cpus": 0.5}
    config["rollout"] |= {"hybrid_engine": False}
    pools = {"actor": half, "sampler": half, "scorer": scorer}
    config["runtime"] = {"backend": "ray", "pools": pools, "offload_idle": offloaded, "object_store_gb": 1.0}
    device = "cuda" if setting.on_gpu else "cpu"
    config["train"] |= {"device": device, "compile": False, "max_steps": STEPS, "trackers": []}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    mark = uuid.uuid4().hex
    command = [sys.executable, "tasks/rl_text.py", str(path)]
    environment = {**os.environ, MARK: mark, "RAY_USAGE_STATS_ENABLED": "0"}
    limit = max(setting.left_s - 20, 30)
    process = subprocess.run(command, cwd=ROOT, env=environment, timeout=limit, check=False)
    run = folder / "run"
    lines = [line for line in read_jsonl(run / "metrics.jsonl") if line["step"] > 0] if run.exists() else []
    remaining = wait_for_end(mark)
    values: dict[str, Any] = {"steps": len(lines), "exit_code": process.returncode}
    values |= {"processes_left": len(remaining), "left": remaining}
    if not lines:
        return values
    events = [line for line in read_jsonl(run / "timeline.jsonl") if line["kind"] == "sync" and line["step"] > 1]
    timings = [line for line in read_jsonl(run / "timings.jsonl") if line["step"] > 1]
    seconds = {name: value for line in timings for name, value in line.items() if name.startswith("time/")}
    values["mismatch_kl"] = abs(lines[-1]["mismatch/kl_k3"])
    values |= {"sync_s": max(event["end"] - event["start"] for event in events)} if events else {}
    return values | {"largest_log_ratio": lines[-1]["mismatch/log_ratio_max"], "seconds": seconds}
