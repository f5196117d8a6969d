"""Small copies of a run's pictures, made when they are asked for and kept outside of the run folder."""

from __future__ import annotations

import contextlib
import hashlib
import io
import math
import os
import tempfile
import threading
from pathlib import Path

from PIL import Image

from sfumato.config.file_checks import file_problem
from sfumato.config.writing import write_atomically
from sfumato.tracking.samples import BROKEN, FORMATS, MOST_BYTES, MOST_PIXELS

WIDTHS = (64, 128, 256, 512)
"""Widths and heights that are made, at most; others are refused, so that nobody fills the disk with a million sizes."""
MOST_CACHED_BYTES = 2**30
"""Size of the cache, beyond which the copies that were used longest ago are removed."""
TRIM_EVERY = 2000
"""New copies between two looks at the size of the cache."""

_AT_ONCE = threading.BoundedSemaphore(2)
"""Pictures that are decoded at the same time: a large one takes memory."""


class BrokenPictureError(Exception):
    """A picture that cannot be shown, and why."""


class Thumbnails:
    """The cache of small copies. Used by several threads, and by several studios at once.

    Args:
        folder: that is made when the first copy is written. Where it cannot be written nothing is kept, and every copy
            is made anew.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = cache_folder() if folder is None else folder
        self.problem = ""
        """Why copies are not kept; empty while they are."""
        self._num_new = 0

    def get(self, path: Path, width: int) -> bytes:
        """A WebP copy of a picture, at most so many pixels wide and high; of a video its first frame.

        Raises:
            BrokenPictureError: the file is no picture, is damaged, too large or gone.
        """
        try:
            status = path.stat()
        except OSError as error:
            raise BrokenPictureError(f"{path.name} cannot be read: {error.strerror}") from error
        identity = f"{path.resolve()} {status.st_mtime_ns} {status.st_size} {status.st_ino} {width}"
        name = hashlib.blake2b(identity.encode(errors="surrogateescape"), digest_size=16).hexdigest()
        cached = self.folder / name[:2] / f"{name}.webp"
        with contextlib.suppress(OSError):  # not made yet
            content = cached.read_bytes()
            os.utime(cached)
            return content
        with _AT_ONCE:
            content = shrink_picture(path, width)
        self._keep(cached, content)
        return content

    def _keep(self, cached: Path, content: bytes) -> None:
        try:
            cached.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            write_atomically(cached, content)
            self.problem = ""
        except OSError as error:
            self.problem = f"small copies of pictures are not kept in {self.folder}: {error.strerror}"
            return
        self._num_new += 1
        if self._num_new % TRIM_EVERY == 0:
            self.trim(MOST_CACHED_BYTES)

    def trim(self, most_bytes: int) -> None:
        """Removes the copies that were used longest ago, until the rest takes at most so many bytes."""
        files = []
        for path in self.folder.glob("??/*.webp"):
            with contextlib.suppress(OSError):  # another studio has removed it
                status = path.stat()
                files.append((max(status.st_atime, status.st_mtime), status.st_size, path))
        held = sum(size for _, size, _ in files)
        for _, size, path in sorted(files):
            if held <= most_bytes:
                break
            path.unlink(missing_ok=True)
            held -= size


def cache_folder() -> Path:
    """Where small copies are kept: the user's cache, or without a home a new folder that nobody else may enter."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):
        return Path(base) / "sfumato" / "thumbnails"
    try:
        return Path.home() / ".cache" / "sfumato" / "thumbnails"
    except RuntimeError:  # a user without a home
        return Path(tempfile.mkdtemp(prefix="sfumato-thumbnails-"))


def shrink_picture(path: Path, width: int) -> bytes:
    """A WebP copy of a picture, as ``Thumbnails.get`` returns it. Pictures of at most that size keep their pixels."""
    if problem := file_problem(path, MOST_BYTES):
        raise BrokenPictureError(f"{path.name} {problem}")
    try:
        with Image.open(path, formats=FORMATS) as opened:
            if getattr(opened, "n_frames", 1) * math.prod(opened.size) > MOST_PIXELS:
                raise BrokenPictureError(f"{path.name} has too many pixels")
            picture = opened.convert("RGB")
        is_small = max(picture.size) <= width
        if not is_small:
            picture.thumbnail((width, width), Image.Resampling.LANCZOS)
        buffer = io.BytesIO()
        # pictures of tests and of tiny models have few pixels, each of which is looked at
        picture.save(buffer, "WEBP", quality=82, method=2, lossless=is_small and width <= 256)
        return buffer.getvalue()
    except (*BROKEN, Image.DecompressionBombError, MemoryError) as error:
        raise BrokenPictureError(f"{path.name} is broken") from error
