"""The network of EditReward, made of transformers' Qwen2.5-VL, and its published weights."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import nn

from sfumato.errors import ConfigError
from sfumato.rewards.networks.folder import (
    assign_tensors,
    check_folder,
    check_model_type,
    iterate_tensors,
    load_image_processor,
    load_tokenizer,
    loader_of,
)
from sfumato.rewards.networks.hpsv3 import REWARD_TOKEN, build_rating_head, resize
from sfumato.rewards.networks.qwen2_vl import (
    PROMPT_FIELD,
    build_body,
    hidden_states,
    read_instruction,
    rename_weight,
)

INSTRUCTION_FILES = ("following.txt", "quality.txt")
"""Of how the instruction was followed and of the picture's quality, in the order of the model's heads."""
IMAGE_TOKEN = "<|image_pad|>"


class EditRewardNetwork:
    """Scores edited images beside their source images and instructions."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Raises ConfigError when the folder lacks a file or a file holds something else."""
        check_model_type(folder, ("qwen2_5_vl",))
        check_folder(folder, *INSTRUCTION_FILES, "*.safetensors")
        self.lock = threading.Lock()
        self.device = device
        self.dtype = dtype
        self.instructions = [read_instruction(folder / name, (REWARD_TOKEN,)) for name in INSTRUCTION_FILES]
        self.processor = load_image_processor(folder)
        self.tokenizer = load_tokenizer(folder)
        if REWARD_TOKEN not in self.tokenizer.get_vocab():
            self.tokenizer.add_tokens([REWARD_TOKEN], special_tokens=True)
        self.reward_token = self.tokenizer.convert_tokens_to_ids(REWARD_TOKEN)
        # a template of text alone would leave the pictures out without a word
        if not self.tokenizer.chat_template or self._chat_text("").count(IMAGE_TOKEN) != 2:
            raise ConfigError(
                f"model_path {folder}: its tokenizer has no chat template that takes images: add chat_template.jinja "
                "of the model that EditReward was trained from"
            )
        body: dict[str, torch.Tensor] = {}
        heads: dict[str, torch.Tensor] = {}
        for file in sorted(folder.glob("*.safetensors")):
            for name, tensor in iterate_tensors(folder, file.name):
                if name.startswith("rm_heads."):
                    heads[name.removeprefix("rm_heads.")] = tensor.to(device, torch.float32)
                elif not name.startswith("lm_head."):
                    body[rename_weight(name)] = tensor.to(device, dtype)
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
        pairs = [resize(image) for pair in zip(sources, images, strict=True) for image in pair]
        batch = self.processor(images=pairs, return_tensors="pt")
        grids = batch.image_grid_thw
        counts = (grids.prod(dim=1) // self.processor.merge_size**2).view(-1, 2).tolist()
        seen = self.model.get_image_features(batch.pixel_values.to(self.device, self.dtype), grids.to(self.device))
        ratings = []
        for instruction, head in zip(self.instructions, self.heads.values(), strict=True):
            texts = []
            for prompt, (source_tokens, image_tokens) in zip(prompts, counts, strict=True):
                before, between, after = self._chat_text(instruction.replace(PROMPT_FIELD, prompt)).split(IMAGE_TOKEN)
                texts.append(before + IMAGE_TOKEN * source_tokens + between + IMAGE_TOKEN * image_tokens + after)
            tokens = self.tokenizer(texts, padding=True, padding_side="right", return_tensors="pt").to(self.device)
            hidden = hidden_states(self.model, tokens, seen, self.model.config.image_token_id)
            ratings.append(head(hidden[tokens.input_ids == self.reward_token].float())[:, 0])
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
