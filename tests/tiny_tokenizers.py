"""Tokenizers made in code: each kind treats spaces, offsets and special tokens in its own way."""

from __future__ import annotations

from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<s>", "</s>"]
TEXT = [
    "Reverse the letters of abc. Sort the letters of cab. The answer is here, and there is no other answer.",
    "user assistant system tool\nUser: how are you?\nAssistant: I am fine, thank you.\n\nHuman: hello\n\n",
    "Straße, 日本語 and emoji 😀 stand here. What is 1 + 2? It is 3.\n  indented text\n",
] * 20

QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(kind: str = "byte_level", **options: Any) -> Any:
    """A fast tokenizer trained on a few lines.

    Args:
        kind: ``byte_level`` (GPT-2), ``qwen`` (line breaks join with what follows), ``trimmed`` (offsets leave the
            space out), ``metaspace`` (a space in front of words belongs to them and is added to the first), or
            ``words`` (white space is lost).
        options: arguments of PreTrainedTokenizerFast, such as ``chat_template``.
    """
    from transformers import PreTrainedTokenizerFast

    if kind == "words":
        tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.decoder = decoders.WordPiece()
        trainer: Any = trainers.WordPieceTrainer(
            special_tokens=["[UNK]", *SPECIALS], vocab_size=600, show_progress=False
        )
    elif kind == "metaspace":
        tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        fallback = [f"<0x{byte:02X}>" for byte in range(256)]
        trainer = trainers.BpeTrainer(
            special_tokens=["<unk>", *SPECIALS, *fallback], vocab_size=700, show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.BPE())
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        by_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "qwen")
        split = pre_tokenizers.Split(Regex(QWEN_SPLIT), "isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, by_bytes]) if kind == "qwen" else by_bytes
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=kind == "trimmed")
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.normalizer = normalizers.NFC() if kind == "qwen" else None
        trainer = trainers.BpeTrainer(
            special_tokens=SPECIALS, initial_alphabet=alphabet, vocab_size=600, show_progress=False
        )
    tokenizer.train_from_iterator(TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|endoftext|>", additional_special_tokens=SPECIALS[1:], **options
    )
