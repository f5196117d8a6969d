"""Conversations in which the assistant answers with images: each is the tokens of its codes, which are in the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from sfumato.config.text_data import TextDataConfig
from sfumato.data.chat import build_chat_template
from sfumato.data.image_conversation import ImageConversation, ImageConversationTransform
from sfumato.data.pictures import File, read_image
from sfumato.data.row_samples import FiledRow
from sfumato.data.text import Document, TextSample, TextTransform, fingerprint_of, fit, read_tools
from sfumato.data.tokenise import Asking
from sfumato.data.vision import ImageReader, Images, Span
from sfumato.errors import ConfigError, DataError

IMAGE_TOKEN, START, END, CODE = "<|image_pad|>", "<|draw_start|>", "<|draw_end|>", "<|draw_{}|>"
"""Tokens of an image that is seen, around one that is drawn, and of its codes."""


def add_drawing_tokens(tokenizer: Any, codebook_size: int) -> int:
    """Gives a tokenizer those of these tokens that it has not. Returns the first code's; the others follow it."""
    names = [IMAGE_TOKEN, START, END, *(CODE.format(code) for code in range(codebook_size))]
    tokenizer.add_tokens(names, special_tokens=True)
    found = tokenizer.convert_tokens_to_ids(names[3:])
    if found != list(range(found[0], found[0] + codebook_size)):
        raise ConfigError(f"the tokens {CODE.format(0)} to {names[-1]} of the tokenizer do not follow each other")
    return found[0]


class DrawingReader(ImageReader):
    """Reads images that are seen, by transformers' processor, and those that are drawn, by an image tokenizer."""

    def __init__(self, processor: Any, arguments: Sequence[str], patches: tuple[int, float], drawn: Any) -> None:
        """``drawn`` is an ``ImageTokenizer``; the rest as for ``ImageReader``."""
        super().__init__(processor, arguments, patches)
        self.image_tokenizer = drawn

    @property
    def fingerprint(self) -> str:
        """Identifies how images become tokens and pixels, those that are drawn too."""
        return f"{super().fingerprint} {self.image_tokenizer.fingerprint}"

    def codes(self, image: Any) -> str:
        """The text whose tokens are those of an image that is drawn."""
        return START + "".join(CODE.format(code) for code in self.image_tokenizer.encode(image)) + END


@dataclass(frozen=True)
class OmniConversation(ImageConversation):
    """Conversations with images, as image_conversation; those in messages of the assistant are drawn."""

    type: ClassVar[str] = "omni_conversation"
    draws: ClassVar[bool] = True

    def transform(self, config: TextDataConfig, tokenizer: Any) -> TextTransform:
        """As ``TextFormat``; ``tokenizer`` is a ``DrawingReader``."""
        if not isinstance(tokenizer, DrawingReader):
            raise ConfigError("data.data_type omni_conversation is trained by tasks/train_omni.py")
        template = build_chat_template(config.chat_template, tokenizer.tokenizer)
        texts = [template.text, template.tool_text, tokenizer.fingerprint]
        keys = config.text_keys or ["messages", "conversations"]
        made_of = fingerprint_of(config, tokenizer.tokenizer, texts)
        return OmniTransform(template, tokenizer, keys, config.max_seq_len, config.overlong, made_of)


@dataclass(frozen=True)
class OmniTransform(ImageConversationTransform):
    """A conversation with images that are seen and drawn, of which the loss mask holds the assistant's tokens."""

    reader: DrawingReader

    def asks(self, row: FiledRow, where: str) -> Asking[list[TextSample]]:
        """As a call. Every image is read, so that broken ones are found before the run."""
        messages, files = self._read(row, where)
        opened = [read_image(file, where, still=True) for file in files]
        parts = [(message["role"], part) for message in messages for part in message.get("content") or []]
        drawn = [role == "assistant" for role, part in parts if part["type"] == "image"]
        try:
            seen, shapes = self.reader.place(
                [image for image, is_drawn in zip(opened, drawn, strict=True) if not is_drawn]
            )
        except ValueError as error:
            raise DataError(f"{where}: {type(self.reader.processor).__name__} refuses an image: {error}") from error
        waiting = list(seen)
        texts = [
            self.reader.codes(image) if is_drawn else waiting.pop(0)
            for image, is_drawn in zip(opened, drawn, strict=True)
        ]
        counts: list[int] = []

        def expand(text: str, spans: list[Span], num_messages: int) -> tuple[str, list[Span]]:
            shown = [message.get("content") or [] for message in messages[:num_messages]]
            counts.append(sum(part["type"] == "image" for content in shown for part in content))
            return self.reader.expand(text, spans, texts[: counts[-1]], where)

        encoded = yield from self.template.asks(messages, where, read_tools(row, where), expand)
        found = []
        for tokens, count in zip(encoded, counts, strict=True):
            document = fit(tokens, self.max_seq_len, self.overlong, where)
            if len(document.input_ids) < len(tokens[0]) and files:
                raise DataError(f"{where}: cut to data.max_seq_len {self.max_seq_len} tokens it would lose an image")
            own = [index for index in range(count) if not drawn[index]]
            images = Images(shapes[: len(own)], partial(_chosen, files, own), where) if own else None
            found.append(TextSample((Document(document.input_ids, document.loss_mask, images=images),)))
        return found


def _chosen(files: list[File], indices: list[int]) -> list[File]:
    return [files[index] for index in indices]
