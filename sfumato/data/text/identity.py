"""What a resumed run must find unchanged about its text data."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from sfumato.data.files.named_files import content_of_named_files
from sfumato.data.files.row_table import read_row_with_folder
from sfumato.data.files.sources import Sources
from sfumato.data.identity import BLOCKS, content_of_file, content_of_media, content_of_model_file, digest_value
from sfumato.data.media.kinds import File
from sfumato.data.row_identity import digest_rows
from sfumato.data.text.format import MediaTransform, TextTransform, has_media, source_of
from sfumato.errors import DataError
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.identity import Identity, identify

if TYPE_CHECKING:
    from sfumato.data.files.row_table import RowTable
    from sfumato.data.files.rows import RowFile


def identify_text(
    config: Any,
    sources: Sources,
    held_out: Sources | None,
    transform: TextTransform,
    mesh: Mesh | None = None,
) -> Identity:
    """The identity of a text task; see ``identify``.

    The size of a step is not part of it and may change, since the position in the data counts samples. With a mesh,
    whose every rank must then call it, rank 0 alone reads the files.
    """

    def digests() -> dict[str, str]:
        return _digest_content(config, sources, held_out, transform)

    return identify(config, digests() if mesh is None else mesh.value_of_first(digests))


def _digest_content(
    config: Any, sources: Sources, held_out: Sources | None, transform: TextTransform
) -> dict[str, str]:
    training = "data.train_path" if sources.files is None else "data.train_path (streamed)"
    content = {training: content_of_sources(sources), "data.eval_path": content_of_sources(held_out)}
    source_note = ", the file of data.data_type" if source_of(config.data.data_type) else ""
    tokens = {f"model.tokenizer_path, data.chat_template{source_note}": transform.fingerprint}
    if has_media(transform) and sources.files is None:
        files = [file for rows in sources.rows for file in media_of_rows(rows, transform)]
        tokens |= content_of_media(config, files, "data.train_path (its images and other media)")
    return content | tokens | content_of_named_files(config, content_of_model_file)


def media_of_rows(rows: RowTable, transform: MediaTransform) -> list[File]:
    """The files of the media of all rows; an empty list if a row holds the bytes of a medium itself.

    Broken rows are left out.
    """
    all_files: list[File] = []
    for index in range(len(rows)):
        try:
            media = transform.files(read_row_with_folder(rows, index), rows.describe(index))
        except DataError:
            continue
        row_files = [cast("File", getattr(medium, "file", medium)) for medium in media]
        if any(isinstance(file, bytes) for file in row_files):
            return []
        all_files += row_files
    return all_files


def content_of_sources(sources: Sources | None) -> str:
    """The digest of the rows of sources and of how they are mixed.

    Of streamed files it covers all sizes, and samples of the bytes: of all files together about as many as it would
    read of a single file.
    """
    if sources is None:
        return digest_value(["nothing"])
    if sources.files is not None:
        files = [file for files in sources.files for file in files]
        every = -(-len(files) // BLOCKS)
        blocks = max(BLOCKS // len(files), 1)
        sizes = [file.path.stat().st_size if file.remote is None else file.remote.size for file in files]
        digests = [_digest_streamed(file, blocks) for file in files[::every]]
        mappings = [file.mapping.content for file in files if file.mapping is not None]
        return digest_value([sources.names, sources.mixing, sizes, *digests, *mappings])
    return digest_value([sources.names, sources.mixing, *map(digest_rows, sources.rows)])


def _digest_streamed(file: RowFile, blocks: int) -> str:
    """The digest of samples of a file's bytes; of a file at a URL, which may not be fetched yet, its version."""
    if file.remote is None:
        return content_of_file(file.path, blocks)
    return digest_value([file.remote.shown, file.remote.version])
