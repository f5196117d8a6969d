"""Wan 2.1 and 2.2 (arXiv 2503.20314): videos from text, or from text and a first frame.

Latents are ``[B, C, F, H, W]``: the first frame becomes a latent frame of its own, and so do each four frames after it.
A video of one frame is an image. Wan 2.2 A14B has two transformers, one for high noise levels and one for low ones,
which are trained as one module. Wan 2.2 5B gives each token its own timestep (``expand_timesteps``); the tokens of a
given first frame then have noise level 0.
"""


# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sfumato.config.open_mappings import Keywords
from sfumato.config.sections import TrainConfig
from sfumato.errors import ConfigError
from sfumato.models.diffusion import plans
from sfumato.models.diffusion.families.wan_pair import WanPair
from sfumato.models.diffusion.latents import FlowSchedule, VideoLatents, check_frames, check_size
from sfumato.models.diffusion.scratch import (
    build_clip_vision_encoder,
    build_t5_tokenizer,
    build_umt5_encoder,
    build_wan_autoencoder,
    section_of,
    start_at_zero,
    unknown_keys,
)
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.plan import ParallelPlan

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    from sfumato.models.diffusion.base import DiffusersModule

SETTINGS = ("boundary_ratio", "expand_timesteps")
"""Arguments of the pipeline that a description may set besides its sections."""

PUBLISHED_SCHEDULE = {"prediction_type": "flow_prediction", "use_flow_sigmas": True, "flow_shift": 3.0}
"""Settings of the UniPCMultistepScheduler of the published Wan 2.1; the flow_shift is 3 for 480p and 5 for 720p."""

TEXT_TOKENS = 512
"""Number of text tokens: behind image embeddings, diffusers takes this many tokens from the end for the text."""

COMFYUI_NAMES = {
    ".attn1.": ".self_attn.",
    ".attn2.": ".cross_attn.",
    ".add_k_proj": ".k_img",
    ".add_v_proj": ".v_img",
    ".to_q": ".q",
    ".to_k": ".k",
    ".to_v": ".v",
    ".to_out.0": ".o",
    ".ffn.net.0.proj": ".ffn.0",
    ".ffn.net.2": ".ffn.2",
    "condition_embedder.time_embedder.linear_1": "time_embedding.0",
    "condition_embedder.time_embedder.linear_2": "time_embedding.2",
    "condition_embedder.time_proj": "time_projection.1",
    "condition_embedder.text_embedder.linear_1": "text_embedding.0",
    "condition_embedder.text_embedder.linear_2": "text_embedding.2",
    "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
    "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
    "proj_out": "head.head",
}
"""Parts of the names of layers in diffusers, with those of the published model, which ComfyUI uses."""

ALMOST_ONE = 2e-6
"""A noise level closer to 1 than this becomes 1: UniPC's schedule avoids 1 for a logarithm that is not needed here."""


class Wan(VideoLatents, FlowSchedule):
    """Text to video."""

    pipeline_class: ClassVar[str] = "WanPipeline"
    parallel_plan: ClassVar[ParallelPlan] = plans.WAN
    lora_targets: ClassVar[tuple[str, ...]] = ("to_k", "to_out.0", "to_q", "to_v")  # flow_grpo scripts/train_wan2_1.py
    further_denoisers: ClassVar[tuple[str, ...]] = ("transformer_2",)
    caches_steps: ClassVar[bool] = True
    knows_size: ClassVar[bool] = False
    encoder_names: ClassVar[tuple[str, ...]] = ("text_encoder",)
    sections: ClassVar[tuple[str, ...]] = (
        "transformer",
        "transformer_2",
        "vae",
        "scheduler",
        "text_encoder",
        "tokenizer",
    )
    """Names of the sections of a description."""

    def __init__(self, pipeline: DiffusionPipeline, *args: Any, **kwargs: Any) -> None:
        """As ``DiffusionModel``. Raises ConfigError when a pipeline with two transformers lacks what they need."""
        self.guidance_scale_2: float | None = None
        """Guidance scale of the second of two transformers, for low noise levels; None is that of the first one."""
        first = pipeline.transformer
        second = pipeline.transformer_2
        if second is not None:
            ratio = pipeline.config.boundary_ratio  # pyright: ignore[reportAttributeAccessIssue]  (a FrozenDict)
            if first is None or ratio is None:
                raise ConfigError(
                    f"{self.pipeline_class}: transformer_2 needs transformer and boundary_ratio in model_index.json"
                )
            boundary = ratio * pipeline.scheduler.config.num_train_timesteps
            pipeline.transformer = WanPair(first, second, boundary)
            pipeline.transformer_2 = None
            self.parallel_plan = plans.WAN_PAIR  # type: ignore[misc]
            self.caches_steps = False  # type: ignore[misc]
        super().__init__(pipeline, *args, **kwargs)

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

    def split_denoiser(self, denoiser: nn.Module) -> dict[str, nn.Module]:
        return dict(denoiser.named_children()) if isinstance(denoiser, WanPair) else {self.denoiser_name: denoiser}

    def comfyui_name(self, layer: str) -> str:
        for name, published in COMFYUI_NAMES.items():
            layer = layer.replace(name, published)
        return f"diffusion_model.{layer}"

    @property
    def _network(self) -> DiffusersModule:
        """The transformer, or the first of two, whose configuration holds for both."""
        return getattr(self.denoiser, "transformer", self.denoiser)

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

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        encoder = self.pipeline.text_encoder
        return {"prompt_embeds": ((self.max_sequence_length, encoder.config.d_model), encoder.dtype)}

    @property
    def probe_size(self) -> int:
        return self.pipeline.vae_scale_factor_spatial * self._network.config.patch_size[1]

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        factor = self.pipeline.vae_scale_factor_spatial
        unit = self.probe_size
        check_size(height, width, unit, longest=unit * self._network.config.rope_max_seq_len)
        latent_frames = check_frames(frames, self.pipeline.vae_scale_factor_temporal)
        return (self.pipeline.vae.config.z_dim, latent_frames, height // factor, width // factor)

    def sigmas(self, num_steps: int, latent_shape: Sequence[int]) -> Tensor:
        """Noise levels of the pipeline's scheduler; a first one of 1 - 1e-6 becomes 1 (see ``ALMOST_ONE``)."""
        sigmas = super().sigmas(num_steps, latent_shape)
        return torch.where(sigmas > 1 - ALMOST_ONE, 1.0, sigmas)

    def set_second_guidance(self, scale: float) -> None:
        if not isinstance(self.denoiser, WanPair):
            super().set_second_guidance(scale)
        self.guidance_scale_2 = scale

    def guidance_at(self, scale: float, sigma: Tensor) -> float | Tensor:
        pair = self.denoiser
        if self.guidance_scale_2 is None or not hasattr(pair, "boundary"):
            return scale
        scales = torch.where(self.timestep(sigma) >= pair.boundary, scale, self.guidance_scale_2)
        return scales.reshape(-1, 1, 1, 1, 1)

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        return self.denoiser(
            hidden_states=latents,
            timestep=self.timestep(sigma.to(latents.device)),
            encoder_hidden_states=embeddings["prompt_embeds"].to(latents.dtype),
            return_dict=False,
        )[0]

    def parallelize(self, mesh: Mesh, config: TrainConfig) -> None:
        is_pair = isinstance(self.denoiser, WanPair)
        if is_pair:
            if config.enable_forward_prefetch:
                raise ConfigError(
                    "train.enable_forward_prefetch: of Wan's two transformers often only one runs, so the next block "
                    "is not known: set it to false"
                )
            if config.data_parallel_mode == "fsdp1":
                raise ConfigError(
                    "train.data_parallel_mode fsdp1 loses gradients of Wan's two transformers: take fsdp2 or ddp"
                )
            self.denoiser.mesh = mesh  # pyright: ignore[reportArgumentType]
        super().parallelize(mesh, config)
        if is_pair and self._dropout is not None:
            raise ConfigError(
                "model.lora.dropout: the two transformers take rows of a batch apart, so what is dropped cannot follow "
                "the sample: set it to 0"
            )


class WanImageToVideo(Wan):
    """A video from a first frame and a text, or from the first and the last frame.

    ``frames`` must be set before prompts and images are embedded.
    """

    pipeline_class: ClassVar[str] = "WanImageToVideoPipeline"
    takes_image: ClassVar[bool] = True
    encoder_names: ClassVar[tuple[str, ...]] = ("text_encoder", "image_encoder")
    optional_parts: ClassVar[tuple[str, ...]] = ("image_encoder",)
    sections: ClassVar[tuple[str, ...]] = (*Wan.sections, "image_encoder")

    def __init__(self, pipeline: DiffusionPipeline, *args: object, **kwargs: object) -> None:
        """As ``Wan``. Raises ConfigError also when the pipeline lacks an image encoder that the transformer needs."""
        super().__init__(pipeline, *args, **kwargs)
        network = self._network.config
        if network.image_dim is not None and pipeline.image_encoder is None:
            raise ConfigError(
                f"{self.pipeline_class}: the transformer takes what an image encoder sees (image_dim), and there is no "
                "image_encoder: take a whole pipeline"
            )
        # diffusers joins the embeddings of two images where pos_embed_seq_len is set, and then always
        sees_both = network.image_dim is not None and network.pos_embed_seq_len is not None
        if sees_both and isinstance(self.denoiser, WanPair):
            raise ConfigError(
                f"{self.pipeline_class}: of two transformers, none may take the embeddings of two images "
                "(pos_embed_seq_len)"
            )
        expands = pipeline.config.expand_timesteps  # pyright: ignore[reportAttributeAccessIssue]  (a FrozenDict)
        self.least_source_images = 2 if sees_both else 1
        self.most_source_images = 1 if expands or (network.image_dim is not None and not sees_both) else 2

    @classmethod
    def _infer_settings(cls, parts: Keywords, expands: bool, settings: Keywords) -> Keywords:
        inferred = super()._infer_settings(parts, expands, settings)
        vae = parts["vae"].config
        vision = parts.get("image_encoder")
        if not expands:  # the mask of the given frame and its latents are further channels
            inferred["in_channels"] = 2 * vae.z_dim + vae.scale_factor_temporal
        if vision is not None:
            inferred["image_dim"] = vision.config.hidden_size
            num_heads = settings.get("num_attention_heads")
            head_width = settings.get("attention_head_dim")
            if num_heads and head_width:
                inferred["added_kv_proj_dim"] = num_heads * head_width
        return inferred

    def embed_edit(self, prompt: str, image: np.ndarray) -> dict[str, Tensor]:
        """``prompt_embeds``, ``image_latents`` ``[1, C, F, H, W]`` of the first frame, and ``image_embeds`` of CLIP.

        The frame is encoded as a video that goes on with ``frames - 1`` grey frames, except with ``expand_timesteps``.
        With a last frame that is the last of these, ``image_embeds`` is ``[1, 2, T, D]``, and ``has_last`` ``[1, 1]``
        is true.

        Raises:
            ConfigError: where a last frame would be the first one, too.
        """
        pipeline = self.pipeline
        network = self._network
        height, width = image.shape[-3:-1]
        self.latent_shape(height, width, self.frames)
        embeddings = self.embed_prompts([prompt])
        pictures = image if image.ndim == 4 else image[None]
        video = torch.from_numpy(pictures.copy()).to(self.device).permute(3, 0, 1, 2)[None] / 127.5 - 1
        if len(pictures) > 1:
            if self.frames == 1:
                raise ConfigError("a first and a last frame are those of a video: set num_frames to more than 1")
            grey = video.new_zeros(1, 3, self.frames - 2, height, width)
            video = torch.cat([video[:, :, :1], grey, video[:, :, 1:]], dim=2)
            embeddings["has_last"] = torch.ones(1, 1, dtype=torch.bool, device=self.device)
        elif not pipeline.config.expand_timesteps:  # pyright: ignore[reportAttributeAccessIssue]  (a FrozenDict)
            video = torch.nn.functional.pad(video, (0, 0, 0, 0, 0, self.frames - 1))
        embeddings["image_latents"] = self._encode(video.to(pipeline.vae.dtype))
        if network.config.image_dim is None:
            return embeddings
        if self.max_sequence_length != TEXT_TOKENS:
            raise ConfigError(
                f"model.max_sequence_length {self.max_sequence_length}: this model reads image and text by their place "
                f"in {TEXT_TOKENS} tokens of text; set it to {TEXT_TOKENS}"
            )
        seen = pipeline.encode_image([Image.fromarray(picture) for picture in pictures], self.device)
        embeddings["image_embeds"] = seen[None] if len(pictures) > 1 else seen
        return embeddings

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        """The velocity. With ``expand_timesteps`` that of the first latent frame points to the given frame."""
        condition = embeddings["image_latents"].to(latents.dtype)
        timestep = self.timestep(sigma.to(latents.device))
        expands = self.pipeline.config.expand_timesteps  # pyright: ignore[reportAttributeAccessIssue]  (a FrozenDict)
        if not expands and condition.shape[2:] != latents.shape[2:]:
            raise ValueError(
                f"latents have frames and sizes {tuple(latents.shape[2:])}, the images were embedded for "
                f"{tuple(condition.shape[2:])}: set model.frames, and sizes, before"
            )
        if expands:
            inputs = torch.cat([condition, latents[:, :, 1:]], dim=2)
            timestep = self._token_timesteps(latents, timestep)
        else:
            mask = torch.zeros_like(latents[:, :1]).repeat(1, self.pipeline.vae_scale_factor_temporal, 1, 1, 1)
            mask[:, :, 0] = 1
            if "has_last" in embeddings:  # the last of the frames that the last latent frame stands for
                mask[:, -1, -1] = embeddings["has_last"].to(mask.dtype)[:, :, None]
            inputs = torch.cat([latents, mask, condition], dim=1)
        image_arguments = {}
        if "image_embeds" in embeddings:
            seen = embeddings["image_embeds"].to(latents.dtype)
            # of two images diffusers takes the rows one after the other
            image_arguments["encoder_hidden_states_image"] = seen.flatten(0, 1) if seen.ndim == 4 else seen
        velocity = self.denoiser(
            hidden_states=inputs,
            timestep=timestep,
            encoder_hidden_states=embeddings["prompt_embeds"].to(latents.dtype),
            **image_arguments,
            return_dict=False,
        )[0]
        if not expands:
            return velocity
        # velocity = eps - x0 = (x - x0) / sigma, with x0 the latents of the given frame.
        first_velocity = (latents[:, :, :1] - condition) / sigma.to(latents.device, latents.dtype).reshape(
            -1, 1, 1, 1, 1
        )
        return torch.cat([first_velocity.to(velocity.dtype), velocity[:, :, 1:]], dim=2)

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        shapes = super().embedding_shapes(height, width)
        frames = 1 if self.pipeline.config.expand_timesteps else self.frames  # pyright: ignore[reportAttributeAccessIssue]  (a FrozenDict)
        shapes["image_latents"] = self.latent_shape(height, width, frames), torch.float32
        if self._network.config.image_dim is not None:
            encoder = self.pipeline.image_encoder
            num_tokens = (encoder.config.image_size // encoder.config.patch_size) ** 2 + 1
            several = (self.max_source_images,) if self.max_source_images > 1 else ()
            shapes["image_embeds"] = (*several, num_tokens, encoder.config.hidden_size), encoder.dtype
        if self.max_source_images > 1:
            shapes["has_last"] = (1,), torch.bool
        return shapes

    def _token_timesteps(self, latents: Tensor, timestep: Tensor) -> Tensor:
        """The timestep of each token ``[B, S]``: 0 in the first latent frame, which is given."""
        _, patch_height, patch_width = self._network.config.patch_size
        tokens_per_frame = (latents.shape[3] // patch_height) * (latents.shape[4] // patch_width)
        noisy = torch.ones(latents.shape[2], device=latents.device)
        noisy[0] = 0
        return timestep[:, None] * noisy.repeat_interleave(tokens_per_frame)

    def parallelize(self, mesh: Mesh, config: TrainConfig) -> None:
        if mesh.layout.cp > 1 and self.pipeline.config.expand_timesteps:  # pyright: ignore[reportAttributeAccessIssue]  (a FrozenDict)
            raise ConfigError(
                "train.context_parallel_size and train.ulysses_parallel_size: timesteps of each token "
                "(expand_timesteps) are not cut with the sequence: set both to 1"
            )
        super().parallelize(mesh, config)


def _build_transformer(settings: Keywords) -> nn.Module:
    """A WanTransformer3DModel with random weights, whose output is zero at first."""
    from diffusers import WanTransformer3DModel

    transformer = WanTransformer3DModel(**settings)
    start_at_zero(transformer.proj_out)
    return transformer
