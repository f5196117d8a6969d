"""Training of VQ models of the kinds that Emu3 and Janus contain, for small models built from a description."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from sfumato.config.omni import PartConfig
from sfumato.config.yaml_text import read_yaml
from sfumato.errors import ConfigError
from sfumato.models.language.parts import check_keys
from sfumato.models.omni.image_tokenizer import VqModel, build_vq_model

if TYPE_CHECKING:
    from transformers import Emu3VQVAE, JanusVQVAE, PreTrainedConfig, PreTrainedModel

BETA = 0.25
"""Weight of the commitment loss, which pulls latents towards their codes, as in the VQ models of transformers."""


class OwnVqModel(VqModel):
    """A VQ model of transformers in training, with the straight-through estimator of gradients."""

    is_normalised: ClassVar[bool] = False
    """Whether latents and codes are normalised to length 1."""

    def quantise(self, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As ``VqModel.quantise``."""
        vectors = latents.permute(0, 2, 3, 1)
        codebook = self.codebook.weight
        if self.is_normalised:
            vectors = functional.normalize(vectors, dim=-1)
            codebook = functional.normalize(codebook, dim=-1)
        codes = torch.cdist(vectors.detach().flatten(0, 2), codebook.detach()).argmin(-1)
        nearest = functional.embedding(codes, codebook).view(vectors.shape)
        distance = functional.mse_loss(nearest, vectors.detach()) + BETA * functional.mse_loss(
            vectors, nearest.detach()
        )
        straight = vectors + (nearest - vectors).detach()  # value of the code, gradient of the latent
        return straight.permute(0, 3, 1, 2), distance, codes.view(len(latents), -1)


class Emu3Vq(OwnVqModel):
    """``Emu3VQVAE``, which takes an image as a video of ``temporal_downsample_factor`` equal frames."""

    trained: Emu3VQVAE

    def latents(self, pixels: Tensor) -> Tensor:
        frames = pixels[:, None].repeat(1, self.trained.config.temporal_downsample_factor, 1, 1, 1)
        return self.trained.quant_conv(self.trained.encoder(frames).transpose(1, 2))[:, :, 0]

    def decode(self, quantised: Tensor) -> Tensor:
        vectors = quantised[:, :, None]
        frames = self.trained.decoder(self.trained.post_quant_conv(vectors).transpose(1, 2), vectors.transpose(1, 2))
        return frames.unflatten(0, (len(quantised), -1))[:, 0]  # of equal frames the first


class JanusVq(OwnVqModel):
    """``JanusVQVAE``."""

    trained: JanusVQVAE
    is_normalised = True

    def latents(self, pixels: Tensor) -> Tensor:
        return self.trained.quant_conv(self.trained.encoder(pixels))

    def decode(self, quantised: Tensor) -> Tensor:
        return self.trained.decoder(self.trained.post_quant_conv(quantised))


def build_vq(config: PartConfig, seed: int) -> VqModel:
    """Makes the VQ model to train: diffusers' VQModel, or by a description's ``model_type`` that of Emu3 or Janus.

    Raises:
        ConfigError: as ``build_vq_model``.
    """
    from transformers import Emu3VQVAE, Emu3VQVAEConfig, JanusVQVAE, JanusVQVAEConfig

    kinds: dict[str, tuple[type[OwnVqModel], type[PreTrainedModel], type[PreTrainedConfig]]] = {
        "emu3_vqgan": (Emu3Vq, Emu3VQVAE, Emu3VQVAEConfig),
        "janus_vqgan": (JanusVq, JanusVQVAE, JanusVQVAEConfig),
    }
    fields = {} if config.config_path is None else dict(read_yaml(config.config_path))
    kind = fields.pop("model_type", None)
    if kind is None:
        return VqModel(build_vq_model(config, seed))
    if kind not in kinds:
        raise ConfigError(f"{config.config_path}: model_type {kind!r} is neither of {', '.join(kinds)}")
    model_class, module_class, config_class = kinds[kind]
    check_keys(config_class, fields, str(config.config_path))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return model_class(module_class(config_class(**fields)))
        except Exception as error:  # transformers raises kinds of its own for values that it refuses
            raise ConfigError(f"{config.config_path}: transformers refuses it: {error}") from error
