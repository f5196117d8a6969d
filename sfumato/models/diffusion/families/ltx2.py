"""LTX-2 (arXiv 2601.03233) and LTX-2.3: videos with sound from text, or text and a first frame.

Gemma 3 reads a prompt; connectors, which are frozen with it, make an embedding for the video and one for the sound.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sfumato.config.open_mappings import Keywords
from sfumato.errors import ConfigError
from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart
from sfumato.models.diffusion.latents import lead_to_given
from sfumato.models.diffusion.ltx2_latents import LTX2Latents
from sfumato.models.diffusion.scratch_encoders import build_gemma3_encoder, build_gemma_tokenizer
from sfumato.models.diffusion.scratch_ltx2 import (
    build_ltx2_audio_autoencoder,
    build_ltx2_autoencoder,
    build_ltx2_connectors,
    build_ltx2_vocoder,
    infer_ltx2_transformer,
)


class LTX2(LTX2Latents):
    """LTX-2 and LTX-2.3 from text."""

    pipeline_class = "LTX2Pipeline"
    parallel_plan = plans.LTX2
    # of the self-attention and text of both parts, and of what each takes from the other, as LTX-2's own trainer has it
    lora_targets = ("to_q", "to_k", "to_v", "to_out.0")
    encoder_names = ("text_encoder", "connectors")
    largest_shift = 2.05
    image_family = "LTX2ImageToVideo"

    gives_sigmas = True

    def check_components(self) -> None:
        """As ``DiffusionModel``. Raises ConfigError also for lengths of prompts that do not divide."""
        config = self.denoiser.config
        if (config.patch_size, config.patch_size_t, config.in_channels) != (1, 1, config.audio_in_channels):
            raise ConfigError(
                f"model.model_path: a transformer of patches {config.patch_size_t} x {config.patch_size} with "
                f"{config.in_channels} features for video and {config.audio_in_channels} for sound is not LTX-2's"
            )
        if self.pipeline.vae.config.timestep_conditioning:
            raise ConfigError(
                "model.model_path: an autoencoder that takes a noise level (timestep_conditioning) is not read"
            )
        registers = self.pipeline.connectors.config.video_connector_num_learnable_registers
        if registers and self.max_sequence_length % registers:
            raise ConfigError(
                f"model.max_sequence_length {self.max_sequence_length}: must be a multiple of {registers}, as many "
                "registers fill up a prompt; LTX-2 was trained with 1024"
            )

    @classmethod
    def blueprint(cls) -> Blueprint:
        return Blueprint(
            denoiser="LTX2VideoTransformer3DModel",
            vae=build_ltx2_autoencoder,
            texts={"text_encoder": TextPart(build_gemma3_encoder, build_gemma_tokenizer)},
            infer=infer_ltx2_transformer,
            outputs=("proj_out", "audio_proj_out"),
            scheduler_settings={
                "use_dynamic_shifting": True,
                "base_shift": 0.95,
                "max_shift": 2.05,
                "base_image_seq_len": 1024,
                "max_image_seq_len": 4096,
                "shift_terminal": 0.1,
            },
            further={
                "audio_vae": build_ltx2_audio_autoencoder,
                "vocoder": build_ltx2_vocoder,
                "connectors": build_ltx2_connectors,
            },
        )

    @torch.no_grad()
    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` for the video, ``sound_prompt_embeds`` ``[B, T, E]``, and ``prompt_mask``."""
        pipeline = self.pipeline
        embeds, mask = pipeline._get_gemma_prompt_embeds(
            prompts, max_sequence_length=self.max_sequence_length, device=self.device
        )
        video, sound, mask = pipeline.connectors(embeds, mask, padding_side=pipeline.tokenizer.padding_side)
        return {"prompt_embeds": video, "sound_prompt_embeds": sound, "prompt_mask": mask}

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        connectors = self.pipeline.connectors
        length = self.max_sequence_length
        return {
            "prompt_embeds": ((length, connectors.video_connector.inner_dim), connectors.dtype),
            "sound_prompt_embeds": ((length, connectors.audio_connector.inner_dim), connectors.dtype),
            "prompt_mask": ((length,), torch.int64),
        }

    def video_inputs(self, video: Tensor, timestep: Tensor, embeddings: dict[str, Tensor]) -> Keywords:
        """The network's arguments for the tokens of videos ``[B, C, f h w]`` at timesteps ``[B]``."""
        return {"hidden_states": video.mT, "timestep": timestep}

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        sizes = self.sizes_of(latents.shape)
        video, sound = self.split(latents)
        timestep = self.timestep(sigma.to(latents.device))
        velocities = self.denoiser(
            **self.video_inputs(video, timestep, embeddings),
            audio_hidden_states=sound.mT,
            encoder_hidden_states=embeddings["prompt_embeds"].to(self.input_dtype),
            audio_encoder_hidden_states=embeddings["sound_prompt_embeds"].to(self.input_dtype),
            sigma=timestep,
            encoder_attention_mask=embeddings["prompt_mask"],
            audio_encoder_attention_mask=embeddings["prompt_mask"],
            num_frames=sizes.frames,
            height=sizes.height,
            width=sizes.width,
            fps=self.frame_rate,
            audio_num_frames=sizes.sound,
            use_cross_timestep=True,
            return_dict=False,
        )
        return torch.cat(velocities, dim=1).mT


class LTX2ImageToVideo(LTX2):
    """LTX-2 from a first frame and a text, by the same weights. ``frames`` must be set before images are embedded.

    The tokens of the frame have noise level 0. It is not compressed as a video first, which diffusers'
    LTX2ImageToVideoPipeline does unless its ``image_crf`` is 0.
    """

    takes_image = True

    def embed_edit(self, prompt: str, image: np.ndarray) -> dict[str, Tensor]:
        """What ``embed_prompts`` returns, and ``image_tokens`` ``[1, C, h w]`` of the first frame."""
        height, width, _ = image.shape
        self.latent_shape(height, width, self.frames)
        pixels = torch.from_numpy(np.ascontiguousarray(image)).permute(2, 0, 1)[None, :, None]
        return {**self.embed_prompts([prompt]), "image_tokens": self.video_to_tokens(pixels.to(self.device))}

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        num_tokens = (height // self.spatial_unit) * (width // self.spatial_unit)
        shape = (self.token_features, num_tokens)
        return {**super().embedding_shapes(height, width), "image_tokens": (shape, torch.float32)}

    def video_inputs(self, video: Tensor, timestep: Tensor, embeddings: dict[str, Tensor]) -> Keywords:
        frame = embeddings["image_tokens"].to(video)
        num_given = frame.shape[2]
        is_noisy = torch.arange(video.shape[2], device=video.device) >= num_given
        return {
            "hidden_states": torch.cat([frame, video[:, :, num_given:]], dim=2).mT,
            "timestep": timestep[:, None] * is_noisy,
            "audio_timestep": timestep,
        }

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        """The velocity. That of the first latent frame leads to the given frame."""
        velocity = super().denoise(latents, sigma, embeddings)
        return lead_to_given(velocity, latents, embeddings["image_tokens"], sigma)
