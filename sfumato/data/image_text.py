"""Images with captions from .jsonl, .parquet or a folder, read at random and checked row by row."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sfumato.config.dit import ImageTextDataConfig
from sfumato.data.glyphs import GlyphDataset
from sfumato.data.rows import Rows, open_rows, text_field
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
        return {self.image_key: str(self._files[index]), self.text_key: caption.read_text(encoding="utf-8").strip()}

    def describe(self, index: int) -> str:
        return str(self._files[index])


class ImageTextDataset:
    """Images with captions from a file or folder, resized to one size."""

    def __init__(self, config: ImageTextDataConfig) -> None:
        """Opens the source. Raises DataError when it is missing or empty."""
        self.config = config
        path = Path(str(config.train_path))
        self.root = path if path.is_dir() else path.parent
        if path.is_dir() and not (path / "metadata.jsonl").is_file():
            self.rows: Rows = FolderRows(path, config.image_key, config.text_key)
            if len(self.rows) == 0:
                raise DataError(f"data.train_path: {path} holds no images ({', '.join(sorted(IMAGE_ENDINGS))})")
        else:
            self.rows = open_rows(
                path / "metadata.jsonl" if path.is_dir() else path, config.text_key, "data.train_path"
            )
        self.image_key = config.image_key
        if path.is_dir() and config.image_key == "image" and "file_name" in self.rows[0]:
            self.image_key = "file_name"  # the column name of the Hugging Face image folder

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
                image = ImageOps.exif_transpose(opened).convert("RGB")
        except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
            shown = source if isinstance(source, Path) else "its bytes"
            raise DataError(f"{where}: broken image ({shown}): {error}") from error
        size = (self.config.width, self.config.height)
        if self.config.crop == "center":
            image = ImageOps.fit(image, size, method=Image.Resampling.LANCZOS)
        else:
            image = image.resize(size, Image.Resampling.LANCZOS)
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()

    def example_captions(self, count: int) -> list[str]:
        """The first ``count`` captions, for sample grids. Raises DataError that names a broken row."""
        return [self.caption(index) for index in range(min(count, len(self)))]

    def fingerprint(self) -> str:
        """Identifies the images, for caches: the source with its size and time, and how it is read."""
        path = Path(str(self.config.train_path)).resolve()
        stat = path.stat()
        settings = self.config.model_dump(include={"image_key", "text_key", "height", "width", "crop"})
        return f"{path}|{len(self)}|{stat.st_size}|{stat.st_mtime_ns}|{json.dumps(settings, sort_keys=True)}"

    def _source(self, row: dict[str, Any], where: str) -> Path | io.BytesIO:
        value = row.get(self.image_key)
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
        raise DataError(f"{where}: column {self.image_key!r} holds no image path or bytes; its columns are {columns}")


def open_image_text(config: ImageTextDataConfig, seed: int) -> ImageTextDataset | GlyphDataset:
    """The dataset that the configuration describes. Raises DataError when its source is missing."""
    if config.data_type == "glyphs":
        return GlyphDataset(config.glyphs, config.height, config.width, seed)
    return ImageTextDataset(config)
