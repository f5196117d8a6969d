"""The network of ImageReward, made of transformers' BLIP classes, and its published weights."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from PIL import Image

from sfumato.parallel.weights import build_on_meta
from sfumato.rewards.networks.embedder import PIXEL_MEAN, PIXEL_STD, build_score_head
from sfumato.rewards.networks.folder import (
    CutTexts,
    Network,
    assign_tensors,
    check_folder,
    iterate_tensors,
    load_tokenizer,
    loader_of,
    read_json,
)
from sfumato.rewards.networks.pixel_preparation import normalise_pixels, scale_pixels

if TYPE_CHECKING:
    from transformers import BlipVisionModel
    from transformers.models.blip.modeling_blip_text import BlipTextModel

MEAN = 0.16717362830052426
STD = 1.0333394966054072
MAX_TOKENS = 35
HEAD_WIDTH = 64  # of an attention head, in every published size of the image encoder

VISION_NAMES = (
    (r"^visual_encoder\.cls_token$", "embeddings.class_embedding"),
    (r"^visual_encoder\.pos_embed$", "embeddings.position_embedding"),
    (r"^visual_encoder\.patch_embed\.proj\.", "embeddings.patch_embedding."),
    (r"^visual_encoder\.norm\.", "post_layernorm."),
    (r"^visual_encoder\.blocks\.(\d+)\.norm([12])\.", r"encoder.layers.\1.layer_norm\2."),
    (r"^visual_encoder\.blocks\.(\d+)\.attn\.qkv\.", r"encoder.layers.\1.self_attn.qkv."),
    (r"^visual_encoder\.blocks\.(\d+)\.attn\.proj\.", r"encoder.layers.\1.self_attn.projection."),
    (r"^visual_encoder\.blocks\.(\d+)\.mlp\.", r"encoder.layers.\1.mlp."),
)
UNUSED = "blip.text_encoder.embeddings.position_ids"  # a constant that older files hold


class ImageRewardNetwork(Network):
    """Scores images with their prompts."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Raises ConfigError when the folder lacks a file or a file holds something else."""
        check_folder(folder, "ImageReward.safetensors", "med_config.json")
        super().__init__(device, dtype)
        self.tokenizer = load_tokenizer(folder)
        self.cut_texts = CutTexts()
        tensors = dict(iterate_tensors(folder, "ImageReward.safetensors"))
        vision, text, head = split_tensors(tensors)
        self.vision = _build_vision(vision, folder).to(device, dtype)  # pyright: ignore[reportArgumentType]
        width = self.vision.config.hidden_size
        self.text = _build_text(text, folder, width).to(device, dtype)  # pyright: ignore[reportArgumentType]
        self.head = build_score_head(head, self.text.config.hidden_size, folder).to(device)

    def __call__(self, images: list[np.ndarray], prompts: list[str]) -> torch.Tensor:
        """Scores of uint8 [H, W, 3] images, float32 [B]. Prompts are cut off at 35 tokens."""
        size = cast("int", self.vision.config.image_size)  # not a pair: _build_vision sets it
        return self._score(torch.stack([prepare_pixels(image, size) for image in images]), prompts)

    def pixels(self, pixels: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        """As a call for float32 pixels ``[B, 3, H, W]`` from 0 to 1, to which gradients flow."""
        size = cast("int", self.vision.config.image_size)
        height, width = pixels.shape[-2:]
        shorter = min(height, width)
        scaled = scale_pixels(pixels, size * height // shorter, size * width // shorter)
        top, left = (round((side - size) / 2) for side in scaled.shape[-2:])
        middle = scaled[..., top : top + size, left : left + size]
        return self._score(normalise_pixels(middle, PIXEL_MEAN, PIXEL_STD), prompts)

    def _score(self, prepared: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        pixels = prepared.to(self.device, self.dtype)
        self.cut_texts.look(self.tokenizer, prompts, MAX_TOKENS)
        tokens = self.tokenizer(
            prompts, padding="max_length", truncation=True, max_length=MAX_TOKENS, return_tensors="pt"
        )
        seen = self.vision(pixel_values=pixels).last_hidden_state
        features = self.text(
            input_ids=tokens.input_ids.to(self.device),
            attention_mask=tokens.attention_mask.to(self.device),
            encoder_hidden_states=seen,
            is_decoder=False,  # no causal mask: the text is read, not generated
        ).last_hidden_state[:, 0]
        return (self.head(features.float()) - MEAN) / STD


load_image_reward = loader_of(ImageRewardNetwork)


def prepare_pixels(image: np.ndarray, size: int) -> torch.Tensor:
    """Shorter side scaled to ``size`` (bicubic), the middle cut out, and CLIP's normalisation.

    Args:
        image: uint8 [H, W, 3].
        size: in pixels.

    Returns:
        Float32 [3, size, size].
    """
    height, width = image.shape[:2]
    shorter = min(height, width)
    scaled = Image.fromarray(image).resize(
        (size * width // shorter, size * height // shorter), Image.Resampling.BICUBIC
    )
    left, top = round((scaled.width - size) / 2), round((scaled.height - size) / 2)
    pixels = np.asarray(scaled.crop((left, top, left + size, top + size)), dtype=np.float32) / 255
    mean = np.float32(PIXEL_MEAN)  # pyright: ignore[reportArgumentType]  # of a tuple numpy makes an array
    std = np.float32(PIXEL_STD)  # pyright: ignore[reportArgumentType]
    return torch.from_numpy((pixels - mean) / std).permute(2, 0, 1)


def split_tensors(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Weights of the image encoder, the text encoder and the head, each under the names of its module here.

    BLIP's projections, which the published file holds as well, take no part in the score.
    """
    vision = {}
    text = {}
    head = {}
    for name, tensor in tensors.items():
        if name.startswith("blip.visual_encoder."):
            renamed = name.removeprefix("blip.")
            for pattern, replacement in VISION_NAMES:
                renamed = re.sub(pattern, replacement, renamed)
            vision[renamed] = tensor
        elif name.startswith("blip.text_encoder.") and name != UNUSED:
            text[name.removeprefix("blip.text_encoder.")] = tensor
        elif name.startswith("mlp."):
            head[name.removeprefix("mlp.")] = tensor
    return vision, text, head


def _build_vision(tensors: dict[str, torch.Tensor], folder: Path) -> BlipVisionModel:
    """BLIP's image encoder in the size of its weights."""
    from transformers import BlipVisionConfig, BlipVisionModel

    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    patches = shapes.get("embeddings.patch_embedding.weight", (HEAD_WIDTH, 3, 16, 16))
    positions = shapes.get("embeddings.position_embedding", (1, 197, HEAD_WIDTH))[1]
    # the published files come without a configuration of the image encoder; the shapes of its weights tell its size
    config = BlipVisionConfig(
        hidden_size=patches[0],
        intermediate_size=4 * patches[0],
        num_hidden_layers=sum(name.endswith(".self_attn.qkv.weight") for name in shapes),
        num_attention_heads=patches[0] // HEAD_WIDTH,
        image_size=patches[-1] * math.isqrt(positions - 1),
        patch_size=patches[-1],
        layer_norm_eps=1e-6,
    )
    module = build_on_meta(lambda: BlipVisionModel._from_config(config, attn_implementation="eager"))
    return assign_tensors(cast("BlipVisionModel", module), tensors, folder)


def _build_text(tensors: dict[str, torch.Tensor], folder: Path, width: int) -> BlipTextModel:
    """BLIP's text encoder with cross-attention to image features of this width, as ``med_config.json`` describes it."""
    from transformers import BlipTextConfig
    from transformers.models.blip.modeling_blip_text import BlipTextModel

    described = read_json(folder / "med_config.json")
    fields = {
        "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act",
        "max_position_embeddings", "layer_norm_eps", "pad_token_id",
    }  # fmt: skip
    settings = {key: value for key, value in described.items() if key in fields}
    config = BlipTextConfig(**settings, encoder_hidden_size=width, is_decoder=True)  # a decoder has cross-attention
    config._attn_implementation = "eager"
    module = build_on_meta(lambda: BlipTextModel(config, add_pooling_layer=False))
    return assign_tensors(cast("BlipTextModel", module), tensors, folder)
