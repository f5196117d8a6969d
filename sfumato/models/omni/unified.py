"""Published models of transformers that read and draw images: Emu3 and Janus; and Chameleon, which only reads them.

The model is that of transformers, trained as a language model over text and codes of images. Its image tokenizer is
frozen, and makes codes when data is read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.config.omni import TrainOmniConfig
from sfumato.config.text import LanguageModelConfig
from sfumato.config.text_data import TextTrainConfig
from sfumato.config.trust import load_pretrained
from sfumato.data.media.document_media import MediaRefs, Tensors
from sfumato.data.media.image_answers import DrawingReader
from sfumato.data.media.vision import MediaProcessor, Vision
from sfumato.data.text.answer_end import facts_of
from sfumato.data.text.token_ids import token_id
from sfumato.errors import ConfigError
from sfumato.models.language.parts import (
    BYTES,
    DTYPES,
    build_module,
    build_tokenizer,
    check_vocabulary,
    freeze,
    read_model_config,
    source_of,
)
from sfumato.models.language.vision_load import build_processor
from sfumato.models.omni.hf_image_tokenizers import FAMILIES, OwnCodes, read_vq
from sfumato.models.omni.model import OmniModel
from sfumato.models.omni.unified_tokens import (
    add_own_tokens,
    with_codes,
)
from sfumato.parallel.mesh import Mesh

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, ProcessorMixin

    from sfumato.config.sections import TrainConfig
    from sfumato.data.text.format import TextFormat
    from sfumato.data.text.prompt_formats.base import PromptFormat


class CodeReader(DrawingReader):
    """Reads images as codes in the text, like those that are drawn, so that batches hold no tensors of images."""

    image_tokenizer: OwnCodes

    def __init__(self, *args: Any) -> None:
        """As ``DrawingReader``."""
        super().__init__(*args)
        self.is_likely = self.draws = self.image_tokenizer.draws

    def limited(self, min_pixels: int | None, max_pixels: int | None) -> MediaProcessor:
        """As ``MediaProcessor.limited``, for the image processor of Emu3."""
        limits = {"min_pixels": min_pixels, "max_pixels": max_pixels}
        limits = {name: value for name, value in limits.items() if value is not None}
        if not limits:
            return self
        images = copy.deepcopy(self.processor.image_processor)
        if not all(hasattr(images, name) for name in limits):
            return super().limited(min_pixels, max_pixels)
        for name, value in limits.items():
            setattr(images, name, value)
        if images.min_pixels > images.max_pixels:
            raise ConfigError(
                f"data.data_type: images of at least {images.min_pixels} pixels and at most {images.max_pixels}: "
                "min_pixels must not be above max_pixels (one that is null is the processor's)"
            )
        images.size = {"min_pixels": images.min_pixels, "max_pixels": images.max_pixels}
        reader = copy.copy(self)
        reader.processor = copy.copy(self.processor)
        reader.image_tokenizer = copy.copy(self.image_tokenizer)
        reader.processor.image_processor = reader.image_tokenizer.images = images
        return reader

    def place(self, images: Sequence[Any]) -> tuple[list[str], np.ndarray]:
        """The text of each image, with its codes, and shapes of zeros, since there is no encoder."""
        return [self.image_tokenizer.image_text(image) for image in images], np.zeros((len(images), 3), np.int32)

    def tensors(self, images: MediaRefs) -> Tensors:
        """No tensors."""
        return {}

    def process_opened(self, media: Sequence[object]) -> Tensors:
        """No tensors."""
        return {}

    def kinds(self, input_ids: np.ndarray) -> np.ndarray:
        """1 for codes and ends of their lines, 0 for all other tokens, including those around an image."""
        line_end = self.image_tokenizer.text.line_end
        ends = [token_id(self.tokenizer, line_end)] if line_end else []
        return np.isin(input_ids, [*self.image_tokenizer.ids, *ends]).astype(np.int64)


class UnifiedModel(OmniModel):
    """A model of transformers that reads and draws images, over text and codes."""

    image_tokenizer: OwnCodes
    can_be_served: ClassVar[bool] = False
    hf_tokenizer: PreTrainedTokenizerBase
    """The model's tokenizer as it was loaded, which is exported; ``tokenizer`` also splits text into codes."""
    hf_build: Callable[[], nn.Module]
    """Makes a model of transformers' own class, for the export."""
    has_plain_output: bool
    """Whether logits are the output of a single linear layer."""
    processor: ProcessorMixin
    """transformers' processor, with ``hf_tokenizer``."""

    def save_export(self, folder: Path, weights: dict[str, Tensor], merge: bool = False) -> None:
        """Writes model, processor and tokenizer in the format of transformers."""
        MediaProcessor(self.processor, (), (1, 1.0)).save(folder, self.source)
        if self.source is None:  # built from a description: there are no files to copy
            self.processor.save_pretrained(folder)
        # The export of LanguageModel uses these attributes: put those of transformers in their place meanwhile.
        build = self._build
        tokenizer = self.tokenizer
        vision = self.vision
        self._build = self.hf_build
        self.tokenizer = self.hf_tokenizer
        self.vision = None
        facts_of(self.hf_tokenizer).answer_end = facts_of(tokenizer).answer_end
        if isinstance(tokenizer.chat_template, str):
            self.hf_tokenizer.chat_template = tokenizer.chat_template
        try:
            # not that of OmniModel, which writes the parts of a composed model; its chat template replaces the
            # processor's
            super(OmniModel, self).save_export(folder, weights, merge)
        finally:
            self._build = build
            self.tokenizer = tokenizer
            self.vision = vision
        if self.source is None:
            self.image_tokenizer.generation_config(self.hf_tokenizer).save_pretrained(folder)

    def _check(self, mesh: Mesh, config: TrainConfig) -> None:
        super()._check(mesh, config)
        if mesh.size != mesh.data_size or config.data_parallel_mode == "fsdp1":
            raise ConfigError(
                f"train: a {self.image_tokenizer.kind} model takes data parallelism, ddp or fsdp2, alone: set the "
                "other sizes to 1"
            )
        if self._chunked and not self.has_plain_output:
            raise ConfigError(
                f"train.chunked_loss: the logits of a {self.image_tokenizer.kind} model are more than one output layer "
                "gives: set it to false"
            )


class _SingleAutoClass:
    """Stands in for an auto class of transformers, but always makes models of one class."""

    def __init__(self, cls: type[PreTrainedModel]) -> None:
        self._cls = cls
        self._model_mapping = {cls.config_class: cls}  # read where auto classes are expected

    def from_config(self, described: PreTrainedConfig, trust_remote_code: bool, **settings: object) -> nn.Module:
        return self._cls._from_config(described, **settings)

    def from_pretrained(self, folder: Path, local_files_only: bool, **settings: Any) -> nn.Module:
        return load_pretrained(self._cls, folder, **settings)


def build_unified_omni_model(config: TrainOmniConfig) -> UnifiedModel:
    """Builds the model of ``model.unified`` for training to read and draw images. Raises as ``build_unified``."""
    model = config.model
    assert model.unified is not None
    section = LanguageModelConfig(
        model_path=model.unified.model_path,
        config_path=model.unified.config_path,
        tokenizer_path=model.tokenizer_path,
        freeze=model.freeze,
        attention=model.attention,
        rows=model.rows,
    )
    described = read_model_config(section, sees=True)
    if described.model_type not in FAMILIES or not FAMILIES[described.model_type].draws:
        names = ", ".join(sorted(name for name, family in FAMILIES.items() if family.draws))
        raise ConfigError(
            f"model.unified: models of type {described.model_type} are not trained to draw; these are: {names}"
            + (
                "; transformers' forward pass of chameleon gives codes of images no probability"
                if described.model_type == "chameleon"
                else ""
            )
        )
    codes = None if model.image_tokenizer is None else Path(model.image_tokenizer)
    return build_unified(section, config.train, described, config.data.data_type, config.draw.size, codes)


def build_unified(
    config: LanguageModelConfig,
    train: TextTrainConfig,
    described: PreTrainedConfig,
    data_type: TextFormat | PromptFormat | None = None,
    size: Sequence[int] | None = None,
    codes: Path | None = None,
    trains: bool = True,
) -> UnifiedModel:
    """Loads or builds a model, and makes all of it but its image tokenizer trainable.

    Args:
        config, train: as for ``build_language_model``.
        described: transformers' configuration of the model.
        data_type: the format of the data; with images, the model gets a reader for them.
        size: height and width of images that are drawn; None is the default of the model.
        codes: folder of the VQ model, for a model that is built from a description.
        trains: whether the model is trained; a reference is not.

    Raises:
        ConfigError: as ``build_language_model``, and when its parts do not fit together.
    """
    if config.lora is not None:
        raise ConfigError(f"model.lora: adapters of {described.model_type} models are not trained: remove it")
    family = FAMILIES[described.model_type]
    source = source_of(config)
    hf_tokenizer = build_tokenizer(config)
    if config.tokenizer_path == BYTES:
        codebook_size = getattr(described.vq_config, "codebook_size", None) or described.vq_config.num_embeddings
        add_own_tokens(hf_tokenizer, described, family.names_in_vocabulary(codebook_size))
    has_images = data_type is not None and data_type.has_images
    cls = family.module_class(has_images)
    published = family.published_class()

    def finish(module: nn.Module) -> None:
        # transformers maps published names of weights for its own classes only, so the class is changed after loading.
        module.__class__ = cls
        family.prepare(cast("PreTrainedModel", module), described, hf_tokenizer)

    module, make = build_module(config, train, described, _SingleAutoClass(published), trains, finish)
    check_vocabulary(module, hf_tokenizer)
    vq = _make_vq(module, make, codes or source, described, train.seed)
    if codes is not None:
        module.model.vqmodel.load_state_dict(vq.state_dict())  # pyright: ignore[reportAttributeAccessIssue]
    hf_processor = build_processor(described, None if config.tokenizer_path == BYTES else source, hf_tokenizer)
    image_tokenizer = family(vq, described, hf_processor.image_processor, hf_tokenizer, size)
    tokenizer = with_codes(hf_tokenizer, image_tokenizer)
    processor = copy.copy(hf_processor)
    processor.tokenizer = tokenizer
    first = processor(text=["a"], return_tensors="np")["input_ids"][0][0]
    facts_of(tokenizer).begins_chats = bool(first == tokenizer.bos_token_id)
    vision = None
    if has_images:
        assert data_type is not None
        vision = Vision(data_type.limited(_build_reader(processor, image_tokenizer)), None)
        image_tokenizer = vision.reader.image_tokenizer  # pyright: ignore[reportAttributeAccessIssue]
        hf_processor.image_processor = image_tokenizer.images  # with the limits of the data
    settings = (DTYPES[train.mixed_precision], make, source, train.chunked_loss, vision)
    model = UnifiedModel(module, tokenizer, *settings)
    model.hf_tokenizer = hf_tokenizer
    model.processor = hf_processor
    model.image_tokenizer = image_tokenizer
    model.has_plain_output = family.has_plain_output and cls is published
    model.hf_build = partial(published._from_config, copy.deepcopy(described))
    if family.draws:
        model.codes = range(image_tokenizer.ids[0], image_tokenizer.ids[-1] + 1)
        line_end = image_tokenizer.text.line_end
        # as transformers' generate of Janus leaves it
        model.kept_token = cast("int | None", tokenizer.bos_token_id)
        model.line_end = token_id(tokenizer, line_end) if line_end else None
    model.no_text = frozenset(tokenizer.all_special_ids)
    module.requires_grad_(trains)
    if trains:
        model.frozen_names = freeze(module, [r"\bvqmodel\."]) | freeze(module, config.freeze)
    return model


def _make_vq(
    module: nn.Module, make: Callable[[], nn.Module], folder: Path | None, described: PreTrainedConfig, seed: int
) -> PreTrainedModel:
    """Loads the VQ model from a folder, or copies that of a model with random weights.

    Args:
        module: the whole model; if it is on meta, another one is made to copy from.
        make: makes another model of the same kind.
        folder: the folder; None for a model with random weights.
        described: transformers' configuration of the whole model.
        seed: seed of the random weights.
    """
    if folder is not None:
        return read_vq(folder, described)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        whole = make() if any(parameter.is_meta for parameter in module.parameters()) else module
        return copy.deepcopy(whole.model.vqmodel)  # pyright: ignore[reportAttributeAccessIssue, reportReturnType]


def _build_reader(processor: ProcessorMixin, image_tokenizer: OwnCodes) -> DrawingReader:
    """Makes the reader of images that are read and of images that are drawn."""
    if image_tokenizer.sees_codes:
        return CodeReader(processor, (), (1, 1.0), image_tokenizer)
    patch = image_tokenizer.described.vision_config.patch_size
    return DrawingReader(processor, ("pixel_values",), (patch, 1.0), image_tokenizer)
