"""Stable Diffusion 1.5, 2 (arXiv 2112.10752) and XL (arXiv 2307.01952): UNets that predict noise or v.

They were trained on variance-preserving paths x_vp = a x0 + c eps with a^2 + c^2 = 1 at 1000 timesteps, and are flow
models after a change of scale and time: with s = c / (a + c)

    x = x_vp / (a + c) = (1 - s) x0 + s eps,    velocity = eps - x0 = (eps - x) / (1 - s)

so that one deterministic step in s is one step of DDIM (arXiv 2010.02502), and ``DDIM`` of
``sfumato.algorithms.dynamics`` with eta 1 the step that DDPO samples with (arXiv 2305.13301). The schedule of Stable
Diffusion begins below s = 1: ``start`` scales the first latents accordingly.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from sfumato.algorithms.device import to_device
from sfumato.errors import ConfigError
from sfumato.models.diffusion import plans
from sfumato.models.diffusion.conditioning import Conditioning
from sfumato.models.diffusion.latents import KLLatents
from sfumato.models.diffusion.schedulers import as_ddim, check_unet_scheduler, unet_levels, unet_sigmas, unet_start
from sfumato.models.diffusion.scratch import (
    build_autoencoder,
    build_clip_encoder,
    build_clip_tokenizer,
    section_of,
    unknown_keys,
)
from sfumato.parallel.plan import ParallelPlan

PUBLISHED_SCHEDULE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}
"""What the scheduler of every Stable Diffusion up to XL says; a description may say otherwise."""

SAME_TIMESTEP = 1e-3
"""A timestep this near to an integer is that integer: it was a point of the schedule, blurred by float32."""


class StableDiffusion(KLLatents):
    """Stable Diffusion 1.5 and 2."""

    pipeline_class: ClassVar[str] = "StableDiffusionPipeline"
    parallel_plan: ClassVar[ParallelPlan] = plans.UNET
    shortest_prompt: ClassVar[int] = 0  # CLIP's length is its own
    lora_targets: ClassVar[tuple[str, ...]] = (  # diffusers examples/text_to_image/train_text_to_image_lora.py
        "to_k",
        "to_out.0",
        "to_q",
        "to_v",
    )
    denoiser_name: ClassVar[str] = "unet"
    encoder_names: ClassVar[tuple[str, ...]] = ("text_encoder",)

    def __init__(self, pipeline: Any, *args: Any, **kwargs: Any) -> None:
        """As ``DiffusionModel``. Raises ConfigError for a UNet with further inputs."""
        super().__init__(pipeline, *args, **kwargs)
        unet, channels = pipeline.unet.config, pipeline.vae.config.latent_channels
        if unet.in_channels != channels or unet.time_cond_proj_dim is not None:
            raise ConfigError(
                f"{self.pipeline_class}: the UNet takes more than {channels} channels of latents, timestep and text "
                "(inpainting, or guidance as an input, in_channels and time_cond_proj_dim): this is not supported"
            )
        self.levels = unet_levels(pipeline.scheduler)
        """float64, ascending: s of each timestep."""
        self.largest = float(self.levels[-1])

    @classmethod
    def build(cls, description: dict[str, Any], seed: int) -> Any:
        """Of sections ``unet``, which is needed, ``vae``, ``scheduler`` (of DDIMScheduler, over
        ``PUBLISHED_SCHEDULE``), ``text_encoder`` (width, layers, ... of each CLIP encoder) and ``tokenizer`` (words,
        max_length).
        """
        import diffusers

        sections = {"pipeline", "unet", "vae", "scheduler", "text_encoder", "tokenizer"}
        unknown_keys(description, sections, needed="unet")
        unet = section_of(description, "unet", diffusers.UNet2DConditionModel)
        vae = section_of(description, "vae", build_autoencoder, reserved=["shift_factor"])
        scheduler = PUBLISHED_SCHEDULE | section_of(description, "scheduler", diffusers.DDIMScheduler)
        tokens = section_of(description, "tokenizer", build_clip_tokenizer)
        text = section_of(description, "text_encoder", build_clip_encoder, reserved=["tokenizer", "projection"])
        tokenizer = build_clip_tokenizer(**tokens)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            parts = cls._build_encoders(tokenizer, text)
            parts["unet"] = diffusers.UNet2DConditionModel(**cls._unet_settings(unet, parts))
            parts["vae"] = build_autoencoder(**vae)
        pipeline = getattr(diffusers, cls.pipeline_class)
        return pipeline(scheduler=diffusers.DDIMScheduler(**scheduler), **parts)

    @classmethod
    def _build_encoders(cls, tokenizer: Any, settings: dict[str, Any]) -> dict[str, Any]:
        """Tokenizers and text encoders, and what else the pipeline is made of besides networks."""
        return {
            "tokenizer": tokenizer,
            "text_encoder": build_clip_encoder(tokenizer, projection=False, **settings),
            "safety_checker": None,
            "feature_extractor": None,
            "requires_safety_checker": False,
        }

    @classmethod
    def _unet_settings(cls, settings: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the UNet with those that follow from the encoders."""
        return {"cross_attention_dim": parts["text_encoder"].config.hidden_size, **settings}

    @property
    def prompt_limit(self) -> int:
        """What CLIP reads."""
        return self.pipeline.tokenizer.model_max_length

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]``, as the pipeline itself computes them."""
        return {"prompt_embeds": self.pipeline.encode_prompt(prompts, self.device, 1, False)[0]}

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        if frames != 1:
            raise ValueError(f"{self.pipeline_class} makes single images")
        factor = self.pipeline.vae_scale_factor
        if height % factor or width % factor:
            raise ValueError(f"height {height} and width {width} must be multiples of {factor} pixels")
        return (self.denoiser.config.in_channels, height // factor, width // factor)

    @property
    def probe_size(self) -> int:
        return 2 * self.pipeline.vae_scale_factor

    def _latent_scale(self, like: Tensor) -> tuple[Tensor, Tensor]:
        config = self.pipeline.vae.config
        mean = getattr(config, "latents_mean", None) or [0.0]
        std = getattr(config, "latents_std", None) or [1.0]
        shape = {"dtype": torch.float32, "device": like.device}
        scale = config.scaling_factor / torch.tensor(std, **shape)
        return torch.tensor(mean, **shape)[:, None, None], scale[:, None, None]

    def check_scheduler(self) -> None:
        check_unet_scheduler(self.pipeline.scheduler)

    def schedule(self) -> Any:
        """A DDIMScheduler with the noise schedule and the spacing of timesteps of the pipeline's scheduler."""
        return as_ddim(self.pipeline.scheduler)

    def sigmas(self, num_steps: int, latent_shape: Sequence[int]) -> Tensor:
        """s of the timesteps or noise levels of the pipeline's scheduler, then 0.

        Under ``set_alpha_to_one`` false diffusers' DDIM stops at the noise of the first timestep (s = 0.028 in Stable
        Diffusion); here the end is the image, as with EulerDiscreteScheduler, which XL is published with. Under
        ``timestep_spacing`` trailing or linspace, diffusers' DDIM steps to a level beside the next one when the number
        of steps does not divide that of timesteps; here levels follow each other.
        """
        return unet_sigmas(self.pipeline.scheduler, num_steps, self.levels)

    def start(self, noise: Tensor, sigma: Tensor) -> Tensor:
        """Noise of the variance that the pipeline's scheduler starts with."""
        return noise * unet_start(self.pipeline.scheduler, sigma)

    def training_sigma(self, sigma: Tensor) -> Tensor:
        """s of the timestep at this fraction of the schedule, so that a uniform density is that of the training."""
        levels = self.levels.to(sigma.device)
        place = sigma.double() * (len(levels) - 1)
        lower = place.floor().long().clamp(0, len(levels) - 2)
        return torch.lerp(levels[lower], levels[lower + 1], place - lower).to(torch.float32)

    def loss_weight(self, sigma: Tensor) -> Tensor:
        """Turns the squared error of the velocity into that of the network's own prediction, which it was trained by.

        (1 - s)^2 for noise and (1 - s)^2 + s^2 for v.
        """
        noise = self.pipeline.scheduler.config.prediction_type == "epsilon"
        return (1 - sigma) ** 2 if noise else (1 - sigma) ** 2 + sigma**2

    @property
    def shift(self) -> float:
        return 1.0

    def timestep(self, sigma: Tensor) -> Tensor:
        """The timestep, between two if need be, whose noise level is ``sigma``; the nearest one outside of them."""
        levels = self.levels.to(sigma.device)
        upper = torch.searchsorted(levels, sigma.double().contiguous()).clamp(1, len(levels) - 1)
        below, above = levels[upper - 1], levels[upper]
        interpolated = upper - 1 + ((sigma - below) / (above - below)).clamp(0, 1)
        nearest = interpolated.round()
        return torch.where((interpolated - nearest).abs() < SAME_TIMESTEP, nearest, interpolated).to(torch.float32)

    @property
    def input_dtype(self) -> torch.dtype:
        """float32, in which latents change their scale; the UNet then gets them in the dtype of its weights."""
        return torch.float32

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        """The velocity, float32. Beyond the largest noise level of the schedule the network is asked as if at it."""
        sigma = sigma.to(latents.device, torch.float32)
        s = sigma.reshape(-1, 1, 1, 1)
        norm = torch.sqrt((1 - s) ** 2 + s**2)  # 1 / (a + c)
        x, dtype = latents.float(), super().input_dtype
        predicted = self.denoiser(
            (x / norm).to(dtype),
            self.timestep(sigma),
            encoder_hidden_states=embeddings["prompt_embeds"].to(dtype),
            added_cond_kwargs=self._added_conditions(latents, embeddings),
            return_dict=False,
        )[0].float()
        if self.pipeline.scheduler.config.prediction_type == "v_prediction":
            return predicted / norm + (2 * s - 1) * x / norm**2
        return (predicted - x) / (1 - s.clamp(max=self.largest))

    def _added_conditions(self, latents: Tensor, embeddings: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """What else the UNet is conditioned on, by its names."""
        return None

    def comfyui_name(self, layer: str) -> str:
        """kohya's name, which diffusers reads, too."""
        return f"lora_unet_{layer.replace('.', '_')}"

    def parallelize(self, mesh: Any, config: Any) -> None:
        if mesh.layout.cp > 1:
            raise ConfigError(
                "train.context_parallel_size and train.ulysses_parallel_size: a UNet's convolutions need their "
                "neighbours, so its images cannot be cut: set both to 1"
            )
        super().parallelize(mesh, config)


class StableDiffusionXL(StableDiffusion):
    """Stable Diffusion XL: two text encoders, a pooled embedding, and size and crop of the image as conditions."""

    pipeline_class: ClassVar[str] = "StableDiffusionXLPipeline"
    encoder_names: ClassVar[tuple[str, ...]] = ("text_encoder", "text_encoder_2")

    @classmethod
    def _build_encoders(cls, tokenizer: Any, settings: dict[str, Any]) -> dict[str, Any]:
        return {
            "tokenizer": tokenizer,
            "tokenizer_2": copy.deepcopy(tokenizer),
            "text_encoder": build_clip_encoder(tokenizer, projection=False, **settings),
            "text_encoder_2": build_clip_encoder(tokenizer, **settings),
            "add_watermarker": False,
        }

    @classmethod
    def _unet_settings(cls, settings: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
        first, second = parts["text_encoder"].config, parts["text_encoder_2"].config
        time_width = settings.get("addition_time_embed_dim", 8)
        return {
            "cross_attention_dim": first.hidden_size + second.hidden_size,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": time_width,
            "projection_class_embeddings_input_dim": second.projection_dim + 6 * time_width,
            **settings,
        }

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` and ``pooled`` ``[B, P]``.

        Zeros for the empty prompt where the pipeline says ``force_zeros_for_empty_prompt``, as it guides away from.
        """
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompts, device=self.device, do_classifier_free_guidance=False
        )
        if self.pipeline.config.force_zeros_for_empty_prompt:
            has_text = torch.tensor([prompt != "" for prompt in prompts], device=embeds.device)
            embeds = torch.where(has_text[:, None, None], embeds, 0)
            pooled = torch.where(has_text[:, None], pooled, 0)
        return {"prompt_embeds": embeds, "pooled": pooled}

    def with_framing(self, conditioning: Conditioning, framing: Tensor | None) -> Conditioning:
        if framing is None:
            return conditioning
        tensors = {**conditioning.tensors, "framing": to_device(framing, self.device)}
        return replace(conditioning, tensors=tensors)

    def _added_conditions(self, latents: Tensor, embeddings: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """The pooled embedding, and six numbers of each image: its original size, where it was cut, the size made.

        In training those of the picture, as in diffusers' train_text_to_image_sdxl.py; what is drawn is as large as it
        was, and whole, as in the pipeline.
        """
        factor = self.pipeline.vae_scale_factor
        size = [latents.shape[-2] * factor, latents.shape[-1] * factor]
        drawn = torch.tensor([*size, 0, 0, *size], dtype=torch.float32, device=latents.device)
        times = drawn.expand(len(latents), -1)
        if "framing" in embeddings:
            times = torch.cat([embeddings["framing"].to(times), times[:, 4:]], dim=1)
        return {"text_embeds": embeddings["pooled"].float(), "time_ids": times}
