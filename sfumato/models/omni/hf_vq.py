"""Training of the image tokenizers that are parts of Emu3 and Janus: small ones, for models that are made in code."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from sfumato.config.load import read_yaml
from sfumato.config.omni import PartConfig
from sfumato.errors import ConfigError
from sfumato.models.language.parts import check_keys
from sfumato.models.omni.image_tokenizer import VqModel, build_vq_model

BETA = 0.25
"""Weight of the latents' own part of the distance, as these modules have it."""


class OwnVqModel(VqModel):
    """A VQ model of transformers in training."""

    is_normalised: ClassVar[bool] = False
    """Whether codes are compared, and decoded, with length 1."""

    def quantise(self, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As ``VqModel.quantise``."""
        vectors, codebook = latents.permute(0, 2, 3, 1), self.codebook.weight
        if self.is_normalised:
            vectors, codebook = functional.normalize(vectors, dim=-1), functional.normalize(codebook, dim=-1)
        codes = torch.cdist(vectors.detach().flatten(0, 2), codebook.detach()).argmin(-1)
        nearest = functional.embedding(codes, codebook).view(vectors.shape)
        distance = functional.mse_loss(nearest, vectors.detach()) + BETA * functional.mse_loss(
            vectors, nearest.detach()
        )
        straight = vectors + (nearest - vectors).detach()
        return straight.permute(0, 3, 1, 2), distance, codes.view(len(latents), -1)


class Emu3Vq(OwnVqModel):
    """``Emu3VQVAE``, whose images are videos of ``temporal_downsample_factor`` equal frames."""

    def latents(self, pixels: Tensor) -> Tensor:
        frames = pixels[:, None].repeat(1, self.trained.config.temporal_downsample_factor, 1, 1, 1)
        return self.trained.quant_conv(self.trained.encoder(frames).transpose(1, 2))[:, :, 0]

    def decode(self, quantised: Tensor) -> Tensor:
        vectors = quantised[:, :, None]
        frames = self.trained.decoder(self.trained.post_quant_conv(vectors).transpose(1, 2), vectors.transpose(1, 2))
        return frames.unflatten(0, (len(quantised), -1))[:, 0]


class JanusVq(OwnVqModel):
    """``JanusVQVAE``."""

    is_normalised = True

    def latents(self, pixels: Tensor) -> Tensor:
        return self.trained.quant_conv(self.trained.encoder(pixels))

    def decode(self, quantised: Tensor) -> Tensor:
        return self.trained.decoder(self.trained.post_quant_conv(quantised))


def build_vq(config: PartConfig, seed: int) -> VqModel:
    """A VQ model to train: of diffusers, or of a description with ``model_type`` emu3_vqgan or janus_vqgan.

    Raises:
        ConfigError: as ``build_vq_model``.
    """
    from transformers import Emu3VQVAE, Emu3VQVAEConfig, JanusVQVAE, JanusVQVAEConfig

    kinds: dict[str, tuple[type[OwnVqModel], Any, Any]] = {
        "emu3_vqgan": (Emu3Vq, Emu3VQVAE, Emu3VQVAEConfig),
        "janus_vqgan": (JanusVq, JanusVQVAE, JanusVQVAEConfig),
    }
    fields = {} if config.config_path is None else dict(read_yaml(config.config_path))
    kind = fields.pop("model_type", None)
    if kind is None:
        return VqModel(build_vq_model(config, seed))
    if kind not in kinds:
        raise ConfigError(f"{config.config_path}: model_type {kind!r} is neither of {', '.join(kinds)}")
    model, module, described = kinds[kind]
    check_keys(described, fields, str(config.config_path))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return model(module(described(**fields)))
        except Exception as error:  # transformers raises kinds of its own for values that it refuses
            raise ConfigError(f"{config.config_path}: transformers refuses it: {error}") from error
