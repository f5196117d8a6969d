"""Rates and resources of a step: tokens and images a second, model FLOPs utilisation (MFU), memory, traces."""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from sfumato.config.writing import make_new_folder, write_atomically
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.timeline import Phase

if TYPE_CHECKING:
    from torch.profiler import profile

COUNTED = ("tokens", "images", "flops")
"""Names of the amounts that can be counted."""


WITH_PEAKS = (Phase.GENERATE, Phase.UPDATE, Phase.EVALUATE)
"""Phases whose peaks of GPU memory are metrics of their own."""

PEAK_TFLOPS: Mapping[str, tuple[float | None, float | None, float]] = {
    "A100": (312, 156, 19.5),
    "A800": (312, 156, 19.5),
    "A40": (149.7, 74.8, 37.4),
    "A10": (125, 62.5, 31.2),
    "L40S": (362, 183, 91.6),
    "L4": (121, 60, 30.3),
    "H100 PCIe": (756, 378, 51.2),
    "H100 NVL": (835.5, 417.7, 60),
    "H100": (989.4, 494.7, 66.9),
    "H800": (989.4, 494.7, 66.9),
    "H200": (989.4, 494.7, 66.9),
    "GH200": (989.4, 494.7, 66.9),
    "B200": (2250, 1100, 75),
    "GB200": (2500, 1250, 80),
    "RTX 3090": (71, 35.6, 35.6),
    "RTX 4090": (165.2, 82.6, 82.6),
    "RTX 5090": (209.5, 104.8, 104.8),
    "V100": (None, None, 15.7),
    "MI250X": (383, None, 47.9),
    "MI300X": (1307.4, 653.7, 163.4),
    "MI325X": (1307.4, 653.7, 163.4),
    "MI355X": (2516.6, None, 157.3),
}
"""Dense peaks in 10^12 operations a second: bf16 and TF32 on matrix units, and float32 without them; None where the
device lacks a format.

From the makers' data sheets, without sparsity (NVIDIA prints twice the dense rate for some): NVIDIA A100, A40, A10, L4,
L40S, H100, H200 and HGX B200 data sheets, the Ada and Blackwell GPU architecture papers for GeForce (bf16 with float32
accumulation), and the AMD Instinct MI250X, MI300X, MI325X and MI355X data sheets.
"""


class Meter:
    """Adds up the tokens, images and FLOPs of a step, and turns them into rates.

    MFU is the share of the devices' peak that the model's own operations make up (arXiv 2204.02311): operations that
    are computed twice to save memory do not count.
    """

    def __init__(self, mesh: Mesh, peak_flops: float | None = None) -> None:
        """
        Args:
            mesh: the ranks whose amounts are added.
            peak_flops: operations a second of one device; None reports no MFU.
        """
        self.mesh = mesh
        self.peak_flops = peak_flops
        self.num_devices = mesh.size
        """Devices that compute what is counted."""
        self._amounts: defaultdict[str, float] = defaultdict(float)
        self._peaks: dict[str, float] = {}

    def count(self, **amounts: float | Mapping[str, float]) -> None:
        """Adds amounts of this data-parallel rank: ranks that share its samples count the same ones.

        Every rank must count the same names in a step, zeros too: they are summed over ranks.

        Args:
            amounts: by name; flops may be given by the timed part of the step that they belong to.

        Raises:
            TypeError: for a name that is not in ``COUNTED``.
        """
        for name, amount in amounts.items():
            if name not in COUNTED:
                raise TypeError(f"{name!r} cannot be counted; known: {', '.join(COUNTED)}")
            for phase, part in amount.items() if isinstance(amount, Mapping) else ():
                self._amounts[f"{name}/{phase}"] += float(part)
            self._amounts[name] += float(sum(amount.values()) if isinstance(amount, Mapping) else amount)

    def rates(self, seconds: float, timings: Mapping[str, float] | None = None) -> dict[str, float]:
        """Rates over all ranks since the last call, by metric name; a collective where something was counted.

        Args:
            seconds: that training took.
            timings: seconds of the parts by which flops were counted, as ``time/<part>_s``.
        """
        amounts = self._amounts
        self._amounts = defaultdict(float)
        if not amounts:
            return {}
        amounts = self._over_ranks(amounts)
        per_second = {name: amount / max(seconds, 1e-9) for name, amount in amounts.items() if "/" not in name}
        rates = {f"throughput/{name}_per_s": rate for name, rate in per_second.items()}
        if "tokens" in per_second:
            rates["throughput/tokens_per_s_per_device"] = per_second["tokens"] / self.num_devices
        if "flops" in per_second and self.peak_flops is not None:
            rates["throughput/mfu"] = per_second["flops"] / (self.num_devices * self.peak_flops)
        for phase in (name.partition("/")[2] for name in amounts if "/" in name):
            took = max((timings or {}).get(f"time/{phase}_s", 0.0), 1e-9)
            flops_per_s = amounts[f"flops/{phase}"] / took
            rates[f"throughput/{phase}_flops_per_s"] = flops_per_s
            if self.peak_flops is not None:
                rates[f"throughput/{phase}_mfu"] = flops_per_s / (self.num_devices * self.peak_flops)
            if amounts.get("images"):
                rates[f"time/{phase}_per_image_s"] = took / amounts["images"]
        return rates

    def phase_ended(self, phase: Phase) -> None:
        """Stores the GPU's peak memory since the last phase ended, where ``phase`` is one of ``WITH_PEAKS``."""
        if phase in WITH_PEAKS and torch.cuda.is_initialized():
            self._peaks[phase] = max(self._peaks.get(phase, 0.0), torch.cuda.max_memory_allocated() / 2**20)
            torch.cuda.reset_peak_memory_stats()

    def memory(self) -> dict[str, float]:
        """``memory_in_use``, and the GPU's peak in each phase since the last call."""
        usage = memory_in_use()
        peaks = self._peaks
        self._peaks = {}
        if peaks:  # the end of a phase has reset CUDA's peak: the step's peak is the largest of all
            usage["memory/gpu_peak_mib"] = max(usage["memory/gpu_peak_mib"], *peaks.values())
        return usage | {f"memory/{phase}_gpu_peak_mib": peak for phase, peak in peaks.items()}

    def _over_ranks(self, amounts: dict[str, float]) -> dict[str, float]:
        """The amounts summed over data-parallel ranks, which must have counted the same names in the same order."""
        if self.mesh.data_size == 1:
            return amounts
        sums = torch.tensor(list(amounts.values()), dtype=torch.float64, device=self.mesh.device)
        dist.all_reduce(sums, group=self.mesh.group("data"))
        return dict(zip(amounts, sums.tolist(), strict=True))


def peak_flops(device: torch.device, mixed_precision: str, given_tflops: float | None = None) -> float | None:
    """Peak operations a second of one device.

    Args:
        device: where a rank computes.
        mixed_precision: "bf16", or "no" for float32, with TF32 where torch is allowed to use it.
        given_tflops: ``train.peak_tflops``, which replaces the table's value.

    Returns:
        None on a CPU or an unknown GPU, unless ``given_tflops`` is set.
    """
    if given_tflops is not None:
        return given_tflops * 1e12
    if device.type != "cuda":
        return None
    peaks = find_peaks(torch.cuda.get_device_name(device))
    if peaks is None:
        return None
    bf16, tf32, fp32 = peaks
    in_fp32 = fp32 if torch.get_float32_matmul_precision() == "highest" else tf32
    peak = bf16 if mixed_precision == "bf16" else in_fp32
    return None if peak is None else peak * 1e12


def describe_float32(device: torch.device) -> list[str]:
    """A line on whether products of float32 numbers are rounded to TF32 (10 bits of 23); none on a CPU, which does
    not."""
    if device.type != "cuda":
        return []
    products = "in full float32" if torch.get_float32_matmul_precision() == "highest" else "rounded to TF32"
    convolutions = "rounded to TF32" if torch.backends.cudnn.allow_tf32 else "in full float32"
    return [
        f"numbers of float32 on the GPU: matrix products are {products}, convolutions {convolutions} (environment: "
        "NVIDIA_TF32_OVERRIDE=0 takes full float32 for both, TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 TF32 for products)"
    ]


def find_peaks(name: str) -> tuple[float | None, float | None, float] | None:
    """The entry of ``PEAK_TFLOPS`` for a device's name, such as "NVIDIA H100 80GB HBM3"; the longest key that fits."""
    words = f" {name.replace('-', ' ')} ".lower()
    fitting = [gpu for gpu in PEAK_TFLOPS if all(f" {word} " in words for word in gpu.lower().split())]
    return PEAK_TFLOPS[max(fitting, key=len)] if fitting else None


def memory_in_use() -> dict[str, float]:
    """Memory in MiB of this process, now and at its peak so far, and of its GPU, now and at its peak since the last
    call."""
    peak_unit = 1 if sys.platform == "darwin" else 1024  # macOS tells bytes, Linux KiB
    usage = {"memory/process_peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * peak_unit / 2**20}
    with contextlib.suppress(FileNotFoundError), open("/proc/self/statm", "rb", buffering=0) as pages:
        usage["memory/process_mib"] = int(pages.read(200).split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    if torch.cuda.is_initialized():  # asking would open a context on GPU 0
        usage["memory/gpu_peak_mib"] = torch.cuda.max_memory_allocated() / 2**20
        usage["memory/gpu_mib"] = torch.cuda.memory_allocated() / 2**20
        usage["memory/gpu_reserved_mib"] = torch.cuda.memory_reserved() / 2**20
        torch.cuda.reset_peak_memory_stats()
    return usage


NUM_ROWS = 40
"""Operations in the table."""

NUM_ALLOCATIONS = 200_000
"""Most allocations in a snapshot of GPU memory."""


class StepProfiler:
    """Records the steps from ``first`` to ``last``, counted like ``step`` in the metrics: 1 is the first.

    Each rank writes ``rankN.json.gz`` (trace), ``rankN.txt`` (table), and with a GPU ``rankN_memory.pickle``
    (allocations, for https://pytorch.org/memory_viz).
    """

    def __init__(self, first: int, last: int, folder: Path, rank: int) -> None:
        """
        Args:
            first, last: steps that are recorded, both included.
            folder: of the files; made when there is something to write.
            rank: this process.
        """
        self.first = first
        self.last = last
        self.folder = folder
        self.rank = rank
        self._on_gpu = torch.cuda.is_available()
        self._profile: profile | None = None

    def after_step(self, step: int) -> bool:
        """Starts or ends the recording between two steps.

        Args:
            step: finished steps.

        Returns:
            Whether files were written now.
        """
        if self._profile is not None and step >= self.last:
            self.close()
            return True
        if self.first <= step + 1 <= self.last and (self._profile is None or step + 1 == self.first):
            self._stop()  # what was recorded before the first step, such as an evaluation, is dropped
            self._start()
        return False

    def close(self) -> None:
        """Writes what has been recorded, when the run ends before the last step."""
        profile = self._stop()
        if profile is None:
            return
        building = make_new_folder(self.folder / f"rank{self.rank}.tmp")  # torch follows links
        name = building / f"rank{self.rank}"
        if self._on_gpu:
            torch.cuda.memory._dump_snapshot(f"{name}_memory.pickle")
            torch.cuda.memory._record_memory_history(enabled=None)
        profile.export_chrome_trace(f"{name}.json.gz")
        key = "self_cuda_time_total" if self._on_gpu else "self_cpu_time_total"
        table = profile.key_averages(group_by_input_shape=True).table(sort_by=key, row_limit=NUM_ROWS)
        write_atomically(Path(f"{name}.txt"), f"{table}\n".encode())
        for file in building.iterdir():
            os.replace(file, self.folder / file.name)
        building.rmdir()

    def _start(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        if self._on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=NUM_ALLOCATIONS)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._profile = profile(activities=activities, record_shapes=True, profile_memory=True)
        self._profile.start()

    def _stop(self) -> profile | None:
        """Ends the recording; None where there was none."""
        profile = self._profile
        self._profile = None
        if profile is not None:
            if self._on_gpu:
                torch.cuda.synchronize()
            profile.stop()
        return profile
