"""Rates, MFU, memory and profiles of steps."""

from __future__ import annotations

import gzip
import json
import mmap
import re
import signal
import time
from pathlib import Path

import pytest
import torch

from sfumato.config.dit import TrainDitConfig
from sfumato.config.load import load_config
from sfumato.errors import ConfigError, PreemptedError
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.exit import ending_of
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.meters import PEAK_TFLOPS, Meter, find_peaks, memory_in_use, peak_flops
from sfumato.tracking.run import Run, start_run
from sfumato.tracking.task import report_ending
from sfumato.tracking.timeline import Phase
from tests.tiny import tiny_dit_config

ALONE = Mesh(Layout(), torch.device("cpu"))
COPIES = Mesh(Layout(tp=4), torch.device("cpu"))
"""Four ranks that share their samples; nothing is summed."""


@pytest.fixture(autouse=True)
def _signals():
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def start(tmp_path: Path, **train: object) -> Run:
    config = load_config(TrainDitConfig, overrides=tiny_dit_config(tmp_path, train=train))
    return start_run(config, ALONE, "test")


def test_rates_are_amounts_by_seconds_and_devices() -> None:
    meter = Meter(COPIES, peak_flops=1e12)
    meter.count(tokens=300, flops=4e12)
    meter.count(tokens=100, flops=4e12)
    assert meter.rates(2.0) == {
        "throughput/tokens_per_s": 200,
        "throughput/tokens_per_s_per_device": 50,
        "throughput/flops_per_s": 4e12,
        "throughput/mfu": 1.0,
    }
    assert meter.rates(2.0) == {}, "counts belong to their step"


def test_parts_of_a_step_have_rates_of_their_own() -> None:
    meter = Meter(COPIES, peak_flops=1e12)
    meter.count(images=8, flops={"generate": 4e12, "update": 12e12})
    result = meter.rates(10.0, {"time/generate_s": 2.0, "time/update_s": 4.0})
    assert result == {
        "throughput/images_per_s": 0.8,
        "throughput/flops_per_s": 1.6e12,
        "throughput/mfu": 0.4,
        "throughput/generate_flops_per_s": 2e12,
        "throughput/generate_mfu": 0.5,
        "time/generate_per_image_s": 0.25,
        "throughput/update_flops_per_s": 3e12,
        "throughput/update_mfu": 0.75,
        "time/update_per_image_s": 0.5,
    }


def test_each_phase_has_a_peak_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks = iter([300, 700, 500, 200, 100])
    now = {"peak": 0}

    def reset() -> None:
        now["peak"] = next(peaks) * 2**20

    reset()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: now["peak"])
    meter = Meter(ALONE)
    meter.phase_ended("generate")
    meter.phase_ended("data")  # no phase of its own
    meter.phase_ended("update")
    result = meter.memory()
    assert result["memory/generate_gpu_peak_mib"] == 300
    assert result["memory/update_gpu_peak_mib"] == 700
    assert result["memory/gpu_peak_mib"] == 700, "the peak of the step is that of its largest phase"
    assert "memory/update_gpu_peak_mib" not in meter.memory()


def test_a_process_that_uses_no_gpu_opens_no_context_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as the driver of roles on Ray, on a machine with GPUs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for name in ("max_memory_allocated", "memory_allocated", "memory_reserved", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda: pytest.fail("opens a context"))
    meter = Meter(ALONE)
    meter.phase_ended("update")
    assert not any("gpu" in name for name in meter.memory())


def test_without_a_peak_there_is_no_utilisation() -> None:
    meter = Meter(ALONE)
    meter.count(images=6, flops=1e9)
    assert meter.rates(2.0) == {"throughput/images_per_s": 3, "throughput/flops_per_s": 5e8}
    with pytest.raises(TypeError, match=r"'token'.*tokens, images, flops"):
        meter.count(token=1)


@pytest.mark.parametrize(
    ("name", "entry"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce GTX 1080", None),
    ],
)
def test_gpus_are_known_by_their_names(name: str, entry: str | None) -> None:
    assert find_peaks(name) == (None if entry is None else PEAK_TFLOPS[entry])


def test_the_peak_follows_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100-SXM4-40GB")
    assert peak_flops(gpu, "bf16") == 312e12
    assert peak_flops(gpu, "no") == 19.5e12, "torch's default computes float32 without TF32"
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert peak_flops(gpu, "no") == 156e12
    finally:
        torch.set_float32_matmul_precision(before)
    assert peak_flops(torch.device("cpu"), "bf16") is None
    assert peak_flops(torch.device("cpu"), "no", given_tflops=0.5) == 5e11


def test_memory_is_that_of_this_process() -> None:
    before = memory_in_use()
    mapped = mmap.mmap(-1, 64 * 2**20)  # the allocator might give memory that the process has already
    torch.frombuffer(mapped, dtype=torch.uint8).fill_(1)
    after = memory_in_use()
    grown = after["memory/process_mib"] - before["memory/process_mib"]
    assert 50 < grown < 100 and after["memory/process_peak_mib"] >= after["memory/process_mib"] - 1
    del mapped


def test_a_run_writes_rates_beside_the_timings_and_leaves_pauses_out(tmp_path: Path) -> None:
    run = start(tmp_path, peak_tflops=1e-6)
    run.begin(10, 0, [])
    run.count(tokens=50, flops=500)
    time.sleep(0.05)
    with run.timed("evaluate"):
        time.sleep(0.2)
    run.log(1, {"loss": 1.0}, show={})
    run.close()
    line = read_jsonl(tmp_path / "run" / "timings.jsonl")[0]
    assert line["time/step_s"] >= 0.25
    training_s = line["time/step_s"] - line["time/evaluate_s"]
    assert line["throughput/tokens_per_s"] == pytest.approx(50 / training_s)
    assert line["throughput/mfu"] == pytest.approx(500 / training_s / 1e6)
    assert read_jsonl(tmp_path / "run" / "metrics.jsonl") == [{"step": 1, "loss": 1.0}], "rates are not deterministic"


def test_every_part_that_a_task_times_is_a_known_phase(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    sources = "".join(path.read_text() for folder in ("tasks", "sfumato") for path in (root / folder).rglob("*.py"))
    named = set(re.findall(r'\.(?:timed|add_time|waiting)\("(\w+)"', sources))
    assert {"data", "evaluate", "save", "update", "generate"} <= named
    assert named <= set(Phase), "an evaluation under another name would count as training"
    run = start(tmp_path)
    with pytest.raises(ValueError, match="'eval' is not a valid Phase"), run.timed("eval"):
        pass


def profiled_steps(folder: Path) -> list[int]:
    """Sizes of the products in a trace: each step of the tests multiplies matrices of its own size."""
    trace = json.loads(gzip.decompress((folder / "rank0.json.gz").read_bytes()))
    return [entry["args"]["Input Dims"][0][0] for entry in trace["traceEvents"] if entry.get("name") == "aten::mm"]


@pytest.mark.parametrize(
    ("wanted", "from_step", "last", "found"),
    [
        ((2, 3), 0, 5, [2, 3]),
        ((1, 1), 0, 2, [1]),
        ((2, 9), 0, 4, [2, 3, 4]),
        ((2, 4), 2, 5, [3, 4]),
        ((1, 2), 2, 4, []),
    ],
)
def test_exactly_the_wanted_steps_are_profiled(
    tmp_path: Path, wanted: tuple[int, int], from_step: int, last: int, found: list[int]
) -> None:
    run = start(tmp_path, profile_steps=list(wanted))
    run.begin(5, from_step, [])
    for step in range(from_step + 1, last + 1):
        torch.ones(step, 3) @ torch.ones(3, 2)
        run.log(step, {"loss": 1.0}, show={})
    if last < wanted[1]:  # as ``run_task`` ends a run that is asked to stop, which closed no profile
        report_ending(ending_of(PreemptedError(f"stopped by signal after step {last}")))
    else:
        run.close()
    traces = tmp_path / "run" / "traces"
    if not found:
        assert not traces.exists()
        return
    assert profiled_steps(traces) == found
    assert "aten::mm" in (traces / "rank0.txt").read_text()


def test_what_precedes_the_first_step_is_not_in_the_profile(tmp_path: Path) -> None:
    run = start(tmp_path, profile_steps=[1, 1])
    run.begin(5, 0, [])
    torch.ones(50, 3) @ torch.ones(3, 2)  # an evaluation before the first step
    run.log(0, {"eval": 1.0}, show={})
    torch.ones(1, 3) @ torch.ones(3, 2)
    run.log(1, {"loss": 1.0}, show={})
    run.close()
    assert profiled_steps(tmp_path / "run" / "traces") == [1]


@pytest.mark.parametrize("steps", [[0, 3], [4, 3]])
def test_steps_that_cannot_be_profiled_are_refused(tmp_path: Path, steps: list[int]) -> None:
    with pytest.raises(ConfigError, match="profile_steps"):
        start(tmp_path, profile_steps=steps)
