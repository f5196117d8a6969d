"""A transformers language model as a thing that can be trained on any mesh."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from sfumato.config.sections import TrainConfig
from sfumato.data.packing import TextBatch
from sfumato.errors import ConfigError
from sfumato.models.document_rows import apart, forget_lengths
from sfumato.models.lora import merge_adapters, save_adapter, start_magnitudes
from sfumato.models.output_layer import OutputLayer
from sfumato.models.plain import give_weights, set_attention
from sfumato.models.scores import TokenScores
from sfumato.parallel.attention import shard_sequence
from sfumato.parallel.balance import ExpertBalancer
from sfumato.parallel.dropout import DropoutKeys, check_dropout_is_whole, keyed_dropout
from sfumato.parallel.loss import IGNORED
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.parallelize import accumulate, parallelize
from sfumato.parallel.pipeline import Pipeline, build_pipeline
from sfumato.parallel.plan import language_plan
from sfumato.parallel.shards import whole_shapes
from sfumato.parallel.weights import build_on_meta, initialise_on_meta, load_weights

WORTH_PICKING = 0.9
"""Fraction of tokens in the loss mask up to which logits are computed for these alone; picking them costs a copy."""

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class RowLayout:
    """How packed rows reach a module."""

    rows: Literal["packed", "documents"]
    """As they are, or a row for each document."""
    same_length: bool = False
    """Of documents in rows of their own, only those of one length share a call."""


TokenLoss = Callable[[TokenScores, Tensors, TextBatch], Tensor]
"""A function from the scores of a micro-batch, its tensors and itself to its part of the loss, a scalar that is divided
by the count over all ranks and micro-batches already. Under sequence parallelism scores and tensors are this rank's
part of the tokens."""


class LanguageModel:
    """A causal transformers model with its tokenizer. The transformers modules are used as they are."""

    def __init__(
        self,
        module: nn.Module,
        tokenizer: Any,
        autocast_dtype: torch.dtype | None,
        build: Callable[[], nn.Module],
        source: Path | None = None,
        chunked: bool = False,
    ) -> None:
        """Use ``build_language_model``.

        Args:
            module: the plain model, with adapters if there are any; its weights may be on meta.
            tokenizer: its tokenizer.
            autocast_dtype: dtype of the forward pass under autocast; None leaves autocast off.
            build: makes a plain model with random weights.
            source: folder that weights on meta are read from; None draws them.
            chunked: compute logits for some tokens at a time.
        """
        self.module, self.tokenizer, self.autocast_dtype = module, tokenizer, autocast_dtype
        self.balancer: ExpertBalancer | None = None
        self.rows = RowLayout("packed")
        """How packed rows reach the module."""
        self.plain, self.source = module, source
        self.name = type(module).__name__
        """transformers' class, which fsdp2 gives another name."""
        self._output_layer = OutputLayer(module)
        self._arguments = inspect.signature(module.forward).parameters
        self._build, self._chunked = build, chunked
        self._pipeline: Pipeline | None = None
        self._dropout: DropoutKeys | None = None
        self._mesh: Mesh | None = None

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
        check_settings(self.module, mesh, config, self._chunked)
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
        trains = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
        give_weights(module, weights)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in trains)
        return module

    @contextmanager
    def whole_logits(self) -> Iterator[None]:
        """Inside, logits are computed for all tokens at a time, by the model's own output layer."""
        chunked, self._chunked = self._chunked, False
        self._output_layer.put_back()
        try:
            yield
        finally:
            self._chunked = chunked

    def forward_backward(
        self, batches: Sequence[TextBatch], loss: TokenLoss, step: int = 0, fields: Sequence[Tensors] | None = None
    ) -> list[float]:
        """Forward and backward passes of all micro-batches; gradients are added up in the parameters.

        Args:
            batches: this rank's micro-batches of a step, as many as on the other ranks.
            loss: see ``TokenLoss``.
            step: the optimiser's step, to which dropout belongs.
            fields: more tensors ``[B, T]`` for each batch, which the loss finds beside those of the batch.

        Returns:
            The loss of each micro-batch, of this rank's tokens.

        Raises:
            ConfigError: when there are too few micro-batches for the pipeline.
        """
        rows = _with_fields(batches, fields)
        if self._pipeline is not None:
            given = [self._to_device(row | {"batch": torch.tensor(index)}) for index, row in enumerate(rows)]
            with self.autocast():
                return self._pipeline.train_step(
                    given, lambda logits, row: loss(_scores(logits), row, batches[int(row["batch"])])
                )
        losses = []
        for index, row in accumulate(self.module, list(enumerate(rows))):
            with self._dropout_of(step, batches[index], row):
                part = loss(*self._score(row), batches[index])
                part.backward()
            losses.append(part.detach())
        return torch.stack(losses).double().tolist() if losses else []

    @torch.no_grad()
    def score(
        self, batches: Sequence[TextBatch], fields: Sequence[Tensors] | None = None
    ) -> Iterator[tuple[int, TokenScores, Tensors]]:
        """Scores of micro-batches without gradients; nothing is dropped out.

        Args:
            batches: as many on each rank.
            fields: see ``forward_backward``.

        Yields:
            Number of the micro-batch, its scores and its tensors, of this rank's part of the tokens. With pipeline
            parallelism on the ranks of the last stage only.
        """
        rows = _with_fields(batches, fields)
        with self._evaluating():
            if self._pipeline is None:
                for index, row in enumerate(rows):
                    yield index, *self._score(row)
                return
            rows = [self._to_device(row) for row in rows]
            with self.autocast():
                found = self._pipeline.forward(rows)
            for index, logits in enumerate(found or []):
                yield index, _scores(logits), shard_sequence(rows[index], self.mesh)

    @torch.no_grad()
    def token_log_probs(self, batches: Sequence[TextBatch], reference: bool = False) -> list[Tensor]:
        """Log-probabilities of the labels of whole micro-batches, float32 ``[B, T]`` on every rank that shares them.

        Args:
            batches: as many on each rank.
            reference: with the adapters switched off.
        """
        found: dict[int, Tensor] = {}
        with self.without_adapter() if reference else nullcontext():
            for index, scores, row in self.score(self._numbered(batches)):
                found[index] = self._join(scores.log_probs(row["labels"]), row.get("number"), batches[index])
        if self._pipeline is not None:
            parts = self.mesh.gather({index: log_probs.cpu() for index, log_probs in found.items()}, over="pp")
            found = {index: log_probs.to(self.mesh.device) for part in parts for index, log_probs in part.items()}
        return [found[index] for index in range(len(batches))]

    def predictions(self, batches: Sequence[TextBatch]) -> list[Tensor]:
        """The likeliest next token after each token of whole micro-batches, int64 ``[B, T]`` on the CPU."""
        found: dict[int, Tensor] = {}
        for index, scores, row in self.score(self._numbered(batches, every_token=True)):
            found[index] = self._join(scores.predictions(), row["number"], batches[index]).cpu()
        if self._pipeline is not None:
            found = {
                index: predicted for part in self.mesh.gather(found, over="pp") for index, predicted in part.items()
            }
        return [found[index] for index in range(len(batches))]

    def save_export(self, folder: Path, weights: dict[str, Tensor], merge: bool = False) -> None:
        """Writes model and tokenizer as transformers loads them by itself, or adapters as peft does.

        Trained under bf16, whole weights are written in bf16, as the forward passes saw them. Biases that a balancer
        gave to routers without a place for them go into a file of their own, ``expert_biases.safetensors``.

        Args:
            folder: where to.
            weights: whole weights by the names of the plain module, adapters included; emptied.
            merge: write merged weights instead of adapters.
        """
        adapters = self._adapters()
        self.tokenizer.save_pretrained(folder)
        plain = build_on_meta(self._build)
        if adapters:
            whole = build_on_meta(self._build)  # a stage of a pipeline does not know the others' layers
            for name, adapter in adapters.items():
                whole.add_adapter(adapter, name)
            if not merge:
                save_adapter(whole, weights, folder, None if self.source is None else str(self.source))
                return
            weights = merge_adapters(whole, weights)
        known = {**dict(plain.named_parameters(remove_duplicate=False)), **dict(plain.named_buffers())}
        biases = {name: weights.pop(name) for name in [*weights] if name not in known}
        if biases:
            save_file(biases, folder / "expert_biases.safetensors")
        for name in weights:
            if self.autocast_dtype is not None and weights[name].dtype == torch.float32:
                weights[name] = weights[name].to(self.autocast_dtype)
        give_weights(plain, weights)
        plain.config.dtype = self.autocast_dtype or torch.float32
        plain.save_pretrained(folder)

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
        return {} if self.balancer is None else self.balancer.update()

    def sum_over_sequence(self, values: Tensor) -> Tensor:
        """Sum of a tensor of any shape over the ranks that share a sequence; gradients go to each rank's own part."""
        return values if self.mesh.layout.cp == 1 else _SequenceSum.apply(values, self.mesh.group("cp"))

    def _score(self, tensors: Tensors) -> tuple[TokenScores, Tensors]:
        row = shard_sequence(self._to_device(tensors), self.mesh)
        head, tail = self._output_layer.apart() if self._chunked else (None, None)
        if self.rows.rows == "documents":
            with self.autocast():
                output = apart(self._forward, row, self.mesh, self.rows.same_length)
            return TokenScores(output, tuple(row["input_ids"].shape), None, head, tail), row
        kept = None
        can_pick = "number" not in tensors and "logits_to_keep" in self._arguments
        if can_pick and tensors["labels"].shape[0] == 1 and self.mesh.size == self.mesh.data_size:
            masked_in = (tensors["labels"][0] != IGNORED).nonzero()[:, 0]
            if len(masked_in) < WORTH_PICKING * tensors["labels"].shape[1]:
                kept = (masked_in if len(masked_in) else torch.zeros(1, dtype=torch.int64)).to(self.mesh.device)
        more = {} if kept is None else {"logits_to_keep": kept}
        if "position_ids" in self._arguments:  # recurrent models and those with ALiBi know none
            more["position_ids"] = row["position_ids"]
        with self.autocast():
            output = self._forward(row["input_ids"], **more)
        return TokenScores(output, tuple(row["input_ids"].shape), kept, head, tail), row

    def _forward(self, input_ids: Tensor, **more: Tensor) -> Tensor:
        """Logits, or with a chunked loss the last hidden states, of tokens ``[B, T]``."""
        if self.rows.same_length:
            forget_lengths(self.plain)
        output = self.module(input_ids=input_ids, use_cache=False, **more).logits
        return self._output_layer.hidden(output) if self._chunked else output

    def _to_device(self, tensors: Tensors) -> Tensors:
        return {name: tensor.to(self.mesh.device, non_blocking=True) for name, tensor in tensors.items()}

    def autocast(self) -> AbstractContextManager[Any]:
        """The precision of forward passes."""
        kind, dtype = self.mesh.device.type, self.autocast_dtype
        return torch.autocast(kind, dtype or torch.bfloat16, enabled=dtype is not None)

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
            found.append(TextBatch(batch.tensors | more, batch.lengths, batch.sample_ids))
        return found

    def _join(self, part: Tensor, columns: Tensor | None, batch: TextBatch) -> Tensor:
        """The whole ``[B, T]`` of the parts that the ranks of a sequence have."""
        if self.mesh.layout.cp == 1:
            return part
        whole = part.new_zeros(batch.tensors["input_ids"].shape)
        whole[:, columns[0]] = part
        dist.all_reduce(whole, group=self.mesh.group("cp"))
        return whole


class _SequenceSum(torch.autograd.Function):
    """Every rank computes the same from the sum; the gradients of all ranks' parts are those of one loss."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, group: dist.ProcessGroup) -> Tensor:
        values = values.clone()
        dist.all_reduce(values, group=group)
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def _with_fields(batches: Sequence[TextBatch], fields: Sequence[Tensors] | None) -> list[Tensors]:
    if fields is None:
        return [batch.tensors for batch in batches]
    return [batch.tensors | more for batch, more in zip(batches, fields, strict=True)]


def _scores(logits: Tensor) -> TokenScores:
    return TokenScores(logits, (logits.shape[0], logits.shape[1]))


def check_settings(module: nn.Module, mesh: Mesh, config: TrainConfig, chunked: bool) -> None:
    """Raises ConfigError for settings that this model cannot be trained with."""
    if mesh.layout.cfg > 1:
        raise ConfigError("train.cfg_parallel_size is for diffusion models; a language model has no guidance")
    if chunked and (mesh.layout.tp > 1 or mesh.layout.pp > 1):
        field = "tensor_parallel_size" if mesh.layout.tp > 1 else "pipeline_parallel_size"
        raise ConfigError(f"train.chunked_loss needs the whole output layer in each process: set train.{field} to 1")
    if chunked and not isinstance(module.get_output_embeddings(), nn.Linear):
        raise ConfigError(f"train.chunked_loss needs a linear output layer, which {type(module).__name__} has not")
