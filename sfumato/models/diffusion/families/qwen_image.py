"""Qwen-Image (arXiv 2508.02324), Qwen-Image-Edit and its 2509 and 2511: QwenImageTransformer2DModel and Qwen2.5-VL.

The model takes prompts of any length. Here they are padded to one length, with a mask, so that a sample does not depend
on the other prompts of its batch.
"""


# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
from torch import Tensor

from sfumato.config.sections import MOST_SOURCE_IMAGES
from sfumato.errors import ConfigError
from sfumato.models.diffusion import plans
from sfumato.models.diffusion.latents import (
    PATCH,
    FlowTokens,
    VideoLatents,
    check_size,
    encode_sources,
    num_tokens,
    pack,
    padded,
    source_shape,
    split_images,
    unpack,
)
from sfumato.models.diffusion.scratch import (
    build_qwen_autoencoder,
    build_qwen_tokenizer,
    build_qwen_vl_encoder,
    build_qwen_vl_processor,
    section_of,
    start_at_zero,
    unknown_keys,
)
from sfumato.parallel.plan import ParallelPlan

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline
    from PIL import Image

SMALLEST_NORM = 1e-12
"""Lower bound of the norm of a token, which is zero in a model with new weights."""


class QwenLatents(VideoLatents, FlowTokens):
    """Base class of families of images with Qwen-Image's autoencoder, for which an image is a video of one frame."""

    def latent_shape(self, height: int, width: int, frames: int = 1) -> tuple[int, ...]:
        factor = self.pipeline.vae_scale_factor
        check_size(height, width, factor * PATCH, frames)
        return (self.pipeline.vae.config.z_dim, height // factor, width // factor)

    def pixels_to_latents(self, pixels: Tensor) -> Tensor:
        return super().pixels_to_latents(pixels)[:, :, 0]  # a video of one frame

    def latents_to_pixels(self, latents: Tensor) -> Tensor:
        return super().latents_to_pixels(latents[:, :, None])


class QwenImage(QwenLatents):
    """Qwen-Image."""

    pipeline_class: ClassVar[str] = "QwenImagePipeline"
    parallel_plan: ClassVar[ParallelPlan] = plans.QWEN_IMAGE
    lora_targets: ClassVar[tuple[str, ...]] = (  # flow_grpo scripts/train_qwenimage_edit_plus.py
        *plans.JOINT_TARGETS,
        "img_mlp.net.0.proj",
        "img_mlp.net.2",
        "txt_mlp.net.0.proj",
        "txt_mlp.net.2",
    )
    caches_steps: ClassVar[bool] = True
    encoder_names: ClassVar[tuple[str, ...]] = ("text_encoder",)

    @classmethod
    def build(cls, description: Mapping[str, object], seed: int) -> DiffusionPipeline:
        """Builds a pipeline with random weights.

        Sections are ``transformer``, ``scheduler`` (arguments of their diffusers classes), ``vae``, ``text_encoder``
        (width, layers, ... of Qwen2.5-VL), ``tokenizer`` (words), and for editing ``processor``. Channels and text
        width of the transformer follow from the other sections.

        Raises:
            MissingDependencyError: for editing without torchvision.
        """
        import diffusers

        processor_section = {"processor"} if cls.takes_image else set()
        unknown_keys(
            description,
            {"pipeline", "transformer", "vae", "scheduler", "text_encoder", "tokenizer"} | processor_section,
        )
        make_pipeline = getattr(diffusers, cls.pipeline_class)
        denoiser = section_of(description, "transformer", diffusers.QwenImageTransformer2DModel)
        vae_settings = section_of(description, "vae", build_qwen_autoencoder)
        scheduler = section_of(description, "scheduler", diffusers.FlowMatchEulerDiscreteScheduler)
        words = section_of(description, "tokenizer", build_qwen_tokenizer, reserved=["template"])
        text = section_of(description, "text_encoder", build_qwen_vl_encoder, reserved=["tokenizer"])
        sizes = section_of(description, "processor", build_qwen_vl_processor, reserved=["tokenizer"])
        parts = dict.fromkeys(["scheduler", "vae", "text_encoder", "tokenizer", "transformer", *processor_section])
        # A pipeline without components is made only to read its template.
        tokenizer = build_qwen_tokenizer(template=make_pipeline(**parts).prompt_template_encode, **words)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            encoder = build_qwen_vl_encoder(tokenizer, **text)
            vae = build_qwen_autoencoder(**vae_settings)
            inferred = {
                "in_channels": vae.config.z_dim * PATCH**2,  # pyright: ignore[reportAttributeAccessIssue]  (a FrozenDict)
                "out_channels": vae.config.z_dim,  # pyright: ignore[reportAttributeAccessIssue]  (a FrozenDict)
                "joint_attention_dim": encoder.config.text_config.hidden_size,  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
            }
            transformer = diffusers.QwenImageTransformer2DModel(**{**inferred, **denoiser})
            start_at_zero(transformer.proj_out)
        parts |= {"transformer": transformer, "vae": vae, "text_encoder": encoder, "tokenizer": tokenizer}
        parts["scheduler"] = diffusers.FlowMatchEulerDiscreteScheduler(**scheduler)
        if cls.takes_image:
            parts["processor"] = build_qwen_vl_processor(tokenizer, **sizes)
        return make_pipeline(**parts)

    def prompt_as_read(self, prompt: str) -> str:
        """The prompt with the end of the template; the pipeline drops the beginning of it from the embeddings."""
        return prompt + self.pipeline.prompt_template_encode.partition("{}")[2]

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` and ``prompt_mask``, bool ``[B, T]``; T is ``max_sequence_length``.

        Prompts are encoded one by one: in a batch they would be padded to the longest one, which changes the bits.
        """
        embeddings = {}
        for prompt in dict.fromkeys(prompts):
            embeds, _ = self.pipeline.encode_prompt(
                prompt=[prompt or " "],  # the authors of the model use a space as the empty prompt
                device=self.device,
                max_sequence_length=self.max_sequence_length,
            )
            embeddings[prompt] = padded(embeds, self.max_sequence_length)
        names = embeddings[prompts[0]]
        return {name: torch.cat([embeddings[prompt][name] for prompt in prompts]) for name in names}

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        encoder = self.pipeline.text_encoder
        length = self.max_sequence_length
        return {
            "prompt_embeds": ((length, encoder.config.get_text_config().hidden_size), encoder.dtype),
            "prompt_mask": ((length,), torch.bool),
        }

    def guide(self, unconditional: Tensor, conditional: Tensor, scale: float | Tensor) -> Tensor:
        """Classifier-free guidance, after which every token is rescaled to its norm in the conditional branch.

        The pipeline does the same.
        """
        height, width = conditional.shape[-2:]
        guided = pack(super().guide(unconditional, conditional, scale))
        conditional_norm = pack(conditional).norm(dim=-1, keepdim=True)
        guided_norm = guided.norm(dim=-1, keepdim=True)
        return unpack(guided * (conditional_norm / guided_norm.clamp_min(SMALLEST_NORM)), height, width)

    def denoise(self, latents: Tensor, sigma: Tensor, embeddings: dict[str, Tensor]) -> Tensor:
        dtype = self.input_dtype
        images = [latents, *split_images(embeddings, dtype)]
        shape = [(1, image.shape[-2] // PATCH, image.shape[-1] // PATCH) for image in images]
        velocity = self.denoiser(
            hidden_states=torch.cat([pack(image) for image in images], dim=1),
            timestep=self.time(sigma.to(latents.device)),
            encoder_hidden_states=embeddings["prompt_embeds"].to(dtype),
            encoder_hidden_states_mask=embeddings["prompt_mask"],
            img_shapes=[shape] * len(latents),
            return_dict=False,
        )[0]
        return unpack(velocity[:, : num_tokens(latents.shape)], *latents.shape[-2:])


class QwenImageEdit(QwenImage):
    """Qwen-Image-Edit: Qwen2.5-VL reads the image with the prompt, and the image's tokens follow those of the one made.

    The image keeps its size, whereas diffusers' pipeline first resizes it to about a megapixel.
    """

    pipeline_class: ClassVar[str] = "QwenImageEditPipeline"
    takes_image: ClassVar[bool] = True

    def embed_edit(self, prompt: str, image: np.ndarray) -> dict[str, Tensor]:
        """What ``embed_prompts`` returns, for prompt and image, and ``image_latents`` ``[1, C, H, W]``; of several
        images ``[1, S, C, H, W]``.

        ``max_sequence_length`` limits the prompt and its template; the tokens of the images come on top.

        Raises:
            ConfigError: for a longer prompt, which cannot be truncated, since it follows the image.
        """
        from PIL import Image

        self.latent_shape(*image.shape[-3:-1])
        several = image if image.ndim == 4 else image[None]
        vlm_images = [self._resize_for_encoder(Image.fromarray(one)) for one in several]
        embeds, _ = self.pipeline.encode_prompt(prompt=[prompt or " "], image=vlm_images, device=self.device)
        image_tokens = sum(map(self._count_image_tokens, vlm_images))
        length = self.max_sequence_length + image_tokens
        if embeds.shape[1] > length:
            raise ConfigError(
                f"model.max_sequence_length {self.max_sequence_length}: this prompt takes "
                f"{embeds.shape[1] - image_tokens} tokens, and one that goes with an image cannot be cut: {prompt!r}"
            )
        return {**padded(embeds, length), "image_latents": encode_sources(self, image)}

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        from PIL import Image

        image = self._resize_for_encoder(Image.new("RGB", (width, height)))
        length = self.max_sequence_length + self.max_source_images * self._count_image_tokens(image)
        shapes: dict[str, tuple[Sequence[int], torch.dtype]] = super().embedding_shapes(height, width)
        shapes = {name: ((length, *shape[1:]), dtype) for name, (shape, dtype) in shapes.items()}
        return shapes | {"image_latents": (source_shape(self, height, width), torch.float32)}

    def _resize_for_encoder(self, image: Image.Image) -> Image.Image:
        """The image in the size in which Qwen2.5-VL reads it."""
        return image

    def _count_image_tokens(self, image: Image.Image) -> int:
        """Number of tokens that Qwen2.5-VL makes of an image."""
        processor = self.pipeline.processor.image_processor
        return processor.get_number_of_image_patches(image.height, image.width, {}) // processor.merge_size**2


class QwenImageEditPlus(QwenImageEdit):
    """Qwen-Image-Edit-2509 and 2511, with one image or several, which are resized for Qwen2.5-VL alone, as in the
    pipeline."""

    pipeline_class: ClassVar[str] = "QwenImageEditPlusPipeline"
    most_source_images = MOST_SOURCE_IMAGES

    def _resize_for_encoder(self, image: Image.Image) -> Image.Image:
        from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus as plus

        width, height = plus.calculate_dimensions(plus.CONDITION_IMAGE_SIZE, image.width / image.height)
        return self.pipeline.image_processor.resize(image, height, width)
