"""Stable Diffusion 1.5, 2 (arXiv 2112.10752) and XL (arXiv 2307.01952): UNets that predict noise or v.

They were trained on variance-preserving paths x_vp = a x0 + c eps with a^2 + c^2 = 1 at 1000 timesteps, and are flow
models after a change of scale and time: with s = c / (a + c)

    x = x_vp / (a + c) = (1 - s) x0 + s eps,    velocity = eps - x0 = (eps - x) / (1 - s)

so that one deterministic step in s is one step of DDIM (arXiv 2010.02502), and ``DDIM`` of
``sfumato.algorithms.dynamics`` with eta 1 the step that DDPO samples with (arXiv 2305.13301). The schedule of Stable
Diffusion begins below s = 1: ``start`` scales the first latents accordingly.
"""


# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

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

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline
    from diffusers.schedulers.scheduling_ddim import DDIMScheduler
    from transformers import PreTrainedTokenizerBase

    from sfumato.config.sections import TrainConfig
    from sfumato.parallel.mesh import Mesh

PUBLISHED_SCHEDULE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "clip_sample": False,
    "set_alpha_to_one": False,
    "steps_offset": 1,
}
"""Scheduler settings of every published Stable Diffusion up to XL, which a description may override."""

SAME_TIMESTEP = 1e-3
"""A timestep this close to an integer is rounded to it: it was a point of the schedule before float32 rounding."""


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

    def __init__(self, pipeline: DiffusionPipeline, *args: Any, **kwargs: Any) -> None:
        """As ``DiffusionModel``. Raises ConfigError for a UNet with further inputs."""
        super().__init__(pipeline, *args, **kwargs)
        unet = pipeline.unet.config
        channels = pipeline.vae.config.latent_channels
        if unet.in_channels != channels or unet.time_cond_proj_dim is not None:
            raise ConfigError(
                f"{self.pipeline_class}: the UNet takes more than {channels} channels of latents, timestep and text "
                "(inpainting, or guidance as an input, in_channels and time_cond_proj_dim): this is not supported"
            )
        self.levels = unet_levels(pipeline.scheduler)
        """Noise level s of each timestep: float64, ascending."""
        self.largest = float(self.levels[-1])

    @classmethod
    def build(cls, description: Mapping[str, object], seed: int) -> DiffusionPipeline:
        """Builds a pipeline with random weights.

        Sections are ``unet``, which is needed, ``vae``, ``scheduler`` (of DDIMScheduler; it overrides
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
    def _build_encoders(cls, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> dict[str, object]:
        """Arguments of the pipeline besides UNet, autoencoder and scheduler: tokenizers, text encoders, flags."""
        return {
            "tokenizer": tokenizer,
            "text_encoder": build_clip_encoder(tokenizer, projection=False, **settings),
            "safety_checker": None,
            "feature_extractor": None,
            "requires_safety_checker": False,
        }

    @classmethod
    def _unet_settings(cls, settings: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
        """Arguments of the UNet: ``settings``, and widths that follow from the text encoders in ``parts``."""
        return {"cross_attention_dim": parts["text_encoder"].config.hidden_size, **settings}

    @property
    def prompt_limit(self) -> int:
        """Most tokens of a prompt that CLIP reads."""
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
        placement: dict[str, Any] = {"dtype": torch.float32, "device": like.device}
        scale = config.scaling_factor / torch.tensor(std, **placement)
        return torch.tensor(mean, **placement)[:, None, None], scale[:, None, None]

    def check_scheduler(self) -> None:
        check_unet_scheduler(self.pipeline.scheduler)

    def schedule(self) -> DDIMScheduler:
        """A DDIMScheduler with the noise schedule and timestep spacing of the pipeline's scheduler."""
        return as_ddim(self.pipeline.scheduler)

    def sigmas(self, num_steps: int, latent_shape: Sequence[int]) -> Tensor:
        """Noise levels s of the pipeline's scheduler, then 0.

        Trajectories differ from those of diffusers' DDIM in two points. With ``set_alpha_to_one`` false, DDIM stops at
        the noise level of the first timestep (s = 0.028 in Stable Diffusion); here it goes on to 0, as with
        EulerDiscreteScheduler, with which XL is published. With ``timestep_spacing`` trailing or linspace, a step of
        DDIM misses the next level if the number of steps does not divide that of timesteps; here it ends at that level.
        """
        return unet_sigmas(self.pipeline.scheduler, num_steps, self.levels)

    def start(self, noise: Tensor, sigma: Tensor) -> Tensor:
        """The noise, scaled to the variance with which the pipeline's scheduler starts."""
        return noise * unet_start(self.pipeline.scheduler, sigma)

    def training_sigma(self, sigma: Tensor) -> Tensor:
        """s of the timestep at a fraction ``sigma`` of the schedule.

        So uniform random numbers give the noise levels that the model was trained with.
        """
        levels = self.levels.to(sigma.device)
        place = sigma.double() * (len(levels) - 1)
        lower = place.floor().long().clamp(0, len(levels) - 2)
        return torch.lerp(levels[lower], levels[lower + 1], place - lower).to(torch.float32)

    def loss_weight(self, sigma: Tensor) -> Tensor:
        """Weight that makes the squared error of the velocity that of the network's prediction, its training objective.

        It is (1 - s)^2 for noise and (1 - s)^2 + s^2 for v.
        """
        predicts_noise = self.pipeline.scheduler.config.prediction_type == "epsilon"
        return (1 - sigma) ** 2 if predicts_noise else (1 - sigma) ** 2 + sigma**2

    @property
    def shift(self) -> float:
        return 1.0

    def timestep(self, sigma: Tensor) -> Tensor:
        """The timestep whose noise level is ``sigma``: interpolated between timesteps, and clamped to the schedule."""
        levels = self.levels.to(sigma.device)
        upper = torch.searchsorted(levels, sigma.double().contiguous()).clamp(1, len(levels) - 1)
        below = levels[upper - 1]
        above = levels[upper]
        interpolated = upper - 1 + ((sigma - below) / (above - below)).clamp(0, 1)
        nearest = interpolated.round()
        return torch.where((interpolated - nearest).abs() < SAME_TIMESTEP, nearest, interpolated).to(torch.float32)

    @property
    def input_dtype(self) -> torch.dtype:
        """float32, in which latents are rescaled before they are cast to the dtype of the UNet's weights."""
        return torch.float32

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        """The velocity, float32. A noise level above the schedule's largest one is treated as that one."""
        sigma = sigma.to(latents.device, torch.float32)
        s = sigma.reshape(-1, 1, 1, 1)
        norm = torch.sqrt((1 - s) ** 2 + s**2)  # 1 / (a + c)
        x = latents.float()
        dtype = super().input_dtype
        predicted = self.denoiser(
            (x / norm).to(dtype),
            self.timestep(sigma),
            encoder_hidden_states=embeddings["prompt_embeds"].to(dtype),
            added_cond_kwargs=self._added_conditions(latents, embeddings),
            return_dict=False,
        )[0].float()
        if self.pipeline.scheduler.config.prediction_type == "v_prediction":
            # v = a eps - c x0, with a = (1 - s) / norm and c = s / norm, solved for eps - x0.
            return predicted / norm + (2 * s - 1) * x / norm**2
        # Above the largest level of the schedule, and at s = 1, the divisor must not become 0.
        return (predicted - x) / (1 - s.clamp(max=self.largest))

    def _added_conditions(self, latents: Tensor, embeddings: dict[str, Tensor]) -> dict[str, Tensor] | None:
        """Further conditions of the UNet, by the names that it takes."""
        return None

    def comfyui_name(self, layer: str) -> str:
        """The name in kohya's format, which diffusers reads, too."""
        return f"lora_unet_{layer.replace('.', '_')}"

    def parallelize(self, mesh: Mesh, config: TrainConfig) -> None:
        if mesh.layout.cp > 1:
            raise ConfigError(
                "train.context_parallel_size and train.ulysses_parallel_size: a UNet's convolutions need their "
                "neighbours, so its images cannot be cut: set both to 1"
            )
        super().parallelize(mesh, config)


class StableDiffusionXL(StableDiffusion):
    """Stable Diffusion XL: two text encoders, and a pooled embedding, size and crop of the image as conditions."""

    pipeline_class: ClassVar[str] = "StableDiffusionXLPipeline"
    encoder_names: ClassVar[tuple[str, ...]] = ("text_encoder", "text_encoder_2")

    @classmethod
    def _build_encoders(cls, tokenizer: PreTrainedTokenizerBase, settings: dict[str, Any]) -> dict[str, object]:
        return {
            "tokenizer": tokenizer,
            "tokenizer_2": copy.deepcopy(tokenizer),
            "text_encoder": build_clip_encoder(tokenizer, projection=False, **settings),
            "text_encoder_2": build_clip_encoder(tokenizer, **settings),
            "add_watermarker": False,
        }

    @classmethod
    def _unet_settings(cls, settings: dict[str, Any], parts: dict[str, Any]) -> dict[str, Any]:
        first = parts["text_encoder"].config
        second = parts["text_encoder_2"].config
        time_width = settings.get("addition_time_embed_dim", 8)
        return {
            "cross_attention_dim": first.hidden_size + second.hidden_size,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": time_width,
            "projection_class_embeddings_input_dim": second.projection_dim + 6 * time_width,  # pooled, and six numbers
            **settings,
        }

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` and ``pooled`` ``[B, P]``.

        With the pipeline's ``force_zeros_for_empty_prompt`` both are zero for the empty prompt, as in its unconditional
        branch.
        """
        embeds, _, pooled, _ = self.pipeline.encode_prompt(
            prompts, device=self.device, do_classifier_free_guidance=False
        )
        if self.pipeline.config.force_zeros_for_empty_prompt:  # pyright: ignore[reportAttributeAccessIssue]  (a FrozenDict)
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
        """The pooled embedding, and six numbers of each image: original size, top left of the crop, size of the output.

        In training they are those of the picture, as in diffusers' train_text_to_image_sdxl.py. Otherwise the image is
        said to be original in size and not cropped, as in the pipeline.
        """
        factor = self.pipeline.vae_scale_factor
        size = [latents.shape[-2] * factor, latents.shape[-1] * factor]
        uncropped = torch.tensor([*size, 0, 0, *size], dtype=torch.float32, device=latents.device)
        time_ids = uncropped.expand(len(latents), -1)
        if "framing" in embeddings:
            time_ids = torch.cat([embeddings["framing"].to(time_ids), time_ids[:, 4:]], dim=1)
        return {"text_embeds": embeddings["pooled"].float(), "time_ids": time_ids}
