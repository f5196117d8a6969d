"""What is recorded of a run, and how two records are compared."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import re
import shutil
from pathlib import Path
from typing import Any

import torch

from sfumato.config.load import merge
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.model_card import CARD
from tests.same.runs import RecordedRun
from tests.tiny import run_task_here, run_task_process, weights_in, write_config

Record = dict[str, Any]

NOT_RECORDED = {
    "file",
    *("group_id", "group_mean", "group_std", "is_trained", "finish_reason"),
    *("token_ids", "tokens", "log_probs", "trained_steps", "log_ratio", "clipped", "cut"),
}
"""Fields of samples that are left out: names of files, and what was added after the record was made, which follows from
the prompts, rewards and metrics that are in it."""

TOLERANCE = 1e-3
"""Relative difference of metrics between kinds of CPU, after a few steps of training."""

SAVED = {"save_steps": 1, "max_checkpoints": 2}
TIMEOUT_S = 400.0


def describe_cpu() -> str:
    """The kind of CPU, and the instructions that torch and MKL use of it."""
    info = Path("/proc/cpuinfo")
    names = re.findall(r"model name\s*: (.*)|flags\s*: (.*)", info.read_text()) if info.exists() else []
    model = next((name for name, _ in names if name), platform.processor())
    flags = next((flags.split() for _, flags in names if flags), [])
    instructions = [flag for flag in ("avx2", "avx512f", "amx_bf16") if flag in flags]
    return f"{model} {' '.join(instructions)}, torch {torch.__version__.split('+')[0]}"


def record_run(run: RecordedRun, folder: Path) -> Record:
    """Runs a task in a new folder and records what it computed.

    Args:
        run: what to run.
        folder: where to; it is emptied first.

    Raises:
        RuntimeError: when a run in a process of its own fails, with its output.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    config = merge(run.config(folder), run.overrides)
    if run.num_ranks == 1 and not run.on_ray:
        if run.resumed_after is not None:
            ended_early = {"train": {**SAVED, "max_steps": run.resumed_after, "lr_decay_style": "constant"}}
            run_task_here(run.task, merge(config, ended_early))
            config = merge(config, {"train": {**SAVED, "lr_decay_style": "constant", "load_checkpoint_path": "auto"}})
        return read_run(run_task_here(run.task, config, with_report=True))
    path = write_config(config, folder / "run.yaml")
    result = run_task_process(run.task, path, num_processes=run.num_ranks, timeout_s=TIMEOUT_S)
    if result.returncode != 0:
        raise RuntimeError(f"{run.task} ended with code {result.returncode}:\n{result.output}")
    return read_run(result.output_dir)


def read_run(folder: Path) -> Record:
    """What a run folder holds that depends on neither time nor place."""
    export = folder / "hf_ckpt"
    weights = _digests_of_weights(export)
    files = {
        str(path.relative_to(export)): _digest(_without_versions(path, folder))
        for path in sorted(export.rglob("*"))
        if path.is_file() and path.suffix != ".safetensors" and path.name != CARD
    }
    samples = [
        {name: value for name, value in sample.items() if name not in NOT_RECORDED}
        for path in sorted((folder / "samples").rglob("samples.jsonl"))
        for sample in read_jsonl(path)
    ]
    return {
        "metrics": read_jsonl(folder / "metrics.jsonl"),
        "weights": weights,
        "files": files,
        "samples": _digest(json.dumps(samples, sort_keys=True).encode()),
        "report": _evaluations_of(folder / "report.html"),
    }


def compare_records(recorded: Record, computed: Record, same_cpu: bool) -> list[str]:
    """What differs, a sentence each; on another kind of CPU digests are left out, and metrics may differ a little."""
    differences = _compare_metrics(recorded["metrics"], computed["metrics"], 0.0 if same_cpu else TOLERANCE)
    for kind in ("weights", "files"):
        if recorded[kind].keys() != computed[kind].keys():
            names = sorted(recorded[kind].keys() ^ computed[kind].keys())
            differences.append(f"{kind}: only one of both has {', '.join(names[:5])}")
        elif same_cpu or kind == "files":
            changed = [name for name, digest in recorded[kind].items() if computed[kind][name] != digest]
            differences += [f"{kind}: {len(changed)} differ: {', '.join(changed[:5])}"] if changed else []
    if same_cpu:
        differences += [f"{name} differ" for name in ("samples", "report") if recorded[name] != computed[name]]
    return differences


def _compare_metrics(recorded: list[Record], computed: list[Record], tolerance: float) -> list[str]:
    if len(recorded) != len(computed):
        return [f"metrics: {len(computed)} lines instead of {len(recorded)}"]
    for before, after in zip(recorded, computed, strict=True):
        if before.keys() != after.keys():
            names = sorted(before.keys() ^ after.keys())
            return [f"metrics of step {before['step']}: only one of both has {', '.join(names[:5])}"]
        changed = [name for name in before if not _is_close(before[name], after[name], tolerance)]
        if changed:
            shown = ", ".join(f"{name} {before[name]!r} is {after[name]!r}" for name in changed[:3])
            return [f"metrics of step {before['step']}: {len(changed)} differ: {shown}"]
    return []


def _is_close(before: Any, after: Any, tolerance: float) -> bool:
    if tolerance == 0 or not isinstance(before, float) or not isinstance(after, float):
        return json.dumps(before) == json.dumps(after)
    return math.isclose(before, after, rel_tol=tolerance, abs_tol=tolerance)


def _digests_of_weights(export: Path) -> dict[str, str]:
    """Of each file of weights: the number of tensors, a digest of names, dtypes and shapes, and one of the bytes."""
    tensors_of: dict[str, list[tuple[str, str, list[int], bytes]]] = {}
    for name, (dtype, shape, data) in sorted(weights_in(export).items()):
        file, _, tensor = name.partition(":")
        tensors_of.setdefault(file, []).append((tensor, dtype, shape, data))
    return {
        file: f"{len(tensors)} {_digest(repr([tensor[:3] for tensor in tensors]).encode())} "
        f"{_digest(b''.join(tensor[3] for tensor in tensors))}"
        for file, tensors in tensors_of.items()
    }


def _without_versions(path: Path, run_folder: Path) -> bytes:
    """A file of an export without the versions of libraries, and without the place of the run."""
    content = path.read_bytes().replace(str(run_folder.parent).encode(), b"RUNS")
    if path.suffix != ".json":
        return content
    values = json.loads(content)
    if isinstance(values, dict):
        values = {name: value for name, value in values.items() if not name.endswith("_version")}
    if path.name == "adapter_config.json":  # peft keeps them in a set, whose order differs from process to process
        values["target_modules"] = sorted(values["target_modules"])
    return json.dumps(values, sort_keys=True).encode()


def _evaluations_of(report: Path) -> str:
    """The text of the section "Evaluation: before and after" of a report, empty where it has none."""
    section = re.search(r"<h2>Evaluation: before and after.*?</section>", report.read_text(encoding="utf-8"), re.DOTALL)
    return (
        "" if section is None else " ".join(re.sub(r"<svg.*?</svg>|<[^>]+>", " ", section[0], flags=re.DOTALL).split())
    )


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
