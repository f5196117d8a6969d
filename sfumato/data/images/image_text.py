"""Datasets of images or videos with captions, and of pairs of a better and a worse one, with random access."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, TypeVar, cast

import numpy as np
import torch

from sfumato.config.image_data import MASK, ImageDataConfig, ImageTextDataConfig, PairDataConfig
from sfumato.config.paths import LONGEST_NAME
from sfumato.data.files.arrow_values import ClassLabelValue, truth_of_class
from sfumato.data.files.bad_rows import bad_row_limit
from sfumato.data.files.file_columns import find_file, find_frames, list_frames
from sfumato.data.files.folders import describe_left_out
from sfumato.data.files.picture_folder import FolderRows, choose_split, describe_unlisted, find_metadata, visible_files
from sfumato.data.files.row_table import FiledRows
from sfumato.data.files.rows import JoinedRows, join_rows, open_rows, text_field
from sfumato.data.images.source_images import count_source_images, find_source_images, read_source_images
from sfumato.data.media.kinds import IMAGE_ENDINGS, VERSION, VIDEO_ENDINGS, File
from sfumato.data.media.pictures import ANIMATION_ENDINGS, Picture, check_fit, fit_image, framing_of, read_image
from sfumato.data.synthetic.glyphs import GlyphDataset, GlyphPairs
from sfumato.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

    from sfumato.data.files.file_rows import FileRows

SHARD_ENDINGS = {".parquet", ".arrow", ".tar", ".jsonl"}
"""Endings of tables; a folder that has some of them, and no pictures beside them, is read as these tables."""

PART_COLUMNS = {
    "offset", "start", "start_time", "start_timestamp", "start_sec", "start_frame", "begin", "frame_idx", "cut",
    "timestamp", "timestamps",
}  # fmt: skip
"""Columns by which tables of videos and sounds say which part of a file is meant: of NeMo, Open-Sora-Plan, Panda-70M,
InternVid and others."""

KEYS = ("image_key", "text_key", "source_image_key")

Item = TypeVar("Item")

SAME_RATIO = 1e-9
"""Aspect ratios whose logarithms differ by no more than this count as equal, so that rounding breaks no tie."""


def nearest_size(height: int, width: int, sizes: Sequence[tuple[int, int]]) -> int:
    """The position of the size whose aspect ratio is nearest to an image's, by the logarithm.

    Among several sizes of this ratio, the largest that the image fills without being enlarged; if there is none, the
    smallest.

    Args:
        height, width: of the image.
        sizes: height and width of each bucket.
    """

    def rank_size(size: tuple[int, int]) -> tuple[float, bool, int, tuple[int, int]]:
        ratio = abs(math.log(size[0] * width / (size[1] * height)))
        is_enlarged = size[0] > height or size[1] > width
        area = size[0] * size[1]
        return round(ratio / SAME_RATIO), is_enlarged, area if is_enlarged else -area, size

    return min(range(len(sizes)), key=lambda number: rank_size(sizes[number]))


class ImageTextDataset:
    """Images or videos with captions from a file or folder, resized to one size."""

    is_paired: ClassVar[bool] = False

    def __init__(self, config: ImageTextDataConfig, rows: FiledRows | None = None) -> None:
        """Opens the source.

        Args:
            config: the data section.
            rows: of the source, where it has been opened; ``PairDataset`` shares them between its two sides.

        Raises:
            DataError: when the source is missing or empty.
        """
        self.config = config
        self.size = config.size
        path = Path(str(config.train_path))
        self._is_folder = path.is_dir()
        self._notes: list[str] = []
        if rows is None and path.is_dir():
            path, self._notes = choose_split(path, self._endings)
        self._path = path
        self.rows: FiledRows
        if rows is not None:
            self.rows = rows
        elif path.is_dir() and not (listed := find_metadata(path)):
            self.rows = FolderRows(path, self._key, config.text_key, self._endings)
            if len(self.rows) == 0 and any(file.suffix in SHARD_ENDINGS for file in visible_files(path)):
                self.rows = open_rows(path, config.text_key, "data.train_path")
                self._notes += describe_left_out(path, "data.train_path")
            elif len(self.rows) == 0:
                raise DataError(f"data.train_path: {path} holds no {self._kind} ({', '.join(sorted(self._endings))})")
        else:
            self._refuse_several_folders(str(config.train_path))
            tables = listed if path.is_dir() else [path]
            self.rows = join_rows([open_rows(table, config.text_key, "data.train_path") for table in tables])

    def _refuse_several_folders(self, paths: str) -> None:
        """Raises DataError for folders of images with commas between, whose captions would be read as tables."""
        folders = [part.strip() for part in paths.split(",") if Path(part.strip()).is_dir()]
        if len(folders) < 2 or Path(paths).exists():
            return
        if any(file.suffix.lower() in self._endings for folder in folders for file in visible_files(Path(folder))):
            raise DataError(
                f"data.train_path {paths}: one folder of {self._kind} is read, and not several: put them, or links to "
                "them, into a folder, and name that"
            )

    @property
    def _key(self) -> str:
        """The column of the image, as the configuration has it."""
        return self.config.image_key

    @property
    def _kind(self) -> str:
        """What the rows hold, for messages."""
        return "images" if self.config.num_frames == 1 else "videos"

    @property
    def _endings(self) -> set[str]:
        return IMAGE_ENDINGS if self.config.num_frames == 1 else ANIMATION_ENDINGS | VIDEO_ENDINGS

    def __len__(self) -> int:
        return len(self.rows)

    def unused_files(self) -> list[str]:
        """Lines about what looks like data and is not used: files of a folder that are in no row, and columns that say
        which part of a video or sound a row means."""
        if isinstance(self.rows, FolderRows):
            return [*self._notes, *self.rows.unused]
        notes = [*self._notes, *self._describe_parts()]
        if not self._path.is_dir():
            return notes
        others = [self.config.source_image_key, *([self.config.mask_key] if self.config.mask_key else [])]
        unlisted = describe_unlisted(self._path, self.rows, lambda row: [self._image_key(row), *others], self._endings)
        return [*notes, *unlisted]

    def _describe_parts(self) -> list[str]:
        """A line about ``PART_COLUMNS`` among the first rows of a table of videos or sounds; none without."""
        first = range(0 if self._endings == IMAGE_ENDINGS else min(len(self.rows), 100))
        columns = {str(column) for index in first for column in self.rows[index]}
        return [
            f"data.train_path: column {column!r} has no effect: each row is read as if it were about the whole file; "
            "where it is about a part, cut that out (ffmpeg -ss -to)"
            for column in sorted(columns)
            if column.casefold() in PART_COLUMNS
        ][:1]

    def describe(self, index: int) -> str:
        """File and row, for messages."""
        return self.rows.describe(index)

    def caption(self, index: int) -> str:
        """Caption of a row. Raises DataError that names the row."""
        return text_field(self.rows[index], self.config.text_key, self.describe(index))

    def file(self, index: int) -> File:
        """The file of a row's image, or its content. Raises DataError when there is none."""
        row = self.rows[index]
        kind = self._kind.removesuffix("s")
        return find_file(row, self._image_key(row), self.rows.folder(index), self.describe(index), kind)

    def files(self, index: int, with_source: bool = False) -> list[File]:
        """All files that the pixels of a row are read from.

        Args:
            index: of the row.
            with_source: whether the source images are added, where the row has some.

        Raises:
            DataError: when a file is missing.
        """
        files = list_frames(self._find(index))
        if self.config.mask_key is not None:
            files.append(self._find_mask(index, self.config.mask_key))
        return files + self.source_files(index) if with_source and self.count_sources(index) else files

    def source_files(self, index: int) -> list[File]:
        """The files of a row's source images. Raises DataError when one is missing, or there are too many."""
        key = self.config.source_image_key
        limit = self.config.max_source_images
        return find_source_images(self.rows[index], key, self.rows.folder(index), self.describe(index), limit)

    def tables(self) -> list[Path]:
        """The files that rows and captions are in; of a folder without a table the images, too."""
        parts = self.rows.parts if isinstance(self.rows, JoinedRows) else [self.rows]
        return [
            path
            for part in parts
            for path in (part.files() if isinstance(part, FolderRows) else [cast("FileRows", part).path])
        ]

    def paths(self, index: int) -> list[str]:
        """Paths that a row may name, existing or not: one for each text of the row that could be a path.

        If one of them appears later, a row that was broken may become whole.
        """
        try:
            texts = [value for value in self.rows[index].values() if isinstance(value, str)]
        except DataError:
            return []
        folder = self.rows.folder(index)
        return [str(folder / text) for text in texts if len(text) < LONGEST_NAME and "\n" not in text]

    def pixels(self, index: int) -> torch.Tensor:
        """``Picture.pixels`` of a row. Raises as ``picture``."""
        return self.picture(index).pixels

    def picture(self, index: int, size: tuple[int, int] | None = None) -> Picture:
        """The image or video of a row, and which part of it is shown.

        Args:
            index: of the row.
            size: height and width that an image is brought to; None takes those of the image's bucket.

        Raises:
            DataError: when a file is missing or broken; it names row and file.
        """
        where = self.describe(index)
        file = self._find(index)
        if self.config.num_frames == 1:
            image = read_image(cast("File", file), where)
            sizes = self.config.sizes
            size = size or sizes[nearest_size(image.height, image.width, sizes)]
            check_fit((image.height, image.width), *size, self.config.crop, where)
            pixels = torch.from_numpy(self._fit_image(image, size)).permute(2, 0, 1).contiguous()
            return Picture(pixels, self._describe_crop(image, size), self._loss_weights(index, image, size))
        from sfumato.data.media.videos import read_frames

        frames = read_frames(file, self.config.num_frames, where)
        video, framing = self._fit_video(frames, where)
        return Picture(video, framing, self._loss_weights(index, frames[0], self.size[:2]))

    def _find(self, index: int) -> File | list[File]:
        """The file of a row's image, or of its video or the images of that. Raises DataError when there is none."""
        find = find_file if self.config.num_frames == 1 else find_frames
        row = self.rows[index]
        return find(row, self._image_key(row), self.rows.folder(index), self.describe(index))

    def _find_mask(self, index: int, key: str) -> File:
        return find_file(self.rows[index], key, self.rows.folder(index), self.describe(index), "mask")

    def _loss_weights(self, index: int, image: Image.Image, size: tuple[int, int]) -> torch.Tensor | None:
        """``Picture.loss_weights`` of a row by its mask, which is brought to a size as its image or first frame is.

        Raises:
            DataError: when it is missing, broken, of another size than the image, or leaves nothing to train on.
        """
        key = self.config.mask_key
        if key is None:
            return None
        from sfumato.data.images.masks import read_mask

        where = self.describe(index)
        mask = read_mask(self._find_mask(index, key), where)
        if mask.size != image.size:
            raise DataError(
                f"{where}: its mask has {mask.height} x {mask.width} pixels (height x width), and its image "
                f"{image.height} x {image.width}"
            )
        inside = torch.from_numpy(self._fit_image(mask, size)).float() / 255
        inside = 1 - inside if self.config.invert_mask else inside
        if self.config.mask_outside == 0 and not inside.any():
            raise DataError(
                f"{where}: nothing of the image lies inside its mask ({key!r}), so that it would teach nothing: mend "
                "the mask, or set data.mask_outside"
            )
        return inside + self.config.mask_outside * (1 - inside)

    def source(self, index: int, pixels: torch.Tensor) -> np.ndarray:
        """The source images of a row, which its image or video is made from.

        Args:
            index: of the row.
            pixels: of the row, to whose size the source is brought. Where a video's row has no source image, it is the
                first frame of these, and with ``data.max_source_images`` of 2 the last one, too.

        Returns:
            uint8 ``[height, width, 3]``, of several images ``[S, height, width, 3]``.

        Raises:
            DataError: when one is missing or broken, or there are too many.
        """
        if pixels.ndim == 4 and not self.count_sources(index):
            frames = pixels.permute(1, 2, 3, 0).numpy()
            return frames[0] if self.config.max_source_images == 1 else frames[[0, -1]]
        size = cast("tuple[int, int]", tuple(pixels.shape[-2:]))
        return read_source_images(self.source_files(index), *size, self.config.crop, self.describe(index))

    def count_sources(self, index: int) -> int:
        """Number of source images that the row names."""
        return count_source_images(self.rows[index], self.config.source_image_key)

    def example_captions(self, count: int) -> list[str]:
        """The first ``count`` captions, for sample grids, without broken rows.

        Raises DataError, which names a row, when more rows are broken than ``data.max_bad_rows`` allows.
        """
        return self._read_examples(count, self.caption)

    def example_edits(self, count: int) -> list[tuple[str, np.ndarray]]:
        """Captions as of ``example_captions``, with their source images as of ``source``."""
        size = self.size[:2]

        def edit(index: int) -> tuple[str, np.ndarray]:
            return self.caption(index), self.source(index, self.picture(index, size).pixels)

        return self._read_examples(count, edit)

    def fingerprint(self) -> str:
        """Identifies the table of images and captions: the source with its size and time, and how it is read.

        Images that a table names are not looked at; ``files`` gives these.
        """
        path = Path(str(self.config.train_path)).resolve()
        keys = self.config.model_dump(include={*KEYS, "height", "width"}) | self._mask_settings
        if self.config.max_source_images > 1:
            keys["max_source_images"] = self.config.max_source_images  # rows with more are broken
        return json.dumps([str(path), len(self), self.rows.fingerprint(), self.settings, keys], sort_keys=True)

    @property
    def settings(self) -> list[object]:
        """How files become pixels, besides their size."""
        masks = self._mask_settings
        return [VERSION, self.config.num_frames, self.config.crop, *([masks] if masks else [])]

    @property
    def _mask_settings(self) -> dict[str, object]:
        """How masks are read; empty without."""
        return {} if self.config.mask_key is None else self.config.model_dump(include=set(MASK))

    def _read_examples(self, count: int, read: Callable[[int], Item]) -> list[Item]:
        """What ``read`` gives for the first ``count`` rows, without broken ones. Raises as ``example_captions``."""
        examples: list[Item] = []
        for index in range(len(self)):
            try:
                examples.append(read(index))
            except DataError:
                if index + 1 - len(examples) > bad_row_limit(self.config.max_bad_rows, len(self)):
                    raise
            if len(examples) == count:
                break
        return examples

    def _image_key(self, row: dict[str, object]) -> str:
        """The column of a row's image."""
        key = self._key
        is_image_folder = key in {"image", "audio"} and key not in row and self._is_folder
        return "file_name" if is_image_folder else key  # the column name of Hugging Face's folders

    def _fit_image(self, image: Image.Image, size: tuple[int, int]) -> np.ndarray:
        return fit_image(image, *size, self.config.crop)

    def _fit_video(self, frames: list[Image.Image], where: str) -> tuple[torch.Tensor, torch.Tensor]:
        """``Picture.pixels`` and ``framing`` of the frames of a video. Raises DataError as ``check_fit``."""
        size = self.size[:2]
        check_fit((frames[0].height, frames[0].width), *size, self.config.crop, where)
        video = torch.from_numpy(np.stack([self._fit_image(frame, size) for frame in frames]))
        return video.permute(3, 0, 1, 2).contiguous(), self._describe_crop(frames[0], size)

    def _describe_crop(self, image: Image.Image, size: tuple[int, int]) -> torch.Tensor:
        return torch.tensor(framing_of((image.height, image.width), *size, self.config.crop), dtype=torch.int32)


def open_image_text(
    config: ImageTextDataConfig, seed: int, say: Callable[[str], None] | None = None
) -> ImageTextDataset | GlyphDataset:
    """The dataset that the configuration describes.

    Args:
        config: the data section.
        seed: of words that are rendered.
        say: is told which files of a folder are not used.

    Raises:
        DataError: when the source is missing.
    """
    if config.data_type == "glyphs":
        return GlyphDataset(config.glyphs, config.height, config.width, seed, config.num_frames)
    dataset = ImageTextDataset(config)
    if say is not None:
        for line in dataset.unused_files():
            say(line)
    return dataset


class PairDataset:
    """Pairs of a better and a worse image or video, from a file or folder, resized to one size; ties are left out.

    Each row has both in columns of its own (``chosen_key``, ``rejected_key``); ``label_key`` may say that the second is
    the better one, or that they are a tie.
    """

    is_paired: ClassVar[bool] = True

    def __init__(self, config: PairDataConfig, option: str, limit: int | None = None) -> None:
        """Opens the source.

        Args:
            config: the data section.
            option: which of its fields holds the path: train_path or eval_path.
            limit: most pairs that are used, from the beginning; None uses all.

        Raises:
            DataError: when it is missing, empty, or holds nothing but ties.
        """
        self.config = config
        self.size = (config.height, config.width, config.num_frames)
        path = Path(getattr(config, option))
        is_held_out = option == "eval_path"
        self.notes: list[str] = []
        """Lines about splits and files that are left out."""
        tables = [path]
        if path.is_dir():
            split, notes = choose_split(path, IMAGE_ENDINGS, is_held_out)
            if listed := find_metadata(split):
                tables, self.notes = listed, notes
            else:
                self.notes = describe_left_out(path, f"data.{option}", is_held_out)
        rows = join_rows([open_rows(table, config.text_key, f"data.{option}", is_held_out) for table in tables])
        shared = {name: getattr(config, name) for name in ImageDataConfig.model_fields}
        shared |= {"data_type": "image_text", "train_path": str(path)}
        keys = (config.chosen_key, config.rejected_key)
        self.sides = [ImageTextDataset(ImageTextDataConfig(**shared, image_key=key), rows) for key in keys]
        _refuse_unread_label(config, rows, option)
        self.labels = [1] * len(rows) if config.label_key is None else rows.column(config.label_key)
        self.indices = [index for index, label in enumerate(self.labels) if not _is_tie(label)][:limit]
        """Rows that are no ties; a broken one is named when it is read."""
        self.num_ties = sum(map(_is_tie, self.labels))
        if not self.indices:
            raise DataError(f"data.{option}: {path} holds nothing but ties in column {config.label_key!r}")

    def __len__(self) -> int:
        return len(self.indices)

    def describe(self, index: int) -> str:
        """File and row, for messages."""
        return self.sides[0].describe(self.indices[index])

    def caption(self, index: int) -> str:
        """Prompt of a pair. Raises DataError that names the row."""
        return self.sides[0].caption(self.indices[index])

    def file(self, index: int) -> File:
        """The file of the image in ``chosen_key``, or its content. Raises DataError when there is none."""
        return self.sides[0].file(self.indices[index])

    def files(self, index: int, with_source: bool = False) -> list[File]:
        """As ``ImageTextDataset.files``, for both images or videos, the better one first."""
        row = self.indices[index]
        better = 0 if self._read_label(index) else 1
        return [*self.sides[better].files(row), *self.sides[1 - better].files(row, with_source)]

    def tables(self) -> list[Path]:
        """As ``ImageTextDataset.tables``."""
        return self.sides[0].tables()

    def paths(self, index: int) -> list[str]:
        """As ``ImageTextDataset.paths``."""
        return self.sides[0].paths(self.indices[index])

    def pixels(self, index: int) -> torch.Tensor:
        """``Picture.pixels`` of both. Raises as ``picture``."""
        return self.picture(index).pixels

    def picture(self, index: int) -> Picture:
        """Both images or videos, the better one first.

        Both are brought to the size of ``chosen_key``'s bucket. Raises DataError that names the row.
        """
        row = self.indices[index]
        label = self._read_label(index)
        where = self.describe(index)
        first = self.sides[0].picture(row)
        second = self.sides[1].picture(row, cast("tuple[int, int]", tuple(first.pixels.shape[-2:])))
        if torch.equal(first.pixels, second.pixels):
            raise DataError(f"{where}: both images are the same")
        pair = [first, second] if label else [second, first]
        return Picture(torch.stack([side.pixels for side in pair]), torch.stack([side.framing for side in pair]))

    def _read_label(self, index: int) -> int:
        """1 where the first side is the better one, else 0. Raises DataError when the label is broken."""
        label = self.labels[self.indices[index]]
        if isinstance(label, DataError):
            raise label
        if isinstance(label, ClassLabelValue):
            return truth_of_class(label, str(self.config.label_key), self.describe(index))
        if label not in (0, 1):
            raise DataError(f"{self.describe(index)}: column {self.config.label_key!r} must be a number, not {label!r}")
        return label

    def source(self, index: int, pixels: torch.Tensor) -> np.ndarray:
        """The source images of both, as in ``ImageTextDataset``; without one, the first frame of the better video."""
        return self.sides[0].source(self.indices[index], pixels[0])

    def count_sources(self, index: int) -> int:
        """Number of source images that the row names."""
        return self.sides[0].count_sources(self.indices[index])

    def example_captions(self, count: int) -> list[str]:
        """As ``ImageTextDataset.example_captions``."""
        return self.sides[0].example_captions(count)

    def example_edits(self, count: int) -> list[tuple[str, np.ndarray]]:
        """As ``ImageTextDataset.example_edits``."""
        return self.sides[0].example_edits(count)

    def fingerprint(self) -> str:
        """Identifies the table of pairs, as ``ImageTextDataset`` does."""
        return json.dumps(["pairs", *(side.fingerprint() for side in self.sides), self.config.label_key, len(self)])

    @property
    def settings(self) -> list[object]:
        """How files become pixels, besides their size."""
        return ["pairs", *self.sides[0].settings]


def open_image_pairs(config: PairDataConfig, seed: int, say: Callable[[str], None]) -> PairDataset | GlyphPairs:
    """The pairs to train on.

    Args:
        config: the data section.
        seed: of words that are rendered.
        say: is told which split is left out, and how many ties there are.

    Raises:
        DataError: when the source is missing, empty, or holds nothing but ties.
    """
    if config.data_type == "glyphs":
        return GlyphPairs(config.glyphs, config.height, config.width, seed, config.num_frames)
    dataset = PairDataset(config, "train_path")
    for note in dataset.notes:
        say(note)
    if dataset.num_ties:
        say(f"{dataset.num_ties} of {len(dataset.labels)} rows of {config.train_path} are ties and are left out")
    return dataset


def open_held_out_pairs(config: PairDataConfig, seed: int, num_rows: int) -> PairDataset | GlyphPairs | None:
    """The first ``num_rows`` pairs to evaluate on; None when there are none. Raises as ``open_image_pairs``."""
    if config.data_type == "glyphs":
        glyphs = config.glyphs.model_copy(update={"num_images": num_rows})
        return GlyphPairs(glyphs, config.height, config.width, seed, config.num_frames, held_out=True)
    return None if config.eval_path is None else PairDataset(config, "eval_path", limit=num_rows)


def _refuse_unread_label(config: PairDataConfig, rows: FiledRows, option: str) -> None:
    """Raises DataError where the columns are Pick-a-Pic's (jpg_0, jpg_1) and no label is read, or that of the other.

    Which image stands in which column says nothing there.
    """
    label = f"label_{config.chosen_key.rpartition('_')[2]}"
    of_pick_a_pic = re.compile(r"label_\d")
    if not of_pick_a_pic.fullmatch(label) or config.label_key == label:
        return
    if config.label_key is not None and not of_pick_a_pic.fullmatch(config.label_key):
        return
    try:
        columns = rows[0].keys()
    except DataError:
        return  # the broken row is named when it is read for training
    if label in columns:
        raise DataError(
            f"data.{option}: column {label!r} says whether the image in {config.chosen_key!r} (data.chosen_key) is the "
            f"better one: set data.label_key {label}"
        )


def _is_tie(label: object) -> bool:
    """Whether a label prefers neither side: null, or a number other than 0 and 1, such as 0.5."""
    if isinstance(label, ClassLabelValue):
        return False  # its number says nothing; ``_read_label`` reads its name
    return label is None or (isinstance(label, float | int) and label not in (0, 1))
