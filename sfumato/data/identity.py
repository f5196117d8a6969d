"""Digests of what data holds, wherever it lies: two that are equal make the same samples."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sfumato.checkpoint.identity import Identity, identify
from sfumato.data.buckets import Buckets
from sfumato.data.file_digests import FileDigests
from sfumato.data.file_rows import FileRows
from sfumato.data.image_text import ImageTextDataset, PairDataset
from sfumato.data.named_files import content_of_named_files
from sfumato.data.picture_folder import FolderRows
from sfumato.data.pictures import File
from sfumato.data.prompts import FileSource, Prompt
from sfumato.data.row_samples import filed_row
from sfumato.data.rows import JoinedRows
from sfumato.data.sources import Sources
from sfumato.data.text import TextTransform, source_of
from sfumato.data.text_prompts import TextPrompt
from sfumato.data.vision import Images
from sfumato.errors import DataError

BLOCK, BLOCKS = 1 << 20, 64
"""Bytes and number of the pieces of a large file that are read, at even distances; smaller files are read whole."""

MODEL_BLOCKS = 16
"""Likewise of files of models."""

SAMPLE, READERS = 2**14, 16
"""Bytes of each of four parts of a picture that are read to tell it from others, and files that are read at a time."""


def identify_text(config: Any, sources: Sources, held_out: Sources | None, transform: TextTransform) -> Identity:
    """The identity of a text task; see ``identify``. Its position counts samples: the size of a step may change."""
    training = "data.train_path" if sources.files is None else "data.train_path (streamed)"
    content = {training: content_of_sources(sources), "data.eval_path": content_of_sources(held_out)}
    own = ", the file of data.data_type" if source_of(config.data.data_type) else ""
    tokens = {f"model.tokenizer_path, data.chat_template{own}": transform.fingerprint}
    if getattr(transform, "has_images", False) and sources.files is None:
        files = [file for rows in sources.rows for file in media_of_rows(rows, transform)]
        tokens |= _content_of_media(config, files, "data.train_path (its images and other media)")
    return identify(config, content | tokens | content_of_named_files(config, content_of_model_file))


def identify_images(
    config: Any, dataset: Any, global_batch_size: int, held_out: Any = None, buckets: Buckets | None = None
) -> Identity:
    """The identity of a task that trains on images; see ``identify``. Buckets make the order depend on more."""
    content = {"data.train_path": content_of_images(dataset), "data.eval_path": content_of_images(held_out)}
    for name, rows in (("data.train_path", dataset), ("data.eval_path", held_out)):
        content |= _content_of_media(config, pictures_of(rows), f"{name} (its images)")
    content |= content_of_named_files(config, content_of_model_file)
    numbers = {"train.global_batch_size": global_batch_size}
    if buckets is not None:
        content["data.buckets of the images"] = buckets.digest
        numbers["train.micro_batch_size (data.buckets)"] = config.train.micro_batch_size
    return identify(config, content, numbers)


def identify_prompts(config: Any, prompts: list[Prompt], eval_prompts: list[Prompt]) -> Identity:
    """The identity of a task of RL; see ``identify``."""
    content = {"data.train_path": content_of_prompts(prompts), "data.eval_path": content_of_prompts(eval_prompts)}
    content |= _content_of_media(config, _sources_of(prompts), "data.train_path (its source images)")
    content |= content_of_named_files(config, content_of_model_file)
    return identify(config, content, {"rollout.num_prompts": config.rollout.num_prompts, "rollout.n": config.rollout.n})


def identify_text_prompts(config: Any, prompts: list[TextPrompt], eval_prompts: list[TextPrompt]) -> Identity:
    """The identity of a task of RL of language models; see ``identify``. Prompts count with their tokens."""

    def content(some: list[TextPrompt]) -> str:
        return _digest([[prompt.token_ids, prompt.metadata, *_media(prompt.images)] for prompt in some])

    names = {"data.train_path": content(prompts), "data.eval_path": content(eval_prompts)}
    media = [file for prompt in prompts for file in _files_of(prompt.images)]
    names |= _content_of_media(config, media, "data.train_path (its images and other media)")
    names |= content_of_named_files(config, content_of_model_file)
    sizes = ("num_prompts", "n", "over_sampling_batch_size", "partial_rollout")
    return identify(config, names, {f"rollout.{name}": getattr(config.rollout, name) for name in sizes})


def _media(images: Images | None) -> list[Any]:
    """Of images what they hold, or the names and sizes of their files; what these hold is compared beside it."""
    return [
        [str(file), file.stat().st_size] if isinstance(file, Path) else hashlib.blake2b(file).hexdigest()
        for file in _files_of(images)
    ]


def _files_of(images: Images | None) -> list[File]:
    return [getattr(each, "file", each) for each in ([] if images is None else images.find())]


def _sources_of(prompts: list[Prompt]) -> list[File]:
    """Files of source images; those that are missing are named later, where the model takes some."""
    files: list[File] = []
    for prompt in prompts:
        if isinstance(prompt.source, FileSource):
            with contextlib.suppress(DataError):
                files.append(prompt.source.file())
    return files


def pictures_of(dataset: Any) -> list[File]:
    """The files that rows of images name; empty where the table holds the images itself. Broken rows are left out."""
    if not isinstance(dataset, ImageTextDataset | PairDataset):
        return []
    if isinstance(dataset, ImageTextDataset) and isinstance(dataset.rows, FolderRows):
        return dataset.rows.files()
    files: list[File] = []
    for index in range(len(dataset)):
        try:
            row = dataset.files(index, with_source=True)
        except DataError:
            continue
        if any(isinstance(file, bytes) for file in row):
            return []  # the content of the table is compared
        files += row
    return files


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


def _content_of_media(config: Any, files: Iterable[File], field: str) -> dict[str, str]:
    """The digest of files in their order; of nothing where there are none.

    What is in them is remembered in the run folder, by path, size and times, so that a resume reads none again that
    stayed.
    """
    paths = [file for file in files if isinstance(file, Path)]
    if not paths:
        return {}
    digests = FileDigests(Path(config.train.output_dir) / "files.npy", sampled_digest)

    def digest(path: Path) -> bytes:
        try:
            return digests[path]
        except OSError:  # a broken row, which is named when it is read
            return b""

    with ThreadPoolExecutor(READERS) as pool:
        content = b"".join(pool.map(digest, paths))
    digests.save()
    return {field: hashlib.blake2b(content, digest_size=20).hexdigest()}


def sampled_digest(path: Path) -> bytes:
    """16 bytes for the size of a file and its bytes, of one of more than ``4 * SAMPLE`` a part at even distances."""
    size, digest = path.stat().st_size, hashlib.blake2b(digest_size=16)
    digest.update(str(size).encode())
    with path.open("rb") as file:
        for number in range(4):
            file.seek(max(size - SAMPLE, 0) * number // 3 if size > 4 * SAMPLE else SAMPLE * number)
            digest.update(file.read(SAMPLE))
    return digest.digest()


def content_of_sources(sources: Sources | None) -> str:
    """The digest of text: the sources with their mixture.

    Of files that are streamed, all sizes, and as much of their bytes as is read of one file otherwise.
    """
    if sources is None:
        return _digest(["nothing"])
    if sources.files is not None:
        files = [file.path for files in sources.files for file in files]
        every, blocks = -(-len(files) // BLOCKS), max(BLOCKS // len(files), 1)
        sizes = [path.stat().st_size for path in files]
        return _digest(
            [sources.names, sources.mixing, sizes, *(content_of_file(path, blocks) for path in files[::every])]
        )
    return _digest([sources.names, sources.mixing, *map(_rows, sources.rows)])


def content_of_images(dataset: Any) -> str:
    """The digest of images or pairs of them: of tables their files, of a folder the names and sizes of all files.

    Images that a table names are not looked at.
    """
    if dataset is None:
        return _digest(["nothing"])
    if isinstance(dataset, ImageTextDataset):
        return _digest(["images", len(dataset), _rows(dataset.rows)])
    sides = getattr(dataset, "sides", None)
    if sides is not None:
        return _digest(["pairs", len(dataset), *(_rows(side.rows) for side in sides[:1])])
    return _digest("made in code")


def content_of_prompts(prompts: Iterable[Prompt]) -> str:
    """The digest of prompts: their texts and metadata in order."""
    return _digest([[prompt.text, prompt.metadata] for prompt in prompts])


def content_of_file(path: Path, blocks: int | None = None) -> str:
    """The digest of a file: its size, and its bytes, of a large one ``blocks`` (``BLOCKS``) at even distances."""
    size, digest, blocks = path.stat().st_size, hashlib.blake2b(digest_size=20), blocks or BLOCKS
    digest.update(str(size).encode())
    with path.open("rb") as file:
        if size <= BLOCK * blocks:
            digest.update(file.read())
        else:
            for number in range(blocks):
                file.seek((size - BLOCK) * number // max(blocks - 1, 1))
                digest.update(file.read(BLOCK))
    return digest.hexdigest()


def content_of_model_file(path: Path) -> str:
    """The digest of a file among weights, of which training changes every part."""
    return content_of_file(path, MODEL_BLOCKS)


def _rows(rows: Any) -> Any:
    if isinstance(rows, JoinedRows):
        return [_rows(part) for part in rows.parts]
    if isinstance(rows, FileRows):
        return content_of_file(rows.path)
    if isinstance(rows, FolderRows):
        return [[str(path.relative_to(rows.root)), path.stat().st_size] for path in rows.files()]
    return "made in code"  # as the configuration says


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=repr)
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()
