"""A transformers decoder that is trained on packed rows on any mesh, whatever its head computes for a token."""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from sfumato.algorithms.device import to_device
from sfumato.algorithms.reading import Numbers
from sfumato.config.sections import TrainConfig
from sfumato.data.media.document_media import KINDS, MediaRefs, MultimodalInputs, join_media
from sfumato.data.text.token_batch import TokenBatch
from sfumato.errors import ConfigError
from sfumato.models.language.document_rows import IdleImage, forget_lengths
from sfumato.models.language.hf_config import give_weights, set_attention
from sfumato.models.language.packed_attention import ATTENTION, MaskWatch
from sfumato.parallel.dropout import keyed_dropout
from sfumato.parallel.gradients import SequenceSum
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.packed_rows import Batch, pad_together, row_multiple, shard_sequence
from sfumato.parallel.parallelize import accumulate, move_to_devices, parallelize, weights_device
from sfumato.parallel.plan import language_plan
from sfumato.parallel.positions import remember_whole
from sfumato.parallel.shards import whole_shapes
from sfumato.parallel.weights import build_on_meta, load_weights

if TYPE_CHECKING:
    from peft import PeftConfig
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from sfumato.data.media.vision import Vision
    from sfumato.parallel.balance import ExpertBalancer
    from sfumato.parallel.keyed_dropout import DropoutKeys
    from sfumato.parallel.pipeline import Pipeline, StageArguments

Tensors = dict[str, Tensor]

Output = TypeVar("Output")
"""The model's output for the tokens of a micro-batch."""


@dataclass(frozen=True)
class RowLayout:
    """How packed rows reach a module."""

    rows: Literal["packed", "documents"]
    """``packed``: as they are. ``documents``: a row for each document."""
    same_length: bool = False
    """With ``documents``, only documents of equal length share a call of the module."""


class PackedModel(ABC, Generic[Output]):
    """A transformers decoder with its tokenizer. The transformers modules are used as they are.

    A subclass defines what its head computes for the tokens of a micro-batch: logits, or one number each.
    """

    output_name: ClassVar[tuple[str, str]]
    """The probe's name of the numbers that it compares, in the singular (with article) and in the plural."""
    vision: Vision | None = None
    """Prepares the images, videos and sounds of a model that sees or hears; None of other models."""
    frozen_names: frozenset[str] = frozenset()
    """Weights that are not trained (``model.freeze``), by the names of the plain module."""
    notes: tuple[str, ...] = ()
    """Lines for the log about what the model's folder has and the run leaves out."""
    no_text: frozenset[int] = frozenset()
    """Tokens that the probe leaves out of its random texts, besides those of images."""

    def __init__(
        self,
        module: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        autocast_dtype: torch.dtype | None,
        build: Callable[[], PreTrainedModel],
        source: Path | None = None,
    ) -> None:
        """Use the function that builds the subclass.

        Args:
            module: the plain model, with its adapters; its weights may be on meta.
            tokenizer: its tokenizer.
            autocast_dtype: dtype of the forward pass under autocast; None leaves autocast off.
            build: makes a plain model with random weights.
            source: folder from which weights on meta are read; None draws them.
        """
        self.module: nn.Module = module
        """What is called and trained: the plain module, or after ``parallelize`` what that has made of it."""
        self.tokenizer = tokenizer
        self.autocast_dtype = autocast_dtype
        self.balancer: ExpertBalancer | None = None
        self.row_layout = RowLayout("packed")
        """How packed rows reach the module."""
        self.shares_prompts = False
        """Whether a packed row may have documents that continue the beginning of another (``shared_prompts.py``)."""
        self.plain = module
        """transformers' model, whose configuration is at hand even where ``module`` is a pipeline's stage."""
        self.source = source
        self.name = type(module).__name__
        """transformers' class, which fsdp2 gives another name."""
        self._arguments = inspect.signature(module.forward).parameters  # by name: what ``forward`` accepts
        self._build = build
        self._pipeline: Pipeline | None = None
        self._dropout: DropoutKeys | None = None
        self._masks = MaskWatch()
        self._multiple = 1  # of row lengths, see ``row_multiple``
        self._mesh: Mesh | None = None

    @abstractmethod
    def __call__(self, batch: TokenBatch) -> Output:
        """The forward pass: the output for the tokens of a micro-batch that ``place_batch`` has placed."""

    @abstractmethod
    def probe_values(self, output: Output, batch: TokenBatch) -> Tensor:
        """The numbers that the probe compares: float32 ``[B, T]``, one for each token, 0 where the label is -100."""

    @abstractmethod
    def reference_probe_values(self, plain: PreTrainedModel, tokens: Tensor, inputs: Tensors) -> Tensor:
        """``probe_values`` computed by transformers' own module for a single document, of all tokens with a next one.

        Args:
            plain: transformers' module, from ``plain_with``.
            tokens: int64 ``[L]``.
            inputs: arguments of its ``forward`` for the document's images.

        Returns:
            float32 ``[L - 1]``.
        """

    def _check(self, mesh: Mesh, config: TrainConfig) -> None:
        """Raises ConfigError for settings that this kind of model cannot be trained with."""
        if mesh.layout.cfg > 1:
            raise ConfigError("train.cfg_parallel_size is for diffusion models; a language model has no guidance")

    def _from_pipeline(self, logits: Tensor) -> Output:
        """The model's output, made of what the last stage of a pipeline returned."""
        raise NotImplementedError

    @property
    def trained(self) -> nn.Module:
        """The module that holds the parameters, for the optimiser, ``reduce_and_clip`` and checkpoints."""
        return self.module

    @property
    def attention(self) -> str:
        """transformers' name of the decoder's attention."""
        return cast("str", self.plain.config.get_text_config()._attn_implementation)

    @property
    def drops_out(self) -> bool:
        """Whether adapters or layers have dropout in training, which is keyed by the sample."""
        return self._dropout is not None

    @property
    def mesh(self) -> Mesh:
        """The mesh that the model was put on."""
        assert self._mesh is not None, "call parallelize first"
        return self._mesh

    def parallelize(self, mesh: Mesh, config: TrainConfig) -> None:
        """Puts the model on a mesh, as configured; each rank reads or draws the weights on meta that it holds.

        Raises:
            ConfigError: when the model cannot be sharded, or trained, as configured.
        """
        self._mesh = mesh
        self._check(mesh, config)
        self._multiple = row_multiple(config, mesh)
        # before ``parallelize``, since masks are keyed by the names of the plain module's submodules
        self._dropout = keyed_dropout(self.module, config.seed)
        if self._dropout is not None and mesh.layout.pp > 1:
            raise ConfigError(
                "train.pipeline_parallel_size and dropout exclude each other: set model.lora.dropout to 0"
            )
        plan = replace(language_plan(self.module), graph_breaks=self.attention == ATTENTION or mesh.layout.cp > 1)
        dtype = self.autocast_dtype
        if mesh.layout.pp > 1:
            from sfumato.parallel.pipeline import build_pipeline

            self._pipeline = build_pipeline(self.module, mesh, config, plan, dtype)
            self.module = self._pipeline.module  # this rank's stage
        else:
            self.module = parallelize(self.module, mesh, config, plan, dtype)
        if self._dropout is not None:
            self._dropout.check_is_whole(self.module)
        # weights on meta are read after sharding, so that no rank holds the whole model
        device = weights_device(mesh, config)
        if any(parameter.is_meta for parameter in self.module.parameters()):
            from sfumato.models.lora import start_magnitudes

            if self.source is not None:
                from_rank0 = config.broadcast_model_weights_from_rank0
                load_weights(self.module, self.source, mesh, from_rank0, device=device)
            else:
                from sfumato.parallel.random_weights import initialise_on_meta

                initialise_on_meta(self.module, self._build, mesh, config.seed, device)
            start_magnitudes(self.module)  # DoRA's are the norms of the weights that have just been read
        move_to_devices(self.module, mesh, config)
        self.module.train()
        if config.expert_bias_rate > 0:
            if self._adapters():
                raise ConfigError(
                    "train.expert_bias_rate moves biases of routers, which files of adapters do not hold, and under "
                    "model.lora the model without adapters would no longer be the one that the run began with: set it "
                    "to 0, or train all weights"
                )
            from sfumato.parallel.balance import ExpertBalancer

            self.balancer = ExpertBalancer(self.module, mesh, config.expert_bias_rate)

    def set_row_layout(self, attention: str, row_layout: RowLayout) -> None:
        """Sets how packed rows reach the module, and which of transformers' attentions computes them.

        Raises:
            ConfigError, ValueError: when the model does not support that attention.
        """
        set_attention(self.plain, attention)
        self.row_layout = row_layout

    def whole_bytes(self) -> int:
        """Bytes that the whole model's weights take in float32."""
        sizes = {name: math.prod(shape) for name, shape in whole_shapes(self.module).items()}
        # by name: a weight that several stages hold counts once
        size_by_name = {name: size for stage in self.mesh.gather(sizes, "pp") for name, size in stage.items()}
        return 4 * sum(size_by_name.values())

    def plain_with(self, weights: dict[str, Tensor]) -> PreTrainedModel:
        """transformers' own module, adapters included, with these weights, which are not copied.

        Args:
            weights: whole weights by the names of the module.
        """
        module = self._adapted_on_meta()
        trains = {name for name, parameter in module.named_parameters() if parameter.requires_grad} - self.frozen_names
        give_weights(module, weights)
        # ``give_weights`` has replaced the parameters by tensors with another requires_grad
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in trains)
        return module

    def _plain_on_meta(self) -> PreTrainedModel:
        """transformers' own module without adapters, whose weights are on meta."""
        return cast("PreTrainedModel", build_on_meta(self._build))

    def _adapted_on_meta(self) -> PreTrainedModel:
        """As ``_plain_on_meta``, with the adapters. ``module`` may be a stage, without the layers of the others."""
        module = self._plain_on_meta()
        for name, adapter in self._adapters().items():
            from sfumato.models.lora import inject_adapter

            inject_adapter(module, adapter, name)
        return module

    def forward_backward(
        self, batches: Sequence[TokenBatch], loss_fn: Callable[[Output, TokenBatch], Tensor], step: int = 0
    ) -> Numbers:
        """Forward and backward passes of all micro-batches; gradients are added up in the parameters.

        Args:
            batches: this rank's micro-batches of a step, the same number on every rank.
            loss_fn: takes the model's output for a micro-batch and the micro-batch as ``place_batch`` returns it, and
                returns the share of the loss that it has: a scalar already divided by the number of terms over all
                ranks and micro-batches. Under sequence parallelism both arguments hold this rank's tokens only.
            step: number of the optimiser step, which keys dropout.

        Returns:
            This rank's share of the loss for each micro-batch; reading it waits for the device.

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
        """Places micro-batches one after the other; the loop's body runs a forward and a backward pass of each.

        The backward pass of the last micro-batch reduces gradients over ranks (``parallel.parallelize.accumulate``).
        Inside the body dropout is keyed by ``step`` and the samples.
        """
        for batch in accumulate(self.module, batches):
            placed = self.place_batch(batch)
            with self._dropout_of(step, batch):
                yield placed

    def place_batch(self, batch: TokenBatch, every_token: bool = False) -> TokenBatch:
        """A micro-batch as ``__call__`` takes it: padded, on the device, and only this rank's part of its tokens.

        The host does not wait for the device, and remembers the values of position ids, from which attention finds the
        documents. Not with pipeline parallelism.

        Args:
            batch: in host memory; tensors of an update may be on the device already.
            every_token: whether the output is wanted for tokens without a label, too.
        """
        whole = self._pad_to_multiple(self._number_columns(batch))
        if self.balancer is not None:
            whole = replace(whole, is_token=whole.token_mask() & (not batch.is_placeholder))
        # chosen in host memory, where labels can be looked at without waiting for the device
        output_columns = None if every_token else self._output_columns(whole)
        whole = whole.with_tensors(self._to_device(whole.tensors()))
        batch = whole.with_tensors(shard_sequence(whole.tensors(), self.mesh))
        # sequence parallelism finds the documents of whole rows by the position ids of a rank's part
        if batch.position_ids is not whole.position_ids:
            remember_whole(batch.position_ids, whole.position_ids)
        # the module of a model that sees gets whole rows, and cuts them once image features are in their places
        is_cut_inside = self.vision is not None and self.mesh.layout.cp > 1
        return replace(batch, output_columns=output_columns, whole_rows=whole if is_cut_inside else None)

    def _pad_to_multiple(self, batch: TokenBatch) -> TokenBatch:
        """Pads a micro-batch to one of few lengths, since blocks are compiled anew for each length."""
        multiple = 1 if self.row_layout.rows == "documents" or self.vision is not None else self._multiple
        if batch.shape[1] % multiple == 0:
            return batch
        (tensors,) = pad_together([batch.tensors()], multiple)
        return batch.with_tensors(tensors)

    def _output_columns(self, batch: TokenBatch) -> Tensor | None:
        """The columns for which the output is computed, int64 ``[K]`` on the device; None stands for all."""
        return None

    @torch.no_grad()
    def score(self, batches: Sequence[TokenBatch], every_token: bool = False) -> Iterator[tuple[Output, TokenBatch]]:
        """The outputs for micro-batches, without gradients and without dropout.

        Args:
            batches: micro-batches, the same number on every rank.
            every_token: whether the output is wanted for tokens without a label, too.

        Yields:
            For each micro-batch in order the output and the placed micro-batch, of this rank's part of the tokens. With
            pipeline parallelism only the ranks of the last stage yield.
        """
        with self._in_evaluation_mode():
            if self._pipeline is None:
                for batch in batches:
                    placed = self.place_batch(batch, every_token)
                    yield self(placed), placed
                return
            rows = self._pipeline_inputs(batches)
            with self.autocast():
                outputs = self._pipeline.forward(rows, self._stage_arguments(batches))
            for row, logits in zip(rows, outputs or [], strict=False):  # only the last stage has outputs
                yield self._from_pipeline(logits), _batch_of_row(batches, shard_sequence(row, self.mesh))

    @torch.no_grad()
    def compute_token_values(
        self,
        batches: Sequence[TokenBatch],
        compute: Callable[[Output, TokenBatch], Tensor],
        every_token: bool = False,
    ) -> list[Tensor]:
        """One number for each token of whole micro-batches, ``[B, T]``, on the device of every rank that shares them.

        Args:
            batches: micro-batches, the same number on every rank.
            compute: takes the output and the placed micro-batch, of this rank's part of the tokens, and returns a
                number for each of these tokens.
            every_token: whether numbers are wanted for tokens without a label, too.
        """
        values: dict[int, Tensor] = {}
        for index, (output, placed) in enumerate(self.score(batches, every_token)):
            part = compute(output, placed)[:, : batches[index].shape[1]]  # without padding
            values[index] = self._join_sequence(part, placed.columns, batches[index])
        if self._pipeline is not None:
            # the last stage has all values, and shares them with the other stages
            on_host = {index: part.cpu() for index, part in values.items()}
            parts = self.mesh.gather(on_host, over="pp")
            values = {index: value.to(self.mesh.device) for part in parts for index, value in part.items()}
        return [values[index] for index in range(len(batches))]

    def compute_probe_values(self, batches: Sequence[TokenBatch]) -> list[Tensor]:
        """``probe_values`` of whole micro-batches, on every rank that shares them."""
        return self.compute_token_values(batches, self.probe_values)

    @contextmanager
    def whole_output(self) -> Iterator[None]:
        """Inside, the output of all tokens is computed at once."""
        yield

    @contextmanager
    def probed(self) -> Iterator[None]:
        """Inside, the model has weights for which mistakes show in its output."""
        yield

    def _adapters(self) -> dict[str, PeftConfig]:
        """peft's configurations of the adapters, by name."""
        return next(
            (
                cast("dict[str, PeftConfig]", submodule.peft_config)
                for submodule in self.module.modules()
                if hasattr(submodule, "peft_config")
            ),
            {},
        )

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Inside, the LoRA adapters are switched off: the model is its own reference."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        modules: Iterator[object] = self.module.modules()
        layers = [submodule for submodule in modules if isinstance(submodule, BaseTunerLayer)]
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def balance_experts(self) -> dict[str, float]:
        """Updates the routing biases, if there are any, after an optimiser step. Returns metrics."""
        if self.balancer is None:
            return {}
        numbers = Numbers()
        numbers.add_all(**self.balancer.update())
        return dict(numbers.named())

    def _mark_tokens(self, is_token: Tensor | None) -> None:
        """Tells which tokens ``[B, T]`` of the next forward pass are no padding, which experts' loads leave out."""
        if self.balancer is not None:
            self.balancer.is_token = None if is_token is None else is_token.flatten()

    def sum_over_sequence(self, values: Tensor) -> Tensor:
        """Sums a tensor of any shape over the ranks that share a sequence; each rank's part gets its own gradient."""
        return values if self.mesh.layout.cp == 1 else SequenceSum.apply(values, self.mesh.group("cp"))

    def _run_module(
        self, input_ids: Tensor, position_ids: Tensor | None, inputs: MultimodalInputs | None, **arguments: object
    ) -> Any:
        """transformers' output for tokens ``[B, T]``: the only place where the module is called.

        Args:
            input_ids: int64 ``[B, T]``.
            position_ids: int64 ``[B, T]``, within documents; None where each row is a document.
            inputs: images, positions and modalities of these tokens, for a model that sees.
            arguments: further arguments of the module's ``forward``.
        """
        if inputs is not None:
            if position_ids is None:
                position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
            arguments |= self._multimodal_arguments(position_ids, inputs)
        elif position_ids is not None and "position_ids" in self._arguments:  # recurrent models and ALiBi take none
            arguments["position_ids"] = position_ids
        if self.row_layout.same_length:
            forget_lengths(self.plain)
        # a MaskWatch expects the same kinds of masks in each pass; those of models that see may depend on the images
        has_constant_masks = self.attention == ATTENTION and self.vision is None
        with self._masks.forward() if has_constant_masks else nullcontext():
            return self.module(input_ids=input_ids, use_cache=False, **arguments)

    def _multimodal_arguments(self, position_ids: Tensor, inputs: MultimodalInputs) -> Tensors:
        """Arguments of the module's ``forward`` besides tokens ``[B, T]``, of a model that sees."""
        assert inputs.modality_ids is not None
        (modality_ids,) = self._to_device({"modality_ids": inputs.modality_ids}).values()
        on_device = MultimodalInputs(self._to_device(inputs.tensors), inputs.rope_positions, modality_ids)
        return on_device.arguments(position_ids, self._arguments)

    def _stage_arguments(self, batches: Sequence[TokenBatch]) -> StageArguments:
        """The arguments of a pipeline's stages for micro-batches: positions for all stages, images for the first."""
        if self.vision is None:
            from sfumato.parallel.pipeline import positions_alone

            return positions_alone

        def select_arguments(row: Batch, first: bool) -> Tensors:
            # images are merged into the embeddings of the first stage; later stages get hidden states
            media = join_media(batches[int(row["batch"])].media) if first else {}
            inputs = MultimodalInputs(media, row.get("rope_positions"), row["modality_ids"])
            return self._multimodal_arguments(row["position_ids"], inputs)

        return select_arguments

    def _pipeline_inputs(self, batches: Sequence[TokenBatch]) -> list[Tensors]:
        """Micro-batches as the pipeline takes them: tensors on the device, with the index of the micro-batch, by which
        ``_batch_of_row`` finds what is no tensor."""
        return [
            self._to_device(self._number_columns(batch).tensors()) | {"batch": torch.tensor(index)}
            for index, batch in enumerate(batches)
        ]

    def single_document_inputs(self, input_ids: np.ndarray, images: MediaRefs | None) -> Tensors:
        """Arguments of transformers' own module for a single document besides its tokens; it counts positions itself.

        Args:
            input_ids: ``[L]``.
            images: of the document; None without.
        """
        if self.vision is None:
            return {}
        inputs = self.vision.multimodal_inputs(input_ids, images)
        assert inputs.modality_ids is not None
        arguments = {name: inputs.modality_ids[None] for name in KINDS if name in self._arguments}
        if "feature_attention_mask" in self._arguments:  # omni models count positions only where there is a mask
            arguments["attention_mask"] = torch.ones_like(inputs.modality_ids[None])
        return self._to_device(inputs.tensors | arguments)

    def _idle_image(self) -> IdleImage | None:
        """The image for calls with documents that have none; None for a model that does not see."""
        if self.vision is None:
            return None
        return IdleImage(torch.from_numpy(self.vision.idle_ids), self.vision.idle())

    def sum_for_rows(self, values: Tensor) -> Tensor:
        """As ``sum_over_sequence``, for ranks that use the sum for different rows: gradients are summed, too."""
        return values if self.mesh.layout.cp == 1 else SequenceSum.apply(values, self.mesh.group("cp"), True)

    def _to_device(self, tensors: Tensors) -> Tensors:
        """Copies tensors to the device without waiting for it; the host remembers the values of position ids."""
        device = self.mesh.device
        return {name: to_device(tensor, device, remember=name == "position_ids") for name, tensor in tensors.items()}

    def autocast(self) -> AbstractContextManager[object]:
        """Inside, forward passes have the configured precision."""
        kind = self.mesh.device.type
        dtype = self.autocast_dtype
        return torch.autocast(kind, dtype or torch.bfloat16, enabled=dtype is not None)

    def _dropout_of(self, step: int, batch: TokenBatch) -> AbstractContextManager[None]:
        """Inside, dropout is keyed by (seed, step, sample, position), not by the row that a sample is packed into.

        Args:
            step: number of the optimiser step.
            batch: the whole micro-batch, in host memory.
        """
        if self._dropout is None:
            return nullcontext()
        batch = self._pad_to_multiple(batch)
        # samples have equally many documents, such as the two of a pair; each document has a key of its own
        num_documents = max(len(batch.document_lengths) // max(len(batch.sample_ids), 1), 1)
        document_keys = [
            sample_id * num_documents + document for sample_id in batch.sample_ids for document in range(num_documents)
        ] or [0]
        key_of_token = torch.tensor(document_keys)[batch.document_ids.clamp(max=len(document_keys) - 1)]
        # no document has 2**24 tokens, so that no two tokens share a key
        tokens = {"input_ids": batch.input_ids, "keys": key_of_token * 2**24 + batch.position_ids}
        return self._dropout.batch(step, [0] * len(key_of_token), shard_sequence(tokens, self.mesh)["keys"])

    @contextmanager
    def _in_evaluation_mode(self) -> Iterator[None]:
        """Inside, the module is in evaluation mode."""
        self.module.eval()
        try:
            yield
        finally:
            self.module.train()

    def _number_columns(self, batch: TokenBatch) -> TokenBatch:
        """Under sequence parallelism adds each token's column, by which ``_join_sequence`` joins the ranks' parts."""
        if self.mesh.layout.cp == 1:
            return batch
        return replace(batch, columns=torch.arange(batch.shape[1]).expand_as(batch.input_ids))

    def _join_sequence(self, part: Tensor, columns: Tensor | None, batch: TokenBatch) -> Tensor:
        """The whole ``[B, T]``, joined from the parts that ranks hold under sequence parallelism."""
        if self.mesh.layout.cp == 1:
            return part
        assert columns is not None
        # each rank fills its columns of a tensor of zeros, and the sum joins them
        whole = part.new_zeros(batch.shape)
        whole[:, columns[0]] = part
        dist.all_reduce(whole, group=self.mesh.group("cp"))
        return whole


def _batch_of_row(batches: Sequence[TokenBatch], row: Batch) -> TokenBatch:
    """The micro-batch that belongs to a row of ``_pipeline_inputs``, with the tensors that the pipeline hands back."""
    tensors = {name: tensor for name, tensor in row.items() if name != "batch"}
    return batches[int(row["batch"])].with_tensors(tensors)
