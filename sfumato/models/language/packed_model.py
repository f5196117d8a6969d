"""A transformers decoder that is trained on packed rows on any mesh, whatever its head says of a token."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, Literal, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sfumato.algorithms.device import to_device
from sfumato.algorithms.reading import Numbers
from sfumato.config.sections import TrainConfig
from sfumato.data.media.vision import KINDS, Images, MultimodalInputs, Vision, join_media
from sfumato.data.text.token_batch import TokenBatch
from sfumato.errors import ConfigError
from sfumato.models.language.document_rows import IdleImage, forget_lengths
from sfumato.models.language.hf_config import give_weights, set_attention
from sfumato.models.language.packed_attention import ATTENTION, MaskWatch
from sfumato.models.lora import start_magnitudes
from sfumato.parallel.attention import shard_sequence
from sfumato.parallel.balance import ExpertBalancer
from sfumato.parallel.dropout import DropoutKeys, check_dropout_is_whole, keyed_dropout
from sfumato.parallel.gradients import SequenceSum
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.parallelize import accumulate, parallelize
from sfumato.parallel.pipeline import Pipeline, StageArguments, build_pipeline, positions_alone
from sfumato.parallel.plan import language_plan
from sfumato.parallel.positions import remember_whole
from sfumato.parallel.shards import whole_shapes
from sfumato.parallel.stages import Batch, pad_together
from sfumato.parallel.weights import build_on_meta, initialise_on_meta, load_weights

COMPILED_MULTIPLE = 256
"""Of what the lengths of rows are a multiple where blocks are compiled."""

Tensors = dict[str, Tensor]

Output = TypeVar("Output")
"""What a model says of the tokens of a micro-batch."""


@dataclass(frozen=True)
class RowLayout:
    """How packed rows reach a module."""

    rows: Literal["packed", "documents"]
    """As they are, or a row for each document."""
    same_length: bool = False
    """Of documents in rows of their own, only those of one length share a call."""


class PackedModel(ABC, Generic[Output]):
    """A transformers decoder with its tokenizer. The transformers modules are used as they are.

    A subclass knows what its head says of the tokens of a micro-batch: logits, or one number.
    """

    output_name: ClassVar[tuple[str, str]]
    """What the probe calls one of the numbers that it compares, and several."""
    vision: Vision | None = None
    """What makes batches of a model that sees."""
    frozen_names: frozenset[str] = frozenset()
    """Weights that are left as they are, by the names of the plain module."""
    notes: tuple[str, ...] = ()
    """Lines for the log about what the model's folder has and the run leaves out."""
    no_text: frozenset[int] = frozenset()
    """Tokens besides those of images that the probe's random texts are without."""

    def __init__(
        self,
        module: nn.Module,
        tokenizer: Any,
        autocast_dtype: torch.dtype | None,
        build: Callable[[], nn.Module],
        source: Path | None = None,
    ) -> None:
        """Use the function that builds the subclass.

        Args:
            module: the plain model, with adapters if there are any; its weights may be on meta.
            tokenizer: its tokenizer.
            autocast_dtype: dtype of the forward pass under autocast; None leaves autocast off.
            build: makes a plain model with random weights.
            source: folder that weights on meta are read from; None draws them.
        """
        self.module, self.tokenizer, self.autocast_dtype = module, tokenizer, autocast_dtype
        self.balancer: ExpertBalancer | None = None
        self.row_layout = RowLayout("packed")
        """How packed rows reach the module."""
        self.shares_prompts = False
        """Whether a packed row may have documents that go on after the beginning of another (``shared_prompts.py``)."""
        self.plain, self.source = module, source
        self.name = type(module).__name__
        """transformers' class, which fsdp2 gives another name."""
        self._arguments = inspect.signature(module.forward).parameters
        self._build = build
        self._pipeline: Pipeline | None = None
        self._dropout: DropoutKeys | None = None
        self._masks = MaskWatch()
        self._multiple = 1
        self._mesh: Mesh | None = None

    @abstractmethod
    def __call__(self, batch: TokenBatch) -> Output:
        """The forward pass: what the model says of the tokens of a micro-batch that ``place_batch`` has placed."""

    @abstractmethod
    def probe_values(self, output: Output, batch: TokenBatch) -> Tensor:
        """What the probe compares: a number for each token, float32 ``[B, T]``, 0 where the label is -100."""

    @abstractmethod
    def reference_probe_values(self, plain: nn.Module, tokens: Tensor, inputs: Tensors) -> Tensor:
        """The same by transformers' own module of a document alone, of each token that has a next one.

        Args:
            plain: from ``plain_with``.
            tokens: int64 ``[L]``.
            inputs: arguments of its ``forward`` that its images give.

        Returns:
            float32 ``[L - 1]``.
        """

    def _check(self, mesh: Mesh, config: TrainConfig) -> None:
        """Raises ConfigError for settings that this kind of model cannot be trained with."""
        if mesh.layout.cfg > 1:
            raise ConfigError("train.cfg_parallel_size is for diffusion models; a language model has no guidance")

    def _from_pipeline(self, logits: Tensor) -> Output:
        """What the model says, from the output of the last stage of a pipeline."""
        raise NotImplementedError

    @property
    def trained(self) -> nn.Module:
        """What holds the parameters: for the optimiser, ``reduce_and_clip`` and checkpoints."""
        return self.module

    @property
    def attention(self) -> str:
        """transformers' name of the attention."""
        return self.plain.config.get_text_config()._attn_implementation

    @property
    def drops_out(self) -> bool:
        """Whether adapters or layers have dropout in training, which is keyed by the sample."""
        return self._dropout is not None

    @property
    def mesh(self) -> Mesh:
        """Where the model was put."""
        assert self._mesh is not None, "call parallelize first"
        return self._mesh

    def parallelize(self, mesh: Mesh, config: TrainConfig) -> None:
        """Puts the model on a mesh, as configured; weights on meta are read, or drawn, where they are needed.

        Raises:
            ConfigError: when it cannot be cut so.
        """
        self._mesh = mesh
        self._check(mesh, config)
        self._multiple = row_multiple(config, mesh)
        self._dropout = keyed_dropout(self.module, config.seed)
        if self._dropout is not None and mesh.layout.pp > 1:
            raise ConfigError(
                "train.pipeline_parallel_size and dropout exclude each other: set model.lora.dropout to 0"
            )
        plan, dtype = language_plan(self.module), self.autocast_dtype
        if mesh.layout.pp > 1:
            self._pipeline = build_pipeline(self.module, mesh, config, plan, dtype)
            self.module = self._pipeline.module
        else:
            self.module = parallelize(self.module, mesh, config, plan, dtype)
        check_dropout_is_whole(self.module)
        device = torch.device("cpu") if config.enable_fsdp_offload else mesh.device
        if any(parameter.is_meta for parameter in self.module.parameters()):
            if self.source is not None:
                from_rank0 = config.broadcast_model_weights_from_rank0
                load_weights(self.module, self.source, mesh, from_rank0, device=device)
            else:
                initialise_on_meta(self.module, self._build, mesh, config.seed, device)
            start_magnitudes(self.module)
        self.module.to(device)
        self.module.train()
        if config.expert_bias_rate > 0:
            self.balancer = ExpertBalancer(self.module, mesh, config.expert_bias_rate)

    def set_row_layout(self, attention: str, row_layout: RowLayout) -> None:
        """Makes packed rows reach the module in another way, or be computed by another attention of transformers.

        Raises:
            ConfigError, ValueError: when the model does not know that attention.
        """
        set_attention(self.plain, attention)
        self.row_layout = row_layout

    def whole_bytes(self) -> int:
        """Bytes of the weights of all ranks in float32."""
        shapes = self.mesh.gather({name: math.prod(shape) for name, shape in whole_shapes(self.module).items()}, "pp")
        return 4 * sum({name: size for part in shapes for name, size in part.items()}.values())

    def plain_with(self, weights: dict[str, Tensor]) -> nn.Module:
        """transformers' own module, adapters included, with whole weights by the names of the module. They are taken as
        they are, not copied."""
        module = build_on_meta(self._build)
        for name, adapter in self._adapters().items():
            module.add_adapter(adapter, name)
        trains = {name for name, parameter in module.named_parameters() if parameter.requires_grad} - self.frozen_names
        give_weights(module, weights)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in trains)
        return module

    def forward_backward(
        self, batches: Sequence[TokenBatch], loss_fn: Callable[[Output, TokenBatch], Tensor], step: int = 0
    ) -> Numbers:
        """Forward and backward passes of all micro-batches; gradients are added up in the parameters.

        Args:
            batches: this rank's micro-batches of a step, as many as on the other ranks.
            loss_fn: from what the model says of a micro-batch and the placed micro-batch to its part of the loss, a
                scalar that is divided by the count over all ranks and micro-batches already. Under sequence
                parallelism both are this rank's part of the tokens.
            step: the optimiser's step, to which dropout belongs.

        Returns:
            The loss of each micro-batch, of this rank's tokens, which waits for the device when it is read.

        Raises:
            ConfigError: when there are too few micro-batches for the pipeline.
        """
        if self._pipeline is not None:
            with self.autocast():
                return self._pipeline.train_step(
                    self._pipeline_inputs(batches),
                    lambda logits, row: loss_fn(self._from_pipeline(logits), _batch_of_row(batches, row)),
                    self._stage_arguments(batches),
                )
        losses = Numbers()
        for batch in self.accumulate(batches, step):
            loss = loss_fn(self(batch), batch)
            loss.backward()
            losses.add(loss)
        return losses

    def accumulate(self, batches: Sequence[TokenBatch], step: int = 0) -> Iterator[TokenBatch]:
        """Places micro-batches, one after the other, for a forward and a backward pass in the body of the loop.

        The backward pass of the last one reduces gradients over ranks (``parallel.parallelize.accumulate``). Inside the
        body dropout is keyed by ``step`` and the samples.
        """
        for batch in accumulate(self.module, batches):
            placed = self.place_batch(batch)
            with self._dropout_of(step, batch):
                yield placed

    def place_batch(self, batch: TokenBatch, every_token: bool = False) -> TokenBatch:
        """A micro-batch as ``__call__`` takes it: padded, on the device, and this rank's part of its tokens.

        The device is not waited for; of position ids it is remembered what they are. Not with pipeline parallelism.

        Args:
            batch: in host memory; tensors of an update may be on the device already.
            every_token: compute the output of tokens without a label, too.
        """
        whole = self._pad_to_multiple(self._number_columns(batch))
        output_columns = None if every_token else self._output_columns(whole)
        whole = whole.with_tensors(self._to_device(whole.tensors()))
        batch = whole.with_tensors(shard_sequence(whole.tensors(), self.mesh))
        if batch.position_ids is not whole.position_ids:
            remember_whole(batch.position_ids, whole.position_ids)
        is_cut_inside = self.vision is not None and self.mesh.layout.cp > 1
        return replace(batch, output_columns=output_columns, whole_rows=whole if is_cut_inside else None)

    def _pad_to_multiple(self, batch: TokenBatch) -> TokenBatch:
        """A micro-batch of a length of which there are few, since compiled code is made for each."""
        multiple = 1 if self.row_layout.rows == "documents" or self.vision is not None else self._multiple
        if batch.shape[1] % multiple == 0:
            return batch
        (tensors,) = pad_together([batch.tensors()], multiple)
        return batch.with_tensors(tensors)

    def _output_columns(self, batch: TokenBatch) -> Tensor | None:
        """Columns that the output is computed for, int64 ``[K]`` on the device; None is all."""
        return None

    @torch.no_grad()
    def score(self, batches: Sequence[TokenBatch], every_token: bool = False) -> Iterator[tuple[Output, TokenBatch]]:
        """What the model says of micro-batches without gradients; nothing is dropped out.

        Args:
            batches: as many on each rank.
            every_token: compute the output of tokens without a label, too.

        Yields:
            For each micro-batch in order that, and the placed micro-batch: this rank's part of the tokens. With
            pipeline parallelism on the ranks of the last stage only.
        """
        with self._evaluating():
            if self._pipeline is None:
                for batch in batches:
                    placed = self.place_batch(batch, every_token)
                    yield self(placed), placed
                return
            rows = self._pipeline_inputs(batches)
            with self.autocast():
                outputs = self._pipeline.forward(rows, self._stage_arguments(batches))
            for row, logits in zip(rows, outputs or [], strict=False):  # none but on the last stage
                yield self._from_pipeline(logits), _batch_of_row(batches, shard_sequence(row, self.mesh))

    @torch.no_grad()
    def compute_token_values(
        self,
        batches: Sequence[TokenBatch],
        compute: Callable[[Output, TokenBatch], Tensor],
        every_token: bool = False,
    ) -> list[Tensor]:
        """A number of each token of whole micro-batches, ``[B, T]``, on the device of every rank that shares them.

        Args:
            batches: as many on each rank.
            compute: from what the model says of this rank's part and that part to its numbers.
            every_token: compute the output of tokens without a label, too.
        """
        values: dict[int, Tensor] = {}
        for index, (output, placed) in enumerate(self.score(batches, every_token)):
            part = compute(output, placed)[:, : batches[index].shape[1]]  # without padding
            values[index] = self._join_sequence(part, placed.columns, batches[index])
        if self._pipeline is not None:
            on_host = {index: part.cpu() for index, part in values.items()}
            parts = self.mesh.gather(on_host, over="pp")
            values = {index: value.to(self.mesh.device) for part in parts for index, value in part.items()}
        return [values[index] for index in range(len(batches))]

    def compute_probe_values(self, batches: Sequence[TokenBatch]) -> list[Tensor]:
        """``probe_values`` of whole micro-batches, on every rank that shares them."""
        return self.compute_token_values(batches, self.probe_values)

    @contextmanager
    def whole_output(self) -> Iterator[None]:
        """Inside, the output of all tokens is computed at a time."""
        yield

    @contextmanager
    def probed(self) -> Iterator[None]:
        """Inside, the model is such that mistakes show in what it says."""
        yield

    def _adapters(self) -> dict[str, Any]:
        """peft's configurations of the adapters, by name."""
        return next(
            (submodule.peft_config for submodule in self.module.modules() if hasattr(submodule, "peft_config")), {}
        )

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Inside, the LoRA adapters are switched off: the model is its own reference."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        layers = [submodule for submodule in self.module.modules() if isinstance(submodule, BaseTunerLayer)]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def balance_experts(self) -> dict[str, float]:
        """Moves the routing biases, if there are any, after the optimiser's step. Returns metrics."""
        if self.balancer is None:
            return {}
        numbers = Numbers()
        numbers.add_all(**self.balancer.update())
        return dict(numbers.named())

    def sum_over_sequence(self, values: Tensor) -> Tensor:
        """Sum of a tensor of any shape over the ranks that share a sequence; gradients go to each rank's own part."""
        return values if self.mesh.layout.cp == 1 else SequenceSum.apply(values, self.mesh.group("cp"))

    def _run_module(
        self, input_ids: Tensor, position_ids: Tensor | None, inputs: MultimodalInputs | None, **more: Tensor
    ) -> Any:
        """transformers' output for tokens ``[B, T]``: the one place where the module is called.

        Args:
            input_ids: int64 ``[B, T]``.
            position_ids: within documents; None where each row is a document.
            inputs: of a model that sees.
            more: further arguments of its ``forward``.
        """
        if inputs is not None:
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
            more |= self._multimodal_arguments(position_ids, inputs)
        elif position_ids is not None and "position_ids" in self._arguments:  # recurrent models and ALiBi know none
            more["position_ids"] = position_ids
        if self.row_layout.same_length:
            forget_lengths(self.plain)
        masks_are_alike = self.attention == ATTENTION and self.vision is None  # masks of some depend on the images
        with self._masks.forward() if masks_are_alike else nullcontext():
            return self.module(input_ids=input_ids, use_cache=False, **more)

    def _multimodal_arguments(self, position_ids: Tensor, inputs: MultimodalInputs) -> Tensors:
        """What the module's ``forward`` is given beside tokens ``[B, T]`` of a model that sees."""
        (modality_ids,) = self._to_device({"modality_ids": inputs.modality_ids}).values()
        on_device = MultimodalInputs(self._to_device(inputs.tensors), inputs.rope_positions, modality_ids)
        return on_device.arguments(position_ids, self._arguments)

    def _stage_arguments(self, batches: Sequence[TokenBatch]) -> StageArguments:
        """What the stages of a pipeline are given of micro-batches: all of them positions, the first one images."""
        if self.vision is None:
            return positions_alone

        def select_arguments(row: Batch, first: bool) -> Tensors:
            media = join_media(batches[int(row["batch"])].media) if first else {}
            inputs = MultimodalInputs(media, row.get("rope_positions"), row["modality_ids"])
            return self._multimodal_arguments(row["position_ids"], inputs)

        return select_arguments

    def _pipeline_inputs(self, batches: Sequence[TokenBatch]) -> list[Tensors]:
        """Micro-batches as the pipeline takes them: tensors on the device, and the number of the micro-batch."""
        return [
            self._to_device(self._number_columns(batch).tensors()) | {"batch": torch.tensor(index)}
            for index, batch in enumerate(batches)
        ]

    def single_document_inputs(self, input_ids: np.ndarray, images: Images | None) -> Tensors:
        """What transformers' own module, which counts positions itself, is given beside the tokens of a document."""
        if self.vision is None:
            return {}
        inputs = self.vision.beside(input_ids, images)
        modality_ids = {name: inputs.modality_ids[None] for name in KINDS if name in self._arguments}
        if "feature_attention_mask" in self._arguments:  # omni models count positions with a mask alone
            modality_ids["attention_mask"] = torch.ones_like(inputs.modality_ids[None])
        return self._to_device(inputs.tensors | modality_ids)

    def _idle_image(self) -> IdleImage | None:
        """What documents in rows of their own get that have no image."""
        if self.vision is None:
            return None
        return IdleImage(torch.from_numpy(self.vision.idle_ids), self.vision.idle())

    def sum_for_rows(self, values: Tensor) -> Tensor:
        """As ``sum_over_sequence``, where each rank goes on with rows of its own: gradients are summed, too."""
        return values if self.mesh.layout.cp == 1 else SequenceSum.apply(values, self.mesh.group("cp"), True)

    def _to_device(self, tensors: Tensors) -> Tensors:
        """The tensors on the device, which is not waited for; of position ids it is remembered what they are."""
        device = self.mesh.device
        return {name: to_device(tensor, device, remember=name == "position_ids") for name, tensor in tensors.items()}

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of forward passes."""
        kind, dtype = self.mesh.device.type, self.autocast_dtype
        return torch.autocast(kind, dtype or torch.bfloat16, enabled=dtype is not None)

    @contextmanager
    def in_full_precision(self) -> Iterator[None]:
        """Inside, autocast is off."""
        before, self.autocast_dtype = self.autocast_dtype, None
        try:
            yield
        finally:
            self.autocast_dtype = before

    def _dropout_of(self, step: int, batch: TokenBatch) -> AbstractContextManager[None]:
        """What is dropped belongs to (seed, step, sample, position), not to the row that a sample is packed into.

        ``batch`` is whole, in host memory.
        """
        if self._dropout is None:
            return nullcontext()
        batch = self._pad_to_multiple(batch)
        count = max(len(batch.document_lengths) // max(len(batch.sample_ids), 1), 1)
        owners = [sample_id * count + part for sample_id in batch.sample_ids for part in range(count)] or [0]
        owner = torch.tensor(owners)[batch.document_ids.clamp(max=len(owners) - 1)]
        tokens = {"input_ids": batch.input_ids, "keys": owner * 2**24 + batch.position_ids}
        return self._dropout.batch(step, [0] * len(owner), shard_sequence(tokens, self.mesh)["keys"])

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.module.eval()
        try:
            yield
        finally:
            self.module.train()

    def _number_columns(self, batch: TokenBatch) -> TokenBatch:
        """Under sequence parallelism tokens know their column, so that parts of a sequence can be joined again."""
        if self.mesh.layout.cp == 1:
            return batch
        return replace(batch, columns=torch.arange(batch.shape[1]).expand_as(batch.input_ids))

    def _join_sequence(self, part: Tensor, columns: Tensor | None, batch: TokenBatch) -> Tensor:
        """The whole ``[B, T]`` of the parts that the ranks of a sequence have."""
        if self.mesh.layout.cp == 1:
            return part
        whole = part.new_zeros(batch.shape)
        whole[:, columns[0]] = part
        dist.all_reduce(whole, group=self.mesh.group("cp"))
        return whole


def row_multiple(config: TrainConfig, mesh: Mesh) -> int:
    """Of what the lengths of rows are a multiple. Parts of a sequence stay as they are cut."""
    if mesh.layout.cp > 1 or mesh.layout.pp > 1:
        return 1
    return getattr(config, "pad_to_multiple_of", None) or (
        COMPILED_MULTIPLE if config.compiles(mesh.device.type) else 1
    )


def _batch_of_row(batches: Sequence[TokenBatch], row: Batch) -> TokenBatch:
    """The micro-batch of what a pipeline hands back, with the tensors that it has made of its own."""
    tensors = {name: tensor for name, tensor in row.items() if name != "batch"}
    return batches[int(row["batch"])].with_tensors(tensors)
