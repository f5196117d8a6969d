"""The identity of images, pairs of images and prompts for images, which a resumed run must find unchanged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, cast

from sfumato.data.files.named_files import content_of_named_files
from sfumato.data.files.picture_folder import FolderRows
from sfumato.data.identity import content_of_media, content_of_model_file, digest_value
from sfumato.data.images.buckets import Buckets
from sfumato.data.images.image_text import ImageTextDataset, PairDataset
from sfumato.data.images.prompts import FileSource, Prompt
from sfumato.data.media.kinds import File
from sfumato.data.row_identity import digest_rows
from sfumato.errors import DataError
from sfumato.tracking.identity import Identity, identify

if TYPE_CHECKING:
    from sfumato.config.rl import RLConfig


def identify_images(
    config: Any,
    dataset: object,
    global_batch_size: int,
    held_out: object = None,
    buckets: Buckets | None = None,
) -> Identity:
    """The identity of a task that trains on images; see ``identify``.

    With buckets, the order of rows also depends on the sizes of the images and on the micro-batch size.
    """
    content = {"data.train_path": content_of_images(dataset), "data.eval_path": content_of_images(held_out)}
    for name, rows in (("data.train_path", dataset), ("data.eval_path", held_out)):
        content |= content_of_media(config, pictures_of(rows), f"{name} (its images)")
    content |= content_of_named_files(config, content_of_model_file)
    numbers = {"train.global_batch_size": global_batch_size}
    if buckets is not None:
        content["data.buckets of the images"] = buckets.digest
        numbers["train.micro_batch_size (data.buckets)"] = config.train.micro_batch_size
    return identify(config, content, numbers)


def identify_prompts(config: RLConfig, prompts: list[Prompt], eval_prompts: list[Prompt]) -> Identity:
    """The identity of a task of RL on images; see ``identify``."""
    content = {"data.train_path": content_of_prompts(prompts), "data.eval_path": content_of_prompts(eval_prompts)}
    content |= content_of_media(config, _sources_of(prompts), "data.train_path (its source images)")
    content |= content_of_named_files(config, content_of_model_file)
    return identify(config, content, {"rollout.num_prompts": config.rollout.num_prompts, "rollout.n": config.rollout.n})


def _sources_of(prompts: list[Prompt]) -> list[File]:
    """The files of source images. Missing ones are left out: they are reported later if the model takes any."""
    files: list[File] = []
    for prompt in prompts:
        if isinstance(prompt.source, FileSource):
            with contextlib.suppress(DataError):
                files += prompt.source.files()
    return files


def pictures_of(dataset: object) -> list[File]:
    """The files that rows of images name, without those of broken rows; empty where the table holds the images."""
    if not isinstance(dataset, ImageTextDataset | PairDataset):
        return []
    if isinstance(dataset, ImageTextDataset) and isinstance(dataset.rows, FolderRows):
        return cast("list[File]", dataset.rows.files())
    files: list[File] = []
    for index in range(len(dataset)):
        try:
            row = dataset.files(index, with_source=True)
        except DataError:
            continue
        if any(isinstance(file, bytes) for file in row):
            return []  # the images are part of the table, whose content is compared anyway
        files += row
    return files


def content_of_images(dataset: Any) -> str:
    """The digest of the rows of images or pairs: of tables their files, of a folder the names and sizes of its files.

    Images that a table names are not read; ``pictures_of`` gives these.
    """
    if dataset is None:
        return digest_value(["nothing"])
    if isinstance(dataset, ImageTextDataset):
        return digest_value(["images", len(dataset), digest_rows(dataset.rows)])
    sides = getattr(dataset, "sides", None)
    if sides is not None:
        return digest_value(["pairs", len(dataset), *(digest_rows(side.rows) for side in sides[:1])])
    return digest_value("made in code")


def content_of_prompts(prompts: Iterable[Prompt]) -> str:
    """The digest of prompts: their texts and metadata in order."""
    return digest_value([[prompt.text, prompt.metadata] for prompt in prompts])
