"""Images and videos from files or bytes, brought to one size. Errors name the row and the file."""

from __future__ import annotations

import io
import os
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sfumato.config.paths import file_problem
from sfumato.errors import DataError, MissingDependencyError

if TYPE_CHECKING:
    from PIL import Image

VERSION = 2
"""Raise it when the same files become other pixels, so that stored latents are not used any more."""

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
"""What Pillow may take a file for. Its other formats include some that start a program, as EPS does."""

IMAGE_ENDINGS = {".png", ".jpg", ".jpeg", ".webp", ".bmp"}
ANIMATION_ENDINGS = {".gif", ".webp", ".apng", ".png"}
"""What Pillow reads several frames of."""
VIDEO_ENDINGS = {".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".mpg", ".mpeg", ".ts", ".flv", ".wmv"}
"""What OpenCV reads."""

CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegvideo,mpegts,flv,asf,ogg"
"""What FFmpeg may take a video for, by its own names, whatever the file's name ends in. Its other formats include
playlists and descriptions of streams, which open other files and ports."""

FFMPEG_OPTIONS = "OPENCV_FFMPEG_CAPTURE_OPTIONS"
_OPENING = threading.Lock()  # the environment is one for all threads

MAX_FRAMES = 1_000_000
"""Frames of the longest video that is read: more than nine hours of 30 frames per second."""

ORIENTATION, QUARTER_TURNS = 0x0112, (5, 6, 7, 8)
"""EXIF's number of how an image is turned, and what swaps height and width."""

BROKEN = (OSError, ValueError, SyntaxError, EOFError, TypeError, LookupError, ArithmeticError, struct.error)
"""What Pillow raises for files that are damaged, or made to break it."""

File = Path | bytes
"""Where a picture comes from: a path, or what such a file holds."""


def find_file(row: dict[str, Any], key: str, root: Path, where: str, kind: str = "image") -> File:
    """The picture that a column of a row names or holds.

    Args:
        row: its column is a path, bytes, or the struct of bytes and path that Hugging Face datasets write.
        key: name of the column.
        root: folder that paths are relative to.
        where: file and row, for messages.
        kind: what is looked for, for messages.

    Raises:
        DataError: when the column is missing, holds something else, or names a file that does not exist.
    """
    value = row.get(key)
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, (bytes, bytearray)):
        return bytes(value)
    if isinstance(value, str) and value:
        path = root / value
        problem = file_problem(path, or_folder=True)  # which may hold the frames of a video
        if problem == "does not exist":
            raise DataError(f"{where}: {kind} file not found: {path}")
        if problem is not None:
            raise DataError(f"{where}: {path} {problem}")
        return path
    raise DataError(
        f"{where}: column {key!r} holds no {kind} path or bytes; its columns are {', '.join(map(str, row))}"
    )


def find_frames(row: dict[str, Any], key: str, root: Path, where: str) -> File | list[File]:
    """The video that a column of a row names or holds: as ``find_file``, or a list of such images.

    Raises DataError as ``find_file`` does.
    """
    value = row.get(key)
    if not isinstance(value, list):
        return find_file(row, key, root, where)
    return [find_file({**row, key: frame}, key, root, f"{where}, frame {n}") for n, frame in enumerate(value, start=1)]


def read_image(source: File, where: str, still: bool = False) -> Image.Image:
    """An image, turned as EXIF says, of 8 bits per channel, red green blue; what is transparent shows white.

    Raises DataError when it is broken; with ``still`` also when it has several frames.
    """
    from PIL import ImageOps

    with _opened(source, where) as opened:
        frames = getattr(opened, "n_frames", 1)
        if still and frames > 1:
            raise DataError(f"{where}: image ({_shown(source)}) is animated, with {frames} frames: give one of them")
        return _to_rgb(ImageOps.exif_transpose(opened))


def check_image(source: File, where: str) -> None:
    """Reads the head of an image. Raises DataError when it is none."""
    with _opened(source, where):
        pass


def read_size(source: File, where: str) -> tuple[int, int]:
    """Height and width of an image as ``read_image`` gives it, by its head. Raises DataError when it is none."""
    with _opened(source, where) as opened:
        width, height = opened.size
        turned = opened.getexif().get(ORIENTATION) in QUARTER_TURNS
    return (width, height) if turned else (height, width)


def check_video(source: File, where: str) -> None:
    """Reads the head and the first frame of a video. Raises DataError when there is none."""
    if isinstance(source, Path) and (problem := file_problem(source)):
        raise DataError(f"{where}: {source} {problem}")
    if not _video_opener(source, where)().grab():
        raise DataError(f"{where}: broken video ({_shown(source)}): no frame can be read")


def read_frames(source: File | list[File], count: int, where: str) -> list[Image.Image]:
    """``count`` frames of a video at even distances, the first and the last among them, as ``read_image`` gives them.

    Args:
        source: a file of a video, an animated image, a folder of images in the order of their names, or images.
        count: of frames.
        where: file and row, for messages.

    Raises:
        DataError: when it is broken or has fewer frames.
        MissingDependencyError: when OpenCV is needed and missing.
    """
    if isinstance(source, Path) and source.is_dir():
        source = sorted(path for path in source.iterdir() if path.suffix.lower() in IMAGE_ENDINGS)
    if isinstance(source, list):
        return [read_image(source[index], where) for index in _spread(len(source), count, where)]
    is_picture = _is_picture(source) if isinstance(source, bytes) else source.suffix.lower() not in VIDEO_ENDINGS
    return (_read_animation if is_picture else _read_video)(source, count, where)


def fitted(image: Image.Image, height: int, width: int, crop: str = "center") -> np.ndarray:
    """An image of another size: uint8 ``[height, width, 3]``.

    Args:
        image: red green blue.
        height, width: in pixels.
        crop: "center" scales the shorter side and cuts the rest; "none" stretches.
    """
    from PIL import Image, ImageOps

    if crop == "center":
        image = ImageOps.fit(image, (width, height), method=Image.Resampling.LANCZOS)
    else:
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    return np.array(image)


def as_png(image: Image.Image) -> bytes:
    """What a file of an image holds."""
    image.save(file := io.BytesIO(), "PNG")
    return file.getvalue()


@contextmanager
def _opened(source: File, where: str) -> Iterator[Image.Image]:
    """The image as Pillow opens it; what goes wrong inside becomes a DataError."""
    from PIL import Image, UnidentifiedImageError

    if isinstance(source, Path) and (problem := file_problem(source)):
        raise DataError(f"{where}: {source} {problem}")
    try:
        with Image.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=FORMATS) as opened:
            yield opened
    except DataError:
        raise
    except UnidentifiedImageError as error:
        kinds = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
        raise DataError(f"{where}: broken image ({_shown(source)}): it is no {kinds}") from error
    except MemoryError as error:
        raise DataError(f"{where}: broken image ({_shown(source)}): it does not fit into memory") from error
    except BROKEN as error:
        raise DataError(f"{where}: broken image ({_shown(source)}): {error}") from error
    except Image.DecompressionBombError as error:
        raise DataError(
            f"{where}: image ({_shown(source)}) of more than {2 * Image.MAX_IMAGE_PIXELS:,} pixels: scale it down"
        ) from error


def _shown(source: File) -> str:
    return str(source) if isinstance(source, Path) else "its bytes"


def _to_rgb(image: Any) -> Any:
    """Eight bits per channel; Pillow alone would clip deeper images to white instead of scaling them."""
    from PIL import Image

    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode in {"I", "F"}:
        raise ValueError(f"its pixel format {image.mode!r} is neither 8 nor 16 bits per channel")
    if image.has_transparency_data:  # the colours below it are not what anybody sees
        image = image.convert("RGBA")
        shown = Image.new("RGB", image.size, "white")
        shown.paste(image, mask=image.getchannel("A"))
        return shown
    return image.convert("RGB")


def _spread(total: int, count: int, where: str) -> list[int]:
    """``count`` of ``total`` positions at even distances."""
    if total < count:
        raise DataError(f"{where}: the video has {total} frames, {count} are wanted (data.num_frames)")
    return np.linspace(0, total - 1, count).round().astype(int).tolist()


def _is_picture(content: bytes) -> bool:
    """Whether Pillow knows the format of a file."""
    from PIL import Image

    try:
        Image.open(io.BytesIO(content), formats=FORMATS).close()
    except Image.DecompressionBombError:
        return True
    except BROKEN:
        return False
    return True


def _read_animation(source: File, count: int, where: str) -> list[Image.Image]:
    with _opened(source, where) as opened:
        frames = []
        for index in _spread(getattr(opened, "n_frames", 1), count, where):
            opened.seek(index)
            frames.append(_to_rgb(opened))
        return frames


@dataclass(frozen=True)
class Video:
    """Some frames of a video."""

    total: int
    """Frames of the file that can be read."""
    stated: float
    """Frames that the file says it has; 0 or less where it does not."""
    fps: float
    """Frames per second of the file, not a number where it says none."""
    indices: Sequence[int]
    """Which frames were chosen, in order."""
    frames: Iterator[Image.Image]
    """These, read one after the other. Raises DataError when one cannot be read."""


def read_video(source: File, where: str, choose: Callable[[int, float], Sequence[int]]) -> Video:
    """Frames of a video that OpenCV reads.

    Two passes: the number of frames that a file states is often not that which can be read.

    Args:
        source: the file.
        where: file and row, for messages.
        choose: from the number of frames, and of frames per second, to the positions that are wanted, in order.

    Raises:
        DataError: when it is broken, or far too large.
        MissingDependencyError: when OpenCV is missing.
    """
    from PIL import Image

    if isinstance(source, Path) and (problem := file_problem(source)):
        raise DataError(f"{where}: {source} {problem}")
    open_video = _video_opener(source, where)
    video, total = open_video(), 0
    width, height, fps, stated = (video.get(number) for number in (3, 4, 5, 7))  # as OpenCV numbers its properties
    if width * height > 2 * Image.MAX_IMAGE_PIXELS or stated > MAX_FRAMES:
        raise DataError(
            f"{where}: video ({_shown(source)}) of {stated:,.0f} frames of {width:.0f}x{height:.0f} pixels: cut or "
            f"scale it down to at most {MAX_FRAMES:,} frames of {2 * Image.MAX_IMAGE_PIXELS:,} pixels"
        )
    while total <= MAX_FRAMES and video.grab():
        total += 1
    if total == 0 or total > MAX_FRAMES:
        problem = "no frame can be read" if total == 0 else f"it has more than {MAX_FRAMES:,} frames"
        raise DataError(f"{where}: broken video ({_shown(source)}): {problem}")
    indices = choose(total, fps if fps > 0 else float("nan"))
    return Video(total, stated, fps, indices, _chosen(open_video(), indices, total, f"{where}: broken video", source))


def _chosen(video: Any, indices: Sequence[int], total: int, problem: str, source: File) -> Iterator[Image.Image]:
    from PIL import Image

    for index in range(indices[-1] + 1):
        is_read = video.grab()
        if is_read and index in indices:
            is_read, frame = video.retrieve()
        if not is_read:
            raise DataError(f"{problem} ({_shown(source)}): frame {index + 1} of {total} cannot be read")
        if index in indices:  # OpenCV's order is blue green red
            yield Image.fromarray(np.ascontiguousarray(frame[:, :, ::-1]))


def _read_video(source: File, count: int, where: str) -> list[Image.Image]:
    return list(read_video(source, where, lambda total, _: _spread(total, count, where)).frames)


def _video_opener(source: File, where: str) -> Callable[[], Any]:
    try:
        import cv2
    except ImportError as error:
        raise MissingDependencyError(
            f"{where}: videos other than animated images are read by OpenCV, which is not installed: "
            "pip install 'sfumato[video]'"
        ) from error

    def open_video() -> Any:
        with _containers_alone():
            if isinstance(source, Path):  # absolute, so that no name is taken for that of a protocol
                return cv2.VideoCapture(str(source.absolute()), cv2.CAP_FFMPEG)
            return cv2.VideoCapture(io.BytesIO(source), cv2.CAP_FFMPEG, [])

    return open_video


@contextmanager
def _containers_alone() -> Iterator[None]:
    """Inside, FFmpeg opens files of ``CONTAINERS`` and nothing that these name: no playlist, no description of a stream
    that would make it listen on ports or read other files. It takes its options from the environment."""
    with _OPENING:
        before = os.environ.get(FFMPEG_OPTIONS)
        asked = [before] if before else []
        limits = (f"format_whitelist;{CONTAINERS}", "protocol_whitelist;file")
        os.environ[FFMPEG_OPTIONS] = "|".join([*asked, *limits])  # of one that stands twice the last counts
        try:
            yield
        finally:
            if before is None:
                del os.environ[FFMPEG_OPTIONS]
            else:
                os.environ[FFMPEG_OPTIONS] = before
