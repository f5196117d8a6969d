"""Operations that a model needs for a batch, for model FLOPs utilisation (arXiv 2204.02311).

A product of matrices ``[m, k] [k, n]`` counts 2 m k n. Nothing else counts: neither norms, activations, softmax and
rotations, nor what is computed twice to save memory (recomputed blocks, logits in chunks, flash attention's scores).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
from torch import nn

from sfumato.data.text.document_cost import MediaCost
from sfumato.errors import ConfigError
from sfumato.parallel.expert_modules import find_experts, has_experts

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from sfumato.data.media.vision import MediaProcessor, Vision
    from sfumato.models.estimate.sound_flops import PlaneSoundFlops, SoundFlops, WholeSoundFlops

TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")
"""Names, in configurations, of the number of experts that a token is routed to."""

CLASS_TOKENS = ("cls_token", "class_embedding")
"""Names of the weight that encoders prepend to the patches of each tile."""

DRAWS = ("flow_head", "vqmodel", "generation_embeddings", "generation_aligner", "generation_head")
"""Names of submodules that draw images, in composed models and Janus, and that neither tokens nor input images pass."""


class FlopCount:
    """Operations of a causal transformers model on documents of given lengths.

    Matrices: each token passes every linear layer, router and output layer once, and the experts that it is routed to.
    Attention: the pairs of a token with itself and with those before it in its document, within the window of a layer
    that has one. L tokens make L (L + 1) / 2 pairs, of ``2 heads (query width + value width)`` operations each. The
    state of linear attention, and convolutions, are not counted.
    """

    def __init__(self, model: nn.Module, vision: Vision | None = None) -> None:
        """
        Args:
            model: the model before ``parallelize``, with its adapters; its weights may be on meta.
            vision: of a model that reads images or audio, whose encoder ``EncoderFlops`` counts.

        Raises:
            ConfigError: when the model has experts, and its configuration does not say how many a token is routed to.
        """
        encoder = {} if vision is None else encoder_modules(cast("PreTrainedModel", model))
        draws = [module for name, module in model.named_modules() if name.rpartition(".")[2] in DRAWS]
        self.trained_weights, self.frozen_weights = _matrix_weights(model, [*encoder.values(), *draws])
        self._output = _output_weights(model)
        self.attention = _attention_by_window(model, [*encoder.values(), *draws])
        """Operations for a pair of tokens, by window, in all layers with that window together."""
        self.encoder = None if vision is None else EncoderFlops(encoder, vision.reader)
        self.sight = None if vision is None else MediaCost(vision, self.encoder.training)  # pyright: ignore[reportOptionalMemberAccess]  (None without images)
        """The cost of images, for the loader."""

    def count_document(self, length: int) -> int:
        """Operations of a forward and a backward pass of a document, without its images."""
        return self.training([length])

    @property
    def active_weights(self) -> int:
        """Number of weights of the matrices that one token is multiplied with."""
        return self.trained_weights + self.frozen_weights

    def forward(
        self, lengths: Iterable[int], num_outputs: int | None = None, image_shapes: Iterable[np.ndarray] = ()
    ) -> int:
        """Operations of a forward pass.

        Args:
            lengths: tokens of each document; padding does not count.
            num_outputs: tokens whose logits are needed, that is those in the loss mask; None is all.
            image_shapes: ``MediaRefs.shapes`` of the documents with images.
        """
        lengths = list(lengths)
        matrices = 2 * self.active_weights * sum(lengths)
        matrices -= 2 * self._output.numel * _tokens_without_logits(lengths, num_outputs)
        encoding = sum(self.encoder.forward(shapes) for shapes in image_shapes)  # pyright: ignore[reportOptionalMemberAccess]
        return matrices + self._attention(lengths) + encoding

    def training(
        self, lengths: Iterable[int], image_shapes: Iterable[np.ndarray] = (), num_outputs: int | None = None
    ) -> int:
        """Operations of a forward and a backward pass.

        The backward pass has two products for each layer: one for the gradient of its input, and one for the gradient
        of its weight, unless the weight is frozen (LoRA).

        Args:
            lengths: tokens of each document.
            image_shapes: ``MediaRefs.shapes`` of the documents with images.
            num_outputs: tokens whose logits are needed, that is those in the loss mask; None is all.
        """
        lengths = list(lengths)
        # Per weight and token: 2 in the forward pass, 2 for the input's gradient, 2 for the weight's gradient.
        matrices = (6 * self.trained_weights + 4 * self.frozen_weights) * sum(lengths)
        matrices -= (
            (6 if self._output.is_trained else 4) * self._output.numel * _tokens_without_logits(lengths, num_outputs)
        )
        encoding = sum(self.encoder.training(shapes) for shapes in image_shapes)  # pyright: ignore[reportOptionalMemberAccess]
        return matrices + 3 * self._attention(lengths) + encoding

    def _attention(self, lengths: list[int]) -> int:
        return sum(
            flops * causal_pairs(length, window) for window, flops in self.attention.items() for length in lengths
        )


class EncoderFlops:
    """Operations of an image encoder and of the layers that project its output into a language model.

    Layers before the list of blocks work on patches. Blocks work on places: patches, and a class token if any. Layers
    behind them (a merger, a projector) work on tokens of the language model. Attention: all pairs within a frame
    or tile, or within a window of it if the encoder has windows.
    """

    def __init__(self, modules: Mapping[str, nn.Module], reader: MediaProcessor) -> None:
        """
        Args:
            modules: submodules of the encoder, by name (see ``encoder_modules``).
            reader: the reader of its images.
        """
        modules = dict(modules)
        tower = modules.pop("audio_tower", None)
        self.sound: SoundFlops | PlaneSoundFlops | WholeSoundFlops | None = None
        if tower is not None:
            from sfumato.models.estimate.sound_flops import sound_flops

            self.sound = sound_flops(tower, modules)
        self.tokens_per_patch = reader.tokens_per_patch
        self.filled_to = reader.filled_to
        self.of_patch, self.of_place, self.of_token = ({True: 0, False: 0} for _ in range(3))
        """Number of weights, trained (True) and frozen, that a patch, a place and a token are multiplied with."""
        self.windows: dict[int | None, int] = {}
        """Operations for a pair of places, by edge of the window in patches, in all layers with that window."""
        self.extra = 0
        """Class tokens of a frame or tile."""
        self.is_trained = False
        for module in modules.values():
            self._add_module(module)

    def forward(self, shapes: np.ndarray) -> int:
        """Operations of a forward pass over images of these ``MediaRefs.shapes``."""
        matrices = sum(
            count * (weights[True] + weights[False])
            for count, weights in zip(*self._counts_and_weights(shapes), strict=True)
        )
        return round(2 * matrices) + self._attention(shapes) + self._sound_operations(shapes, False)

    def _sound_operations(self, shapes: np.ndarray, training: bool) -> int:
        """Operations of the encoder of audio, whose shapes have 0 rows."""
        if self.sound is None:
            return 0
        frames = [int(frames) for frames, rows, _ in shapes if rows == 0]
        return sum(map(self.sound.training if training else self.sound.forward, frames))

    def training(self, shapes: np.ndarray) -> int:
        """Operations of a forward and a backward pass; an encoder of which nothing is trained has no backward pass."""
        audio_operations = self._sound_operations(shapes, True)
        if not self.is_trained:
            return self.forward(shapes) - self._sound_operations(shapes, False) + audio_operations
        tower_is_trained = bool(self.of_patch[True] or self.of_place[True])
        per_frozen_weight = 4 if tower_is_trained else 2  # no gradients of inputs in a tower that is frozen as a whole
        matrices = sum(
            count * (6 * weights[True] + per_frozen_weight * weights[False])
            for count, weights in zip(*self._counts_and_weights(shapes), strict=True)
        )
        return round(matrices) + self._attention(shapes) * (3 if tower_is_trained else 1) + audio_operations

    def _counts_and_weights(self, shapes: np.ndarray) -> tuple[list[float], list[dict[bool, int]]]:
        """Numbers of patches, places and tokens of images, and the numbers of weights that each is multiplied with."""
        num_tiles, rows, columns = np.asarray(shapes, np.int64).reshape(-1, 3).T
        num_patches = num_tiles * rows * columns
        patches = int((num_tiles * (rows > 0)).sum()) * self.filled_to if self.filled_to else int(num_patches.sum())
        places = patches + self.extra * int((num_tiles * (rows > 0)).sum())
        tokens = int(num_patches.sum()) * self.tokens_per_patch
        return [patches, places, tokens], [self.of_patch, self.of_place, self.of_token]

    def _attention(self, shapes: np.ndarray) -> int:
        total = 0
        for edge, flops in self.windows.items():
            for num_tiles, rows, columns in np.asarray(shapes, np.int64).tolist():
                if edge is None:
                    places = (self.filled_to or rows * columns) + self.extra if rows else 0
                    total += flops * num_tiles * places**2
                else:
                    total += flops * num_tiles * _sum_of_squares(rows, edge) * _sum_of_squares(columns, edge)
        return total

    def _add_module(self, tower: nn.Module) -> None:
        """Adds the weights and attention layers of a submodule of the encoder."""
        blocks = [name for name, module in tower.named_modules() if isinstance(module, nn.ModuleList)]
        block_names = [
            name for name in blocks if any(_attention_width(part) for part in tower.get_submodule(name).modules())
        ]
        names = [name for name, _ in tower.named_parameters(remove_duplicate=False)]
        self.extra += any(name.rpartition(".")[2] in CLASS_TOKENS for name in names)
        # Submodules come in the order of their definition: what stands before the blocks works on patches.
        weights_of_stage = self.of_patch if block_names else self.of_token
        for name, module in tower.named_modules():
            if isinstance(module, nn.Embedding):
                continue
            is_inside = any(f"{name}.".startswith(f"{block}.") for block in block_names)
            if is_inside:
                weights_of_stage = self.of_place
            elif weights_of_stage is self.of_place:
                weights_of_stage = self.of_token
            is_convolution = isinstance(module, nn.modules.conv._ConvNd)
            for parameter in module.parameters(recurse=False):
                self.is_trained |= parameter.requires_grad
                if parameter.ndim == 2 or (is_convolution and parameter.ndim > 2):
                    weights_of_stage[parameter.requires_grad] += parameter.numel()
            if heads := _attention_width(module):
                number = int(name.rpartition(".")[0].rpartition(".")[2]) if ".blocks." in f".{name}" else 0
                edge = _window_edge(cast("PreTrainedConfig", module.config), number)
                self.windows[edge] = self.windows.get(edge, 0) + 4 * heads


def encoder_modules(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The submodules of a transformers model with weights, other than decoder, output layer and parts that draw."""
    decoder = model.get_decoder()
    base = model.base_model
    excluded_ids = {id(decoder), id(model.get_output_embeddings())}
    modules = {
        name: module for name, module in base.named_children() if id(module) not in excluded_ids and name not in DRAWS
    }
    return {name: module for name, module in modules.items() if any(True for _ in module.parameters())}


def _attention_width(module: nn.Module) -> int:
    """The width of all heads of an attention layer of an encoder together; 0 for other modules."""
    width = getattr(module, "head_dim", None)
    config = getattr(module, "config", None)
    if not width or config is None:
        return 0
    return (getattr(module, "num_heads", None) or getattr(config, "num_attention_heads", 0)) * width


def _window_edge(config: PreTrainedConfig, number: int) -> int | None:
    """The edge, in patches, of the windows of a block of an encoder; None for a block without windows."""
    full_attention_blocks = getattr(config, "fullatt_block_indexes", None)
    if full_attention_blocks is None or number in full_attention_blocks:
        return None
    return config.window_size // config.patch_size


def _sum_of_squares(size: int, edge: int) -> int:
    """The sum of the squares of the lengths of windows along an axis, of which the last may be shorter."""
    return size // edge * edge**2 + (size % edge) ** 2


def causal_pairs(length: int, window: int | None = None) -> int:
    """Number of pairs of a token with itself and the tokens before it, at most ``window`` for each token."""
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


class _Output(NamedTuple):
    """The matrix that makes logits."""

    numel: int
    is_trained: bool


def _matrix_weights(model: nn.Module, without: Iterable[nn.Module] = ()) -> tuple[int, int]:
    """Numbers of trained and of frozen weights that a token is multiplied with.

    These are all matrices but embeddings; of the experts a token passes top-k. A weight that embedding and output layer
    share counts as that of the output layer.

    Args:
        model: the model.
        without: modules that are left out.
    """
    experts = {}  # by prefix of names: experts of a token, and experts of the layer
    for name, layer_experts in find_experts(model, "").items() if has_experts(model) else ():
        experts[f"{name.partition('.base_layer')[0]}."] = (
            _experts_per_token(layer_experts, layer_experts.config),
            layer_experts.down_proj.shape[0],
        )  # pyright: ignore[reportIndexIssue]
    for name, module in model.named_modules():
        # Of Llama 4 and JetMoE, whose stacked matrices do not follow transformers' interface.
        num_experts = getattr(module, "num_experts", None)
        stacked = [weight for weight in module.parameters(recurse=False) if weight.ndim == 3]
        if f"{name}." not in experts and stacked and all(len(weight) == num_experts for weight in stacked):
            config = cast("PreTrainedModel", model).config.get_text_config()
            experts[f"{name}."] = _experts_per_token(module, config), len(stacked[0])
    counts = {True: 0, False: 0}
    excluded_ids = {id(inner) for module in without for inner in module.modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or id(module) in excluded_ids:
            continue
        share = next((share for prefix, share in experts.items() if f"{name}.".startswith(prefix)), (1, 1))
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == 2 or (parameter.ndim == 3 and share != (1, 1)):
                counts[parameter.requires_grad] += parameter.numel() * share[0] // share[1]
    return counts[True], counts[False]


def _tokens_without_logits(lengths: list[int], num_outputs: int | None) -> int:
    """Number of tokens that do not pass the output layer."""
    return 0 if num_outputs is None else sum(lengths) - num_outputs


def _output_weights(model: nn.Module) -> _Output:
    """Size of the output layer; 0 for a model without."""
    head = cast("PreTrainedModel", model).get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)
    return _Output(0, False) if weight is None else _Output(weight.numel(), weight.requires_grad)


def _experts_per_token(experts: nn.Module, config: PreTrainedConfig) -> int:
    """Number of experts that a token is routed to. Raises ConfigError."""
    for name in TOP_K:
        if getattr(config, name, None):
            return int(getattr(config, name))
    raise ConfigError(
        f"cannot count the operations of {type(experts).__name__}: its configuration has none of {', '.join(TOP_K)}"
    )


def _attention_by_window(model: nn.Module, without: Iterable[nn.Module] = ()) -> dict[int | None, int]:
    """Operations of attention for a pair of tokens, by window, in all layers with that window together."""
    flops_by_window: dict[int | None, int] = {}
    excluded_ids = {id(inner) for module in without for inner in module.modules()}
    for module in model.modules():
        if id(module) in excluded_ids:
            continue
        # Falcon's and GPT-J's attention has no ``scaling``; mixers of recurrent layers have neither.
        is_attention = hasattr(module, "scaling") or hasattr(module, "is_causal")
        if not (is_attention and hasattr(module, "layer_idx") and hasattr(module, "config")):
            continue
        config = cast("PreTrainedConfig", module.config)
        # The layers of some models have different numbers of heads, of which the configuration has one or none.
        heads = getattr(module, "num_heads", None) or getattr(module, "num_attention_heads", None)
        heads = cast("int", heads or config.num_attention_heads)
        head_width = getattr(module, "head_dim", None) or config.hidden_size // heads
        query = getattr(module, "qk_head_dim", None) or head_width
        value = getattr(module, "v_head_dim", None) or query
        window = _layer_window(module, config)
        flops_by_window[window] = flops_by_window.get(window, 0) + 2 * heads * (query + value)
    return flops_by_window


def _layer_window(attention: nn.Module, config: PreTrainedConfig) -> int | None:
    """The window of an attention layer; None without one. Some families (Mistral, Phi-3) read it off the configuration
    when they make their masks, and their layers do not have it."""
    if hasattr(attention, "sliding_window"):
        return cast("int | None", attention.sliding_window)
    kinds = getattr(config, "layer_types", None)
    index = cast("int | None", attention.layer_idx)  # a layer that others share (Zamba) has none
    if kinds and (index is None or kinds[index] != "sliding_attention"):
        return None
    return getattr(config, "sliding_window", None)
