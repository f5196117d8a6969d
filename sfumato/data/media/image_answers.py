"""Conversations in which the assistant answers with images: each becomes tokens of its codes, which are in the loss.

An image of a message of the user is seen: it goes through the model's processor. An image of a message of the assistant
is drawn: an image tokenizer turns it into codes, and each code into a token.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np

from sfumato.config.text_data import TextDataConfig
from sfumato.data.files.row_table import FiledRow
from sfumato.data.media.document_media import MediaRefs, Span, Tensors
from sfumato.data.media.image_conversation import ImageConversation, ImageConversationTransform
from sfumato.data.media.kinds import DrawnFile, File, Medium
from sfumato.data.media.pictures import read_image
from sfumato.data.media.vision import MediaProcessor
from sfumato.data.text.chat_message import Messages
from sfumato.data.text.document import Document, TextSample
from sfumato.data.text.format import TextTransform, build_template, fit
from sfumato.data.text.messages import read_tools
from sfumato.data.text.tokenise import Asking
from sfumato.errors import ConfigError, DataError

if TYPE_CHECKING:
    from PIL import Image
    from transformers import PreTrainedTokenizerBase

IMAGE_TOKEN, START, END, CODE = "<|image_pad|>", "<|draw_start|>", "<|draw_end|>", "<|draw_{}|>"
"""The token of an image that is seen, the tokens around an image that is drawn, and the token of a code."""


DRAWN = "drawn_latents"
"""Name of the latents of a document's drawn images among its tensors."""


@dataclass(frozen=True)
class ImageText:
    """How the codes of an image that is drawn are written in text."""

    opening: str = START
    """Text before the first code."""
    closing: str = END
    """Text after the last code."""
    code: str = CODE
    """The token of a code: a format string that is given the code."""
    columns: int = 0
    """Codes in a line of the image; 0 where no token ends a line."""
    line_end: str = ""
    """The token after each line."""

    def of(self, codes: Sequence[int]) -> str:
        """The text of an image by its codes, line by line."""
        size = self.columns or len(codes)
        names = [self.code.format(code) for code in codes]
        lines = ["".join(names[start : start + size]) for start in range(0, len(names), size)]
        return self.opening + "".join(line + self.line_end for line in lines) + self.closing

    def find_in(self, text: str) -> str | None:
        """The first code, or token around an image, in a text; None without one."""
        before, _, rest = self.code.partition("{")
        code = f"{re.escape(before)}[0-9]+{re.escape(rest.partition('}')[2])}"
        around_image = [re.escape(token) for token in (self.opening, self.closing) if token]
        match = re.search("|".join([code, *around_image]), text)
        return None if match is None else match[0]


def add_drawing_tokens(tokenizer: PreTrainedTokenizerBase, codebook_size: int) -> int:
    """Adds the tokens of drawn images that a tokenizer lacks.

    Returns:
        The id of the first code's token; the ids of the other codes follow it.

    Raises:
        ConfigError: when the ids of the codes do not follow each other.
    """
    names = [IMAGE_TOKEN, START, END, *(CODE.format(code) for code in range(codebook_size))]
    tokenizer.add_tokens(names, special_tokens=True)
    code_ids = cast("list[int]", tokenizer.convert_tokens_to_ids(names[3:]))
    if code_ids != list(range(code_ids[0], code_ids[0] + codebook_size)):
        raise ConfigError(f"the tokens {CODE.format(0)} to {names[-1]} of the tokenizer do not follow each other")
    return code_ids[0]


class DrawingReader(MediaProcessor):
    """Reads images that are seen by transformers' processor, and images that are drawn by an image tokenizer."""

    def __init__(self, processor: object, arguments: Sequence[str], patches: tuple[int, float], drawn: Any) -> None:
        """``drawn`` is an ``ImageTokenizer``; the rest as for ``MediaProcessor``."""
        super().__init__(processor, arguments, patches)
        self.image_tokenizer = drawn

    @property
    def fingerprint(self) -> str:
        """Identifies how images become tokens and pixels, by the processor and the image tokenizer."""
        return f"{super().fingerprint} {self.image_tokenizer.fingerprint}"

    def codes(self, image: Image.Image) -> str:
        """The text of an image that is drawn: a token for each of its codes."""
        return self.image_tokenizer.text.of(self.image_tokenizer.encode(image))

    def expand(self, text: str, spans: list[Span], replacements: Sequence[str], where: str) -> tuple[str, list[Span]]:
        """As ``MediaProcessor.expand``. Raises DataError for a text with codes of images of its own, too."""
        if token := self.image_tokenizer.text.find_in(text):
            raise DataError(
                f"{where}: a text holds {token}, which the model takes for a part of an image that is drawn: remove it "
                "from the row"
            )
        return super().expand(text, spans, replacements, where)

    @property
    def keeps_drawn(self) -> bool:
        """Whether drawn images are read again when a batch is made, since their tokens do not hold the latents."""
        return hasattr(self.image_tokenizer, "latents")

    def tensors(self, images: MediaRefs) -> Tensors:
        """What ``MediaProcessor.tensors`` gives for the seen images, and the latents of the drawn ones under ``DRAWN``:
        float32 ``[n, C, h, w]``."""
        files = images.find()
        drawn = [medium.file for medium in files if isinstance(medium, DrawnFile)]
        if not drawn:
            return super().tensors(images)
        seen = [medium for medium in files if not isinstance(medium, DrawnFile)]
        seen_images = MediaRefs(images.shapes[: len(seen)], lambda: seen, images.where)
        tensors = super().tensors(seen_images) if seen else {}
        pictures = [read_image(file, images.where) for file in drawn]
        return tensors | {DRAWN: self.image_tokenizer.latents(pictures)}


@dataclass(frozen=True)
class OmniConversation(ImageConversation):
    """Conversations as of image_conversation, in which the images in the assistant's messages are drawn."""

    type: ClassVar[str] = "omni_conversation"
    draws: ClassVar[bool] = True

    def transform(self, config: TextDataConfig, tokenizer: Any) -> TextTransform:
        """As ``TextFormat``; ``tokenizer`` is a ``DrawingReader``."""
        if not isinstance(tokenizer, DrawingReader):
            raise ConfigError("data.data_type omni_conversation is trained by tasks/train_omni.py")
        template, fingerprint = build_template(config, tokenizer.tokenizer, tokenizer.fingerprint)
        keys = config.text_keys or ["messages", "conversations"]
        transform = OmniTransform(template, tokenizer, keys, config.max_seq_len, config.overlong, fingerprint)
        return cast("TextTransform", transform)  # it is given rows that know their folder, as ``has_images`` promises


@dataclass(frozen=True)
class OmniTransform(ImageConversationTransform):
    """A conversation with images that are seen and drawn; the loss mask holds the assistant's tokens."""

    draws: ClassVar[bool] = True
    reader: DrawingReader

    def files(self, row: FiledRow, where: str) -> list[Medium]:
        """The images of a row that are seen, then the drawn ones that are read again."""
        messages, files = self._read(row, where)
        drawn = _find_drawn(messages)
        return _select_media(files, *_split_seen_and_drawn(drawn, len(drawn), self.reader.keeps_drawn))

    def asks(self, row: FiledRow, where: str) -> Asking[list[TextSample]]:
        """The samples of a row, as a generator that asks for the tokens of texts (see ``TextTransform``).

        Every image is read, so that a broken one is found before the run.
        """
        messages, files = self._read(row, where)
        opened = [read_image(cast("File", file), where) for file in files]  # ``media`` of this reader is images alone
        drawn = _find_drawn(messages)
        try:
            seen, shapes = self.reader.place(
                [image for image, is_drawn in zip(opened, drawn, strict=True) if not is_drawn]
            )
        except ValueError as error:
            raise DataError(f"{where}: {type(self.reader.processor).__name__} refuses an image: {error}") from error
        seen_texts = list(seen)
        texts = [
            self.reader.codes(image) if is_drawn else seen_texts.pop(0)
            for image, is_drawn in zip(opened, drawn, strict=True)
        ]
        counts: list[int] = []

        def expand(text: str, spans: list[Span], num_messages: int) -> tuple[str, list[Span]]:
            shown = [message.get("content") or [] for message in messages[:num_messages]]
            counts.append(sum(part["type"] == "image" for content in shown for part in content))
            return self.reader.expand(text, spans, texts[: counts[-1]], where)

        encoded = yield from self.template.asks(messages, where, read_tools(row, where), expand)
        samples = []
        for tokens, count in zip(encoded, counts, strict=True):
            document = fit(tokens, self.max_seq_len, self.overlong, where)
            if len(document.input_ids) < len(tokens[0]) and files:
                raise DataError(f"{where}: cut to data.max_seq_len {self.max_seq_len} tokens it would lose an image")
            seen_indices, drawn_indices = _split_seen_and_drawn(drawn, count, self.reader.keeps_drawn)
            drawn_shapes = np.zeros((len(drawn_indices), 3), shapes.dtype)  # the encoder does not see them
            image_shapes = np.concatenate([shapes[: len(seen_indices)], drawn_shapes])
            select = partial(_select_media, files, seen_indices, drawn_indices)
            images = MediaRefs(image_shapes, select, where) if seen_indices or drawn_indices else None
            samples.append(TextSample((Document(document.input_ids, document.loss_mask, images=images),)))
        return samples


def _find_drawn(messages: Messages) -> list[bool]:
    """Whether the assistant draws it, for each image of a conversation in order."""
    parts = [(message["role"], part) for message in messages for part in message.get("content") or []]
    return [role == "assistant" for role, part in parts if part["type"] == "image"]


def _split_seen_and_drawn(drawn: list[bool], count: int, keeps_drawn: bool) -> tuple[list[int], list[int]]:
    """Indices of the seen images among the first ``count``, and of the drawn ones that are read again."""
    seen = [index for index in range(count) if not drawn[index]]
    return seen, [index for index in range(count) if drawn[index] and keeps_drawn]


def _select_media(files: Sequence[Medium], seen: list[int], drawn: list[int]) -> list[Medium]:
    """The files of these indices in the order of ``MediaRefs``: the seen ones, then the drawn ones as ``DrawnFile``."""
    return [*(files[index] for index in seen), *(DrawnFile(cast("File", files[index])) for index in drawn)]
