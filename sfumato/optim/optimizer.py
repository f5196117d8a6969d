"""Optimisers as configured, and the learning rate of every step."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from sfumato.config.open_mappings import JsonObject
from sfumato.config.sections import TrainConfig
from sfumato.errors import ConfigError, MissingDependencyError
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import local_shard, trainable_parameters, whole_shapes

NAMED = 5
"""Parameters that an error names."""

UNDECAYED = re.compile(r"(bias|A_log)$")
"""Names of parameters without weight decay, whatever their shape: biases of stacked experts (gpt-oss) and of stacked
heads, which are as many vectors, and the decay rates of Mamba's states, which its authors except."""

DECAYS = {
    "linear": lambda progress: 1 - progress,
    "cosine": lambda progress: 0.5 * (1 + math.cos(math.pi * progress)),
    "wsd": lambda progress: 1 - math.sqrt(progress),
}
"""By ``train.lr_decay_style``: the share of ``lr - lr_min`` above ``lr_min``, from 1 to 0, at a progress 0 to 1."""


@dataclass(frozen=True)
class ParameterGroup:
    """What the parameters of one optimiser group have in common."""

    is_scaled: bool
    """Groups at the configured rate come first: the rate that is logged is that of the first group."""
    is_vector: bool
    is_hidden: bool
    """Whether Muon moves it."""
    lr_scale: float
    weight_decay: float
    mesh: DeviceMesh | None
    """Tensors of two meshes cannot share an update."""


def build_optimizer(
    module: nn.Module, config: TrainConfig, total_steps: int | Callable[[], int], mesh: Mesh | None = None
) -> tuple[torch.optim.Optimizer, LambdaLR]:
    """The optimiser over the parameters that require gradients, and its learning-rate schedule.

    Matrices have weight decay, vectors (norms, biases) and those of ``UNDECAYED`` have none, unless
    ``train.param_groups`` says otherwise.

    Args:
        module: what is trained, as ``parallelize`` returned it.
        config: which optimiser; rates, betas, decay, groups, schedule.
        total_steps: steps over which the schedule is laid; a function where they may change when a run goes on.
        mesh: the ranks; with pipeline parallelism ``train.param_groups`` are looked up in all stages.

    Raises:
        ConfigError: when an entry of ``train.param_groups`` takes no parameter, or Muon has nothing to do.
        MissingDependencyError: when adamw8bit is asked for and torchao is not installed.
    """
    parameters = trainable_parameters(module)
    hidden: set[str] = set()
    if config.optimizer == "muon":
        from sfumato.optim.muon import hidden_matrices

        hidden = hidden_matrices(module) & parameters.keys()
    entries = {name: _find_entry(name, config) for name in parameters}
    _check_choices(module, config, entries, hidden, mesh)

    shapes = whole_shapes(module)
    grouped: dict[ParameterGroup, list[nn.Parameter]] = {}
    for name, parameter in parameters.items():
        is_vector = len(shapes[name]) < 2 or UNDECAYED.search(name) is not None
        group = _make_group(parameter, is_vector, name in hidden, entries[name], config)
        grouped.setdefault(group, []).append(parameter)
    # The sort is stable, so that within these two keys groups stay in the order of the module's parameters.
    order = sorted(grouped, key=lambda group: (group.is_scaled, group.is_vector))
    groups = [
        {
            "params": grouped[group],
            "lr": config.lr * group.lr_scale,
            "weight_decay": group.weight_decay,
            "orthogonal": group.is_hidden,
        }
        for group in order
    ]
    # Fused: one kernel for all parameters. It also runs on CPUs, where FSDP's offload keeps the shards and their state.
    fused = config.enable_fsdp_offload or any(parameter.is_cuda for parameter in parameters.values())
    optimizer = _make_optimizer(groups or [{"params": []}], config, fused)

    def factor(step: int) -> float:
        return lr_at(step, total_steps() if callable(total_steps) else total_steps, config) / config.lr

    return optimizer, LambdaLR(optimizer, factor)


def _find_entry(name: str, config: TrainConfig) -> int | None:
    """Index of the first entry of ``train.param_groups`` whose expression matches a parameter's name, if any."""
    return next((index for index, entry in enumerate(config.param_groups) if re.search(entry.match, name)), None)


def saved_shard(value: Tensor) -> Tensor:
    """This rank's shard of a tensor of optimiser state as a checkpoint holds it: a plain tensor.

    8-bit state is decompressed to float32. The optimiser compresses it again at its next step, and gets the same bits
    where the shard is the same.
    """
    shard = local_shard(value)
    # An exact comparison: torchao's 8-bit state is a subclass of Tensor, which isinstance would let through.
    return shard if type(shard) is Tensor else shard.dequantize()


def _make_group(
    parameter: nn.Parameter, is_vector: bool, is_hidden: bool, entry: int | None, config: TrainConfig
) -> ParameterGroup:
    decay = 0.0 if is_vector else config.weight_decay
    lr_scale = 1.0
    if entry is not None:
        settings = config.param_groups[entry]
        lr_scale = settings.lr_scale
        decay = decay if settings.weight_decay is None else settings.weight_decay
    mesh = parameter.device_mesh if isinstance(parameter, DTensor) else None
    return ParameterGroup(lr_scale != 1.0, is_vector, is_hidden, lr_scale, decay, mesh)


def _check_choices(
    module: nn.Module, config: TrainConfig, entries: dict[str, int | None], hidden: set[str], mesh: Mesh | None
) -> None:
    """Raises ConfigError when an entry of param_groups, or Muon, has no parameter in any pipeline stage.

    Args:
        module: this rank's module, or stage of it.
        config: the section ``train``.
        entries: index of the entry that sets each parameter, by name; None where none does.
        hidden: names of the parameters that Muon updates.
        mesh: the ranks; without one nothing is checked under pipeline parallelism.
    """
    used = set(entries.values())
    has_hidden = bool(hidden)
    if config.pipeline_parallel_size > 1:
        if mesh is None:
            return
        stages = mesh.gather((used, has_hidden), over="pp")
        used = set().union(*(used_here for used_here, _ in stages))
        has_hidden = any(has_here for _, has_here in stages)
    for index, entry in enumerate(config.param_groups):
        if index not in used:
            names = list(entries)
            matching = [name for name in names if re.search(entry.match, name)]
            why = f"entries before it take all {len(matching)} that it matches" if matching else "it matches none"
            raise ConfigError(
                f"train.param_groups.{index}: {entry.match!r} takes no trained parameter, since {why}; there are "
                f"{', '.join(names[:NAMED])}{', ...' if len(names) > NAMED else ''}: correct the expression, or leave "
                "the entry out"
            )
    if config.optimizer != "muon":
        return
    if isinstance(module, FullyShardedDataParallel):
        raise ConfigError(
            "train.optimizer muon needs whole matrices, which the flat shards of train.data_parallel_mode fsdp1 do not "
            "tell: take fsdp2"
        )
    if not has_hidden:
        raise ConfigError(
            f"train.optimizer muon: {type(module).__name__} trains no matrices in a list of layers (adapters of "
            "model.lora do not count): take adamw"
        )


def _make_optimizer(groups: list[dict[str, object]], config: TrainConfig, fused: bool) -> torch.optim.Optimizer:
    settings = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.optimizer == "muon":
        from sfumato.optim.muon import Muon

        return Muon(groups, fused=fused, **settings)
    for group in groups:
        group.pop("orthogonal", None)  # Muon's own key
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, fused=fused, **settings)
    try:
        from sfumato.optim.adamw8bit import AdamW8bit
    except ModuleNotFoundError as error:
        raise MissingDependencyError(
            "train.optimizer adamw8bit needs torchao: run pip install 'sfumato[low-memory]', or take adamw"
        ) from error
    return AdamW8bit(groups, **settings)


def lr_at(step: int, total_steps: int, config: TrainConfig) -> float:
    """Learning rate of a step (0 is the first): linear warm-up, a plateau, then the decay to ``lr_min``.

    Args:
        step: counted from 0; from ``total_steps`` on a decayed rate stays at ``lr_min``.
        total_steps: steps of the run, whose last ``lr_decay_ratio`` decays. Warm-up is never cut short.
        config: peak, minimum, warm-up and shape.
    """
    if step < config.lr_warmup_steps:
        return config.lr * (step + 1) / config.lr_warmup_steps
    if config.lr_decay_style == "constant":
        return config.lr
    begin = max(config.lr_warmup_steps, round(total_steps * (1 - config.lr_decay_ratio)))
    progress = min(max((step - begin) / max(total_steps - begin, 1), 0.0), 1.0)
    return config.lr_min + (config.lr - config.lr_min) * DECAYS[config.lr_decay_style](progress)


def say_unfinished_warmup(config: JsonObject, total_steps: int, say: Callable[[str], None]) -> None:
    """Says when a run ends before its warm-up does.

    Args:
        config: the whole configuration as plain values; empty for a run that has none.
        total_steps: steps of the run.
        say: takes a line for the person who watches.
    """
    warmup = config.get("train", {}).get("lr_warmup_steps", 0)
    if warmup > total_steps:
        say(
            f"train.lr_warmup_steps {warmup} is more than the {total_steps} steps of the run: the learning rate ends "
            f"at {total_steps / warmup:.1%} of train.lr"
        )
