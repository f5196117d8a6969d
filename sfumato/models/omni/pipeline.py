"""A flow head and the language model that conditions it, as a diffusion model.

``tasks/train_omni.py`` exports it as ``hf_ckpt/drawing``; it is loaded with `model.family:
sfumato.models.omni.pipeline:LanguageToImage`. The language model is the text encoder, which is frozen.
"""

# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from diffusers import DiffusionPipeline
from diffusers.loaders import CogVideoXLoraLoaderMixin
from torch import Tensor

from sfumato.data.media.image_answers import CODE, START
from sfumato.errors import ConfigError
from sfumato.models.diffusion.families.sd3 import StableDiffusion3

if TYPE_CHECKING:
    from torch import nn
    from transformers import PreTrainedTokenizerBase


class LanguageToImagePipeline(DiffusionPipeline, CogVideoXLoraLoaderMixin):  # a mixin for adapters of a transformer
    """The components, for diffusers to save and load; it cannot be called."""

    model_cpu_offload_seq = "text_encoder->transformer->vae"

    def __init__(self, transformer: Any, scheduler: object, vae: Any, text_encoder: object, tokenizer: object) -> None:
        super().__init__()
        self.register_modules(
            transformer=transformer, scheduler=scheduler, vae=vae, text_encoder=text_encoder, tokenizer=tokenizer
        )
        self.vae_scale_factor = 2 ** (len(vae.config.block_out_channels) - 1)
        self.patch_size = transformer.config.patch_size


class LanguageToImage(StableDiffusion3):
    """A denoiser with the architecture of SD3, conditioned on hidden states of a language model."""

    pipeline_class: ClassVar[str] = "LanguageToImagePipeline"
    encoder_names: ClassVar[tuple[str, ...]] = ("text_encoder",)

    @classmethod
    def pipeline_type(cls) -> type[DiffusionPipeline]:
        """The class in this file."""
        return LanguageToImagePipeline

    @classmethod
    def build(cls, description: Mapping[str, object], seed: int) -> DiffusionPipeline:
        """Raises ConfigError: these pipelines are only loaded."""
        raise ConfigError("a LanguageToImagePipeline is made by tasks/train_omni.py: give its folder as model_path")

    @property
    def prompt_tokenizer(self) -> str:  # type: ignore[override]
        return "tokenizer"

    @property
    def prompt_limit(self) -> int:
        """Positions of the language model, less those of the tokens of an image."""
        return int(self.pipeline.text_encoder.config.max_position_embeddings) - self._num_tokens

    @property
    def _num_tokens(self) -> int:
        """Tokens of an image."""
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
        """Hidden states of the K tokens of an image that answers each prompt.

        The empty prompt is replaced by padding, as in training with guidance.

        Returns:
            ``prompt_embeds`` ``[B, K, H]``, and ``pooled`` ``[B, H]``, their mean.
        """
        tokenizer = self.pipeline.tokenizer
        encoder = self.pipeline.text_encoder
        # The last token of the image predicts what follows it, so it is not an input.
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


def save_drawing(
    folder: Path, head: nn.Module, vae: nn.Module, foundation: nn.Module, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Writes a pipeline folder for ``tasks/rl_diffusion.py``, with the schedule of training, which has no shift."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    from sfumato.models.older_readers import use_older_names_in_pipeline

    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    pipeline = LanguageToImagePipeline(head, scheduler, vae, foundation, tokenizer)
    pipeline.save_pretrained(folder, safe_serialization=True)
    use_older_names_in_pipeline(folder)
