"""The encoders that make latents and embeddings of the rows of a run, one for each size of images, or their caches."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from sfumato.config.image_data import ImageDataConfig
from sfumato.data.files.bad_rows import BadRows, bad_row_limit
from sfumato.data.images.buckets import Buckets, OneSize
from sfumato.data.images.image_text import ImageTextDataset, PairDataset
from sfumato.data.loader import IndexBatch
from sfumato.data.sounds.sound_text import SoundTextDataset
from sfumato.errors import ConfigError, DataError
from sfumato.models.diffusion.base import DiffusionModel
from sfumato.models.diffusion.encoded import Dataset, EncodedBatch, OnlineEncoder, ReadRows
from sfumato.models.diffusion.encoder_identity import EncoderIdentity, identify_encoders
from sfumato.parallel.mesh import Mesh

if TYPE_CHECKING:
    from sfumato.models.diffusion.latent_cache import LatentCache


class BucketEncoder:
    """Encodes the rows of several buckets with one encoder for each; it is used as a single encoder is."""

    def __init__(self, encoders: dict[int, OnlineEncoder | LatentCache], rows: dict[int, OneSize]) -> None:
        """
        Args:
            encoders: by the number of the bucket.
            rows: the rows of each bucket, by its number.
        """
        self._encoders = encoders
        self._rows = rows
        self._position_of = {
            number: {int(row): position for position, row in enumerate(bucket_rows.indices)}
            for number, bucket_rows in rows.items()
        }

    def batch(self, index_batch: IndexBatch) -> EncodedBatch:
        """Reads and encodes a batch, whose rows all belong to one bucket."""
        return self.encode(self.read(index_batch))

    def read(self, index_batch: IndexBatch) -> tuple[int, ReadRows | EncodedBatch]:
        """The first half of ``batch``: the number of the bucket, and the rows that its encoder has read."""
        number = index_batch.bucket
        position_of = self._position_of[number]
        bucket_batch = replace(index_batch, indices=[position_of[index] for index in index_batch.indices])
        return number, self._encoders[number].read(bucket_batch)

    def encode(self, read: tuple[int, Any]) -> EncodedBatch:
        """The second half of ``batch``."""
        number, rows = read
        return self._encoders[number].encode(rows)


Encoder: TypeAlias = "OnlineEncoder | LatentCache | BucketEncoder"


def check_data_type(model: DiffusionModel, config: ImageDataConfig) -> None:
    """Raises ConfigError where a model that makes videos with sound, or one that makes none, has other data."""
    has_sound = config.data_type == "video_sound_text"
    if model.makes_video_with_sound and not has_sound:
        raise ConfigError(
            f"data.data_type {config.data_type}: {model.pipeline_class} makes videos with sound: take video_sound_text"
        )
    if has_sound and not model.makes_video_with_sound:
        raise ConfigError(
            f"data.data_type video_sound_text: {model.pipeline_class} makes no videos with sound: take image_text, or "
            "another model"
        )


def _say_unread_sources(
    model: DiffusionModel, dataset: Dataset, config: ImageDataConfig, say: Callable[[str], None]
) -> None:
    """Says that the first row has source images, where the model could make its samples from them and does not."""
    if model.takes_image or model.image_family is None or not isinstance(dataset, ImageTextDataset | PairDataset):
        return
    with suppress(DataError):  # a row that is broken is reported when it is read
        if dataset.count_sources(0):
            say(f"column {config.source_image_key!r} is not read: model.from_images true makes samples from it")


def open_encoder(
    dataset: Dataset,
    model: DiffusionModel,
    config: ImageDataConfig,
    mesh: Mesh,
    say: Callable[[str], None],
    watch: Callable[[Iterable[int], int], Iterable[int]],
    buckets: Buckets | None = None,
) -> Encoder:
    """Makes the encoder of a run: a cache where one is configured. Every rank must call it.

    Args:
        dataset: the rows to encode.
        model: encodes them.
        config: the data section.
        mesh: the ranks; the first one makes the cache while the others wait.
        say: prints a line about broken rows.
        watch: see ``open_cache``.
        buckets: the buckets of the rows, if there are any; each has a cache of its own.

    Raises:
        ConfigError: when the model takes no data of this kind.
        DataError: as ``open_cache``.
    """
    check_data_type(model, config)
    _say_unread_sources(model, dataset, config, say)
    if isinstance(dataset, SoundTextDataset):
        dataset.take_format(model.sampling_rate, model.num_channels)
        length = dataset.size[1] / 1000
        say(f"sounds become {length:g} s of {model.sampling_rate:,} Hz, {model.num_channels} channel(s)")
    if model.makes_video_with_sound:
        from sfumato.data.sounds.video_sound import VideoSoundDataset

        assert isinstance(dataset, VideoSoundDataset)  # check_data_type has seen to it
        dataset.take_format(model.encoded_rate, model.num_channels, model.frame_rate)
        seconds = dataset.size[2] / model.frame_rate
        say(
            f"videos are cut to {seconds:.2f} s of {model.frame_rate:g} frames a second, with sound of "
            f"{model.encoded_rate:,} Hz, {model.num_channels} channel(s)"
        )
    bad_rows = BadRows(bad_row_limit(config.max_bad_rows, len(dataset)), say)
    encoders: EncoderIdentity | None = None
    if config.cache_dir is not None:
        encoders = mesh.first(identify_encoders(model) if mesh.is_first else None, "world")

    def open_one(rows: Dataset) -> OnlineEncoder | LatentCache:
        if config.cache_dir is None:
            return OnlineEncoder(rows, model, bad_rows)
        from sfumato.models.diffusion.latent_cache import open_cache

        return open_cache(config.cache_dir, rows, model, bad_rows, watch=watch, encoders=encoders)

    with mesh.first_rank_first() if config.cache_dir is not None else nullcontext():
        if buckets is None:
            return open_one(dataset)
        numbers = np.unique(buckets.numbers).tolist()  # buckets without rows need no encoder
        source_counts = buckets.source_counts or [1] * len(buckets.sizes)
        rows = {
            number: OneSize(
                dataset,  # pyright: ignore[reportArgumentType]
                buckets.sizes[number],
                np.flatnonzero(buckets.numbers == number),
                source_counts[number],
            )
            for number in numbers
        }
        return BucketEncoder({number: open_one(rows[number]) for number in numbers}, rows)
