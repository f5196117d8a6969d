"""Wan 2.1 and 2.2 (arXiv 2503.20314): videos from text; ``wan_image.py`` has those from given frames, too.

Latents are ``[B, C, F, H, W]``: the first frame becomes a latent frame of its own, and so do each four frames after it.
A video of one frame is an image. Wan 2.2 A14B has two transformers, one for high noise levels and one for low ones,
which are trained as one module. Wan 2.2 5B gives each token its own timestep (``expand_timesteps``).
"""


# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

import torch
from torch import Tensor, nn

from sfumato.config.open_mappings import Keywords
from sfumato.models.diffusion import plans
from sfumato.models.diffusion.families.wan_pair import WanDenoisers
from sfumato.models.diffusion.latents import FlowSchedule, PaddedPrompts, VideoLatents
from sfumato.models.diffusion.scratch import (
    build_clip_vision_encoder,
    build_t5_tokenizer,
    build_umt5_encoder,
    build_wan_autoencoder,
    section_of,
    start_at_zero,
    unknown_keys,
)

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline


SETTINGS = ("boundary_ratio", "expand_timesteps")
"""Arguments of the pipeline that a description may set besides its sections."""

PUBLISHED_SCHEDULE = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
"""Settings of the UniPCMultistepScheduler of the published Wan 2.1; the flow_shift is 3 for 480p and 5 for 720p."""

ALMOST_ONE = 2e-6
"""A noise level closer to 1 than this becomes 1: UniPC's schedule avoids 1 for a logarithm that is not needed here."""


class Wan(WanDenoisers, PaddedPrompts, VideoLatents, FlowSchedule):
    """Text to video."""

    pipeline_class = "WanPipeline"
    parallel_plan = plans.WAN
    lora_targets = ("to_k", "to_out.0", "to_q", "to_v")  # flow_grpo scripts/train_wan2_1.py
    caches_steps = True
    knows_size = False
    mask_dtype = None
    sections: ClassVar[tuple[str, ...]] = (
        "transformer",
        "transformer_2",
        "vae",
        "scheduler",
        "text_encoder",
        "tokenizer",
    )
    """Names of the sections of a description."""

    @classmethod
    def build(cls, description: Mapping[str, object], seed: int) -> DiffusionPipeline:
        """Builds a pipeline with random weights.

        Sections are ``transformer`` (of WanTransformer3DModel), which is needed, optionally ``transformer_2``
        (settings that differ; then ``boundary_ratio``), ``vae`` (of ``build_wan_autoencoder``), ``scheduler`` (of
        UniPCMultistepScheduler), ``text_encoder``, ``tokenizer`` (words), optionally ``image_encoder``, and
        ``expand_timesteps``. Channels and text widths of the transformer follow from the other sections.
        """
        import diffusers

        unknown_keys(description, {"pipeline", *SETTINGS, *cls.sections}, needed="transformer")
        first = section_of(description, "transformer", diffusers.WanTransformer3DModel)
        second = section_of(description, "transformer_2", diffusers.WanTransformer3DModel)
        vae_settings = section_of(description, "vae", build_wan_autoencoder)
        scheduler = section_of(description, "scheduler", diffusers.UniPCMultistepScheduler)
        text = section_of(description, "text_encoder", build_umt5_encoder, reserved=["tokenizer"])
        vision = section_of(description, "image_encoder", build_clip_vision_encoder)
        tokenizer = build_t5_tokenizer(**section_of(description, "tokenizer", build_t5_tokenizer))
        settings = {name: description[name] for name in SETTINGS if name in description}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            parts: Keywords = {
                "tokenizer": tokenizer,
                "text_encoder": build_umt5_encoder(tokenizer, **text),
                "vae": build_wan_autoencoder(**vae_settings),
            }
            if "image_encoder" in description:
                parts["image_encoder"], parts["image_processor"] = build_clip_vision_encoder(**vision)
            widths = cls._infer_settings(parts, bool(settings.get("expand_timesteps")), first)
            parts["transformer"] = _build_transformer({**widths, **first})
            if "transformer_2" in description:
                parts["transformer_2"] = _build_transformer({**widths, **first, **second})
        scheduler = diffusers.UniPCMultistepScheduler(**{**PUBLISHED_SCHEDULE, **scheduler})
        return getattr(diffusers, cls.pipeline_class)(scheduler=scheduler, **parts, **settings)

    @classmethod
    def _infer_settings(cls, parts: Keywords, expands: bool, settings: dict[str, object]) -> dict[str, object]:
        """Arguments of the transformers that follow from the other components.

        Args:
            parts: components of the pipeline, by name.
            expands: ``expand_timesteps`` of the pipeline.
            settings: arguments of the transformer in the description.
        """
        channels = parts["vae"].config.z_dim
        return {"in_channels": channels, "out_channels": channels, "text_dim": parts["text_encoder"].config.d_model}

    def comfyui_name(self, layer: str) -> str:
        """The name in the published model's file."""
        from sfumato.models.diffusion.single_file import name_in_file

        return f"diffusion_model.{name_in_file(layer, 'WanTransformer3DModel')}"

    @property
    def input_dtype(self) -> torch.dtype:
        """dtype of the patch embedding: diffusers keeps other parameters in float32, the first one among them."""
        return self._network.patch_embedding.weight.dtype

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]``, zero behind the prompt's end, as the pipeline itself computes them."""
        from diffusers import WanPipeline

        # The copy of this method in WanImageToVideoPipeline fails without ftfy, so that of text to video serves both.
        embeds = WanPipeline._get_t5_prompt_embeds(
            cast("WanPipeline", self.pipeline),
            prompts,
            max_sequence_length=self.max_sequence_length,
            device=self.device,
        )
        return {"prompt_embeds": embeds}

    @property
    def spatial_patch(self) -> int:
        return self._network.config.patch_size[1]

    @property
    def longest_side(self) -> int:
        return self.probe_size * self._network.config.rope_max_seq_len

    def sigmas(self, num_steps: int, latent_shape: Sequence[int]) -> Tensor:
        """Noise levels of the pipeline's scheduler; a first one of 1 - 1e-6 becomes 1 (see ``ALMOST_ONE``)."""
        sigmas = super().sigmas(num_steps, latent_shape)
        return torch.where(sigmas > 1 - ALMOST_ONE, 1.0, sigmas)

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        return self.denoiser(
            hidden_states=latents,
            timestep=self.timestep(sigma.to(latents.device)),
            encoder_hidden_states=embeddings["prompt_embeds"].to(latents.dtype),
            return_dict=False,
        )[0]


def _build_transformer(settings: Keywords) -> nn.Module:
    """A WanTransformer3DModel with random weights, whose output is zero at first."""
    from diffusers import WanTransformer3DModel

    transformer = WanTransformer3DModel(**settings)
    start_at_zero(transformer.proj_out)
    return transformer
