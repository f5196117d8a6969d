"""Frames of videos, as a player shows them: upright, with square pixels, at their time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sfumato.data.media.colours import to_srgb
from sfumato.data.media.kinds import VIDEO_ENDINGS, File
from sfumato.data.media.pictures import (
    describe_source,
    frames_of,
    is_picture,
    open_image,
    read_image,
    refuse_unreadable,
)
from sfumato.data.media.video_files import VideoHead, examine_video, open_video
from sfumato.errors import DataError

if TYPE_CHECKING:
    from cv2 import VideoCapture
    from PIL import Image

MAX_FRAMES = 1_000_000
"""Frames of the longest video that is read: more than nine hours of 30 frames per second."""

WIDEST_PIXEL = 4.0
"""Most by which a pixel may be wider than high, or higher than wide."""

WIDE_PRIMARIES, OTHER_TRANSFERS = {9, 10, 11, 12}, {8, 9, 10, 16, 17, 18}
"""Code points of ITU-T H.273 whose colours OpenCV does not convert: BT.2020, XYZ and P3; linear light, logarithmic, PQ
and HLG."""

KNOWN_MATRICES = {0, 1, 2, 3, 4, 5, 6, 7, 9}
"""Code points of the matrices that it converts."""

UNREADABLE = "no frame can be read; if a player shows it, such as one of AV1, convert it (ffmpeg -c:v libx264)"
"""What is said of a video of which OpenCV gives no frame."""

SAME_TIME = 0.25
"""Frames by which times may be beside those of a constant rate, and still count as of one."""


@dataclass(frozen=True)
class Video:
    """Some frames of a video."""

    total: int
    """Frames of the file that can be read."""
    fps: float
    """Frames per second of the file, not a number where it says none."""
    indices: Sequence[int]
    """Which frames were chosen, in order; one may stand several times."""
    frames: Iterator[Image.Image]
    """These, each once, read one after the other. Raises DataError when one cannot be read."""

    def read_all(self) -> list[Image.Image]:
        """A frame for each of ``indices``. Raises as ``frames``."""
        read = dict(zip(dict.fromkeys(self.indices), self.frames, strict=True))
        return [read[index] for index in self.indices]


def read_frames(source: File | list[File], count: int, where: str) -> list[Image.Image]:
    """``count`` frames of a video at even distances in time, the first and the last among them, as of ``read_image``.

    Args:
        source: a file of a video, an animated image, a folder of images in the order of their names, or images.
        count: of frames.
        where: file and row, for messages.

    Raises:
        DataError: when it is broken or has fewer frames.
        MissingDependencyError: when OpenCV is needed and missing.
    """
    if isinstance(source, Path) and source.is_dir():
        source = frames_of(source)
    if isinstance(source, list):
        return [read_image(source[index], where) for index in _spread_positions(len(source), count, where)]
    is_animation = is_picture(source) if isinstance(source, bytes) else source.suffix.lower() not in VIDEO_ENDINGS
    return (_read_animation if is_animation else _read_video_file)(source, count, where)


def check_video(source: File, where: str) -> None:
    """Reads the head and the first frame of a video. Raises DataError when there is none, or as of its colours."""
    if _examine_video(source, where, 1).num_frames == 0:
        raise DataError(f"{where}: broken video ({describe_source(source)}): {UNREADABLE}")


def frames_at(shown_from: Sequence[float], positions: np.ndarray, times: np.ndarray) -> list[int] | None:
    """The frames that are shown at some times, of a video whose rate varies; None where it does not, or says no times.

    Args:
        shown_from: milliseconds from which on each frame is shown.
        positions: float ``[N]``: what the indices would be at a constant rate.
        times: float ``[N]``: in milliseconds, ascending.
    """
    if (np.diff(shown_from) <= 0).any():
        return None
    exact = np.interp(times, shown_from, np.arange(len(shown_from)))
    if np.abs(exact - positions).max() <= SAME_TIME:
        return None
    return (np.searchsorted(shown_from, times + 1e-3, side="right") - 1).tolist()


def read_video(source: File, where: str, choose: Callable[[VideoHead], Sequence[int]]) -> Video:
    """Chooses and reads frames of a video that OpenCV reads.

    The file is read twice, since the number of frames that it states is often not the number that can be read. The
    first pass counts them in a child process (``video_files.py``).

    Args:
        source: the file.
        where: file and row, for messages.
        choose: is given the head, with the frames that can be read, and returns the indices of the frames that are
            wanted, ascending.

    Raises:
        DataError: when it is broken, truncated, far too large, or of colours that are not converted.
        MissingDependencyError: when OpenCV is missing.
    """
    head = _examine_video(source, where, MAX_FRAMES + 1)
    total = head.num_frames
    if total == 0 or total > MAX_FRAMES:
        problem = UNREADABLE if total == 0 else f"it has more than {MAX_FRAMES:,} frames"
        raise DataError(f"{where}: broken video ({describe_source(source)}): {problem}")
    if not head.fps > 0:
        head = head._replace(fps=float("nan"))
    elif head.is_truncated:
        raise DataError(
            f"{where}: broken video ({describe_source(source)}): only {total} of {head.stated:.0f} frames can be read; "
            "it is truncated"
        )
    indices = choose(head)
    frames = _read_chosen(open_video(source), indices, total, f"{where}: broken video ({describe_source(source)})")
    square = _in_square_pixels(frames, head.pixel_ratio) if head.pixel_ratio != 1 else frames
    return Video(total, head.fps, indices, square)


def _examine_video(source: File, where: str, most_frames: int) -> VideoHead:
    """The head of a video and up to so many of its frames. Raises as ``read_video``."""
    from PIL import Image

    shown = describe_source(source)
    refuse_unreadable(source, where)
    most_pixels = 2 * Image.MAX_IMAGE_PIXELS  # pyright: ignore[reportOperatorIssue]  # None only if a user lifted it
    head = examine_video(source, where, shown, most_frames, most_pixels)
    if head.primaries in WIDE_PRIMARIES or head.transfer in OTHER_TRANSFERS or head.matrix not in KNOWN_MATRICES:
        raise DataError(
            f"{where}: video ({shown}) whose colours (primaries {head.primaries}, transfer {head.transfer}, matrix "
            f"{head.matrix} of H.273) are of HDR or of a wider range than sRGB: convert it to BT.709 (ffmpeg's filters "
            "zscale and tonemap)"
        )
    if head.is_interlaced:  # OpenCV gives black frames, or memory that nobody has written to
        raise DataError(
            f"{where}: video ({shown}) is interlaced, with lines of two moments in each frame: make frames of them "
            "(ffmpeg -vf bwdif)"
        )
    if head.is_transparent:
        raise DataError(
            f"{where}: video ({shown}) has transparent parts, below which any colours may lie: lay it over one colour "
            "(ffmpeg's filters color and overlay)"
        )
    if head.is_mirrored:
        raise DataError(
            f"{where}: video ({shown}) is shown mirrored, which is not done here: write it anew as it is shown "
            "(ffmpeg -i old.mp4 new.mp4)"
        )
    stretch = max(head.pixel_ratio, 1 / head.pixel_ratio)
    if stretch > WIDEST_PIXEL:
        raise DataError(
            f"{where}: broken video ({shown}): it says that a pixel is {head.pixel_ratio:g} times as wide as high"
        )
    if head.width * head.height * stretch > most_pixels or head.stated > MAX_FRAMES:
        raise DataError(
            f"{where}: video ({shown}) of {head.stated:,.0f} frames of {head.width:.0f}x{head.height:.0f} pixels: "
            f"cut or scale it down to at most {MAX_FRAMES:,} frames of {most_pixels:,} pixels"
        )
    return head


def _in_square_pixels(frames: Iterator[Image.Image], pixel_ratio: float) -> Iterator[Image.Image]:
    """Frames enlarged in one direction, so that their pixels are as wide as high."""
    from PIL import Image

    for frame in frames:
        width, height = round(frame.width * max(pixel_ratio, 1)), round(frame.height / min(pixel_ratio, 1))
        yield frame.resize((width, height), Image.Resampling.LANCZOS)


def _read_chosen(video: VideoCapture, indices: Sequence[int], total: int, problem: str) -> Iterator[Image.Image]:
    """The frames of these indices, one after the other; those between them are skipped without being converted."""
    from PIL import Image

    for index in range(indices[-1] + 1):
        is_read = video.grab()
        if is_read and index in indices:
            is_read, frame = video.retrieve()
        if not is_read:
            raise DataError(f"{problem}: frame {index + 1} of {total} cannot be read")
        if index in indices:  # OpenCV's order is blue green red
            yield Image.fromarray(np.ascontiguousarray(frame[:, :, ::-1]))


def _spread_positions(total: int, count: int, where: str) -> list[int]:
    """``count`` of ``total`` positions at even distances."""
    if total < count:
        raise DataError(f"{where}: the video has {total} frames, {count} are wanted (data.num_frames)")
    return np.linspace(0, total - 1, count).round().astype(int).tolist()


def _read_animation(source: File, count: int, where: str) -> list[Image.Image]:
    with open_image(source, where) as opened:
        positions = _spread_positions(getattr(opened, "n_frames", 1), count, where)
        shown_from = [0.0]
        for index in range(getattr(opened, "n_frames", 1)):
            opened.seek(index)
            opened.load()  # after which Pillow knows for how long the frame of a WebP is shown
            shown_from.append(shown_from[-1] + opened.info.get("duration", 0))
        shown_from.pop()  # where the last one ends
        times = np.linspace(0, shown_from[-1], count)
        indices = frames_at(shown_from, np.linspace(0, len(shown_from) - 1, count), times) or positions
        frames = {}
        for index in dict.fromkeys(indices):
            opened.seek(index)
            frames[index] = to_srgb(opened)
        return [frames[index] for index in indices]


def _read_video_file(source: File, count: int, where: str) -> list[Image.Image]:
    """``count`` frames of a video file at even distances in time. Raises as ``read_video``, and when it has fewer."""

    def choose(head: VideoHead) -> Sequence[int]:
        positions = _spread_positions(head.num_frames, count, where)
        times = np.linspace(head.times[0], head.times[-1], count)
        return frames_at(head.times, np.linspace(0, head.num_frames - 1, count), times) or positions

    return read_video(source, where, choose).read_all()
