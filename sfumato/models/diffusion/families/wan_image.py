"""Wan 2.1 and 2.2 from a text and a first frame, or a first and a last one.

With ``expand_timesteps`` (Wan 2.2 5B) the tokens of the given first frame have noise level 0.
"""

# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from sfumato.config.open_mappings import Keywords
from sfumato.config.sections import TrainConfig
from sfumato.errors import ConfigError
from sfumato.models.diffusion.families.wan import Wan
from sfumato.models.diffusion.families.wan_pair import WanPair
from sfumato.models.diffusion.latents import lead_to_given
from sfumato.parallel.mesh import Mesh

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

    from sfumato.models.diffusion.base import ModelOptions

TEXT_TOKENS = 512
"""Number of text tokens: behind image embeddings, diffusers takes this many tokens from the end for the text."""


class WanImageToVideo(Wan):
    """A video from a first frame and a text, or from the first and the last frame.

    ``frames`` must be set before prompts and images are embedded.
    """

    pipeline_class = "WanImageToVideoPipeline"
    takes_image = True
    encoder_names = ("text_encoder", "image_encoder")
    optional_parts = ("image_encoder",)
    sections = (*Wan.sections, "image_encoder")

    def __init__(self, pipeline: DiffusionPipeline, **options: Unpack[ModelOptions]) -> None:
        """As ``Wan``. Raises ConfigError also when the pipeline lacks an image encoder that the transformer needs."""
        super().__init__(pipeline, **options)
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
        """The velocity. With ``expand_timesteps`` that of the first latent frame leads to the given frame."""
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
        return lead_to_given(velocity, latents, condition, sigma) if expands else velocity

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
