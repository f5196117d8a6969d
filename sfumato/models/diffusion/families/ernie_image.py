"""ERNIE-Image: ErnieImageTransformer2DModel, in which image and text are one sequence, and Mistral 3.

The part of the pipeline that rewrites prompts (``pe``) is not run: prompts are read as they are.
"""

from __future__ import annotations

from torch import Tensor, nn

from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart
from sfumato.models.diffusion.flux2_latents import Flux2Latents
from sfumato.models.diffusion.latents import PATCH, PaddedPrompts, pad_rows
from sfumato.models.diffusion.scratch import build_qwen_tokenizer
from sfumato.models.diffusion.scratch_autoencoders import build_flux2_autoencoder
from sfumato.models.diffusion.scratch_encoders import build_mistral3_encoder
from sfumato.models.diffusion.valueless_masks import compute_positions_off_meta


class ErnieImage(PaddedPrompts, Flux2Latents):
    """ERNIE-Image and ERNIE-Image-Turbo."""

    pipeline_class = "ErnieImagePipeline"
    parallel_plan = plans.ERNIE_IMAGE
    lora_targets = ("to_k", "to_q", "to_v", "to_out.0")  # as for Z-Image
    knows_size = False

    @classmethod
    def blueprint(cls) -> Blueprint:
        return Blueprint(
            denoiser="ErnieImageTransformer2DModel",
            vae=build_flux2_autoencoder,
            texts={"text_encoder": TextPart(build_mistral3_encoder, build_qwen_tokenizer)},
            infer=lambda parts: {
                "in_channels": parts["vae"].config.latent_channels * PATCH**2,
                "out_channels": parts["vae"].config.latent_channels * PATCH**2,
                "text_in_dim": parts["text_encoder"].config.text_config.hidden_size,
            },
            outputs=("final_linear",),
        )

    def prepare_denoiser(self, denoiser: nn.Module) -> None:
        compute_positions_off_meta(denoiser, "pos_embed")

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` and ``prompt_mask``, bool ``[B, T]``; T is ``max_sequence_length``.

        What the encoder makes of a token does not depend on later ones, so longer prompts are cut afterwards.
        """
        length = self.max_sequence_length
        return pad_rows([row[:length] for row in self.pipeline.encode_prompt(prompts, self.device)], length)

    @property
    def probe_size(self) -> int:
        return self.pipeline.vae_scale_factor  # of patches

    @property
    def batch_norm_eps(self) -> float:
        return 1e-5  # that of the training, by the pipeline, whatever the autoencoder's configuration says

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        return self.denoiser(
            hidden_states=latents,
            timestep=self.timestep(sigma.to(latents.device)),
            text_bth=embeddings["prompt_embeds"].to(self.input_dtype),
            text_lens=embeddings["prompt_mask"].sum(dim=1),
            return_dict=False,
        )[0]
