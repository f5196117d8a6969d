"""Image tokenizers that turn images into codes and back: diffusers' VQModel, in training and frozen."""

# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from sfumato.config.omni import PartConfig
from sfumato.config.paths import refuse_missing_model
from sfumato.config.trust import load_pretrained
from sfumato.config.yaml_text import read_yaml
from sfumato.data.media.image_answers import ImageText
from sfumato.errors import ConfigError, suggest
from sfumato.parallel.weights import refuse_not_finite

if TYPE_CHECKING:
    from sfumato.models.diffusion.base import DiffusersModule


def build_vq_model(config: PartConfig, seed: int = 0) -> DiffusersModule:
    """Loads diffusers' VQModel from a folder, or makes one with random weights from a description.

    It is in float32 on the CPU.

    Raises:
        ConfigError: when the folder holds no VQModel, or the description is not valid.
    """
    from diffusers import VQModel

    if config.model_path is not None:
        folder = Path(config.model_path)
        refuse_missing_model(folder, "model.image_tokenizer")
        try:
            model = load_pretrained(VQModel, folder, use_safetensors=True)
        except (OSError, ValueError, TypeError) as error:
            raise ConfigError(f"{folder}: diffusers finds no VQModel there: {error}") from error
        refuse_not_finite(model, folder)
        return model.float()
    assert config.config_path is not None
    fields = read_yaml(config.config_path)
    allowed = [name for name in inspect.signature(VQModel.__init__).parameters if name != "self"]
    for name in fields:
        if name not in allowed:
            raise ConfigError(f"{config.config_path}: {name}: unknown key{suggest(name, allowed)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return cast("DiffusersModule", VQModel(**fields))
        except (TypeError, ValueError) as error:
            raise ConfigError(f"{config.config_path}: diffusers' VQModel refuses it: {error}") from error


class VqModel:
    """diffusers' VQModel in training, with what ``export_model`` needs. Shapes: B images of H W pixels, h w codes."""

    trained: DiffusersModule
    """The module; subclasses state another class."""

    def __init__(self, model: nn.Module) -> None:
        """``model`` is the module that is trained."""
        self.trained = cast("DiffusersModule", model)

    @property
    def codebook(self) -> nn.Embedding:
        """The vectors of the codes."""
        return self.trained.quantize.embedding

    def latents(self, pixels: Tensor) -> Tensor:
        """Encodes images ``[B, 3, H, W]`` in [-1, 1] to latents before quantisation, float32 ``[B, C, h, w]``."""
        return self.trained.encode(pixels).latents

    def quantise(self, latents: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Replaces latents ``[B, C, h, w]`` by the vectors of the nearest codes.

        Returns:
            The vectors ``[B, C, h, w]``, whose gradients pass straight through to the latents; the loss of the
            distances between latents and codes; and the codes, int64 ``[B, h w]``.
        """
        quantised, commitment, (_, _, codes) = self.trained.quantize(latents)
        return quantised, commitment, codes.view(len(latents), -1)

    def decode(self, quantised: Tensor) -> Tensor:
        """Decodes vectors of codes ``[B, C, h, w]`` to images ``[B, 3, H, W]``."""
        return self.trained.decode(quantised, force_not_quantize=True).sample

    @torch.no_grad()
    def check_size(self, height: int, width: int) -> None:
        """Raises ConfigError for images, of so many pixels, that come back at another size."""
        latents = self.latents(torch.zeros(1, 3, height, width, device=next(self.trained.parameters()).device))
        rows, columns = self.decode(self.quantise(latents)[0]).shape[-2:]
        if (rows, columns) != (height, width):
            raise ConfigError(
                f"data.height {height} and data.width {width}: this VQ model gives back images of {rows} x {columns} "
                f"pixels: take multiples of {rows // latents.shape[-2]}"
            )

    @torch.no_grad()
    def reconstruct(self, examples: Tensor) -> tuple[np.ndarray, int]:
        """Encodes and decodes images, uint8 ``[B, 3, H, W]``.

        Returns:
            Each image beside its reconstruction, uint8 ``[B, H, 2W, 3]``, and the number of different codes in use.
        """
        device = next(self.trained.parameters()).device
        quantised, _, codes = self.quantise(self.latents(examples.to(device) / 127.5 - 1))
        reconstructed = as_bytes(self.decode(quantised)).cpu()
        pairs = torch.cat([examples, reconstructed], dim=3).permute(0, 2, 3, 1)
        return pairs.numpy(), len(codes.unique())

    @torch.no_grad()
    def start_codebook(self, pixels: Tensor, seed: int) -> None:
        """Initialises the codebook of a new model with latents of some images, drawn without replacement.

        With a codebook far away from all latents a single code would be the nearest of all of them.
        """
        latents = self.latents(pixels).permute(0, 2, 3, 1).flatten(0, 2)
        codebook = self.codebook.weight
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(latents), generator=generator)
        distinct_latents = torch.unique(latents[order].round(decimals=4), dim=0)
        order = torch.randperm(len(distinct_latents), generator=generator)[: len(codebook)]
        # Where there are fewer latents than codes, latents are repeated; the noise makes their codes differ.
        spread = 1e-3 * latents.std() * torch.randn(codebook.shape, generator=generator)
        codebook.copy_(distinct_latents[order].repeat(-(-len(codebook) // len(order)), 1)[: len(codebook)] + spread)

    def save_export(self, folder: Path, weights: dict[str, Tensor], merge: bool = False) -> None:
        """Writes the model in the format of its library."""
        del merge
        self.trained.save_pretrained(folder, state_dict=weights)


class ImageTokenizer:
    """A frozen VQModel with a fixed size of images. It can be pickled."""

    text = ImageText()

    def __init__(self, model: DiffusersModule, source: Path) -> None:
        """
        Args:
            model: diffusers' VQModel.
            source: its folder.
        """
        self.model = model.requires_grad_(False).eval()
        self.source = source
        size = model.config.sample_size
        self.height, self.width = (size, size) if isinstance(size, int) else size
        factor = 2 ** (len(model.config.block_out_channels) - 1)
        self.shape = (self.height // factor, self.width // factor)
        """Rows and columns of the codes of an image."""
        self.num_codes = self.shape[0] * self.shape[1]
        self.codebook_size = int(model.config.num_vq_embeddings)

    @classmethod
    def from_folder(cls, folder: Path) -> ImageTokenizer:
        """Loads the VQ model of a folder. Raises ConfigError as ``build_vq_model``."""
        return cls(build_vq_model(PartConfig(model_path=str(folder))), folder)

    @property
    def fingerprint(self) -> str:
        """Identifies how images become codes."""
        return digest_weights(self.model, sorted(self.model.config.items()))

    @torch.no_grad()
    def encode(self, image: Image.Image) -> list[int]:
        """The codes of an image, row by row; an image of another size is resized."""
        pixels = to_pixels(resize_image(image, self.width, self.height))[None]
        _, _, (_, _, codes) = self.model.quantize(self.model.encode(pixels).latents)
        return codes.flatten().tolist()

    @torch.no_grad()
    def decode(self, codes: Sequence[Sequence[int]]) -> np.ndarray:
        """Decodes B lists of ``num_codes`` codes: uint8 ``[B, H, W, 3]``."""
        embedded = self.model.quantize.embedding(torch.tensor(codes)).unflatten(1, self.shape)
        latents = embedded.permute(0, 3, 1, 2).contiguous()
        pixels = as_bytes(self.model.decode(latents, force_not_quantize=True).sample)
        return pixels.permute(0, 2, 3, 1).numpy()

    def save(self, folder: Path) -> None:
        """Writes the VQ model in the format of diffusers."""
        self.model.save_pretrained(folder)


def digest_weights(module: nn.Module, settings: object) -> str:
    """Identifies a module on the CPU by its weights, and by settings beside them."""
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return digest.hexdigest()


def resize_image(image: Image.Image, width: int, height: int) -> Image.Image:
    """An image of a size; one that has it already is returned as it is."""
    return image if image.size == (width, height) else image.resize((width, height), Image.Resampling.BICUBIC)


def to_pixels(image: Image.Image) -> Tensor:
    """Pixels of an image in [-1, 1], float32 ``[3, H, W]``."""
    return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1) / 127.5 - 1


def as_bytes(pixels: Tensor) -> Tensor:
    """Rounds pixels in [-1, 1] to uint8."""
    return ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
