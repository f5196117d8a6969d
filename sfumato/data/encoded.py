"""Latents and embeddings of rows of images or videos: encoded as they are needed, or once into a cache on disk."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from sfumato.algorithms.device import to_device
from sfumato.data.bad_rows import BadRows
from sfumato.data.buckets import OneSize
from sfumato.data.glyphs import GlyphDataset
from sfumato.data.image_text import ImageTextDataset, PairDataset
from sfumato.data.loader import IndexBatch
from sfumato.data.stored import MANIFEST, check_file, close_on_disk, make_cache_folder, read_manifest
from sfumato.errors import DataError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.conditioning import Conditioning, image_digest
from sfumato.parallel.finite import finite_rows

Dataset = ImageTextDataset | GlyphDataset | PairDataset | OneSize


@dataclass(frozen=True)
class EncodedBatch:
    """What a flow-matching step trains on."""

    latents: torch.Tensor
    """float32 ``[B, *latent_shape]``; of pairs ``[B, 2, *latent_shape]``."""
    conditioning: Conditioning
    """B rows, with the empty prompt as negative."""
    sample_ids: list[int]
    """B positions in the stream, from which noise is keyed; broken rows are missing."""
    num_images: int
    """B, a pair counting as one; 0 for a placeholder in the place of a batch of which no row could be read: ranks
    compute together."""
    size: tuple[int, int]
    """Height and width of the images in pixels."""
    framing: torch.Tensor | None = None
    """int32 ``[B, 4]``, of pairs ``[B, 2, 4]``, on the CPU: of each image its height and width before it was scaled, and
    the rows and columns of the scaled image that were cut off at the top and left. None where nobody knows them."""


@dataclass(frozen=True)
class ReadRows:
    """What could be read of a batch, in any thread: nothing of it is on a device."""

    index_batch: IndexBatch
    pixels: torch.Tensor | None
    """uint8 ``[B, 3, H, W]``, of videos ``[B, 3, F, H, W]``, of pairs ``[B, 2, ...]``; None when none could be read."""
    sample_ids: list[int]
    """B."""
    captions: list[str]
    sources: list[np.ndarray] | None
    """Source images, uint8 ``[H, W, 3]``; None where they were not asked for."""
    broken: list[tuple[str, DataError]]
    """File and row, and what is wrong."""
    framing: torch.Tensor | None = None
    """See ``EncodedBatch``."""

    def usable(self, bad_rows: BadRows) -> tuple[torch.Tensor, list[int]] | None:
        """Pixels and sample ids, or None. ``bad_rows`` takes note of broken rows, or raises their DataError."""
        for place, error in self.broken:
            bad_rows.add(place, error)
        return None if self.pixels is None else (self.pixels, self.sample_ids)


def read_rows(
    dataset: Dataset, index_batch: IndexBatch, with_captions: bool = False, with_sources: bool = False
) -> ReadRows:
    """Reads the images of a batch; rows that are broken are left out and named."""
    pictures, found = [], ReadRows(index_batch, None, [], [], [] if with_sources else None, [])
    for index, sample_id in zip(index_batch.indices, index_batch.sample_ids, strict=True):
        try:
            picture, caption = dataset.picture(index), dataset.caption(index) if with_captions else ""
            source = dataset.source(index, picture.pixels) if with_sources else None
        except DataError as error:
            found.broken.append((dataset.describe(index), error))
            continue
        pictures.append(picture)
        found.sample_ids.append(sample_id)
        if with_captions:
            found.captions.append(caption)
        if source is not None:
            found.sources.append(source)
    if not pictures:
        return found
    pixels = torch.stack([picture.pixels for picture in pictures])
    return replace(found, pixels=pixels, framing=torch.stack([picture.framing for picture in pictures]))


def read_pixels(
    dataset: Dataset, index_batch: IndexBatch, bad_rows: BadRows, captions: list[str] | None = None
) -> tuple[torch.Tensor, list[int]] | None:
    """What is usable of a batch that is read here and now.

    Args:
        dataset, index_batch: which rows of what.
        bad_rows: takes note of broken rows, or raises their DataError.
        captions: if given, the captions of the rows that could be read are appended to it.
    """
    found = read_rows(dataset, index_batch, with_captions=captions is not None)
    if captions is not None:
        captions += found.captions
    return found.usable(bad_rows)


def embed_nothing(model: DiffusionModel, size: Sequence[int]) -> Conditioning:
    """Conditioning of one row on the empty prompt, and on a black image if the model takes one."""
    return model.encode_prompts([""], images=model.blank_images(1, *size[:2]))


class OnlineEncoder:
    """Encodes images and captions when a batch asks for them."""

    def __init__(self, dataset: Dataset, model: DiffusionModel, bad_rows: BadRows) -> None:
        self.dataset, self.model, self.bad_rows = dataset, model, bad_rows
        self.size = dataset.size[:2]

    def batch(self, index_batch: IndexBatch) -> EncodedBatch:
        """The encoded rows that can be read."""
        return self.encode(self.read(index_batch))

    def read(self, index_batch: IndexBatch) -> ReadRows:
        """The first half of ``batch``: decodes pictures, in any thread."""
        return read_rows(self.dataset, index_batch, with_captions=True, with_sources=self.model.takes_image)

    def encode(self, read: ReadRows) -> EncodedBatch:
        """The second half of ``batch``, on the model's device."""
        index_batch, rows = read.index_batch, read.usable(self.bad_rows)
        self.model.forget_prompts()  # captions rarely repeat; the memory would grow with the data
        if rows is None:
            latents = no_latents(self.dataset, self.model)[None]
            nothing = embed_nothing(self.model, self.dataset.size)
            framing = no_framing(self.dataset)[None]
            return EncodedBatch(latents, nothing, index_batch.sample_ids[:1], 0, self.size, framing)
        pixels, sample_ids = rows
        conditioning = self.model.encode_prompts(read.captions, images=read.sources)
        latents = encode_rows(self.dataset, self.model, pixels)
        is_finite = finite_rows(latents, *conditioning.tensors.values())
        if not is_finite.all():
            found = EncodedBatch(latents, conditioning, sample_ids, 0, self.size, read.framing)
            return self._without(found, index_batch, is_finite.tolist())
        return EncodedBatch(latents, conditioning, sample_ids, len(sample_ids), self.size, read.framing)

    def _without(self, batch: EncodedBatch, index_batch: IndexBatch, is_finite: list[bool]) -> EncodedBatch:
        """The rows that are finite; where none is, the first as a placeholder of zeros."""
        index_of = dict(zip(index_batch.sample_ids, index_batch.indices, strict=True))
        for sample_id, good in zip(batch.sample_ids, is_finite, strict=True):
            if not good:
                index = index_of[sample_id]
                self.bad_rows.add(self.dataset.describe(index), not_finite_error(self.dataset, index))
        rows = [row for row, good in enumerate(is_finite) if good]
        kept = rows or [0]
        return EncodedBatch(
            batch.latents[kept] if rows else torch.zeros_like(batch.latents[:1]),
            batch.conditioning.rows(kept).blanked(),
            [batch.sample_ids[row] for row in kept],
            len(rows),
            self.size,
            None if batch.framing is None else batch.framing[kept],
        )


def not_finite_error(dataset: Dataset, index: int) -> DataError:
    """What is wrong with a row whose latents or embeddings are NaN or infinite."""
    return DataError(
        f"{dataset.describe(index)}: its latents or its caption's embeddings are NaN or infinite: the autoencoder or a "
        "text encoder overflows on it (model.dtype fp32 may mend that)"
    )


def encode_rows(dataset: Dataset, model: DiffusionModel, pixels: torch.Tensor) -> torch.Tensor:
    """Latents ``[B, *latent_shape]``, or ``[B, 2, *latent_shape]`` of pairs, of the pixels of B rows."""
    if not dataset.is_paired:
        return model.encode_pixels(pixels)
    return model.encode_pixels(pixels.flatten(0, 1)).unflatten(0, (-1, 2))


def no_framing(dataset: Dataset) -> torch.Tensor:
    """``Picture.framing`` in the place of that of a row that is broken."""
    framing = torch.tensor([*dataset.size[:2], 0, 0], dtype=torch.int32)
    return framing.expand(2, 4) if dataset.is_paired else framing


def no_latents(dataset: Dataset, model: DiffusionModel) -> torch.Tensor:
    """Zeros in the place of the latents of a row that is broken."""
    pair = (2,) if dataset.is_paired else ()
    return torch.zeros(*pair, *model.latent_shape(*dataset.size), device=model.device)


OF_ROWS = ("latents", "framing", "captions", "negatives")
"""What a cache holds of each row: latents, ``EncodedBatch.framing``, the number of its embedding, and with a source image of its negative."""


class LatentCache:
    """Latents and embeddings as memory-mapped files; each distinct caption, with its source image, is stored once."""

    def __init__(self, folder: Path, device: torch.device, size: tuple[int, int]) -> None:
        """Opens a finished cache of images of a size. Raises DataError when a file is missing or damaged."""
        self.folder, self.device, self.size = folder, device, size
        manifest = read_manifest(folder, "latent cache")
        self.bad_rows: list[tuple[int, str]] = manifest["bad_rows"]
        self._tensors = {name: _map(folder / f"{name}.bin", spec) for name, spec in manifest["tensors"].items()}

    def batch(self, index_batch: IndexBatch) -> EncodedBatch:
        """The rows that could be read when the cache was made. Raises DataError when they are not finite."""
        return self.encode(self.read(index_batch))

    def read(self, index_batch: IndexBatch) -> EncodedBatch:
        """The first half of ``batch``: gathers rows in CPU memory, in any thread."""
        captions = self._tensors["captions"][torch.tensor(index_batch.indices)]
        kept = captions >= 0
        num_images = int(kept.sum())
        if num_images == 0:  # the first row's zeros with the empty prompt
            kept[0], captions[0] = True, 0
        rows = torch.tensor(index_batch.indices)[kept]
        names = [name for name in self._tensors if name not in OF_ROWS]
        stored = {name: self._tensors[name] for name in names}
        own_negative = "negatives" in self._tensors
        negatives = self._tensors["negatives"][rows] if own_negative else slice(1)  # caption 0 is the empty prompt
        conditioning = Conditioning(
            {name: tensor[captions[kept]] for name, tensor in stored.items()},
            {name: tensor[negatives] for name, tensor in stored.items()},
            own_negative,
        )
        sample_ids = [sample_id for sample_id, good in zip(index_batch.sample_ids, kept.tolist(), strict=True) if good]
        latents = self._tensors["latents"][rows]
        if not finite_rows(latents, *conditioning.tensors.values()).all():  # before they are on the device
            raise DataError(f"damaged latent cache: {self.folder} holds NaN or infinite values; delete its folder")
        framing = self._tensors["framing"][rows]
        return EncodedBatch(latents, conditioning, sample_ids, num_images, self.size, framing)

    def encode(self, read: EncodedBatch) -> EncodedBatch:
        """The second half of ``batch``: brings them to the device."""
        latents, conditioning = to_device(read.latents, self.device), read.conditioning.to(self.device)
        return replace(read, latents=latents, conditioning=conditioning)


def open_cache(
    cache_dir: str | Path,
    dataset: Dataset,
    model: DiffusionModel,
    bad_rows: BadRows,
    batch_size: int | None = None,
    watch: Callable[[Iterable[int], int], Iterable[int]] | None = None,
    probe: list[torch.Tensor] | None = None,
) -> LatentCache:
    """Opens the cache of a dataset and a model, making it first if it is not there.

    Args:
        cache_dir: folder of all caches; each (data, model) has its own inside, so a stale one is never used.
        dataset, model: what is encoded, and by what.
        bad_rows: what to do with broken rows.
        batch_size: images or videos encoded together; None is 64 frames.
        watch: wraps the loop over batches (given the batches' starts and their number), for a progress bar.
        probe: what ``probe_encoders`` gave, so that several caches need it only once.

    Raises:
        DataError: for a broken row beyond the limit, also one that was left out when the cache was made.
    """
    make_cache_folder(Path(cache_dir))
    folder = Path(cache_dir) / _fingerprint(dataset, probe_encoders(model) if probe is None else probe)
    if not (folder / MANIFEST).is_file():
        building = folder.with_name(f"{folder.name}.tmp{os.getpid()}")
        shutil.rmtree(building, ignore_errors=True)
        make_cache_folder(building)
        batch_size = batch_size or max(64 // dataset.size[2], 1)
        _build(building, dataset, model, bad_rows, batch_size, watch or (lambda starts, _count: starts))
        shutil.rmtree(folder, ignore_errors=True)
        building.rename(folder)
    cache = LatentCache(folder, model.device, dataset.size[:2])
    for index, message in cache.bad_rows:
        bad_rows.add(dataset.describe(index), DataError(message))
    return cache


def _build(
    folder: Path,
    dataset: Dataset,
    model: DiffusionModel,
    bad_rows: BadRows,
    batch_size: int,
    watch: Callable[[Iterable[int], int], Iterable[int]],
) -> None:
    writer = _Writer(folder)
    model.forget_prompts()
    writer.add({name: tensor[0] for name, tensor in embed_nothing(model, dataset.size).tensors.items()})
    number_of = {("", ""): 0}  # -1 where an embedding is not finite
    starts = range(0, len(dataset), batch_size)
    broken = []
    for start in watch(starts, len(starts)):
        indices = range(start, min(start + batch_size, len(dataset)))
        images, framings, captions, sources = {}, {}, {}, {}
        for index in indices:
            try:
                picture, caption = dataset.picture(index), dataset.caption(index)
                sources[index] = dataset.source(index, picture.pixels) if model.takes_image else None
                images[index], framings[index], captions[index] = *picture, caption
            except DataError as error:
                bad_rows.add(dataset.describe(index), error)
                broken.append((index, str(error)))
        digests = {index: image_digest(sources[index]) for index in images}
        wanted = {(captions[index], digests[index]): sources[index] for index in images}
        wanted |= {("", digests[index]): sources[index] for index in images}  # the empty prompt goes with each image
        new = {key: source for key, source in wanted.items() if key not in number_of}
        if new:
            given = list(new.values()) if model.takes_image else None
            embedded = model.encode_prompts([caption for caption, _ in new], False, given).tensors
            is_finite = finite_rows(*embedded.values()).tolist()
            for row, key in enumerate(new):
                number_of[key] = len(number_of) if is_finite[row] else -1
                writer.add({name: tensor[row] for name, tensor in embedded.items()})
            model.forget_prompts()
        latents = encode_rows(dataset, model, torch.stack(list(images.values()))) if images else None
        is_finite = [] if latents is None else finite_rows(latents).tolist()
        empty = no_latents(dataset, model) if latents is None else torch.zeros_like(latents[0])
        position = {index: row for row, index in enumerate(images)}
        for row, index in enumerate(images):
            if not is_finite[row] or min(number_of[text, digests[index]] for text in (captions[index], "")) < 0:
                bad_rows.add(dataset.describe(index), error := not_finite_error(dataset, index))
                broken.append((index, str(error)))
                del position[index]
        for index in indices:
            row = position.get(index)
            number = -1 if row is None else number_of[captions[index], digests[index]]
            writer.add({"captions": torch.tensor(number)})
            if model.takes_image:
                writer.add({"negatives": torch.tensor(0 if row is None else number_of["", digests[index]])})
            writer.add({"framing": no_framing(dataset) if row is None else framings[index]})
            writer.add({"latents": empty if row is None else latents[row]})
    writer.close({"bad_rows": broken})


class _Writer:
    """Appends rows to one file per tensor name."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.specs: dict[str, dict[str, Any]] = {}
        self._files: dict[str, BinaryIO] = {}

    def add(self, row: dict[str, torch.Tensor]) -> None:
        """Appends one row, always of the same shape and dtype, to each of the tensors ``[rows, *shape]``."""
        for name, tensor in row.items():
            tensor = tensor.detach().cpu().contiguous()
            if name not in self._files:
                self._files[name] = (self.folder / f"{name}.bin").open("wb")
                self.specs[name] = {
                    "shape": list(tensor.shape),
                    "dtype": str(tensor.dtype).removeprefix("torch."),
                    "rows": 0,
                }
            self._files[name].write(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
            self.specs[name]["rows"] += 1

    def close(self, extra: dict[str, Any]) -> None:
        """Flushes everything to disk and writes the manifest."""
        for file in self._files.values():
            close_on_disk(file)
        (self.folder / MANIFEST).write_text(json.dumps({"tensors": self.specs, **extra}), encoding="utf-8")


def _map(path: Path, spec: dict[str, Any]) -> torch.Tensor:
    dtype = getattr(torch, spec["dtype"])
    count = math.prod([spec["rows"], *spec["shape"]])
    expected = count * torch.empty((), dtype=dtype).element_size()
    check_file(path, expected, "latent cache")
    flat = torch.from_file(str(path), shared=False, size=count, dtype=dtype)
    return flat.reshape(spec["rows"], *spec["shape"])


def probe_encoders(model: DiffusionModel) -> list[torch.Tensor]:
    """What the encoders make of a fixed image and a fixed prompt, which tells their weights apart."""
    size = model.probe_size
    probe = (torch.arange(3 * size * size) * 37 % 256).to(torch.uint8).reshape(1, 3, size, size)
    image = probe[0].permute(1, 2, 0).numpy()
    embedded = model.encode_prompts(["a probe"], False, [image] if model.takes_image else None)
    return [model.encode_pixels(probe), *embedded.tensors.values()]


def _fingerprint(dataset: Dataset, probe: list[torch.Tensor]) -> str:
    """Identifies data and encoders."""
    digest = hashlib.blake2b(digest_size=10)
    digest.update(dataset.fingerprint().encode())
    for output in probe:
        digest.update(f"{output.dtype}{tuple(output.shape)}".encode())
        digest.update(output.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()
