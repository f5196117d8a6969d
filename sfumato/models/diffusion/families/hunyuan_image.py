"""HunyuanImage 2.1: HunyuanImageTransformer2DModel, Qwen2.5-VL, and ByT5 for quoted text.

The published pipeline guides with what earlier steps have left (AdaptiveProjectedMixGuidance), so that a step could not
be replayed by itself: here two branches are put together as everywhere.
"""

from __future__ import annotations

from torch import Tensor

from sfumato.config.open_mappings import Keywords
from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart, make_empty_pipeline
from sfumato.models.diffusion.hunyuan_text import HunyuanText
from sfumato.models.diffusion.latents import KLLatents
from sfumato.models.diffusion.scratch import build_qwen_tokenizer, build_qwen_vl_encoder, build_t5_encoder
from sfumato.models.diffusion.scratch_autoencoders import build_hunyuan_image_autoencoder
from sfumato.models.diffusion.scratch_encoders import build_byt5_tokenizer
from sfumato.models.diffusion.valueless_masks import masks_without_values

GUIDANCE_UNIT = 1000.0
"""The network takes the guidance scale in thousandths."""


class HunyuanImage(KLLatents, HunyuanText):
    """HunyuanImage 2.1."""

    pipeline_class = "HunyuanImagePipeline"
    parallel_plan = plans.HUNYUAN_IMAGE
    lora_targets = plans.JOINT_TARGETS
    optional_parts = ("guider", "ocr_guider")

    _has_said_guider = False

    @classmethod
    def blueprint(cls) -> Blueprint:
        template = make_empty_pipeline(cls.pipeline_type()).prompt_template_encode
        return Blueprint(
            denoiser="HunyuanImageTransformer2DModel",
            vae=build_hunyuan_image_autoencoder,
            texts={
                "text_encoder": TextPart(build_qwen_vl_encoder, build_qwen_tokenizer, {}, {"template": template}),
                "text_encoder_2": TextPart(build_t5_encoder, build_byt5_tokenizer),
            },
            infer=lambda parts: {
                "in_channels": parts["vae"].config.latent_channels,
                "out_channels": parts["vae"].config.latent_channels,
                "text_embed_dim": parts["text_encoder"].config.get_text_config().hidden_size,
                "text_embed_2_dim": parts["text_encoder_2"].config.d_model,
            },
            scheduler_settings={"shift": 5.0},
        )

    @property
    def embeds_guidance(self) -> bool:
        return bool(self.denoiser.config.guidance_embeds)

    def guidance_at(self, scale: float, sigma: Tensor) -> float | Tensor:
        guider = getattr(self.pipeline, "guider", None)
        name = type(guider).__name__
        if scale != 1 and guider is not None and name != "ClassifierFreeGuidance" and not self._has_said_guider:
            self._has_said_guider = True
            self.say(
                f"guidance here is uncond + scale (cond - uncond); diffusers would guide by {name}, the guider of the "
                "folder, whose pictures differ"
            )
        return scale

    def read_prompts(self, prompts: list[str]) -> tuple[Tensor, Tensor]:
        pipeline = self.pipeline
        return pipeline._get_qwen_prompt_embeds(
            pipeline.tokenizer,
            pipeline.text_encoder,
            prompts,
            self.device,
            tokenizer_max_length=self.max_sequence_length,
            template=pipeline.prompt_template_encode,
            drop_idx=pipeline.prompt_template_encode_start_idx,
        )

    def prompt_as_read(self, prompt: str) -> str:
        """The prompt with the end of the template; the pipeline drops the beginning of it from the embeddings."""
        return prompt + self.pipeline.prompt_template_encode.partition("{}")[2]

    @property
    def patch(self) -> int:
        return self.denoiser.config.patch_size[0]

    def _latent_scale(self, like: Tensor) -> tuple[float | Tensor, float | Tensor]:
        return 0.0, self.pipeline.vae.config.scaling_factor

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        guidance: Keywords = {}
        if self.embeds_guidance:
            scales = embeddings.get("guidance", sigma.new_ones(len(sigma))).to(latents.device)
            guidance = {"guidance": (scales * GUIDANCE_UNIT).to(self.input_dtype)}
        with masks_without_values(embeddings["prompt_mask"]):
            return self.denoiser(
                hidden_states=latents,
                timestep=self.timestep(sigma.to(latents.device)).to(self.input_dtype),
                return_dict=False,
                **guidance,
                **self.text_inputs(embeddings),
            )[0]
