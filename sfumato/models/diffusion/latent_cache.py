"""A cache of latents and embeddings on disk, addressed by the contents of pictures and captions.

``cache_dir`` holds

- ``latents_*``: a store (``row_store``) for each autoencoder and size, with digests of pictures as keys;
- ``prompts_*``: a store for each set of text encoders, with digests of captions (and source images) as keys;
- ``rows_*.npz``: for each data set the keys of all its rows, and a signature by which changed files are noticed;
- ``files.npy``: digests of files by path, size and times, so that unchanged files need not be read.

When a picture is replaced, it alone is encoded again. What was encoded before a process was killed stays.
"""

from __future__ import annotations

import fcntl
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sfumato.algorithms.device import to_device
from sfumato.data.files.bad_rows import BadRows
from sfumato.data.files.file_digests import FileDigests, Stat, signature_of, stat_of
from sfumato.data.files.row_store import RowStore, RowWriter
from sfumato.data.files.stored import digest_of, make_cache_folder, open_cache_lock
from sfumato.data.images.buckets import OneSize
from sfumato.data.images.image_text import PairDataset
from sfumato.data.loader import IndexBatch
from sfumato.data.media.kinds import File
from sfumato.data.media.pictures import Picture, is_enlarged
from sfumato.data.synthetic.glyphs import GlyphDataset
from sfumato.errors import DataError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.cached_rows import NOTHING, DatasetRows, RowKeys, digest_16, keys_of_rows, load_rows
from sfumato.models.diffusion.conditioning import Conditioning
from sfumato.models.diffusion.encoded import (
    Dataset,
    EncodedBatch,
    count_cut,
    describe_cut,
    describe_enlarged,
    encode_rows,
    not_finite_error,
    placeholder_framing,
    placeholder_latents,
    shrink_loss_weights,
    stack_loss_weights,
    stack_sounds,
)
from sfumato.models.diffusion.encoder_identity import EncoderIdentity, identify_encoders
from sfumato.parallel.finite import finite_rows

LAYOUT = 2
"""Version of the layout: raise it when rows are stored in another way."""

OLD_LAYOUT = re.compile(r"[0-9a-f]{20}(\.tmp\d+)?")
"""Names of folders of an older layout, which are not used any more."""

UNUSED_BYTES = 2**20
"""Unused rows are reported if they take more bytes than this."""

READERS = 16
"""Files that are hashed at the same time."""

Watch = Callable[[Iterable[int], int], Iterable[int]]
"""Wraps a loop, given its values and their number, to show its progress."""


class LatentCache:
    """The cached latents and embeddings of a dataset, mapped into memory."""

    def __init__(
        self, dataset: Dataset, model: DiffusionModel, latents: RowStore, prompts: RowStore, rows: DatasetRows
    ) -> None:
        """Looks up the rows of a dataset in stores that hold all of them.

        Args:
            dataset: the data set.
            model: the model whose encoders made the latents and embeddings.
            latents: the store of latents.
            prompts: the store of embeddings.
            rows: the keys of the dataset's rows.
        """
        self.device = model.device
        self.size = dataset.size[:2]
        self.bad_rows = rows.bad_rows
        self._latents = latents
        self._prompts = prompts
        # Position in the store of each row of the dataset; negative for broken rows.
        self._latent_of = latents.positions(rows.latents)
        self._prompt_of = prompts.positions(rows.prompts)
        self._negative_of = prompts.positions(rows.negatives)
        self._own_negative = model.takes_image
        self._nothing = int(prompts.positions([rows.nothing])[0])
        stored_latents = latents.tensors.get("latents")
        empty = (
            placeholder_latents(dataset, model).cpu() if stored_latents is None else torch.zeros_like(stored_latents[0])
        )
        self._placeholder = empty[None], placeholder_framing(dataset)[None]

    def __len__(self) -> int:
        return len(self._latent_of)

    @property
    def framing(self) -> torch.Tensor:
        """``EncodedBatch.framing`` of all rows that could be read."""
        rows = self._latent_of[self._latent_of >= 0]
        return self._latents.tensors["framing"][torch.from_numpy(rows)] if len(rows) else self._placeholder[1][:0]

    def batch(self, index_batch: IndexBatch) -> EncodedBatch:
        """The rows of a batch that were not broken when the cache was made. Raises DataError if they are not finite."""
        return self.encode(self.read(index_batch))

    def read(self, index_batch: IndexBatch) -> EncodedBatch:
        """The first half of ``batch``: gathers rows in CPU memory, in any thread."""
        usable = [position for position, index in enumerate(index_batch.indices) if self._latent_of[index] >= 0]
        rows = np.array([index_batch.indices[position] for position in usable], np.int64)
        if usable:
            latent_of = torch.from_numpy(self._latent_of[rows])
            latents = self._latents.tensors["latents"][latent_of]
            framing = self._latents.tensors["framing"][latent_of]
            stored_weights = self._latents.tensors.get("loss_weights")
            loss_weights = None if stored_weights is None else stored_weights[latent_of]
            prompt_of = self._prompt_of[rows]
            negative_of = self._negative_of[rows]
        else:  # a placeholder: zeros with the empty prompt
            latents, framing = self._placeholder
            loss_weights = None
            prompt_of = negative_of = np.array([self._nothing])
        conditioning = Conditioning(
            {name: tensor[torch.from_numpy(prompt_of)] for name, tensor in self._prompts.tensors.items()},
            {
                name: tensor[torch.from_numpy(negative_of if self._own_negative else np.array([self._nothing]))]
                for name, tensor in self._prompts.tensors.items()
            },
            self._own_negative,
        )
        if not finite_rows(latents, *conditioning.tensors.values()).all():  # before the copy to the device
            raise DataError(
                f"damaged latent cache: {self._latents.folder} or {self._prompts.folder} holds NaN or infinite values; "
                "delete its folder"
            )
        sample_ids = [index_batch.sample_ids[position] for position in usable or [0]]
        return EncodedBatch(latents, conditioning, sample_ids, len(usable), self.size, framing, loss_weights)

    def encode(self, read: EncodedBatch) -> EncodedBatch:
        """The second half of ``batch``: copies the tensors to the device."""
        latents = to_device(read.latents, self.device)
        conditioning = read.conditioning.to(self.device)
        weights = None if read.loss_weights is None else to_device(read.loss_weights, self.device)
        return replace(read, latents=latents, conditioning=conditioning, loss_weights=weights)


def open_cache(
    cache_dir: str | Path,
    dataset: Dataset,
    model: DiffusionModel,
    bad_rows: BadRows,
    batch_size: int | None = None,
    watch: Watch | None = None,
    encoders: EncoderIdentity | None = None,
) -> LatentCache:
    """Opens the cache of a dataset and a model; pictures and captions that it lacks are encoded first.

    If another process is encoding into the same folder, this one waits for it.

    Args:
        cache_dir: folder of all caches.
        dataset: the rows to encode.
        model: encodes them.
        bad_rows: records broken rows.
        batch_size: images or videos encoded together; None is 64 frames. What was encoded is on disk after each batch.
        watch: wraps the loop over batches (given the batches' starts and their number), for a progress bar.
        encoders: the result of ``identify_encoders``, so that it is computed only once for several caches.

    Raises:
        DataError: when more rows are broken than are allowed, whether now or when the cache was made.
    """
    folder = Path(cache_dir)
    make_cache_folder(folder)
    encoders = encoders or identify_encoders(model)
    size = [*dataset.size[:2]]
    settings = [] if isinstance(dataset, GlyphDataset) else dataset.settings
    latents = folder / f"latents_{digest_of([LAYOUT, encoders.latents, settings, size])}"
    # Rows of a store have one shape, which the number of source images is part of.
    several = [num_sources] if (num_sources := _num_sources(dataset)) > 1 else []
    images = [settings, size, *several] if model.takes_image else []
    prompts = folder / f"prompts_{digest_of([LAYOUT, encoders.prompts, images])}"
    rows_file = folder / f"rows_{digest_of([_identify_dataset(dataset), latents.name, prompts.name])}.npz"
    batch_size = batch_size or max(64 // dataset.size[2], 1)
    stores, rows = _open_stores(latents, prompts, rows_file, dataset)
    if rows is None:  # a complete cache is read without the lock, even while another process adds to it
        with _hold_lock(folder):
            stores, rows = _open_stores(latents, prompts, rows_file, dataset)
            if rows is None:  # still incomplete after waiting for the lock
                rows = _Builder(dataset, model, bad_rows, *stores).build(rows_file, batch_size, watch)
                stores, _ = _open_stores(latents, prompts, rows_file, dataset)
            _report_unused(folder, stores, bad_rows.say)
    cache = LatentCache(dataset, model, *stores, rows)
    for index, message in cache.bad_rows:
        bad_rows.add(dataset.describe(index), DataError(message))
    enlarged = int(is_enlarged(cache.framing, dataset.size).sum())
    if enlarged:
        bad_rows.say(describe_enlarged(enlarged, cache.framing[..., 0].numel(), dataset.size))
    if cut := count_cut(cache.framing, dataset.size):
        bad_rows.say(describe_cut(cut, cache.framing[..., 0].numel(), dataset.size))
    return cache


def _open_stores(
    latents: Path, prompts: Path, rows_file: Path, dataset: Dataset
) -> tuple[tuple[RowStore, RowStore], DatasetRows | None]:
    """Opens both stores, and reads the keys of a dataset's rows; None if these are not complete and up to date."""
    stores = RowStore(latents, "latent cache"), RowStore(prompts, "latent cache")
    return stores, load_rows(rows_file, dataset, *stores)


class _Builder:
    """Encodes the rows of a dataset that the stores lack."""

    def __init__(
        self,
        dataset: Dataset,
        model: DiffusionModel,
        bad_rows: BadRows,
        latents: RowStore,
        prompts: RowStore,
    ) -> None:
        self._dataset = dataset
        self._model = model
        self._bad_rows = bad_rows
        self._digests = FileDigests(latents.folder.parent / "files.npy")
        self._num_before = len(latents)
        self._latents = latents.key_set
        self._prompts = prompts.key_set
        self._latent_writer = RowWriter(latents)
        self._prompt_writer = RowWriter(prompts)
        self._stats: dict[int, list[tuple[str, Stat | None]]] = {}
        """Size and times of the files of the rows of a batch, taken before they were read."""
        self._num_encoded = 0
        """Pictures, videos or pairs that were encoded by this object."""

    def build(self, rows_file: Path, batch_size: int, watch: Watch | None) -> DatasetRows:
        """Encodes what is missing, and writes the keys of the dataset's rows."""
        dataset = self._dataset
        started = time.time_ns()
        fingerprint = dataset.fingerprint()
        try:
            rows = self._encode_all(batch_size, watch)
        finally:
            self._digests.save()
        signature, is_settled = signature_of(rows.paths, started)
        # A file that was written just before may change again without a new time: then the keys are not reused.
        rows.save(rows_file, f"{fingerprint} {signature}" if is_settled else "")
        if self._num_before:
            self._bad_rows.say(f"{rows_file.parent}: {self._num_encoded:,} of {len(dataset):,} rows were encoded anew")
        return rows

    def _encode_all(self, batch_size: int, watch: Watch | None) -> DatasetRows:
        """Encodes and writes the dataset batch by batch."""
        model = self._model
        dataset = self._dataset
        count = len(self._dataset)
        model.forget_prompts()
        blank = model.blank_images(1, *dataset.size[:2], _num_sources(dataset))
        nothing = RowKeys(NOTHING, b"blank" if blank else b"", "")
        if nothing.prompt not in self._prompts:
            self._embed_prompts({nothing.prompt: ("", blank[0] if blank else None)})
        rows = DatasetRows([NOTHING] * count, [NOTHING] * count, [NOTHING] * count, nothing.prompt, [], [])
        rows.paths += [] if isinstance(dataset, GlyphDataset) else map(str, dataset.tables())
        starts = range(0, count, batch_size)
        with ThreadPoolExecutor(READERS) as pool:
            for start in watch(starts, len(starts)) if watch else starts:
                indices = range(start, min(start + batch_size, count))
                keys = self._read_keys(indices, rows, pool)
                self._encode({index: key for index, key in keys.items() if not self._is_stored(key)}, rows)
                for index, key in keys.items():
                    if self._is_stored(key):
                        rows.latents[index], rows.prompts[index], rows.negatives[index] = key.as_tuple()
        rows.bad_rows.sort()
        rows.paths = [*dict.fromkeys(rows.paths)]
        return rows

    def _is_stored(self, key: RowKeys) -> bool:
        """Whether the stores hold everything of a row."""
        latents, *prompts = key.as_tuple()
        return latents in self._latents and self._prompts.issuperset(prompts)

    def _read_keys(self, indices: range, rows: DatasetRows, pool: ThreadPoolExecutor) -> dict[int, RowKeys]:
        """Keys of some rows, by index; broken rows are recorded and left out."""
        dataset = self._dataset
        with_source = self._model.takes_image
        if isinstance(dataset, GlyphDataset):
            glyph_keys = {index: digest_16(dataset.fingerprint(), index) for index in indices}
            source = {index: key if with_source else b"" for index, key in glyph_keys.items()}
            return {index: RowKeys(key, source[index], dataset.caption(index)) for index, key in glyph_keys.items()}
        files: dict[int, list[File]] = {}
        self._stats = {}
        captions: dict[int, str] = {}
        for index in indices:  # in this thread, since tables need not be safe for several
            try:
                files_of_row = dataset.files(index, with_source)
                captions[index] = dataset.caption(index)
                files[index] = files_of_row  # not before the caption: a row without one must not be among them
                paths = [str(file) for file in files_of_row if isinstance(file, Path)]
                paths += dataset.paths(index) if dataset.size[2] > 1 else []  # folders of frames among them
                self._stats[index] = [(path, stat_of(path)) for path in paths]
                rows.paths += paths
            except DataError as error:
                rows.paths += dataset.paths(index)
                self._leave_out(index, error, rows)
        keys: dict[int, RowKeys] = {}
        for index, digests in zip(files, pool.map(self._digest_row, files.values()), strict=True):
            if isinstance(digests, OSError):
                self._leave_out(index, DataError(f"{dataset.describe(index)}: {digests}"), rows)
                continue
            num_sources = dataset.count_sources(index) if with_source else 0
            pictures = digests[: len(digests) - num_sources]
            keys[index] = RowKeys(
                # one of these files is the source image, if there is any: so the keys of older caches stay valid
                digest_16(len(pictures) + min(num_sources, 1), *pictures),
                _source_key(pictures, digests[len(pictures) :]) if with_source else b"",
                captions[index],
            )
        return keys

    def _digest_row(self, files: list[File]) -> list[bytes] | OSError:
        """Digests of the files of a row; returns an error, since it runs in a thread of a pool."""
        try:
            return [self._digests[file] for file in files]
        except OSError as error:
            return error

    def _encode(self, keys: dict[int, RowKeys], rows: DatasetRows) -> None:
        """Encodes some rows and writes them; a picture or caption that several rows share is encoded once."""
        dataset = self._dataset
        model = self._model
        pictures: dict[int, Picture] = {}
        prompts: dict[bytes, tuple[str, np.ndarray | None]] = {}
        for index, key in keys.items():
            try:
                picture = dataset.picture(index)
                source = dataset.source(index, picture.pixels) if model.takes_image else None
                self._check_unchanged(index)
                pictures[index] = picture
            except DataError as error:
                self._leave_out(index, error, rows)
                continue
            prompts |= {key.prompt: (key.caption, source), key.negative: ("", source)}
        keys = {index: key for index, key in keys.items() if index in pictures}
        bad_keys = self._embed_prompts({key: prompt for key, prompt in prompts.items() if key not in self._prompts})
        # Of several rows with one picture the first is encoded: reversed, since the last one wins in a comprehension.
        index_of_new = {key.latents: index for index, key in reversed(keys.items()) if key.latents not in self._latents}
        index_of_new = dict(reversed(index_of_new.items()))
        if index_of_new:
            new_pictures = [pictures[index] for index in index_of_new.values()]
            pixels = torch.stack([picture.pixels for picture in new_pictures])
            latents = encode_rows(dataset, model, pixels, stack_sounds(new_pictures))
            tensors = {"latents": latents, "framing": torch.stack([picture.framing for picture in new_pictures])}
            loss_weights = shrink_loss_weights(stack_loss_weights(new_pictures), latents)
            tensors |= {} if loss_weights is None else {"loss_weights": loss_weights}
            is_finite = finite_rows(latents).cpu()
            bad_keys |= {key for key, is_good in zip(index_of_new, is_finite.tolist(), strict=True) if not is_good}
            written_keys = [key for key in index_of_new if key not in bad_keys]
            self._latent_writer.append(written_keys, {name: tensor[is_finite] for name, tensor in tensors.items()})
            self._latents.update(written_keys)
            self._num_encoded += len(written_keys)
        for index, key in keys.items():
            if bad_keys.intersection(key.as_tuple()):
                self._leave_out(index, not_finite_error(dataset, index), rows)

    def _check_unchanged(self, index: int) -> None:
        """Raises DataError when a file of a row has changed since the row's key was made."""
        for path, stat in self._stats.get(index, []):
            if stat_of(path) != stat:
                raise DataError(f"{self._dataset.describe(index)}: {path} changed while it was read: start again")

    def _embed_prompts(self, prompts: dict[bytes, tuple[str, np.ndarray | None]]) -> set[bytes]:
        """Embeds prompts with their source images and writes the embeddings.

        Args:
            prompts: caption and source image by key.

        Returns:
            Keys of the embeddings that are not finite, which are not written.
        """
        if not prompts:
            return set()
        sources = [source for _, source in prompts.values()] if self._model.takes_image else None
        embedded = self._model.encode_prompts([text for text, _ in prompts.values()], False, sources).tensors  # pyright: ignore[reportArgumentType]
        self._model.forget_prompts()
        is_finite = finite_rows(*embedded.values()).cpu()
        written_keys = [key for key, is_good in zip(prompts, is_finite.tolist(), strict=True) if is_good]
        self._prompt_writer.append(written_keys, {name: tensor.cpu()[is_finite] for name, tensor in embedded.items()})
        self._prompts.update(written_keys)
        return {*prompts} - {*written_keys}

    def _leave_out(self, index: int, error: DataError, rows: DatasetRows) -> None:
        """Records a broken row, or raises its error."""
        self._bad_rows.add(self._dataset.describe(index), error)
        rows.bad_rows.append((index, str(error)))


def _num_sources(dataset: Dataset) -> int:
    """Source images of each row of a dataset; rows with several are in a bucket of their own."""
    return dataset.num_sources if isinstance(dataset, OneSize) else 1


def _source_key(pictures: Sequence[bytes], sources: Sequence[bytes]) -> bytes:
    """Key of the source images of a row, of digests of files; a video without any starts from its own first frame."""
    if not sources:
        return digest_16(*pictures)
    return sources[0] if len(sources) == 1 else digest_16(*sources)


def _identify_dataset(dataset: Dataset) -> list[object]:
    """What tells a data set from others of a cache folder, whatever its files contain at the moment."""
    if isinstance(dataset, GlyphDataset):
        return [dataset.fingerprint()]
    if isinstance(dataset, OneSize):
        return [*_identify_dataset(dataset.dataset), dataset.size, *([dataset.num_sources] * (dataset.num_sources > 1))]
    sides = dataset.sides if isinstance(dataset, PairDataset) else [dataset]
    configs = [side.config for side in sides]
    return [[str(Path(str(config.train_path)).resolve()), config.image_key, config.text_key] for config in configs]


def _report_unused(folder: Path, stores: Sequence[RowStore], say: Callable[[str], None]) -> None:
    """Reports how much of a cache folder no data set uses any more, and how to remove it."""
    used: set[bytes] = set()
    for store in stores:
        if len(store) * store.row_bytes < UNUSED_BYTES:
            continue
        # Reading the keys of all data sets takes time, so it is done once, and only for stores that are large enough.
        used = used or {key for path in folder.glob("rows_*.npz") for key in keys_of_rows(path)}
        num_unused = sum(key not in used for key in store.keys.tolist())
        size = num_unused * store.row_bytes
        if size > UNUSED_BYTES:
            say(
                f"{num_unused:,} of {len(store):,} rows in {store.folder} ({size / 2**20:,.0f} MiB) are of pictures or "
                "captions that no data set of this cache has any more: delete the folder to make room; what is needed "
                "is then encoded again"
            )
    old_folders = [path for path in sorted(folder.iterdir()) if path.is_dir() and OLD_LAYOUT.fullmatch(path.name)]
    if old_folders:
        size = sum(file.stat().st_size for path in old_folders for file in path.rglob("*") if file.is_file())
        say(
            f"{folder} holds {len(old_folders)} folders of an older layout ({size / 2**20:,.0f} MiB), which are not "
            f"used: delete them: {', '.join(path.name for path in old_folders[:3])}"
            f"{', ...' if len(old_folders) > 3 else ''}"
        )


@contextmanager
def _hold_lock(folder: Path) -> Iterator[None]:
    """Inside, this process holds the lock of a cache folder, which the system releases if the process is killed."""
    with open_cache_lock(folder / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
