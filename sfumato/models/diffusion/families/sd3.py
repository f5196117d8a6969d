"""Stable Diffusion 3 and 3.5 (arXiv 2403.03206): SD3Transformer2DModel, two CLIP encoders, optionally T5."""


# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from sfumato.models.diffusion import plans
from sfumato.models.diffusion.latents import FlowSchedule, KLLatents
from sfumato.models.diffusion.scratch import (
    build_autoencoder,
    build_clip_encoder,
    build_clip_tokenizer,
    build_t5_encoder,
    build_t5_tokenizer,
    section_of,
    start_at_zero,
    unknown_keys,
)

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline
    from transformers import CLIPTextModelWithProjection


class StableDiffusion3(KLLatents, FlowSchedule):
    """The SD3 family."""

    pipeline_class = "StableDiffusion3Pipeline"
    parallel_plan = plans.SD3
    shortest_prompt = 0
    largest_shift = 1.16
    lora_targets = plans.JOINT_TARGETS  # flow_grpo scripts/train_sd3.py
    caches_steps = True
    encoder_names = ("text_encoder", "text_encoder_2", "text_encoder_3")
    optional_parts = ("text_encoder_3",)

    @classmethod
    def build(cls, description: Mapping[str, object], seed: int) -> DiffusionPipeline:
        """Builds a pipeline with random weights.

        Sections are ``transformer``, which is needed, ``vae``, ``scheduler`` (arguments of their diffusers classes),
        ``text_encoder`` (width, layers, ... of both CLIP encoders), ``tokenizer`` (words, max_length), and optionally
        ``t5``. Without T5, diffusers loads the saved folder only when it is passed text_encoder_3=None.
        """
        from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline

        sections = {"pipeline", "transformer", "vae", "scheduler", "text_encoder", "tokenizer", "t5"}
        unknown_keys(description, sections, needed="transformer")
        denoiser_settings = section_of(description, "transformer", SD3Transformer2DModel)
        vae_settings = section_of(description, "vae", build_autoencoder)
        scheduler = section_of(description, "scheduler", FlowMatchEulerDiscreteScheduler)
        tokens = section_of(description, "tokenizer", build_clip_tokenizer)
        text = section_of(description, "text_encoder", build_clip_encoder, reserved=["tokenizer", "projection"])
        has_t5 = description.get("t5") is not None
        t5 = section_of(description, "t5", build_t5_encoder, reserved=["tokenizer", "width"]) if has_t5 else None
        words = tokens.get("words", ())
        tokenizer = build_clip_tokenizer(**tokens)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            encoders = [cast("CLIPTextModelWithProjection", build_clip_encoder(tokenizer, **text)) for _ in range(2)]
            width = sum(encoder.config.hidden_size for encoder in encoders)
            pooled = sum(encoder.config.projection_dim for encoder in encoders)  # pyright: ignore[reportArgumentType, reportCallIssue]
            settings = {"joint_attention_dim": width, "pooled_projection_dim": pooled, **denoiser_settings}
            transformer = SD3Transformer2DModel(**settings)
            modulations = [
                module
                for name, module in transformer.named_modules()
                if isinstance(module, torch.nn.Linear) and ".norm" in f".{name}" and name.endswith("linear")
            ]
            start_at_zero(transformer.proj_out, *modulations)  # adaLN-Zero, as DiT does (arXiv 2212.09748)
            vae = build_autoencoder(**vae_settings)
            t5_tokenizer = None if t5 is None else build_t5_tokenizer(words)
            t5_encoder = None if t5 is None else build_t5_encoder(t5_tokenizer, settings["joint_attention_dim"], **t5)  # pyright: ignore[reportArgumentType]
            if t5_encoder is not None:  # random features would disturb; the pipeline has zeros for a missing T5, too
                torch.nn.init.zeros_(t5_encoder.encoder.final_layer_norm.weight)
        return StableDiffusion3Pipeline(
            transformer=transformer,
            scheduler=FlowMatchEulerDiscreteScheduler(**scheduler),
            vae=vae,
            text_encoder=encoders[0],
            tokenizer=tokenizer,
            text_encoder_2=encoders[1],
            tokenizer_2=copy.deepcopy(tokenizer),
            text_encoder_3=t5_encoder,  # pyright: ignore[reportArgumentType]
            tokenizer_3=t5_tokenizer,
        )

    @property
    def prompt_tokenizer(self) -> str:  # type: ignore[override]
        """The tokenizer of T5, if the pipeline has T5 and ``max_sequence_length`` leaves it room for a word."""
        reads_by_t5 = self.max_sequence_length > 1 and self.pipeline.text_encoder_3 is not None
        return "tokenizer_3" if reads_by_t5 else "tokenizer"

    @property
    def prompt_limit(self) -> int:
        """Most tokens of a prompt that T5 reads, or CLIP where T5 is not used."""
        is_clip = self.prompt_tokenizer == "tokenizer"
        return self.pipeline.tokenizer.model_max_length if is_clip else self.max_sequence_length

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` and ``pooled`` ``[B, P]``, as the pipeline itself computes them."""
        pipeline = self.pipeline
        if self.max_sequence_length == 0 and pipeline.text_encoder_3 is not None:
            pipeline = copy.copy(pipeline)
            pipeline.text_encoder_3 = None  # no tokens of T5: the pipeline pads to max_sequence_length, which is 0
        prompt_embeds, _, pooled, _ = pipeline.encode_prompt(
            prompt=prompts,
            prompt_2=None,
            prompt_3=None,
            device=self.device,
            do_classifier_free_guidance=False,
            max_sequence_length=self.max_sequence_length,
        )
        return {"prompt_embeds": prompt_embeds, "pooled": pooled}

    @property
    def longest_side(self) -> int:
        return self.probe_size * self.denoiser.config.pos_embed_max_size

    @property
    def patch(self) -> int:
        return self.pipeline.patch_size

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        dtype = self.input_dtype
        return self.denoiser(
            hidden_states=latents,
            timestep=self.timestep(sigma.to(latents.device)),
            encoder_hidden_states=embeddings["prompt_embeds"].to(dtype),
            pooled_projections=embeddings["pooled"].to(dtype),
            return_dict=False,
        )[0]
