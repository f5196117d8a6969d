"""A language model that computes one number for each token, for reward models and critics, trained on any mesh."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from sfumato.config.parallel import ParallelConfig
from sfumato.config.text import LanguageModelConfig
from sfumato.data.text.answer_end import facts_of
from sfumato.data.text.token_batch import TokenBatch
from sfumato.errors import ConfigError
from sfumato.models.language.document_rows import forward_per_document
from sfumato.models.language.model_folder import save_plain, save_tokenizer
from sfumato.models.language.packed_model import PackedModel, Tensors
from sfumato.models.language.parts import (
    DTYPES,
    build_module,
    build_tokenizer,
    check_vocabulary,
    freeze,
    read_model_config,
    source_of,
    where_described,
)
from sfumato.models.language.router_config import refuse_router_loss
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import Shards, all_parameters, local_shard

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

    from sfumato.config.sections import TrainConfig

HEAD = "score"
"""transformers' name of the head of its sequence classifiers."""

OUTPUT_LAYERS = ("lm_head.", "embed_out.")
"""Prefixes of the names of weights that a causal model has in the place of the head."""


class ScalarModel(PackedModel[Tensor]):
    """transformers' sequence classifier with one output, which is read at every token.

    The head has no bias and is computed in float32. transformers' own module reads a document's output at its last
    token that is not the padding token; there, the values are equal.
    """

    output_name: ClassVar[tuple[str, str]] = ("a value", "values")
    exports_merged: ClassVar[bool] = True
    """Adapters alone would lose the head."""

    def __init__(
        self,
        module: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        autocast_dtype: torch.dtype | None,
        build: Callable[[], PreTrainedModel],
        source: Path | None = None,
    ) -> None:
        """Use ``build_scalar_model``; arguments as for ``PackedModel``."""
        super().__init__(module, tokenizer, autocast_dtype, build, source)
        self._head = cast("nn.Linear", getattr(module, HEAD))
        self._head.forward = self._compute_head  # pyright: ignore[reportAttributeAccessIssue]
        self._values: Tensor | None = None
        """The head's output for all tokens in a forward pass; transformers' module returns that of one for each row."""

    @property
    def pad_token_id(self) -> int:
        """The padding token, at which transformers' module reads no output."""
        return self.plain.config.get_text_config().pad_token_id

    def values(self, batches: Sequence[TokenBatch]) -> list[Tensor]:
        """Values of all tokens of whole micro-batches, without gradients and without dropout.

        Args:
            batches: micro-batches, the same number on every rank.

        Returns:
            For each micro-batch float32 ``[B, T]`` on the device, on every rank that shares the micro-batch.
        """
        return self.compute_token_values(batches, lambda values, _: values, every_token=True)

    def probe_values(self, output: Tensor, batch: TokenBatch) -> Tensor:
        """``log sigmoid(value)`` of each token, which is never above 0: unlike those of values, sums do not cancel."""
        return functional.logsigmoid(output).masked_fill(~batch.loss_mask, 0.0)

    def reference_probe_values(self, plain: PreTrainedModel, tokens: Tensor, inputs: Tensors) -> Tensor:
        """``log sigmoid(value)`` of each token but the last, float32 ``[L - 1]``."""
        outputs: list[Tensor] = []
        handle = getattr(plain, HEAD).register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
        with self.autocast():
            plain(input_ids=tokens[None], use_cache=False, **inputs)
        handle.remove()
        return functional.logsigmoid(outputs[0][0, :-1, 0].float())

    @contextmanager
    def probed(self) -> Iterator[None]:
        """Inside, the head has random weights: with a head of zeros no mistake would show in the values."""
        name = f"{HEAD}.weight"
        shards = Shards(self.trained, self.mesh, {name: all_parameters(self.trained)[name]})
        shard = local_shard(shards.parameters[name].detach())
        trained_weight = shard.clone()
        shard.copy_(shards.shard(name, random_head(shards.shapes[name][1], 0).to(shard.device)))
        try:
            yield
        finally:
            local_shard(all_parameters(self.trained)[name].detach()).copy_(trained_weight)

    def plain_with(self, weights: dict[str, Tensor]) -> PreTrainedModel:
        """As ``PackedModel.plain_with``; the head is trained, also beside adapters."""
        module = super().plain_with(weights)
        getattr(module, HEAD).requires_grad_(True)
        return module

    def save_export(self, folder: Path, weights: dict[str, Tensor], merge: bool = False) -> None:
        """Writes a folder that ``AutoModelForSequenceClassification`` loads without this library.

        Args:
            folder: where to write.
            weights: whole weights by the names of the plain module, adapters included; the dictionary is emptied.
            merge: without effect: adapters are always merged, since files of adapters hold no head.
        """
        if self._adapters():
            from sfumato.models.lora import merge_adapters

            weights = merge_adapters(self._adapted_on_meta(), weights)
        save_tokenizer(self.tokenizer, folder, keeps_pad=True)
        save_plain(self._plain_on_meta(), weights, folder, self.autocast_dtype, self.source)

    def _check(self, mesh: Mesh, config: TrainConfig) -> None:
        super()._check(mesh, config)
        check_scalar_settings(mesh, config)

    def __call__(self, batch: TokenBatch) -> Tensor:
        """The forward pass: values, float32 ``[B, T]``, of a micro-batch that ``place_batch`` has placed."""
        assert not batch.media, "build_scalar_model makes no model that sees"

        def compute_values(input_ids: Tensor, position_ids: Tensor | None = None) -> Tensor:
            """Values of tokens ``[B, T]``, float32 ``[B, T, 1]``."""
            pooled = self._run_module(input_ids, position_ids, None).logits
            values, self._values = self._values, None
            assert values is not None
            return values + 0.0 * pooled.sum()  # fsdp waits for the gradient of what a module returns

        self._mark_tokens(batch.is_token)
        with self.autocast():
            if self.row_layout.rows == "documents":
                values = forward_per_document(
                    compute_values, batch, self.mesh, self.row_layout.same_length, before_call=self._mark_tokens
                )
            else:
                values = compute_values(batch.input_ids, batch.position_ids)
        return values[..., 0]

    def _compute_head(self, hidden: Tensor) -> Tensor:
        """The head's forward pass in float32, ``[B, T, 1]`` of hidden states ``[B, T, H]``, whose result is kept."""
        with torch.autocast(hidden.device.type, enabled=False):
            self._values = functional.linear(hidden.float(), self._head.weight.float())
        return self._values


def build_scalar_model(
    config: LanguageModelConfig, train: TrainConfig, head: Literal["random", "zero"] = "random"
) -> ScalarModel:
    """Loads or makes a model with a scalar head. All of it is trained, or with adapters these and the head.

    The folder of a causal model gets a new head; that of a sequence classifier with one output has one.

    Args:
        config: the model section.
        train: the train section, see ``build_language_model``.
        head: weights of a new head: zero, or random, which is normal with variance 1 / (H + 1) for a hidden width of H,
            drawn from ``train.seed``.

    Raises:
        ConfigError: as ``build_language_model``; or when transformers has no sequence classifier of this kind of model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    described = read_model_config(config)
    causal_class = cast("type[PreTrainedModel] | None", AutoModelForCausalLM._model_mapping.get(type(described), None))
    refuse_router_loss(causal_class, described, where_described(config))
    check_classifier(described, config.trust_remote_code)
    tokenizer = build_tokenizer(config)
    facts_of(tokenizer).appends_end = False  # a scalar head reads answers, and teaches no end of them
    is_new = not any(str(name).endswith("ForSequenceClassification") for name in described.architectures or ())
    described = copy.deepcopy(described)
    described.num_labels = 1
    # transformers' classifiers need a padding token, before which they read the output
    if is_new or described.get_text_config().pad_token_id is None:
        described.get_text_config().pad_token_id = tokenizer.pad_token_id

    def finish(module: PreTrainedModel) -> None:
        check_head(module)
        if is_new:
            set_head(module, head, train.seed)

    other_keys = {"missing_keys": (f"{HEAD}.",), "unexpected_keys": OUTPUT_LAYERS} if is_new else {}
    module, make = build_module(
        config, train, described, AutoModelForSequenceClassification, config.lora is None, finish, other_keys
    )
    if is_new and config.model_path is not None:
        _expect_no_head(module, head, train.seed)
    check_vocabulary(module, tokenizer)
    frozen_names = freeze(module, config.freeze)
    if config.lora is not None:
        from sfumato.models.lora import add_lora, language_targets

        module.requires_grad_(False)
        add_lora(module, config.lora, language_targets(module), train.seed)
        # the head is trained in full beside the adapters, in float32 like these
        getattr(module, HEAD).float().requires_grad_(True)
    model = ScalarModel(module, tokenizer, DTYPES[train.mixed_precision], make, source_of(config))
    model.frozen_names = frozen_names
    return model


def find_scored_tokens(batch: TokenBatch, pad_token_id: int) -> Tensor:
    """Finds the tokens at which transformers' own module reads the output of a document.

    It is the last token of each document that is not the padding token, or the first token of a document of padding
    tokens alone.

    Args:
        batch: the micro-batch, in host memory.
        pad_token_id: the padding token.

    Returns:
        bool ``[B, T]``, true at these tokens.
    """
    input_ids, document_ids = batch.input_ids.flatten(), batch.document_ids.flatten()
    is_scored = torch.zeros_like(input_ids, dtype=torch.bool)
    for number, length in enumerate(batch.document_lengths):
        start = int((document_ids == number).nonzero()[0])
        tokens = (input_ids[start : start + length] != pad_token_id).nonzero()
        is_scored[start + (int(tokens[-1]) if len(tokens) else 0)] = True
    return is_scored.view_as(batch.input_ids)


def check_scalar_settings(mesh: Mesh, config: ParallelConfig) -> None:
    """Raises ConfigError for settings with which no model with a scalar head can be trained."""
    if mesh.layout.pp > 1:
        raise ConfigError("a model with a scalar head is not cut into stages: set train.pipeline_parallel_size to 1")
    if getattr(config, "chunked_loss", False):
        raise ConfigError("train.chunked_loss is for logits, and a scalar head makes none: set it to false")


def check_classifier(described: PreTrainedConfig, trust_remote_code: bool) -> None:
    """Raises ConfigError when transformers has no sequence classifier for such a configuration."""
    from transformers import AutoModelForSequenceClassification

    cls = AutoModelForSequenceClassification._model_mapping.get(type(described), None)
    if cls is None and not trust_remote_code:  # the folder's own code may have one
        raise ConfigError(
            f"transformers has no sequence classification for models of type {described.model_type}, which a scalar "
            "head is: take another model"
        )


def check_head(module: nn.Module) -> None:
    """Raises ConfigError when a sequence classifier has not the head that those of transformers' decoders have."""
    head = getattr(module, HEAD, None)
    if not isinstance(head, nn.Linear) or head.bias is not None or head.out_features != 1:
        raise ConfigError(
            f"{type(module).__name__} has no linear layer {HEAD!r} with one output and without bias, which a scalar "
            "head is: take another model"
        )


@torch.no_grad()
def set_head(module: nn.Module, head: Literal["random", "zero"], seed: int) -> None:
    """Sets the weights of a module's head, unless they are on meta."""
    weight = getattr(module, HEAD).weight
    if not weight.is_meta:
        weight.copy_(random_head(weight.shape[1], seed) if head == "random" else torch.zeros_like(weight))


def _expect_no_head(module: PreTrainedModel, head: Literal["random", "zero"], seed: int) -> None:
    """Prepares a module on meta for a folder without a head, which is read later: the head gets its weights now, and
    the folder may lack them and have an output layer instead. Other modules stay as they are."""
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
