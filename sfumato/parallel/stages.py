"""The stages of a pipeline: their layers and ranks, checks of models and settings, and micro-batches of one shape."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from sfumato.config.parallel import ParallelConfig
from sfumato.errors import ConfigError
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.plan import ParallelPlan, compile_pattern

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Part = nn.Module | nn.Parameter
"""A part of a model that one stage has and others have not."""

TWO_STAGES = ("interleaved_1f1b", "zero_bubble", "zbv")
"""Schedules with two stages in each rank."""

SPLIT_BACKWARD = ("zero_bubble", "zbv")
"""Schedules that compute the gradients of inputs and those of weights separately."""


class Absent(nn.Module):
    """Stands for a part that another stage has: returns its first argument."""

    def forward(self, hidden_states: Tensor, *args: object, **kwargs: object) -> Tensor:
        """Returns the hidden states, any shape."""
        return hidden_states


def absent_part(part: Part) -> Absent | None:
    """The replacement of a part in other stages: ``Absent`` for a module, None for a parameter."""
    return Absent() if isinstance(part, nn.Module) else None


def weights_of(part: Part) -> list[nn.Parameter]:
    """The weights of a part."""
    return [*part.parameters()] if isinstance(part, nn.Module) else [part]


def split_layers(num_layers: int, num_stages: int) -> list[int]:
    """The number of layers of each stage.

    The embedding and the head count as one layer each, so the first and the last stage have about one layer less; every
    stage has at least one. A remainder goes to the earlier stages.

    Raises:
        ConfigError: when there are fewer layers than stages.
    """
    if num_layers < num_stages:
        raise ConfigError(
            f"{num_layers} layers cannot be cut into {num_stages} stages: lower train.pipeline_parallel_size "
            f"(schedules {', '.join(TWO_STAGES)} have two stages in each rank)"
        )
    base, extra = divmod(num_layers + 2, num_stages)
    sizes = [base + (index < extra) for index in range(num_stages)]
    sizes[0] -= 1
    sizes[-1] -= 1
    while min(sizes) < 1:
        sizes[sizes.index(max(sizes))] -= 1
        sizes[sizes.index(min(sizes))] += 1
    return sizes


def ranks_of_stages(config: ParallelConfig) -> list[int]:
    """The rank (within the axis pp) of each stage: ranks in order, twice for two stages in each; zbv then backwards."""
    ranks = list(range(config.pipeline_parallel_size))
    if config.pipeline_schedule == "zbv":
        return ranks + ranks[::-1]
    return ranks * (2 if config.pipeline_schedule in TWO_STAGES else 1)


def check_micro_batches(config: ParallelConfig, num: int) -> None:
    """Checks that the schedule can run ``num`` micro-batches in a step.

    Raises:
        ConfigError: when it cannot, with the arithmetic.
    """
    size = config.pipeline_parallel_size
    schedule = config.pipeline_schedule
    if num < (size if schedule == "1f1b" else 1):
        raise ConfigError(
            f"train.pipeline_schedule {schedule} has {num} micro-batches in a step (1f1b needs one for each of the "
            f"{size} stages, others one): raise the batch size to {size} micro-batches for each data-parallel rank, "
            "lower train.pipeline_parallel_size, or take gpipe"
        )
    rounds = max(1, num // size)
    if schedule in ("interleaved_1f1b", "zero_bubble") and num % rounds:
        raise ConfigError(
            f"train.pipeline_schedule {schedule} takes micro-batches in {num} // {size} = {rounds} equal rounds, but "
            f"{num} / {rounds} = {num / rounds:g}: take a multiple of {size} micro-batches for each data-parallel rank"
        )


def check_schedule(mesh: Mesh, config: ParallelConfig) -> None:
    """Raises ConfigError for settings that do not go with a pipeline, or with its schedule."""
    schedule = config.pipeline_schedule
    if config.pipeline_parallel_size < 2 or not mesh.distributed:
        raise ConfigError("a pipeline needs train.pipeline_parallel_size above 1")
    selective = config.activation_checkpointing == "selective"
    if schedule in SPLIT_BACKWARD and (config.compile or selective):
        cannot = (
            "train.activation_checkpointing selective cannot: take full, which then recomputes twice, or none"
            if selective
            else "train.compile cannot: set it to false"
        )
        raise ConfigError(
            f"train.pipeline_schedule {schedule} runs backward twice, for inputs and for weights, which {cannot}; or "
            "take interleaved_1f1b"
        )


DECODER = ("embed_tokens", "layers", "norm")
"""Parts of the language model of multimodal models whose configuration in transformers names none (Qwen3-VL)."""


def parts_of(module: nn.Module) -> tuple[list[Part], list[Part], list[Part]]:
    """The parts of a model before its layers, the layers, and the parts after them, in order.

    The names come from ``base_model_pp_plan`` of a transformers configuration and ``_pp_plan`` of the model. In a
    multimodal model they are those of its language model; everything around that goes before the layers.

    Raises:
        ConfigError: when the model does not declare its parts, or has not exactly one list of layers.
    """
    model = cast("PreTrainedModel", module)
    name = type(module).__name__
    config = getattr(module.config, "get_text_config", lambda: module.config)()
    plan = getattr(config, "base_model_pp_plan", None)
    head = getattr(type(module), "_pp_plan", None)
    decoder = module
    before = []
    if config is not module.config:
        decoder = model.get_decoder()
        output = model.get_output_embeddings()
        head = [next(name for name, submodule in module.named_modules() if submodule is output)]
        before = _find_parts_around(module, decoder)
        plan = plan or (DECODER if all(hasattr(decoder, part) for part in DECODER) else None)
    elif plan and head:
        decoder = model.base_model
    if not plan or not head:
        raise ConfigError(
            f"{name} cannot be cut into pipeline stages: only causal language models of transformers can, which say "
            "what their parts are. Set train.pipeline_parallel_size to 1 and share the model with "
            "train.data_parallel_mode fsdp2, train.tensor_parallel_size or train.ulysses_parallel_size"
        )
    parts = [decoder.get_submodule(path) for path in plan]
    places = [place for place, part in enumerate(parts) if isinstance(part, nn.ModuleList)]
    if len(places) != 1:
        raise ConfigError(f"{name} has {len(places)} lists of layers, not one: set train.pipeline_parallel_size to 1")
    after = parts[places[0] + 1 :] + [module.get_submodule(path) for path in head]
    return [*before, *parts[: places[0]]], [*cast("nn.ModuleList", parts[places[0]])], after


def _find_parts_around(module: nn.Module, decoder: nn.Module) -> list[Part]:
    """Encoders, projectors and single weights of a multimodal model, besides its language model and the head."""
    model = cast("PreTrainedModel", module)
    children: list[Part] = []
    for owner in dict.fromkeys((module, model.base_model)):  # in the same order on every rank
        excluded = {id(decoder), id(model.base_model), id(model.get_output_embeddings())}
        children += [child for child in owner.children() if id(child) not in excluded]
        children += owner.parameters(recurse=False)
    return children


def check_added_features(module: nn.Module, layers: int) -> None:
    """Checks that the first stage has all layers to whose outputs features of images are added.

    Later stages get no images.

    Args:
        module: the whole model.
        layers: number of layers of the first stage.

    Raises:
        ConfigError: when these are too few.
    """
    num_needed = len(getattr(getattr(module.config, "vision_config", None), "deepstack_visual_indexes", None) or ())
    if layers < num_needed:
        raise ConfigError(
            f"train.pipeline_parallel_size: {type(module).__name__} adds features of images to the output of its first "
            f"{num_needed} layers (vision_config.deepstack_visual_indexes), of which the first stage has {layers}: "
            "lower it, or take a train.pipeline_schedule with one stage in each rank"
        )


def check_ties(before: Sequence[Part], after: Sequence[Part]) -> None:
    """Raises ConfigError when the first and the last stage would train, or load, copies of one tied weight."""
    first = {id(parameter): parameter for part in before for parameter in weights_of(part)}
    tied = [parameter for part in after for parameter in weights_of(part) if id(parameter) in first]
    if any(parameter.requires_grad or parameter.is_meta for parameter in tied):
        raise ConfigError(
            "the embedding and the head share one weight (tie_word_embeddings), but lie in the first and the last "
            "stage of the pipeline, where it would be trained apart: set train.pipeline_parallel_size to 1, freeze it "
            "(LoRA), or untie the model: tie_word_embeddings false and a copy of the weight in the head"
        )


def check_hands_on(module: nn.Module, parts: Sequence[Part]) -> None:
    """Checks that a model changes hidden states only in its parts; anything else every stage would do again.

    The model without its parts must have no weights and return hidden states as they are.

    Raises:
        ConfigError: when it does not.
    """
    model = cast("PreTrainedModel", module)
    name = type(module).__name__
    shell = copy_around(module, {id(part): absent_part(part) for part in parts})
    leftover = [weight for weight, _ in shell.named_parameters()]
    if any(buffer.is_meta for buffer in shell.buffers()):
        shell.to_empty(device="cpu")
    device = next((buffer.device for buffer in shell.buffers()), torch.device("cpu"))
    hidden = torch.arange(2 * model.config.get_text_config().hidden_size, device=device).reshape(1, 2, -1).float()
    try:
        with torch.no_grad():
            returned = hidden if leftover else shell(inputs_embeds=hidden, use_cache=False).logits
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # it needs the embedding, which is absent
        raise ConfigError(
            f"{name} cannot be cut into pipeline stages: given hidden states alone it stops with {error}; set "
            "train.pipeline_parallel_size to 1"
        ) from error
    if leftover or not torch.equal(returned, hidden):
        fault = f"has weights ({', '.join(leftover[:3])})" if leftover else "changes hidden states"
        raise ConfigError(
            f"{name} {fault} outside its embedding, layers, norm and head, so that every stage of a pipeline would do "
            "it again; set train.pipeline_parallel_size to 1"
        )


def copy_around(module: nn.Module, parts: dict[int, Part | None]) -> nn.Module:
    """A deep copy of a model in which parts are replaced. Configurations are shared with the original.

    Args:
        module: the model.
        parts: the replacement of each part by the id of the part.
    """
    # A memo of deepcopy: what it holds for an id is taken in place of a copy.
    configs = [submodule.config for submodule in module.modules() if hasattr(submodule, "config")]
    return copy.deepcopy(module, parts | {id(config): config for config in configs})


def plan_of_stage(plan: ParallelPlan, module: nn.Module, stage: nn.Module) -> ParallelPlan:
    """The plan without tensor-parallel styles of parts that only other stages have, which would match nothing."""
    stage_names = {name for name, submodule in stage.named_modules() if not isinstance(submodule, Absent)}
    stage_names |= {name for name, _ in stage.named_parameters()}
    absent_names = {*dict(module.named_modules()), *dict(module.named_parameters())} - stage_names
    tensor = {}
    for pattern, style in plan.tensor.items():
        matches = compile_pattern(pattern)
        if any(map(matches, stage_names)) or not any(map(matches, absent_names)):
            tensor[pattern] = style
    return replace(plan, tensor=tensor)
