"""Images with captions from .jsonl, .parquet or a folder, read at random and checked row by row."""

from __future__ import annotations

import io
import json
import struct
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from sfumato.config.dit import ImageTextDataConfig
from sfumato.data.glyphs import GlyphDataset
from sfumato.data.rows import Rows, file_fingerprint, open_rows, read_text, text_field
from sfumato.errors import DataError

IMAGE_ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}


class FolderRows:
    """A folder of images, each with its caption in a .txt file of the same name."""

    def __init__(self, folder: Path, image_key: str, text_key: str) -> None:
        self.folder, self.image_key, self.text_key = folder, image_key, text_key
        self._files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in IMAGE_ENDINGS)

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> dict[str, Any]:
        caption = self._files[index].with_suffix(".txt")
        if not caption.is_file():
            raise DataError(
                f"{self.describe(index)}: no caption: {caption} does not exist (and there is no metadata.jsonl)"
            )
        image = str(self._files[index].relative_to(self.folder))
        return {self.image_key: image, self.text_key: read_text(caption).strip()}

    def describe(self, index: int) -> str:
        return str(self._files[index])

    def fingerprint(self) -> str:
        """Every image and every caption there is, with size and time."""
        return file_fingerprint([*self._files, *(each.with_suffix(".txt") for each in self._files)])


class ImageTextDataset:
    """Images with captions from a file or folder, resized to one size."""

    is_paired: ClassVar[bool] = False

    def __init__(self, config: ImageTextDataConfig, rows: Rows | None = None) -> None:
        """Opens the source, or takes ``rows`` of it that are open. Raises DataError when it is missing or empty."""
        self.config = config
        self.size = (config.height, config.width)
        path = Path(str(config.train_path))
        self.root = path if path.is_dir() else path.parent
        if rows is not None:
            self.rows = rows
        elif path.is_dir() and not (path / "metadata.jsonl").is_file():
            self.rows = FolderRows(path, config.image_key, config.text_key)
            if len(self.rows) == 0:
                raise DataError(f"data.train_path: {path} holds no images ({', '.join(sorted(IMAGE_ENDINGS))})")
        else:
            source = path / "metadata.jsonl" if path.is_dir() else path
            self.rows = open_rows(source, config.text_key, "data.train_path")

    def __len__(self) -> int:
        return len(self.rows)

    def describe(self, index: int) -> str:
        """File and row, for messages."""
        return self.rows.describe(index)

    def caption(self, index: int) -> str:
        """Caption of a row. Raises DataError that names the row."""
        return text_field(self.rows[index], self.config.text_key, self.describe(index))

    def pixels(self, index: int) -> torch.Tensor:
        """Image of a row: uint8 ``[3, height, width]``. Raises DataError that names row and file."""
        from PIL import Image, ImageOps

        row, where = self.rows[index], self.describe(index)
        source = self._source(row, where)
        try:
            with Image.open(source) as opened:
                image = _to_rgb(ImageOps.exif_transpose(opened))
        except (OSError, ValueError, SyntaxError, struct.error, Image.DecompressionBombError) as error:
            shown = source if isinstance(source, Path) else "its bytes"
            raise DataError(f"{where}: broken image ({shown}): {error}") from error
        size = (self.config.width, self.config.height)
        if self.config.crop == "center":
            image = ImageOps.fit(image, size, method=Image.Resampling.LANCZOS)
        else:
            image = image.resize(size, Image.Resampling.LANCZOS)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()

    def example_captions(self, count: int) -> list[str]:
        """The first ``count`` captions, for sample grids; broken rows are passed over when some are allowed.

        Raises DataError that names a broken row.
        """
        captions: list[str] = []
        for index in range(len(self)):
            try:
                captions.append(self.caption(index))
            except DataError:
                if index + 1 - len(captions) > self.config.max_bad_rows:
                    raise
            if len(captions) == count:
                break
        return captions

    def fingerprint(self) -> str:
        """Identifies the images, for caches: the source with its size and time, and how it is read.

        Images that a .jsonl file names are not looked at: who replaces one under its name removes the cache.
        """
        path = Path(str(self.config.train_path)).resolve()
        settings = self.config.model_dump(include={"image_key", "text_key", "height", "width", "crop"})
        return json.dumps([str(path), len(self), self.rows.fingerprint(), settings], sort_keys=True)

    def _source(self, row: dict[str, Any], where: str) -> Path | io.BytesIO:
        key = self.config.image_key
        if key == "image" and key not in row and self.root == Path(str(self.config.train_path)):
            key = "file_name"  # the column name of the Hugging Face image folder
        value = row.get(key)
        if isinstance(value, dict):  # the Hugging Face image column: bytes, or a path
            value = value.get("bytes") or value.get("path")
        if isinstance(value, (bytes, bytearray)):
            return io.BytesIO(value)
        if isinstance(value, str) and value:
            path = self.root / value
            if not path.is_file():
                raise DataError(f"{where}: image file not found: {path}")
            return path
        columns = ", ".join(map(str, row))
        raise DataError(f"{where}: column {key!r} holds no image path or bytes; its columns are {columns}")


def _to_rgb(image: Any) -> Any:
    """Eight bits per channel; Pillow alone would clip deeper images to white instead of scaling them."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in {"I", "F"}:
        raise ValueError(f"its pixel format {image.mode!r} is neither 8 nor 16 bits per channel")
    return image.convert("RGB")


def open_image_text(config: ImageTextDataConfig, seed: int) -> ImageTextDataset | GlyphDataset:
    """The dataset that the configuration describes. Raises DataError when its source is missing."""
    if config.data_type == "glyphs":
        return GlyphDataset(config.glyphs, config.height, config.width, seed)
    return ImageTextDataset(config)
