"""The stages of a pipeline: who has which layers, what cannot be cut, and micro-batches of one shape."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.config.parallel import ParallelConfig
from sfumato.errors import ConfigError
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.plan import ParallelPlan, matcher

Batch = Mapping[str, Tensor]

Part = nn.Module | nn.Parameter
"""What one stage has and others have not."""

TWO_STAGES = ("interleaved_1f1b", "zero_bubble", "zbv")
"""Schedules with two stages in each rank."""

SPLIT_BACKWARD = ("zero_bubble", "zbv")
"""Schedules that compute gradients of inputs and of weights apart."""

PADDING = {"labels": -100, "decision_index": -1, "targets": math.nan}
"""The values of padding by field; 0 in others. Positions of padding start at 0: it is a document of its own."""


class Absent(nn.Module):
    """Stands for a part that another stage has: hands on what it is given."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Returns the hidden states, any shape."""
        return hidden_states


def absent(part: Part) -> Absent | None:
    """What stands for a part in other stages."""
    return Absent() if isinstance(part, nn.Module) else None


def weights_of(part: Part) -> list[nn.Parameter]:
    """The weights of a part."""
    return [*part.parameters()] if isinstance(part, nn.Module) else [part]


def split_layers(num_layers: int, num_stages: int) -> list[int]:
    """How many layers each stage has.

    The embedding and the head count as one layer each, so the first and the last stage have about one layer less; every
    stage has at least one. What does not divide goes to the earlier stages.

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
    """The rank (within the axis pp) of each stage: in turn, or for zbv down and up again."""
    ranks = list(range(config.pipeline_parallel_size))
    if config.pipeline_schedule == "zbv":
        return ranks + ranks[::-1]
    return ranks * (2 if config.pipeline_schedule in TWO_STAGES else 1)


def check_micro_batches(config: ParallelConfig, num: int) -> None:
    """Whether the schedule can run so many micro-batches in a step.

    Raises:
        ConfigError: when it cannot, with the arithmetic.
    """
    size, schedule = config.pipeline_parallel_size, config.pipeline_schedule
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


def pad_together(micro_batches: Sequence[Batch], multiple: int) -> list[dict[str, Tensor]]:
    """Micro-batches of one shape: the most rows and the longest length of all, a multiple of ``multiple``.

    Args:
        micro_batches: fields of shape (rows, length, ...) are padded, as ``train_step`` says; others stay.
        multiple: what the length is a multiple of.

    Raises:
        ConfigError: for a field that stages would not see.
    """
    shapes = [batch["input_ids"].shape for batch in micro_batches]
    rows, longest = max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)
    length = -(-longest // multiple) * multiple
    padded = []
    for batch, shape in zip(micro_batches, shapes, strict=True):
        if "attention_mask" in batch:
            raise ConfigError(
                "a pipeline's stages get no attention_mask: leave it out; position_ids separate packed documents, and "
                "padding on the right needs labels -100 only"
            )
        fields = {}
        for name, tensor in batch.items():
            if tensor.shape[:2] != shape:
                fields[name] = tensor
                continue
            if name == "position_ids":
                places = (torch.arange(length, device=tensor.device) - shape[1]) % length  # 0 after the row's end
                fields[name] = places.to(tensor.dtype).repeat(rows, 1)
                fields[name][shape[0] :] = torch.arange(length, device=tensor.device)
            else:
                fields[name] = tensor.new_full((rows, length, *tensor.shape[2:]), PADDING.get(name, 0))
            fields[name][: shape[0], : shape[1]] = tensor
        padded.append(fields)
    return padded


def check_schedule(mesh: Mesh, config: ParallelConfig) -> None:
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
"""Parts of the language models that see of which transformers' configuration does not say them (Qwen3-VL)."""


def parts_of(module: nn.Module) -> tuple[list[Part], list[Part], list[Part]]:
    """What goes before the layers, the layers, and what goes after them, in order.

    The names stand in ``base_model_pp_plan`` of a transformers configuration and ``_pp_plan`` of the model. In one that
    sees they are those of its language model; all that is beside that goes before.
    """
    name = type(module).__name__
    config = getattr(module.config, "get_text_config", lambda: module.config)()
    plan = getattr(config, "base_model_pp_plan", None)
    head = getattr(type(module), "_pp_plan", None)
    decoder = module
    before = []
    if config is not module.config:
        decoder = module.get_decoder()
        head = [_find_name(module, module.get_output_embeddings())]
        before = _find_parts_around(module, decoder)
        plan = plan or (DECODER if all(hasattr(decoder, part) for part in DECODER) else None)
    elif plan and head:
        decoder = module.base_model
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
    return [*before, *parts[: places[0]]], [*parts[places[0]]], after


def _find_name(module: nn.Module, part: nn.Module) -> str:
    return next(name for name, submodule in module.named_modules() if submodule is part)


def _find_parts_around(module: nn.Module, decoder: nn.Module) -> list[Part]:
    """Encoders, projectors and single weights of a model that sees, beside its language model and the head."""
    children: list[Part] = []
    for owner in {module, module.base_model}:
        excluded = {id(decoder), id(module.base_model), id(module.get_output_embeddings())}
        children += [child for child in owner.children() if id(child) not in excluded]
        children += owner.parameters(recurse=False)
    return children


def check_added_features(module: nn.Module, layers: int) -> None:
    """Whether the first stage has all layers to whose output features of images are added: later ones see no image.

    Args:
        module: the whole model.
        layers: of the first stage.

    Raises:
        ConfigError: when it has fewer.
    """
    num_needed = len(getattr(getattr(module.config, "vision_config", None), "deepstack_visual_indexes", None) or ())
    if layers < num_needed:
        raise ConfigError(
            f"train.pipeline_parallel_size: {type(module).__name__} adds features of images to the output of its first "
            f"{num_needed} layers (vision_config.deepstack_visual_indexes), of which the first stage has {layers}: "
            "lower it, or take a train.pipeline_schedule with one stage in each rank"
        )


def check_ties(before: Sequence[Part], after: Sequence[Part]) -> None:
    first = {id(parameter): parameter for part in before for parameter in weights_of(part)}
    tied = [parameter for part in after for parameter in weights_of(part) if id(parameter) in first]
    if any(parameter.requires_grad or parameter.is_meta for parameter in tied):
        raise ConfigError(
            "the embedding and the head share one weight (tie_word_embeddings), but lie in the first and the last "
            "stage of the pipeline, where it would be trained apart: set train.pipeline_parallel_size to 1, freeze it "
            "(LoRA), or untie the model: tie_word_embeddings false and a copy of the weight in the head"
        )


def check_hands_on(module: nn.Module, parts: Sequence[Part]) -> None:
    """Makes sure that a model does nothing to hidden states outside its parts: every stage would do it again."""
    name = type(module).__name__
    shell = copy_around(module, {id(part): absent(part) for part in parts})
    leftover = [weight for weight, _ in shell.named_parameters()]
    if any(buffer.is_meta for buffer in shell.buffers()):
        shell.to_empty(device="cpu")
    device = next((buffer.device for buffer in shell.buffers()), torch.device("cpu"))
    hidden = torch.arange(2 * module.config.get_text_config().hidden_size, device=device).reshape(1, 2, -1).float()
    try:
        with torch.no_grad():
            returned = hidden if leftover else shell(inputs_embeds=hidden, use_cache=False).logits
    except (AttributeError, RuntimeError, TypeError, ValueError) as error:  # it asks the embedding, which is elsewhere
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
    """A copy of a model with these parts in the place of those with these ids; configurations, of its language model,
    too, stay the same."""
    configs = [submodule.config for submodule in module.modules() if hasattr(submodule, "config")]
    return copy.deepcopy(module, parts | {id(config): config for config in configs})


def plan_of_stage(plan: ParallelPlan, module: nn.Module, stage: nn.Module) -> ParallelPlan:
    """The plan without tensor-parallel styles of parts that only other stages have."""
    stage_names = {name for name, submodule in stage.named_modules() if not isinstance(submodule, Absent)}
    stage_names |= {name for name, _ in stage.named_parameters()}
    absent_names = {*dict(module.named_modules()), *dict(module.named_parameters())} - stage_names
    tensor = {}
    for pattern, style in plan.tensor.items():
        matches = matcher(pattern)
        if any(map(matches, stage_names)) or not any(map(matches, absent_names)):
            tensor[pattern] = style
    return replace(plan, tensor=tensor)
