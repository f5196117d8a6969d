"""Builders of further text encoders and tokenizers with random weights; the first ones stand in ``scratch.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
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
        GemmaTokenizer,
        PixtralProcessor,
        PreTrainedModel,
        PreTrainedTokenizerBase,
        Qwen2_5_VLTextModel,
        Qwen2Tokenizer,
        Qwen3VLProcessor,
        SiglipImageProcessor,
        SiglipVisionModel,
    )


@dataclass(frozen=True)
class LanguageEncoder:
    """Builds a language model of transformers, which reads prompts, with random weights."""

    model: str
    """Name of its class."""
    config: str
    """Name of the class of its configuration."""
    arguments: Callable[[PreTrainedTokenizerBase, Keywords], Keywords] = lambda tokenizer, settings: settings
    """Arguments of the configuration, of the tokenizer and of ``language_settings`` with ``head_dim``."""
    spreads_tokens: bool = True
    """Embeddings of tokens get a standard deviation of 1."""

    def __call__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        width: int = 32,
        num_layers: int = 2,
        num_heads: int = 4,
        num_kv_heads: int = 2,
    ) -> PreTrainedModel:
        """Builds the model for a tokenizer, or a processor of text and images."""
        import transformers

        tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
        settings = language_settings(tokenizer, width, num_layers, num_heads, num_kv_heads)
        arguments = self.arguments(tokenizer, settings | {"head_dim": width // num_heads})
        encoder = getattr(transformers, self.model)(getattr(transformers, self.config)(**arguments))
        if self.spreads_tokens:
            torch.nn.init.normal_(encoder.get_input_embeddings().weight, std=1.0)
        return encoder


def _gemma_arguments(tokenizer: PreTrainedTokenizerBase, settings: Keywords) -> Keywords:
    return settings | {"bos_token_id": tokenizer.bos_token_id, "query_pre_attn_scalar": settings["head_dim"]}


def _t5gemma_arguments(tokenizer: PreTrainedTokenizerBase, settings: Keywords) -> Keywords:
    from transformers import T5GemmaModuleConfig

    module = T5GemmaModuleConfig(**_gemma_arguments(tokenizer, settings))
    return {"encoder": module, "decoder": module, "is_encoder_decoder": False}


SMALL_VISION: Keywords = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
"""Settings of a vision tower, which reads no prompt."""


def _gemma3_arguments(tokenizer: PreTrainedTokenizerBase, settings: Keywords) -> Keywords:
    from transformers import Gemma3TextConfig, SiglipVisionConfig

    vision = SiglipVisionConfig(**SMALL_VISION, image_size=28, patch_size=14)
    text = Gemma3TextConfig(**_gemma_arguments(tokenizer, settings))
    return {"text_config": text, "vision_config": vision, "mm_tokens_per_image": 4}


def _mistral3_arguments(tokenizer: PreTrainedTokenizerBase, settings: Keywords) -> Keywords:
    from transformers import MistralConfig, PixtralVisionConfig

    vision = PixtralVisionConfig(**SMALL_VISION, image_size=32, patch_size=16)
    return {"text_config": MistralConfig(**settings, sliding_window=None), "vision_config": vision}


def _qwen3_vl_arguments(tokenizer: PreTrainedTokenizerBase, settings: Keywords) -> Keywords:
    # Rotary frequencies of a head, shared out to time, height and width: 24, 20, 20 of 64 in Qwen's own model.
    num_frequencies = settings["head_dim"] // 2
    side = num_frequencies * 5 // 16
    sections = [num_frequencies - 2 * side, side, side]
    rope = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": sections}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": settings["hidden_size"],
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    }
    return {"text_config": settings | {"rope_parameters": rope}, "vision_config": vision}


def _qwen3_vl_with_images(tokenizer: PreTrainedTokenizerBase, settings: Keywords) -> Keywords:
    return _qwen3_vl_arguments(tokenizer, settings) | image_token_ids(tokenizer)


build_qwen3_encoder = LanguageEncoder("Qwen3Model", "Qwen3Config")
build_qwen3_causal_encoder = LanguageEncoder("Qwen3ForCausalLM", "Qwen3Config")
build_llama_encoder = LanguageEncoder("LlamaForCausalLM", "LlamaConfig")
build_gemma2_encoder = LanguageEncoder("Gemma2Model", "Gemma2Config", _gemma_arguments, spreads_tokens=False)
build_gemma3_encoder = LanguageEncoder(
    "Gemma3ForConditionalGeneration", "Gemma3Config", _gemma3_arguments, spreads_tokens=False
)
build_t5gemma_encoder = LanguageEncoder(
    "T5GemmaEncoderModel", "T5GemmaConfig", _t5gemma_arguments, spreads_tokens=False
)
build_mistral3_encoder = LanguageEncoder("Mistral3Model", "Mistral3Config", _mistral3_arguments)
build_mistral3_causal_encoder = LanguageEncoder(
    "Mistral3ForConditionalGeneration", "Mistral3Config", _mistral3_arguments
)
build_qwen3_vl_encoder = LanguageEncoder("Qwen3VLModel", "Qwen3VLConfig", _qwen3_vl_arguments)
build_qwen3_vl_causal_encoder = LanguageEncoder(
    "Qwen3VLForConditionalGeneration", "Qwen3VLConfig", _qwen3_vl_with_images
)


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
