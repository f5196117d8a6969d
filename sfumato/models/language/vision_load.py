"""The processor and the reader of images, videos and sounds of a model that sees or hears, from a folder or a
description."""

from __future__ import annotations

import inspect
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor

from sfumato.config.file_checks import read_json_object
from sfumato.config.open_mappings import Keywords
from sfumato.config.trust import load_pretrained
from sfumato.data.media.clips import build_videos
from sfumato.data.media.document_media import Tensors
from sfumato.data.media.vision import MediaProcessor, Vision
from sfumato.data.text.answer_end import facts_of
from sfumato.data.text.tokenise import begins_texts
from sfumato.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from PIL import Image
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, WhisperFeatureExtractor

    PositionRule = Callable[[Tensor, Tensor, Tensors], Tensor]
    """From int64 ``input_ids`` and kinds of tokens ``[1, L]`` and the tensors of media to positions ``[3, 1, L]``."""

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Tokens that the tokenizer of bytes gets for a model that sees."""

NAMED = {
    "image_token": "<|image_pad|>",
    "context_image_token": "<|image_pad|>",
    "video_token": "<|video_pad|>",
    **dict.fromkeys(("vision_start_token", "start_image_token", "boi_token"), "<|vision_start|>"),
    **dict.fromkeys(("vision_end_token", "end_image_token", "eoi_token"), "<|vision_end|>"),
}
"""The same tokens by the names of transformers' processors."""

AUDIO = ("<|audio_bos|>", "<|audio_eos|>")
"""Tokens that it gets for a model that hears. A third one, the placeholder of audio, is named by the processor."""

AUDIO_NAMED = {
    **dict.fromkeys(("audio_bos_token", "boa_token"), AUDIO[0]),
    **dict.fromkeys(("audio_eos_token", "eoa_token"), AUDIO[1]),
}
"""These, too, by the names of transformers' processors."""


def add_image_tokens(tokenizer: PreTrainedTokenizerBase, described: PreTrainedConfig) -> None:
    """Gives the tokenizer of bytes the tokens that the processor of a model asks for.

    Args:
        tokenizer: changed in place.
        described: transformers' configuration of the model.
    """
    named = _named_tokens(described)
    special = [*SPECIAL] if _takes_images(described) else []
    special += [*AUDIO, named["audio_token"]] if "audio_token" in named else []
    # the argument replaces the list of additional tokens, so that those that are there must be given again
    previous = [
        token for token in tokenizer.all_special_tokens if token not in (tokenizer.eos_token, tokenizer.pad_token)
    ]
    tokenizer.add_special_tokens({"additional_special_tokens": [*previous, *special]})
    _name_tokens(tokenizer, described)


def _takes_images(described: PreTrainedConfig) -> bool:
    """Whether a model takes images, which become features of an encoder or codes."""
    return any(getattr(described, name, None) is not None for name in ("vision_config", "vq_config"))


def _named_tokens(described: PreTrainedConfig) -> dict[str, str]:
    """The special tokens of the tokenizer of bytes for a model, by the names of the model's processor."""
    named = NAMED if _takes_images(described) else {}
    if getattr(described, "audio_config", None) is None and not hasattr(described, "boa_token_id"):
        return named
    parameter = inspect.signature(_processor_class(described).__init__).parameters.get("audio_token")
    audio_token = parameter.default if parameter is not None else "<|audio_pad|>"
    bounds = {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"} if named else {}
    return named | bounds | AUDIO_NAMED | {"audio_token": audio_token}


def _name_tokens(tokenizer: PreTrainedTokenizerBase, described: PreTrainedConfig) -> None:
    """Names tokens of a tokenizer as processors ask it for them, where it has these tokens; exports keep the names."""
    vocabulary = tokenizer.get_vocab()
    named = {
        name: token
        for name, token in _named_tokens(described).items()
        if not hasattr(tokenizer, name) and token in vocabulary
    }
    tokenizer._set_model_specific_special_tokens(named)  # pyright: ignore[reportArgumentType]


def build_vision(
    described: PreTrainedConfig, folder: Path | None, module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase
) -> Vision:
    """Builds the reader of a model's images, videos and sounds, with the model's rule for positions.

    Images are scaled by Pillow, not by torchvision, so that they are the same on every machine.

    Args:
        described: transformers' configuration of the model.
        folder: with the processor's files; None makes a processor from the description.
        module: the model; its weights may be on meta.
        tokenizer: its tokenizer.

    Raises:
        ConfigError: when transformers has no processor of a known kind for it, or the folder lacks its files.
        MissingDependencyError: when its images need torchvision.
    """
    processor = build_processor(described, folder, tokenizer)
    arguments = list(inspect.signature(module.forward).parameters)
    if not _takes_images(described):
        vision = Vision(MediaProcessor(processor, arguments, (1, 1.0), least_samples=_min_samples(processor)), None)
        _check_tokens(vision, described)
        return vision
    _check_patches(processor.image_processor, described, folder)
    hears = getattr(described, "audio_config", None) is not None
    edge = getattr(described.vision_config, "patch_size", 1)
    edge = edge if isinstance(edge, int) else edge[0]
    rule = _find_position_rule(module)
    # how many tokens a patch becomes is measured with a preliminary reader that takes it for one
    try:
        preliminary = Vision(MediaProcessor(processor, arguments, (edge, 1.0)), rule)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        where = "model.config_path" if folder is None else f"model.model_path {folder}: processor_config.json"
        raise ConfigError(
            f"{where}: {type(processor).__name__} makes nothing of an image ({error}): it lacks a setting, as "
            f"patch_size of LLaVA models, or images of {described.model_type} are not supported"
        ) from error
    _check_tokens(preliminary, described)
    (shapes,) = preliminary.reader.place([_white_square()])[1:]
    patches = int(np.prod(shapes.astype(np.int64), axis=1).sum())
    ratio = _count_image_tokens(preliminary, described.image_token_id) / patches
    if hasattr(described, "image_grid_pinpoints"):  # LLaVA: the projector comes before tokens are left out
        ratio = 1.0
    tensors = preliminary.reader.process_opened([_white_square()])
    filled_to = tensors["pixel_values"].shape[1] if "image_position_ids" in tensors else None
    begins = {described.vision_start_token_id, described.audio_start_token_id} if rule is not None and hears else ()
    return Vision(MediaProcessor(processor, arguments, (edge, ratio), filled_to, _min_samples(processor), begins), rule)


def _check_patches(images: object, described: PreTrainedConfig, folder: Path | None) -> None:
    """Raises ConfigError where the image processor of a folder cuts other patches than the model's encoder reads.

    That of Qwen2.5-VL does beside a model of Qwen3-VL.
    """
    if not hasattr(images, "merge_size"):
        return
    names = {
        "patch_size": "patch_size",
        "temporal_patch_size": "temporal_patch_size",
        "merge_size": "spatial_merge_size",
    }
    for name, encoder_name in names.items():
        cut, expected = getattr(images, name, None), getattr(described.vision_config, encoder_name, None)
        if isinstance(cut, int) and isinstance(expected, int) and cut != expected:
            raise ConfigError(
                f"model.model_path {folder}: {name} of images is {cut} in preprocessor_config.json, but {encoder_name} "
                f"of the encoder is {expected} in config.json: the two are not of one model"
            )


def _min_samples(processor: object) -> int:
    """The number of samples of the shortest audio that transformers computes in the same way as longer ones.

    A shorter one of Qwen3-Omni is filled up to a window where a longer one is in the same call. One of Qwen2-Audio that
    becomes a single token is put into the text in another way, unless a longer one is in the same call.
    """
    extractor = getattr(processor, "feature_extractor", None)
    if type(processor).__name__ == "Qwen2AudioProcessor":
        assert extractor is not None
        return 6 * extractor.hop_length + 1  # 7 frames, of which the encoder makes 2 tokens
    return 0 if extractor is None else 2 * getattr(processor, "n_window", 0) * extractor.hop_length


def _white_square() -> Image.Image:
    """An image of 224 by 224 pixels."""
    from PIL import Image

    return Image.new("RGB", (224, 224), "white")


def _count_image_tokens(vision: Vision, image_token_id: int) -> int:
    """The number of the language model's tokens that the white square becomes."""
    (text,), _ = vision.reader.place([_white_square()])
    return vision.reader.tokenizer(text, add_special_tokens=False)["input_ids"].count(image_token_id)


def _check_tokens(vision: Vision, described: PreTrainedConfig) -> None:
    """Checks that the tokenizer's token for images, or for audio, is the one that the model replaces by their features.

    Raises:
        ConfigError: when it is another.
    """
    ids = vision.idle_ids[vision.reader.kinds(vision.idle_ids) != 0]
    kind, *_ = vision.reader.media
    token_id = getattr(described, f"{kind}_token_id", None)
    if token_id not in ids.tolist():
        raise ConfigError(
            f"the tokenizer's tokens of {kind}{'s' * (kind == 'image')} are {sorted(set(ids.tolist()))}, the model's "
            f"{kind}_token_id is {token_id}: they do not match"
        )


def _find_position_rule(module: PreTrainedModel) -> PositionRule | None:
    """The model's own rule for positions of three axes; None where it counts tokens."""
    base = cast("Any", module.base_model)
    if not hasattr(base, "get_rope_index"):
        return None

    accepted = inspect.signature(base.get_rope_index).parameters
    if "audio_seqlens" in accepted:
        return _omni_position_rule(base)

    def compute_positions(input_ids: Tensor, kinds: Tensor, tensors: Tensors) -> Tensor:
        arguments = {name: tensors[name] for name in accepted if name in tensors}
        positions, _ = base.get_rope_index(input_ids, mm_token_type_ids=kinds, **arguments)
        return positions

    return compute_positions


def _omni_position_rule(base: Any) -> PositionRule:
    """As ``_find_position_rule`` for omni models, which find media by the tokens before them, not by kinds."""

    def compute_positions(input_ids: Tensor, _kinds: Tensor, tensors: Tensors) -> Tensor:
        mask = tensors.get("feature_attention_mask")
        positions, _ = base.get_rope_index(
            input_ids,
            image_grid_thw=tensors.get("image_grid_thw"),
            attention_mask=torch.ones_like(input_ids),
            audio_seqlens=None if mask is None else mask.sum(-1),
            video_grid_thw=tensors.get("video_grid_thw"),
            second_per_grids=tensors.get("video_second_per_grid"),
        )
        return positions

    return compute_positions


def _processor_class(described: PreTrainedConfig, folder: Path | None = None) -> Any:
    """transformers' class of the processor: the one that a folder's files name, or else that of the model's type.

    Raises:
        ConfigError: when there is none.
        MissingDependencyError: when it needs a package that is not installed.
    """
    import transformers
    from transformers.models.auto.processing_auto import (
        PROCESSOR_MAPPING_NAMES,  # pyright: ignore[reportPrivateImportUsage]
    )

    by_type = PROCESSOR_MAPPING_NAMES.get(described.model_type.removesuffix("_thinker"))
    for name in (*_named_processors(folder), by_type):
        try:
            # of a class whose packages are missing, or of what stands in for it, any attribute is an error
            cls = getattr(transformers, name, None) if name else None
            if cls is None or not hasattr(cls, "get_processor_dict"):
                continue
        except ImportError as error:
            raise MissingDependencyError(
                f"{described.model_type}: {str(error).strip().partition('. ')[0]}: pip install it (torchvision: "
                "'sfumato[editing]')"
            ) from error
        return cls
    raise ConfigError(f"transformers has no processor for {described.model_type}")


def _named_processors(folder: Path | None) -> list[str]:
    """The classes of processors that a folder's files name, in the order in which transformers looks at them."""
    names: list[str] = []
    for file in ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json"):
        if folder is not None and (folder / file).is_file():
            try:
                name = read_json_object(folder / file).get("processor_class")
            except ValueError as error:
                raise ConfigError(f"model.model_path {folder}: {file}: {error}") from error
            names += [name] if isinstance(name, str) else []
    return names


def build_processor(described: PreTrainedConfig, folder: Path | None, tokenizer: PreTrainedTokenizerBase) -> Any:
    """Builds transformers' processor of a model, which gives its chat template to the tokenizer.

    transformers' video processors need torchvision: a part of this library stands in for them, or None.

    Args:
        described: transformers' configuration of the model.
        folder: with the processor's files; None makes a processor from the description.
        tokenizer: of the model.

    Raises:
        ConfigError: when transformers has no processor of a known kind for it, or refuses its settings.
        MissingDependencyError: when its images need torchvision.
    """
    kind = described.model_type
    cls = _processor_class(described, folder)
    hears = kind.endswith("_thinker") or not _takes_images(described)
    is_bytes = tokenizer.convert_tokens_to_ids(SPECIAL[2]) == getattr(described, "image_token_id", None)
    # such as the tokenizer of bytes read from a folder, which has these tokens, but no names for them
    if is_bytes or (hears and not hasattr(tokenizer, "audio_token")):
        _name_tokens(tokenizer, described)
    parameters = inspect.signature(cls.__init__).parameters
    settings = {} if folder is None else dict(cls.get_processor_dict(folder, local_files_only=True)[0])
    accepted = [key for key in settings if key in parameters and not key.endswith(("processor", "extractor"))]
    settings = {key: settings[key] for key in accepted}
    settings |= _derive_settings(described, parameters) if folder is None else {}
    parts: Keywords = {"tokenizer": tokenizer}
    if _takes_images(described):
        parts["image_processor"] = _make_image_processor(described) if folder is None else read_image_processor(folder)
    if "video_processor" in parameters:
        parts["video_processor"] = build_videos(kind, parts["image_processor"], folder)
    if "feature_extractor" in parameters:
        parts["feature_extractor"] = _build_audio(described, folder, cls) if hears else None
    processor = cls.__new__(cls)
    # transformers would refuse a part that is None, or is not one of its own classes
    processor.check_argument_for_proper_class = lambda _name, value: type(value)
    try:
        processor.__init__(**parts, **settings)
    except ImportError as error:
        raise MissingDependencyError(f"the processor {cls.__name__} of {kind} cannot be made: {error}") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"the processor {cls.__name__} of {kind} cannot be made: {error}") from error
    del processor.check_argument_for_proper_class
    if _takes_images(described):
        if not hasattr(processor, "image_token_id"):  # Janus
            image_token = cast("str", getattr(processor, "image_token", None))
            processor.image_token_id = tokenizer.convert_tokens_to_ids(image_token)
        if not isinstance(getattr(processor, "image_token", None), str):
            raise ConfigError(f"model.model_path: images of {kind} are not known: {cls.__name__} names no image_token")
    _set_template(processor, described, folder is None)
    facts_of(tokenizer).begins_chats = begins_texts(tokenizer)
    return processor


def _derive_settings(described: PreTrainedConfig, parameters: Mapping[str, object]) -> Keywords:
    """Settings of the processor of a model that is described, without a folder.

    Args:
        described: transformers' configuration of the model.
        parameters: of the processor's ``__init__``, by name.
    """
    names = {"image_seq_length", "image_seq_len"} & parameters.keys()
    names |= {"num_image_tokens"} if described.model_type == "janus" else set()
    settings = dict.fromkeys(names, _tokens_per_tile(described)) if names else {}
    if described.model_type.startswith("llava"):
        settings |= {name: value for name, value in _llava_settings(described).items() if name in parameters}
    return settings


def _set_template(processor: Any, described: PreTrainedConfig, is_made: bool) -> None:
    """Makes the processor's chat template the tokenizer's.

    Args:
        processor: with its tokenizer.
        described: transformers' configuration of the model.
        is_made: whether the processor was made from a description: both then get a template of ChatML with media.
    """
    tokenizer = processor.tokenizer
    if is_made:
        image, video = (str(getattr(processor, f"{kind}_token", None)) for kind in ("image", "video"))
        start_tokens = (getattr(described, name, None) for name in ("vision_start_token_id", "image_start_token_id"))
        if any(token is not None for token in start_tokens) or hasattr(processor, "vision_bos_token"):
            image, video = (f"<|vision_start|>{token}<|vision_end|>" for token in (image, video))
        template = files("sfumato.data.text").joinpath("templates/chatml_images.jinja").read_text(encoding="utf-8")
        tokenizer.chat_template = (
            template.replace("IMAGE", image)
            .replace("VIDEO", video)
            .replace("AUDIO", f"{AUDIO[0]}{getattr(processor, 'audio_token', None)}{AUDIO[1]}")
        )
        processor.chat_template = tokenizer.chat_template
    elif processor.chat_template:
        tokenizer.chat_template = processor.chat_template


def _build_audio(described: PreTrainedConfig, folder: Path | None, cls: object) -> WhisperFeatureExtractor:
    """Builds the extractor, which makes spectrograms, with the settings of the folder or of the description.

    Args:
        described: transformers' configuration of the model.
        folder: with the extractor's file; None makes an extractor from the description.
        cls: class of the processor.

    Raises:
        ConfigError: when the extractor, or the processor's class, does not fit the encoder.
    """
    from transformers import WhisperFeatureExtractor

    kind = described.model_type
    encoder = described.audio_config
    if (window := getattr(cls, "n_window", None)) not in (None, getattr(encoder, "n_window", None)):
        raise ConfigError(
            f"audio_config.n_window of {kind} is {encoder.n_window}, but its processor counts tokens for {window}: "
            "correct it"
        )
    if folder is not None:
        extractor = load_pretrained(WhisperFeatureExtractor, folder)
    else:
        extractor = WhisperFeatureExtractor(feature_size=encoder.num_mel_bins)
    if _takes_images(described):
        return extractor
    frames = 2 * encoder.max_source_positions  # the encoder reads so many: shorter audio is filled up to them
    if folder is None:
        seconds, rest = divmod(frames * extractor.hop_length, extractor.sampling_rate)
        if rest or not seconds:
            raise ConfigError(
                f"audio_config.max_source_positions of {kind} is {encoder.max_source_positions}: it must be a multiple "
                f"of {extractor.sampling_rate // extractor.hop_length // 2}, which are a second"
            )
        extractor = WhisperFeatureExtractor(feature_size=encoder.num_mel_bins, chunk_length=seconds)
    if (extractor.nb_max_frames, extractor.feature_size) != (frames, encoder.num_mel_bins):
        raise ConfigError(
            f"model.model_path {folder}: preprocessor_config.json makes {extractor.nb_max_frames} frames of "
            f"{extractor.feature_size} bands of audio, but the encoder in config.json reads {frames} of "
            f"{encoder.num_mel_bins}: the two are not of one model"
        )
    return extractor


def read_image_processor(folder: Path) -> Any:
    """Reads transformers' image processor of a folder, in its version that uses Pillow.

    Raises:
        ConfigError: when there is none in the folder.
        MissingDependencyError: when transformers has only a version that needs torchvision.
    """
    from transformers import AutoImageProcessor

    try:
        return load_pretrained(AutoImageProcessor, folder, backend="pil")
    except (ImportError, OSError, ValueError, KeyError, TypeError) as error:
        # transformers raises a ValueError for a package that it misses, too
        if isinstance(error, ImportError) or "Missing optional dependencies: torchvision" in str(error):
            raise MissingDependencyError(
                f"model.model_path {folder}: transformers scales the images of this model by torchvision alone: pip "
                "install 'sfumato[editing]'"
            ) from error
        raise ConfigError(
            f"model.model_path {folder}: transformers finds no image processor there, in preprocessor_config.json: "
            f"{error}"
        ) from error


def _make_image_processor(described: PreTrainedConfig) -> Any:
    """Makes the image processor of a described model, with the sizes of its encoder.

    Raises:
        ConfigError: when transformers has none that works without torchvision.
    """
    import transformers
    from transformers.models.auto.image_processing_auto import (
        IMAGE_PROCESSOR_MAPPING_NAMES,  # pyright: ignore[reportPrivateImportUsage]
    )

    kind = described.model_type
    encoder = getattr(described, "vision_config", None)
    names = (
        IMAGE_PROCESSOR_MAPPING_NAMES.get(kind)
        or IMAGE_PROCESSOR_MAPPING_NAMES.get(kind.removesuffix("_moe").removesuffix("_thinker"))
        or {}
    )
    if "pil" not in names:
        raise ConfigError(f"transformers has no image processor for {kind} that works without torchvision")
    cls = getattr(transformers, cast("str", names["pil"]))
    names_of_sizes = ("patch_size", "temporal_patch_size", "pooling_kernel_size")
    sizes = {name: getattr(encoder, name, None) for name in names_of_sizes}
    sizes["merge_size"] = getattr(encoder, "spatial_merge_size", None)
    settings: Keywords = {name: value for name, value in sizes.items() if value is not None and hasattr(cls, name)}
    if hasattr(cls, "image_grid_pinpoints") and hasattr(described, "image_grid_pinpoints"):
        settings["image_grid_pinpoints"] = described.image_grid_pinpoints
    size = getattr(encoder, "image_size", None)
    if kind in ("emu3", "janus"):  # as the published models have it
        settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    if kind == "chameleon":
        edge = described.vq_config.resolution
        settings |= {"size": {"shortest_edge": edge}, "crop_size": {"height": edge, "width": edge}}
    # without merged patches, images are scaled to the size of the encoder
    if sizes["merge_size"] is None and size is not None:
        size = size if isinstance(size, int) else size[0]
        settings["size"] = {"height": size, "width": size}
        settings.pop("patch_size", None)
        if getattr(cls, "crop_size", None) is not None:
            settings["crop_size"] = settings["size"]
        if getattr(cls, "max_image_size", None) is not None:  # of a tile, of which there may be two in a row
            settings |= {"max_image_size": {"longest_edge": size}, "size": {"longest_edge": 2 * size}}
    return cls(**settings)


def _tokens_per_tile(described: PreTrainedConfig) -> int:
    """The number of the language model's tokens for an image, or a tile of one, of the encoder's image size; 0 where
    the encoder takes images of any size."""
    if described.model_type == "chameleon":
        return (described.vq_config.resolution // 2 ** (len(described.vq_config.channel_multiplier) - 1)) ** 2
    if getattr(described, "mm_tokens_per_image", None):
        return described.mm_tokens_per_image
    if not hasattr(described.vision_config, "image_size"):
        return 0
    size, edge = (
        value if isinstance(value, int) else value[0]
        for value in (described.vision_config.image_size, described.vision_config.patch_size)
    )
    shrinks = getattr(described, "downsample_ratio", 1.0) / getattr(described, "scale_factor", 1)
    return int((size // edge) ** 2 * shrinks**2)


def _llava_settings(described: PreTrainedConfig) -> dict[str, object]:
    """Settings of the encoder for processors of LLaVA models."""
    size = described.vision_config.image_size
    edge = described.vision_config.patch_size
    settings = {
        "num_image_tokens": (size // edge) ** 2,
        "patch_size": edge,
        # CLIP's encoder has a token of the class besides those of patches, which the strategy "default" drops
        "num_additional_image_tokens": int(described.vision_config.model_type == "clip_vision_model"),
        "vision_feature_select_strategy": described.vision_feature_select_strategy,
    }
    if hasattr(described, "vision_aspect_ratio"):
        settings["vision_aspect_ratio"] = described.vision_aspect_ratio
    return settings
