"""What a resume must find unchanged of text."""

from __future__ import annotations

from typing import Any

from sfumato.data.files.named_files import content_of_named_files
from sfumato.data.files.sources import Sources
from sfumato.data.identity import (
    BLOCKS,
    content_of_file,
    content_of_media,
    content_of_model_file,
    digest_rows,
    digest_value,
)
from sfumato.data.media.pictures import File
from sfumato.data.text.format import TextTransform, source_of
from sfumato.data.text.row_samples import filed_row
from sfumato.errors import DataError
from sfumato.tracking.identity import Identity, identify


def identify_text(config: Any, sources: Sources, held_out: Sources | None, transform: TextTransform) -> Identity:
    """The identity of a text task; see ``identify``. Its position counts samples: the size of a step may change."""
    training = "data.train_path" if sources.files is None else "data.train_path (streamed)"
    content = {training: content_of_sources(sources), "data.eval_path": content_of_sources(held_out)}
    own = ", the file of data.data_type" if source_of(config.data.data_type) else ""
    tokens = {f"model.tokenizer_path, data.chat_template{own}": transform.fingerprint}
    if getattr(transform, "has_images", False) and sources.files is None:
        files = [file for rows in sources.rows for file in media_of_rows(rows, transform)]
        tokens |= content_of_media(config, files, "data.train_path (its images and other media)")
    return identify(config, content | tokens | content_of_named_files(config, content_of_model_file))


def media_of_rows(rows: Any, transform: Any) -> list[File]:
    """The files of images and other media of conversations; as of ``pictures_of``."""
    files: list[File] = []
    for index in range(len(rows)):
        try:
            media = transform.files(filed_row(rows, index), rows.describe(index))
        except DataError:
            continue
        row = [getattr(medium, "file", medium) for medium in media]
        if any(isinstance(file, bytes) for file in row):
            return []
        files += row
    return files


def content_of_sources(sources: Sources | None) -> str:
    """The digest of text: the sources with their mixture.

    Of files that are streamed, all sizes, and as much of their bytes as is read of one file otherwise.
    """
    if sources is None:
        return digest_value(["nothing"])
    if sources.files is not None:
        files = [file.path for files in sources.files for file in files]
        every = -(-len(files) // BLOCKS)
        blocks = max(BLOCKS // len(files), 1)
        sizes = [path.stat().st_size for path in files]
        return digest_value(
            [sources.names, sources.mixing, sizes, *(content_of_file(path, blocks) for path in files[::every])]
        )
    return digest_value([sources.names, sources.mixing, *map(digest_rows, sources.rows)])
