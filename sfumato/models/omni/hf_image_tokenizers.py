"""Image tokenizers of the published models Emu3, Janus and Chameleon.

Each is the VQ model of transformers, frozen and in float32 on the CPU. The codes of an image are written into the text
as transformers' processor of the model does. Shapes: n images, h w rows and columns of codes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional

from sfumato.config.file_checks import read_json_object
from sfumato.config.open_mappings import Keywords
from sfumato.config.paths import check_weights
from sfumato.config.trust import load_pretrained
from sfumato.data.media.image_answers import CODE, ImageText
from sfumato.errors import ConfigError
from sfumato.models.language.vision_load import read_image_processor
from sfumato.models.omni.image_tokenizer import digest_weights, resize_image
from sfumato.parallel.weights import refuse_not_finite

if TYPE_CHECKING:
    from transformers import (
        BaseImageProcessor,
        ChameleonVQVAE,
        Emu3VQVAE,
        GenerationConfig,
        JanusVQVAE,
        PreTrainedConfig,
        PreTrainedModel,
        PreTrainedTokenizerBase,
    )

PART = "vqmodel."
"""Part of the names of the VQ model's weights in the whole model."""


class OwnCodes(ABC):
    """The image tokenizer of a model of transformers. It can be pickled."""

    kind: ClassVar[str]
    """``model_type`` of the model."""
    vq_name: ClassVar[str]
    """transformers' class of the VQ model."""
    published_name: ClassVar[str]
    """transformers' class of the whole model."""
    draws: ClassVar[bool] = True
    """Whether the model can be trained to draw with it."""
    sees_codes: ClassVar[bool] = True
    """Whether images that the model reads are codes, too; otherwise it has a vision encoder for them."""
    has_plain_output: ClassVar[bool] = True
    """Whether logits are the output of a single linear layer."""
    text: ImageText
    """How the codes of an image are written into the text."""
    height: int
    width: int
    """Pixels of an image that is drawn."""
    shape: tuple[int, int]
    """Rows and columns of its codes."""

    def __init__(
        self,
        vq: PreTrainedModel,
        described: PreTrainedConfig,
        images: BaseImageProcessor,
        tokenizer: PreTrainedTokenizerBase,
        size: Sequence[int] | None = None,
    ) -> None:
        """
        Args:
            vq: transformers' VQ model.
            described: transformers' configuration of the whole model.
            images: transformers' image processor of the model.
            tokenizer: the model's tokenizer, which names the tokens around images.
            size: height and width in pixels of images that are drawn; None is the default of the model.

        Raises:
            ConfigError: when these do not fit together.
        """
        self.vq = vq.requires_grad_(False).eval().float()
        self.described = described
        self.images = images
        self.codebook_size = int(vq.quantize.embedding.num_embeddings)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
        self.names = [self.code_name(code) for code in range(self.codebook_size)]
        """The token of each code."""
        self.ids = self._code_ids()
        """The id of each code in the model's vocabulary."""
        self._set_layout(tokenizer, size)
        self.num_codes = self.shape[0] * self.shape[1]

    @classmethod
    def published_class(cls) -> type[PreTrainedModel]:
        """transformers' class of the whole model."""
        import transformers

        return getattr(transformers, cls.published_name)

    @classmethod
    def module_class(cls, has_images: bool) -> type[PreTrainedModel]:
        """The class of the module that is trained, on data with images or without."""
        return cls.published_class()

    @classmethod
    def prepare(cls, module: PreTrainedModel, described: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        """Sets on a module of ``module_class`` the ids of the tokens around images that its ``forward`` needs."""
        del module, described, tokenizer

    @classmethod
    @abstractmethod
    def code_name(cls, code: int) -> str:
        """The token of a code."""

    @classmethod
    def names_in_vocabulary(cls, codebook_size: int) -> list[str]:
        """The tokens of codes that the vocabulary of the model contains."""
        return [cls.code_name(code) for code in range(codebook_size)]

    def generation_config(self, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
        """The settings of transformers' ``generate`` for a model that was built from a description."""
        from transformers import GenerationConfig

        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        return GenerationConfig(**{name: getattr(tokenizer, name) for name in names})

    @abstractmethod
    def _set_layout(self, tokenizer: PreTrainedTokenizerBase, size: Sequence[int] | None) -> None:
        """Sets ``text``, ``height``, ``width`` and ``shape``. Raises ConfigError for a size that it cannot draw."""

    @abstractmethod
    def _encode_pixels(self, pixels: Tensor) -> Tensor:
        """Encodes the output of the image processor for one image, float32 ``[1, 3, H, W]``: int64 ``[h, w]``."""

    @abstractmethod
    def _decode_codes(self, codes: Tensor) -> Tensor:
        """Decodes the codes of one image, int64 ``[1, h w]``: float32 ``[3, H, W]``, for the image processor."""

    def image_text(self, image: Image.Image) -> str:
        """The text of an image that the model reads, resized by its processor. Raises ValueError if that refuses it."""
        raise NotImplementedError

    def _code_ids(self) -> list[int]:
        """Ids of all codes. Raises ConfigError if one is missing, or if a model draws and they are not consecutive."""
        vocabulary = self.described.vocabulary_map or {}
        ids = [vocabulary.get(name) for name in self.names]
        if None in ids:
            raise ConfigError(
                f"this {self.kind} has {self.codebook_size} codes of images, but no token "
                f"{self.names[ids.index(None)]} in the vocabulary_map of its config.json"
            )
        if self.draws and ids != list(range(ids[0], ids[0] + len(ids))):  # pyright: ignore[reportArgumentType, reportOptionalOperand]
            raise ConfigError(f"the codes of images of this {self.kind} do not follow each other in its vocabulary")
        return cast("list[int]", ids)

    @property
    def fingerprint(self) -> str:
        """Identifies how images become codes."""
        settings = self.images.to_json_string(), repr(self.text), self.height, self.width
        return digest_weights(self.vq, settings)

    @torch.no_grad()
    def encode(self, image: Image.Image) -> list[int]:
        """The codes of an image that is drawn, row by row; an image of another size is resized."""
        image = resize_image(image, self.width, self.height)
        return self._encode_pixels(self._preprocess_image(image, **self.unscaled))[None].flatten().tolist()

    def _preprocess_image(self, image: Image.Image, **options: Any) -> Tensor:
        """What the image processor makes of an image: float32 ``[1, 3, H, W]``."""
        processed = self.images(image.convert("RGB"), return_tensors="np", **options)
        return torch.from_numpy(np.asarray(processed["pixel_values"])).float()

    unscaled: ClassVar[Keywords] = {"do_resize": False}
    """Arguments with which the image processor does not resize an image."""

    @torch.no_grad()
    def decode(self, codes: Sequence[Sequence[int]]) -> np.ndarray:
        """Decodes n lists of ``num_codes`` codes: uint8 ``[n, H, W, 3]``, rounded by transformers' processor."""
        # Images are decoded one by one, since the bits depend on the size of the batch.
        images = [self._decode_codes(torch.tensor(image_codes)[None]).numpy() for image_codes in codes]
        pictures = [
            self.images.postprocess([pixels], return_tensors="PIL.Image.Image")["pixel_values"]  # pyright: ignore[reportAttributeAccessIssue]
            for pixels in images
        ]
        return np.stack([np.asarray(picture) for (picture,) in pictures])

    def save(self, folder: Path) -> None:
        """Writes the VQ model in the format of transformers."""
        self.vq.save_pretrained(folder)


class Emu3Codes(OwnCodes):
    """Emu3: images are written as their size and lines of codes, each of which ends in a token of its own."""

    kind = "emu3"
    vq: Emu3VQVAE
    vq_name = "Emu3VQVAE"
    published_name = "Emu3ForConditionalGeneration"
    LINE_END = "<|extra_200|>"

    @classmethod
    def module_class(cls, has_images: bool) -> type[PreTrainedModel]:
        from sfumato.models.omni.code_lm import Emu3OfCodes

        return cls.published_class() if has_images else Emu3OfCodes

    @classmethod
    def prepare(cls, module: PreTrainedModel, described: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        vocabulary = described.vocabulary_map
        first = vocabulary[cls.code_name(0)]
        stop = first + described.vq_config.codebook_size
        line_end = vocabulary[cls.LINE_END]
        module.within_image = first, stop, tokenizer.image_wrapper_token_id, line_end  # pyright: ignore[reportArgumentType]

    @classmethod
    def code_name(cls, code: int) -> str:
        return f"<|visual token {code:06d}|>"

    def _set_layout(self, tokenizer: PreTrainedTokenizerBase, size: Sequence[int] | None) -> None:
        from transformers import Emu3Processor

        factor = self.vq.spatial_scale_factor
        processor = Emu3Processor(self.images, tokenizer)
        if factor != processor.downsample_ratio or factor != self.images.spatial_factor:  # pyright: ignore[reportAttributeAccessIssue]  (of Emu3)
            raise ConfigError(
                f"Emu3's processor counts a code for {processor.downsample_ratio} pixels along a side, its image "
                f"processor for {self.images.spatial_factor}; this VQ model makes one of {factor} "  # pyright: ignore[reportAttributeAccessIssue]  (of Emu3)
                "(channel_multiplier): correct it"
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
        self.text = self._image_text(*self.shape)

    def _image_text(self, rows: int, columns: int) -> ImageText:
        """The text that ``Emu3Processor.replace_image_token`` makes, with codes in the place of its image tokens."""
        start, wrapper, end = self._around
        return ImageText(f"{start}{rows}*{columns}{wrapper}", end, "<|visual token {:06d}|>", columns, self.LINE_END)

    @torch.no_grad()
    def image_text(self, image: Image.Image) -> str:
        codes = self._encode_pixels(self._preprocess_image(image))
        return self._image_text(*codes.shape).of(codes.flatten().tolist())

    def _encode_pixels(self, pixels: Tensor) -> Tensor:
        size = torch.tensor([pixels.shape[-2:]])
        return self.vq.encode(pixels, size, return_dict=True).image_tokens[0]  # pyright: ignore[reportCallIssue]  (added by a decorator)

    def _decode_codes(self, codes: Tensor) -> Tensor:
        return self.vq.decode(codes.unflatten(1, self.shape))[0]


class JanusCodes(OwnCodes):
    """Janus: images that are drawn are codes with embeddings and an output layer of their own.

    Images that are read pass a vision encoder instead.

    The token of code c is V + c, where V is the size of the vocabulary of text: see ``JanusOfCodes``.
    """

    kind = "janus"
    vq: JanusVQVAE
    vq_name = "JanusVQVAE"
    published_name = "JanusForConditionalGeneration"
    sees_codes = False
    has_plain_output = False

    @classmethod
    def module_class(cls, has_images: bool) -> type[PreTrainedModel]:
        from sfumato.models.omni.code_lm import JanusOfCodes

        return JanusOfCodes

    @classmethod
    def prepare(cls, module: PreTrainedModel, described: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        module.around_image = tokenizer.boi_token_id, tokenizer.eoi_token_id  # pyright: ignore[reportArgumentType]

    @classmethod
    def names_in_vocabulary(cls, codebook_size: int) -> list[str]:
        return []

    def generation_config(self, tokenizer: PreTrainedTokenizerBase) -> GenerationConfig:
        config = super().generation_config(tokenizer)
        config.generation_kwargs = {"boi_token_id": tokenizer.boi_token_id}  # pyright: ignore[reportAttributeAccessIssue]
        return config

    @classmethod
    def code_name(cls, code: int) -> str:
        return CODE.format(code)

    def _code_ids(self) -> list[int]:
        first = int(self.described.text_config.vocab_size)
        return list(range(first, first + self.codebook_size))

    def _set_layout(self, tokenizer: PreTrainedTokenizerBase, size: Sequence[int] | None) -> None:
        edge = self.described.vision_config.image_size
        patches = self.described.vq_config.num_patches
        factor = 2 ** (len(self.described.vq_config.channel_multiplier) - 1)
        if size is not None and tuple(size) != (edge, edge):
            raise ConfigError(f"size {list(size)}: this Janus draws images of {edge} x {edge} pixels alone: remove it")
        num_codes = self.described.vision_config.num_image_tokens
        if edge != patches * factor or patches**2 != num_codes:
            raise ConfigError(
                f"this Janus has images of {edge} pixels (image_size), {num_codes} codes (num_image_tokens) and a code "
                f"for {factor} pixels (channel_multiplier), which do not fit together"
            )
        self.height = self.width = edge
        self.shape = patches, patches
        self.text = ImageText(tokenizer.boi_token, tokenizer.eoi_token)  # pyright: ignore[reportArgumentType]

    def _encode_pixels(self, pixels: Tensor) -> Tensor:
        """The nearest codes by cosine similarity, since ``decode`` normalises codes.

        transformers' ``encode`` compares with codes that are not normalised, which gives other codes than the model was
        trained with (``codebook_l2_norm`` in Janus' own ``vq_model.py``). So its modules are called here instead.
        """
        hidden = functional.normalize(self.vq.quant_conv(self.vq.encoder(pixels)), dim=1)[0]
        codebook = functional.normalize(self.vq.quantize.embedding.weight, dim=-1)
        return torch.einsum("nd,dhw->nhw", codebook, hidden).argmax(0)

    def _decode_codes(self, codes: Tensor) -> Tensor:
        return self.vq.decode(codes)[0]  # pyright: ignore[reportArgumentType]


class ChameleonCodes(OwnCodes):
    """Chameleon: images that are read are tokens.

    It cannot be trained to draw, since transformers' forward pass gives codes the smallest possible logit, and its VQ
    model has no decoder.
    """

    kind = "chameleon"
    vq: ChameleonVQVAE
    vq_name = "ChameleonVQVAE"
    published_name = "ChameleonForConditionalGeneration"
    draws = False
    has_plain_output = False

    @classmethod
    def code_name(cls, code: int) -> str:
        return "IMGIMG" + "".join(chr(ord("A") + int(digit)) for digit in str(code)) + "Z"

    def _set_layout(self, tokenizer: PreTrainedTokenizerBase, size: Sequence[int] | None) -> None:
        edge = self.described.vq_config.resolution
        factor = 2 ** (len(self.described.vq_config.channel_multiplier) - 1)
        self.height = self.width = edge
        self.shape = edge // factor, edge // factor
        names = [
            getattr(tokenizer, name, default)
            for name, default in (("boi_token", "<racm3:break>"), ("eoi_token", "<eoss>"))
        ]
        self.text = ImageText(*names)  # pyright: ignore[reportArgumentType]

    @torch.no_grad()
    def image_text(self, image: Image.Image) -> str:
        codes = self._encode_pixels(self._preprocess_image(image))
        return self.text.opening + "".join(self.names[code] for code in codes.flatten().tolist()) + self.text.closing

    def _encode_pixels(self, pixels: Tensor) -> Tensor:
        codes = self.vq.encode(pixels, return_dict=True).image_tokens  # pyright: ignore[reportCallIssue]  (added by a decorator)
        return codes.view(1, -1)

    def _decode_codes(self, codes: Tensor) -> Tensor:
        raise NotImplementedError


FAMILIES: dict[str, type[OwnCodes]] = {family.kind: family for family in (Emu3Codes, JanusCodes, ChameleonCodes)}
"""Image tokenizers by the ``model_type`` of the model."""


def family_of(folder: Path) -> type[OwnCodes] | None:
    """The class of the image tokenizer of the model in a folder; None for other models."""
    file = folder / "config.json"
    try:
        kind = read_json_object(file).get("model_type")
    except (OSError, ValueError):
        return None
    return FAMILIES.get(kind)  # pyright: ignore[reportArgumentType]


def read_vq(folder: Path, described: PreTrainedConfig) -> PreTrainedModel:
    """Loads a VQ model from the folder of a whole model, or of the VQ model alone, in float32 on the CPU.

    Args:
        folder: the folder.
        described: transformers' configuration of the whole model.

    Raises:
        ConfigError: when the folder holds other weights, or weights that are not finite.
    """
    import transformers

    check_weights(folder)
    vq = getattr(transformers, FAMILIES[described.model_type].vq_name)(described.vq_config)
    stored: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names = list(opened.keys())
            inside = [name for name in names if PART in name]  # none in the folder of a VQ model alone
            stored |= {name: opened.get_tensor(name) for name in inside or ([] if family_of(folder) else names)}
    weights = {name.rpartition(PART)[2]: tensor.float() for name, tensor in stored.items()}
    expected = vq.state_dict()
    wrong_names = sorted(
        name for name in expected if name not in weights or weights[name].shape != expected[name].shape
    )
    if wrong_names or weights.keys() - expected.keys():
        first = wrong_names[0] if wrong_names else sorted(weights.keys() - expected.keys())[0]
        raise ConfigError(f"{folder}: its weights are not those of a {type(vq).__name__} of this model: {first}")
    vq.load_state_dict(weights)
    refuse_not_finite(vq, folder)
    return vq


def read_own_codes(folder: Path, size: Sequence[int] | None = None) -> OwnCodes:
    """Loads the image tokenizer of the model in a folder. Raises ConfigError when it is broken, or cannot draw."""
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
