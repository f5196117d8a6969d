"""Operations that a model itself needs for a batch, from which model FLOPs utilisation follows (arXiv 2204.02311).

A product of matrices ``[m, k] [k, n]`` counts 2 m k n. Everything else (norms, activations, softmax, rotations) is left
out, and so is what is computed twice to save memory: recomputed blocks, logits in chunks, flash attention's scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from torch import nn

from sfumato.data.media.vision import ImageReader, Vision
from sfumato.data.text.document_cost import SightedCost
from sfumato.errors import ConfigError
from sfumato.models.estimate.sound_flops import sound_flops
from sfumato.parallel.expert import find_experts, has_experts

TOP_K = ("num_experts_per_tok", "top_k_experts", "moe_topk", "moe_top_k")
"""Names of the number of experts that a token goes to, in configurations."""


CLASS_TOKENS = ("cls_token", "class_embedding")
"""Names of the weight that encoders put beside the patches of each tile."""

DRAWS = ("flow_head", "vqmodel", "generation_embeddings", "generation_aligner", "generation_head")
"""Names of parts that draw, of models put together here and of Janus, which no token passes, and no image seen."""


class FlopCount:
    """Operations of a causal transformers model on documents of given lengths.

    Matrices: every linear layer, router and output layer once for each token, of the experts those that a token goes
    to. Attention: exactly the pairs of a token with itself and those before it in its document, within the window of
    layers that have one; L tokens make L (L + 1) / 2 pairs of ``2 heads (query width + value width)`` operations. The
    state of linear attention and convolutions are not counted.
    """

    def __init__(self, model: nn.Module, vision: Vision | None = None) -> None:
        """
        Args:
            model: before ``parallelize``, adapters included; its weights may be on meta.
            vision: of a model that sees, whose encoder is counted apart, see ``EncoderFlops``.

        Raises:
            ConfigError: when it has experts, but does not say how many a token goes to.
        """
        encoder = {} if vision is None else encoder_modules(model)
        draws = [module for name, module in model.named_modules() if name.rpartition(".")[2] in DRAWS]
        self.trained_weights, self.frozen_weights = _matrix_weights(model, [*encoder.values(), *draws])
        self._output = _output_weights(model)
        self.attention = _attention_by_window(model, [*encoder.values(), *draws])
        """Operations for a pair of tokens in all layers together that have the same window."""
        self.encoder = None if vision is None else EncoderFlops(encoder, vision.reader)
        self.sight = None if vision is None else SightedCost(vision, self.encoder.training)
        """What images cost, for the loader."""

    def of_document(self, length: int) -> int:
        """Operations of a forward and a backward pass of a document, without its images."""
        return self.training([length])

    @property
    def active_weights(self) -> int:
        """Weights of matrices that one token is multiplied with."""
        return self.trained_weights + self.frozen_weights

    def forward(
        self, lengths: Iterable[int], num_outputs: int | None = None, image_shapes: Iterable[np.ndarray] = ()
    ) -> int:
        """Operations of a forward pass.

        Args:
            lengths: tokens of each document; padding does not count.
            num_outputs: tokens of which logits are needed: those in the loss mask; None is all.
            image_shapes: ``Images.shapes`` of documents with images, of a model that sees.
        """
        lengths = list(lengths)
        matrices = 2 * self.active_weights * sum(lengths)
        matrices -= 2 * self._output.numel * _without_output(lengths, num_outputs)
        return matrices + self._attention(lengths) + sum(self.encoder.forward(shapes) for shapes in image_shapes)

    def training(
        self, lengths: Iterable[int], image_shapes: Iterable[np.ndarray] = (), num_outputs: int | None = None
    ) -> int:
        """Operations of a forward and a backward pass.

        The backward pass has a product for the gradient of each layer's input and one for that of its weight, which
        frozen weights (LoRA) have not.

        Args:
            lengths: tokens of each document.
            image_shapes: ``Images.shapes`` of documents with images, of a model that sees.
            num_outputs: tokens of which logits are needed: those in the loss mask; None is all.
        """
        lengths = list(lengths)
        matrices = (6 * self.trained_weights + 4 * self.frozen_weights) * sum(lengths)
        matrices -= (6 if self._output.is_trained else 4) * self._output.numel * _without_output(lengths, num_outputs)
        return matrices + 3 * self._attention(lengths) + sum(self.encoder.training(shapes) for shapes in image_shapes)

    def _attention(self, lengths: list[int]) -> int:
        return sum(
            flops * causal_pairs(length, window) for window, flops in self.attention.items() for length in lengths
        )


class EncoderFlops:
    """Operations of an image encoder, with what brings its output into a language model.

    Layers before the list of blocks work on each patch, the blocks on these and on a class token where there is one,
    and layers behind them (a merger, a projector) on each token of the language model. Attention: all pairs within a
    frame or tile, or within a window of it where the encoder has windows.
    """

    def __init__(self, modules: Mapping[str, nn.Module], reader: ImageReader) -> None:
        """Args are the encoder's modules by name, and the reader of its images."""
        modules = dict(modules)
        tower = modules.pop("audio_tower", None)
        self.sound = None if tower is None else sound_flops(tower, modules)
        self.tokens_per_patch, self.filled_to = reader.tokens_per_patch, reader.filled_to
        self.of_patch, self.of_place, self.of_token = ({True: 0, False: 0} for _ in range(3))
        """Weights that a patch, a place in the blocks, and a token is multiplied with: trained, and frozen."""
        self.windows: dict[int | None, int] = {}
        """Operations for a pair of places in all layers together that have windows of the same edge, in patches."""
        self.extra, self.is_trained = 0, False
        for module in modules.values():
            self._count(module)

    def forward(self, shapes: np.ndarray) -> int:
        """Operations of a forward pass over images of these ``Images.shapes``."""
        matrices = sum(
            count * (weights[True] + weights[False]) for count, weights in zip(*self._matrices(shapes), strict=True)
        )
        return round(2 * matrices) + self._attention(shapes) + self._sound(shapes, False)

    def _sound(self, shapes: np.ndarray, training: bool) -> int:
        if self.sound is None:
            return 0
        frames = [int(frames) for frames, rows, _ in shapes if rows == 0]
        return sum(map(self.sound.training if training else self.sound.forward, frames))

    def training(self, shapes: np.ndarray) -> int:
        """Operations of a forward and a backward pass; an encoder of which nothing is trained has no backward pass."""
        heard = self._sound(shapes, True)
        if not self.is_trained:
            return self.forward(shapes) - self._sound(shapes, False) + heard
        tower_is_trained = bool(self.of_patch[True] or self.of_place[True])
        behind = 4 if tower_is_trained else 2  # nothing is sent back through a tower that is frozen as a whole
        matrices = sum(
            count * (6 * weights[True] + behind * weights[False])
            for count, weights in zip(*self._matrices(shapes), strict=True)
        )
        return round(matrices) + self._attention(shapes) * (3 if tower_is_trained else 1) + heard

    def _matrices(self, shapes: np.ndarray) -> tuple[list[float], list[dict[bool, int]]]:
        """How many patches, places and tokens there are, and the weights of each."""
        parts, rows, columns = np.asarray(shapes, np.int64).reshape(-1, 3).T
        seen = parts * rows * columns
        patches = int((parts * (rows > 0)).sum()) * self.filled_to if self.filled_to else int(seen.sum())
        places = patches + self.extra * int((parts * (rows > 0)).sum())
        tokens = int(seen.sum()) * self.tokens_per_patch
        return [patches, places, tokens], [self.of_patch, self.of_place, self.of_token]

    def _attention(self, shapes: np.ndarray) -> int:
        total = 0
        for edge, flops in self.windows.items():
            for parts, rows, columns in np.asarray(shapes, np.int64).tolist():
                if edge is None:
                    places = (self.filled_to or rows * columns) + self.extra if rows else 0
                    total += flops * parts * places**2
                else:
                    total += flops * parts * _squares(rows, edge) * _squares(columns, edge)
        return total

    def _count(self, tower: nn.Module) -> None:
        blocks = [name for name, module in tower.named_modules() if isinstance(module, nn.ModuleList)]
        block_names = [name for name in blocks if any(_heads(part) for part in tower.get_submodule(name).modules())]
        names = [name for name, _ in tower.named_parameters(remove_duplicate=False)]
        self.extra += any(name.rpartition(".")[2] in CLASS_TOKENS for name in names)
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
            if heads := _heads(module):
                number = int(name.rpartition(".")[0].rpartition(".")[2]) if ".blocks." in f".{name}" else 0
                edge = _window_edge(module.config, number)
                self.windows[edge] = self.windows.get(edge, 0) + 4 * heads


def encoder_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The parts of a transformers model beside its decoder and its output layer, by name."""
    decoder, base = model.get_decoder(), model.base_model
    excluded_ids = {id(decoder), id(model.get_output_embeddings())}
    modules = {
        name: module for name, module in base.named_children() if id(module) not in excluded_ids and name not in DRAWS
    }
    return {name: module for name, module in modules.items() if any(True for _ in module.parameters())}


def _heads(module: nn.Module) -> int:
    """The width of all heads of an encoder's attention together; 0 of any other module."""
    width, config = getattr(module, "head_dim", None), getattr(module, "config", None)
    if not width or config is None:
        return 0
    return (getattr(module, "num_heads", None) or getattr(config, "num_attention_heads", 0)) * width


def _window_edge(config: Any, number: int) -> int | None:
    """Patches of the edge of the windows of a block; None where it has none."""
    full = getattr(config, "fullatt_block_indexes", None)
    if full is None or number in full:
        return None
    return config.window_size // config.patch_size


def _squares(size: int, edge: int) -> int:
    """The sum of the squares of the sizes of windows along an axis."""
    return size // edge * edge**2 + (size % edge) ** 2


def causal_pairs(length: int, window: int | None = None) -> int:
    """Pairs of a token with itself and each before it, at most ``window`` with itself."""
    if window is None or window >= length:
        return length * (length + 1) // 2
    return window * (window + 1) // 2 + (length - window) * window


class _Output(NamedTuple):
    """The matrix that makes logits."""

    numel: int
    is_trained: bool


def _matrix_weights(model: nn.Module, without: Iterable[nn.Module] = ()) -> tuple[int, int]:
    """Trained and frozen weights that a token is multiplied with: matrices that are no embeddings, shares of experts.

    A weight that embedding and output layer share counts as the output layer's.
    """
    experts = {}
    for name, layer_experts in find_experts(model, "").items() if has_experts(model) else ():
        experts[f"{name.partition('.base_layer')[0]}."] = _top_k(layer_experts), layer_experts.down_proj.shape[0]
    counts = {True: 0, False: 0}
    left_out = {id(inner) for module in without for inner in module.modules()}
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) or id(module) in left_out:
            continue
        share = next((share for prefix, share in experts.items() if f"{name}.".startswith(prefix)), (1, 1))
        for parameter in module.parameters(recurse=False):
            if parameter.ndim == 2 or (parameter.ndim == 3 and share != (1, 1)):
                counts[parameter.requires_grad] += parameter.numel() * share[0] // share[1]
    return counts[True], counts[False]


def _without_output(lengths: list[int], num_outputs: int | None) -> int:
    """Tokens that do not reach the output layer."""
    return 0 if num_outputs is None else sum(lengths) - num_outputs


def _output_weights(model: nn.Module) -> _Output:
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    weight = getattr(head, "weight", None)
    return _Output(0, False) if weight is None else _Output(weight.numel(), weight.requires_grad)


def _top_k(experts: nn.Module) -> int:
    for name in TOP_K:
        if getattr(experts.config, name, None):
            return int(getattr(experts.config, name))
    raise ConfigError(
        f"cannot count the operations of {type(experts).__name__}: its configuration has none of {', '.join(TOP_K)}"
    )


def _attention_by_window(model: nn.Module, without: Iterable[nn.Module] = ()) -> dict[int | None, int]:
    flops_by_window: dict[int | None, int] = {}
    left_out = {id(inner) for module in without for inner in module.modules()}
    for module in model.modules():
        if id(module) in left_out:
            continue
        if not (hasattr(module, "layer_idx") and hasattr(module, "config") and hasattr(module, "scaling")):
            continue
        config = module.config
        head_width = getattr(module, "head_dim", None) or config.hidden_size // config.num_attention_heads
        query = getattr(module, "qk_head_dim", None) or head_width
        value = getattr(module, "v_head_dim", None) or query
        window = getattr(module, "sliding_window", None)
        flops_by_window[window] = flops_by_window.get(window, 0) + 2 * config.num_attention_heads * (query + value)
    return flops_by_window
