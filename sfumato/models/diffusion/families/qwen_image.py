"""Qwen-Image (arXiv 2508.02324): QwenImageTransformer2DModel and Qwen2.5-VL; ``qwen_image_edit.py`` has its edits.

The model takes prompts of any length. Here they are padded to one length, with a mask, so that a sample does not depend
on the other prompts of its batch.
"""


# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from sfumato.models.diffusion import plans
from sfumato.models.diffusion.described import Blueprint, TextPart, build_pipeline, make_empty_pipeline
from sfumato.models.diffusion.latents import (
    PATCH,
    QwenLatents,
    embed_one_by_one,
    num_tokens,
    pack,
    padded,
    split_images,
    text_shapes,
    unpack,
)
from sfumato.models.diffusion.scratch import build_qwen_autoencoder, build_qwen_tokenizer, build_qwen_vl_encoder
from sfumato.parallel.plan import ParallelPlan

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline

SMALLEST_NORM = 1e-12
"""Lower bound of the norm of a token, which is zero in a model with new weights."""


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
    further_parts: ClassVar[Mapping[str, Callable[..., object]]] = {}
    """Further components of a pipeline that is made here: see ``Blueprint``."""

    @classmethod
    def build(cls, description: Mapping[str, object], seed: int) -> DiffusionPipeline:
        """Builds a pipeline with random weights.

        Sections are those of ``build_pipeline``, and for editing ``processor``.

        Raises:
            MissingDependencyError: for editing without torchvision.
        """
        from diffusers import QwenImageTransformer2DModel

        template = make_empty_pipeline(cls.pipeline_type()).prompt_template_encode
        text = TextPart(build_qwen_vl_encoder, build_qwen_tokenizer, {}, {"template": template})
        blueprint = Blueprint(
            pipeline=cls.pipeline_type(),
            denoiser=QwenImageTransformer2DModel,
            vae=build_qwen_autoencoder,
            texts={"text_encoder": text},
            infer=lambda parts: {
                "in_channels": parts["vae"].config.z_dim * PATCH**2,
                "out_channels": parts["vae"].config.z_dim,
                "joint_attention_dim": parts["text_encoder"].config.text_config.hidden_size,
            },
            outputs=lambda transformer: [transformer.proj_out],
            further=cls.further_parts,
        )
        return build_pipeline(blueprint, description, seed)

    def prompt_as_read(self, prompt: str) -> str:
        """The prompt with the end of the template; the pipeline drops the beginning of it from the embeddings."""
        return prompt + self.pipeline.prompt_template_encode.partition("{}")[2]

    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` and ``prompt_mask``, bool ``[B, T]``; T is ``max_sequence_length``."""
        length = self.max_sequence_length

        def embed(prompt: str) -> dict[str, Tensor]:
            text = [prompt or " "]  # the authors of the model use a space as the empty prompt
            return padded(
                self.pipeline.encode_prompt(prompt=text, device=self.device, max_sequence_length=length)[0], length
            )

        return embed_one_by_one(prompts, embed)

    def embedding_shapes(self, height: int, width: int) -> dict[str, tuple[Sequence[int], torch.dtype]]:
        encoder = self.pipeline.text_encoder
        features = encoder.config.get_text_config().hidden_size
        return text_shapes(self.max_sequence_length, features, encoder.dtype, torch.bool)

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
