"""A tokenizer that needs no file: every byte is a token, besides those that mark messages and the end of a text."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

BYTES = "bytes"
"""What ``model.tokenizer_path`` says for it."""

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def build_byte_tokenizer() -> Any:
    """A transformers tokenizer of 259 tokens: the special ones, then the bytes. Its chat template is ChatML."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *symbols])}
    plain = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    plain.decoder = decoders.ByteLevel()
    plain.add_special_tokens(list(SPECIAL))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain, eos_token=SPECIAL[0], pad_token=SPECIAL[0], additional_special_tokens=SPECIAL[1:]
    )
    tokenizer.chat_template = files("sfumato.data").joinpath("templates/chatml.jinja").read_text(encoding="utf-8")
    return tokenizer
