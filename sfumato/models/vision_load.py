"""From a transformers folder, or a description, to what makes batches for a model that sees."""

from __future__ import annotations

import inspect
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.data.clips import build_videos
from sfumato.data.vision import ImageReader, Tensors, Vision
from sfumato.errors import ConfigError, MissingDependencyError

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Tokens that the tokenizer of bytes has besides its own for a model that sees."""

NAMED = {
    "image_token": "<|image_pad|>",
    "context_image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    **dict.fromkeys(("vision_start_token", "start_image_token", "boi_token"), "<|vision_start|>"),
    **dict.fromkeys(("vision_end_token", "end_image_token", "eoi_token"), "<|vision_end|>"),
}
"""What the processors of transformers call these."""


AUDIO = ("<|audio_bos|>", "<|audio_eos|>", "<|audio_pad|>")
"""Likewise, for a model that hears."""

AUDIO_NAMED = {
    "vision_bos_token": "<|vision_start|>",
    "vision_eos_token": "<|vision_end|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
    "audio_token": "<|audio_pad|>",
}
"""Likewise."""


def add_image_tokens(tokenizer: Any, described: Any) -> None:
    """Gives the tokenizer of bytes the tokens that processors ask for; those of audio for a model that hears."""
    hears = getattr(described, "audio_config", None) is not None
    special, named = ((*SPECIAL, *AUDIO), NAMED | AUDIO_NAMED) if hears else (SPECIAL, NAMED)
    known = [token for token in tokenizer.all_special_tokens if token not in (tokenizer.eos_token, tokenizer.pad_token)]
    tokenizer.add_special_tokens({"additional_special_tokens": [*known, *special]})
    _name_tokens(tokenizer, named)


def _name_tokens(tokenizer: Any, named: dict[str, str]) -> None:
    for name, token in named.items():
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))


def build_vision(described: Any, folder: Path | None, module: nn.Module, tokenizer: Any) -> Vision:
    """The reader of a model's images, with its rule for positions.

    Images are scaled by Pillow, not by torchvision, so that they are the same on every machine.

    Args:
        described: transformers' configuration of the model.
        folder: with the processor's files; None makes a processor from the description.
        module: the model.
        tokenizer: its tokenizer.

    Raises:
        ConfigError: when transformers has no processor of a known kind for it, or the folder lacks its files.
        MissingDependencyError: when its images need torchvision.
    """
    processor = build_processor(described, folder, tokenizer)
    arguments = list(inspect.signature(module.forward).parameters)
    edge = getattr(described.vision_config, "patch_size", 1)
    edge = edge if isinstance(edge, int) else edge[0]
    rule = _positions_of(module)
    first = Vision(ImageReader(processor, arguments, (edge, 1.0)), rule)
    _check_tokens(first, described)
    (shapes,) = first.reader.place([_square()])[1:]
    patches = int(np.prod(shapes.astype(np.int64), axis=1).sum())
    ratio = _num_tokens(first, described.image_token_id) / patches
    if hasattr(described, "vision_feature_select_strategy"):  # LLaVA: the projector comes before tokens are left out
        ratio = 1.0
    return Vision(ImageReader(processor, arguments, (edge, ratio)), rule)


def _square() -> Any:
    from PIL import Image

    return Image.new("RGB", (224, 224), "white")


def _num_tokens(vision: Vision, image_token_id: int) -> int:
    (text,), _ = vision.reader.place([_square()])
    return vision.reader.tokenizer(text, add_special_tokens=False)["input_ids"].count(image_token_id)


def _check_tokens(vision: Vision, described: Any) -> None:
    """Whether the tokens of images are those that the model puts images in the place of."""
    ids = vision.idle_ids[vision.reader.kinds(vision.idle_ids) != 0]
    wanted = getattr(described, "image_token_id", None)
    if wanted not in ids.tolist():
        raise ConfigError(
            f"the tokenizer's tokens of images are {sorted(set(ids.tolist()))}, the model's image_token_id is "
            f"{wanted}: they do not match"
        )


def _positions_of(module: nn.Module) -> Any:
    """The model's own rule for positions of three axes; None where it has none."""
    base = module.base_model
    if not hasattr(base, "get_rope_index"):
        return None

    accepted = inspect.signature(base.get_rope_index).parameters
    if "audio_seqlens" in accepted:
        return _omni_positions(base)

    def positions(input_ids: Tensor, kinds: Tensor, tensors: Tensors) -> Tensor:
        given = {name: tensors[name] for name in accepted if name in tensors}
        found, _ = base.get_rope_index(input_ids, mm_token_type_ids=kinds, **given)
        return found

    return positions


def _omni_positions(base: Any) -> Any:
    """As ``_positions_of``, of omni models, which find media by the tokens before them."""

    def positions(input_ids: Tensor, _kinds: Tensor, tensors: Tensors) -> Tensor:
        mask = tensors.get("feature_attention_mask")
        found, _ = base.get_rope_index(
            input_ids,
            image_grid_thw=tensors.get("image_grid_thw"),
            attention_mask=torch.ones_like(input_ids),
            audio_seqlens=None if mask is None else mask.sum(-1),
            video_grid_thw=tensors.get("video_grid_thw"),
            second_per_grids=tensors.get("video_second_per_grid"),
        )
        return found

    return positions


def build_processor(described: Any, folder: Path | None, tokenizer: Any) -> Any:
    """transformers' processor; of what it needs torchvision for, videos, the part is sfumato's own, or missing. Its
    chat template becomes the tokenizer's."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    kind = described.model_type
    name = PROCESSOR_MAPPING_NAMES.get(kind.removesuffix("_thinker"))
    cls = getattr(transformers, name, None) if name else None
    if cls is None:
        raise ConfigError(f"transformers has no processor for {kind}")
    images = _made_image_processor(described) if folder is None else read_image_processor(folder)
    parameters = inspect.signature(cls.__init__).parameters
    settings = {} if folder is None else dict(cls.get_processor_dict(folder, local_files_only=True)[0])
    settings = {key: value for key, value in settings.items() if key in parameters and not key.endswith("processor")}
    if folder is None and "image_seq_length" in parameters:
        settings["image_seq_length"] = _tokens_per_tile(described)
    if folder is None and kind == "janus":
        settings["num_image_tokens"] = _tokens_per_tile(described)
    if folder is None and kind.startswith("llava"):
        settings |= _llava_settings(described)
    parts = {"image_processor": images, "tokenizer": tokenizer}
    if "video_processor" in parameters:
        parts["video_processor"] = build_videos(kind, images, folder)
    if "feature_extractor" in parameters:
        parts["feature_extractor"] = _build_audio(described, folder)
        processor_window = getattr(cls, "n_window", None)
        if processor_window not in (None, described.audio_config.n_window):
            raise ConfigError(
                f"audio_config.n_window of {kind} is {described.audio_config.n_window}, but its processor counts "
                f"tokens for {processor_window}: correct it"
            )
        if not hasattr(tokenizer, "audio_token"):  # the tokenizer of bytes, read from a folder
            _name_tokens(tokenizer, NAMED | AUDIO_NAMED)
    processor = cls.__new__(cls)
    processor.check_argument_for_proper_class = lambda _name, value: type(value)  # it knows no part that is missing
    try:
        processor.__init__(**parts, **settings)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"the processor {name} of {kind} cannot be made: {error}") from error
    del processor.check_argument_for_proper_class
    if not hasattr(processor, "image_token_id"):  # Janus
        processor.image_token_id = tokenizer.convert_tokens_to_ids(getattr(processor, "image_token", None))
    if not isinstance(getattr(processor, "image_token", None), str):
        raise ConfigError(f"model.model_path: images of {kind} are not known: {name} names no image_token")
    _set_template(processor, described, folder is None)
    return processor


def _set_template(processor: Any, described: Any, is_made: bool) -> None:
    """The chat template of the processor is the tokenizer's from now on."""
    tokenizer = processor.tokenizer
    if is_made:
        image, video = processor.image_token, str(getattr(processor, "video_token", None))
        if getattr(described, "vision_start_token_id", None) is not None or hasattr(processor, "vision_bos_token"):
            image, video = (f"<|vision_start|>{token}<|vision_end|>" for token in (image, video))
        text = files("sfumato.data").joinpath("templates/chatml_images.jinja").read_text(encoding="utf-8")
        tokenizer.chat_template = (
            text.replace("IMAGE", image)
            .replace("VIDEO", video)
            .replace("AUDIO", "<|audio_bos|><|audio_pad|><|audio_eos|>")
        )
    elif processor.chat_template:
        tokenizer.chat_template = processor.chat_template


def _build_audio(described: Any, folder: Path | None) -> Any:
    """What makes spectrograms, with the settings of the folder or of the description."""
    from transformers import WhisperFeatureExtractor

    if folder is not None:
        return WhisperFeatureExtractor.from_pretrained(folder, local_files_only=True)
    return WhisperFeatureExtractor(feature_size=described.audio_config.num_mel_bins)


def read_image_processor(folder: Path) -> Any:
    """transformers' image processor of a folder, by Pillow. Raises ConfigError, MissingDependencyError."""
    from transformers import AutoImageProcessor

    try:
        return AutoImageProcessor.from_pretrained(folder, backend="pil", local_files_only=True)
    except ImportError as error:
        raise MissingDependencyError(
            f"model.model_path {folder}: transformers scales the images of this model by torchvision alone: pip "
            "install 'sfumato[editing]'"
        ) from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"model.model_path {folder}: transformers finds no image processor there, in preprocessor_config.json: "
            f"{error}"
        ) from error


def _made_image_processor(described: Any) -> Any:
    """The image processor of a kind of model, with the sizes of its description."""
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES

    kind, vision = described.model_type, getattr(described, "vision_config", None)
    names = (
        IMAGE_PROCESSOR_MAPPING_NAMES.get(kind)
        or IMAGE_PROCESSOR_MAPPING_NAMES.get(kind.removesuffix("_moe").removesuffix("_thinker"))
        or {}
    )
    if "pil" not in names:
        raise ConfigError(f"transformers has no image processor for {kind} that works without torchvision")
    cls = getattr(transformers, names["pil"])
    known = {name: getattr(vision, name, None) for name in ("patch_size", "temporal_patch_size")}
    known["merge_size"] = getattr(vision, "spatial_merge_size", None)
    settings = {name: value for name, value in known.items() if value is not None and hasattr(cls, name)}
    if hasattr(cls, "image_grid_pinpoints") and hasattr(described, "image_grid_pinpoints"):
        settings["image_grid_pinpoints"] = described.image_grid_pinpoints
    size = getattr(vision, "image_size", None)
    if kind in ("emu3", "janus"):  # as the published ones
        settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if kind == "chameleon":
        edge = described.vq_config.resolution
        settings |= {"size": {"shortest_edge": edge}, "crop_size": {"height": edge, "width": edge}}
    if known["merge_size"] is None and size is not None:
        size = size if isinstance(size, int) else size[0]
        settings["size"] = {"height": size, "width": size}
        settings.pop("patch_size", None)
    return cls(**settings)


def _tokens_per_tile(described: Any) -> int:
    """Tokens of the language model for an image, or a tile of one, of the encoder's size."""
    if described.model_type == "chameleon":
        return (described.vq_config.resolution // 2 ** (len(described.vq_config.channel_multiplier) - 1)) ** 2
    if getattr(described, "mm_tokens_per_image", None):
        return described.mm_tokens_per_image
    size, edge = (
        value if isinstance(value, int) else value[0]
        for value in (described.vision_config.image_size, described.vision_config.patch_size)
    )
    return int((size // edge) ** 2 * getattr(described, "downsample_ratio", 1.0) ** 2)


def _llava_settings(described: Any) -> dict[str, Any]:
    size, edge = described.vision_config.image_size, described.vision_config.patch_size
    return {
        "num_image_tokens": (size // edge) ** 2,
        "vision_feature_select_strategy": described.vision_feature_select_strategy,
    }
