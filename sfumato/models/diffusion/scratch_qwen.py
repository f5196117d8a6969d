"""Parts of Qwen-Image and Z-Image pipelines made from scratch: tokenizer, Qwen text encoders, Qwen-Image's autoencoder.

Nothing is downloaded; weights are random. Callers set the seed of torch's generator.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from sfumato.errors import MissingDependencyError

SPECIAL = ("<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
VISION_PATCH = 14
"""Side in pixels of the patches of Qwen2.5-VL's image encoder; four of them become a token."""


def build_qwen_tokenizer(words: Sequence[str] = (), template: str = "") -> Any:
    """A Qwen2Tokenizer over bytes: every byte is a token, besides the whole words that are given.

    Args:
        words: what becomes one token each, at the start of a text and after a space.
        template: a pipeline's, whose words become tokens too, about as many as Qwen's own tokenizer makes of it.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import Qwen2Tokenizer

    letters, to_bytes = sorted(ByteLevel.alphabet()), ByteLevel(add_prefix_space=False, use_regex=False)
    words = [*words, *(f" {word}" for word in words), *_words_of(template)]
    tokens, merges = list(letters), []
    for word in sorted(dict.fromkeys(words), key=lambda word: word[0] != " "):  # an earlier merge goes before a later
        pieces = to_bytes.pre_tokenize_str(word)[0][0]
        for end in range(2, len(pieces) + 1):
            merges.append((pieces[: end - 1], pieces[end - 1]))
            tokens.append(pieces[:end])
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=list(dict.fromkeys(merges)), extra_special_tokens=list(SPECIAL))
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_qwen3_encoder(
    tokenizer: Any, width: int = 32, num_layers: int = 2, num_heads: int = 4, num_kv_heads: int = 2
) -> torch.nn.Module:
    """A Qwen3Model with random weights and embeddings of unit scale."""
    from transformers import Qwen3Config, Qwen3Model

    encoder = Qwen3Model(
        Qwen3Config(
            **_language(tokenizer, width, num_layers, num_heads, num_kv_heads),
            head_dim=width // num_heads,
        )
    )
    torch.nn.init.normal_(encoder.embed_tokens.weight, std=1.0)
    return encoder


def build_qwen_vl_encoder(
    tokenizer: Any,
    width: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    vision_width: int = 16,
    vision_layers: int = 1,
    vision_heads: int = 2,
) -> torch.nn.Module:
    """A Qwen2_5_VLForConditionalGeneration with random weights and embeddings of unit scale."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    half = width // num_heads // 2
    side = half * 3 // 8
    sections = [half - 2 * side, side, side]  # time, height, width: 16, 24, 24 of Qwen's 64
    language = _language(tokenizer, width, num_layers, num_heads, num_kv_heads)
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
    ids = {
        f"{kind}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>")
        for kind, token in {
            "image": "image_pad",
            "video": "video_pad",
            "vision_start": "vision_start",
            "vision_end": "vision_end",
        }.items()
    }
    encoder = Qwen2_5_VLForConditionalGeneration(Qwen2_5_VLConfig(text_config=language, vision_config=vision, **ids))
    torch.nn.init.normal_(encoder.get_input_embeddings().weight, std=1.0)
    return encoder


def build_qwen_vl_processor(tokenizer: Any, min_pixels: int = 28 * 28, max_pixels: int = 1280 * 28 * 28) -> Any:
    """A Qwen2VLProcessor, which takes images between two sizes as they are, rounded to 28 pixels.

    Raises:
        MissingDependencyError: without torchvision, which transformers needs for it.
    """
    try:
        import torchvision  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "transformers needs torchvision for the images of Qwen2.5-VL: pip install torchvision"
        ) from error
    from transformers import Qwen2VLImageProcessor, Qwen2VLProcessor, Qwen2VLVideoProcessor

    sizes = {"min_pixels": min_pixels, "max_pixels": max_pixels, "patch_size": VISION_PATCH}
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
) -> torch.nn.Module:
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


def _language(tokenizer: Any, width: int, num_layers: int, num_heads: int, num_kv_heads: int) -> dict[str, Any]:
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


def _words_of(template: str) -> list[str]:
    """The words of a template, each with the space before it if there is one."""
    for each in SPECIAL:
        template = template.replace(each, "\n")
    return re.findall(r"'[a-z]+| ?[A-Za-z]+| \(", template.replace("{}", "\n"))
