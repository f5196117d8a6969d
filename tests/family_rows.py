"""What the tests know of each model family: one row of ``ROWS``. The conformance suite and the matrix read it."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution

from sfumato.algorithms.noise import keyed_normal
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.latents import pack, unpack
from tests import tiny_families

SEED = 11
"""Of the noise from which pipelines are compared."""

STEPS = 4
"""Denoising steps with which pipelines are compared."""


TELLING = (
    "test_images_equal_those_of_the_diffusers_pipeline",
    "test_a_loss_and_its_gradients_are_those_of_the_plain_loop",
    "test_a_saved_pipeline_loads_again_with_the_same_velocity",
    "test_the_training_shift_is_that_of_the_schedule",
)
"""Tests that would show most mistakes of a family's own file."""


@dataclass(frozen=True)
class Row:
    """A family as the suite sees it."""

    describe: Callable[[], dict[str, Any]]
    """Its tiny description."""
    call: Callable[[Row, Any, list[str], torch.Tensor, float, list[Any] | None], np.ndarray]
    """Runs the pipeline from latents ``[B, *latent_shape]`` with a guidance scale of ours: [B, H, W, 3] in 0..1."""
    latent_shape: tuple[int, ...]
    unit: int
    """The sides of an image are multiples of so many pixels."""
    size: tuple[int, int] = (16, 16)
    scales: tuple[float, ...] = (1.0, 3.5)
    tokens: int = 7
    """model.max_sequence_length."""
    batched: bool = True
    """The pipeline can take several prompts at once."""
    never_used: str = "(?!)"
    """Parameters that can have no gradient, since the architecture does not use them."""
    straight: bool = True
    """Before the shift the schedule is 1, 1 - 1/n, ..., 0."""
    shift_steps: int = STEPS
    """Steps of the schedule whose shift training has."""
    unpack: Callable[..., torch.Tensor] = unpack
    """Makes latents of the tokens that a pipeline's callback sees, and of their height and width."""
    velocity: Callable[[torch.Tensor, tuple[int, ...]], torch.Tensor] = lambda output, shape: output
    """Makes a velocity ``[B, *latent_shape]`` of what the network returns, as the pipeline does."""
    frames: int = 1
    """Frames of a sample, of which there are more where a single one is given, and not made."""
    num_frames: int = 1
    """Frames with which it is trained by RL."""
    exact: bool = True
    """A row has the same bits in every batch of two rows or more: not where there are convolutions of pictures."""
    brief: bool = False
    """Its parts are those of other families: only ``TELLING`` tests run always, others in ``make slow-test``."""
    from_images: bool = False
    """``model.from_images``."""
    sources: int = 1
    """Source images of a prompt, of families that take some."""
    needs: str = ""
    """A package that the family needs and not every installation has."""

    @property
    def sample_size(self) -> tuple[int, int, int]:
        """Height, width and frames of a sample."""
        return (*self.size, self.frames)


def settings(row: Row, **more: Any) -> dict[str, Any]:
    """What all pipelines are called with."""
    height, width = row.size
    return {
        "height": height,
        "width": width,
        "num_inference_steps": STEPS,
        "output_type": "np",
        "max_sequence_length": row.tokens,
        "callback_on_step_end": keep_latents,
        **more,
    }


def keep_latents(pipeline: Any, step: int, timestep: Any, state: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The pipelines' callback after each step: the latents stay with the pipeline."""
    del step, timestep
    pipeline.last_latents = state["latents"]
    return {}


def copied(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments whose tensors stay as they are: some pipelines change their latents in place."""
    return {name: value.clone() if isinstance(value, torch.Tensor) else value for name, value in arguments.items()}


def call_plain(row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any) -> Any:
    more = {} if images is None else {"image": images[0]}
    return pipeline(prompt=prompts, latents=latents, **settings(row, guidance_scale=scale, **more)).images


def call_flux(row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any) -> Any:
    more: dict[str, Any] = {"guidance_scale": scale}
    if not pipeline.transformer.config.guidance_embeds:
        more = {"true_cfg_scale": scale, "negative_prompt": [""] * len(prompts)}
    if images is not None:
        more |= {"image": images[0], "max_area": row.size[0] * row.size[1], "_auto_resize": False}
    return pipeline(prompt=prompts, latents=pack(latents), **settings(row, **more)).images


def call_flux_fill(
    row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any
) -> Any:
    """The pipeline draws the latents of the masked picture from their distribution; here it takes the mode."""
    module = sys.modules[type(pipeline).__module__]
    picture, mask = images[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "retrieve_latents", lambda output, generator=None: output.latent_dist.mode())
        more = settings(row, guidance_scale=scale, image=picture, mask_image=mask)
        return pipeline(prompt=prompts, latents=pack(latents), **more).images


def call_stable_diffusion(
    row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any
) -> Any:
    more = settings(row, guidance_scale=scale)
    del more["max_sequence_length"]
    return pipeline(prompt=prompts, latents=latents, **more).images


def call_wan(row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any) -> Any:
    follow_the_grid(pipeline)
    embeds = [wan_prompt_embeds(pipeline, texts, row.tokens) for texts in (prompts, [""] * len(prompts))]
    more: dict[str, Any] = {"guidance_scale": scale, "num_frames": 1, "prompt_embeds": embeds[0]}
    if scale > 1:
        more["negative_prompt_embeds"] = embeds[1]
    if images is not None:
        more["image"] = images[0]
    return pipeline(latents=latents, **settings(row, **more)).frames[:, 0]


def follow_the_grid(pipeline: Any) -> None:
    """Makes a Wan pipeline take Euler steps along the noise levels of the scheduler that it comes with."""
    if isinstance(pipeline.scheduler, diffusers.FlowMatchEulerDiscreteScheduler):
        return
    pipeline.scheduler.set_timesteps(STEPS)
    sigmas, euler = pipeline.scheduler.sigmas[:-1].tolist(), diffusers.FlowMatchEulerDiscreteScheduler()
    along = type(euler).set_timesteps
    euler.set_timesteps = lambda num_steps, device=None: along(euler, sigmas=sigmas, device=device)
    pipeline.scheduler = euler


def wan_prompt_embeds(pipeline: Any, prompts: list[str], tokens: int) -> torch.Tensor:
    """WanImageToVideoPipeline.encode_prompt needs ftfy, which changes nothing here."""
    return diffusers.WanPipeline._get_t5_prompt_embeds(pipeline, prompts, max_sequence_length=tokens)


def call_qwen(row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any) -> Any:
    more: dict[str, Any] = {"true_cfg_scale": scale, "negative_prompt": [" "] * len(prompts)}
    return pipeline(prompt=prompts, latents=pack(latents), **settings(row, **more)).images


def call_qwen_edit(
    row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any
) -> Any:
    module = sys.modules[type(pipeline).__module__]
    height, width = row.size
    with pytest.MonkeyPatch.context() as patch:  # the pipelines would make a megapixel of the image
        if hasattr(module, "VAE_IMAGE_SIZE"):
            patch.setattr(module, "VAE_IMAGE_SIZE", height * width)
        else:
            patch.setattr(module, "calculate_dimensions", lambda area, ratio: (width, height, None))
        more = {"true_cfg_scale": scale, "negative_prompt": [" "], "image": images[0]}
        return pipeline(prompt=prompts, latents=pack(latents), **settings(row, **more)).images


def call_qwen21(row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any) -> Any:
    """Pictures have a channel of transparency, and are shown on white."""
    height, width = row.size
    more = settings(row, true_cfg_scale=scale, negative_prompt=[""] * len(prompts))
    del more["max_sequence_length"]
    if images is not None:
        more |= {"image": images[0], "output_resolution": math.sqrt(height * width)}
    pictures = pipeline(prompt=prompts, latents=latents.flatten(2).transpose(1, 2), **more).images
    alpha = pictures[..., 3:]
    return pictures[..., :3] * alpha + 1 - alpha


def call_ideogram4(
    row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any
) -> Any:
    more = settings(row, guidance_scale=scale, guidance_schedule=None)
    return pipeline(prompt=prompts, latents=latents.flatten(2).transpose(1, 2), **more).images


def call_kandinsky5(
    row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any
) -> Any:
    pipeline.resolutions = [row.size[::-1]]  # others are brought to one of those that are published
    more = settings(row, guidance_scale=scale)
    pictures = pipeline(prompt=prompts, latents=latents.permute(0, 2, 3, 1)[:, None], **more).image
    pipeline.last_latents = pipeline.last_latents[:, 0].permute(0, 3, 1, 2)
    return pictures


def call_kandinsky5_image(
    row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any
) -> Any:
    """The pipeline draws the noise and the latents of the source; here it gets the noise, and takes the mode."""
    pipeline.resolutions = [row.size[::-1]]  # others are brought to one of those that are published
    channels = latents.shape[1]
    noise = latents.permute(0, 2, 3, 1)[:, None]
    more = settings(row, guidance_scale=scale, image=images[0], max_sequence_length=1024)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[type(pipeline).__module__], "randn_tensor", lambda shape, **_: noise)
        patch.setattr(DiagonalGaussianDistribution, "sample", lambda latent_dist, generator: latent_dist.mode())
        pictures = pipeline(prompt=prompts, **more).image
    pipeline.last_latents = pipeline.last_latents[:, 0, ..., :channels].permute(0, 3, 1, 2)
    return pictures


def call_kandinsky5_video(
    row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any
) -> Any:
    """Latents come with empty channels for given frames and their mask, as the pipeline makes them itself."""
    frames = (latents.shape[2] - 1) * pipeline.vae_scale_factor_temporal + 1
    more = settings(row, guidance_scale=scale, num_frames=frames, negative_prompt="")
    channels = latents.shape[1]
    inputs = torch.nn.functional.pad(latents, (0, 0, 0, 0, 0, 0, 0, channels + 1)).permute(0, 2, 3, 4, 1)
    videos = pipeline(prompt=prompts, latents=inputs, **more).frames
    pipeline.last_latents = pipeline.last_latents[..., :channels].permute(0, 4, 1, 2, 3)
    return videos[:, 0]


def call_kandinsky5_video_image(
    row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any
) -> Any:
    """The pipeline draws the noise and the latents of the first frame; here it gets the noise, and takes the mode."""
    frames = (latents.shape[2] - 1) * pipeline.vae_scale_factor_temporal + 1
    channels = latents.shape[1]
    more = settings(row, guidance_scale=scale, num_frames=frames, negative_prompt="", image=images[0])
    noise = latents.permute(0, 2, 3, 4, 1).clone()  # the pipeline writes into it
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[type(pipeline).__module__], "randn_tensor", lambda shape, **_: noise)
        patch.setattr(DiagonalGaussianDistribution, "sample", lambda latent_dist, generator: latent_dist.mode())
        videos = pipeline(prompt=prompts, **more).frames
    pipeline.last_latents = pipeline.last_latents[..., :channels].permute(0, 4, 1, 2, 3)
    return videos


def call_hidream(row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any) -> Any:
    height, width = row.size
    # every picture is brought to the area of a square with so many latent pixels along a side
    pipeline.default_sample_size = math.sqrt(height * width + 1e-6) / pipeline.vae_scale_factor
    return pipeline(prompt=prompts, latents=latents, **settings(row, guidance_scale=scale)).images


def call_z_image(row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any) -> Any:
    return pipeline(prompt=prompts, latents=latents, **settings(row, guidance_scale=scale - 1)).images


def call_chroma(row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any) -> Any:
    return pipeline(prompt=prompts, latents=pack(latents), **settings(row, guidance_scale=scale)).images


def call_sana(row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any) -> Any:
    follow_the_grid(pipeline)
    more = settings(row, guidance_scale=scale, use_resolution_binning=False)
    return pipeline(prompt=prompts, latents=latents, **more).images


def call_ernie_image(
    row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any
) -> Any:
    more = settings(row, guidance_scale=scale)
    del more["max_sequence_length"], more["output_type"]
    pictures = pipeline(prompt=prompts, latents=latents, output_type="pil", **more).images
    return np.stack([np.asarray(picture) / 255 for picture in pictures])


def call_krea2(row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any) -> Any:
    return pipeline(prompt=prompts, latents=pack(latents), **settings(row, guidance_scale=scale - 1)).images


def call_sana_video(
    row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any
) -> Any:
    follow_the_grid(pipeline)
    more = settings(row, guidance_scale=scale, use_resolution_binning=False, frames=1)
    return pipeline(prompt=prompts, latents=latents, **more).frames[:, 0]


def call_cogvideox(
    row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any
) -> Any:
    """The pipeline draws the latents of a first frame from their distribution; here it takes the mode."""
    module = sys.modules[type(pipeline).__module__]
    frames = (latents.shape[2] - 1) * pipeline.vae_scale_factor_temporal + 1
    more = settings(row, guidance_scale=scale, num_frames=frames)
    with pytest.MonkeyPatch.context() as patch:
        if images is not None:
            more["image"] = images[0]
            patch.setattr(module, "retrieve_latents", lambda output, generator=None: output.latent_dist.mode())
        videos = pipeline(prompt=prompts, latents=latents.transpose(1, 2), **more).frames
    pipeline.last_latents = pipeline.last_latents.transpose(1, 2)
    return videos[:, 0]


def call_hunyuan_video15(
    row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any
) -> Any:
    pipeline.guider.guidance_scale = scale
    pipeline.vae.enable_slicing()  # its attention takes one video at a time
    pipeline.tokenizer_max_length = row.tokens
    if images is None:  # so many tokens of no image, which are masked, take most of a tiny model's time
        pipeline.vision_num_semantic_tokens = 1
    height, width = row.size
    more: dict[str, Any] = {"height": height, "width": width}
    if images is not None:  # the pipeline chooses the size by the image
        more = {"image": images[0]}
        pipeline.video_processor.calculate_default_height_width = lambda **sizes: row.size
    pipeline.last_latents = pipeline(
        prompt=prompts,
        latents=latents,
        num_frames=(latents.shape[2] - 1) * 4 + 1,
        num_inference_steps=STEPS,
        output_type="latent",
        **more,
    ).frames
    video = pipeline.vae.decode(pipeline.last_latents / pipeline.vae.config.scaling_factor, return_dict=False)[0]
    return pipeline.video_processor.postprocess_video(video.detach(), output_type="np")[:, 0]


def call_hunyuan_image(
    row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any
) -> Any:
    pipeline.guider = diffusers.ClassifierFreeGuidance(guidance_scale=scale)
    more = settings(row)
    del more["max_sequence_length"]
    return pipeline(prompt=prompts, latents=latents, **more).images


def call_ltx2(row: Row, pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, images: Any) -> Any:
    """The frames, and as last latents both parts. ``test_video_with_sound.py`` compares what the pipeline decodes."""
    height, width = row.size
    unit = pipeline.vae_spatial_compression_ratio
    frame_tokens = (height // unit) * (width // unit)
    later_frames = latents.shape[2] // frame_tokens - 1  # there are fewer tokens of sound
    num_video = (later_frames + 1) * frame_tokens
    video, sound = latents.mT.split([num_video, latents.shape[2] - num_video], dim=1)
    vae, audio_vae = pipeline.vae, pipeline.audio_vae
    more: dict[str, Any] = {}
    generate = pipeline
    if images is not None:
        generate = diffusers.LTX2ImageToVideoPipeline(**pipeline.components)
        generate.set_progress_bar_config(disable=True)
        more = {"image": images[0], "image_crf": 0}
        pixels = pipeline.video_processor.preprocess(images[0], height=height, width=width)
        frame = vae.encode(pixels[:, :, None]).latent_dist.mode().detach()
        frame = pipeline._normalize_latents(frame, vae.latents_mean, vae.latents_std).flatten(2).mT
        video = torch.cat([frame, video[:, frame_tokens:]], dim=1)
        video = video.mT.unflatten(2, (later_frames + 1, height // unit, width // unit))  # as this pipeline takes it
        video = pipeline._denormalize_latents(video, vae.latents_mean, vae.latents_std, vae.config.scaling_factor)
    drawn, drawn_sound = generate(
        prompt=prompts,
        height=height,
        width=width,
        num_frames=later_frames * pipeline.vae_temporal_compression_ratio + 1,
        num_inference_steps=STEPS,
        max_sequence_length=row.tokens,
        latents=video,
        audio_latents=pipeline._denormalize_audio_latents(sound, audio_vae.latents_mean, audio_vae.latents_std),
        output_type="latent",
        return_dict=False,
        **ltx2_guidance(scale),
        **more,
    )
    tokens = pipeline._normalize_latents(drawn, vae.latents_mean, vae.latents_std, vae.config.scaling_factor).flatten(2)
    packed = pipeline._pack_audio_latents(drawn_sound)
    sound = pipeline._normalize_audio_latents(packed, audio_vae.latents_mean, audio_vae.latents_std).mT
    pipeline.last_latents = torch.cat([tokens, sound], dim=2)
    return pipeline.video_processor.postprocess_video(vae.decode(drawn)[0].detach(), output_type="np")[:, 0]


def ltx2_guidance(scale: float) -> dict[str, float]:
    """Guidance by two branches alone, of both parts."""
    off = {"stg_scale": 0.0, "modality_scale": 1.0, "guidance_rescale": 0.0}
    return {
        name: value
        for video_name, value in {"guidance_scale": scale, **off}.items()
        for name in (video_name, f"audio_{video_name}")
    }


def unpack_pixels(tokens: torch.Tensor, height: int, width: int) -> torch.Tensor:
    """Latents of tokens that are one latent pixel each."""
    return tokens.transpose(1, 2).unflatten(2, (height, width))


def unpacked(output: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The velocity of tokens that are patches; behind those of the picture may be those of a given one."""
    height, width = shape[-2:]
    return unpack(output[:, : height * width // 4], height, width)


def unpacked_pixels(output: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The velocity of tokens that are latent pixels; behind those of the picture may be those of given ones."""
    height, width = shape[-2:]
    return unpack_pixels(output[:, : height * width], height, width)


def joined_patches(output: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """HiDream's velocity of what its network gives in training mode, [B, C, tokens with padding, patch]."""
    height, width = shape[-2:]
    return -unpack(output[:, :, : height * width // 4].transpose(1, 2).flatten(2), height, width)


def last_pixels(output: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """The velocity of tokens that are latent pixels, behind those of text and of given pictures."""
    height, width = shape[-2:]
    return unpack_pixels(output[:, -height * width :], height, width)


def of_v(output: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """CogVideoX begins at pure noise, where v is minus the image: eps - x0 = noise + v."""
    latents = keyed_normal(shape, SEED, "latent", 0, [0])
    return latents + output.transpose(1, 2)


# what the last block makes of the text is not used
LAST_QUERY = r"transformer_blocks\.1\.attn\.(add_q_proj|norm_added_q)"
LAST_TEXT = r"transformer_blocks\.1\.(attn\.(add_q_proj|norm_added_q|to_add_out)|txt_mlp|txt_mod)"

ROWS = {
    "sd3": Row(tiny_families.tiny_sd3, call_plain, (4, 8, 8), 4, never_used=LAST_QUERY, straight=False),
    "flux": Row(tiny_families.tiny_flux, call_flux, (4, 8, 12), 4, size=(16, 24), velocity=unpacked),
    "flux_schnell": Row(tiny_families.tiny_flux_schnell, call_flux, (4, 8, 8), 4, velocity=unpacked, brief=True),
    "flux_kontext": Row(tiny_families.tiny_flux_kontext, call_flux, (4, 8, 8), 4, batched=False, velocity=unpacked),
    "flux_fill": Row(
        tiny_families.tiny_flux_fill,
        call_flux_fill,
        (4, 8, 8),
        4,
        batched=False,
        sources=2,
        velocity=unpacked,
        brief=True,
    ),
    "qwen_image": Row(
        tiny_families.tiny_qwen_image,
        call_qwen,
        (4, 8, 12),
        4,
        size=(16, 24),
        tokens=24,
        never_used=LAST_TEXT,
        velocity=unpacked,
    ),
    "qwen_image_edit": Row(
        tiny_families.tiny_qwen_image_edit,
        call_qwen_edit,
        (4, 16, 32),
        4,
        size=(32, 64),
        tokens=24,
        batched=False,
        never_used=LAST_TEXT,
        needs="torchvision",
        velocity=unpacked,
    ),
    "qwen_image_edit_plus": Row(
        tiny_families.tiny_qwen_image_edit_plus,
        call_qwen_edit,
        (4, 16, 32),
        4,
        size=(32, 64),
        tokens=40,
        batched=False,
        never_used=LAST_TEXT,
        needs="torchvision",
        velocity=unpacked,
    ),
    "qwen_image21": Row(
        tiny_families.tiny_qwen_image21,
        call_qwen21,
        (4, 4, 6),
        32,
        size=(64, 96),
        tokens=24,
        batched=False,
        needs="torchvision",
        unpack=unpack_pixels,
        velocity=last_pixels,
        brief=True,
    ),
    "qwen_image21_edit": Row(
        tiny_families.tiny_qwen_image21,
        call_qwen21,
        (4, 4, 6),
        32,
        size=(64, 96),
        tokens=48,
        batched=False,
        needs="torchvision",
        unpack=unpack_pixels,
        velocity=last_pixels,
        from_images=True,
        sources=2,
        brief=True,
    ),
    "ideogram4": Row(
        tiny_families.tiny_ideogram4,
        call_ideogram4,
        (16, 4, 6),
        4,
        size=(16, 24),
        tokens=32,
        straight=False,
        unpack=unpack_pixels,
        velocity=lambda output, shape: -last_pixels(output, shape),
        brief=True,
    ),
    "kandinsky5": Row(
        tiny_families.tiny_kandinsky5,
        call_kandinsky5,
        (4, 4, 6),
        16,
        size=(32, 48),
        tokens=24,
        batched=False,
        needs="torchvision",
        straight=False,
        velocity=lambda output, shape: output[:, 0].permute(0, 3, 1, 2),
        brief=True,
    ),
    "kandinsky5_image": Row(
        tiny_families.tiny_kandinsky5_image,
        call_kandinsky5_image,
        (4, 4, 6),
        16,
        size=(32, 48),
        tokens=24,
        batched=False,
        needs="torchvision",
        straight=False,
        velocity=lambda output, shape: output[:, 0].permute(0, 3, 1, 2),
        brief=True,
    ),
    "kandinsky5_video": Row(
        tiny_families.tiny_kandinsky5_video,
        call_kandinsky5_video,
        (4, 1, 4, 6),
        16,
        size=(32, 48),
        tokens=24,
        num_frames=5,
        batched=False,
        needs="torchvision",
        straight=False,
        exact=False,
        velocity=lambda output, shape: output.permute(0, 4, 1, 2, 3),
        brief=True,
    ),
    "kandinsky5_video_image": Row(
        tiny_families.tiny_kandinsky5_video_image,
        call_kandinsky5_video_image,
        (4, 5, 4, 6),
        16,
        size=(32, 48),
        tokens=24,
        frames=17,  # in shorter videos the pipeline divides by nothing
        num_frames=17,
        batched=False,
        needs="torchvision",
        straight=False,
        exact=False,
        velocity=lambda output, shape: output.permute(0, 4, 1, 2, 3),
        brief=True,
    ),
    "hidream": Row(
        tiny_families.tiny_hidream,
        call_hidream,
        (4, 8, 8),
        4,
        straight=False,
        exact=False,
        velocity=joined_patches,
        brief=True,
    ),
    "z_image": Row(tiny_families.tiny_z_image, call_z_image, (4, 8, 8), 4, tokens=40),
    "stable_diffusion": Row(tiny_families.tiny_stable_diffusion, call_stable_diffusion, (4, 8, 8), 2, exact=False),
    "stable_diffusion_2": Row(
        tiny_families.tiny_stable_diffusion_2, call_stable_diffusion, (4, 8, 8), 2, exact=False, brief=True
    ),
    "stable_diffusion_xl": Row(
        tiny_families.tiny_stable_diffusion_xl, call_stable_diffusion, (4, 8, 8), 2, exact=False
    ),
    "wan": Row(tiny_families.tiny_wan, call_wan, (4, 1, 4, 4), 8, num_frames=5),
    "wan_pair": Row(tiny_families.tiny_wan_pair, call_wan, (4, 1, 4, 4), 8, num_frames=5),
    "wan_small": Row(tiny_families.tiny_wan_small, call_wan, (4, 1, 4, 4), 16, size=(32, 32), num_frames=5, brief=True),
    "wan_image": Row(
        tiny_families.tiny_wan_image,
        call_wan,
        (4, 1, 4, 4),
        8,
        scales=(1.0, 30.0),
        tokens=512,
        num_frames=5,
        batched=False,
    ),
    "flux2_klein": Row(
        tiny_families.tiny_flux2_klein,
        call_plain,
        (16, 4, 6),
        4,
        size=(16, 24),
        tokens=24,
        shift_steps=50,
        unpack=unpack_pixels,
        velocity=unpacked_pixels,
        brief=True,
    ),
    "flux2": Row(
        tiny_families.tiny_flux2,
        call_plain,
        (16, 4, 6),
        4,
        size=(16, 24),
        tokens=128,
        shift_steps=50,
        unpack=unpack_pixels,
        needs="torchvision",
        velocity=unpacked_pixels,
        brief=True,
    ),
    "flux2_klein_edit": Row(
        tiny_families.tiny_flux2_klein,
        call_plain,
        (16, 16, 24),
        4,
        size=(64, 96),
        tokens=24,
        shift_steps=50,
        unpack=unpack_pixels,
        velocity=unpacked_pixels,
        batched=False,
        from_images=True,
        sources=2,
        brief=True,
    ),
    "flux2_edit": Row(
        tiny_families.tiny_flux2,
        call_plain,
        (16, 16, 24),
        4,
        size=(64, 96),
        tokens=128,
        shift_steps=50,
        unpack=unpack_pixels,
        needs="torchvision",
        velocity=unpacked_pixels,
        batched=False,
        from_images=True,
        sources=3,
        brief=True,
    ),
    "qwen_image_edit_several": Row(
        tiny_families.tiny_qwen_image_edit_plus,
        call_qwen_edit,
        (4, 16, 32),
        4,
        size=(32, 64),
        tokens=72,
        batched=False,
        never_used=LAST_TEXT,
        sources=3,
        needs="torchvision",
        velocity=unpacked,
        brief=True,
    ),
    "chroma": Row(tiny_families.tiny_chroma, call_chroma, (4, 8, 12), 4, size=(16, 24), velocity=unpacked, brief=True),
    "lumina2": Row(
        tiny_families.tiny_lumina2,
        call_plain,
        (4, 4, 4),
        16,
        size=(32, 32),
        tokens=160,
        velocity=lambda output, shape: -output,
        brief=True,
    ),
    "sana": Row(tiny_families.tiny_sana, call_sana, (4, 4, 8), 8, size=(32, 64), tokens=10, exact=False, brief=True),
    "sana_video": Row(
        tiny_families.tiny_sana_video,
        call_sana_video,
        (4, 1, 8, 8),
        8,
        size=(32, 32),
        tokens=10,
        num_frames=5,
        exact=False,
        brief=True,
    ),
    "cogvideox": Row(
        tiny_families.tiny_cogvideox,
        call_cogvideox,
        (4, 1, 4, 4),
        8,
        num_frames=5,
        straight=False,
        exact=False,
        velocity=of_v,
        brief=True,
    ),
    "cogvideox_image": Row(
        tiny_families.tiny_cogvideox_image,
        call_cogvideox,
        (4, 1, 4, 4),
        8,
        num_frames=5,
        batched=False,
        straight=False,
        exact=False,
        velocity=of_v,
        brief=True,
    ),
    "hunyuan_video15": Row(
        tiny_families.tiny_hunyuan_video15,
        call_hunyuan_video15,
        (4, 1, 4, 4),
        4,
        tokens=80,
        num_frames=5,
        exact=False,
        never_used=rf"{LAST_TEXT}|transformer_blocks\.1\.ff_context|image_embedder",
        brief=True,
    ),
    "hunyuan_video15_image": Row(
        tiny_families.tiny_hunyuan_video15_image,
        call_hunyuan_video15,
        (4, 1, 4, 4),
        4,
        tokens=80,
        num_frames=5,
        exact=False,
        never_used=rf"{LAST_TEXT}|transformer_blocks\.1\.ff_context",
        batched=False,
        brief=True,
    ),
    "hunyuan_image": Row(
        tiny_families.tiny_hunyuan_image,
        call_hunyuan_image,
        (4, 8, 12),
        2,
        size=(16, 24),
        tokens=24,
        exact=False,
        brief=True,
    ),
    "ernie_image": Row(
        tiny_families.tiny_ernie_image, call_ernie_image, (16, 4, 6), 4, size=(16, 24), tokens=16, brief=True
    ),
    "krea2": Row(
        tiny_families.tiny_krea2, call_krea2, (4, 8, 12), 4, size=(16, 24), tokens=24, velocity=unpacked, brief=True
    ),
    "ltx2": Row(
        tiny_families.tiny_ltx2,
        call_ltx2,
        (4, 65),
        4,
        size=(32, 32),
        tokens=24,
        num_frames=13,
        exact=False,
        unpack=lambda latents, *_: latents,
        velocity=lambda output, shape: output.mT,
        brief=True,
    ),
    "ltx23": Row(
        tiny_families.tiny_ltx23,
        call_ltx2,
        (4, 65),
        4,
        size=(32, 32),
        tokens=24,
        num_frames=13,
        exact=False,
        unpack=lambda latents, *_: latents,
        velocity=lambda output, shape: output.mT,
        brief=True,
    ),
    "ltx2_image": Row(
        tiny_families.tiny_ltx2,
        call_ltx2,
        (4, 65),
        4,
        size=(32, 32),
        tokens=24,
        num_frames=13,
        exact=False,
        unpack=lambda latents, *_: latents,
        velocity=lambda output, shape: output.mT,
        # a single frame is the given one, so that nothing is learned of it
        never_used=r"^(scale_shift_table|proj_out|transformer_blocks\.1\.(audio_to_video_attn|ff)\.)",
        batched=False,
        from_images=True,
        brief=True,
    ),
    "wan_image_pair": Row(
        tiny_families.tiny_wan_image_pair, call_wan, (4, 1, 4, 4), 8, num_frames=5, batched=False, brief=True
    ),
}


def wake(model: DiffusionModel) -> None:
    """Small random weights where there are zeros, so that the model answers to its inputs."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.denoiser.parameters():
            if not parameter.any():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
