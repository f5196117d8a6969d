"""The network of HPSv3, made of transformers' Qwen2-VL, and its published weights."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from sfumato.rewards.networks.folder import (
    assign_tensors,
    check_folder,
    check_model_type,
    iterate_tensors,
    load_image_processor,
    load_tokenizer,
    loader_of,
)
from sfumato.rewards.networks.qwen2_vl import (
    INSTRUCTION_FILE,
    PROMPT_FIELD,
    build_body,
    format_chat,
    hidden_states,
    read_instruction,
    rename_weight,
    scaled_size,
)

REWARD_TOKEN = "<|Reward|>"
WEIGHTS_FILE = "HPSv3.safetensors"
NUM_PIXELS = 256 * 28 * 28


class HpsV3Network:
    """Scores images with their prompts."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Raises ConfigError when the folder lacks a file or a file holds something else."""
        check_model_type(folder, ("qwen2_vl",))
        check_folder(folder, INSTRUCTION_FILE, WEIGHTS_FILE)
        self.lock = threading.Lock()
        self.device = device
        self.dtype = dtype
        self.instruction = read_instruction(folder / INSTRUCTION_FILE, (REWARD_TOKEN,))
        self.processor = load_image_processor(folder)
        self.tokenizer = load_tokenizer(folder)
        if REWARD_TOKEN not in self.tokenizer.get_vocab():
            self.tokenizer.add_tokens([REWARD_TOKEN], special_tokens=True)
        self.reward_token = self.tokenizer.convert_tokens_to_ids(REWARD_TOKEN)
        self.model, self.head = _build(folder, device, dtype, num_tokens=len(self.tokenizer))

    def __call__(self, images: list[np.ndarray], prompts: list[str]) -> torch.Tensor:
        """Mean and logarithm of the deviation of the preference for uint8 [H, W, 3] images, float32 [B, 2]."""
        batch = self.processor(images=[resize(image) for image in images], return_tensors="pt")
        grids = batch.image_grid_thw
        num_tokens = (grids.prod(dim=1) // self.processor.merge_size**2).tolist()
        texts = [self._chat_text(prompt, count) for prompt, count in zip(prompts, num_tokens, strict=True)]
        tokens = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").to(self.device)
        seen = self.model.get_image_features(batch.pixel_values.to(self.device, self.dtype), grids.to(self.device))
        hidden = hidden_states(self.model, tokens, seen, self.model.config.image_token_id)
        is_reward = tokens.input_ids == self.reward_token
        return self.head(hidden[is_reward].float())

    def _chat_text(self, prompt: str, num_image_tokens: int) -> str:
        return format_chat("<|image_pad|>" * num_image_tokens, self.instruction.replace(PROMPT_FIELD, prompt))


load_hpsv3 = loader_of(HpsV3Network)


def resize(image: np.ndarray) -> Image.Image:
    """Scales an image, uint8 [H, W, 3], bicubic, so that it has close to 448 x 448 pixels and sides of 28 times n."""
    height, width = image.shape[:2]
    height, width = scaled_size(height, width, NUM_PIXELS, NUM_PIXELS)
    return Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC)


def _build(folder: Path, device: torch.device, dtype: torch.dtype, num_tokens: int) -> tuple[Any, nn.Sequential]:
    """Qwen2-VL without its language head, and the head that rates, with the weights of the folder."""
    body: dict[str, torch.Tensor] = {}
    head: dict[str, torch.Tensor] = {}
    for name, tensor in iterate_tensors(folder, WEIGHTS_FILE):
        if name.startswith("rm_head."):
            head[name.removeprefix("rm_head.")] = tensor.to(device, torch.float32)
        elif not name.startswith("lm_head."):
            body[rename_weight(name)] = tensor.to(device, dtype)
    model = build_body(folder, body, (REWARD_TOKEN,), num_tokens, device, dtype)
    return model, assign_tensors(build_rating_head(model.config.text_config.hidden_size), head, folder)


def build_rating_head(width: int) -> nn.Sequential:
    """Mean and logarithm of the deviation of a rating, of hidden states of this width."""
    return nn.Sequential(
        nn.Linear(width, 1024), nn.ReLU(), nn.Dropout(0.05), nn.Linear(1024, 16), nn.ReLU(), nn.Linear(16, 2)
    )
