"""The documents that texts become: token sequences, and what always stays together in a micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sfumato.data.media.document_media import MediaRefs


@dataclass(frozen=True)
class Document:
    """One sequence of L tokens, which attend only to each other."""

    input_ids: np.ndarray
    """int32 ``[L]``, L is at least 2."""
    loss_mask: np.ndarray
    """bool ``[L]``: whether the token is a target. The first never is, since nothing predicts it."""
    numbers: np.ndarray | None = None
    """float32 ``[L]``: a number that the data gives a token, such as the label of the step that it ends; NaN elsewhere.
    Either all documents of a format have numbers, or none."""
    images: MediaRefs | None = None
    """The media in the document, for formats with media."""
    first_position: int = 0
    """Position of its first token. Above 0, the document continues the first so many tokens of the last document before
    it that begins at 0 (a shared prompt), for models that attend so (``PackedModel.shares_prompts``)."""


@dataclass(frozen=True)
class TextSample:
    """What always goes into the same micro-batch: one document, or a better and a worse one."""

    documents: tuple[Document, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens of all documents."""
        return sum(len(document.input_ids) for document in self.documents)

    @property
    def image_shapes(self) -> list[np.ndarray]:
        """``MediaRefs.shapes`` of the documents that have images."""
        return [document.images.shapes for document in self.documents if document.images is not None]
