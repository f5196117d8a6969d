"""From a transformers folder, or a description, to a language model that can be trained."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from sfumato.config.file_checks import read_json
from sfumato.config.text import LanguageModelConfig
from sfumato.models.language.model import LanguageModel
from sfumato.models.language.parts import (
    BYTES,
    DTYPES,
    build_module,
    check_auto_class,
    check_vocabulary,
    describe_other_keys,
    freeze,
    is_unified,
    names_without_gradients,
    where_described,
)
from sfumato.models.language.parts import build_byte_tokenizer as build_byte_tokenizer
from sfumato.models.language.parts import build_tokenizer as build_tokenizer
from sfumato.models.language.parts import read_model_config as read_model_config
from sfumato.models.language.parts import source_of as source_of
from sfumato.models.language.router_config import (
    adds_router_loss,
    describe_router_loss,
    refuse_router_loss,
    router_loss_coefficient,
)
from sfumato.models.language.source_folder import describe_left_out

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from sfumato.config.text_data import TextTrainConfig
    from sfumato.config.text_rl import TextRLTrainConfig
    from sfumato.data.media.vision import MediaProcessor
    from sfumato.data.text.format import TextFormat
    from sfumato.data.text.prompt_formats.base import PromptFormat


def build_language_model(
    config: LanguageModelConfig,
    train: TextTrainConfig | TextRLTrainConfig,
    frozen: bool = False,
    data_type: TextFormat | PromptFormat | None = None,
    with_router_loss: bool = False,
) -> LanguageModel:
    """Loads a model from a folder, or makes one with random weights from a description.

    Its weights stay on ``train.init_device`` until ``LanguageModel.parallelize``. Trained weights are float32; frozen
    ones have ``config.dtype``.

    Args:
        config: the model section.
        train: the train section: seed of random weights, precision, ``init_device``, ``chunked_loss``.
        frozen: make a reference, which has no adapters and no trained weights.
        data_type: the format of the data; one with images needs a model that sees.
        with_router_loss: the task adds the auxiliary loss of routers (``LanguageModel.router_loss``) where the
            model's configuration asks for it; other tasks refuse to train such a model.

    Raises:
        ConfigError: when the folder or description is missing, broken or of an unknown kind.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM

    sees = data_type is not None and data_type.has_images
    described = read_model_config(config, sees)
    if is_unified(described, sees):
        # it brings the modules that make pictures, which other models need not load
        from sfumato.models.omni.unified import build_unified

        return build_unified(config, cast("TextTrainConfig", train), described, data_type, trains=not frozen)
    train_base = config.lora is None and not frozen
    auto_class = AutoModelForMultimodalLM if sees else AutoModelForCausalLM
    check_auto_class(auto_class, described, config)
    if not frozen and not with_router_loss:
        cls = cast("type[PreTrainedModel] | None", auto_class._model_mapping.get(type(described), None))
        refuse_router_loss(cls, described, where_described(config))
    module, make = build_module(config, train, described, auto_class, train_base)
    tokenizer = build_tokenizer(config)
    vision = None
    if sees:
        from sfumato.models.language.vision_load import add_image_tokens, build_vision

        assert data_type is not None
        # before ``build_vision``, whose processor looks its tokens up in the tokenizer
        if config.tokenizer_path == BYTES:
            add_image_tokens(tokenizer, described)
        vision = build_vision(
            described, None if config.tokenizer_path == BYTES else source_of(config), module, tokenizer
        )
        vision = vision.with_reader(data_type.limited(vision.reader))
    check_vocabulary(module, tokenizer)
    settings = (DTYPES[train.mixed_precision], make, source_of(config), train.chunked_loss, vision)
    model = LanguageModel(module, tokenizer, *settings)
    if with_router_loss and router_loss_coefficient(described) and adds_router_loss(type(module)):
        from sfumato.models.language.router_loss import RouterLoss

        model.router_loss = RouterLoss(module)
    if not train_base:
        module.requires_grad_(False)
    model.notes = (
        *describe_left_out(described, type(module)),
        *describe_router_loss(type(module), described),
        *describe_other_keys(config),
    )
    if not frozen:  # nothing of a reference is trained
        if indexer_names := names_without_gradients(module):
            model.notes += (
                f"no gradient reaches {len(indexer_names)} weights that choose keys of sparse attention (indexers): "
                "they are frozen",
            )
        # before adapters are added: patterns of ``model.freeze`` name weights of the plain module
        model.frozen_names = freeze(module, config.freeze)
    if config.lora is not None and not frozen:
        from sfumato.models.lora import add_lora, language_targets

        add_lora(module, config.lora, language_targets(module), train.seed)
    return model


def build_reader(
    config: LanguageModelConfig, train: TextTrainConfig | TextRLTrainConfig, data_type: TextFormat | PromptFormat
) -> tuple[PreTrainedTokenizerBase, MediaProcessor | None]:
    """The tokenizer of a model and, where the data has images, the reader of these. No weights are read or drawn.

    Arguments and errors are those of ``build_language_model``.
    """
    if not data_type.has_images and not _holds_unified(config):
        return build_tokenizer(config), None
    # the reader needs the module's signature and configuration, not its weights
    without_adapters = config.model_copy(update={"lora": None})
    on_meta = train.model_copy(update={"init_device": "meta"})
    model = build_language_model(without_adapters, on_meta, data_type=data_type)
    return model.tokenizer, None if model.vision is None else model.vision.reader


def _holds_unified(config: LanguageModelConfig) -> bool:
    """``is_unified`` of the model in ``model_path``, if there is one, for data without images."""
    try:
        fields = read_json(Path(str(config.model_path)) / "config.json")
        return is_unified(SimpleNamespace(**{"model_type": None} | fields), False)
    except (OSError, ValueError, TypeError):  # reading the model reports a missing or broken file, with its remedy
        return False
