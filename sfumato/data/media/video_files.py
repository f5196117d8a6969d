"""Video files as OpenCV's FFmpeg opens them, and a child process that looks at each of them first.

A file that is made for it can crash the process that decodes it; a run would then end without a word about the file.
The first pass over a video is therefore made in a child process, which may crash.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import re
import resource
import select
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple, cast

from sfumato.config.process_limits import lower_limit
from sfumato.data.media.kinds import File
from sfumato.errors import DataError, MissingDependencyError

if TYPE_CHECKING:
    import cv2
    from av import VideoFrame
    from av.container import InputContainer
    from av.sidedata.sidedata import SideDataContainer
    from av.video.stream import VideoStream

CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,mpeg,mpegvideo,mpegts,flv,asf,ogg"
"""Containers that FFmpeg may recognise, by its own names, whatever the file's name ends in. Its other formats include
playlists and descriptions of streams, which open other files and ports."""

FFMPEG_OPTIONS = "OPENCV_FFMPEG_CAPTURE_OPTIONS"
_OPENING = threading.Lock()  # the environment is one for all threads

LONGEST_S = 600.0
"""Seconds that the first pass over a video may take."""
MOST_BYTES = 16 * 2**30
"""Address space of the child."""

UNSPECIFIED = 2
"""The code point of colours of which nothing is said."""

FIRST_FRAMES = 8
"""Frames that are looked at for whether they are interlaced or transparent."""

TRUNCATED = 0.9
"""A video of whose stated frames, and of whose stated length, a smaller share can be read counts as truncated. It is
below 1 since some files state more than they have."""

_HEADER = struct.Struct("<BqqQ")  # whether a path follows, most frames and pixels, length of what follows


class VideoHead(NamedTuple):
    """What the first pass over a video says."""

    num_frames: int
    """Frames that can be read, at most as many as were to be counted."""
    width: float
    height: float
    fps: float
    """Frames per second that the file states."""
    stated: float
    """Frames that the file says it has; 0 or less where it does not."""
    pixel_ratio: float
    """How many times a pixel is as wide as high, in frames as they are read, upright."""
    primaries: int
    transfer: int
    matrix: int
    """Code points of its colours (ITU-T H.273); 2, which is "unspecified", also without PyAV."""
    is_interlaced: bool
    """Whether a frame among the first holds lines of two moments; False without PyAV."""
    is_transparent: bool
    """Whether a frame among the first is not opaque; False without PyAV."""
    is_mirrored: bool
    """Whether players show it mirrored, by the matrix that turns its frames upright; False without PyAV."""
    seconds: float
    """Length that the file states, which is not that of ``stated`` frames where its rate varies or a part is cut off by
    an edit list; 0 where it states none, and without PyAV."""
    times: list[float]
    """Milliseconds at which each of ``num_frames`` is shown."""

    @property
    def is_truncated(self) -> bool:
        """Whether far fewer frames can be read than the file states, and these do not fill its length."""
        if self.num_frames >= TRUNCATED * self.stated:
            return False
        filled = (self.times[-1] - self.times[0]) / 1000  # up to the beginning of the last frame
        filled += filled / (self.num_frames - 1) if self.num_frames > 1 else 1 / self.fps
        return filled < TRUNCATED * (self.seconds or self.stated / self.fps)


def open_video(source: File) -> cv2.VideoCapture:
    """A file or its content, opened. Raises ImportError without OpenCV."""
    import cv2

    with _only_containers():
        if isinstance(source, Path):  # absolute, so that no name is taken for that of a protocol
            return cv2.VideoCapture(str(source.absolute()), cv2.CAP_FFMPEG)
        stream = io.BytesIO(source)
        return cv2.VideoCapture(stream, cv2.CAP_FFMPEG, [])  # pyright: ignore  # the stubs want a class of OpenCV's own


@contextlib.contextmanager
def _only_containers() -> Iterator[None]:
    """Inside, FFmpeg opens files of ``CONTAINERS`` and nothing that these name: no playlist, no description of a stream
    that would make it listen on ports or read other files. It takes its options from the environment."""
    with _OPENING:
        before = os.environ.get(FFMPEG_OPTIONS)
        user_options = [before] if before else []
        limits = (f"format_whitelist;{CONTAINERS}", "protocol_whitelist;file")
        # The last of equal options counts, so the user's own options cannot lift these limits.
        os.environ[FFMPEG_OPTIONS] = "|".join([*user_options, *limits])
        try:
            yield
        finally:
            if before is None:
                del os.environ[FFMPEG_OPTIONS]
            else:
                os.environ[FFMPEG_OPTIONS] = before


def examine_video(source: File, where: str, shown: str, most_frames: int, most_pixels: int) -> VideoHead:
    """Makes the first pass over a video, in a child process.

    Args:
        source: the file.
        where: file and row, for messages.
        shown: the file, for messages.
        most_frames: frames that are counted at most.
        most_pixels: of a frame. Frames of a video with larger ones, or that states more than ``most_frames``, are not
            counted.

    Raises:
        DataError: when the child ends, or takes longer than ``LONGEST_S``.
        MissingDependencyError: without OpenCV.
    """
    try:
        import cv2  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"{where}: videos other than animated images are read by OpenCV, which is not installed: "
            "pip install 'sfumato[video]'"
        ) from error
    examiner = _examiner_of_thread()
    try:
        values = examiner.examine(source, most_frames, most_pixels)
        return VideoHead(*values)  # pyright: ignore[reportArgumentType]  # JSON has kept the first an integer
    except (OSError, ValueError, struct.error) as error:
        reason = f"it ends its reader ({examiner.close()})"
        if isinstance(error, TimeoutError):
            reason = f"reading it takes more than {LONGEST_S:.0f} s"
        raise DataError(f"{where}: broken video ({shown}): {reason}") from error


class _Examiner:
    """A child process that looks at one video after the other."""

    def __init__(self) -> None:
        environment = {**os.environ, "OPENCV_LOG_LEVEL": "OFF", "OPENCV_FFMPEG_LOGLEVEL": "-8"}
        self.owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=environment | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    @property
    def is_running(self) -> bool:
        """Whether the process has not ended."""
        return self._process.poll() is None

    def examine(self, source: File, most_frames: int, most_pixels: int) -> list[float]:
        """The values of ``VideoHead``. Raises OSError or ValueError when the process ends or takes too long."""
        assert self._process.stdin is not None and self._process.stdout is not None
        content = os.fsencode(source.absolute()) if isinstance(source, Path) else source
        self._process.stdin.write(_HEADER.pack(isinstance(source, Path), most_frames, most_pixels, len(content)))
        self._process.stdin.write(content)
        self._process.stdin.flush()
        ends = time.monotonic() + LONGEST_S
        if not select.select([self._process.stdout], [], [], max(ends - time.monotonic(), 0))[0]:
            raise TimeoutError
        values = json.loads(self._process.stdout.readline())
        if len(values) != len(VideoHead._fields):
            raise ValueError(values)
        return values

    def close(self) -> str:
        """Ends the process, and says how it ended."""
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            self._process.wait(timeout=1)
        self._process.kill()
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        return f"signal {-code}" if code < 0 else f"exit {code}"


_of_threads = threading.local()


def _examiner_of_thread() -> _Examiner:
    """The examiner of this thread; a new one after a fork, since parent and child must not share the pipes."""
    examiner = getattr(_of_threads, "examiner", None)
    if examiner is None or examiner.owner != os.getpid() or not examiner.is_running:
        examiner = _of_threads.examiner = _Examiner()
    return examiner


def _serve_requests(requests: IO[bytes]) -> None:
    """Looks at the videos that the parent names, until the parent has closed the pipe."""
    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_AS, MOST_BYTES)
    while len(header := requests.read(_HEADER.size)) == _HEADER.size:
        is_path, most_frames, most_pixels, length = _HEADER.unpack(header)
        content = requests.read(length)
        video = open_video(Path(os.fsdecode(content)) if is_path else content)
        width, height, fps, stated = (video.get(number) for number in (3, 4, 5, 7))  # as OpenCV numbers its properties
        times: list[float] = []
        is_small = width * height <= most_pixels and (stated <= most_frames or most_frames == 1)
        while is_small and len(times) < most_frames and video.grab():
            times.append(round(video.get(0), 3))
        coding = _read_coding(os.fsdecode(content) if is_path else io.BytesIO(content))
        values = [len(times), width, height, fps, stated, _pixel_ratio(video), *coding, times]
        print(json.dumps(values), flush=True)


def _pixel_ratio(video: cv2.VideoCapture) -> float:
    """``VideoHead.pixel_ratio``; 1 where the file says none."""
    wide, high, turned = (video.get(number) for number in (40, 41, 48))
    if wide <= 0 or high <= 0:
        return 1.0
    return high / wide if turned % 180 == 90 else wide / high


def _read_coding(source: str | io.BytesIO) -> tuple[int, int, int, bool, bool, bool, float]:
    """``primaries`` to ``seconds`` of ``VideoHead``, which OpenCV does not tell."""
    unknown = UNSPECIFIED, UNSPECIFIED, UNSPECIFIED, False, False, False, 0.0
    try:
        import av
        from av.error import FFmpegError
    except ImportError:
        return unknown
    limits = {"format_whitelist": CONTAINERS} | ({"protocol_whitelist": "file"} if isinstance(source, str) else {})
    try:
        with av.open(source, "r", container_options=limits) as container:
            if not container.streams.video:
                return unknown
            first = list(itertools.islice(container.decode(video=0), FIRST_FRAMES))
            stream = container.streams.video[0]
            context = stream.codec_context
            code_points = int(context.color_primaries), int(context.color_trc), int(context.colorspace)
            # FFmpeg's decoders of VP8 and VP9 leave out the alpha channel that WebM announces
            is_transparent = stream.metadata.get("alpha_mode") == "1" or any(map(_has_transparency, first))
            is_interlaced = any(frame.interlaced_frame for frame in first)
            is_mirrored = any(map(_is_mirrored, first))
            return *code_points, is_interlaced, is_transparent, is_mirrored, _stated_seconds(container, stream)
    except (FFmpegError, ValueError):  # whether frames can be read is for OpenCV to say
        return unknown


def _has_transparency(frame: VideoFrame) -> bool:
    """Whether some of a frame's pixels are not opaque."""
    if not any(component.is_alpha for component in frame.format.components):
        return False
    return bool(frame.to_ndarray(format="rgba")[..., 3].min() < 255)


def _is_mirrored(frame: VideoFrame) -> bool:
    """Whether the matrix by which a frame is shown mirrors it, of which OpenCV follows the rotation alone."""
    # by key: until PyAV 18 the container gave its values in turn, since then its keys
    data = cast("SideDataContainer", frame.side_data).get("DISPLAYMATRIX")
    if data is None:
        return False
    a, b, _, c, d = struct.unpack("=5i", bytes(data)[:20])
    return a * d - b * c < 0


def _stated_seconds(container: InputContainer, stream: VideoStream) -> float:
    """``VideoHead.seconds``: of the pictures, where the container says it apart from that of the sound."""
    import av

    if stream.duration and stream.time_base:
        return float(stream.duration * stream.time_base)
    if tag := re.match(r"(\d+):(\d+):(\d+\.?\d*)", stream.metadata.get("DURATION", "")):  # of Matroska and WebM
        hours, minutes, seconds = map(float, tag.groups())
        start = float(stream.start_time * stream.time_base) if stream.start_time and stream.time_base else 0.0
        return 3600 * hours + 60 * minutes + seconds - start  # the tag is the end of the last frame
    return (container.duration or 0) / av.time_base


if __name__ == "__main__":
    _serve_requests(sys.stdin.buffer)
