"""The documents of the probe: random tokens, for models that see or hear with random images and sounds among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor

from sfumato.config.text_data import TextTrainConfig
from sfumato.data.media.document_media import MediaRefs
from sfumato.data.text.document import Document, TextSample
from sfumato.models.language.hf_config import max_positions
from sfumato.models.language.packed_model import PackedModel

if TYPE_CHECKING:
    from sfumato.config.text_rl import TextRLTrainConfig
    from sfumato.data.media.clips import Clip
    from sfumato.data.media.kinds import Medium
    from sfumato.data.media.sounds import Sound
    from sfumato.data.media.vision import Vision

LENGTHS = (13, 5, 21, 21, 2)
"""Lengths of the short documents in tokens: two are equal, and one is as short as can be."""

SIGHTS = {0: ((56, 84),), 2: ((28, 28), (84, 56))}
"""For a model that sees, by index of a short document the heights and widths of its images in pixels."""

LONGEST = 8192
"""Tokens of the longest document that is made."""


def make_documents(
    model: PackedModel, train: TextTrainConfig | TextRLTrainConfig, max_seq_len: int
) -> list[list[TextSample]]:
    """Makes documents of random tokens, up to three micro-batches of them, always the same ones.

    The first micro-batch has the short documents. The second has two of similar length that fill a micro-batch of the
    run, the third one as long as the run's longest, each where it would be longer than those before: they show what
    begins at some length, such as a window or a choice of keys. Where micro-batches may have more tokens than the model
    has positions, the second one has, too: a mask may be cut from a table of positions (GPT-Neo).
    """
    longest = min(max_seq_len, LONGEST)
    # the second document has three quarters of the first one's length: 4/7 and 3/7 of the micro-batch
    first = min(longest, train.micro_batch_size * max_seq_len * 4 // 7)
    lengths = [[min(length, max_seq_len) for length in LENGTHS]]
    if first > max(LENGTHS):
        lengths.append([first, max(first * 3 // 4, 2)])
        positions = max_positions(model.plain.config.get_text_config())
        if positions is not None and positions < min(train.micro_batch_size * max_seq_len, LONGEST):
            missing = positions + 1 - sum(lengths[1])
            lengths[1] += [max(min(first, missing - start), 2) for start in range(0, missing, first)]
    if longest > max(first, *LENGTHS):
        lengths.append([longest])
    generator = torch.Generator().manual_seed(0)
    vocabulary = text_tokens(model)
    samples = [
        [
            sample_of(vocabulary[torch.randint(len(vocabulary), (length,), generator=generator)])
            for length in batch_lengths
        ]
        for batch_lengths in lengths
    ]
    if model.vision is not None and model.vision.reader.is_likely:
        # documents with and without images, and images of several sizes
        short = samples[0]
        for index, sizes in SIGHTS.items():
            illustrated = with_images(short[index].documents[0].input_ids, sizes, model.vision)
            short[index] = TextSample((illustrated,)) if len(illustrated.input_ids) <= max_seq_len else short[index]
    return samples


def text_tokens(model: PackedModel) -> Tensor:
    """Token ids that stand for text, without those of media and of ``model.no_text``: int64."""
    size = min(cast("torch.nn.Embedding", model.plain.get_input_embeddings()).num_embeddings, len(model.tokenizer))
    token_ids = torch.arange(size)
    special = set(model.no_text)
    if model.vision is not None:
        special |= {*model.vision.ids_beside_text().tolist(), *model.tokenizer.all_special_ids}
    return token_ids[~torch.isin(token_ids, torch.tensor(sorted(special), dtype=torch.int64))]


def sample_of(tokens: Tensor) -> TextSample:
    """A sample of one document with these tokens, all in the loss but the first, which nothing predicts."""
    return TextSample((Document(tokens.numpy().astype(np.int32), np.arange(len(tokens)) > 0),))


def with_images(tokens: np.ndarray, sizes: Sequence[tuple[int, int]], vision: Vision) -> Document:
    """A document of these tokens with random images between them, all in the loss.

    For a model that hears, noise follows each image, or takes its place where the model does not see; for a model that
    takes videos, a short one comes last.

    Args:
        tokens: int32 ``[L]``.
        sizes: height and width of each image in pixels. The noise is as many milliseconds long as their sum.
        vision: of the model.
    """
    from PIL import Image

    from sfumato.data.media.pictures import as_png

    generator = np.random.default_rng(0)
    reader = vision.reader
    contents: list[bytes | Sound | Clip] = []
    for size in sizes:
        if reader.sees:
            contents.append(as_png(Image.fromarray(generator.integers(0, 255, (*size, 3), np.uint8))))
        if "audio" in reader.media:
            contents.append(reader.noise(sum(size) / 1000, generator))
    if "video" in reader.media:
        contents.append(reader.processor.video_processor.noise(generator))
    texts, shapes = reader.place_files(cast("list[Medium]", contents), "a document of the probe")
    text_parts = np.array_split(np.asarray(tokens, np.int32), len(contents) + 1)
    pieces = [text_parts[0]]
    for placeholder, text_part in zip(texts, text_parts[1:], strict=True):
        pieces += [np.array(reader.tokenizer(placeholder, add_special_tokens=False)["input_ids"], np.int32), text_part]
    input_ids = np.concatenate(pieces)
    images = MediaRefs(shapes, lambda: contents, "an image of the probe")
    return Document(input_ids, np.arange(len(input_ids)) > 0, images=images)


def other_than(document: Document, start: int, model: PackedModel) -> TextSample:
    """A copy of a document in which each token of text from index ``start`` on is replaced by another.

    Tokens of images stay: their number must fit the images.
    """
    vocabulary = text_tokens(model)
    input_ids = torch.from_numpy(document.input_ids.astype(np.int64))
    is_text = torch.isin(input_ids, vocabulary)
    is_text[:start] = False
    # the next token of the vocabulary, which is sorted, and after the last one the first
    input_ids[is_text] = vocabulary[(torch.searchsorted(vocabulary, input_ids[is_text]) + 1) % len(vocabulary)]
    return TextSample((replace(document, input_ids=input_ids.numpy().astype(np.int32)),))
