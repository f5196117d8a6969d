"""The network of EditReward, made of transformers' Qwen2.5-VL, and its published weights."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import nn

from sfumato.errors import ConfigError
from sfumato.rewards.networks.folder import assign_tensors, iterate_tensors, loader_of
from sfumato.rewards.networks.hpsv3 import REWARD_TOKEN, build_rating_head, resize_image
from sfumato.rewards.networks.qwen2_vl import (
    PROMPT_FIELD,
    QwenRater,
    build_body,
    read_instruction,
    split_head,
)

INSTRUCTION_FILES = ("following.txt", "quality.txt")
"""Of how the instruction was followed and of the picture's quality, in the order of the model's heads."""
IMAGE_TOKEN = "<|image_pad|>"


class EditRewardNetwork(QwenRater):
    """Scores edited images beside their source images and instructions."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Raises ConfigError when the folder lacks a file or a file holds something else."""
        files = (*INSTRUCTION_FILES, "*.safetensors")
        super().__init__(folder, device, dtype, "qwen2_5_vl", files, (REWARD_TOKEN,))
        self.instructions = [read_instruction(folder / name, (REWARD_TOKEN,)) for name in INSTRUCTION_FILES]
        # a template of text alone would leave the pictures out without a word
        if not self.tokenizer.chat_template or self._chat_text("").count(IMAGE_TOKEN) != 2:
            raise ConfigError(
                f"model_path {folder}: its tokenizer has no chat template that takes images: add chat_template.jinja "
                "of the model that EditReward was trained from"
            )
        paths = sorted(folder.glob("*.safetensors"))
        tensors = chain.from_iterable(iterate_tensors(folder, path.name) for path in paths)
        body, heads = split_head(tensors, "rm_heads.", device, dtype)
        self.model = build_body(folder, body, (REWARD_TOKEN,), len(self.tokenizer), device, dtype)
        width = self.model.config.text_config.hidden_size
        modules = {f"head_{number}": build_rating_head(width) for number in range(len(INSTRUCTION_FILES))}
        self.heads = assign_tensors(nn.ModuleDict(modules), heads, folder)

    def __call__(self, images: list[np.ndarray], sources: list[np.ndarray], prompts: list[str]) -> torch.Tensor:
        """Means of the predicted ratings for following the instruction and for quality, float32 ``[B, 2]``.

        Args:
            images: what the edits gave, uint8 [H, W, 3].
            sources: the images that were edited, uint8 [H, W, 3].
            prompts: B instructions for the edits.
        """
        pairs = [resize_image(image) for pair in zip(sources, images, strict=True) for image in pair]
        batch = self.processor(images=pairs, return_tensors="pt")
        grids = batch.image_grid_thw
        counts = self.count_tokens(grids)
        seen = self.model.get_image_features(batch.pixel_values.to(self.device, self.dtype), grids.to(self.device))
        ratings = []
        for instruction, head in zip(self.instructions, self.heads.values(), strict=True):
            texts = []
            for prompt, source_tokens, image_tokens in zip(prompts, counts[::2], counts[1::2], strict=True):
                before, between, after = self._chat_text(instruction.replace(PROMPT_FIELD, prompt)).split(IMAGE_TOKEN)
                texts.append(before + IMAGE_TOKEN * source_tokens + between + IMAGE_TOKEN * image_tokens + after)
            ratings.append(head(self.rated_states(texts, seen, self.model.config.image_token_id))[:, 0])
        return torch.stack(ratings, dim=1)

    def _chat_text(self, question: str) -> str:
        """The conversation with a place for each of the two images."""
        content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": question}]
        # transformers' annotation knows contents of text alone
        conversation = cast("list[dict[str, str]]", [{"role": "user", "content": content}])
        text = self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
        assert isinstance(text, str)  # it was not asked to tokenise
        return text


load_edit_reward = loader_of(EditRewardNetwork)
