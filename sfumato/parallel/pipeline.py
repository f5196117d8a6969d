"""Pipeline parallelism: a language model cut into stages by layers, and torch's schedules to run them.

Schedules: GPipe (arXiv 1811.06965), 1F1B (arXiv 2006.09503), interleaved 1F1B (arXiv 2104.04473), zero bubble and its
V-shaped placement (arXiv 2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from sfumato.algorithms.reading import Numbers
from sfumato.config.open_mappings import Keywords
from sfumato.config.parallel import ParallelConfig
from sfumato.errors import ConfigError
from sfumato.parallel.expert_modules import find_experts
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.packed_rows import Batch, pad_together, shard_sequence
from sfumato.parallel.parallelize import parallelize
from sfumato.parallel.plan import ParallelPlan
from sfumato.parallel.stages import (
    SPLIT_BACKWARD,
    Part,
    absent_part,
    check_added_features,
    check_hands_on,
    check_micro_batches,
    check_schedule,
    check_ties,
    copy_around,
    parts_of,
    plan_of_stage,
    ranks_of_stages,
    split_layers,
    weights_of,
)

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.pipelining.schedules import _PipelineSchedule
    from transformers import PreTrainedModel
    from transformers.modeling_outputs import CausalLMOutput

LogitsLoss = Callable[[Tensor, Batch], Tensor]
"""From the logits of a micro-batch and the padded micro-batch to its part of the loss."""

StageArguments = Callable[[Batch, bool], Keywords]
"""From a micro-batch, and whether it is for the first stage, to the arguments of a stage besides tokens or hidden
states."""

SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved_1f1b": "Interleaved1F1B",
    "zero_bubble": "InterleavedZeroBubble",
    "zbv": "ZBVZeroBubble",
}
"""torch's name of each schedule."""

LENGTH_MULTIPLE = 64
"""Rows are padded to a multiple of this, so that the buffers between stages rarely change their shape.

A new shape costs some milliseconds: new buffers and two short messages between neighbouring stages.
"""


def positions_alone(batch: Batch, first: bool) -> Keywords:
    """The arguments of the stages of a model of text: position ids only."""
    return {"position_ids": batch["position_ids"]}


class Stages(nn.Module):
    """The stages of one rank. Modules, parameters and buffers keep their names of the whole model."""

    def __init__(self, stages: Mapping[int, nn.Module]) -> None:
        super().__init__()
        self.stages = nn.ModuleDict({str(index): stage for index, stage in stages.items()})

    def named_modules(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Modules of all stages."""
        memo = set() if memo is None else memo
        for stage in self.stages.values():
            yield from stage.named_modules(memo, prefix, remove_duplicate)


class Pipeline:
    """A transformers language model cut into stages, of which this rank has one or two."""

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        goes_back: Sequence[bool],
        hidden: tuple[int, torch.dtype],
        mesh: Mesh,
        config: ParallelConfig,
        length_multiple: int = LENGTH_MULTIPLE,
    ) -> None:
        """Called by ``build_pipeline``.

        Args:
            stages: this rank's stages by number.
            goes_back: for each stage of the pipeline, whether gradients go back to the one before it.
            hidden: width and dtype of the hidden states between stages.
            mesh, config, length_multiple: as of ``build_pipeline``.
        """
        self.module = Stages(stages)
        """This rank's part of the model: for ``trainable_parameters``, the optimiser and ``reduce_and_clip``."""
        self._stages = dict(stages)
        self._goes_back = goes_back
        self._hidden = hidden
        self._mesh = mesh
        self._config = config
        self._multiple = length_multiple
        self._ranks = ranks_of_stages(config)
        self._cached_schedule: tuple[tuple[int, ...], _PipelineSchedule] | None = None
        """torch's schedule, and the number of micro-batches, rows and tokens that its buffers are for."""
        self._loss: LogitsLoss | None = None
        self._arguments: StageArguments = positions_alone
        self._batches: list[dict[str, Tensor]] = []
        self._autocast: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def has_last(self) -> bool:
        """Whether this rank has the last stage, which makes logits and losses."""
        return len(self._ranks) - 1 in self._stages

    def train_step(
        self, micro_batches: Sequence[Batch], loss: LogitsLoss, arguments: StageArguments = positions_alone
    ) -> Numbers:
        """Forward and backward passes of all micro-batches; gradients are added up in the parameters.

        Rows of all micro-batches are padded to one length. Autocast that is on applies to forward passes and losses.

        Args:
            micro_batches: the same ones on each rank of a pipeline: ``input_ids`` and ``position_ids`` (rows, length),
                int64, and what the loss needs; lengths may differ. Padding has position_ids of its own document,
                labels -100, and 0 in every other field of shape (rows, length, ...).
            loss: from logits (rows, padded length, vocabulary) and the padded micro-batch to its part of the loss, a
                scalar that is divided by the count over all ranks and micro-batches already. Under sequence
                parallelism both are this rank's part, so labels must be shifted already.
            arguments: arguments of a stage from the padded micro-batch.

        Returns:
            The loss of each micro-batch, on every rank of the pipeline.

        Raises:
            ConfigError: when there are too few micro-batches for the schedule.
        """
        check_micro_batches(self._config, len(micro_batches))
        batches = [shard_sequence(batch, self._mesh) for batch in pad_together(micro_batches, self._multiple)]
        schedule = self._schedule_for(len(batches), *batches[0]["input_ids"].shape)
        kind = self._mesh.device.type
        if torch.is_autocast_enabled(kind):
            self._autocast = partial(torch.autocast, kind, torch.get_autocast_dtype(kind))
        self._loss = loss
        self._arguments = arguments
        self._batches = batches
        losses: list[Tensor] = []
        try:
            with torch.autocast(kind, enabled=False):  # the backward pass follows the dtypes of the forward pass
                schedule.step(
                    torch.cat([batch["input_ids"] for batch in batches]),
                    target=torch.arange(len(batches)),
                    losses=losses,
                    return_outputs=False,
                )
        finally:
            self._loss = None
            self._batches = []
            self._autocast = nullcontext
        values = torch.zeros(len(batches), dtype=torch.float64, device=self._mesh.device)
        if self.has_last:
            values.copy_(torch.stack(losses).detach())
        dist.broadcast(values, group=self._mesh.group("pp"), group_src=self._ranks[-1])
        return Numbers(values)

    @torch.no_grad()
    def forward(
        self, micro_batches: Sequence[Batch], arguments: StageArguments = positions_alone
    ) -> list[Tensor] | None:
        """Logits of micro-batches, for evaluation; their number and shapes are free.

        Stages of one rank wait for each other, so that schedules with one stage in each rank are faster here.

        Args:
            micro_batches: the same ones on each rank of a pipeline: ``input_ids`` and ``position_ids`` (rows, length).
            arguments: arguments of a stage from the micro-batch.

        Returns:
            Logits (rows, length, vocabulary) of each, under sequence parallelism of this rank's tokens, on the rank
            with the last stage; None elsewhere.
        """
        group = self._mesh.group("pp")
        rank = self._mesh.rank_in("pp")
        logits = []
        sent = []
        for batch in (shard_sequence(micro_batch, self._mesh) for micro_batch in micro_batches):
            # All ranks send and receive in the order of micro-batches and stages, so that they cannot deadlock.
            for index in sorted(self._stages):
                if index == 0:
                    hidden = batch["input_ids"]
                elif self._ranks[index - 1] != rank:
                    shape = (*batch["input_ids"].shape, self._hidden[0])
                    hidden = torch.empty(shape, dtype=self._hidden[1], device=self._mesh.device)
                    dist.recv(hidden, group=group, group_src=self._ranks[index - 1])
                hidden = self._stages[index](hidden, **arguments(batch, index == 0))
                if index == len(self._ranks) - 1:
                    logits.append(hidden)
                elif self._ranks[index + 1] != rank:
                    self._check_dtype(index, hidden)
                    hidden = hidden.contiguous()
                    sent.append((dist.isend(hidden, group=group, group_dst=self._ranks[index + 1]), hidden))
        for work, _ in sent:
            work.wait()
        # Without a backward pass nothing else would free the weights that fsdp2 has gathered.
        for unit in filter(lambda module: isinstance(module, FSDPModule), self.module.modules()):
            cast("FSDPModule", unit).reshard()
        return logits if self.has_last else None

    def _schedule_for(self, num_micro_batches: int, rows: int, length: int) -> _PipelineSchedule:
        """torch's schedule for micro-batches of this number and shape: the cached one, or one with new buffers."""
        if self._cached_schedule is None or self._cached_schedule[0] != (num_micro_batches, rows, length):
            from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

            self._cached_schedule = None  # frees its buffers before new ones are made
            stages = [self._build_stage(index, rows, length) for index in sorted(self._stages)]
            kind = get_schedule_class(SCHEDULES[self._config.pipeline_schedule])
            schedule_stages: Any = stages if issubclass(kind, PipelineScheduleMulti) else stages[0]
            self._cached_schedule = (
                (num_micro_batches, rows, length),
                kind(schedule_stages, num_micro_batches, self._part_of_loss, scale_grads=False),
            )
        return self._cached_schedule[1]

    def _build_stage(self, index: int, rows: int, length: int) -> PipelineStage:
        # Here, as torch's stages load torch._dynamo: a second of processor time that runs without a pipeline save.
        from sfumato.parallel.pipeline_stage import AutocastStage

        last_index = len(self._ranks) - 1

        def handed_on(receiver: int) -> Tensor:
            hidden = torch.empty(rows, length, self._hidden[0], dtype=self._hidden[1], device="meta")
            return hidden.requires_grad_(self._goes_back[receiver])

        tokens = torch.empty(rows, length, dtype=torch.int64, device="meta")
        # torch requires an example of the last stage's output, but does not use its shape: tokens stand for it.
        return AutocastStage(
            self._stages[index],
            index,
            last_index + 1,
            self._mesh.device,
            input_args=(handed_on(index) if index else tokens,),
            output_args=(handed_on(index + 1) if index < last_index else tokens,),
            group=self._mesh.group("pp"),
            autocast=lambda: self._autocast(),  # that of the step, which sets it
            arguments_of=lambda number, is_first: self._arguments(self._batches[number], is_first),
            check_output=self._check_dtype,
        )

    def _part_of_loss(self, logits: Tensor, index: Tensor) -> Tensor:
        with self._autocast():
            # ``train_step`` has set the loss. A clone, since torch detaches the result in place.
            return cast("LogitsLoss", self._loss)(logits, self._batches[int(index)]).clone()

    def _check_dtype(self, index: int, hidden: Tensor) -> None:
        if hidden.dtype != self._hidden[1]:
            raise ConfigError(
                f"stage {index} of the pipeline returns {hidden.dtype}, but the embedding gives {self._hidden[1]}: "
                "give all weights of the model one dtype"
            )


def build_pipeline(
    module: nn.Module,
    mesh: Mesh,
    config: ParallelConfig,
    plan: ParallelPlan,
    param_dtype: torch.dtype | None = None,
    length_multiple: int = LENGTH_MULTIPLE,
) -> Pipeline:
    """Cuts a language model into stages, keeps this rank's and parallelises each on its own.

    Layers are distributed as by ``split_layers``; the first stage has the embedding, and the encoders of a multimodal
    model, the last one the final norm and the head. A stage is the unmodified model with ``Absent`` in the place of
    other stages' parts. Inside a pipeline fsdp keeps gathered weights until the last backward pass of the step, and
    reduces gradients then: it would do both for every micro-batch otherwise. With a ``param_dtype``, zero_bubble and
    zbv may add gradients of neighbouring micro-batches in that dtype before they are added up in float32.

    Args:
        module: an unmodified transformers causal language model, or a multimodal one, adapters included, with weights
            or on meta; drop all references to it afterwards, so that parts of other stages are freed.
        mesh: the ranks; their axis pp has more than one.
        config: the schedule, and the parallelism within each stage.
        plan: the model's blocks and cuts.
        param_dtype: dtype in which fsdp gathers and uses weights; None keeps theirs.
        length_multiple: rows are padded to a multiple of it in training.

    Raises:
        ConfigError: when the model cannot be cut, has too few layers, or a setting does not go with the schedule.
    """
    check_schedule(mesh, config)
    before, layers, after = parts_of(module)
    if mesh.layout.ep > 1:
        find_experts(module, "train.expert_parallel_size must be 1")
    check_ties(before, after)
    check_hands_on(module, [*before, *layers, *after])
    remaining = iter(layers)
    sizes = split_layers(len(layers), len(ranks_of_stages(config)))
    check_added_features(module, sizes[0])
    parts: list[list[Part]] = [[*islice(remaining, size)] for size in sizes]
    parts[0] += before
    parts[-1] += after
    trained = [any(weight.requires_grad for part in stage for weight in weights_of(part)) for stage in parts]

    dtype = param_dtype if config.data_parallel_mode == "fsdp2" else None
    model = cast("PreTrainedModel", module)
    embedding = cast("nn.Embedding", model.get_input_embeddings())
    hidden = (model.config.get_text_config().hidden_size, dtype or embedding.weight.dtype)
    stage_config = config.model_copy(update={"enable_reshard_after_forward": False})
    stages = {}
    for index, rank in enumerate(ranks_of_stages(config)):
        if rank != mesh.rank_in("pp"):
            continue
        replacements = {
            id(part): part if index == owner else absent_part(part)
            for owner, stage_parts in enumerate(parts)
            for part in stage_parts
        }
        stage = copy_around(module, replacements)
        stage.register_forward_pre_hook(partial(_call_as_model, first=index == 0), with_kwargs=True)
        stage.register_forward_hook(partial(_take_output, last=index == len(parts) - 1))
        stages[index] = parallelize(stage, mesh, stage_config, plan_of_stage(plan, module, stage), param_dtype)
    # With a split backward pass torch loses gradients of the weights of a stage whose inputs need no gradient, so all
    # inputs between stages are given one.
    split = config.pipeline_schedule in SPLIT_BACKWARD
    goes_back = [index > 0 and (split or any(trained[:index])) for index in range(len(parts))]
    return Pipeline(stages, goes_back, hidden, mesh, config, length_multiple)


def _call_as_model(
    module: nn.Module, args: tuple[Tensor], kwargs: dict[str, Tensor], first: bool
) -> tuple[tuple[()], dict[str, object]]:
    """Hook before a stage: turns its positional input into the keyword arguments of a transformers model."""
    return (), {"input_ids" if first else "inputs_embeds": args[0], "use_cache": False, **kwargs}


def _take_output(module: nn.Module, args: object, output: CausalLMOutput, last: bool) -> Tensor:
    """Hook after a stage: takes logits, or hidden states where ``Absent`` stands for the head, from its output."""
    logits = cast("Tensor", output.logits)
    return logits if last else logits.clone()  # a view, which torch's in-place detach refuses
