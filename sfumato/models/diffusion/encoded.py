"""Latents and embeddings of rows of images or videos, encoded as they are needed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sfumato.algorithms.device import to_device
from sfumato.config.sections import SOUND
from sfumato.data.files.bad_rows import BadRows
from sfumato.data.images.buckets import OneSize
from sfumato.data.images.image_text import ImageTextDataset, PairDataset
from sfumato.data.loader import IndexBatch
from sfumato.data.media.pictures import Picture, is_enlarged
from sfumato.data.synthetic.glyphs import GlyphDataset
from sfumato.errors import DataError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.conditioning import Conditioning
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
    """B positions in the stream, which key the noise of each sample; broken rows are left out."""
    num_images: int
    """B, where a pair counts as one; 0 if no row could be read: the batch is then a placeholder of one row, since all
    ranks must take part in the step."""
    size: tuple[int, int]
    """Height and width of the images in pixels."""
    framing: torch.Tensor | None = None
    """int32 ``[B, 4]``, of pairs ``[B, 2, 4]``, on the CPU: of each image its height and width before it was scaled,
    and the rows and columns of the scaled image that were cut off at the top and left. None where these are unknown."""
    loss_weights: torch.Tensor | None = None
    """float32 ``[B, h, w]``: weight of each latent pixel in the loss, by the masks of images; None without masks."""

    @property
    def num_sources(self) -> int:
        """Source images of each row, where they are several; else 1."""
        image_latents = self.conditioning.tensors.get("image_latents")
        # of pairs, the latents have one dimension more than those of their source images
        dimensions = self.latents.ndim if self.framing is None else self.latents.ndim - (self.framing.ndim - 2)
        if image_latents is None or image_latents.ndim == dimensions:
            return 1
        return image_latents.shape[1]


@dataclass(frozen=True)
class ReadRows:
    """The rows of a batch that could be read, in CPU memory, so that any thread can make it."""

    index_batch: IndexBatch
    pixels: torch.Tensor | None
    """uint8 ``[B, 3, H, W]``, of videos ``[B, 3, F, H, W]``, of pairs ``[B, 2, ...]``, of sounds int16 ``[B, A, N]``;
    None when none could be read."""
    sample_ids: list[int]
    """B positions in the stream."""
    captions: list[str]
    sources: list[np.ndarray] | None
    """Source images, uint8 ``[H, W, 3]`` or ``[S, H, W, 3]``; None where they were not asked for."""
    broken: list[tuple[str, DataError]]
    """Of each broken row its file and number, and the error."""
    framing: torch.Tensor | None = None
    """See ``EncodedBatch``."""
    loss_weights: torch.Tensor | None = None
    """float32 ``[B, H, W]``, see ``Picture``; None without masks."""
    sounds: torch.Tensor | None = None
    """int16 ``[B, A, N]`` of videos with sound; None for all others."""

    def usable(self, bad_rows: BadRows) -> tuple[torch.Tensor, list[int]] | None:
        """Pixels and sample ids, or None if no row could be read.

        Args:
            bad_rows: records the broken rows, or raises their DataError.
        """
        for location, error in self.broken:
            bad_rows.add(location, error)
        return None if self.pixels is None else (self.pixels, self.sample_ids)


def read_rows(
    dataset: Dataset, index_batch: IndexBatch, with_captions: bool = False, with_sources: bool = False
) -> ReadRows:
    """Reads the images of a batch; broken rows are left out and listed in ``ReadRows.broken``."""
    pictures = []
    rows = ReadRows(index_batch, None, [], [], [] if with_sources else None, [])
    for index, sample_id in zip(index_batch.indices, index_batch.sample_ids, strict=True):
        try:
            picture = dataset.picture(index)
            caption = dataset.caption(index) if with_captions else ""
            source = dataset.source(index, picture.pixels) if with_sources else None
        except DataError as error:
            rows.broken.append((dataset.describe(index), error))
            continue
        pictures.append(picture)
        rows.sample_ids.append(sample_id)
        if with_captions:
            rows.captions.append(caption)
        if source is not None:
            assert rows.sources is not None
            rows.sources.append(source)
    if not pictures:
        return rows
    pixels = torch.stack([picture.pixels for picture in pictures])
    framing = torch.stack([picture.framing for picture in pictures])
    return replace(
        rows,
        pixels=pixels,
        framing=framing,
        loss_weights=stack_loss_weights(pictures),
        sounds=stack_sounds(pictures),
    )


def stack_loss_weights(pictures: Sequence[Picture]) -> torch.Tensor | None:
    """The weights of some pictures' pixels in the loss, float32 ``[B, H, W]``; None where they have none."""
    weights = [picture.loss_weights for picture in pictures if picture.loss_weights is not None]
    return torch.stack(weights) if weights else None


def stack_sounds(pictures: Sequence[Picture]) -> torch.Tensor | None:
    """The sounds of some videos, int16 ``[B, A, N]``; None where they have none."""
    sounds = [picture.sound for picture in pictures if picture.sound is not None]
    return torch.stack(sounds) if sounds else None


def shrink_loss_weights(weights: torch.Tensor | None, latents: torch.Tensor) -> torch.Tensor | None:
    """Weights ``[B, H, W]`` of pixels become those ``[B, h, w]`` of the pixels of latents ``[B, ..., h, w]``: means."""
    if weights is None:
        return None
    weights = to_device(weights, latents.device)[:, None]
    return torch.nn.functional.interpolate(weights, size=latents.shape[-2:], mode="area")[:, 0]


def read_pixels(
    dataset: Dataset, index_batch: IndexBatch, bad_rows: BadRows, captions: list[str] | None = None
) -> tuple[torch.Tensor, list[int]] | None:
    """Reads the pixels and sample ids of a batch; None if no row could be read.

    Args:
        dataset: the data set.
        index_batch: the rows to read.
        bad_rows: records the broken rows, or raises their DataError.
        captions: a list to which the captions of the rows that could be read are appended, if given.
    """
    rows = read_rows(dataset, index_batch, with_captions=captions is not None)
    if captions is not None:
        captions += rows.captions
    return rows.usable(bad_rows)


def read_examples(dataset: Dataset, most: int, bad_rows: BadRows) -> tuple[torch.Tensor, list[str]]:
    """The pixels, uint8 ``[B, 3, H, W]``, and captions of the first images that can be read, of at most ``most`` rows.

    Raises:
        DataError: when none of them can be read.
    """
    first = list(range(min(len(dataset), most)))
    captions: list[str] = []
    examples = read_pixels(dataset, IndexBatch(first, first), bad_rows, captions)
    if examples is None:
        raise DataError(f"none of the first {len(first)} images can be read, from which the run is to begin")
    return examples[0], captions


def embed_nothing(model: DiffusionModel, size: Sequence[int]) -> Conditioning:
    """Makes a conditioning of one row on the empty prompt, and on a black image if the model takes one."""
    return model.encode_prompts([""], images=model.blank_images(1, *size[:2]))


class OnlineEncoder:
    """Encodes images and captions when a batch asks for them."""

    def __init__(self, dataset: Dataset, model: DiffusionModel, bad_rows: BadRows) -> None:
        self.dataset = dataset
        self.model = model
        self.bad_rows = bad_rows
        self.size = dataset.size[:2]
        self._num_read = 0
        self._num_enlarged = 0
        self._num_cut = 0

    def batch(self, index_batch: IndexBatch) -> EncodedBatch:
        """Reads and encodes a batch, without its broken rows."""
        return self.encode(self.read(index_batch))

    def read(self, index_batch: IndexBatch) -> ReadRows:
        """The first half of ``batch``: decodes pictures, in any thread."""
        return read_rows(self.dataset, index_batch, with_captions=True, with_sources=self.model.takes_image)

    def encode(self, read: ReadRows) -> EncodedBatch:
        """The second half of ``batch``, on the model's device."""
        index_batch = read.index_batch
        rows = read.usable(self.bad_rows)
        self.model.forget_prompts()  # captions rarely repeat; the memory would grow with the data
        if rows is None:
            latents = placeholder_latents(self.dataset, self.model)[None]
            nothing = embed_nothing(self.model, self.dataset.size)
            framing = placeholder_framing(self.dataset)[None]
            return EncodedBatch(latents, nothing, index_batch.sample_ids[:1], 0, self.size, framing)
        pixels, sample_ids = rows
        self._count_enlarged(read)
        conditioning = self.model.encode_prompts(read.captions, images=read.sources)
        latents = encode_rows(self.dataset, self.model, pixels, read.sounds)
        loss_weights = shrink_loss_weights(read.loss_weights, latents)
        is_finite = finite_rows(latents, *conditioning.tensors.values())
        if not is_finite.all():
            batch = EncodedBatch(latents, conditioning, sample_ids, 0, self.size, read.framing, loss_weights)
            return self._drop_rows(batch, index_batch, is_finite.tolist())
        return EncodedBatch(latents, conditioning, sample_ids, len(sample_ids), self.size, read.framing, loss_weights)

    def _count_enlarged(self, read: ReadRows) -> None:
        """Reports how many pictures were enlarged so far, whenever their number reaches a further power of two."""
        assert read.framing is not None
        num_before = self._num_enlarged
        enlarged = is_enlarged(read.framing, self.size)
        self._num_read += enlarged.numel()
        self._num_enlarged += int(enlarged.sum())
        if self._num_enlarged.bit_length() > num_before.bit_length():
            self.bad_rows.say(describe_enlarged(self._num_enlarged, self._num_read, self.size))
        num_before = self._num_cut
        self._num_cut += count_cut(read.framing, self.size)
        if self._num_cut.bit_length() > num_before.bit_length():
            self.bad_rows.say(describe_cut(self._num_cut, self._num_read, self.size))

    def _drop_rows(self, batch: EncodedBatch, index_batch: IndexBatch, is_finite: list[bool]) -> EncodedBatch:
        """Drops rows that are not finite; if none is left, the first one stays as a placeholder of zeros."""
        index_of = dict(zip(index_batch.sample_ids, index_batch.indices, strict=True))
        for sample_id, is_good in zip(batch.sample_ids, is_finite, strict=True):
            if not is_good:
                index = index_of[sample_id]
                self.bad_rows.add(self.dataset.describe(index), not_finite_error(self.dataset, index))
        finite_indices = [row for row, is_good in enumerate(is_finite) if is_good]
        kept_rows = finite_indices or [0]
        return EncodedBatch(
            batch.latents[kept_rows] if finite_indices else torch.zeros_like(batch.latents[:1]),
            # The placeholder's embeddings may be what was not finite.
            batch.conditioning.rows(kept_rows).blanked(),
            [batch.sample_ids[row] for row in kept_rows],
            len(finite_indices),
            self.size,
            None if batch.framing is None else batch.framing[kept_rows],
            None if batch.loss_weights is None else batch.loss_weights[kept_rows],
        )


def describe_enlarged(enlarged: int, total: int, size: Sequence[int]) -> str:
    """Message about pictures that are smaller than the size to which they are scaled, or sounds that are shorter."""
    if size[0] == SOUND:
        return (
            f"{enlarged:,} of {total:,} sounds so far are shorter than {size[1] / 1000:g} s (data.seconds) and are "
            "filled up with silence"
        )
    return (
        f"{enlarged:,} of {total:,} pictures so far are smaller than {size[0]} x {size[1]} (height x width) and are "
        "enlarged (smaller data.height and data.width, or data.buckets of several sizes, leave them sharp)"
    )


def count_cut(framing: torch.Tensor, size: Sequence[int]) -> int:
    """How many sounds are longer than what is trained on; 0 of pictures. ``framing`` is int ``[..., 4]``."""
    return int((framing[..., 1] > size[1]).sum()) if size[0] == SOUND else 0


def describe_cut(cut: int, total: int, size: Sequence[int]) -> str:
    """Message about sounds that are longer than what is trained on."""
    return f"{cut:,} of {total:,} sounds so far are longer than {size[1] / 1000:g} s (data.seconds) and are cut there"


def not_finite_error(dataset: Dataset, index: int) -> DataError:
    """The error of a row whose latents or embeddings are NaN or infinite."""
    return DataError(
        f"{dataset.describe(index)}: its latents or its caption's embeddings are NaN or infinite: the autoencoder or a "
        "text encoder overflows on it (model.dtype fp32 may mend that)"
    )


def encode_rows(
    dataset: Dataset, model: DiffusionModel, pixels: torch.Tensor, sounds: torch.Tensor | None = None
) -> torch.Tensor:
    """Encodes the pixels, and sounds, of B rows: latents ``[B, *latent_shape]``, of pairs ``[B, 2, *latent_shape]``."""
    if not dataset.is_paired:
        return model.encode_pixels(pixels) if sounds is None else model.encode_pixels(pixels, sounds)
    return model.encode_pixels(pixels.flatten(0, 1)).unflatten(0, (-1, 2))


def placeholder_framing(dataset: Dataset) -> torch.Tensor:
    """The ``Picture.framing`` of a placeholder: an image of the wanted size that is not cropped."""
    framing = torch.tensor([*dataset.size[:2], 0, 0], dtype=torch.int32)
    return framing.expand(2, 4) if dataset.is_paired else framing


def placeholder_latents(dataset: Dataset, model: DiffusionModel) -> torch.Tensor:
    """The latents of a placeholder: zeros."""
    pair = (2,) if dataset.is_paired else ()
    return torch.zeros(*pair, *model.latent_shape(*dataset.size), device=model.device)
