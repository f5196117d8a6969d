"""HiDream-I1 (arXiv 2505.22705): HiDreamImageTransformer2DModel with experts; two CLIP, T5 and Llama read the prompt.

In evaluation mode diffusers runs the experts without gradients, so they are in training mode here, which computes the
same. The pipeline brings every picture to the area of a megapixel; here it has the size that is asked for.
"""

# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn

from sfumato.errors import ConfigError
from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart
from sfumato.models.diffusion.latents import FlowSchedule, KLLatents, num_tokens
from sfumato.models.diffusion.scratch import (
    build_autoencoder,
    build_clip_encoder,
    build_clip_tokenizer,
    build_qwen_tokenizer,
    build_t5_encoder,
    build_t5_tokenizer,
)
from sfumato.models.diffusion.scratch_encoders import build_llama_encoder
from sfumato.models.diffusion.valueless_masks import ShareRowsEvenly, has_values

LLAMA = "text_encoder_4"


class HiDream(KLLatents, FlowSchedule):
    """HiDream-I1."""

    pipeline_class = "HiDreamImagePipeline"
    parallel_plan = plans.HIDREAM
    # diffusers examples/dreambooth/train_dreambooth_lora_hidream.py
    lora_targets = ("to_k", "to_q", "to_v", "to_out")
    encoder_names = ("text_encoder", "text_encoder_2", "text_encoder_3", LLAMA)
    prompt_tokenizer = "tokenizer_4"

    def check_components(self) -> None:
        if self.denoiser.config.force_inference_output:
            raise ConfigError(
                f"{self.pipeline_class}: experts of a transformer with force_inference_output have no gradient: set it "
                "to false in transformer/config.json"
            )

    @classmethod
    def blueprint(cls) -> Blueprint:
        """As ``DiffusionModel``; ``transformer.llama_layers`` names a layer of Llama for each block."""
        clip = TextPart(build_clip_encoder, build_clip_tokenizer, {"projection": True})
        return Blueprint(
            denoiser="HiDreamImageTransformer2DModel",
            vae=build_autoencoder,
            texts={
                "text_encoder": clip,
                "text_encoder_2": clip,
                "text_encoder_3": TextPart(build_t5_encoder, build_t5_tokenizer),
                LLAMA: TextPart(build_llama_encoder, build_qwen_tokenizer),
            },
            infer=lambda parts: {
                "patch_size": 2,
                "in_channels": parts["vae"].config.latent_channels,
                "text_emb_dim": sum(parts[name].config.projection_dim for name in ("text_encoder", "text_encoder_2")),
                "caption_channels": [parts["text_encoder_3"].config.d_model, parts[LLAMA].config.hidden_size],
            },
            outputs=("final_layer.linear",),
        )

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` of T5, ``llama_embeds`` ``[B, L, T, E]`` of the L layers of Llama, and
        ``pooled`` ``[B, P]`` of both CLIP; T is ``max_sequence_length``, with the padding, which the model reads."""
        embeds, _, llama_embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompts,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"prompt_embeds": embeds, "llama_embeds": llama_embeds.transpose(0, 1), "pooled": pooled}

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        length = self.max_sequence_length
        clip = [getattr(self.pipeline, name) for name in ("text_encoder", "text_encoder_2")]
        t5 = self.pipeline.text_encoder_3
        llama = getattr(self.pipeline, LLAMA)
        return {
            "prompt_embeds": ((length, t5.config.d_model), t5.dtype),
            "llama_embeds": ((llama.config.num_hidden_layers, length, llama.config.hidden_size), llama.dtype),
            "pooled": ((sum(encoder.config.projection_dim for encoder in clip),), clip[0].dtype),
        }

    @property
    def patch(self) -> int:
        return self.denoiser.config.patch_size

    def dynamic_mu(self, tokens: int, num_steps: int | None) -> float:
        """The pipeline's, which is that of the largest picture whatever the size."""
        from diffusers.pipelines.hidream_image.pipeline_hidream_image import calculate_shift

        return calculate_shift(self.denoiser.max_seq)

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        shape = super().latent_shape(height, width, frames)
        # what is no square is filled up to the largest number of tokens
        most_tokens = self.denoiser.max_seq
        if height != width and num_tokens(shape, self.patch) > most_tokens:
            longest = most_tokens * self.probe_size // min(height, width) * self.probe_size
            raise ValueError(
                f"height {height} and width {width}: the longer side may be {longest} pixels at most: it has no more "
                "positions"
            )
        return shape

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        dtype = self.input_dtype
        denoiser = self.denoiser
        train_experts(denoiser)
        with nullcontext() if has_values(latents) else ShareRowsEvenly(denoiser.config.num_routed_experts):
            output = denoiser(
                hidden_states=latents,
                timesteps=self.timestep(sigma.to(latents.device)),
                encoder_hidden_states_t5=embeddings["prompt_embeds"].to(dtype),
                encoder_hidden_states_llama3=embeddings["llama_embeds"].to(dtype).transpose(0, 1),
                pooled_embeds=embeddings["pooled"].to(dtype),
                return_dict=False,
            )[0]
        return -(join_patches(output, latents.shape, self.patch) if denoiser.training else output)


def train_experts(denoiser: nn.Module) -> None:
    """Sets the modules that choose among experts to training mode; whoever calls ``eval`` sets the whole network."""
    from diffusers.models.transformers.transformer_hidream_image import MOEFeedForwardSwiGLU

    for module in denoiser.modules():
        if isinstance(module, MOEFeedForwardSwiGLU):
            module.training = True


def join_patches(output: Tensor, shape: Sequence[int], patch: int) -> Tensor:
    """Makes pictures of the patches that the network gives in training mode.

    Args:
        output: ``[B, C, T, patch * patch]``, T with the padding behind the patches.
        shape: ``[..., H, W]``.
        patch: latent pixels along each side.

    Returns:
        ``[B, C, H, W]``.
    """
    rows, columns = (side // patch for side in shape[-2:])
    patches = output[:, :, : rows * columns].unflatten(3, (patch, patch)).unflatten(2, (rows, columns))
    return patches.transpose(3, 4).flatten(4).flatten(2, 3)
