"""From a transformers folder, or a description, to what makes batches for a model that sees."""

from __future__ import annotations

import inspect
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sfumato.config.trust import load_pretrained
from sfumato.data.media.clips import build_videos
from sfumato.data.media.vision import ImageReader, Tensors, Vision
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


AUDIO = ("<|audio_bos|>", "<|audio_eos|>")
"""Likewise, for a model that hears; the third, which stands for audio, is the processor's own."""

AUDIO_NAMED = {
    **dict.fromkeys(("audio_bos_token", "boa_token"), AUDIO[0]),
    **dict.fromkeys(("audio_eos_token", "eoa_token"), AUDIO[1]),
}
"""Likewise."""


def add_image_tokens(tokenizer: Any, described: Any) -> None:
    """Gives the tokenizer of bytes the tokens that processors ask for; those of audio for a model that hears."""
    named = _named_tokens(described)
    special = [*SPECIAL] if _sees(described) else []
    special += [*AUDIO, named["audio_token"]] if "audio_token" in named else []
    known = [token for token in tokenizer.all_special_tokens if token not in (tokenizer.eos_token, tokenizer.pad_token)]
    tokenizer.add_special_tokens({"additional_special_tokens": [*known, *special]})
    _name_tokens(tokenizer, described)


def _sees(described: Any) -> bool:
    """Whether it takes images, which become features of an encoder or codes."""
    return any(getattr(described, name, None) is not None for name in ("vision_config", "vq_config"))


def _named_tokens(described: Any) -> dict[str, str]:
    """What the processor of a model calls the tokens that the tokenizer of bytes has for it."""
    named = NAMED if _sees(described) else {}
    if getattr(described, "audio_config", None) is None and not hasattr(described, "boa_token_id"):
        return named
    default = inspect.signature(_processor_class(described).__init__).parameters.get("audio_token")
    audio = default.default if default is not None else "<|audio_pad|>"
    bounds = {"vision_bos_token": "<|vision_start|>", "vision_eos_token": "<|vision_end|>"} if named else {}
    return named | bounds | AUDIO_NAMED | {"audio_token": audio}


def _name_tokens(tokenizer: Any, described: Any) -> None:
    for name, token in _named_tokens(described).items():
        if hasattr(tokenizer, name) or token not in tokenizer.get_vocab():
            continue
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
    if not _sees(described):
        vision = Vision(ImageReader(processor, arguments, (1, 1.0), least_samples=_least_samples(processor)), None)
        _check_tokens(vision, described)
        return vision
    hears = getattr(described, "audio_config", None) is not None
    edge = getattr(described.vision_config, "patch_size", 1)
    edge = edge if isinstance(edge, int) else edge[0]
    rule = _positions_of(module)
    try:
        first = Vision(ImageReader(processor, arguments, (edge, 1.0)), rule)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        where = "model.config_path" if folder is None else f"model.model_path {folder}: processor_config.json"
        raise ConfigError(
            f"{where}: {type(processor).__name__} makes nothing of an image ({error}): it lacks a setting, as "
            "patch_size of LLaVA models"
        ) from error
    _check_tokens(first, described)
    (shapes,) = first.reader.place([_square()])[1:]
    patches = int(np.prod(shapes.astype(np.int64), axis=1).sum())
    ratio = _num_tokens(first, described.image_token_id) / patches
    if hasattr(described, "image_grid_pinpoints"):  # LLaVA: the projector comes before tokens are left out
        ratio = 1.0
    seen = first.reader.of_opened([_square()])
    filled_to = seen["pixel_values"].shape[1] if "image_position_ids" in seen else None
    begins = {described.vision_start_token_id, described.audio_start_token_id} if rule is not None and hears else ()
    return Vision(ImageReader(processor, arguments, (edge, ratio), filled_to, _least_samples(processor), begins), rule)


def _least_samples(processor: Any) -> int:
    """Samples of the shortest audio that transformers computes as it does longer ones.

    Those of Qwen3-Omni are filled up to a window where a longer one is beside them. One that is a single token of
    Qwen2-Audio is put in its place in another way, unless a longer one is beside it.
    """
    audio = getattr(processor, "feature_extractor", None)
    if type(processor).__name__ == "Qwen2AudioProcessor":
        return 6 * audio.hop_length + 1  # 7 frames, of which the encoder makes 2 tokens
    return 0 if audio is None else 2 * getattr(processor, "n_window", 0) * audio.hop_length


def _square() -> Any:
    from PIL import Image

    return Image.new("RGB", (224, 224), "white")


def _num_tokens(vision: Vision, image_token_id: int) -> int:
    (text,), _ = vision.reader.place([_square()])
    return vision.reader.tokenizer(text, add_special_tokens=False)["input_ids"].count(image_token_id)


def _check_tokens(vision: Vision, described: Any) -> None:
    """Whether the tokens of images, or of audio, are those that the model puts these in the place of."""
    ids, (kind, *_) = vision.idle_ids[vision.reader.kinds(vision.idle_ids) != 0], vision.reader.media
    wanted = getattr(described, f"{kind}_token_id", None)
    if wanted not in ids.tolist():
        raise ConfigError(
            f"the tokenizer's tokens of {kind}{'s' * (kind == 'image')} are {sorted(set(ids.tolist()))}, the model's "
            f"{kind}_token_id is {wanted}: they do not match"
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


def _processor_class(described: Any) -> Any:
    """transformers' class of the processor. Raises ConfigError when there is none."""
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = PROCESSOR_MAPPING_NAMES.get(described.model_type.removesuffix("_thinker"))
    cls = getattr(transformers, name, None) if name else None
    if cls is None:
        raise ConfigError(f"transformers has no processor for {described.model_type}")
    return cls


def build_processor(described: Any, folder: Path | None, tokenizer: Any) -> Any:
    """transformers' processor; of what it needs torchvision for, videos, the part is sfumato's own, or missing. Its
    chat template becomes the tokenizer's."""
    kind, cls = described.model_type, _processor_class(described)
    hears = kind.endswith("_thinker") or not _sees(described)
    is_bytes = tokenizer.convert_tokens_to_ids(SPECIAL[2]) == getattr(described, "image_token_id", None)
    if is_bytes or (hears and not hasattr(tokenizer, "audio_token")):  # the tokenizer of bytes, read from a folder
        _name_tokens(tokenizer, described)
    parameters = inspect.signature(cls.__init__).parameters
    settings = {} if folder is None else dict(cls.get_processor_dict(folder, local_files_only=True)[0])
    own = [key for key in settings if key in parameters and not key.endswith(("processor", "extractor"))]
    settings = {key: settings[key] for key in own}
    settings |= _made_settings(described, parameters) if folder is None else {}
    parts = {"tokenizer": tokenizer}
    if _sees(described):
        parts["image_processor"] = _made_image_processor(described) if folder is None else read_image_processor(folder)
    if "video_processor" in parameters:
        parts["video_processor"] = build_videos(kind, parts["image_processor"], folder)
    if "feature_extractor" in parameters:
        parts["feature_extractor"] = _build_audio(described, folder, cls) if hears else None
    processor = cls.__new__(cls)
    processor.check_argument_for_proper_class = lambda _name, value: type(value)  # it knows no part that is missing
    try:
        processor.__init__(**parts, **settings)
    except ImportError as error:
        raise MissingDependencyError(f"the processor {cls.__name__} of {kind} cannot be made: {error}") from error
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigError(f"the processor {cls.__name__} of {kind} cannot be made: {error}") from error
    del processor.check_argument_for_proper_class
    if _sees(described):
        if not hasattr(processor, "image_token_id"):  # Janus
            processor.image_token_id = tokenizer.convert_tokens_to_ids(getattr(processor, "image_token", None))
        if not isinstance(getattr(processor, "image_token", None), str):
            raise ConfigError(f"model.model_path: images of {kind} are not known: {cls.__name__} names no image_token")
    _set_template(processor, described, folder is None)
    return processor


def _made_settings(described: Any, parameters: Any) -> dict[str, Any]:
    """Settings of the processor of a model that is described alone."""
    names = {"image_seq_length", "image_seq_len"} & parameters.keys()
    names |= {"num_image_tokens"} if described.model_type == "janus" else set()
    found = dict.fromkeys(names, _tokens_per_tile(described)) if names else {}
    if described.model_type.startswith("llava"):
        found |= {name: value for name, value in _llava_settings(described).items() if name in parameters}
    return found


def _set_template(processor: Any, described: Any, is_made: bool) -> None:
    """The chat template of the processor is the tokenizer's from now on."""
    tokenizer = processor.tokenizer
    if is_made:
        image, video = (str(getattr(processor, f"{kind}_token", None)) for kind in ("image", "video"))
        begins = (getattr(described, name, None) for name in ("vision_start_token_id", "image_start_token_id"))
        if any(token is not None for token in begins) or hasattr(processor, "vision_bos_token"):
            image, video = (f"<|vision_start|>{token}<|vision_end|>" for token in (image, video))
        text = files("sfumato.data.text").joinpath("templates/chatml_images.jinja").read_text(encoding="utf-8")
        tokenizer.chat_template = (
            text.replace("IMAGE", image)
            .replace("VIDEO", video)
            .replace("AUDIO", f"{AUDIO[0]}{getattr(processor, 'audio_token', None)}{AUDIO[1]}")
        )
        processor.chat_template = tokenizer.chat_template
    elif processor.chat_template:
        tokenizer.chat_template = processor.chat_template


def _build_audio(described: Any, folder: Path | None, cls: Any) -> Any:
    """What makes spectrograms, with the settings of the folder or of the description.

    Raises:
        ConfigError: when it, or the processor of class ``cls``, does not fit the encoder.
    """
    from transformers import WhisperFeatureExtractor

    kind, encoder = described.model_type, described.audio_config
    if (window := getattr(cls, "n_window", None)) not in (None, getattr(encoder, "n_window", None)):
        raise ConfigError(
            f"audio_config.n_window of {kind} is {encoder.n_window}, but its processor counts tokens for {window}: "
            "correct it"
        )
    if folder is not None:
        found = load_pretrained(WhisperFeatureExtractor, folder)
    else:
        found = WhisperFeatureExtractor(feature_size=encoder.num_mel_bins)
    if _sees(described):
        return found
    frames = 2 * encoder.max_source_positions  # of all audio: what is shorter is filled up to it
    if folder is None:
        seconds, rest = divmod(frames * found.hop_length, found.sampling_rate)
        if rest or not seconds:
            raise ConfigError(
                f"audio_config.max_source_positions of {kind} is {encoder.max_source_positions}: it must be a multiple "
                f"of {found.sampling_rate // found.hop_length // 2}, which are a second"
            )
        found = WhisperFeatureExtractor(feature_size=encoder.num_mel_bins, chunk_length=seconds)
    if (found.nb_max_frames, found.feature_size) != (frames, encoder.num_mel_bins):
        raise ConfigError(
            f"model.model_path {folder}: preprocessor_config.json makes {found.nb_max_frames} frames of "
            f"{found.feature_size} bands of audio, but the encoder in config.json reads {frames} of "
            f"{encoder.num_mel_bins}: the two are not of one model"
        )
    return found


def read_image_processor(folder: Path) -> Any:
    """transformers' image processor of a folder, by Pillow. Raises ConfigError, MissingDependencyError."""
    from transformers import AutoImageProcessor

    try:
        return load_pretrained(AutoImageProcessor, folder, backend="pil")
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
    names_of_sizes = ("patch_size", "temporal_patch_size", "pooling_kernel_size")
    known = {name: getattr(vision, name, None) for name in names_of_sizes}
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
        if getattr(cls, "crop_size", None) is not None:
            settings["crop_size"] = settings["size"]
        if getattr(cls, "max_image_size", None) is not None:  # of a tile, of which there may be two in a row
            settings |= {"max_image_size": {"longest_edge": size}, "size": {"longest_edge": 2 * size}}
    return cls(**settings)


def _tokens_per_tile(described: Any) -> int:
    """Tokens of the language model for an image, or a tile of one, of the encoder's size; 0 where images have sizes of
    their own."""
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


def _llava_settings(described: Any) -> dict[str, Any]:
    """What processors of LLaVA models are told of the encoder; of one that drops its first token, that it has one."""
    size, edge = described.vision_config.image_size, described.vision_config.patch_size
    strategy = described.vision_feature_select_strategy
    return {
        "num_image_tokens": (size // edge) ** 2,
        "patch_size": edge,
        "num_additional_image_tokens": int(strategy == "default"),
        "vision_feature_select_strategy": strategy,
    }
