"""Parts of pipelines made from scratch: tokenizers, text encoders and autoencoders of the standard classes.

Nothing is downloaded; weights are random. Callers set the seed of torch's generator.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import torch

from sfumato.config.load import suggest


def unknown_keys(description: dict[str, Any], known: Iterable[str]) -> None:
    """Raises ValueError for a section that no family knows."""
    known = sorted(known)
    wrong = [each for each in description if each not in known]
    if wrong:
        raise ValueError(f"{wrong[0]}: unknown key{suggest(str(wrong[0]), known)}")


def section_of(
    description: dict[str, Any], name: str, target: Callable[..., Any], given: Iterable[str] = ()
) -> dict[str, Any]:
    """The arguments that a section of a description has for what it builds.

    Args:
        description: the whole description.
        name: the section; empty when it is absent.
        target: the class or function that takes the arguments.
        given: arguments of ``target`` that are not the section's to set.

    Raises:
        ValueError: the section is no mapping, or has a key that ``target`` does not take.
    """
    section = description.get(name, {})
    if not isinstance(section, dict):
        raise ValueError(f"{name}: must be a mapping, not {section!r}")
    known = [each for each in inspect.signature(target).parameters if each not in {"self", *given}]
    wrong = [each for each in section if each not in known]
    if wrong:
        raise ValueError(f"{name}.{wrong[0]}: unknown key{suggest(str(wrong[0]), known)}")
    return section


def build_clip_tokenizer(words: Iterable[str] = (), max_length: int = 77) -> Any:
    """A CLIPTokenizer over bytes: every character is a token, besides the whole words that are given.

    Args:
        words: lower-case words that become one token each.
        max_length: tokens of a prompt, start and end included.
    """
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import CLIPTokenizer

    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, *(f"{letter}</w>" for letter in letters)]
    merges = []
    for word in words:
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
    tokenizer: Any, width: int = 32, num_layers: int = 2, num_heads: int = 4, projection: bool = True
) -> torch.nn.Module:
    """A CLIPTextModelWithProjection, or CLIPTextModel, with random weights and embeddings of unit scale.

    CLIP's usual 0.02 would drown in the bias of the denoiser's context embedder.
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
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    encoder = (CLIPTextModelWithProjection if projection else CLIPTextModel)(config)
    embeddings = next(each for name, each in encoder.named_modules() if name.endswith("embeddings"))
    torch.nn.init.normal_(embeddings.token_embedding.weight, std=1.0)
    torch.nn.init.normal_(embeddings.position_embedding.weight, std=1.0)
    return encoder


def build_t5_tokenizer(words: Iterable[str] = ()) -> Any:
    """A T5 tokenizer over the characters of printable ASCII, besides the word beginnings that are given."""
    from transformers import T5Tokenizer

    letters = [chr(code) for code in range(33, 127)]
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), *((each, -3.0) for each in letters)]
    pieces += [(f"▁{word}", -1.0) for word in dict.fromkeys(words)]
    return T5Tokenizer(vocab=pieces, extra_ids=0)


def build_t5_encoder(
    tokenizer: Any, width: int, num_layers: int = 1, num_heads: int = 4, silent: bool = True
) -> torch.nn.Module:
    """A T5EncoderModel whose output has ``width`` features, with ``silent`` all zero until it is trained.

    Zeros are what the SD3 pipeline puts in the place of a missing T5, beside which random features would only disturb.
    """
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=len(tokenizer),
        d_model=width,
        d_kv=max(width // num_heads, 1),
        d_ff=2 * width,
        num_layers=num_layers,
        num_heads=num_heads,
        is_encoder_decoder=False,
        use_cache=False,
    )
    encoder = T5EncoderModel(config)
    if silent:
        torch.nn.init.zeros_(encoder.encoder.final_layer_norm.weight)
    return encoder


def build_autoencoder(
    channels: Iterable[int] = (16, 32, 32),
    latent_channels: int = 4,
    layers_per_block: int = 1,
    norm_groups: int = 8,
    scaling_factor: float = 1.0,
    shift_factor: float = 0.0,
) -> torch.nn.Module:
    """An AutoencoderKL without attention; each entry of ``channels`` but the last halves the size."""
    from diffusers import AutoencoderKL

    channels = tuple(channels)
    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * len(channels),
        up_block_types=("UpDecoderBlock2D",) * len(channels),
        block_out_channels=channels,
        layers_per_block=layers_per_block,
        latent_channels=latent_channels,
        norm_num_groups=norm_groups,
        scaling_factor=scaling_factor,
        shift_factor=shift_factor,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )
