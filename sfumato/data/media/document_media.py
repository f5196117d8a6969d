"""The media of a document: their shapes, their files, which are opened when a batch is made, and a model's inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from torch import Tensor

    from sfumato.data.media.clips import Clip
    from sfumato.data.media.kinds import Medium
    from sfumato.data.media.sounds import Sound

KINDS = ("token_type_ids", "mm_token_type_ids")
"""Arguments of transformers' models that take the kind of each token (text, image, video, audio)."""

SHOWN_PIXELS = 512
"""Width and height of the images of prompts in reports, at most."""

Span = tuple[int, int]
Tensors = dict[str, "Tensor"]


@dataclass(frozen=True)
class MediaRefs:
    """The media of a document, in the order of its tokens, which are opened when a batch is made."""

    shapes: np.ndarray
    """int32 ``[N, 3]``: parts that do not see each other (frames, tiles), rows and columns of patches of each part. Of
    audio: frames of its spectrogram, 0 and 0."""
    find: Callable[[], Sequence[Medium | Clip | Sound]]
    """Gives the files, their content, or media that have been opened, one for each shape."""
    where: str
    """File and row, for messages."""
    opened: Future[Tensors] | None = None
    """The result of ``MediaProcessor.tensors``, where threads have begun to compute it."""

    def side_by_side(self) -> np.ndarray | None:
        """The images, each made at most ``SHOWN_PIXELS`` wide and high, from left to right: uint8 ``[H, W, 3]``.

        None without images, among videos or audio. Raises DataError when one is broken.
        """
        from PIL import Image

        from sfumato.data.media.pictures import read_image

        files = [file for file in self.find() if isinstance(file, Path | bytes)]
        pictures = [read_image(file, self.where).convert("RGB") for file in files]
        if not pictures:
            return None
        for picture in pictures:
            picture.thumbnail((SHOWN_PIXELS, SHOWN_PIXELS))
        size = sum(picture.width for picture in pictures), max(picture.height for picture in pictures)
        canvas = Image.new("RGB", size, "white")
        offset = 0
        for picture in pictures:
            canvas.paste(picture, (offset, 0))
            offset += picture.width
        return np.asarray(canvas)


@dataclass(frozen=True)
class MultimodalInputs:
    """Inputs of a model beside the L tokens of one document."""

    tensors: Tensors = field(default_factory=dict)
    """Arguments of its ``forward`` that images give; empty without images. Documents follow each other in dim 0."""
    rope_positions: Tensor | None = None
    """``[L, 3]``: frame, row and column of each token, of models whose rotary positions have these: int64, or float32
    where frames lie between whole positions, as those of Qwen3-Omni do."""
    modality_ids: Tensor | None = None
    """int64 ``[L]``: 0 of text, 1 of an image, 2 of a video, 3 of audio."""

    def arguments(self, position_ids: Tensor, names: Iterable[str]) -> Tensors:
        """Arguments of ``forward`` beside the tokens.

        Where the model has rotary positions of three axes, the positions within documents are prepended to them:
        transformers takes packed rows so, and finds the borders of documents by the first.

        Args:
            position_ids: positions within documents.
            names: arguments that the model's ``forward`` takes.
        """
        arguments = self.tensors | {"position_ids": position_ids}
        if self.rope_positions is not None:
            arguments["position_ids"] = torch.cat([position_ids[None], self.rope_positions.movedim(-1, 0)])
        kinds = {name: self.modality_ids for name in KINDS if name in names}
        return arguments | kinds  # pyright: ignore[reportReturnType]  # None, the default of forward, without media


def images_of(files: Sequence[Medium], shapes: np.ndarray, where: str) -> MediaRefs | None:
    """The ``MediaRefs`` of a document; None where it has none.

    Args:
        files: of the images.
        shapes: that ``MediaProcessor.place`` gave.
        where: file and row, for messages.
    """
    return MediaRefs(shapes, partial(list, files), where) if len(files) else None


def join_media(media: Sequence[Tensors]) -> Tensors:
    """The tensors of several documents' media, one after the other; images with fewer tiles are padded with zeros."""
    nonempty = [tensors for tensors in media if tensors]
    names = dict.fromkeys(name for tensors in nonempty for name in tensors)
    return {name: _concatenate_padded([tensors[name] for tensors in nonempty if name in tensors]) for name in names}


def _concatenate_padded(tensors: list[Tensor]) -> Tensor:
    """Concatenates along dim 0, after padding the other dims with zeros to the largest size."""
    widest = [max(sizes) for sizes in zip(*(tensor.shape[1:] for tensor in tensors), strict=True)]
    padded = []
    for tensor in tensors:
        padding = tensor.new_zeros(len(tensor), *widest)
        padding[(slice(None), *(slice(size) for size in tensor.shape[1:]))] = tensor
        padded.append(padding)
    return torch.cat(padded if any(list(tensor.shape[1:]) != widest for tensor in tensors) else tensors)
