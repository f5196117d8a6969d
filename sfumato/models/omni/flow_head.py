"""The flow head: a small diffusion transformer that draws images as latents, conditioned on hidden states.

An image that is drawn takes K tokens of the language model, one for each patch of its latent. The head attends to the
hidden states from which these tokens would be predicted; their mean is its pooled input.

Shapes: N images, C h w channels, height and width of a latent, K tokens, H features of the language model.
"""

# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from sfumato.algorithms.solvers import Euler
from sfumato.config.file_checks import read_json
from sfumato.config.omni import PartConfig
from sfumato.config.paths import check_weights, refuse_missing_model
from sfumato.config.trust import load_pretrained
from sfumato.config.yaml_text import read_yaml
from sfumato.data.media.image_answers import ImageText
from sfumato.errors import ConfigError
from sfumato.models.diffusion.scratch import section_of, start_at_zero
from sfumato.models.omni.image_tokenizer import as_bytes, digest_weights, resize_image, to_pixels
from sfumato.parallel.weights import refuse_not_finite

if TYPE_CHECKING:
    from sfumato.models.diffusion.base import DiffusersModule


NAME = "flow_head"
"""Name of the head in the whole model."""

NUM_STEPS = 20
"""Steps of the solver that draws images in the evaluation."""


class LatentTokenizer:
    """A frozen autoencoder, used as an image tokenizer: all images have the same tokens, and a latent beside them."""

    text = ImageText()

    def __init__(self, vae: DiffusersModule, source: Path, patch: int) -> None:
        """
        Args:
            vae: diffusers' AutoencoderKL.
            source: its folder.
            patch: side of the head's patches, in latent pixels.
        """
        self.vae = vae.requires_grad_(False).eval().float()
        self.source = source
        size = vae.config.sample_size
        self.height, self.width = (size, size) if isinstance(size, int) else size
        self.factor = 2 ** (len(vae.config.block_out_channels) - 1)
        unit = self.factor * patch
        if self.height % unit or self.width % unit:
            raise ConfigError(
                f"model.image_tokenizer {source}: its images of {self.width}x{self.height} pixels (sample_size) are no "
                f"multiples of {unit}, the patches of model.head: correct patch_size"
            )
        self.shape = (self.height // unit, self.width // unit)
        """Rows and columns of the tokens of an image."""
        self.num_codes = self.codebook_size = self.shape[0] * self.shape[1]
        self.latent_shape = (vae.config.latent_channels, self.height // self.factor, self.width // self.factor)
        self._shift = float(vae.config.shift_factor or 0.0)
        self._scale = float(vae.config.scaling_factor)

    @classmethod
    def from_folder(cls, folder: Path, patch: int) -> LatentTokenizer:
        """Loads the autoencoder of a folder. Raises ConfigError when it holds no AutoencoderKL."""
        from diffusers import AutoencoderKL

        refuse_missing_model(folder, "model.image_tokenizer")
        check_weights(folder, "model.image_tokenizer")
        try:
            vae = load_pretrained(AutoencoderKL, folder, use_safetensors=True)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(
                f"model.image_tokenizer {folder}: model.head draws latents of diffusers' AutoencoderKL, which it finds "
                f"none of there: {error}"
            ) from error
        refuse_not_finite(vae, folder)
        return cls(vae, folder, patch)

    @property
    def fingerprint(self) -> str:
        """Identifies how images become latents."""
        return digest_weights(self.vae, sorted(self.vae.config.items()))

    def encode(self, image: Image.Image) -> list[int]:
        """The tokens of an image, which are the same for all images."""
        del image
        return list(range(self.num_codes))

    @torch.no_grad()
    def latents(self, images: Sequence[Image.Image]) -> Tensor:
        """Latents of images, the scaled mode of the posterior: float32 ``[N, C, h, w]``; other sizes are resized."""
        pixels = [to_pixels(resize_image(image, self.width, self.height)) for image in images]
        # Images are encoded one by one, since the bits depend on the size of the batch.
        modes = [self.vae.encode(image_pixels[None]).latent_dist.mode()[0] for image_pixels in pixels]
        return (torch.stack(modes) - self._shift) * self._scale

    @torch.no_grad()
    def decode(self, latents: Tensor) -> np.ndarray:
        """Decodes latents on the CPU: uint8 ``[N, H, W, 3]``."""
        pixels = self.vae.decode(latents.float() / self._scale + self._shift).sample
        return as_bytes(pixels).permute(0, 2, 3, 1).numpy()

    def save(self, folder: Path) -> None:
        """Writes the autoencoder in the format of diffusers."""
        self.vae.save_pretrained(folder)


def patch_of(config: PartConfig) -> int:
    """Side of the patches of a configured head, in latent pixels. Raises ConfigError."""
    if config.config_path is not None:
        return int(read_yaml(config.config_path).get("patch_size", 2))
    refuse_missing_model(Path(str(config.model_path)), "model.head.model_path")
    file = Path(str(config.model_path)) / "config.json"
    try:
        return int(read_json(file)["patch_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"model.head.model_path: {file} is not of a SD3Transformer2DModel: {error!r}") from error


def build_head(config: PartConfig, width: int, latent_shape: Sequence[int]) -> DiffusersModule:
    """Loads or builds the head, an SD3Transformer2DModel of diffusers, in float32.

    Args:
        config: its folder or description.
        width: features of the hidden states that condition it.
        latent_shape: ``(C, h, w)`` of an image.

    Raises:
        ConfigError: when there is no such model, or it is for other latents or hidden states.
    """
    from diffusers import SD3Transformer2DModel

    source = config.model_path or config.config_path
    needed = {"joint_attention_dim": width, "pooled_projection_dim": width}
    needed |= {"in_channels": latent_shape[0], "out_channels": latent_shape[0]}
    try:
        if config.config_path is not None:
            fields = read_yaml(config.config_path)
            section_of({"head": fields}, "head", SD3Transformer2DModel)
            head = cast("DiffusersModule", SD3Transformer2DModel(**{**needed, **fields}))
            modulations = [
                module
                for name, module in head.named_modules()
                if isinstance(module, nn.Linear) and ".norm" in f".{name}" and name.endswith("linear")
            ]
            # A new head predicts zero at first, as new diffusion models do.
            start_at_zero(head.proj_out, *modulations)
        else:
            check_weights(Path(str(config.model_path)), "model.head.model_path")
            head = load_pretrained(SD3Transformer2DModel, source, use_safetensors=True).float()  # pyright: ignore[reportArgumentType]
            refuse_not_finite(head, Path(str(source)))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"model.head {source}: diffusers' SD3Transformer2DModel refuses it: {error}") from error
    for name, value in needed.items():
        if head.config[name] != value:
            raise ConfigError(f"model.head {source}: its {name} is {head.config[name]}, but must be {value} here")
    longest = max(latent_shape[1:]) // head.config.patch_size
    if head.config.pos_embed_max_size < longest:
        raise ConfigError(
            f"model.head {source}: pos_embed_max_size {head.config.pos_embed_max_size}: latents have {longest} patches "
            "along a side"
        )
    return head


def predict_velocity(head: nn.Module, latents: Tensor, sigma: Tensor, hidden: Tensor) -> Tensor:
    """The velocity of noised latents ``[N, C, h, w]`` at ``sigma`` ``[N]``, given hidden states ``[N, K, H]``."""
    return head(
        hidden_states=latents,
        timestep=sigma * 1000,
        encoder_hidden_states=hidden,
        pooled_projections=hidden.mean(dim=1),
        return_dict=False,
    )[0]


@torch.no_grad()
def denoise(head: nn.Module, noise: Tensor, hidden: Tensor, unconditional: Tensor | None, scale: float) -> Tensor:
    """Draws latents ``[N, C, h, w]`` in ``NUM_STEPS`` Euler steps of equal size.

    Args:
        head: the flow head, on the device of the tensors.
        noise: standard normal, ``[N, C, h, w]``.
        hidden: hidden states ``[N, K, H]``.
        unconditional: hidden states without a prompt, for classifier-free guidance; None leaves guidance off.
        scale: guidance scale.
    """
    sigmas = torch.linspace(1, 0, NUM_STEPS + 1)
    latents = noise
    for index in range(NUM_STEPS):
        sigma = sigmas[index].to(latents.device).expand(len(latents))
        velocity = predict_velocity(head, latents, sigma, hidden).float()
        if unconditional is not None:
            unconditional_velocity = predict_velocity(head, latents, sigma, unconditional).float()
            velocity = unconditional_velocity + scale * (velocity - unconditional_velocity)
        latents, _ = Euler().step(velocity, latents, sigmas, index)
    return latents


def head_flops(head: DiffusersModule, latent_shape: Sequence[int], num_tokens: int) -> int:
    """Operations of a forward and a backward pass of the head for an image, counted by torch on meta tensors."""
    trained = {name for name, parameter in head.named_parameters() if parameter.requires_grad}
    with torch.device("meta"):
        shadow = type(head).from_config(head.config)
        hidden = torch.empty(1, num_tokens, head.config.joint_attention_dim, requires_grad=True)
        latents = torch.empty(1, *latent_shape)
        sigma = torch.empty(1)
    for name, parameter in shadow.named_parameters():
        parameter.requires_grad_(name in trained)
    with torch.enable_grad(), FlopCounterMode(display=False) as counter:
        predict_velocity(shadow, latents, sigma, hidden).sum().backward()
    return counter.get_total_flops()
