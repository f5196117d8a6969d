"""A language model that says one number of each token, for reward models and critics, trained on any mesh."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from sfumato.config.parallel import ParallelConfig
from sfumato.config.text import LanguageModelConfig
from sfumato.data.text.answer_end import facts_of
from sfumato.data.text.token_batch import TokenBatch
from sfumato.errors import ConfigError
from sfumato.models.language.document_rows import forward_per_document
from sfumato.models.language.hf_config import give_weights
from sfumato.models.language.model_folder import save_tokenizer
from sfumato.models.language.packed_model import PackedModel, Tensors
from sfumato.models.language.parts import (
    DTYPES,
    build_module,
    build_tokenizer,
    check_vocabulary,
    read_model_config,
    source_of,
    where_described,
)
from sfumato.models.language.router_loss import refuse_router_loss
from sfumato.models.language.source_folder import float32_names
from sfumato.models.lora import add_lora, language_targets, merge_adapters
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import Shards, all_parameters, local
from sfumato.parallel.weights import build_on_meta

HEAD = "score"
"""transformers' name of the head of its classifiers of sequences."""

OUTPUT_LAYERS = ("lm_head.", "embed_out.")
"""Beginnings of the names of weights that a causal model has in the head's place."""


class ScalarModel(PackedModel[Tensor]):
    """transformers' classifier of sequences with one output, read at every token.

    The head has no bias and is computed in float32. The output at the last token of a document that is not the
    padding token is what transformers' own module gives for that document.
    """

    output_name: ClassVar[tuple[str, str]] = ("a value", "values")
    exports_merged: ClassVar[bool] = True
    """Adapters alone would lose the head."""

    def __init__(
        self,
        module: nn.Module,
        tokenizer: Any,
        autocast_dtype: torch.dtype | None,
        build: Callable[[], nn.Module],
        source: Path | None = None,
    ) -> None:
        """Use ``build_scalar_model``; arguments as for ``PackedModel``."""
        super().__init__(module, tokenizer, autocast_dtype, build, source)
        self._head = getattr(module, HEAD)
        self._head.forward = self._read
        self._values: Tensor | None = None

    @property
    def pad_token_id(self) -> int:
        """The token at which transformers' module reads no output."""
        return self.plain.config.get_text_config().pad_token_id

    def values(self, batches: Sequence[TokenBatch]) -> list[Tensor]:
        """Values of all tokens of whole micro-batches without gradients; nothing is dropped out.

        Args:
            batches: as many on each rank.

        Returns:
            float32 ``[B, T]`` for each, on every rank that shares it, on its device.
        """
        return self.compute_token_values(batches, lambda values, _: values, every_token=True)

    def probe_values(self, output: Tensor, batch: TokenBatch) -> Tensor:
        """Values as log-probabilities, ``log sigmoid``, whose sum does not cancel out."""
        return functional.logsigmoid(output).masked_fill(~batch.loss_mask, 0.0)

    def reference_probe_values(self, plain: nn.Module, tokens: Tensor, inputs: Tensors) -> Tensor:
        """The same of each token but the last."""
        outputs: list[Tensor] = []
        handle = getattr(plain, HEAD).register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
        with self.autocast():
            plain(input_ids=tokens[None], use_cache=False, **inputs)
        handle.remove()
        return functional.logsigmoid(outputs[0][0, :-1, 0].float())

    @contextmanager
    def probed(self) -> Iterator[None]:
        """Inside, the head has random weights: of one that is zero all values are right."""
        name = f"{HEAD}.weight"
        shards = Shards(self.trained, self.mesh, {name: all_parameters(self.trained)[name]})
        shard = local(shards.parameters[name].detach())
        before = shard.clone()
        shard.copy_(shards.shard(name, random_head(shards.shapes[name][1], 0).to(shard.device)))
        try:
            yield
        finally:
            local(all_parameters(self.trained)[name].detach()).copy_(before)

    def plain_with(self, weights: dict[str, Tensor]) -> nn.Module:
        """As ``PackedModel.plain_with``; the head is trained beside adapters, too."""
        module = super().plain_with(weights)
        getattr(module, HEAD).requires_grad_(True)
        return module

    def save_export(self, folder: Path, weights: dict[str, Tensor], merge: bool = False) -> None:
        """Writes model and tokenizer as ``AutoModelForSequenceClassification`` loads them by itself.

        Args:
            folder: where to.
            weights: whole weights by the names of the plain module, adapters included; emptied.
            merge: adapters are always merged, since they hold no head.
        """
        plain = build_on_meta(self._build)
        if adapters := self._adapters():
            whole = build_on_meta(self._build)
            for name, adapter in adapters.items():
                whole.add_adapter(adapter, name)
            weights = merge_adapters(whole, weights)
        dtype = self.autocast_dtype or torch.float32
        stay = float32_names(plain, self.source)
        for name in weights.keys() - stay:
            if weights[name].dtype == torch.float32:
                weights[name] = weights[name].to(dtype)
        save_tokenizer(self.tokenizer, folder, keeps_pad=True)
        give_weights(plain, weights)
        plain.config.dtype = dtype
        plain.save_pretrained(folder)

    def _check(self, mesh: Mesh, config: ParallelConfig) -> None:
        super()._check(mesh, config)
        check_scalar_settings(mesh, config)

    def __call__(self, batch: TokenBatch) -> Tensor:
        """The forward pass: values, float32 ``[B, T]``, of a micro-batch that ``place_batch`` has placed."""
        assert not batch.media, "build_scalar_model makes no model that sees"

        def compute_values(input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
            """Values of tokens ``[B, T]``, float32 ``[B, T, 1]``."""
            pooled = self._run_module(input_ids, position_ids, None).logits
            values, self._values = self._values, None
            return values + 0.0 * pooled.sum()  # fsdp waits for the gradient of what a module returns

        with self.autocast():
            if self.row_layout.rows == "documents":
                values = forward_per_document(compute_values, batch, self.mesh, self.row_layout.same_length)
            else:
                values = compute_values(batch.input_ids, batch.position_ids)
        return values[..., 0]

    def _read(self, hidden: Tensor) -> Tensor:
        """The head's own forward pass, of ``[B, T, H]``; transformers' module keeps one token of each row."""
        with torch.autocast(hidden.device.type, enabled=False):
            self._values = functional.linear(hidden.float(), self._head.weight.float())
        return self._values


def build_scalar_model(
    config: LanguageModelConfig, train: Any, head: Literal["random", "zero"] = "random"
) -> ScalarModel:
    """Loads or makes a model with a scalar head, and makes what is trained trainable: all of it, or adapters and the
    head. A folder of a causal model gets a new head; one of a classifier of sequences with one output has one.

    Args:
        config: the model section.
        train: the train section, see ``build_language_model``.
        head: of a new one; random: normal with variance 1 / (H + 1) for a hidden width of H, drawn from ``train.seed``.

    Raises:
        ConfigError: as ``build_language_model``; or when transformers has no such classifier of this kind of model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    described = read_model_config(config)
    causal = AutoModelForCausalLM._model_mapping.get(type(described), None)
    refuse_router_loss(causal, described, where_described(config))
    check_classifier(described, config.trust_remote_code)
    tokenizer = build_tokenizer(config)
    facts_of(tokenizer).appends_end = False
    is_new = not any(str(name).endswith("ForSequenceClassification") for name in described.architectures or ())
    described = copy.deepcopy(described)
    described.num_labels = 1
    if is_new or described.get_text_config().pad_token_id is None:
        described.get_text_config().pad_token_id = tokenizer.pad_token_id

    def finish(module: nn.Module) -> None:
        check_head(module)
        if is_new:
            set_head(module, head, train.seed)

    other_keys = {"missing_keys": (f"{HEAD}.",), "unexpected_keys": OUTPUT_LAYERS} if is_new else {}
    settings = (AutoModelForSequenceClassification, config.lora is None, finish, other_keys)
    module, make = build_module(config, train, described, *settings)
    if is_new and config.model_path is not None:
        _expect_no_head(module, head, train.seed)
    check_vocabulary(module, tokenizer)
    if config.lora is not None:
        module.requires_grad_(False)
        add_lora(module, config.lora, language_targets(module), train.seed)
        getattr(module, HEAD).float().requires_grad_(True)
    return ScalarModel(module, tokenizer, DTYPES[train.mixed_precision], make, source_of(config))


def find_scored_tokens(batch: TokenBatch, pad_token_id: int) -> Tensor:
    """Whether each token is the last of its document that is not the padding token, bool ``[B, T]``.

    There transformers' own module reads the output of a document. A document of padding tokens alone has its first.
    """
    input_ids, document_ids = batch.input_ids.flatten(), batch.document_ids.flatten()
    is_scored = torch.zeros_like(input_ids, dtype=torch.bool)
    for number, length in enumerate(batch.document_lengths):
        start = int((document_ids == number).nonzero()[0])
        tokens = (input_ids[start : start + length] != pad_token_id).nonzero()
        is_scored[start + (int(tokens[-1]) if len(tokens) else 0)] = True
    return is_scored.view_as(batch.input_ids)


def check_scalar_settings(mesh: Mesh, config: ParallelConfig) -> None:
    """Raises ConfigError for settings that no model with a scalar head can be trained with."""
    if mesh.layout.pp > 1:
        raise ConfigError("a model with a scalar head is not cut into stages: set train.pipeline_parallel_size to 1")
    if getattr(config, "chunked_loss", False):
        raise ConfigError("train.chunked_loss is for logits, and a scalar head makes none: set it to false")


def check_classifier(described: Any, trust_remote_code: bool) -> None:
    """Raises ConfigError when transformers has no classifier of sequences for such a configuration."""
    from transformers import AutoModelForSequenceClassification

    known = AutoModelForSequenceClassification._model_mapping.get(type(described), None)
    if known is None and not trust_remote_code:
        raise ConfigError(
            f"transformers has no sequence classification for models of type {described.model_type}, which a scalar "
            "head is: take another model"
        )


def check_head(module: nn.Module) -> None:
    """Raises ConfigError when a module of transformers has not the head that all its decoders have."""
    head = getattr(module, HEAD, None)
    if not isinstance(head, nn.Linear) or head.bias is not None or head.out_features != 1:
        raise ConfigError(
            f"{type(module).__name__} has no linear layer {HEAD!r} with one output and without bias, which a scalar "
            "head is: take another model"
        )


@torch.no_grad()
def set_head(module: nn.Module, head: Literal["random", "zero"], seed: int) -> None:
    """Gives a module a new head; one on meta stays there."""
    weight = getattr(module, HEAD).weight
    if not weight.is_meta:
        weight.copy_(random_head(weight.shape[1], seed) if head == "random" else torch.zeros_like(weight))


def _expect_no_head(module: nn.Module, head: Literal["random", "zero"], seed: int) -> None:
    """Before a folder without a head is read into a module on meta: the head is real, and need not be there."""
    weight = getattr(module, HEAD).weight
    if weight.is_meta:
        getattr(module, HEAD).weight = nn.Parameter(torch.empty_like(weight, device="cpu"))
        set_head(module, head, seed)
        module._keys_to_ignore_on_load_missing = [rf"^{HEAD}\."]
        module._keys_to_ignore_on_load_unexpected = [rf"^{re.escape(name)}" for name in OUTPUT_LAYERS]


def random_head(width: int, seed: int) -> Tensor:
    """float32 ``[1, width]``, normal with variance ``1 / (width + 1)``."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, width, generator=generator) / math.sqrt(width + 1)
