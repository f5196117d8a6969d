"""Predicts what a run takes beside its devices: CPU memory of the machine with rank 0, and disk."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sfumato.config.text import LanguageModelConfig, TrainTextConfig
from sfumato.config.text_reward import TrainTextRewardConfig
from sfumato.models.language.probe import LARGEST_COPY
from sfumato.parallel.keyed_weights import PIECE
from sfumato.parallel.random_weights import LARGEST_IN_SEQUENCE

if TYPE_CHECKING:
    from sfumato.commands.check_data import DataFindings
    from sfumato.commands.check_model import ModelFindings
    from sfumato.config.tasks import TaskConfig
    from sfumato.parallel.layout import Layout

GPUS_OF_A_MACHINE = 8
"""Processes of a machine with GPUs, where nothing says how many there are."""

PROCESS_BYTES = {True: 3 * 2**30, False: 2**29}
"""CPU memory of a process with Python, its libraries and (true) CUDA, beside all tensors: estimates."""

DRAWN_BYTES = 110
"""CPU memory for each number of a piece of random weights while it is drawn."""

TOKEN_BYTES = 5
"""Disk for each token of a store: its number, and whether it is learned."""

FLOAT32 = 4


@dataclass
class HostFindings:
    """CPU memory and disk of a run, in bytes."""

    processes: int
    """Processes of the machine."""
    always: dict[str, int] = field(default_factory=dict)
    """CPU memory that the machine's processes hold all the time, by purpose."""
    moments: dict[str, int] = field(default_factory=dict)
    """CPU memory that they take for a while, one after the other, by what is done then."""
    disk: dict[str, int] = field(default_factory=dict)
    """Disk, by purpose."""
    memory_bytes: int | None = None
    """CPU memory of the machine; None when it is not known."""
    disk_bytes: int | None = None
    """Free bytes where ``train.output_dir`` lies; None when the run is for another machine."""

    @property
    def needed_bytes(self) -> int:
        """Most CPU memory of the machine at a time."""
        return sum(self.always.values()) + max(self.moments.values(), default=0)

    @property
    def fits(self) -> bool:
        """Whether CPU memory and disk are enough, as far as they are known."""
        has_memory = self.memory_bytes is None or self.needed_bytes <= self.memory_bytes
        return has_memory and (self.disk_bytes is None or sum(self.disk.values()) <= self.disk_bytes)


def check_host(
    config: TaskConfig,
    layout: Layout,
    model: ModelFindings,
    data: DataFindings | None,
    on_gpu: bool,
    host_gib: float | None,
    is_here: bool,
) -> HostFindings:
    """Predicts CPU memory and disk.

    Args:
        config: of any task whose memory is predicted.
        layout: the mesh.
        model: what ``check_model`` returned.
        data: what was seen of the data.
        on_gpu: whether devices have memory of their own.
        host_gib: CPU memory of a machine; None looks at this one, if the run is for it.
        is_here: whether the run is for this machine.
    """
    processes = _processes_of_a_machine(layout, on_gpu)
    findings = HostFindings(processes)
    largest = model.largest
    findings.always["processes"] = processes * PROCESS_BYTES[on_gpu]
    for part, size in largest.host.items():
        findings.always[part] = processes * size
    if not on_gpu:
        findings.always["devices, which are the CPU"] = processes * largest.total
    sizes = {**largest.parts, **largest.host}
    state = sum(size for name, size in sizes.items() if name.removeprefix("critic: ") in STATE)
    if config.train.save_async and config.train.save_steps:
        findings.always["a checkpoint that is being written (train.save_async)"] = processes * state
    findings.moments = _temporary_host_bytes(config, model, processes, "frozen reference" in sizes, on_gpu)
    # a rank holds 1 / shards of the trained weights, as of all that is saved
    shards = FLOAT32 * model.num_trained / max(sizes.get("gradients", 0), 1)
    checkpoints = config.train.max_checkpoints + 1 if config.train.save_steps else 1
    findings.disk["checkpoints" if checkpoints > 1 else "the checkpoint"] = round(shards * state) * checkpoints
    findings.disk["hf_ckpt"] = _export_bytes(config, model) * (2 if config.train.export_steps else 1)
    if isinstance(config, TrainTextConfig) and data is not None and config.data.datasets_type == "mapping":
        findings.disk["tokens"] = TOKEN_BYTES * round(data.tokens or 0)
    if host_gib is not None:
        findings.memory_bytes = round(host_gib * 2**30)
    elif is_here:
        findings.memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if is_here:
        output_dir = Path(config.train.output_dir).absolute()
        findings.disk_bytes = shutil.disk_usage(next(path for path in output_dir.parents if path.exists())).free
    return findings


STATE = ("gradients", "optimiser state", "moving average")
"""Parts of a rank's memory of which a checkpoint holds as much; gradients stand for the trained weights in float32."""


def _processes_of_a_machine(layout: Layout, on_gpu: bool) -> int:
    local = int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
    return min(layout.size, local or (torch.cuda.device_count() or GPUS_OF_A_MACHINE if on_gpu else layout.size))


def _temporary_host_bytes(
    config: TaskConfig, model: ModelFindings, processes: int, has_reference: bool, on_gpu: bool
) -> dict[str, int]:
    """Bytes that are taken for a while on the machine with rank 0, by what is done then."""
    is_language = isinstance(config.model, LanguageModelConfig)
    moments: dict[str, int] = {}
    if config.train.init_device != "meta":
        whole = model.whole_bytes * (1 + has_reference) + model.frozen_bytes
        moments["start: each process builds the whole model (train.init_device)"] = processes * whole
    elif getattr(config.model, "model_path", None) is None:
        if model.num_parameters <= LARGEST_IN_SEQUENCE:
            moments["start: rank 0 draws the whole model"] = FLOAT32 * model.num_parameters
        else:
            on_cpu = not on_gpu or config.train.enable_fsdp_offload
            moments["start: each process draws its shards"] = processes * DRAWN_BYTES * PIECE * on_cpu
    else:
        weight = model.largest_weight * FLOAT32
        whole = config.train.broadcast_model_weights_from_rank0
        moments["start: each process reads its shards"] = processes * weight if whole else weight
        if model.frozen_bytes:
            moments["start: each process loads frozen parts"] = processes * model.frozen_bytes
    if is_language and FLOAT32 * model.num_parameters <= LARGEST_COPY:
        moments["probe: rank 0 gathers the whole model"] = FLOAT32 * model.num_parameters
    if _exports_adapters(config):
        moments["export: rank 0 gathers the adapters"] = FLOAT32 * model.num_trained
    elif is_language and not isinstance(config, TrainTextRewardConfig):
        # a weight as it was gathered, and what the files have in its place
        moments["export: rank 0 writes weight after weight"] = 2 * model.largest_weight * _export_itemsize(config)
    else:
        moments["export: rank 0 gathers the whole model"] = FLOAT32 * model.num_parameters
    return moments


def _exports_adapters(config: TaskConfig) -> bool:
    """Whether adapters are exported alone; a reward model, and variants that diffusers cannot load, are merged."""
    lora = getattr(config.model, "lora", None)
    return lora is not None and not lora.is_merged and not isinstance(config, TrainTextRewardConfig)


def _export_itemsize(config: TaskConfig) -> int:
    return 2 if config.train.mixed_precision == "bf16" else FLOAT32


def _export_bytes(config: TaskConfig, model: ModelFindings) -> int:
    if _exports_adapters(config):
        return FLOAT32 * model.num_trained
    if isinstance(config.model, LanguageModelConfig):
        return _export_itemsize(config) * model.num_parameters
    return FLOAT32 * model.num_parameters + model.frozen_bytes
