"""A causal language model of transformers that can be trained on any mesh."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from sfumato.algorithms.device import to_device
from sfumato.config.sections import TrainConfig
from sfumato.data.media.document_media import MultimodalInputs, join_media
from sfumato.data.text.token_batch import TokenBatch
from sfumato.errors import ConfigError
from sfumato.models.estimate.flops import DRAWS
from sfumato.models.language.document_rows import forward_per_document
from sfumato.models.language.output_layer import OutputLayer
from sfumato.models.language.packed_model import PackedModel, Tensors
from sfumato.models.language.scores import RouterLogits, TokenScores
from sfumato.models.language.source_folder import float32_names
from sfumato.parallel.loss import CHUNK_TOKENS, IGNORED
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.parallelize import keep_gathered

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from sfumato.data.media.vision import Vision
    from sfumato.models.language.router_loss import RouterLoss
    from sfumato.models.language.streamed_export import TransformersExport

WORTH_PICKING = 0.9
"""Logits are computed for the tokens with a label alone where these are less than this fraction of all; picking them
costs a copy."""


class LanguageModel(PackedModel[TokenScores]):
    """A causal transformers model with its tokenizer. The transformers modules are used as they are."""

    output_name: ClassVar[tuple[str, str]] = ("a log-probability", "log-probabilities")
    can_be_served: ClassVar[bool] = True
    """Whether vLLM and SGLang can generate with such a model."""

    def __init__(
        self,
        module: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        autocast_dtype: torch.dtype | None,
        build: Callable[[], PreTrainedModel],
        source: Path | None = None,
        chunked: bool = False,
        vision: Vision | None = None,
    ) -> None:
        """Use ``build_language_model``.

        Args:
            module, tokenizer, autocast_dtype, build, source: as for ``PackedModel``.
            chunked: compute logits for some tokens at a time (``train.chunked_loss``).
            vision: prepares the images of a model that sees.
        """
        super().__init__(module, tokenizer, autocast_dtype, build, source)
        self.vision = vision
        self.vocabulary_size: int = module.config.get_text_config().vocab_size
        """The number of different tokens that it may draw, perhaps more than the tokenizer has."""
        self._output_layer = OutputLayer(module)
        self._chunked = chunked
        self.router_loss: RouterLoss | None = None
        """The auxiliary loss of routers, where the model is trained with it, too."""

    def __call__(self, batch: TokenBatch) -> TokenScores:
        """The forward pass: scores of the tokens of a micro-batch that ``place_batch`` has placed.

        With ``chunked_loss`` the module returns its last hidden states. The scores then make logits of some tokens at a
        time, with the output layer that was taken out of the module.
        """
        lm_head, make_logits = None, None  # of the scores where the module ends with hidden states
        router_calls: list[tuple[Tensor, ...]] = []
        places: list[Tensor] = []
        if self._chunked:
            lm_head, make_logits = self._output_layer.detach()
            # the loss reads the output layer's weight after the forward pass has ended
            keep_gathered(self.module, torch.is_grad_enabled())

        def compute_output(
            input_ids: Tensor,
            inputs: MultimodalInputs | None = None,
            position_ids: Tensor | None = None,
            **arguments: object,
        ) -> Tensor:
            """Logits, or the last hidden states, of tokens ``[B, T]``."""
            if self.router_loss is not None:
                arguments["output_router_logits"] = torch.is_grad_enabled()
            output = self._run_module(input_ids, position_ids, inputs, **arguments)
            if arguments.get("output_router_logits"):
                router_calls.append(tuple(output.router_logits or ()))
            # without its output layer the module returns hidden states, or what its tail makes of them, as logits
            return self._output_layer.hidden(output.logits) if self._chunked else output.logits

        self._mark_tokens(batch.is_token)
        with self.autocast():
            if self.row_layout.rows == "documents":
                output = forward_per_document(
                    compute_output,
                    batch,
                    self.mesh,
                    self.row_layout.same_length,
                    self._idle_image(),
                    before_call=self._mark_tokens,
                    after_call=places.append,
                )
            else:
                # a model that sees splits the sequence over ranks itself, once image features are in their places
                rows = batch.whole_rows or batch
                inputs = None
                arguments: dict[str, Tensor] = {}
                if rows.modality_ids is not None:
                    inputs = MultimodalInputs(join_media(batch.media), rows.rope_positions, rows.modality_ids)
                if batch.output_columns is not None:
                    arguments["logits_to_keep"] = batch.output_columns
                output = compute_output(rows.input_ids, inputs, rows.position_ids, **arguments)
        router_logits = RouterLogits.join_calls(router_calls, places)
        return TokenScores(output, batch.shape, batch.output_columns, lm_head, make_logits, router_logits)

    def _output_columns(self, batch: TokenBatch) -> Tensor | None:
        """The columns with a label, int64 ``[K]`` on the device; None (all columns) where these are nearly all, or
        where a packed row is not whole on this rank."""
        if "logits_to_keep" not in self._arguments or batch.shape[0] > 1 or self.mesh.size != self.mesh.data_size:
            return None
        if self.row_layout.rows == "documents":
            return None
        columns = batch.labels[0].ne(IGNORED).nonzero()[:, 0]
        if len(columns) >= WORTH_PICKING * batch.shape[1]:
            return None
        return to_device(columns if len(columns) else torch.zeros(1, dtype=torch.int64), self.mesh.device)

    @contextmanager
    def whole_output(self) -> Iterator[None]:
        """Inside, the model's own output layer computes the logits of all tokens at once."""
        chunked = self._chunked
        self._chunked = False
        self._output_layer.put_back()
        try:
            yield
        finally:
            self._chunked = chunked

    def frozen_copy(self) -> LanguageModel:
        """A model with a copy of the weights that needs no gradients; call it before ``parallelize``."""
        module = cast("PreTrainedModel", copy.deepcopy(self.module).requires_grad_(False))
        return LanguageModel(
            module, self.tokenizer, self.autocast_dtype, self._build, self.source, self._chunked, self.vision
        )

    @torch.no_grad()
    def token_log_probs(
        self, batches: Sequence[TokenBatch], reference: bool = False, temperature: float = 1.0
    ) -> list[Tensor]:
        """Log-probabilities of the labels of whole micro-batches, float32 ``[B, T]`` on every rank that shares them.

        Args:
            batches: micro-batches, the same number on every rank.
            reference: compute them with the adapters switched off.
            temperature: divides the logits.
        """
        # without its adapters a model is the reference that it was trained from
        with self.without_adapter() if reference else nullcontext():
            return self.compute_token_values(batches, lambda scores, batch: scores.log_probs(batch.labels, temperature))

    def predictions(self, batches: Sequence[TokenBatch]) -> list[Tensor]:
        """The likeliest next token after each token of whole micro-batches, int64 ``[B, T]`` on the CPU."""
        predictions = self.compute_token_values(batches, lambda scores, _: scores.predictions(), every_token=True)
        return [tokens.cpu() for tokens in predictions]

    @torch.no_grad()
    def label_logits(self, batch: TokenBatch) -> Tensor:
        """Logits of the N tokens that have a label, float32 ``[N, V]``, on the CPU of every rank that shares the batch.

        Not with pipeline parallelism.
        """
        with self.whole_output():
            ((scores, placed),) = self.score([batch])
            logits = scores.logits(placed.loss_mask).cpu()
        if self.mesh.layout.cp == 1:
            return logits
        # each rank holds a chunk near the head and one near the tail: columns give back the order of the sequence
        assert placed.columns is not None
        parts = self.mesh.gather((placed.columns[placed.loss_mask].cpu(), logits), over="cp")
        columns, logits = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
        return logits[columns.argsort()]

    def probe_values(self, output: TokenScores, batch: TokenBatch) -> Tensor:
        """``log p(label)`` of each token in nats."""
        return output.log_probs(batch.labels)

    def reference_probe_values(self, plain: PreTrainedModel, tokens: Tensor, inputs: Tensors) -> Tensor:
        """``log p`` of each token but the first, float32 ``[L - 1]``."""
        with self.autocast():
            logits = plain(input_ids=tokens[None], use_cache=False, **inputs).logits[0]
        # in parts: in float32 the logits of a long document are large
        parts = zip(logits[:-1].split(CHUNK_TOKENS), tokens[1:, None].split(CHUNK_TOKENS), strict=True)
        return torch.cat([part.float().log_softmax(-1).gather(-1, following)[:, 0] for part, following in parts])

    def save_export(self, folder: Path, weights: dict[str, Tensor], merge: bool = False) -> None:
        """Writes a folder that transformers loads without this library, or adapters that peft loads.

        A model trained under bf16 is written in bf16, the precision of its forward passes, except for weights that stay
        float32 (``float32_names``). Biases that the balancer added to routers without a bias of their own go into a
        separate file, ``expert_biases.safetensors``.

        Args:
            folder: where to write.
            weights: whole weights by the names of the plain module, adapters included; the dictionary is emptied.
            merge: write merged weights instead of adapters.
        """
        from sfumato.models.language.model_folder import save_generation_config, save_plain

        plain = self._plain_on_meta()
        self._begin_export(folder, plain)
        if self._adapters():
            from sfumato.models.lora import merge_adapters, save_adapter

            adapted = self._adapted_on_meta()
            if not merge:
                save_adapter(adapted, weights, folder, None if self.source is None else str(self.source))
                save_generation_config(folder, self.source, self.tokenizer)
                return
            weights = merge_adapters(adapted, weights)
        # what the plain module has no place for are the balancer's biases, which transformers would not load
        tensors_of_plain = {**dict(plain.named_parameters(remove_duplicate=False)), **dict(plain.named_buffers())}
        biases = {name: weights.pop(name) for name in [*weights] if name not in tensors_of_plain}
        save_plain(plain, weights, folder, self.autocast_dtype, self.source)
        self._end_export(folder, biases)

    def _begin_export(self, folder: Path, plain: PreTrainedModel) -> None:
        """Writes what comes before the weights, and names in a module's configuration what ends a text."""
        from sfumato.models.language.model_folder import name_ends, save_tokenizer

        if self.vision is not None:
            self.vision.reader.save(folder, self.source)
        save_tokenizer(self.tokenizer, folder)  # after the processor's files, whose chat template it replaces
        name_ends(plain.config, self.tokenizer, self.source is not None)

    def _end_export(self, folder: Path, biases: dict[str, Tensor]) -> None:
        """Writes the settings of ``generate``, and the balancer's biases of routers without biases of their own."""
        from sfumato.models.language.model_folder import save_generation_config

        if biases:
            save_file(biases, folder / "expert_biases.safetensors")
        save_generation_config(folder, self.source, self.tokenizer)

    def streamed_export(self, mesh: Mesh) -> TransformersExport | None:
        """The export of ``save_export`` without adapters, which takes one weight at a time; None where it needs all at
        once. Every rank must call it."""
        if type(self).save_export is not LanguageModel.save_export:
            return None
        from sfumato.models.language.streamed_export import TransformersExport, lay_out, set_dtypes
        from sfumato.models.older_readers import add_older_config_names

        plain = self._plain_on_meta()
        # the first rank alone looks into the folder that was trained
        float32_weights = sorted(float32_names(plain, self.source)) if mesh.is_first else []
        float32_weights = mesh.first(float32_weights, among="world")
        set_dtypes(plain, self.autocast_dtype, float32_weights)
        layout = lay_out(plain)
        if layout is None:
            return None

        def begin(folder: Path) -> None:
            self._begin_export(folder, plain)
            plain.config.dtype = self.autocast_dtype or torch.float32

        def end(folder: Path, biases: dict[str, Tensor]) -> None:
            add_older_config_names(folder)
            self._end_export(folder, biases)

        return TransformersExport(plain, layout, self.autocast_dtype, frozenset(float32_weights), begin, end)

    def _check(self, mesh: Mesh, config: TrainConfig) -> None:
        module = cast("PreTrainedModel", self.module)  # not on the mesh yet
        check_settings(module, mesh, config, self._chunked)
        if self.router_loss is not None:
            from sfumato.models.language.router_loss import check_router_settings

            check_router_settings(mesh.layout, config.compiles(mesh.device.type))
        if self.vision is not None:
            check_multimodal(module, mesh)

    def _from_pipeline(self, logits: Tensor) -> TokenScores:
        return TokenScores(logits, (logits.shape[0], logits.shape[1]))


def check_multimodal(module: PreTrainedModel, mesh: Mesh) -> None:
    """Raises ConfigError for a mesh on which a model that sees cannot be trained."""
    if mesh.layout.tp > 1 and getattr(module.config.get_text_config(), "hidden_size_per_layer_input", 0):
        raise ConfigError(
            f"train.tensor_parallel_size: {type(module).__name__} makes inputs of each layer of its embedding's weight "
            "itself (hidden_size_per_layer_input), which must then be whole: set it to 1"
        )
    if mesh.layout.pp == 1:
        return
    if mesh.layout.cp > 1:
        raise ConfigError(
            "train.pipeline_parallel_size and train.ulysses_parallel_size or context_parallel_size exclude each other "
            "for a model that sees images, whose rows are cut in the first stage: set one side to 1"
        )
    image_makers = [name for name, _ in module.base_model.named_children() if name in DRAWS]
    if image_makers:
        raise ConfigError(
            f"train.pipeline_parallel_size: {type(module).__name__} has parts that draw ({', '.join(image_makers)}), "
            "which no token passes, and where a pipeline's stage would wait for gradients: set it to 1"
        )
    reason = needs_rows_apart(module)
    if reason is not None:
        raise ConfigError(
            f"train.pipeline_parallel_size: {type(module).__name__} {reason}, so that its documents need rows of their "
            "own, which a pipeline's stages do not know: set it to 1"
        )


def needs_rows_apart(module: PreTrainedModel) -> str | None:
    """Why the documents of a model that sees cannot share a row, as the end of a sentence about the model.

    None where nothing in its configuration or signature speaks against it.
    """
    config = module.config.get_text_config()
    layer_types = {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
    if layer_types:
        return f"has layers of {', '.join(sorted(layer_types))}"
    is_bidirectional = getattr(config, "use_bidirectional_attention", None) == "vision"
    if is_bidirectional or "token_type_ids" in inspect.signature(module.forward).parameters:
        return "lets the tokens of an image see each other"
    return None


def check_settings(module: PreTrainedModel, mesh: Mesh, config: TrainConfig, chunked: bool) -> None:
    """Raises ConfigError for settings that this model cannot be trained with.

    Args:
        module: transformers' model.
        mesh: the ranks.
        config: the train section.
        chunked: whether logits are computed for some tokens at a time.
    """
    if mesh.layout.cfg > 1:
        raise ConfigError("train.cfg_parallel_size is for diffusion models; a language model has no guidance")
    if chunked and mesh.layout.pp > 1:
        raise ConfigError("train.chunked_loss takes no stages: set train.pipeline_parallel_size to 1")
    if chunked and not isinstance(module.get_output_embeddings(), nn.Linear):
        raise ConfigError(f"train.chunked_loss needs a linear output layer, which {type(module).__name__} has not")
