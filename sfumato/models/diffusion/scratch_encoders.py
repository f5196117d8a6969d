"""Builders of further text encoders and tokenizers with random weights; the first ones stand in ``scratch.py``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from sfumato.config.open_mappings import Keywords
from sfumato.models.diffusion.scratch import (
    build_qwen_tokenizer,
    build_qwen_vl_encoder,
    image_token_ids,
    language_settings,
    require_torchvision,
)

if TYPE_CHECKING:
    from transformers import (
        ByT5Tokenizer,
        Gemma2Model,
        Gemma3ForConditionalGeneration,
        GemmaTokenizer,
        LlamaForCausalLM,
        Mistral3ForConditionalGeneration,
        Mistral3Model,
        PixtralProcessor,
        PreTrainedTokenizerBase,
        Qwen2_5_VLTextModel,
        Qwen2Tokenizer,
        Qwen3ForCausalLM,
        Qwen3VLForConditionalGeneration,
        Qwen3VLModel,
        Qwen3VLProcessor,
        SiglipImageProcessor,
        SiglipVisionModel,
    )


def build_qwen3_causal_encoder(
    tokenizer: PreTrainedTokenizerBase,
    width: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
) -> Qwen3ForCausalLM:
    """A Qwen3ForCausalLM with random weights and embeddings of standard deviation 1."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    encoder = Qwen3ForCausalLM(
        Qwen3Config(
            **language_settings(tokenizer, width, num_layers, num_heads, num_kv_heads),
            head_dim=width // num_heads,
        )
    )
    torch.nn.init.normal_(encoder.model.embed_tokens.weight, std=1.0)
    return encoder


def build_llama_encoder(
    tokenizer: PreTrainedTokenizerBase,
    width: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
) -> LlamaForCausalLM:
    """A LlamaForCausalLM with random weights and embeddings of standard deviation 1."""
    from transformers import LlamaConfig, LlamaForCausalLM

    encoder = LlamaForCausalLM(LlamaConfig(**language_settings(tokenizer, width, num_layers, num_heads, num_kv_heads)))
    torch.nn.init.normal_(encoder.model.embed_tokens.weight, std=1.0)
    return encoder


def build_gemma_tokenizer(words: Iterable[str] = ()) -> GemmaTokenizer:
    """A GemmaTokenizer whose tokens are the characters of printable ASCII and some whole words."""
    from transformers import GemmaTokenizer

    specials = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    tokens = [*specials, "▁", *(chr(code) for code in range(33, 127))]
    merges = []
    for word in words:  # a word is merged letter by letter, so each of its beginnings is a token, too
        for end in range(2, len(word) + 1):
            merges.append((word[: end - 1], word[end - 1]))
            tokens.append(word[:end])
    vocabulary = {token: index for index, token in enumerate(dict.fromkeys(tokens))}
    merges: Any = list(dict.fromkeys(merges))
    return GemmaTokenizer(vocab=vocabulary, merges=merges)


def build_gemma2_encoder(
    tokenizer: PreTrainedTokenizerBase,
    width: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
) -> Gemma2Model:
    """A Gemma2Model with random weights."""
    from transformers import Gemma2Config, Gemma2Model

    settings = language_settings(tokenizer, width, num_layers, num_heads, num_kv_heads)
    settings["bos_token_id"] = tokenizer.bos_token_id
    return Gemma2Model(Gemma2Config(**settings, head_dim=width // num_heads, query_pre_attn_scalar=width // num_heads))


def build_gemma3_encoder(
    tokenizer: PreTrainedTokenizerBase,
    width: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
) -> Gemma3ForConditionalGeneration:
    """A Gemma3ForConditionalGeneration with random weights, and a vision tower that reads no prompt."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, SiglipVisionConfig

    settings = language_settings(tokenizer, width, num_layers, num_heads, num_kv_heads)
    settings["bos_token_id"] = tokenizer.bos_token_id
    text = Gemma3TextConfig(**settings, head_dim=width // num_heads, query_pre_attn_scalar=width // num_heads)
    vision = SiglipVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=28, patch_size=14
    )
    return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4))


def build_mistral3_encoder(
    tokenizer: PreTrainedTokenizerBase,
    width: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    generates: bool = False,
) -> Mistral3Model | Mistral3ForConditionalGeneration:
    """A Mistral3Model with random weights; the model with a head, which it is a part of, if it ``generates``."""
    from transformers import (
        Mistral3Config,
        Mistral3ForConditionalGeneration,
        Mistral3Model,
        MistralConfig,
        PixtralVisionConfig,
    )

    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    settings = language_settings(tokenizer, width, num_layers, num_heads, num_kv_heads)
    text = MistralConfig(**settings, head_dim=width // num_heads, sliding_window=None)
    vision = PixtralVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, image_size=32, patch_size=16
    )
    config = Mistral3Config(text_config=text, vision_config=vision)
    encoder = (Mistral3ForConditionalGeneration if generates else Mistral3Model)(config)
    torch.nn.init.normal_(encoder.get_input_embeddings().weight, std=1.0)  # pyright: ignore[reportArgumentType]
    return encoder


PIXTRAL_TOKENS = ["[IMG]", "[IMG_BREAK]", "[IMG_END]"]
"""Special tokens of images in Mistral's models."""
PIXTRAL_TEMPLATE = (
    "{% for message in messages %}[{{ message.role }}]{% for part in message.content %}{{ part.text }}{% endfor %}"
    "{% endfor %}"
)


def build_pixtral_processor(words: Sequence[str] = (), template: str = "") -> PixtralProcessor:
    """A PixtralProcessor around the tokenizer of ``build_qwen_tokenizer``, with the same arguments.

    Raises:
        MissingDependencyError: without torchvision, which transformers needs for it.
    """
    require_torchvision("the processor of Mistral 3")
    from transformers import PixtralImageProcessor, PixtralProcessor

    tokenizer = build_qwen_tokenizer(words, template)
    tokenizer.add_special_tokens({"additional_special_tokens": PIXTRAL_TOKENS})  # pyright: ignore[reportArgumentType]
    return PixtralProcessor(
        image_processor=PixtralImageProcessor(), tokenizer=tokenizer, chat_template=PIXTRAL_TEMPLATE
    )


def build_qwen3_vl_encoder(
    tokenizer: PreTrainedTokenizerBase,
    width: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    generates: bool = False,
) -> Qwen3VLModel | Qwen3VLForConditionalGeneration:
    """A Qwen3VLModel with random weights and embeddings of standard deviation 1.

    If it ``generates``, the model with a head, which it is a part of, and the ids of the tokens that stand for images.
    """
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration, Qwen3VLModel

    text = language_settings(tokenizer, width, num_layers, num_heads, num_kv_heads)
    text["head_dim"] = width // num_heads
    # Rotary frequencies of a head, shared out to time, height and width: 24, 20, 20 of 64 in Qwen's own model.
    side = width // num_heads // 2 * 5 // 16
    sections = [width // num_heads // 2 - 2 * side, side, side]
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": width,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    ids = image_token_ids(tokenizer) if generates else {}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, **ids)
    encoder = (Qwen3VLForConditionalGeneration if generates else Qwen3VLModel)(config)
    torch.nn.init.normal_(encoder.get_input_embeddings().weight, std=1.0)  # pyright: ignore[reportArgumentType]
    return encoder


QWEN3_VL_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{% for part in message.content %}{{ part.text }}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_qwen3_vl_tokenizer(words: Sequence[str] = ()) -> Qwen2Tokenizer:
    """The tokenizer of ``build_qwen_tokenizer`` with a chat template for messages in parts."""
    tokenizer = build_qwen_tokenizer(words)
    tokenizer.chat_template = QWEN3_VL_TEMPLATE
    return tokenizer


def build_qwen3_vl_processor(
    parts: Mapping[str, object], min_pixels: int = 32 * 32, max_pixels: int = 4096 * 32 * 32
) -> Qwen3VLProcessor:
    """A Qwen3VLProcessor around ``parts["tokenizer"]``, which keeps the size of images between two numbers of pixels,
    rounded to multiples of 32.

    Raises:
        MissingDependencyError: without torchvision, which transformers needs for it.
    """
    require_torchvision("the processor of Qwen3-VL")
    from transformers import Qwen2VLImageProcessor, Qwen3VLProcessor, Qwen3VLVideoProcessor

    sizes: Keywords = {"min_pixels": min_pixels, "max_pixels": max_pixels, "patch_size": 16}
    return Qwen3VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes, image_mean=[0.5] * 3, image_std=[0.5] * 3),
        tokenizer=parts["tokenizer"],
        video_processor=Qwen3VLVideoProcessor(),
        chat_template=QWEN3_VL_TEMPLATE,
    )


def build_byt5_tokenizer() -> ByT5Tokenizer:
    """A ByT5Tokenizer, whose tokens are bytes."""
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


def build_qwen_vl_text_encoder(
    tokenizer: PreTrainedTokenizerBase,
    width: int = 32,
    num_layers: int = 2,
    num_heads: int = 4,
    num_kv_heads: int = 2,
) -> Qwen2_5_VLTextModel:
    """The Qwen2_5_VLTextModel of ``build_qwen_vl_encoder``, which reads no images."""
    return build_qwen_vl_encoder(tokenizer, width, num_layers, num_heads, num_kv_heads).model.language_model


def build_siglip_vision_encoder(
    width: int = 32, num_layers: int = 2, num_heads: int = 4, image_size: int = 16, patch_size: int = 8
) -> SiglipVisionModel:
    """A SiglipVisionModel with random weights."""
    from transformers import SiglipVisionConfig, SiglipVisionModel

    config = SiglipVisionConfig(
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        image_size=image_size,
        patch_size=patch_size,
    )
    return SiglipVisionModel(config)


def build_siglip_processor(encoder: SiglipVisionModel) -> SiglipImageProcessor:
    """The processor that scales images to the size that an encoder reads."""
    from transformers import SiglipImageProcessor

    side = encoder.config.image_size
    assert isinstance(side, int), "the encoders that are built here read squares"
    return SiglipImageProcessor(size={"height": side, "width": side})
