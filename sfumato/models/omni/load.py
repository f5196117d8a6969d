"""Composes a model that reads and draws images from a vision encoder, a language model and an image tokenizer.

transformers' ``LlavaForConditionalGeneration`` joins encoder and language model: any encoder with patches, a projector
of two layers, and any language model with a linear output layer. Images are drawn as tokens of the language model.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import safe_open
from torch import nn

from sfumato.config.omni import OmniModelConfig, PartConfig, TrainOmniConfig
from sfumato.config.open_mappings import Keywords
from sfumato.config.paths import check_weights, refuse_missing_model
from sfumato.config.text import LanguageModelConfig
from sfumato.config.trust import load_pretrained, make_from_config
from sfumato.config.yaml_text import read_yaml
from sfumato.data.media.image_answers import IMAGE_TOKEN, DrawingReader, add_drawing_tokens
from sfumato.data.media.processor_files import image_settings
from sfumato.data.media.vision import Vision
from sfumato.data.text.token_ids import token_id
from sfumato.errors import ConfigError, suggest
from sfumato.models.language.hf_config import attention_by_part
from sfumato.models.language.packed_attention import register_packed_attention
from sfumato.models.language.parts import DTYPES, build_tokenizer, check_keys, freeze
from sfumato.models.omni.flow_head import NAME, LatentTokenizer, build_head, patch_of
from sfumato.models.omni.image_tokenizer import ImageTokenizer
from sfumato.models.omni.model import OmniModel, foundation_names
from sfumato.models.omni.unified import build_unified_omni_model
from sfumato.parallel.weights import refuse_not_finite

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from sfumato.models.diffusion.base import DiffusersModule

PROJECTOR = "multi_modal_projector."
"""Part of the names of the projector's weights in the whole model."""


def build_omni_model(config: TrainOmniConfig) -> OmniModel:
    """Loads or builds the parts of a model, composes them, and freezes what is not trained. Weights are float32.

    Raises:
        ConfigError: when a part is missing or broken, or the parts do not fit together.
    """
    if config.model.unified is not None:
        return build_unified_omni_model(config)
    assert config.model.foundation is not None and config.model.encoder is not None  # OmniModelConfig checks it
    tokenizer = build_tokenizer(_tokenizer_config(config.model))
    image_tokenizer = _load_image_tokenizer(config.model)
    head = config.model.head
    first_code = add_drawing_tokens(tokenizer, image_tokenizer.codebook_size)
    text = files("sfumato.data.text").joinpath("templates/chatml_images.jinja").read_text(encoding="utf-8")
    tokenizer.chat_template = text.replace("IMAGE", IMAGE_TOKEN)
    seed = config.train.seed
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        foundation = load_part(config.model.foundation, "model.foundation", causal=True)
        if cast("nn.Embedding", foundation.get_input_embeddings()).num_embeddings < len(tokenizer):
            foundation.resize_token_embeddings(len(tokenizer), mean_resizing=False)
        encoder = load_part(config.model.encoder, "model.encoder", causal=False)
        image_token_id = token_id(tokenizer, IMAGE_TOKEN)
        module, make = compose(encoder, foundation, image_token_id, config.model.attention)
        if head is not None:
            width = cast("nn.Linear", foundation.get_output_embeddings()).in_features
            module, make = with_head(module, make, build_head(head, width, image_tokenizer.latent_shape))  # pyright: ignore[reportAttributeAccessIssue]  (a head has latents)
    if config.model.projector is not None:
        load_projector(module, Path(config.model.projector))
    reader = _build_reader(module, tokenizer, image_tokenizer, config.model.encoder)
    vision = Vision(config.data.data_type.limited(reader), None)
    # With chunks the model returns hidden states instead of logits, and a flow head is conditioned on these.
    chunked = config.train.chunked_loss or head is not None
    settings = (DTYPES[config.train.mixed_precision], make, None, chunked, vision)
    model = OmniModel(module, tokenizer, *settings)
    model.image_tokenizer = image_tokenizer
    model.codes = range(first_code, first_code + image_tokenizer.codebook_size)
    model.head_class = type(getattr(module, NAME)) if head is not None else None
    model.frozen_names = freeze(module, config.model.freeze)
    return model


def _load_image_tokenizer(model: OmniModelConfig) -> ImageTokenizer | LatentTokenizer:
    """The image tokenizer of a configuration: an autoencoder if there is a flow head, else a VQ model."""
    assert model.image_tokenizer is not None
    folder = Path(model.image_tokenizer)
    return (
        ImageTokenizer.from_folder(folder)
        if model.head is None
        else LatentTokenizer.from_folder(folder, patch_of(model.head))
    )


def with_head(
    module: PreTrainedModel, make: Callable[[], PreTrainedModel], head: DiffusersModule
) -> tuple[PreTrainedModel, Callable[[], PreTrainedModel]]:
    """Adds a flow head to a model as a submodule, which the model's ``forward`` does not call.

    Args:
        module: the model.
        make: makes another model of the same kind.
        head: the flow head.

    Returns:
        The model, and a function that makes another one with a head.
    """
    module.add_module(NAME, head.train())

    def make_both() -> PreTrainedModel:
        whole = make()
        whole.add_module(NAME, type(head).from_config(head.config))
        return whole

    make_both.without_head = make  # pyright: ignore[reportFunctionMemberAccess]  (for OmniModel._without_head)
    return module, make_both


def load_part(config: PartConfig, where: str, causal: bool) -> PreTrainedModel:
    """Loads a module of transformers from a folder, or makes one with random weights from a description; in float32.

    Args:
        config: the folder or description.
        where: name of the option, for messages.
        causal: load a language model with its output layer; otherwise an encoder.

    Raises:
        ConfigError: when the folder or description is missing, broken, or lacks weights.
    """
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModel, AutoModelForCausalLM

    auto_class = AutoModelForCausalLM if causal else AutoModel
    try:
        if config.config_path is not None:
            fields = dict(read_yaml(config.config_path))
            kind = fields.pop("model_type", None)
            if kind not in CONFIG_MAPPING:
                raise ConfigError(f"{config.config_path}: model_type{suggest(str(kind), sorted(CONFIG_MAPPING))}"[:600])
            check_keys(CONFIG_MAPPING[kind], fields, str(config.config_path))
            return make_from_config(auto_class, CONFIG_MAPPING[kind](**fields), dtype=torch.float32)
        folder = Path(str(config.model_path))
        refuse_missing_model(folder, where)
        check_weights(folder)
        described = load_pretrained(AutoConfig, folder)
        settings = {"use_safetensors": True, "dtype": torch.float32}
        described = described if causal else getattr(described, "vision_config", described)
        module, report = load_pretrained(auto_class, folder, config=described, output_loading_info=True, **settings)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{where} {config.model_path or config.config_path}: transformers refuses it: {error}"
        ) from error
    if report["missing_keys"]:
        raise ConfigError(f"{where} {folder}: weights are missing, the first is {sorted(report['missing_keys'])[0]}")
    refuse_not_finite(module, folder)
    return module


def compose(
    encoder: PreTrainedModel, foundation: PreTrainedModel, image_token_id: int, attention: str
) -> tuple[PreTrainedModel, Callable[[], PreTrainedModel]]:
    """Joins an encoder and a language model to one model, with a projector of random weights.

    Args:
        encoder: the vision encoder.
        foundation: the language model.
        image_token_id: the placeholder of an image in the text.
        attention: ``model.attention``.

    Returns:
        The model, and a function that makes another one of its kind with random weights.

    Raises:
        ConfigError: when they do not fit together, or the language model gives other logits within the whole.
    """
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    _check_encoder(encoder)
    described = LlavaConfig(
        vision_config=copy.deepcopy(encoder.config),
        text_config=copy.deepcopy(foundation.config),
        image_token_index=image_token_id,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full" if _num_features(encoder) == _num_patches(encoder) else "default",
        image_seq_length=_num_patches(encoder),
        tie_word_embeddings=bool(foundation.config.tie_word_embeddings),
    )
    name = register_packed_attention() if attention == "packed" else attention

    def make() -> PreTrainedModel:
        own_config = copy.deepcopy(described)
        return LlavaForConditionalGeneration._from_config(
            own_config, attn_implementation=attention_by_part(own_config, name), dtype=torch.float32
        )

    module = make()
    whole_names = {part_name: whole_name for whole_name, part_name in foundation_names(foundation).items()}
    weights = {whole_names[name]: tensor for name, tensor in foundation.state_dict().items() if name in whole_names}
    weights |= {f"model.vision_tower.{name}": tensor for name, tensor in encoder.state_dict().items()}
    lacking = module.load_state_dict(weights, strict=False).missing_keys
    if any("projector" not in name for name in lacking):
        raise ConfigError(
            f"model.foundation: {type(foundation).__name__} cannot be joined with an encoder: {lacking[0]}"
        )
    # LLaVA builds the language model without its own class around it, which may scale or cap logits: compare them.
    tokens = torch.arange(8)[None] % cast("nn.Embedding", foundation.get_input_embeddings()).num_embeddings
    with torch.no_grad():
        logits_alone = foundation.eval()(input_ids=tokens, use_cache=False).logits
        logits_within = module.eval()(input_ids=tokens, position_ids=torch.arange(8)[None], use_cache=False).logits
    difference = float((logits_alone - logits_within).abs().max())
    # of the largest: rounding moves small logits as much as large ones
    if not difference <= 1e-4 * float(logits_alone.abs().max()):
        raise ConfigError(
            f"model.foundation: {type(foundation).__name__} computes other logits without its own class around it (by "
            f"up to {difference:.1e}): take another language model"
        )
    return module.train(), make


def load_projector(module: PreTrainedModel, folder: Path) -> None:
    """Loads the projector from a folder that ``OmniModel.save_export`` wrote into a model. Raises ConfigError."""
    projector = module.model.multi_modal_projector
    check_weights(folder)
    weights = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            names = [name for name in opened.keys() if PROJECTOR in name]  # noqa: SIM118  (it is no mapping)
            weights |= {name.rpartition(PROJECTOR)[2]: opened.get_tensor(name).float() for name in names}
    shapes = {name: tensor.shape for name, tensor in projector.state_dict().items()}
    if {name: tensor.shape for name, tensor in weights.items()} != shapes:
        raise ConfigError(f"model.projector {folder}: the weights {PROJECTOR}* are not there, or of other shapes")
    projector.load_state_dict(weights)


def _check_encoder(encoder: PreTrainedModel) -> None:
    """Raises ConfigError for an encoder that does not give a token for each patch, and at most one more."""
    for name in ("image_size", "patch_size", "hidden_size"):
        if not isinstance(getattr(encoder.config, name, None), int):
            raise ConfigError(f"model.encoder: {type(encoder).__name__} has no {name}, so its patches are not known")
    if _num_features(encoder) - _num_patches(encoder) not in (0, 1):
        raise ConfigError(
            f"model.encoder: {type(encoder).__name__} makes {_num_features(encoder)} tokens of an image of "
            f"{_num_patches(encoder)} patches: these may have one more for the whole, not others"
        )


def _num_patches(encoder: PreTrainedModel) -> int:
    """Patches of an image."""
    return (encoder.config.image_size // encoder.config.patch_size) ** 2


@torch.no_grad()
def _num_features(encoder: PreTrainedModel) -> int:
    """Tokens that an encoder makes of an image, found by running it on a black one."""
    size = encoder.config.image_size
    blank = torch.zeros(1, getattr(encoder.config, "num_channels", 3), size, size)
    output = encoder.eval()(blank, output_hidden_states=True)
    return output.hidden_states[-1].shape[1]


def _build_reader(
    module: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    image_tokenizer: ImageTokenizer | LatentTokenizer,
    encoder: PartConfig,
) -> DrawingReader:
    """Makes the reader of images for a composed model, in which Pillow resizes each to the size of the encoder.

    Mean and deviation of pixels are those that the encoder's folder states, else 0.5.
    """
    from transformers import LlavaProcessor
    from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

    vision = module.config.vision_config
    stated = image_settings(Path(encoder.model_path)) if encoder.model_path is not None else {}
    pixels: Keywords = {name: stated[name] for name in ("image_mean", "image_std", "do_normalize") if name in stated}
    images = SiglipImageProcessorPil(size={"height": vision.image_size, "width": vision.image_size}, **pixels)
    strategy = module.config.vision_feature_select_strategy
    settings = {"num_additional_image_tokens": int(strategy == "default"), "image_token": IMAGE_TOKEN}
    processor = LlavaProcessor(images, tokenizer, vision.patch_size, strategy, **settings)
    arguments = list(inspect.signature(module.forward).parameters)
    return DrawingReader(processor, arguments, (vision.patch_size, 1.0), image_tokenizer)


def _tokenizer_config(model: OmniModelConfig) -> LanguageModelConfig:
    """The model section of a language model with the same tokenizer."""
    assert model.foundation is not None
    folder = model.foundation.model_path
    source: Keywords = {"model_path": folder} if folder is not None else {"config_path": model.foundation.config_path}
    return LanguageModelConfig(**source, tokenizer_path=model.tokenizer_path)
