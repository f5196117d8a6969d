"""A flow head with the language model that tells it what to draw, as a diffusion model of its own.

It is what ``tasks/train_omni.py`` exports as ``hf_ckpt/drawing``: `model.family:
sfumato.models.omni.pipeline:LanguageToImage`. The language model is the text encoder, which is not trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from diffusers import DiffusionPipeline
from diffusers.loaders import CogVideoXLoraLoaderMixin
from torch import Tensor

from sfumato.data.media.image_answers import CODE, START
from sfumato.errors import ConfigError
from sfumato.models.diffusion.families.sd3 import StableDiffusion3


class LanguageToImagePipeline(DiffusionPipeline, CogVideoXLoraLoaderMixin):  # a mixin for adapters of a transformer
    """The parts, for diffusers to save and load."""

    model_cpu_offload_seq = "text_encoder->transformer->vae"

    def __init__(self, transformer: Any, scheduler: Any, vae: Any, text_encoder: Any, tokenizer: Any) -> None:
        super().__init__()
        self.register_modules(
            transformer=transformer, scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer
        )
        self.vae_scale_factor = 2 ** (len(vae.config.block_out_channels) - 1)
        self.patch_size = transformer.config.patch_size


class LanguageToImage(StableDiffusion3):
    """A head of the architecture of SD3, told hidden states of a language model."""

    pipeline_class: ClassVar[str] = "LanguageToImagePipeline"
    encoder_names: ClassVar[tuple[str, ...]] = ("text_encoder",)

    @classmethod
    def pipeline_type(cls) -> Any:
        """Of this file."""
        return LanguageToImagePipeline

    @classmethod
    def build(cls, description: dict[str, Any], seed: int) -> Any:
        """There is nothing to describe."""
        raise ConfigError("a LanguageToImagePipeline is made by tasks/train_omni.py: give its folder as model_path")

    @property
    def prompt_tokenizer(self) -> str:  # type: ignore[override]
        return "tokenizer"

    @property
    def prompt_limit(self) -> int:
        """What the language model has positions for."""
        return int(self.pipeline.text_encoder.config.max_position_embeddings) - self._num_tokens

    @property
    def _num_tokens(self) -> int:
        size = self.pipeline.vae.config.sample_size
        height, width = (size, size) if isinstance(size, int) else size
        return (height // self.probe_size) * (width // self.probe_size)

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        size = self.pipeline.vae.config.sample_size
        trained_size = (size, size) if isinstance(size, int) else tuple(size)
        if (height, width) != trained_size:
            raise ValueError(
                f"the language model was trained to draw images of {trained_size[0]} x {trained_size[1]} pixels alone"
            )
        return super().latent_shape(height, width, frames)

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """Hidden states ``prompt_embeds`` ``[B, K, H]`` of the tokens of an image that would answer each prompt, and
        their mean ``pooled`` ``[B, H]``. The empty prompt is padding, as guidance is trained with."""
        tokenizer, encoder = self.pipeline.tokenizer, self.pipeline.text_encoder
        image_tokens = [START, *(CODE.format(code) for code in range(self._num_tokens - 1))]
        image_ids = tokenizer.convert_tokens_to_ids(image_tokens)
        hidden_states = []
        for prompt in prompts:  # one by one: the bits of an embedding must not depend on its batch
            messages = [{"role": "user", "content": prompt}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            ids = ids if prompt else [tokenizer.pad_token_id] * len(ids)
            tokens = torch.tensor([[*ids, *image_ids]], device=self.device)
            hidden = encoder.base_model(input_ids=tokens, use_cache=False).last_hidden_state
            hidden_states.append(hidden[0, -len(image_ids) :].float())
        embeds = torch.stack(hidden_states)
        return {"prompt_embeds": embeds, "pooled": embeds.mean(dim=1)}


def save_drawing(folder: Path, head: Any, vae: Any, foundation: Any, tokenizer: Any) -> None:
    """Writes the parts as ``tasks/rl_diffusion.py`` reads them; the schedule is that of training, without a shift."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    pipeline = LanguageToImagePipeline(head, scheduler, vae, foundation, tokenizer)
    pipeline.save_pretrained(folder, safe_serialization=True)
