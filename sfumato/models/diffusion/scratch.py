"""Builders of pipeline components with random weights: tokenizers, text encoders and autoencoders.

The classes are those of transformers and diffusers, and nothing is downloaded. Callers seed torch's generator.
"""

# diffusers fills its namespaces lazily, which type checkers do not see
# pyright: reportPrivateImportUsage=false

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sfumato.config.open_mappings import Keywords
from sfumato.errors import MissingDependencyError, suggest

if TYPE_CHECKING:
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
    from diffusers.models.autoencoders.autoencoder_kl_qwenimage import AutoencoderKLQwenImage
    from diffusers.models.autoencoders.autoencoder_kl_wan import AutoencoderKLWan
    from transformers import (
        CLIPImageProcessor,
        CLIPTextModel,
        CLIPTextModelWithProjection,
        CLIPTokenizer,
        CLIPVisionModel,
        PreTrainedTokenizerBase,
        Qwen2_5_VLForConditionalGeneration,
        Qwen2Tokenizer,
        Qwen2VLProcessor,
        T5EncoderModel,
        T5Tokenizer,
        UMT5EncoderModel,
    )


def unknown_keys(description: Mapping[str, object], allowed: Iterable[str], needed: str | None = None) -> None:
    """Checks the sections of a description.

    Args:
        description: the whole description.
        allowed: names of the sections that there may be.
        needed: the section that must be there, if any.

    Raises:
        ValueError: when a section is not allowed, or the needed one is missing.
    """
    allowed = sorted(allowed)
    wrong = [key for key in description if key not in allowed]
    if wrong:
        raise ValueError(f"{wrong[0]}: unknown key{suggest(str(wrong[0]), allowed)}")
    if needed is not None and needed not in description:
        raise ValueError(f"{needed}: required, but not set")


def section_of(
    description: Mapping[str, object], name: str, target: Callable[..., object], reserved: Iterable[str] = ()
) -> Keywords:
    """The arguments in a section of a description, checked against the signature of what they are passed to.

    Args:
        description: the whole description.
        name: the section; empty when it is absent.
        target: the class or function that takes the arguments.
        reserved: arguments of ``target`` that the caller sets, which the section must not contain.

    Raises:
        ValueError: the section is no mapping, or has a key that ``target`` does not take.
    """
    allowed = [parameter for parameter in inspect.signature(target).parameters if parameter not in {"self", *reserved}]
    return checked_section(description, name, allowed)


def checked_section(description: Mapping[str, object], name: str, allowed: list[str]) -> Keywords:
    """As ``section_of``, with the names of the arguments that there may be."""
    section = description.get(name, {})
    if not isinstance(section, dict):
        raise ValueError(f"{name}: must be a mapping, not {section!r}")
    wrong = [key for key in section if key not in allowed]
    if wrong:
        raise ValueError(f"{name}.{wrong[0]}: unknown key{suggest(str(wrong[0]), allowed)}")
    return section


def start_at_zero(*layers: torch.nn.Module) -> None:
    """Zeroes the weights and biases of output layers, so that a new network begins by predicting zero."""
    for layer in layers:
        for parameter in layer.parameters():
            torch.nn.init.zeros_(parameter)


def build_clip_tokenizer(words: Iterable[str] = (), max_length: int = 77) -> CLIPTokenizer:
    """A CLIPTokenizer whose tokens are bytes and some whole words.

    Args:
        words: lower-case words that become one token each.
        max_length: tokens of a prompt, start and end included.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters)]
    merges = []
    for word in words:  # a word is merged letter by letter, so each of its beginnings is a token, too
        merged = word[0]
        for position, letter in enumerate(word[1:], start=2):
            right = f"{letter}</w>" if position == len(word) else letter
            merges.append((merged, right))
            merged += right
            tokens.append(merged)
    tokens = list(dict.fromkeys([*tokens, "<|startoftext|>", "<|endoftext|>"]))
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = list(dict.fromkeys(merges))
    return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=max_length)


def build_clip_encoder(
    tokenizer: PreTrainedTokenizerBase,
    width: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    projection: bool = True,
) -> CLIPTextModelWithProjection | CLIPTextModel:
    """A CLIP text encoder with random weights, with ``projection`` or without.

    Its embeddings have a standard deviation of 1: CLIP's usual 0.02 would drown in the bias of the denoiser's context
    embedder.
    """
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        projection_dim=width,
        max_position_embeddings=tokenizer.model_max_length,
        bos_token_id=tokenizer.bos_token_id,  # pyright: ignore[reportArgumentType]
        eos_token_id=tokenizer.eos_token_id,  # pyright: ignore[reportArgumentType]
        pad_token_id=tokenizer.pad_token_id,  # pyright: ignore[reportArgumentType]
    )
    encoder = (CLIPTextModelWithProjection if projection else CLIPTextModel)(config)
    embeddings = next(submodule for name, submodule in encoder.named_modules() if name.endswith("embeddings"))
    torch.nn.init.normal_(embeddings.token_embedding.weight, std=1.0)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    torch.nn.init.normal_(embeddings.position_embedding.weight, std=1.0)  # pyright: ignore[reportArgumentType, reportAttributeAccessIssue]
    return encoder


def build_t5_tokenizer(words: Iterable[str] = ()) -> T5Tokenizer:
    """A T5 tokenizer whose tokens are the characters of printable ASCII and some beginnings of words."""
    from transformers import T5Tokenizer

    # Pieces with their log-probabilities: whole words are preferred to single letters.
    letters = [chr(code) for code in range(33, 127)]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((letter, -3.0) for letter in letters)]
    pieces += [(f"▁{word}", -1.0) for word in dict.fromkeys(words)]
    return T5Tokenizer(vocab=pieces, extra_ids=0)


def build_t5_encoder(
    tokenizer: PreTrainedTokenizerBase, width: int = 32, num_layers: int = 1, num_heads: int = 4
) -> T5EncoderModel:
    """A T5EncoderModel with random weights, whose output has ``width`` features."""
    return _build_t5_encoder("T5", tokenizer, width, num_layers, num_heads)


def build_autoencoder(
    channels: Iterable[int] = (16, 32, 32),
    latent_channels: int = 4,
    layers_per_block: int = 1,
    norm_groups: int = 8,
    scaling_factor: float = 1.0,
    shift_factor: float = 0.0,
    sample_size: int | Sequence[int] = 32,
) -> AutoencoderKL:
    """An AutoencoderKL without attention.

    Each entry of ``channels`` but the last halves the size of the image. ``sample_size`` is only recorded in the
    configuration.
    """
    from diffusers import AutoencoderKL

    channels = tuple(channels)
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * len(channels),  # pyright: ignore[reportArgumentType]
        up_block_types=("UpDecoderBlock2D",) * len(channels),  # pyright: ignore[reportArgumentType]
        block_out_channels=channels,  # pyright: ignore[reportArgumentType]
        layers_per_block=layers_per_block,
        latent_channels=latent_channels,
        norm_num_groups=norm_groups,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        sample_size=sample_size,  # pyright: ignore[reportArgumentType]
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )


SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
"""Special tokens of Qwen."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION_PATCH = 14
"""Side in pixels of the patches of Qwen2.5-VL's image encoder; 2 x 2 of them become a token."""


def build_qwen_tokenizer(words: Sequence[str] = (), template: str = "") -> Qwen2Tokenizer:
    """A Qwen2Tokenizer whose tokens are bytes and some whole words.

    Args:
        words: words that become one token each, at the start of a text and after a space.
        template: the pipeline's template, whose words become tokens too, so that it takes about as many tokens as with
            Qwen's own tokenizer.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    letters = sorted(ByteLevel.alphabet())
    to_bytes = ByteLevel(add_prefix_space=False, use_regex=False)
    words = [*words, *(f" {word}" for word in words), *_split_words(template)]
    tokens = list(letters)
    merges = []
    # Earlier merges have priority: words with a space come first, else their letters would merge without it.
    for word in sorted(dict.fromkeys(words), key=lambda word: word[0] != " "):
        pieces = to_bytes.pre_tokenize_str(word)[0][0]
        for end in range(2, len(pieces) + 1):
            merges.append((pieces[: end - 1], pieces[end - 1]))
            tokens.append(pieces[:end])
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=list(dict.fromkeys(merges)), extra_special_tokens=list(SPECIAL))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_qwen_vl_encoder(
    tokenizer: PreTrainedTokenizerBase,
    width: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vision_width: int = 16,
    vision_layers: int = 1,
    vision_heads: int = 2,
) -> Qwen2_5_VLForConditionalGeneration:
    """A Qwen2_5_VLForConditionalGeneration with random weights and embeddings of standard deviation 1."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor

    # Rotary frequencies of a head, shared out to time, height and width: 16, 24, 24 of 64 in Qwen's own model.
    num_frequencies = width // num_heads // 2
    side = num_frequencies * 3 // 8
    sections = [num_frequencies - 2 * side, side, side]
    language = language_settings(tokenizer, width, num_layers, num_heads, num_kv_heads)
    language["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": sections}
    vision = {
        "depth": vision_layers,
        "hidden_size": vision_width,
        "intermediate_size": 2 * vision_width,
        "num_heads": vision_heads,
        "patch_size": VISION_PATCH,
        "out_hidden_size": width,
        "fullatt_block_indexes": [vision_layers - 1],
    }
    config = Qwen2_5_VLConfig(text_config=language, vision_config=vision, **image_token_ids(tokenizer))
    encoder = Qwen2_5_VLForConditionalGeneration(config)
    torch.nn.init.normal_(encoder.get_input_embeddings().weight, std=1.0)  # pyright: ignore[reportArgumentType]
    return encoder


def image_token_ids(tokenizer: PreTrainedTokenizerBase) -> Keywords:
    """Ids of the tokens that stand for images and videos, as configurations of Qwen's models name them."""
    kinds = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return {f"{kind}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for kind, token in kinds.items()}


def require_torchvision(purpose: str) -> None:
    """Raises MissingDependencyError without torchvision, which transformers needs for that purpose."""
    try:
        import torchvision  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"transformers needs torchvision for {purpose}: pip install torchvision"
        ) from error


def build_qwen_vl_processor(
    tokenizer: PreTrainedTokenizerBase, min_pixels: int = 28 * 28, max_pixels: int = 1280 * 28 * 28
) -> Qwen2VLProcessor:
    """A Qwen2VLProcessor, which keeps the size of images between two numbers of pixels, rounded to multiples of 28.

    Raises:
        MissingDependencyError: without torchvision, which transformers needs for it.
    """
    require_torchvision("the images of Qwen2.5-VL")
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    sizes: Keywords = {"min_pixels": min_pixels, "max_pixels": max_pixels, "patch_size": VISION_PATCH}
    return Qwen2VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(patch_size=VISION_PATCH),
        chat_template=tokenizer.chat_template,
    )


def build_qwen_autoencoder(
    base_width: int = 8,
    multipliers: Iterable[int] = (1, 2),
    latent_channels: int = 4,
    layers_per_block: int = 1,
    latents_mean: Iterable[float] | None = None,
    latents_std: Iterable[float] | None = None,
) -> AutoencoderKLQwenImage:
    """An AutoencoderKLQwenImage; each entry of ``multipliers`` but the first halves the size."""
    from diffusers import AutoencoderKLQwenImage

    multipliers = list(multipliers)
    return AutoencoderKLQwenImage(
        base_dim=base_width,
        z_dim=latent_channels,
        dim_mult=multipliers,
        num_res_blocks=layers_per_block,
        temperal_downsample=[False] * (len(multipliers) - 1),
        latents_mean=list(latents_mean or [0.0] * latent_channels),
        latents_std=list(latents_std or [1.0] * latent_channels),
    )


def language_settings(
    tokenizer: PreTrainedTokenizerBase, width: int, num_layers: int, num_heads: int, num_kv_heads: int
) -> Keywords:
    """Settings that the configurations of Qwen's language models share."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": 4096,
        "use_cache": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }


def _split_words(template: str) -> list[str]:
    """The words of a template, each with the space before it if there is one, without special tokens."""
    for token in SPECIAL:
        template = template.replace(token, "\n")
    return re.findall(r"'[a-z]+| ?[A-Za-z]+| \(", template.replace("{}", "\n"))


def build_umt5_encoder(
    tokenizer: PreTrainedTokenizerBase, width: int = 32, num_layers: int = 2, num_heads: int = 4
) -> UMT5EncoderModel:
    """A UMT5EncoderModel with random weights, whose output has ``width`` features."""
    return _build_t5_encoder("UMT5", tokenizer, width, num_layers, num_heads)


def _build_t5_encoder(
    kind: str, tokenizer: PreTrainedTokenizerBase, width: int, num_layers: int, num_heads: int
) -> Any:
    """The encoder of ``kind`` T5 or UMT5 with random weights."""
    import transformers

    config = getattr(transformers, f"{kind}Config")(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=max(width // num_heads, 1),
        d_ff=2 * width,
        num_layers=num_layers,
        num_heads=num_heads,
        is_encoder_decoder=False,
        use_cache=False,
    )
    return getattr(transformers, f"{kind}EncoderModel")(config)


def build_clip_vision_encoder(
    width: int = 32, num_layers: int = 2, num_heads: int = 4, image_size: int = 16, patch_size: int = 8
) -> tuple[CLIPVisionModel, CLIPImageProcessor]:
    """A CLIPVisionModel with random weights, and the processor that scales and crops images for it."""
    from transformers import CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    config = CLIPVisionConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        image_size=image_size,
        patch_size=patch_size,
    )
    size = {"height": image_size, "width": image_size}
    return CLIPVisionModel(config), CLIPImageProcessor(size={"shortest_edge": image_size}, crop_size=size)


def build_wan_autoencoder(
    channels: int = 8,
    multipliers: Iterable[int] = (1, 1, 1),
    latent_channels: int = 4,
    layers_per_block: int = 1,
    patch_size: int | None = None,
    residual: bool = False,
    latents_mean: Iterable[float] | None = None,
    latents_std: Iterable[float] | None = None,
) -> AutoencoderKLWan:
    """An AutoencoderKLWan: the first frame becomes a latent frame of its own, and so do every four frames after it.

    Args:
        channels: number of channels at the highest resolution; a multiple of 2.
        multipliers: factors of ``channels``, one for each resolution, at least three; each but the last halves the
            size. The last two halvings halve the number of frames too.
        latent_channels: number of channels of the latents.
        layers_per_block: residual layers of a block.
        patch_size: side in pixels of patches that are folded into channels first (2 in Wan 2.2's autoencoder).
        residual: add shortcuts around the blocks, as in Wan 2.2's autoencoder, which compresses 4 x 16 x 16.
        latents_mean, latents_std: statistics of each latent channel, by which latents are normalised; None is 0 and 1.

    Raises:
        ValueError: when there are less than three multipliers, or statistics of another number of channels.
    """
    from diffusers import AutoencoderKLWan

    multipliers = list(multipliers)
    if len(multipliers) < 3:
        raise ValueError("multipliers: at least three, since the number of frames is halved twice")
    mean = [0.0] * latent_channels if latents_mean is None else list(latents_mean)
    std = [1.0] * latent_channels if latents_std is None else list(latents_std)
    if {len(mean), len(std)} != {latent_channels}:
        raise ValueError(f"latents_mean and latents_std: one number for each of {latent_channels} latent_channels")
    halvings = len(multipliers) - 1
    folded = 1 if patch_size is None else patch_size
    return AutoencoderKLWan(
        base_dim=channels,
        z_dim=latent_channels,
        dim_mult=multipliers,
        num_res_blocks=layers_per_block,
        temperal_downsample=[index >= halvings - 2 for index in range(halvings)],
        latents_mean=mean,
        latents_std=std,
        is_residual=residual,
        in_channels=3 * folded**2,
        out_channels=3 * folded**2,
        patch_size=patch_size,
        scale_factor_temporal=4,
        scale_factor_spatial=2**halvings * folded,
    )
