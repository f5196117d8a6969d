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
from sfumato.data.packing import TextBatch
from sfumato.data.vision import KINDS, Beside, Images, Vision, join_media
from sfumato.errors import ConfigError
from sfumato.models.document_rows import Sight, forget_lengths
from sfumato.models.lora import start_magnitudes
from sfumato.models.packed_attention import ATTENTION, MaskWatch
from sfumato.models.plain import give_weights, set_attention
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

    says: ClassVar[tuple[str, str]]
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
        self.rows = RowLayout("packed")
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
    def _score(self, tensors: Tensors, media: Sequence[Tensors]) -> tuple[Output, Tensors]:
        """What the model says of the tensors of a micro-batch, with its documents' images, and its part of these on its
        device."""

    @abstractmethod
    def numbers_of(self, output: Output, row: Tensors) -> Tensor:
        """What the probe compares: a number for each token, float32 ``[B, T]``, 0 where the label is -100."""

    @abstractmethod
    def numbers_alone(self, plain: nn.Module, tokens: Tensor, beside: Tensors) -> Tensor:
        """The same by transformers' own module of a document alone, of each token that has a next one.

        Args:
            plain: from ``plain_with``.
            tokens: int64 ``[L]``.
            beside: arguments of its ``forward`` that its images give.

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

    def take(self, attention: str, rows: RowLayout) -> None:
        """Makes packed rows reach the module in another way, or be computed by another attention of transformers.

        Raises:
            ConfigError, ValueError: when the model does not know that attention.
        """
        set_attention(self.plain, attention)
        self.rows = rows

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
        self,
        batches: Sequence[TextBatch],
        loss: Callable[[Output, Tensors, TextBatch], Tensor],
        step: int = 0,
        fields: Sequence[Tensors] | None = None,
    ) -> Numbers:
        """Forward and backward passes of all micro-batches; gradients are added up in the parameters.

        Args:
            batches: this rank's micro-batches of a step, as many as on the other ranks.
            loss: from what the model says of a micro-batch, its tensors and itself to its part of the loss, a scalar
                that is divided by the count over all ranks and micro-batches already. Under sequence parallelism
                output and tensors are this rank's part of the tokens.
            step: the optimiser's step, to which dropout belongs.
            fields: more tensors ``[B, T]`` for each batch, which the loss finds beside those of the batch.

        Returns:
            The loss of each micro-batch, of this rank's tokens, which waits for the device when it is read.

        Raises:
            ConfigError: when there are too few micro-batches for the pipeline.
        """
        rows = _with_fields(batches, fields)
        if self._pipeline is not None:
            given = [self._to_device(row) | {"batch": torch.tensor(index)} for index, row in enumerate(rows)]
            with self.autocast():
                return self._pipeline.train_step(
                    given,
                    lambda logits, row: loss(self._from_pipeline(logits), row, batches[int(row["batch"])]),
                    self._of_stages(batches),
                )
        losses = Numbers()
        for index, row in accumulate(self.module, list(enumerate(rows))):
            row = self._filled(row)
            with self._dropout_of(step, batches[index], row):
                part = loss(*self._score(row, batches[index].media), batches[index])
                part.backward()
            losses.add(part)
        return losses

    @torch.no_grad()
    def score(
        self, batches: Sequence[TextBatch], fields: Sequence[Tensors] | None = None
    ) -> Iterator[tuple[int, Output, Tensors]]:
        """What the model says of micro-batches without gradients; nothing is dropped out.

        Args:
            batches: as many on each rank.
            fields: see ``forward_backward``.

        Yields:
            Number of the micro-batch, that, and its tensors, of this rank's part of the tokens. With pipeline
            parallelism on the ranks of the last stage only.
        """
        rows = _with_fields(batches, fields)
        with self._evaluating():
            if self._pipeline is None:
                for index, row in enumerate(rows):
                    yield index, *self._score(self._filled(row), batches[index].media)
                return
            rows = [self._to_device(row) | {"batch": torch.tensor(index)} for index, row in enumerate(rows)]
            with self.autocast():
                found = self._pipeline.forward(rows, self._of_stages(batches))
            for index, logits in enumerate(found or []):
                yield index, self._from_pipeline(logits), shard_sequence(rows[index], self.mesh)

    @torch.no_grad()
    def _whole(
        self, batches: Sequence[TextBatch], number: Callable[[Output, Tensors], Tensor], every_token: bool = False
    ) -> list[Tensor]:
        """A number of each token of whole micro-batches, ``[B, T]``, on this rank's device.

        Args:
            batches: as many on each rank.
            number: from what the model says of this rank's part and its tensors to the numbers of that part.
            every_token: compute the output of tokens without a label, too.
        """
        found: dict[int, Tensor] = {}
        for index, output, row in self.score(self._numbered(batches, every_token)):
            numbers = number(output, row)[:, : batches[index].tensors["input_ids"].shape[1]]  # without filling
            found[index] = self._join(numbers, row.get("number"), batches[index])
        if self._pipeline is not None:
            parts = self.mesh.gather({index: numbers.cpu() for index, numbers in found.items()}, over="pp")
            found = {index: numbers.to(self.mesh.device) for part in parts for index, numbers in part.items()}
        return [found[index] for index in range(len(batches))]

    def token_numbers(self, batches: Sequence[TextBatch]) -> list[Tensor]:
        """``numbers_of`` whole micro-batches, on every rank that shares them."""
        return self._whole(batches, self.numbers_of)

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

    def _logits(self, row: Tensors, media: Sequence[Tensors] = (), **more: Tensor) -> Tensor:
        """What the module's head gives for packed rows as they are, ``[B, T, ...]``."""
        if "kinds" in row:
            beside = Beside(join_media(media), row.get("positions"), row["kinds"])
            more |= self._seen(row["position_ids"], beside)
        elif "position_ids" in self._arguments:  # recurrent models and those with ALiBi know none
            more["position_ids"] = row["position_ids"]
        with self.autocast():
            return self._forward(row["input_ids"], **more)

    def _of_stages(self, batches: Sequence[TextBatch]) -> StageArguments:
        """What the stages of a pipeline are given of micro-batches: all of them positions, the first one images."""
        if self.vision is None:
            return positions_alone

        def arguments(row: Batch, first: bool) -> Tensors:
            media = join_media(batches[int(row["batch"])].media) if first else {}
            return self._seen(row["position_ids"], Beside(media, row.get("positions"), row["kinds"]))

        return arguments

    def _forward(self, input_ids: Tensor, **more: Tensor) -> Tensor:
        """The same, of tokens ``[B, T]``."""
        return self._module_output(input_ids, **more).logits

    def _module_output(self, input_ids: Tensor, **more: Any) -> Any:
        """transformers' output for tokens ``[B, T]``."""
        if self.rows.same_length:
            forget_lengths(self.plain)
        asks_alike = self.attention == ATTENTION and self.vision is None  # masks of some depend on the images
        with self._masks.forward() if asks_alike else nullcontext():
            return self.module(input_ids=input_ids, use_cache=False, **more)

    def _seen(self, position_ids: Tensor, beside: Beside) -> Tensors:
        """What the module's ``forward`` is given beside tokens ``[B, T]`` of a model that sees."""
        there = self._to_device({"kinds": beside.kinds})
        beside = Beside(self._to_device(beside.tensors), beside.positions, **there)
        return beside.arguments(position_ids, self._arguments)

    def _forward_beside(self, input_ids: Tensor, beside: Beside) -> Tensor:
        """As ``_forward``, of documents in rows of their own, of a model that sees."""
        position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        return self._forward(input_ids, **self._seen(position_ids, beside))

    def alone(self, input_ids: np.ndarray, images: Images | None) -> Tensors:
        """What transformers' own module, which counts positions itself, is given beside the tokens of a document."""
        if self.vision is None:
            return {}
        beside = self.vision.beside(input_ids, images)
        kinds = {name: beside.kinds[None] for name in KINDS if name in self._arguments}
        if "feature_attention_mask" in self._arguments:  # omni models count positions with a mask alone
            kinds["attention_mask"] = torch.ones_like(beside.kinds[None])
        return self._to_device(beside.tensors | kinds)

    def _sight(self, media: Sequence[Tensors]) -> Sight | None:
        """The images of a batch, for documents in rows of their own."""
        if self.vision is None:
            return None
        return Sight(media, torch.from_numpy(self.vision.idle_ids), self.vision.idle())

    def sum_for_rows(self, values: Tensor) -> Tensor:
        """As ``sum_over_sequence``, where each rank goes on with rows of its own: gradients are summed, too."""
        return values if self.mesh.layout.cp == 1 else SequenceSum.apply(values, self.mesh.group("cp"), True)

    def _filled(self, tensors: Tensors) -> Tensors:
        """The tensors of a micro-batch, of a length of which there are few."""
        multiple = 1 if self.rows.rows == "documents" or self.vision is not None else self._multiple
        return tensors if tensors["input_ids"].shape[1] % multiple == 0 else pad_together([tensors], multiple)[0]

    def _to_device(self, tensors: Tensors) -> Tensors:
        """The tensors on the device, which is not waited for; of position ids it is remembered what they are."""
        device = self.mesh.device
        return {name: to_device(each, device, remember=name == "position_ids") for name, each in tensors.items()}

    def _own_part(self, tensors: Tensors) -> Tensors:
        """This rank's part of packed rows, on the device."""
        whole = self._to_device(tensors)
        row = shard_sequence(whole, self.mesh)
        if "position_ids" in tensors and row["position_ids"] is not whole["position_ids"]:
            remember_whole(row["position_ids"], whole["position_ids"])
        return row

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

    def _dropout_of(self, step: int, batch: TextBatch, row: Tensors) -> AbstractContextManager[None]:
        """What is dropped belongs to (seed, step, sample, position), not to the row that a sample is packed into."""
        if self._dropout is None:
            return nullcontext()
        count = max(len(batch.lengths) // max(len(batch.sample_ids), 1), 1)
        owners = [sample_id * count + part for sample_id in batch.sample_ids for part in range(count)] or [0]
        owner = torch.tensor(owners)[row["documents"].clamp(max=len(owners) - 1)]
        tokens = shard_sequence({"input_ids": row["input_ids"], "keys": owner * 2**24 + row["position_ids"]}, self.mesh)
        return self._dropout.batch(step, [0] * len(owner), tokens["keys"])

    @contextmanager
    def _evaluating(self) -> Iterator[None]:
        self.module.eval()
        try:
            yield
        finally:
            self.module.train()

    def _numbered(self, batches: Sequence[TextBatch], every_token: bool = False) -> list[TextBatch]:
        """Batches whose tokens know their column, so that parts of a sequence can be joined again."""
        found = []
        for batch in batches:
            columns = torch.arange(batch.tensors["input_ids"].shape[1]).expand_as(batch.tensors["input_ids"])
            more = {"number": columns} if every_token or self.mesh.layout.cp > 1 else {}
            found.append(replace(batch, tensors=batch.tensors | more))
        return found

    def _join(self, part: Tensor, columns: Tensor | None, batch: TextBatch) -> Tensor:
        """The whole ``[B, T]`` of the parts that the ranks of a sequence have."""
        if self.mesh.layout.cp == 1:
            return part
        whole = part.new_zeros(batch.tensors["input_ids"].shape)
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


def _with_fields(batches: Sequence[TextBatch], fields: Sequence[Tensors] | None) -> list[Tensors]:
    if fields is None:
        return [batch.tensors for batch in batches]
    return [batch.tensors | more for batch, more in zip(batches, fields, strict=True)]
