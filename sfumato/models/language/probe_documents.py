"""The documents of the probe: random tokens, and of models that see or hear random images and sounds among them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from sfumato.config.text_data import TextTrainConfig
from sfumato.data.media.clips import Clip
from sfumato.data.media.pictures import as_png
from sfumato.data.media.sounds import Sound
from sfumato.data.media.vision import Images, Vision
from sfumato.data.text.format import Document, TextSample
from sfumato.models.language.packed_model import PackedModel

LENGTHS = (13, 5, 21, 21, 2)
"""Tokens of the short documents: some equal, one as short as can be."""

SIGHTS = {0: ((56, 84),), 2: ((28, 28), (84, 56))}
"""Of a model that sees, heights and widths in pixels of the images of some of these documents."""

LONGEST = 8192
"""Tokens of the longest document that is made."""


def make_documents(model: PackedModel, train: TextTrainConfig, max_seq_len: int) -> list[list[TextSample]]:
    """Documents of random tokens for three micro-batches: short ones; two of about one length that fill a micro-batch
    of the run; and one as long as the run has. What begins at some length (a window, a choice of keys) shows in these.
    """
    longest = min(max_seq_len, LONGEST)
    first = min(longest, train.micro_batch_size * max_seq_len * 4 // 7)  # the other has three quarters of its length
    lengths = [[min(length, max_seq_len) for length in LENGTHS]]
    if first > max(LENGTHS):
        lengths.append([first, max(first * 3 // 4, 2)])
    if longest > max(first, *LENGTHS):
        lengths.append([longest])
    generator = torch.Generator().manual_seed(0)
    known = text_tokens(model)
    found = [
        [sample_of(known[torch.randint(len(known), (length,), generator=generator)]) for length in part]
        for part in lengths
    ]
    if model.vision is not None and model.vision.reader.is_likely:
        # documents with and without images, and images of several sizes
        for index, sizes in SIGHTS.items():
            seen = with_images(found[0][index].documents[0].input_ids, sizes, model.vision)
            found[0][index] = TextSample((seen,)) if len(seen.input_ids) <= max_seq_len else found[0][index]
    return found


def text_tokens(model: PackedModel) -> Tensor:
    """Tokens that stand for text, int64."""
    size = min(model.plain.get_input_embeddings().num_embeddings, len(model.tokenizer))
    known, special = torch.arange(size), set(model.no_text)
    if model.vision is not None:
        special |= {*model.vision.idle_ids.tolist(), *model.tokenizer.all_special_ids}
    return known[~torch.isin(known, torch.tensor(sorted(special), dtype=torch.int64))]


def sample_of(tokens: Tensor) -> TextSample:
    """A document of these tokens, all of which are in the loss."""
    return TextSample((Document(tokens.numpy().astype(np.int32), np.arange(len(tokens)) > 0),))


def with_images(tokens: np.ndarray, sizes: Sequence[tuple[int, int]], vision: Vision) -> Document:
    """A document of these tokens with random images of these heights and widths between them, all in the loss.

    Where there may be audio, noise of a millisecond for each pixel of both edges follows each image, or stands for it;
    where there may be videos, a short one follows all.
    """
    from PIL import Image

    generator, reader = np.random.default_rng(0), vision.reader
    contents: list[bytes | Sound | Clip] = []
    for size in sizes:
        if reader.sees:
            contents.append(as_png(Image.fromarray(generator.integers(0, 255, (*size, 3), np.uint8))))
        if "audio" in reader.media:
            contents.append(reader.noise(sum(size) / 1000, generator))
    if "video" in reader.media:
        contents.append(reader.processor.video_processor.noise(generator))
    texts, shapes = reader.place_files(contents, "a document of the probe")
    parts = np.array_split(np.asarray(tokens, np.int32), len(contents) + 1)
    found = [parts[0]]
    for text, part in zip(texts, parts[1:], strict=True):
        found += [np.array(reader.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32), part]
    input_ids = np.concatenate(found)
    images = Images(shapes, lambda: contents, "an image of the probe")
    return Document(input_ids, np.arange(len(input_ids)) > 0, images=images)


def other_than(document: Document, start: int, model: PackedModel) -> TextSample:
    """A document whose tokens of text from ``start`` on are others."""
    known = text_tokens(model)
    found = torch.from_numpy(document.input_ids.astype(np.int64))
    is_text = torch.isin(found, known)
    is_text[:start] = False
    found[is_text] = known[(torch.searchsorted(known, found[is_text]) + 1) % len(known)]
    return TextSample((replace(document, input_ids=found.numpy().astype(np.int32)),))
