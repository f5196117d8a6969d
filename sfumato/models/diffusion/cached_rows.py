"""Which rows of a latent cache belong to the rows of a data set: keys of their contents, kept in a file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sfumato.config.writing import replace_file
from sfumato.data.files.file_digests import signature_of
from sfumato.data.files.row_store import RowStore
from sfumato.data.files.stored import BROKEN_ARRAY
from sfumato.errors import DataError
from sfumato.models.diffusion.encoded import Dataset

NOTHING = b"\0" * 16
"""The key of a broken row, which has no content."""


class RowKeys(NamedTuple):
    """Identifies the contents of one row of a data set."""

    latents: bytes
    """16 bytes that identify its picture, video or pair."""
    source: bytes
    """16 bytes that identify its source image; empty where the model takes none."""
    caption: str

    @property
    def prompt(self) -> bytes:
        """Key of the embedding of its caption with its source image."""
        return digest_16(self.caption, self.source)

    @property
    def negative(self) -> bytes:
        """Key of the embedding of the empty prompt with its source image."""
        return digest_16("", self.source)

    def as_tuple(self) -> tuple[bytes, bytes, bytes]:
        """The keys of its latents, of its prompt and of its negative prompt."""
        return self.latents, self.prompt, self.negative


@dataclass
class DatasetRows:
    """The keys, in a latent cache, of the latents and embeddings of all N rows of a dataset."""

    latents: list[bytes]
    """N keys; ``NOTHING`` for broken rows."""
    prompts: list[bytes]
    negatives: list[bytes]
    """Keys of the empty prompt with each row's source image, or of the empty prompt alone where there is none."""
    nothing: bytes
    """Key of the empty prompt, with a black image where the model takes one."""
    paths: list[str]
    """Files from which the keys were made, and files that were missing."""
    bad_rows: list[tuple[int, str]]
    """Indices of broken rows, with the reason."""

    def save(self, path: Path, signature: str) -> None:
        """Writes the keys atomically.

        Args:
            path: the file.
            signature: identifies the dataset and its files; empty makes ``load_rows`` never accept the file.

        Raises:
            DataError: when the file cannot be written.
        """
        header = json.dumps([signature, self.paths, self.bad_rows]).encode("utf-8", "surrogateescape")
        keys = np.array([self.latents, self.prompts, self.negatives], "V16").reshape(3, -1)
        try:
            with replace_file(path) as file:
                np.savez(file, keys=keys, nothing=np.array([self.nothing], "V16"), said=np.frombuffer(header, np.uint8))
        except OSError as error:
            raise DataError(f"data.cache_dir: {path} cannot be written: {error.strerror}") from error


def load_rows(path: Path, dataset: Dataset, latents: RowStore, prompts: RowStore) -> DatasetRows | None:
    """The keys written for a dataset, if they are still valid; None if its files must be read again.

    They are valid when the dataset and its files have not changed and both stores hold everything that is named.
    """
    try:
        with np.load(path, allow_pickle=False) as content:
            keys = content["keys"].tolist()
            [nothing] = content["nothing"].tolist()
            signature, paths, bad_rows = json.loads(content["said"].tobytes().decode("utf-8", "surrogateescape"))
    except (*BROKEN_ARRAY, TypeError, RecursionError):
        return None
    if len(keys[0]) != len(dataset) or signature != f"{dataset.fingerprint()} {signature_of(paths)[0]}":
        return None
    rows = DatasetRows(*keys, nothing, paths, [(index, message) for index, message in bad_rows])  # pyright: ignore[reportCallIssue]
    latent_keys = {*rows.latents} - {NOTHING}
    prompt_keys = {nothing, *rows.prompts, *rows.negatives} - {NOTHING}
    is_complete = latents.key_set.issuperset(latent_keys) and prompts.key_set.issuperset(prompt_keys)
    return rows if is_complete else None


def keys_of_rows(path: Path) -> set[bytes]:
    """All keys named in a file that ``DatasetRows.save`` wrote; an empty set if the file is damaged."""
    try:
        with np.load(path, allow_pickle=False) as content:
            return {key for column in content["keys"].tolist() for key in column} | {*content["nothing"].tolist()}
    except (*BROKEN_ARRAY, TypeError):
        return set()


def digest_16(*parts: object) -> bytes:
    """A digest of 16 bytes of some values: bytes, or values of which unequal ones have unequal ``repr``."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = part if isinstance(part, bytes) else repr(part).encode("utf-8", "surrogatepass")
        # The length goes first, so that ("ab", "c") and ("a", "bc") have different digests.
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()
