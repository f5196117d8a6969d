"""The state of a run: everything that must be saved so that a resumed run equals one that never stopped."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from sfumato.checkpoint.parts import StoredCheckpoint, TensorParts, parts_of_shard, whole_part
from sfumato.config.open_mappings import JsonObject
from sfumato.errors import CheckpointError, ConfigError
from sfumato.optim.ema import Ema
from sfumato.optim.optimizer import saved_shard
from sfumato.optim.trained import Trained
from sfumato.parallel.finite import NAMED, list_first
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import Shards, all_parameters, chunks_of, local_shard
from sfumato.tracking.identity import KEY as IDENTITY
from sfumato.tracking.identity import Identity, compare_identity

if TYPE_CHECKING:
    from sfumato.parallel.balance import ExpertBalancer

OPTIONAL = {
    "ema": "moving average (train.ema_decay)",
    "reference": "reference model",
    "old_policy": "old policy (algorithm.old)",
    "ema_policy": "averaged policy (algorithm.ema)",
    "reference_policy": "moving reference (algorithm.reference)",
    "balancer": "expert bias (train.expert_bias_rate)",
    "critic": "critic",
}
"""Sections of tensors that not every state has, and what messages call them."""

DISPENSABLE = "previous_policy"
"""The section of the policy before the last update, which only rollouts that lag behind need (rollout.async_strategy).
A checkpoint may lack it, or hold it without use for this run."""

Specs = Mapping[str, tuple[torch.Size, torch.dtype]]
"""Whole shapes and dtypes of tensors by name."""


class Resumable(Protocol):
    """A data loader whose position can be saved and restored."""

    def state(self) -> dict[str, object]:
        """The position, the same on every rank, as values that JSON can hold."""
        ...

    def restore(self, state: dict[str, object]) -> None:
        """Goes on from a position. Raises DataError when it is a position in other data."""
        ...


@dataclass
class TrainState:
    """Everything that changes while a run goes on. Noise follows from ``step`` and the seed."""

    model: nn.Module
    """Its trainable parameters are saved; a resume takes the others from the model's folder. Of a pipeline, its
    ``module``."""
    optimizer: torch.optim.Optimizer
    schedule: LambdaLR
    ema: Ema | None = None
    reference: nn.Module | None = None
    """The frozen model that a KL penalty compares with."""
    step: int = 0
    """Steps that are finished."""
    loader: Resumable | None = None
    """The data, where its position does not follow from ``step``."""
    balancer: ExpertBalancer | None = None
    """The biases by which the router balances tokens among experts."""
    policies: dict[str, Ema] = field(default_factory=dict)
    """Copies of the trained weights that follow them, by name, such as ``old``, ``ema`` and ``reference``."""
    critic: Trained | None = None
    """The critic, which is trained beside the model."""
    identity: Identity = field(default_factory=dict)
    """What a resume must find unchanged, from ``identify``."""
    run_id: str | None = None
    """The run that saves it."""


class SavedTensors:
    """A section of tensors: all cut as the parameters of a module are, or all whole on every rank."""

    def __init__(self, name: str, tensors: dict[str, Tensor], shards: Shards | None = None) -> None:
        """Takes the section's name and its tensors.

        Args:
            name: what precedes the names of the tensors in the checkpoint.
            tensors: this rank's shards, by the name of the parameter.
            shards: how the tensors are cut; None: they are whole.
        """
        self.name = name
        self.tensors = tensors
        self.shards = shards

    def shape(self, name: str) -> torch.Size:
        """The shape of the whole tensor."""
        return self.tensors[name].shape if self.shards is None else self.shards.shapes[name]

    def parts(self) -> TensorParts:
        """The parts that this rank holds, as views of the tensors."""
        parts: TensorParts = {}
        for name, tensor in self.tensors.items():
            key = f"{self.name}/{name}"
            if self.shards is None:
                parts |= whole_part(key, tensor)
            else:
                parts |= parts_of_shard(key, self.shape(name), tensor, chunks_of(self.shards, name))
        return parts

    def specs(self) -> Specs:
        """Whole shapes and dtypes of all tensors, including those of which this rank's shard is empty."""
        return {f"{self.name}/{name}": (self.shape(name), tensor.dtype) for name, tensor in self.tensors.items()}


def collect_state(state: TrainState, mesh: Mesh) -> tuple[TensorParts, dict[str, object]]:
    """Collects what a checkpoint holds. Every rank must call it.

    Returns:
        The parts of the tensors that this rank holds, as views that change when training goes on; and everything else,
        as values that JSON can hold.

    Raises:
        ConfigError: when the optimiser has a state that cannot be saved in shards.
    """
    shards = Shards(state.model, mesh)
    random_tensors, random_values = random_state(mesh.device)
    parts, numbers = optimizer_state(state.optimizer, shards)
    # The generators of rank 0 stand for those of all ranks: noise does not come from them, but from step and seed.
    for section in (
        *_model_sections(state, shards, mesh),
        SavedTensors("random", random_tensors if mesh.is_first else {}),
    ):
        parts |= section.parts()
    critic_numbers: dict[str, object] = {}
    if state.critic is not None:
        critic_shards = Shards(state.critic.module, mesh)
        critic_parts, critic_numbers = optimizer_state(state.critic.optimizer, critic_shards, "critic_optimizer")
        parts |= critic_parts
    return parts, {
        "step": state.step,
        "model": model_name(state.model),
        "ema_updates": None if state.ema is None else state.ema.num_updates,
        "policy_updates": {name: policy.num_updates for name, policy in state.policies.items()},
        "schedule_steps": state.schedule.last_epoch,
        "learning_rates": state.schedule.get_last_lr(),  # of the next step
        "optimizer": mesh.merge(numbers, over="pp"),  # each pipeline stage knows its own parameters
        "critic_optimizer": critic_numbers,
        "critic_schedule_steps": None if state.critic is None else state.critic.schedule.last_epoch,
        "random": random_values,
        "data": {} if state.loader is None else state.loader.state(),
        IDENTITY: state.identity,
        "run_id": state.run_id,
    }


def load_state(state: TrainState, stored: StoredCheckpoint, mesh: Mesh) -> list[str]:
    """Loads a saved state, whatever number of ranks and parallelism saved it. Every rank must call it.

    Args:
        state: of a run with the same model; it is overwritten.
        stored: a checkpoint that has been verified.
        mesh: the ranks of this run.

    Returns:
        Lines about what has changed since the run that saved it, and may: settings of the data, the learning rate.

    Raises:
        CheckpointError: on every rank and before anything changes, when names, shapes or dtypes differ from the
            run's, naming the first that do, or the data, the seed or the size of a step.
        DataError: when the data is not that of the checkpoint.
    """
    shards = Shards(state.model, mesh)
    values = stored.values
    sections = _model_sections(state, shards, mesh)
    if not any(key.startswith(f"{DISPENSABLE}/") for key in stored.tensors):
        sections = [section for section in sections if section.name != DISPENSABLE]
    _check_fit(state, sections, stored, mesh)
    changed = compare_identity(values.get(IDENTITY), state.identity, stored.folder)
    if state.loader is not None:  # before the schedule, whose length may depend on the data that is left
        state.loader.restore(values["data"])
    fields, parts = new_optimizer_state(state.optimizer, shards, stored)
    trained = [(state.optimizer, fields)]
    if state.critic is not None:
        critic_shards = Shards(state.critic.module, mesh)
        critic_fields, critic_parts = new_optimizer_state(
            state.critic.optimizer, critic_shards, stored, "critic_optimizer"
        )
        parts |= critic_parts
        trained.append((state.critic.optimizer, critic_fields))
    for section in sections:
        parts |= section.parts()
    stored.read(parts)
    # Only after everything was read: a checkpoint that cannot be read leaves the optimisers as they were.
    for optimizer, optimizer_fields in trained:
        optimizer.state.clear()
        optimizer.state.update(optimizer_fields)
    if state.balancer is not None:
        state.balancer.load_state_dict(next(section.tensors for section in sections if section.name == "balancer"))
    if state.ema is not None:
        state.ema.num_updates = values["ema_updates"]
    for name, policy in state.policies.items():
        # A checkpoint may lack the policy of DISPENSABLE.
        policy.num_updates = values["policy_updates"].get(name, 0)
    _restore_schedule(state.schedule, values["schedule_steps"])
    changed = [line for line in (changed, _describe_rates(state.schedule, values.get("learning_rates"))) if line]
    if state.critic is not None:
        _restore_schedule(state.critic.schedule, values["critic_schedule_steps"])
    names = [key.removeprefix("random/") for key in stored.tensors if key.startswith("random/")]
    restore_random(stored.read_whole({name: f"random/{name}" for name in names}), values["random"], mesh.device)
    state.step = values["step"]
    return changed


def load_trained(module: nn.Module, stored: StoredCheckpoint, mesh: Mesh, section: str | None = None) -> bool:
    """Loads the trained weights of a checkpoint into a module, or their moving average where it has one.

    Args:
        module: of the model that is trained.
        stored: the checkpoint.
        mesh: that the module is on.
        section: take these tensors, such as ``model``, the trained ones, or ``old_policy``.

    Returns:
        Whether the average was loaded.

    Raises:
        CheckpointError: when the module trains other weights, or the checkpoint has no such section.
    """
    shards = Shards(module, mesh)
    averaged = section is None and any(key.startswith("ema/") for key in stored.tensors)
    name = section or ("ema" if averaged else "model")
    weights = _model_parameters(name, shards)
    stored_specs = {key: spec for key, spec in stored.tensors.items() if key.startswith(f"{name}/")}
    compare_tensors(stored, stored_specs, weights.specs(), model_name(module))
    stored.read(weights.parts())
    if any(key.startswith("balancer/") for key in stored.tensors):
        from sfumato.parallel.balance import ExpertBalancer

        balancer = ExpertBalancer(module, mesh, 0.0)
        biases = SavedTensors("balancer", balancer.state_dict())
        stored.read(biases.parts())
        balancer.load_state_dict(biases.tensors)
    return averaged


def model_name(module: nn.Module) -> str:
    """The name of a model's class without the wrappers of parallelism."""
    if isinstance(module, FullyShardedDataParallel):
        module = module.module
    stages = getattr(module, "stages", None)
    if isinstance(stages, nn.ModuleDict):  # of a pipeline
        module = next(iter(stages.values()))
    kind = type(module)
    # fully_shard makes a class with the bases FSDPModule and the class that the module had.
    return (kind.__bases__[1] if issubclass(kind, FSDPModule) else kind).__name__


def _model_parameters(name: str, shards: Shards) -> SavedTensors:
    return SavedTensors(
        name, {key: local_shard(parameter.detach()) for key, parameter in shards.parameters.items()}, shards
    )


def _model_sections(state: TrainState, shards: Shards, mesh: Mesh) -> list[SavedTensors]:
    """All tensors but the optimiser's and the random generators'."""
    sections = [_model_parameters("model", shards)]
    if state.ema is not None:
        sections.append(SavedTensors("ema", state.ema.averages, shards))
    sections += [SavedTensors(f"{name}_policy", policy.averages, shards) for name, policy in state.policies.items()]
    if state.reference is not None:
        sections.append(_model_parameters("reference", Shards(state.reference, mesh, all_parameters(state.reference))))
    if state.critic is not None:
        sections.append(_model_parameters("critic", Shards(state.critic.module, mesh)))
    if state.balancer is not None:
        sections.append(SavedTensors("balancer", state.balancer.state_dict()))
    return sections


def _check_fit(state: TrainState, sections: list[SavedTensors], stored: StoredCheckpoint, mesh: Mesh) -> None:
    """Raises CheckpointError when the tensors of a checkpoint are not those of this state. Every rank must call it."""
    wanted_specs = mesh.merge({key: spec for section in sections for key, spec in section.specs().items()}, over="pp")
    other_sections = {"optimizer", "critic_optimizer", "random", DISPENSABLE} - {section.name for section in sections}
    stored_specs = {key: spec for key, spec in stored.tensors.items() if key.split("/")[0] not in other_sections}
    for section, description in OPTIONAL.items():
        is_stored = any(key.startswith(f"{section}/") for key in stored_specs)
        is_wanted = any(key.startswith(f"{section}/") for key in wanted_specs)
        if is_stored != is_wanted:
            has, wants = ("one", "none") if is_stored else ("no", "one")
            raise CheckpointError(f"{stored.folder} has {has} {description}, but this configuration wants {wants}")
    unknown = [
        f"{name}/{key}"
        for name, owner in (("optimizer", "model"), ("critic_optimizer", "critic"))
        for key in stored.optimizer_keys(name)
        if f"{owner}/{key.rsplit('/', 1)[0]}" not in wanted_specs
    ]
    compare_tensors(stored, stored_specs, wanted_specs, model_name(state.model), unknown)


def compare_tensors(
    stored: StoredCheckpoint, stored_specs: Specs, wanted_specs: Specs, model: str, unknown: Sequence[str] = ()
) -> None:
    """Compares the tensors of a checkpoint with those that a model needs.

    Args:
        stored: the checkpoint.
        stored_specs: its tensors, without the sections that are not compared.
        wanted_specs: the tensors of the model.
        model: the class of the model.
        unknown: names of further tensors of the checkpoint that the model has no place for.

    Raises:
        CheckpointError: names the first tensors that are missing, left over, or of another shape or dtype.
    """
    problems = []
    if missing := wanted_specs.keys() - stored_specs.keys():
        problems.append(f"it has no {list_first([repr(key) for key in sorted(missing)])}")
    if extra := {*(stored_specs.keys() - wanted_specs.keys()), *unknown}:
        problems.append(f"this configuration does not train {list_first([repr(key) for key in sorted(extra)])}")
    for key in sorted(wanted_specs.keys() & stored_specs.keys()):
        (shape, dtype), (wanted_shape, wanted_dtype) = stored_specs[key], wanted_specs[key]
        if shape != wanted_shape:
            problems.append(f"{key!r} has shape {tuple(shape)}, here {tuple(wanted_shape)}")
        elif dtype != wanted_dtype:
            problems.append(f"{key!r} has dtype {dtype}, here {wanted_dtype}")
    if problems:
        saved = stored.values["model"]
        kinds = f" (a {saved}, here a {model})" if saved != model else ""
        more = f"; and {len(problems) - 2 * NAMED} more" if len(problems) > 2 * NAMED else ""
        first = "; ".join(problems[: 2 * NAMED])
        raise CheckpointError(f"{stored.folder} is of another model or configuration{kinds}: {first}{more}")


def _restore_schedule(schedule: LambdaLR, steps: int) -> None:
    """Moves the schedule to a position, with the learning rates that this run's configuration gives there."""
    rates = [base * factor(steps) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    position = {"last_epoch": steps, "_step_count": steps + 1, "_last_lr": rates}
    schedule.load_state_dict({**schedule.state_dict(), **position})
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        # LambdaLR sets the groups' rates in its ``step`` alone: until then the optimiser would take those of the start.
        group["lr"] = rate


def _describe_rates(schedule: LambdaLR, saved_rates: object) -> str:
    """Says that the learning rate does not go on where the saving run would have: a schedule is that of all steps, so
    a decayed rate rises again when a run gets more of them. Empty where it does, or the checkpoint does not know."""
    rates = schedule.get_last_lr()
    if not isinstance(saved_rates, list) or not all(isinstance(rate, int | float) for rate in saved_rates):
        return ""
    if not saved_rates or {*saved_rates} == {*rates}:  # groups may have been divided otherwise
        return ""
    here, there = (
        ", ".join(f"{rate:.3g}" for rate in sorted({*group}, reverse=True)) for group in (rates, saved_rates)
    )
    return (
        f"the learning rate goes on at {here}, and not at {there}, as the run that saved the checkpoint would have: "
        "other steps or rates (train.max_steps, train.lr, train.param_groups) make another schedule"
    )


def _is_whole(shards: Shards, name: str) -> bool:
    """Whether this rank holds the whole of a parameter."""
    return shards.group is None and local_shard(shards.parameters[name]).shape == shards.shapes[name]


def optimizer_state(
    optimizer: torch.optim.Optimizer, shards: Shards, section: str = "optimizer"
) -> tuple[TensorParts, dict[str, object]]:
    """An optimiser's state as a checkpoint holds it.

    Learning rates and betas are not part of it: the configuration has them.

    Returns:
        The parts of the tensors that this rank holds, named ``section/parameter/field``; and the numbers, by
        ``parameter/field``.

    Raises:
        ConfigError: when a tensor has not the shape of its parameter, and the parameter is cut over ranks.
    """
    parts: TensorParts = {}
    numbers: dict[str, object] = {}
    chunks = cache(lambda name: chunks_of(shards, name))
    for name, parameter in shards.parameters.items():
        for field_name, value in optimizer.state.get(parameter, {}).items():
            key = f"{section}/{name}/{field_name}"
            if not isinstance(value, Tensor):
                numbers[f"{name}/{field_name}"] = value
                continue
            shard = saved_shard(value)
            if shard.ndim and shard.shape == local_shard(parameter).shape:
                parts |= parts_of_shard(key, shards.shapes[name], shard, chunks(name))
            elif shard.ndim == 0 or _is_whole(shards, name):
                parts |= whole_part(key, shard)
            else:
                raise ConfigError(
                    f"{field_name} of {name} in the optimiser's state has shape {tuple(value.shape)}, not that of the "
                    "parameter, so that it cannot be saved in shards: take another train.optimizer, or ddp"
                )
    return parts, numbers


def new_optimizer_state(
    optimizer: torch.optim.Optimizer, shards: Shards, stored: StoredCheckpoint, section: str = "optimizer"
) -> tuple[dict[Tensor, dict[str, object]], TensorParts]:
    """Prepares the state that an optimiser gets from a checkpoint.

    Returns:
        The state of each parameter by the names of its fields, with tensors that are still uninitialised; and the parts
        to read into these tensors.

    Raises:
        CheckpointError: when a tensor has not the shape of its parameter, and the parameter is cut over ranks here; or
            when the state is that of another optimiser.
    """
    fields: dict[Tensor, dict[str, object]] = {}
    parts: TensorParts = {}
    chunks = cache(lambda name: chunks_of(shards, name))
    groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}
    for key in stored.optimizer_keys(section):
        name, field_name = key.rsplit("/", 1)
        if name not in shards.parameters:
            continue  # another pipeline stage has it
        parameter = shards.parameters[name]
        if (field_name == "momentum_buffer") != bool(groups[parameter].get("orthogonal")):
            raise CheckpointError(
                f"{stored.folder} holds the state of another optimiser ({key}): restore train.optimizer (adamw and "
                "adamw8bit have the same state, muon another), or start a new run from the exported weights"
            )
        if key in stored.values[section]:
            value = stored.values[section][key]
        else:
            shape, dtype = stored.tensors[f"{section}/{key}"]
            if shape == shards.shapes[name]:
                value = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                parts |= parts_of_shard(f"{section}/{key}", shape, local_shard(value), chunks(name))
            elif shape and not _is_whole(shards, name):
                raise CheckpointError(f"{stored.folder}: {key} of the optimiser cannot be cut; load it with ddp")
            else:
                group = groups[parameter]
                # Optimisers keep the step count on the CPU unless a fused or captured kernel reads it.
                is_step = field_name == "step" and not (group.get("fused") or group.get("capturable"))
                value = torch.empty(shape, dtype=dtype, device="cpu" if is_step else parameter.device)
                parts |= whole_part(f"{section}/{key}", value)
        fields.setdefault(parameter, {})[field_name] = value
    return fields, parts


def random_state(device: torch.device) -> tuple[dict[str, Tensor], dict[str, object]]:
    """The state of the generators of torch (CPU, and the GPU of this process), numpy and Python.

    Returns:
        The tensors, and the other values, which JSON can hold.
    """
    numpy_state = np.random.get_state(legacy=False)
    tensors = {"torch": torch.get_rng_state(), "numpy": torch.from_numpy(numpy_state["state"]["key"].copy())}
    if device.type == "cuda":
        tensors["cuda"] = torch.cuda.get_rng_state(device)
    numbers = {
        "pos": int(numpy_state["state"]["pos"]),
        "has_gauss": int(numpy_state["has_gauss"]),
        "gauss": float(numpy_state["gauss"]),
    }
    return tensors, {"python": random.getstate(), "numpy": numbers}


def restore_random(tensors: dict[str, Tensor], values: JsonObject, device: torch.device) -> None:
    """Restores what ``random_state`` returned. Raises CheckpointError for a state that no generator can have."""
    try:
        torch.set_rng_state(tensors["torch"])
        if device.type == "cuda" and "cuda" in tensors:
            torch.cuda.set_rng_state(tensors["cuda"], device)
        version, internal, gauss = values["python"]
        random.setstate((version, tuple(internal), gauss))
        key = tensors["numpy"].numpy()
        numpy_values = values["numpy"]
        np.random.set_state(("MT19937", key, numpy_values["pos"], numpy_values["has_gauss"], numpy_values["gauss"]))
    except (TypeError, ValueError, LookupError, RuntimeError, OverflowError) as error:
        raise CheckpointError(f"the checkpoint's random generators cannot be put in place: {error}") from error
