"""Latents and embeddings on disk: made once of each picture and each caption, by what they hold.

``cache_dir`` holds

- ``latents_*``: a store (``row_store``) for each autoencoder and size, by the content of pictures;
- ``prompts_*``: a store for each set of text encoders, by captions (and the content of source images);
- ``rows_*.npz``: of each data set which row of the stores each of its rows is, with what tells that its files are still
  those that were encoded;
- ``files.npy``: digests of files by path, size and times.

So a picture that is replaced is encoded, and the others are not; what was encoded before a process was killed stays.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from sfumato.algorithms.device import to_device
from sfumato.data.bad_rows import BadRows
from sfumato.data.buckets import OneSize
from sfumato.data.encoded import (
    Dataset,
    EncodedBatch,
    describe_enlarged,
    encode_rows,
    no_framing,
    no_latents,
    not_finite_error,
)
from sfumato.data.encoder_identity import EncoderIdentity, identify_encoders
from sfumato.data.file_digests import FileDigests, Stat, signature_of, stat_of
from sfumato.data.glyphs import GlyphDataset
from sfumato.data.image_text import PairDataset
from sfumato.data.loader import IndexBatch
from sfumato.data.pictures import File, Picture, is_enlarged
from sfumato.data.row_store import RowStore, RowWriter
from sfumato.data.stored import digest_of, make_cache_folder
from sfumato.errors import DataError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.conditioning import Conditioning
from sfumato.parallel.finite import finite_rows

LAYOUT = 2
"""Raise it when rows are stored in another way."""

OLD_LAYOUT = re.compile(r"[0-9a-f]{20}(\.tmp\d+)?")
"""Names of folders of a layout that is not used any more."""

UNUSED_BYTES = 2**20
"""Rows of fewer bytes that nobody uses are not worth a word."""

READERS = 16
"""Files whose content is hashed at a time."""

NOTHING = b"\0" * 16
"""In the place of a key of a row that is broken."""

Watch = Callable[[Iterable[int], int], Iterable[int]]


class LatentCache:
    """The latents and embeddings of a dataset, mapped into memory."""

    def __init__(
        self, dataset: Dataset, model: DiffusionModel, latents: RowStore, prompts: RowStore, rows: DatasetRows
    ) -> None:
        """Finds the rows of a dataset in stores that have all of them."""
        self.device, self.size = model.device, dataset.size[:2]
        self.bad_rows = rows.bad_rows
        self._latents, self._prompts = latents, prompts
        self._latent_of = latents.positions(rows.latents)
        self._prompt_of, self._negative_of = prompts.positions(rows.prompts), prompts.positions(rows.negatives)
        self._own_negative, self._nothing = model.takes_image, prompts.position(rows.nothing)
        known = latents.tensors.get("latents")
        empty = no_latents(dataset, model).cpu() if known is None else torch.zeros_like(known[0])
        self._placeholder = empty[None], no_framing(dataset)[None]

    def __len__(self) -> int:
        return len(self._latent_of)

    @property
    def framing(self) -> torch.Tensor:
        """As of ``EncodedBatch``, of all rows that could be read."""
        rows = self._latent_of[self._latent_of >= 0]
        return self._latents.tensors["framing"][torch.from_numpy(rows)] if len(rows) else self._placeholder[1][:0]

    def batch(self, index_batch: IndexBatch) -> EncodedBatch:
        """The rows that could be read when the cache was made. Raises DataError when they are not finite."""
        return self.encode(self.read(index_batch))

    def read(self, index_batch: IndexBatch) -> EncodedBatch:
        """The first half of ``batch``: gathers rows in CPU memory, in any thread."""
        usable = [place for place, index in enumerate(index_batch.indices) if self._latent_of[index] >= 0]
        rows = np.array([index_batch.indices[place] for place in usable], np.int64)
        if usable:
            latent_of = torch.from_numpy(self._latent_of[rows])
            latents, framing = self._latents.tensors["latents"][latent_of], self._latents.tensors["framing"][latent_of]
            prompt_of, negative_of = self._prompt_of[rows], self._negative_of[rows]
        else:  # zeros with the empty prompt
            latents, framing = self._placeholder
            prompt_of = negative_of = np.array([self._nothing])
        conditioning = Conditioning(
            {name: tensor[torch.from_numpy(prompt_of)] for name, tensor in self._prompts.tensors.items()},
            {
                name: tensor[torch.from_numpy(negative_of if self._own_negative else np.array([self._nothing]))]
                for name, tensor in self._prompts.tensors.items()
            },
            self._own_negative,
        )
        if not finite_rows(latents, *conditioning.tensors.values()).all():  # before they are on the device
            raise DataError(
                f"damaged latent cache: {self._latents.folder} or {self._prompts.folder} holds NaN or infinite values; "
                "delete its folder"
            )
        sample_ids = [index_batch.sample_ids[place] for place in usable or [0]]
        return EncodedBatch(latents, conditioning, sample_ids, len(usable), self.size, framing)

    def encode(self, read: EncodedBatch) -> EncodedBatch:
        """The second half of ``batch``: brings them to the device."""
        latents, conditioning = to_device(read.latents, self.device), read.conditioning.to(self.device)
        return replace(read, latents=latents, conditioning=conditioning)


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
        said = json.dumps([signature, self.paths, self.bad_rows]).encode("utf-8", "surrogateescape")
        keys = np.array([self.latents, self.prompts, self.negatives], "V16").reshape(3, -1)
        part = path.with_name(f"{path.name}.tmp{os.getpid()}")
        try:
            with part.open("wb") as file:
                np.savez(file, keys=keys, nothing=np.array([self.nothing], "V16"), said=np.frombuffer(said, np.uint8))
            part.replace(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise DataError(f"data.cache_dir: {path} cannot be written: {error.strerror}") from error


def open_cache(
    cache_dir: str | Path,
    dataset: Dataset,
    model: DiffusionModel,
    bad_rows: BadRows,
    batch_size: int | None = None,
    watch: Watch | None = None,
    encoders: EncoderIdentity | None = None,
) -> LatentCache:
    """Opens the cache of a dataset and a model, after encoding what it has not of its pictures and captions.

    A process that finds another one at it waits.

    Args:
        cache_dir: folder of all caches.
        dataset, model: what is encoded, and by what.
        bad_rows: what to do with broken rows.
        batch_size: images or videos encoded together; None is 64 frames. What was encoded is on disk after each batch.
        watch: wraps the loop over batches (given the batches' starts and their number), for a progress bar.
        encoders: what ``identify_encoders`` gave, so that several caches need it only once.

    Raises:
        DataError: for a broken row beyond the limit, also one that was left out when the cache was made.
    """
    folder = Path(cache_dir)
    make_cache_folder(folder)
    encoders = encoders or identify_encoders(model)
    size = [*dataset.size[:2]]
    settings = [] if isinstance(dataset, GlyphDataset) else dataset.settings
    latents = folder / f"latents_{digest_of([LAYOUT, encoders.latents, settings, size])}"
    prompts = folder / f"prompts_{digest_of([LAYOUT, encoders.prompts, [settings, size] if model.takes_image else []])}"
    rows_file = folder / f"rows_{digest_of([_place(dataset), latents.name, prompts.name])}.npz"
    with _locked(folder):
        stores = RowStore(latents, "latent cache"), RowStore(prompts, "latent cache")
        rows = _load_rows(rows_file, dataset, *stores)
        if rows is None:
            digests = FileDigests(folder / "files.npy")
            builder = _Builder(dataset, model, bad_rows, *stores, digests)
            before, started = dataset.fingerprint(), time.time_ns()
            try:
                rows = builder.build(batch_size or max(64 // dataset.size[2], 1), watch)
            finally:
                digests.save()
            signature, is_settled = signature_of(rows.paths, started)
            rows.save(rows_file, f"{before} {signature}" if is_settled else "")
            if len(stores[0]):
                bad_rows.say(f"{folder}: {builder.num_encoded:,} of {len(dataset):,} rows were encoded anew")
            stores = RowStore(latents, "latent cache"), RowStore(prompts, "latent cache")
        _say_unused(folder, stores, bad_rows.say)
    cache = LatentCache(dataset, model, *stores, rows)
    for index, message in cache.bad_rows:
        bad_rows.add(dataset.describe(index), DataError(message))
    enlarged = int(is_enlarged(cache.framing, dataset.size).sum())
    if enlarged:
        bad_rows.say(describe_enlarged(enlarged, cache.framing[..., 0].numel(), dataset.size))
    return cache


class _Builder:
    """Encodes what stores have not of a dataset."""

    def __init__(
        self,
        dataset: Dataset,
        model: DiffusionModel,
        bad_rows: BadRows,
        latents: RowStore,
        prompts: RowStore,
        digests: FileDigests,
    ) -> None:
        self._dataset, self._model, self._bad_rows, self._digests = dataset, model, bad_rows, digests
        self._latents, self._prompts = {*latents.keys.tolist()}, {*prompts.keys.tolist()}
        self._latent_writer, self._prompt_writer = RowWriter(latents), RowWriter(prompts)
        self._stats: dict[int, list[tuple[str, Stat | None]]] = {}
        """Files of the rows of a batch, before they were read."""
        self.num_encoded = 0
        """Pictures, videos or pairs that were not there before."""

    def build(self, batch_size: int, watch: Watch | None) -> DatasetRows:
        """Encodes and writes batch by batch."""
        model, dataset, count = self._model, self._dataset, len(self._dataset)
        model.forget_prompts()
        blank = model.blank_images(1, *dataset.size[:2])
        nothing = RowKeys(NOTHING, b"blank" if blank else b"", "")
        if nothing.prompt not in self._prompts:
            self._embed({nothing.prompt: ("", blank[0] if blank else None)})
        rows = DatasetRows([NOTHING] * count, [NOTHING] * count, [NOTHING] * count, nothing.prompt, [], [])
        starts = range(0, count, batch_size)
        with ThreadPoolExecutor(READERS) as pool:
            for start in watch(starts, len(starts)) if watch else starts:
                indices = range(start, min(start + batch_size, count))
                keys = self._read_keys(indices, rows, pool)
                self._encode({index: key for index, key in keys.items() if not self._has(key)}, rows)
                for index, key in keys.items():
                    if self._has(key):
                        rows.latents[index], rows.prompts[index], rows.negatives[index] = key.as_tuple()
        rows.bad_rows.sort()
        return rows

    def _has(self, key: RowKeys) -> bool:
        latents, *prompts = key.as_tuple()
        return latents in self._latents and self._prompts.issuperset(prompts)

    def _read_keys(self, indices: range, rows: DatasetRows, pool: ThreadPoolExecutor) -> dict[int, RowKeys]:
        """Keys of some rows; rows that are broken are missing and noted."""
        dataset, with_source = self._dataset, self._model.takes_image
        if isinstance(dataset, GlyphDataset):
            made = {index: digest_16(dataset.fingerprint(), index) for index in indices}
            source = {index: key if with_source else b"" for index, key in made.items()}
            return {index: RowKeys(key, source[index], dataset.caption(index)) for index, key in made.items()}
        files: dict[int, list[File]] = {}
        self._stats = {}
        captions: dict[int, str] = {}
        for index in indices:  # here, since a table need not know threads
            try:
                files[index], captions[index] = dataset.files(index, with_source), dataset.caption(index)
                paths = [str(file) for file in files[index] if isinstance(file, Path)]
                self._stats[index] = [(path, stat_of(path)) for path in paths]
                rows.paths += paths
            except DataError as error:
                rows.paths += dataset.paths(index)
                self._leave_out(index, error, rows)
        keys: dict[int, RowKeys] = {}
        for (index, found), digests in zip(files.items(), pool.map(self._digest, files.values()), strict=True):
            if isinstance(digests, OSError):
                self._leave_out(index, DataError(f"{dataset.describe(index)}: {digests}"), rows)
                continue
            has_source = with_source and dataset.has_source(index)
            pictures = digests[:-1] if has_source else digests
            source = (digests[-1] if has_source else digest_16(*pictures)) if with_source else b""
            keys[index] = RowKeys(digest_16(len(found), *pictures), source, captions[index])
        return keys

    def _digest(self, files: list[File]) -> list[bytes] | OSError:
        try:
            return [self._digests[file] for file in files]
        except OSError as error:
            return error

    def _encode(self, keys: dict[int, RowKeys], rows: DatasetRows) -> None:
        """Encodes some rows, a picture or caption that several have once, and writes them."""
        dataset, model = self._dataset, self._model
        pictures: dict[int, Picture] = {}
        wanted: dict[bytes, tuple[str, np.ndarray | None]] = {}
        for index, key in keys.items():
            try:
                picture = dataset.picture(index)
                source = dataset.source(index, picture.pixels) if model.takes_image else None
                self._check_stayed(index)
                pictures[index] = picture
            except DataError as error:
                self._leave_out(index, error, rows)
                continue
            wanted |= {key.prompt: (key.caption, source), key.negative: ("", source)}
        keys = {index: key for index, key in keys.items() if index in pictures}
        bad = self._embed({key: prompt for key, prompt in wanted.items() if key not in self._prompts})
        new = {key.latents: index for index, key in reversed(keys.items()) if key.latents not in self._latents}
        new = dict(reversed(new.items()))
        if new:
            latents = encode_rows(dataset, model, torch.stack([pictures[index].pixels for index in new.values()]))
            framing = torch.stack([pictures[index].framing for index in new.values()])
            is_finite = finite_rows(latents).cpu()
            bad |= {key for key, good in zip(new, is_finite.tolist(), strict=True) if not good}
            written = [key for key in new if key not in bad]
            self._latent_writer.append(written, {"latents": latents[is_finite], "framing": framing[is_finite]})
            self._latents.update(written)
            self.num_encoded += len(written)
        for index, key in keys.items():
            if bad.intersection(key.as_tuple()):
                self._leave_out(index, not_finite_error(dataset, index), rows)

    def _check_stayed(self, index: int) -> None:
        """Raises DataError when a file of a row is not the one of which the key was made."""
        for path, stat in self._stats.get(index, []):
            if stat_of(path) != stat:
                raise DataError(f"{self._dataset.describe(index)}: {path} changed while it was read: start again")

    def _embed(self, prompts: dict[bytes, tuple[str, np.ndarray | None]]) -> set[bytes]:
        """Embeds prompts with their source images and writes them. Returns the keys of those that are not finite."""
        if not prompts:
            return set()
        sources = [source for _, source in prompts.values()] if self._model.takes_image else None
        embedded = self._model.encode_prompts([text for text, _ in prompts.values()], False, sources).tensors
        self._model.forget_prompts()
        is_finite = finite_rows(*embedded.values()).cpu()
        written = [key for key, good in zip(prompts, is_finite.tolist(), strict=True) if good]
        self._prompt_writer.append(written, {name: tensor.cpu()[is_finite] for name, tensor in embedded.items()})
        self._prompts.update(written)
        return {*prompts} - {*written}

    def _leave_out(self, index: int, error: DataError, rows: DatasetRows) -> None:
        self._bad_rows.add(self._dataset.describe(index), error)
        rows.bad_rows.append((index, str(error)))


def digest_16(*parts: Any) -> bytes:
    """16 bytes that stand for bytes and values that print alike only when they are equal."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        content = part if isinstance(part, bytes) else repr(part).encode("utf-8", "surrogatepass")
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.digest()


def _load_rows(path: Path, dataset: Dataset, latents: RowStore, prompts: RowStore) -> DatasetRows | None:
    """What was written of a dataset, if its files are still those; None where anything has to be looked at anew."""
    try:
        with np.load(path, allow_pickle=False) as content:
            keys, [nothing] = content["keys"].tolist(), content["nothing"].tolist()
            signature, paths, bad_rows = json.loads(content["said"].tobytes().decode("utf-8", "surrogateescape"))
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return None
    if len(keys[0]) != len(dataset) or signature != f"{dataset.fingerprint()} {signature_of(paths)[0]}":
        return None
    rows = DatasetRows(*keys, nothing, paths, [(index, message) for index, message in bad_rows])
    broken = {index for index, _ in rows.bad_rows}
    is_whole = all(latents.position(key) >= 0 or index in broken for index, key in enumerate(rows.latents))
    is_whole &= all(prompts.position(key) >= 0 for key in {nothing, *rows.prompts, *rows.negatives} - {NOTHING})
    return rows if is_whole else None


def _place(dataset: Dataset) -> list[Any]:
    """Which data set it is among those of a cache folder, whatever its files hold now."""
    if isinstance(dataset, GlyphDataset):
        return [dataset.fingerprint()]
    if isinstance(dataset, OneSize):
        return [*_place(dataset.dataset), dataset.size]
    sides = dataset.sides if isinstance(dataset, PairDataset) else [dataset]
    configs = [side.config for side in sides]
    return [[str(Path(str(config.train_path)).resolve()), config.image_key, config.text_key] for config in configs]


def _say_unused(folder: Path, stores: Sequence[RowStore], say: Callable[[str], None]) -> None:
    """Says how much of a cache folder no data set here uses any more, and how to remove it."""
    used: set[bytes] = set()
    for store in stores:
        if len(store) * store.row_bytes < UNUSED_BYTES:
            continue
        used = used or {key for path in folder.glob("rows_*.npz") for key in _keys_of(path)}
        num_unused = sum(key not in used for key in store.keys.tolist())
        size = num_unused * store.row_bytes
        if size > UNUSED_BYTES:
            say(
                f"{num_unused:,} of {len(store):,} rows in {store.folder} ({size / 2**20:,.0f} MiB) are of pictures or "
                "captions that no data set of this cache has any more: delete the folder to make room; what is needed "
                "is then encoded again"
            )
    others = [path for path in sorted(folder.iterdir()) if path.is_dir() and OLD_LAYOUT.fullmatch(path.name)]
    if others:
        size = sum(file.stat().st_size for path in others for file in path.rglob("*") if file.is_file())
        say(
            f"{folder} holds {len(others)} folders of an older layout ({size / 2**20:,.0f} MiB), which are not used: "
            f"delete them: {', '.join(path.name for path in others[:3])}{', ...' if len(others) > 3 else ''}"
        )


def _keys_of(path: Path) -> set[bytes]:
    try:
        with np.load(path, allow_pickle=False) as content:
            return {key for part in content["keys"].tolist() for key in part} | {*content["nothing"].tolist()}
    except (OSError, ValueError, EOFError, KeyError, zipfile.BadZipFile):
        return set()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Only one process at a time is inside. The system opens the lock when a process is killed."""
    with (folder / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
