"""Which latents and embeddings of a cache are those of a data set's rows: keys of what rows are made of, in a file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sfumato.config.writing import replace_file
from sfumato.data.files.file_digests import signature_of
from sfumato.data.files.row_store import RowStore
from sfumato.data.files.stored import BROKEN_ARRAY
from sfumato.errors import DataError
from sfumato.models.diffusion.encoded import Dataset

NOTHING = b"\0" * 16
"""In the place of a key of a row that is broken."""


class RowKeys(NamedTuple):
    """What a row is made of."""

    latents: bytes
    """16 bytes that stand for its picture, video or pair."""
    source: bytes
    """For its source image; empty where the model takes none."""
    caption: str

    @property
    def prompt(self) -> bytes:
        """Key of the embedding of its caption with its source image."""
        return digest_16(self.caption, self.source)

    @property
    def negative(self) -> bytes:
        """Of the empty prompt with its source image."""
        return digest_16("", self.source)

    def as_tuple(self) -> tuple[bytes, bytes, bytes]:
        """All three keys."""
        return self.latents, self.prompt, self.negative


@dataclass
class DatasetRows:
    """Which latents and embeddings are those of the rows of a dataset."""

    latents: list[bytes]
    """Keys of N rows; ``NOTHING`` of those that are broken."""
    prompts: list[bytes]
    negatives: list[bytes]
    """Of the empty prompt with the row's source image; without one, of the empty prompt."""
    nothing: bytes
    """Key of the empty prompt, with a black image where the model takes one."""
    paths: list[str]
    """Files that these follow from, or that were missing."""
    bad_rows: list[tuple[int, str]]

    def save(self, path: Path, signature: str) -> None:
        """Writes them whole or not at all. ``signature`` is of the dataset and its files."""
        header = json.dumps([signature, self.paths, self.bad_rows]).encode("utf-8", "surrogateescape")
        keys = np.array([self.latents, self.prompts, self.negatives], "V16").reshape(3, -1)
        try:
            with replace_file(path) as file:
                np.savez(file, keys=keys, nothing=np.array([self.nothing], "V16"), said=np.frombuffer(header, np.uint8))
        except OSError as error:
            raise DataError(f"data.cache_dir: {path} cannot be written: {error.strerror}") from error


def load_rows(path: Path, dataset: Dataset, latents: RowStore, prompts: RowStore) -> DatasetRows | None:
    """What was written of a dataset, if its files are still those; None where anything has to be looked at anew."""
    try:
        with np.load(path, allow_pickle=False) as content:
            keys, [nothing] = content["keys"].tolist(), content["nothing"].tolist()
            signature, paths, bad_rows = json.loads(content["said"].tobytes().decode("utf-8", "surrogateescape"))
    except (*BROKEN_ARRAY, TypeError, RecursionError):
        return None
    if len(keys[0]) != len(dataset) or signature != f"{dataset.fingerprint()} {signature_of(paths)[0]}":
        return None
    rows = DatasetRows(*keys, nothing, paths, [(index, message) for index, message in bad_rows])
    wanted = [{*rows.latents} - {NOTHING}, {nothing, *rows.prompts, *rows.negatives} - {NOTHING}]
    is_whole = latents.key_set.issuperset(wanted[0]) and prompts.key_set.issuperset(wanted[1])
    return rows if is_whole else None


def keys_of_rows(path: Path) -> set[bytes]:
    """All keys that a file of rows names; none of one that is damaged."""
    try:
        with np.load(path, allow_pickle=False) as content:
            return {key for part in content["keys"].tolist() for key in part} | {*content["nothing"].tolist()}
    except (*BROKEN_ARRAY, TypeError):
        return set()


def digest_16(*parts: Any) -> bytes:
    """16 bytes that stand for bytes and values that print alike only when they are equal."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = part if isinstance(part, bytes) else repr(part).encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()
