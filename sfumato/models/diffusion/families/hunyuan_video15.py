"""HunyuanVideo 1.5 (arXiv 2511.18870): HunyuanVideo15Transformer3DModel, Qwen2.5-VL, and ByT5 for quoted text.

The network takes, beside the latents, those of a given first frame and a mask, which are zero for a video from text,
and tokens of an image. Without an image those are masked; here there are none of them.
"""

# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Unpack

import torch
from torch import Tensor

from sfumato.config.open_mappings import Keywords
from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart
from sfumato.models.diffusion.guiders import check_plain_guider
from sfumato.models.diffusion.hunyuan_text import HunyuanText
from sfumato.models.diffusion.latents import ScaledVideoLatents
from sfumato.models.diffusion.scratch import build_qwen_tokenizer, build_t5_encoder
from sfumato.models.diffusion.scratch_autoencoders import build_hunyuan_video15_autoencoder
from sfumato.models.diffusion.scratch_encoders import build_byt5_tokenizer, build_qwen_vl_text_encoder
from sfumato.models.diffusion.valueless_masks import masks_without_values

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    from sfumato.models.diffusion.base import ModelOptions


class HunyuanVideo15(ScaledVideoLatents, HunyuanText):
    """HunyuanVideo 1.5 from text."""

    pipeline_class = "HunyuanVideo15Pipeline"
    frame_rate = 24.0
    parallel_plan = plans.HUNYUAN_VIDEO15
    lora_targets = plans.JOINT_TARGETS

    def __init__(self, pipeline: DiffusionPipeline, **options: Unpack[ModelOptions]) -> None:
        """As ``DiffusionModel``."""
        super().__init__(pipeline, **options)
        pipeline.vae.enable_slicing()  # the mask of its attention fits one video at a time
        pipeline.vae.enable_tiling()  # else the mask has a number for each pair of a video's latent pixels

    @staticmethod
    def decoded_at_a_time(latents: Tensor) -> int:
        return 1

    def check_components(self) -> None:
        super().check_components()
        check_plain_guider(self.pipeline.guider, self.pipeline_class)

    @classmethod
    def blueprint(cls) -> Blueprint:
        import diffusers

        def make_guider(parts: Keywords, guidance_scale: float = 6.0) -> diffusers.ClassifierFreeGuidance:
            return diffusers.ClassifierFreeGuidance(guidance_scale=guidance_scale)

        return Blueprint(
            denoiser="HunyuanVideo15Transformer3DModel",
            vae=build_hunyuan_video15_autoencoder,
            texts={
                "text_encoder": TextPart(
                    build_qwen_vl_text_encoder, build_qwen_tokenizer, {}, {"template": system_message()}
                ),
                "text_encoder_2": TextPart(build_t5_encoder, build_byt5_tokenizer),
            },
            infer=lambda parts: {
                "in_channels": 2 * parts["vae"].config.latent_channels + 1,
                "out_channels": parts["vae"].config.latent_channels,
                "text_embed_dim": parts["text_encoder"].config.hidden_size,
                "text_embed_2_dim": parts["text_encoder_2"].config.d_model,
            },
            scheduler_settings={"shift": 5.0},
            further={"guider": make_guider},
        )

    def read_prompts(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        pipeline = self.pipeline
        return pipeline._get_mllm_prompt_embeds(
            pipeline.text_encoder,
            pipeline.tokenizer,
            prompts,
            self.device,
            tokenizer_max_length=self.max_sequence_length,
            system_message=pipeline.system_message,
            crop_start=pipeline.prompt_template_encode_start_idx,
        )

    def image_inputs(self, latents: Tensor, embeddings: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """What the network takes of a given first frame; without one there is nothing.

        Returns:
            ``[B, C + 1, F, H, W]``, the latents of the frame and a mask of given frames; and tokens ``[B, T, D]`` of
            the image.
        """
        batch, channels, *sides = latents.shape
        no_frame = latents.new_zeros(batch, channels + 1, *sides)
        return no_frame, latents.new_zeros(batch, 0, self.denoiser.config.image_embed_dim)

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        frame, image_tokens = self.image_inputs(latents, embeddings)
        with masks_without_values(embeddings["prompt_mask"]):
            return self.denoiser(
                hidden_states=torch.cat([latents, frame], dim=1),
                timestep=self.timestep(sigma.to(latents.device)).to(self.input_dtype),
                image_embeds=image_tokens,
                return_dict=False,
                **self.text_inputs(embeddings),
            )[0]


def system_message() -> str:
    """The pipeline's default system message."""
    from diffusers import HunyuanVideo15Pipeline

    return inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds).parameters["system_message"].default
