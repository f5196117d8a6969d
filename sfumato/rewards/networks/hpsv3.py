"""The network of HPSv3, made of transformers' Qwen2-VL, and its published weights."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from sfumato.rewards.networks.folder import assign_tensors, iterate_tensors, loader_of
from sfumato.rewards.networks.qwen2_vl import (
    INSTRUCTION_FILE,
    PROMPT_FIELD,
    QwenRater,
    build_body,
    format_chat,
    read_instruction,
    scaled_size,
    split_head,
)

REWARD_TOKEN = "<|Reward|>"
WEIGHTS_FILE = "HPSv3.safetensors"
NUM_PIXELS = 256 * 28 * 28


class HpsV3Network(QwenRater):
    """Scores images with their prompts."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Raises ConfigError when the folder lacks a file or a file holds something else."""
        super().__init__(folder, device, dtype, "qwen2_vl", (INSTRUCTION_FILE, WEIGHTS_FILE), (REWARD_TOKEN,))
        self.instruction = read_instruction(folder / INSTRUCTION_FILE, (REWARD_TOKEN,))
        body, head = split_head(iterate_tensors(folder, WEIGHTS_FILE), "rm_head.", device, dtype)
        self.model = build_body(folder, body, (REWARD_TOKEN,), len(self.tokenizer), device, dtype)
        self.head = assign_tensors(build_rating_head(self.model.config.text_config.hidden_size), head, folder)

    def __call__(self, images: list[np.ndarray], prompts: list[str]) -> torch.Tensor:
        """Mean and logarithm of the deviation of the preference for uint8 [H, W, 3] images, float32 [B, 2]."""
        batch = self.processor(images=[resize_image(image) for image in images], return_tensors="pt")
        grids = batch.image_grid_thw
        texts = [
            format_chat("<|image_pad|>" * count, self.instruction.replace(PROMPT_FIELD, prompt))
            for prompt, count in zip(prompts, self.count_tokens(grids), strict=True)
        ]
        seen = self.model.get_image_features(batch.pixel_values.to(self.device, self.dtype), grids.to(self.device))
        return self.head(self.rated_states(texts, seen, self.model.config.image_token_id))


load_hpsv3 = loader_of(HpsV3Network)


def resize_image(image: np.ndarray) -> Image.Image:
    """Scales an image, uint8 [H, W, 3], bicubic, so that it has close to 448 x 448 pixels and sides of 28 times n."""
    height, width = image.shape[:2]
    height, width = scaled_size(height, width, NUM_PIXELS, NUM_PIXELS)
    return Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)


def build_rating_head(width: int) -> nn.Sequential:
    """Mean and logarithm of the deviation of a rating, of hidden states of this width."""
    return nn.Sequential(
        nn.Linear(width, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
    )
