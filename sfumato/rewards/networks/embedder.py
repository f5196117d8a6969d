"""Embeddings of images and texts by models of transformers, and the aesthetic predictor's head on them."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from sfumato.rewards.networks.folder import (
    CutTexts,
    Network,
    assign_tensors,
    check_folder,
    check_model_type,
    iterate_tensors,
    load_image_processor,
    load_model,
    load_once,
    load_tokenizer,
    loader_of,
)
from sfumato.rewards.networks.pixel_preparation import normalise_pixels, prepare_like

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

IMAGE_MODELS = ("clip", "siglip", "dinov2")
PIXEL_MEAN = (0.48145466, 0.4578275, 0.40821073)
PIXEL_STD = (0.26862954, 0.26130258, 0.27577711)
"""Of CLIP's training images, by which pixels in 0 to 1 are normalised."""


class Embedder(Network):
    """A model that embeds images and, once it has a ``tokenizer``, texts."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Raises ConfigError when the folder holds no model of ``IMAGE_MODELS``."""
        from transformers import AutoModel

        super().__init__(device, dtype)
        self.tokenizer: PreTrainedTokenizerFast | None = None
        self.cut_texts = CutTexts()
        self.model_type = check_model_type(folder, IMAGE_MODELS)
        self.processor = load_image_processor(folder)
        self.model: Any = load_model(AutoModel, folder, dtype, device)  # one of three classes without a common base

    @property
    def scale(self) -> torch.Tensor:
        """What CLIP multiplies cosines with, float32 ``[]``; 100 in OpenAI's models."""
        return self.model.logit_scale.float().exp()

    def images(self, images: list[np.ndarray], whole: bool = False) -> torch.Tensor:
        """Embeddings of uint8 [H, W, 3] images, float32 [B, D] of length 1.

        Args:
            images: prepared as the folder's image processor says, which cuts out the middle square in CLIP.
            whole: fit them whole instead, as ``fit_whole`` does.
        """
        if whole:
            size = self.model.config.vision_config.image_size
            pixels = torch.stack([fit_whole(image, size) for image in images])
        else:
            pillow = [Image.fromarray(image) for image in images]
            pixels = self.processor(images=pillow, return_tensors="pt").pixel_values
        return self._embed_pixels(pixels)

    def pixels(self, pixels: torch.Tensor, whole: bool = False) -> torch.Tensor:
        """As ``images`` for float32 pixels ``[B, 3, H, W]`` from 0 to 1, to which gradients flow."""
        if whole:
            size = self.model.config.vision_config.image_size
            return self._embed_pixels(torch.stack([fit_pixels_whole(picture, size) for picture in pixels]))
        return self._embed_pixels(prepare_like(self.processor, pixels))

    def _embed_pixels(self, prepared: torch.Tensor) -> torch.Tensor:
        embed = self.model if self.model_type == "dinov2" else self.model.get_image_features
        features = embed(pixel_values=prepared.to(self.device, self.dtype)).pooler_output
        return torch.nn.functional.normalize(features.float(), dim=-1)

    def texts(self, texts: list[str]) -> torch.Tensor:
        """Embeddings of texts, cut off at the model's number of tokens (77), float32 [B, D] of length 1."""
        assert self.tokenizer is not None, "an embedder of images alone has no tokenizer"
        # padded to the full length, as CLIP was trained
        length = self.model.config.text_config.max_position_embeddings
        self.cut_texts.look(self.tokenizer, texts, length)
        tokens = self.tokenizer(texts, padding="max_length", truncation=True, max_length=length, return_tensors="pt")
        features = self.model.get_text_features(
            input_ids=tokens.input_ids.to(self.device), attention_mask=tokens.attention_mask.to(self.device)
        )
        return torch.nn.functional.normalize(features.pooler_output.float(), dim=-1)

    def cosines(self, images: list[np.ndarray], texts: list[str], whole: bool = False) -> torch.Tensor:
        """Cosine of each image with its text, float32 [B]; ``whole`` as for ``images``."""
        return (self.images(images, whole) * self.texts(texts)).sum(dim=-1)

    def pixel_cosines(self, pixels: torch.Tensor, texts: Sequence[str], whole: bool = False) -> torch.Tensor:
        """As ``cosines`` for pixels as in ``pixels``, to which gradients flow."""
        with torch.no_grad():
            embedded_texts = self.texts(list(texts))
        return (self.pixels(pixels, whole) * embedded_texts).sum(dim=-1)


def fit_whole(image: np.ndarray, size: int) -> torch.Tensor:
    """The whole image, padded with black to a square, with CLIP's normalisation, as HPSv2's package prepares images.

    Args:
        image: uint8 [H, W, 3].
        size: in pixels.

    Returns:
        Float32 [3, size, size].
    """
    return fit_pixels_whole(torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255, size)


def fit_pixels_whole(pixels: torch.Tensor, size: int) -> torch.Tensor:
    """As ``fit_whole`` for float32 pixels ``[3, H, W]`` from 0 to 1, to which gradients flow."""
    sides = pixels.shape[1:]
    scale = size / max(sides)
    height, width = (round(side * scale) for side in sides)
    if (height, width) != tuple(sides):
        target = {"size": (max(height, 1), max(width, 1)), "mode": "bicubic", "antialias": True}
        pixels = torch.nn.functional.interpolate(pixels[None], **target)[0]
    rows, columns = (size - side for side in pixels.shape[1:])
    pixels = torch.nn.functional.pad(pixels, (columns // 2, columns - columns // 2, rows // 2, rows - rows // 2))
    return normalise_pixels(pixels[None], PIXEL_MEAN, PIXEL_STD)[0]


load_embedder = loader_of(Embedder)
"""One for all rewards that use it."""


@load_once
def load_clip(folder: str, device: str, dtype: str) -> Embedder:
    """The embedder of a folder with a CLIP model, with its tokenizer. Raises ConfigError for another model."""
    check_model_type(Path(folder), ("clip",))
    # the embedder is shared with rewards of images alone, which load it without a tokenizer
    tokenizer = load_tokenizer(Path(folder))
    embedder = load_embedder(folder, device, dtype)
    embedder.tokenizer = tokenizer
    return embedder


WIDTHS = (1024, 128, 64, 16, 1)


class ScoreHead(nn.Module):
    """Features [B, D] to scores [B]. The names of its weights are those of the published files."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        places = (0, 2, 4, 6, 7)  # the published stack has dropout in between
        self.layers = nn.ModuleDict()
        for place, inputs, outputs in zip(places, (num_features, *WIDTHS), WIDTHS, strict=False):
            self.layers[str(place)] = nn.Linear(inputs, outputs)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            features = layer(features)
        return features.squeeze(-1)


def build_score_head(tensors: Mapping[str, torch.Tensor], num_features: int, folder: Path) -> ScoreHead:
    """A frozen float32 head with these weights. Raises ConfigError when their names or shapes do not fit."""
    return assign_tensors(ScoreHead(num_features), {name: tensor.float() for name, tensor in tensors.items()}, folder)


HEAD_FILE = "aesthetic.safetensors"


@dataclasses.dataclass(frozen=True)
class AestheticNetwork:
    """The embedder may belong to other rewards, too; whoever uses it holds its lock."""

    embedder: Embedder
    head: ScoreHead
    lock: threading.Lock


@load_once
def load_aesthetic(folder: str, device: str, dtype: str) -> AestheticNetwork:
    """The network of a folder. Raises ConfigError when its CLIP model or its head is missing or does not fit."""
    check_model_type(Path(folder), ("clip",))
    check_folder(Path(folder), HEAD_FILE)
    embedder = load_embedder(folder, device, dtype)
    tensors = dict(iterate_tensors(Path(folder), HEAD_FILE))
    head = build_score_head(tensors, embedder.model.config.projection_dim, Path(folder))
    return AestheticNetwork(embedder, head.to(embedder.device), embedder.lock)
