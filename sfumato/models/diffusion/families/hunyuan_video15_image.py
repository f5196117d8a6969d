"""HunyuanVideo 1.5 from a first frame, whose latents are channels of the input, with a mask, and which SigLIP sees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sfumato.config.open_mappings import Keywords
from sfumato.models.diffusion.described import Blueprint
from sfumato.models.diffusion.families.hunyuan_video15 import HunyuanVideo15
from sfumato.models.diffusion.latents import SourceLatents
from sfumato.models.diffusion.scratch_encoders import build_siglip_processor, build_siglip_vision_encoder


class HunyuanVideo15ImageToVideo(SourceLatents, HunyuanVideo15):
    """HunyuanVideo 1.5 from a first frame and a text. ``frames`` must be set before images are embedded.

    The frame keeps its size, whereas diffusers' pipeline first brings it to one that the model was trained with.
    """

    pipeline_class = "HunyuanVideo15ImageToVideoPipeline"
    encoder_names = (*HunyuanVideo15.encoder_names, "image_encoder")

    @classmethod
    def blueprint(cls) -> Blueprint:
        def make_processor(parts: Keywords) -> object:
            return build_siglip_processor(parts["image_encoder"])

        def make_encoder(parts: Keywords, width: int = 32, num_layers: int = 2, num_heads: int = 4) -> nn.Module:
            return build_siglip_vision_encoder(width, num_layers, num_heads)

        plain = super().blueprint()
        return replace(
            plain,
            infer=lambda parts: {
                **plain.infer(parts),
                "image_embed_dim": parts["image_encoder"].config.hidden_size,
                "task_type": "i2v",
            },
            further={**plain.further, "image_encoder": make_encoder, "feature_extractor": make_processor},
        )

    def embed_edit(self, prompt: str, image: np.ndarray) -> dict[str, Tensor]:
        """What ``embed_prompts`` returns, ``image_latents`` ``[1, C, 1, H, W]``, and ``image_embeds`` ``[1, T, D]``."""
        embeddings = super().embed_edit(prompt, image)
        seen = self.pipeline.encode_image(
            Image.fromarray(image), batch_size=1, device=self.device, dtype=self.pipeline.image_encoder.dtype
        )
        return {**embeddings, "image_embeds": seen}

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        encoder = self.pipeline.image_encoder
        num_tokens = (encoder.config.image_size // encoder.config.patch_size) ** 2
        return {
            **super().embedding_shapes(height, width),
            "image_embeds": ((num_tokens, encoder.config.hidden_size), encoder.dtype),
        }

    def image_inputs(self, latents: Tensor, embeddings: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        frame = embeddings["image_latents"].to(latents.dtype)
        frame_and_mask = torch.cat([frame, torch.ones_like(frame[:, :1])], dim=1)
        later = latents.shape[2] - 1
        image_tokens = embeddings["image_embeds"].to(latents.dtype)
        return torch.nn.functional.pad(frame_and_mask, (0, 0, 0, 0, 0, later)), image_tokens
