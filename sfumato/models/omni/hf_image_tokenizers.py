"""Image tokenizers that are parts of published models: Emu3, Janus and Chameleon.

Each is transformers' own VQ model, used as it is, frozen and in float32 on the CPU; what it says of an image stands in
the text as transformers' processor of the model has it. Shapes: n images, h w rows and columns of codes.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor, nn
from torch.nn import functional

from sfumato.config.file_checks import read_json_object
from sfumato.config.paths import check_weights
from sfumato.config.trust import load_pretrained
from sfumato.data.media.image_answers import CODE, ImageText
from sfumato.errors import ConfigError
from sfumato.models.language.vision_load import read_image_processor
from sfumato.parallel.weights import refuse_not_finite

PART = "vqmodel."
"""What names of its weights hold in the whole model."""


class OwnCodes(ABC):
    """The image tokenizer within a model. It can be pickled."""

    kind: ClassVar[str]
    """``model_type`` of the model."""
    draws: ClassVar[bool] = True
    """Whether the model can be trained to draw with it."""
    sees_codes: ClassVar[bool] = True
    """Whether images that are seen are codes, too; else the model has an encoder."""
    has_plain_output: ClassVar[bool] = True
    """Whether logits are what one output layer gives."""
    text: ImageText
    height: int
    width: int
    """Pixels of an image that is drawn."""
    shape: tuple[int, int]
    """Rows and columns of its codes."""

    def __init__(
        self, vq: nn.Module, described: Any, images: Any, tokenizer: Any, size: Sequence[int] | None = None
    ) -> None:
        """
        Args:
            vq: transformers' VQ model.
            described: transformers' configuration of the whole model.
            images: transformers' image processor of the model.
            tokenizer: of the model; it names the tokens around images.
            size: height and width in pixels of images that are drawn; None: the model's own.

        Raises:
            ConfigError: when they do not fit together.
        """
        self.vq, self.described, self.images = vq.requires_grad_(False).eval().float(), described, images
        self.codebook_size = int(vq.quantize.embedding.num_embeddings)
        self.names = [self.code_name(code) for code in range(self.codebook_size)]
        """The token of each code."""
        self.ids = self._code_ids()
        """Its id in the model's vocabulary."""
        self._place(tokenizer, size)
        self.num_codes = self.shape[0] * self.shape[1]

    @classmethod
    @abstractmethod
    def vq_class(cls) -> Any:
        """transformers' class of the VQ model."""

    @classmethod
    @abstractmethod
    def published_class(cls) -> Any:
        """transformers' class of the whole model."""

    @classmethod
    def module_class(cls, has_images: bool) -> Any:
        """The class of the module that is trained, on data with images or without."""
        return cls.published_class()

    @classmethod
    def prepare(cls, module: Any, described: Any, tokenizer: Any) -> None:
        """Tells a module which tokens those around images are."""
        del module, described, tokenizer

    @classmethod
    @abstractmethod
    def code_name(cls, code: int) -> str:
        """The token of a code."""

    @classmethod
    def names_in_vocabulary(cls, codebook_size: int) -> list[str]:
        """The tokens of codes that are tokens of the model's text, too."""
        return [cls.code_name(code) for code in range(codebook_size)]

    def generation_config(self, tokenizer: Any) -> Any:
        """What transformers' ``generate`` has to know of a model that was made in code."""
        from transformers import GenerationConfig

        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        return GenerationConfig(**{name: getattr(tokenizer, name) for name in names})

    @abstractmethod
    def _place(self, tokenizer: Any, size: Sequence[int] | None) -> None:
        """Finds ``text``, ``height``, ``width`` and ``shape``."""

    @abstractmethod
    def _codes(self, pixels: Tensor) -> Tensor:
        """The codes of one image float32 ``[1, 3, H, W]`` as the image processor gives it: int64 ``[h, w]``."""

    @abstractmethod
    def _pixels(self, codes: Tensor) -> Tensor:
        """The image of codes int64 ``[1, h w]``: float32 ``[3, H, W]``, as the image processor takes it back."""

    def shown(self, image: Image.Image) -> str:
        """The text of an image that is seen, scaled by the model's processor. Raises ValueError when it refuses it."""
        raise NotImplementedError

    def _code_ids(self) -> list[int]:
        """Raises ConfigError when the vocabulary lacks one, or what is drawn does not follow each other in it."""
        vocabulary = self.described.vocabulary_map or {}
        ids = [vocabulary.get(name) for name in self.names]
        if None in ids:
            raise ConfigError(
                f"this {self.kind} has {self.codebook_size} codes of images, but no token "
                f"{self.names[ids.index(None)]} in the vocabulary_map of its config.json"
            )
        if self.draws and ids != list(range(ids[0], ids[0] + len(ids))):
            raise ConfigError(f"the codes of images of this {self.kind} do not follow each other in its vocabulary")
        return ids

    @property
    def fingerprint(self) -> str:
        """Identifies how images become codes."""
        settings = self.images.to_json_string(), repr(self.text), self.height, self.width
        digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
        for name, tensor in sorted(self.vq.state_dict().items()):
            digest.update(name.encode() + tensor.contiguous().numpy().tobytes())
        return digest.hexdigest()

    @torch.no_grad()
    def encode(self, image: Image.Image) -> list[int]:
        """The codes of an image that is drawn, row by row; one of another size is scaled."""
        if image.size != (self.width, self.height):
            image = image.resize((self.width, self.height), Image.Resampling.BICUBIC)
        pixels = np.asarray(self.images(image.convert("RGB"), return_tensors="np", **self.unscaled)["pixel_values"])
        return self._codes(torch.from_numpy(pixels).float())[None].flatten().tolist()

    unscaled: ClassVar[dict[str, Any]] = {"do_resize": False}
    """What tells the image processor to leave the size of an image as it is."""

    @torch.no_grad()
    def decode(self, codes: Sequence[Sequence[int]]) -> np.ndarray:
        """Images of n lists of ``num_codes`` codes: uint8 ``[n, H, W, 3]``, as transformers' processor makes them."""
        images = [self._pixels(torch.tensor(image_codes)[None]).numpy() for image_codes in codes]  # bits know no batch
        pictures = [
            self.images.postprocess([pixels], return_tensors="PIL.Image.Image")["pixel_values"] for pixels in images
        ]
        return np.stack([np.asarray(picture) for (picture,) in pictures])

    def save(self, folder: Path) -> None:
        """Writes the VQ model as transformers loads it by itself."""
        self.vq.save_pretrained(folder)


class Emu3Codes(OwnCodes):
    """Images that are seen and drawn are tokens: the size, and lines of codes that end in a token of their own."""

    kind = "emu3"
    LINE_END = "<|extra_200|>"

    @classmethod
    def vq_class(cls) -> Any:
        from transformers import Emu3VQVAE

        return Emu3VQVAE

    @classmethod
    def published_class(cls) -> Any:
        from transformers import Emu3ForConditionalGeneration

        return Emu3ForConditionalGeneration

    @classmethod
    def module_class(cls, has_images: bool) -> Any:
        from sfumato.models.omni.code_lm import Emu3OfCodes

        return cls.published_class() if has_images else Emu3OfCodes

    @classmethod
    def prepare(cls, module: Any, described: Any, tokenizer: Any) -> None:
        vocabulary = described.vocabulary_map
        first = vocabulary[cls.code_name(0)]
        stop, line_end = first + described.vq_config.codebook_size, vocabulary[cls.LINE_END]
        module.within_image = first, stop, tokenizer.image_wrapper_token_id, line_end

    @classmethod
    def code_name(cls, code: int) -> str:
        return f"<|visual token {code:06d}|>"

    def _place(self, tokenizer: Any, size: Sequence[int] | None) -> None:
        from transformers import Emu3Processor

        factor = self.vq.spatial_scale_factor
        processor = Emu3Processor(self.images, tokenizer)
        if factor != processor.downsample_ratio or factor != self.images.spatial_factor:
            raise ConfigError(
                f"Emu3's processor counts a code for {processor.downsample_ratio} pixels along a side, its image processor "
                f"for {self.images.spatial_factor}; this VQ model makes one of {factor} (channel_multiplier): correct "
                "it"
            )
        if size is None:
            rows, columns = processor.calculate_generate_size(processor.ratio, processor.image_area, factor)
            size = rows * factor, columns * factor
        if any(edge % factor for edge in size):
            raise ConfigError(
                f"size {list(size)}: height and width of what Emu3 draws are multiples of {factor} pixels"
            )
        self.height, self.width = size
        self.shape = self.height // factor, self.width // factor
        self._around = (
            processor.image_start_token,
            processor.fake_token_around_image,
            processor.eof_token + processor.image_end_token,
        )
        self.text = self._text(*self.shape)

    def _text(self, rows: int, columns: int) -> ImageText:
        """As ``Emu3Processor.replace_image_token`` has it, with what the model puts in the place of its tokens."""
        start, wrapper, end = self._around
        return ImageText(f"{start}{rows}*{columns}{wrapper}", end, "<|visual token {:06d}|>", columns, self.LINE_END)

    @torch.no_grad()
    def shown(self, image: Image.Image) -> str:
        processed = self.images(image.convert("RGB"), return_tensors="np")
        codes = self._codes(torch.from_numpy(np.asarray(processed["pixel_values"])).float())
        return self._text(*codes.shape).of(codes.flatten().tolist())

    def _codes(self, pixels: Tensor) -> Tensor:
        size = torch.tensor([pixels.shape[-2:]])
        return self.vq.encode(pixels, size, return_dict=True).image_tokens[0]

    def _pixels(self, codes: Tensor) -> Tensor:
        return self.vq.decode(codes.unflatten(1, self.shape))[0]


class JanusCodes(OwnCodes):
    """Images that are drawn are codes with embeddings and an output layer of their own; those that are seen pass an
    encoder.

    A code's token is the text's vocabulary and its number: ``JanusOfCodes`` knows such tokens.
    """

    kind = "janus"
    sees_codes = False
    has_plain_output = False

    @classmethod
    def vq_class(cls) -> Any:
        from transformers import JanusVQVAE

        return JanusVQVAE

    @classmethod
    def published_class(cls) -> Any:
        from transformers import JanusForConditionalGeneration

        return JanusForConditionalGeneration

    @classmethod
    def module_class(cls, has_images: bool) -> Any:
        from sfumato.models.omni.code_lm import JanusOfCodes

        return JanusOfCodes

    @classmethod
    def prepare(cls, module: Any, described: Any, tokenizer: Any) -> None:
        module.around_image = tokenizer.boi_token_id, tokenizer.eoi_token_id

    @classmethod
    def names_in_vocabulary(cls, codebook_size: int) -> list[str]:
        return []

    def generation_config(self, tokenizer: Any) -> Any:
        config = super().generation_config(tokenizer)
        config.generation_kwargs = {"boi_token_id": tokenizer.boi_token_id}
        return config

    @classmethod
    def code_name(cls, code: int) -> str:
        return CODE.format(code)

    def _code_ids(self) -> list[int]:
        first = int(self.described.text_config.vocab_size)
        return list(range(first, first + self.codebook_size))

    def _place(self, tokenizer: Any, size: Sequence[int] | None) -> None:
        edge, patches = self.described.vision_config.image_size, self.described.vq_config.num_patches
        factor = 2 ** (len(self.described.vq_config.channel_multiplier) - 1)
        if size is not None and tuple(size) != (edge, edge):
            raise ConfigError(f"size {list(size)}: this Janus draws images of {edge} x {edge} pixels alone: remove it")
        num_codes = self.described.vision_config.num_image_tokens
        if edge != patches * factor or patches**2 != num_codes:
            raise ConfigError(
                f"this Janus has images of {edge} pixels (image_size), {num_codes} codes (num_image_tokens) and a code for "
                f"{factor} pixels (channel_multiplier), which do not fit together"
            )
        self.height = self.width = edge
        self.shape = patches, patches
        self.text = ImageText(tokenizer.boi_token, tokenizer.eoi_token)

    def _codes(self, pixels: Tensor) -> Tensor:
        """The nearest of the normalised codes, which ``decode`` reads.

        transformers' ``encode`` compares with codes that are not normalised, and gives others than those that the
        model was trained with (``codebook_l2_norm`` in Janus' own ``vq_model.py``); its modules are used without it.
        """
        hidden = functional.normalize(self.vq.quant_conv(self.vq.encoder(pixels)), dim=1)[0]
        codebook = functional.normalize(self.vq.quantize.embedding.weight, dim=-1)
        return torch.einsum("nd,dhw->nhw", codebook, hidden).argmax(0)

    def _pixels(self, codes: Tensor) -> Tensor:
        return self.vq.decode(codes)[0]


class ChameleonCodes(OwnCodes):
    """Images that are seen are tokens. It is not trained to draw: transformers' forward pass gives these tokens the
    smallest logit that there is, and its VQ model has no decoder."""

    kind = "chameleon"
    draws = False
    has_plain_output = False

    @classmethod
    def vq_class(cls) -> Any:
        from transformers import ChameleonVQVAE

        return ChameleonVQVAE

    @classmethod
    def published_class(cls) -> Any:
        from transformers import ChameleonForConditionalGeneration

        return ChameleonForConditionalGeneration

    @classmethod
    def code_name(cls, code: int) -> str:
        return "IMGIMG" + "".join(chr(ord("A") + int(digit)) for digit in str(code)) + "Z"

    def _place(self, tokenizer: Any, size: Sequence[int] | None) -> None:
        edge = self.described.vq_config.resolution
        factor = 2 ** (len(self.described.vq_config.channel_multiplier) - 1)
        self.height = self.width = edge
        self.shape = edge // factor, edge // factor
        names = [
            getattr(tokenizer, name, default)
            for name, default in (("boi_token", "<racm3:break>"), ("eoi_token", "<eoss>"))
        ]
        self.text = ImageText(*names)

    @torch.no_grad()
    def shown(self, image: Image.Image) -> str:
        pixels = np.asarray(self.images(image.convert("RGB"), return_tensors="np")["pixel_values"])
        codes = self._codes(torch.from_numpy(pixels).float())
        return self.text.opening + "".join(self.names[code] for code in codes.flatten().tolist()) + self.text.closing

    def _codes(self, pixels: Tensor) -> Tensor:
        codes = self.vq.encode(pixels, return_dict=True).image_tokens
        return codes.view(1, -1)

    def _pixels(self, codes: Tensor) -> Tensor:
        raise NotImplementedError


FAMILIES: dict[str, type[OwnCodes]] = {family.kind: family for family in (Emu3Codes, JanusCodes, ChameleonCodes)}
"""By ``model_type``."""


def family_of(folder: Path) -> type[OwnCodes] | None:
    """The family of the model in a folder; None of any other."""
    file = folder / "config.json"
    try:
        kind = read_json_object(file).get("model_type")
    except (OSError, ValueError):
        return None
    return FAMILIES.get(kind)


def read_vq(folder: Path, described: Any) -> nn.Module:
    """The VQ model of a whole model's folder, or of one that holds it alone, float32 on the CPU. Raises ConfigError."""
    check_weights(folder)
    vq = FAMILIES[described.model_type].vq_class()(described.vq_config)
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names = list(opened.keys())
            inside = [name for name in names if PART in name]  # none in the folder of a VQ model alone
            stored |= {name: opened.get_tensor(name) for name in inside or ([] if family_of(folder) else names)}
    weights = {name.rpartition(PART)[2]: tensor.float() for name, tensor in stored.items()}
    expected = vq.state_dict()
    wrong = sorted(name for name in expected if name not in weights or weights[name].shape != expected[name].shape)
    if wrong or weights.keys() - expected.keys():
        first = wrong[0] if wrong else sorted(weights.keys() - expected.keys())[0]
        raise ConfigError(f"{folder}: its weights are not those of a {type(vq).__name__} of this model: {first}")
    vq.load_state_dict(weights)
    refuse_not_finite(vq, folder)
    return vq


def read_own_codes(folder: Path, size: Sequence[int] | None = None) -> OwnCodes:
    """The image tokenizer of the model in a folder. Raises ConfigError when it is broken, or cannot draw."""
    from transformers import AutoConfig, AutoTokenizer

    family = family_of(folder)
    assert family is not None
    if not family.draws:
        raise ConfigError(f"{folder}: a model of type {family.kind} cannot be trained to draw")
    try:
        described = load_pretrained(AutoConfig, folder)
        tokenizer = load_pretrained(AutoTokenizer, folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder}: transformers cannot read it: {error}") from error
    return family(read_vq(folder, described), described, read_image_processor(folder), tokenizer, size)
