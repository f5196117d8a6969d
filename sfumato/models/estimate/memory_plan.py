"""Predicts the memory of each rank before a run, without loading weights.

For weights, gradients and optimiser state the model is distributed on meta as in a run, over a mesh whose other ranks
do not exist, and the sizes of its shards are summed. Activations are counted in a forward pass on tensors without
memory (``activation_memory``). Not included are the CUDA context (about 0.5 to 1 GiB), fragmentation, and buffers of
kernels and NCCL.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor

from sfumato.config.sections import TrainConfig
from sfumato.data.media.vision import Vision
from sfumato.errors import UnpredictedError, UserError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.estimate.activation_memory import SavedBytes, count_saved, make_fake, run_some
from sfumato.models.estimate.cuda_autocast import as_on_cuda
from sfumato.models.estimate.peak_memory import peak_bytes
from sfumato.optim.optimizer import build_optimizer
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh, pretended_mesh
from sfumato.parallel.parallelize import parallelize
from sfumato.parallel.pipeline import build_pipeline
from sfumato.parallel.plan import ParallelPlan, find_blocks
from sfumato.parallel.precision import compute_in
from sfumato.parallel.shards import local_shard
from sfumato.parallel.stages import TWO_STAGES, ranks_of_stages, split_layers

FULL_PRECISION = 4
"""Bytes of a trained weight, of a gradient, and of an element of optimiser state: float32."""

QUANTISED_FROM = 4096
"""Number of elements of a parameter from which torchao keeps its optimiser state in 8 bits."""


@dataclass
class Planned:
    """A model to be trained, with what determines its memory."""

    build: Callable[[], nn.Module]
    """Makes the model on meta, with its adapters."""
    plan: ParallelPlan
    """How the model is cut."""
    dtype: torch.dtype | None
    """dtype of autocast; None leaves it off."""
    run: Callable[[Any], object]
    """Runs forward pass and loss of one rank's micro-batch, given the module of ``build`` with fake weights."""
    loss_bytes: int
    """Bytes that the loss takes besides the tensors that it saves."""
    draw: Callable[[Any], object] | None = None
    """Runs a pass without gradients in which RL draws a micro-batch, given the module as ``run``."""
    num_micro_batches: int = 1
    """Micro-batches in a step of one data-parallel rank; with more than one, gradients are accumulated."""
    reference: torch.dtype | None = None
    """dtype of a frozen copy of the model; None if there is no copy."""
    frozen_bytes: dict[str, int] = field(default_factory=dict)
    """Bytes of other networks, which are whole in each rank, by name."""
    frozen_idle: bool = False
    """Whether those are in CPU memory except while they compute, when there are no activations."""
    shares_samples: int = 1
    """Number of ranks that divide a sample's activations among them: ring x ulysses, without tensor parallelism."""
    encoder_bytes: int = 0
    """Bytes that encoders save for the backward pass, which are not divided among the ranks that share a sample."""
    diffusion: DiffusionModel | None = None
    """The whole pipeline on meta, of a diffusion model."""
    vision: Vision | None = None
    """The reader of images or audio of a model that takes them."""
    on_gpu: bool = False
    """Whether it will run on a GPU, whose autocast computes norms, softmax and losses in float32."""
    num_policies: int = 0
    """Copies of the trained weights that RL keeps as other policies; one more is needed while they are in use."""


@dataclass
class RankMemory:
    """Bytes of one rank by their purpose."""

    parts: dict[str, int] = field(default_factory=dict)
    """Bytes on the device."""
    host: dict[str, int] = field(default_factory=dict)
    """Bytes in CPU memory, when something is offloaded."""
    phases: dict[str, int] = field(default_factory=dict)
    """Bytes on the device at other times than in a training step, by what is done then."""

    @property
    def total(self) -> int:
        """Bytes on the device: of the parts as if all were in use at once, or of the largest other phase."""
        return max(sum(self.parts.values()), *self.phases.values(), 0)


@contextmanager
def refuse_unpredicted(name: str, reason: str) -> Iterator[None]:
    """Raises UnpredictedError where code of transformers ends, within the block, because tensors have no values, or
    because a model is built otherwise than those that are known here.

    Args:
        name: of the model.
        reason: what is said of it, before the error.
    """
    try:
        yield
    except UserError:
        raise
    except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        detail = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise UnpredictedError(
            f"the memory of {name} cannot be predicted, since {reason} ({detail}): start a run of a few steps instead "
            "(train.max_steps)"
        ) from error


def plan_memory(planned: Planned, train: TrainConfig, num_ranks: int, compiled: bool = False) -> list[RankMemory]:
    """Predicts the memory of the first rank of each pipeline stage, which has the largest shards of its stage.

    Args:
        planned: the model.
        train: the section train.
        num_ranks: number of processes.
        compiled: count the activations of compiled blocks, which are fewer, in some ten seconds; see
            ``counts_compiled``.

    Raises:
        ConfigError: when the model does not support the configured parallelism.
    """
    layout = Layout.resolve(train, num_ranks)
    saved = count_activations(planned, train, layout, compiled)
    stage_memories = []
    for stage in range(layout.pp):
        memory = RankMemory()
        with pretended_mesh(layout, stage * layout.size // layout.pp) as mesh:
            _add_weights(memory, planned, train, mesh)
        _add_activations(memory, saved, planned, train, layout, stage)
        frozen = memory.host if planned.frozen_idle else memory.parts
        frozen |= planned.frozen_bytes
        stage_memories.append(memory)
    return stage_memories


def counts_compiled(train: TrainConfig, layout: Layout, on_gpu: bool) -> bool:
    """Whether blocks will be compiled, and what compiled ones save can be counted: not shards of tensor parallelism,
    nor where blocks are computed again."""
    compiles = train.compiles("cuda" if on_gpu else "cpu")
    return compiles and layout.tp == 1 and train.activation_checkpointing == "none"


def count_activations(planned: Planned, train: TrainConfig, layout: Layout, compiled: bool = False) -> SavedBytes:
    """Counts what one micro-batch of one rank saves, with the layout's tensor parallelism.

    Other parallelism, checkpointing and offload are taken into account afterwards, in ``_add_activations``.
    """
    with _fake_module(planned, train, layout) as (module, blocks):
        return count_saved(module, blocks, lambda: planned.run(module), compiled)


def count_drawing(planned: Planned, train: TrainConfig, layout: Layout) -> int:
    """Most bytes of the tensors that one pass of ``planned.draw`` makes, without gradients, with tensor parallelism."""
    assert planned.draw is not None
    with (
        _fake_module(planned, train, layout) as (module, blocks),
        torch.no_grad(),
        run_some(blocks, lambda _index, _outputs: None, lambda _index, _outputs, _result: None),
    ):
        return peak_bytes(partial(planned.draw, module.eval()))


@contextmanager
def _fake_module(
    planned: Planned, train: TrainConfig, layout: Layout
) -> Iterator[tuple[nn.Module, dict[str, nn.Module]]]:
    """Inside, the model with fake weights in the dtypes of the run, and those of its blocks that a rank has or runs."""
    module = planned.build()
    tensor_settings = ("sequence_parallel", "tensor_parallel_size")
    settings = _switch_off_parallelism(train, tensor_settings)
    config = type(train).model_construct(**dict(train)).model_copy(update=settings)
    gathers_low = train.shards(layout.size)
    with pretended_mesh(Layout(tp=layout.tp)) as mesh, FakeTensorMode(allow_non_fake_inputs=True):
        make_fake(module, planned.dtype if gathers_low else None)
        decoder = f"{planned.plan.decoder}." if layout.pp > 1 and planned.plan.decoder else ""
        blocks = {name: block for name, block in find_blocks(module, planned.plan).items() if name.startswith(decoder)}
        if layout.tp > 1:
            module = parallelize(module, mesh, config, planned.plan)
        if planned.dtype is not None and not gathers_low:
            compute_in(module, planned.dtype)
        with as_on_cuda(planned.on_gpu):
            yield module, blocks


def _switch_off_parallelism(train: TrainConfig, unchanged: tuple[str, ...] = ()) -> dict[str, object]:
    """Settings that switch off parallelism and savings of memory, except those named in ``unchanged``."""
    off = {
        "data_parallel_mode": "ddp",
        "tensor_parallel_size": 1,
        "sequence_parallel": False,
        "activation_checkpointing": "none",
        "enable_activation_offload": False,
        "compile": False,
    }
    return {name: value for name, value in off.items() if name not in unchanged}


def _add_weights(memory: RankMemory, planned: Planned, train: TrainConfig, mesh: Mesh) -> None:
    """Adds the bytes of weights, gathered weights, gradients, optimiser state, averages, and a frozen copy."""
    module = planned.build()
    blocks = [f"{name}." for name in find_blocks(module, planned.plan)]
    uses_fsdp = train.shards(mesh.size)
    plain = _switch_off_parallelism(train, ("data_parallel_mode", "tensor_parallel_size", "sequence_parallel"))
    if train.data_parallel_mode == "fsdp1":
        plain["data_parallel_mode"] = "ddp"  # its flat shards cannot be made on meta: counted below
    config = train.model_copy(update=plain)
    if mesh.layout.pp > 1:
        module = build_pipeline(module, mesh, config, planned.plan, planned.dtype).module
    else:
        module = parallelize(module, mesh, config, planned.plan, planned.dtype)
    optimizer, _ = build_optimizer(module, train, total_steps=1, mesh=mesh)
    # fsdp1 was left out above, so its division of each parameter is computed.
    ranks = mesh.layout.fsdp if uses_fsdp and train.data_parallel_mode == "fsdp1" else 1

    parameters = list(module.parameters())
    trained_numel = sum(_shard_numel(parameter, ranks) for parameter in parameters if parameter.requires_grad)
    copied_numel = (
        sum(_shard_numel(parameter, ranks) for parameter in parameters) if planned.reference is not None else 0
    )
    weights = sum(_shard_numel(parameter, ranks) * parameter.itemsize for parameter in parameters)
    sizes = {
        "weights": weights + sum(buffer.nbytes for buffer in module.buffers()),
        "gradients": trained_numel * FULL_PRECISION,
        "optimiser state": _optimizer_bytes(optimizer, train.optimizer, ranks),
        "moving average": trained_numel * FULL_PRECISION if train.ema_decay else 0,
        "other policies": (planned.num_policies + 1) * trained_numel * FULL_PRECISION if planned.num_policies else 0,
        "frozen reference": copied_numel * planned.reference.itemsize if copied_numel else 0,  # pyright: ignore[reportOptionalMemberAccess]  (0 without a reference)
    }
    target = memory.host if uses_fsdp and train.enable_fsdp_offload else memory.parts
    target |= {name: size for name, size in sizes.items() if size}
    if uses_fsdp:
        memory.parts |= _gathered_bytes(module, blocks, planned, train, mesh, ranks)


def _shard_numel(parameter: nn.Parameter, ranks: int) -> int:
    """Number of elements of this rank's shard, divided among ``ranks`` once more for fsdp1."""
    return math.ceil(local_shard(parameter).numel() / ranks)


def _optimizer_bytes(optimizer: torch.optim.Optimizer, kind: str, ranks: int) -> int:
    """Bytes of the optimiser state of a rank.

    Args:
        optimizer: the optimiser, with the rank's shards.
        kind: ``train.optimizer``.
        ranks: see ``_shard_numel``.
    """
    total = 0
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            count = _shard_numel(parameter, ranks)
            if group.get("orthogonal"):
                total += count * FULL_PRECISION  # Muon: one average
            elif kind == "adamw8bit" and count >= QUANTISED_FROM:
                total += 2 * (count + count // 256 * FULL_PRECISION)  # each 256 elements have a scale
            else:
                total += 2 * count * FULL_PRECISION + FULL_PRECISION  # two averages, and the number of the step
    return total


def _gathered_bytes(
    module: nn.Module, blocks: list[str], planned: Planned, train: TrainConfig, mesh: Mesh, ranks: int
) -> dict[str, int]:
    """Bytes that fsdp takes besides shards: gathered weights, and gradients before they are summed over ranks.

    Args:
        module: the distributed model.
        blocks: prefixes of the names of parameters in each block, which fsdp gathers as a unit.
        planned, train, mesh: as for ``_add_weights``.
        ranks: see ``_shard_numel``.
    """
    # by unit, "" being what is outside of blocks: bytes of gathered weights, and elements of gradients
    units: dict[str, tuple[int, int]] = {}
    for name, parameter in module.named_parameters():
        whole_numel = _whole_numel(parameter, ranks, mesh)
        itemsize = planned.dtype.itemsize if planned.dtype is not None else parameter.itemsize
        unit = next((block for block in blocks if name.startswith(block)), "")
        weights, gradients = units.get(unit, (0, 0))
        units[unit] = weights + whole_numel * itemsize, gradients + whole_numel * parameter.requires_grad
    root_unit, *block_units = [units.pop("", (0, 0)), *sorted(units.values(), reverse=True)]
    largest = block_units[0][0] if block_units else 0
    keeps_all = mesh.layout.pp > 1 or not train.enable_reshard_after_forward
    gathered = sum(weights for weights, _ in block_units) if keeps_all else 2 * largest  # this block and the next
    sizes = {"gathered weights": root_unit[0] + gathered + largest}  # a gather arrives in a buffer of its own
    keeps_whole = planned.num_micro_batches > 1 and not train.enable_reduce_every_micro_batch
    at_once = sum if keeps_whole or mesh.layout.pp > 1 else max
    sizes["whole gradients"] = at_once(count for _, count in (root_unit, *block_units)) * FULL_PRECISION
    return sizes


def _whole_numel(parameter: nn.Parameter, ranks: int, mesh: Mesh) -> int:
    """Number of elements of a parameter that fsdp has gathered, still divided by tensor and expert parallelism."""
    names = parameter.device_mesh.mesh_dim_names if isinstance(parameter, DTensor) else ()
    shards = math.prod(mesh.size_of(name) for name in names or () if name in ("fsdp", "efsdp"))
    return _shard_numel(parameter, ranks) * shards * ranks


def _add_activations(
    memory: RankMemory, saved: SavedBytes, planned: Planned, train: TrainConfig, layout: Layout, stage: int
) -> None:
    """Adds the bytes of the activations of a pipeline stage, and of the loss if the stage has the last layers."""
    mode = train.activation_checkpointing
    share = planned.shares_samples
    owners = ranks_of_stages(train)
    part_indices = [index for index, rank in enumerate(owners) if rank == stage]  # two parts with some schedules
    sizes = split_layers(len(saved.blocks), len(owners)) if layout.pp > 1 else [len(saved.blocks)]
    starts = [sum(sizes[:index]) for index in range(len(sizes))]
    stage_blocks = [block for part in part_indices for block in range(starts[part], starts[part] + sizes[part])]
    kept_bytes = [saved.bytes_by_block(mode)[block] for block in stage_blocks]
    waiting = _micro_batches_waiting(train, planned.num_micro_batches, stage)

    blocks = sum(kept_bytes) * waiting // share
    if train.enable_activation_offload:
        memory.host["activations"] = blocks
        blocks = 2 * max(kept_bytes) // share  # two blocks are being copied
    memory.parts["activations of blocks"] = blocks
    if mode != "none":
        recomputed = max(saved.blocks[block].none - getattr(saved.blocks[block], mode) for block in stage_blocks)
        memory.parts["one block computed again"] = max(recomputed, 0) // share
    if saved.copies:
        memory.parts["weights in autocast's precision"] = saved.copies * len(stage_blocks) // len(saved.blocks)
    has_first = 0 in part_indices
    has_last = len(owners) - 1 in part_indices
    outside = (saved.before if has_first else 0) + (saved.after if has_last else 0)
    memory.parts["activations outside blocks"] = outside // share
    if planned.encoder_bytes and has_first:
        memory.parts["activations of encoders"] = planned.encoder_bytes * waiting
    if has_last:
        memory.parts["loss"] = planned.loss_bytes // share


def _micro_batches_waiting(train: TrainConfig, num_micro_batches: int, stage: int) -> int:
    """Largest number of micro-batches whose activations a pipeline stage holds; 1 without a pipeline."""
    size = train.pipeline_parallel_size
    schedule = train.pipeline_schedule
    if size == 1:
        return 1
    if schedule == "gpipe":
        return num_micro_batches
    # With two stages in a rank, each stage holds about one micro-batch for every rank.
    waiting = size - stage if schedule == "1f1b" else size
    return min(waiting + (stage < size - 1 and schedule in TWO_STAGES), max(num_micro_batches, 1))
