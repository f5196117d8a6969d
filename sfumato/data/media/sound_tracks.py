"""The sound of video files, which PyAV reads in a child process: a file that is made for it can crash its reader."""

from __future__ import annotations

import io
import os
import resource
import struct
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sfumato.config.process_limits import lower_limit
from sfumato.data.media.kinds import File
from sfumato.data.media.pictures import describe_source, refuse_unreadable
from sfumato.data.media.video_files import CONTAINERS, LONGEST_S, MOST_BYTES
from sfumato.errors import DataError, MissingDependencyError

NO_SOUND = 3
"""Exit code of the child for a video without sound."""
NOT_READ = 4
"""Exit code of the child for a file that cannot be read; the reason is on its standard error."""

LONGEST_GAP = 0.05
"""Seconds without sound that timestamps may leave by rounding alone. A longer gap, such as of a recording that lost
sound, becomes silence, so that what follows stays with its pictures."""

_HEAD = struct.Struct("<IId")  # samples per second, channels, seconds of the whole sound


class SoundTrack(NamedTuple):
    """The beginning of the sound of a video."""

    samples: np.ndarray
    """float32 ``[N, channels]`` of 1 or 2 channels, from the moment of the first frame on."""
    rate: int
    """Samples per second."""
    seconds: float
    """Length of the whole sound, as the file states it."""


def read_sound_track(source: File, seconds: float, where: str) -> SoundTrack:
    """Reads the first ``seconds`` of the sound of a video; more than two channels are mixed down to two.

    Args:
        source: the file, or what it holds.
        seconds: that are wanted.
        where: file and row, for messages.

    Raises:
        DataError: when there is no sound, or the file is broken or not finite.
        MissingDependencyError: when PyAV is missing.
    """
    shown = describe_source(source)
    try:
        import av  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            f"{where}: the sound of videos is read by PyAV, which is not installed: pip install 'sfumato[video,audio]'"
        ) from error
    refuse_unreadable(source, where)
    path = str(source.absolute()) if isinstance(source, Path) else ""
    try:
        child = subprocess.run(
            [sys.executable, "-m", __name__, repr(seconds), path],
            input=source if isinstance(source, bytes) else b"",
            capture_output=True,
            timeout=LONGEST_S,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise DataError(f"{where}: broken video ({shown}): reading its sound takes over {LONGEST_S:.0f} s") from error
    if child.returncode == NO_SOUND:
        raise DataError(f"{where}: video ({shown}) without sound: leave it out, or give its sound in data.sound_key")
    if child.returncode == NOT_READ:
        reason = child.stderr.decode(errors="replace").strip().rpartition("\n")[2][:200]
        raise DataError(f"{where}: broken sound of a video ({shown}): {reason}")
    if child.returncode or len(child.stdout) < _HEAD.size:
        raise DataError(f"{where}: broken video ({shown}): it ends the reader of its sound (exit {child.returncode})")
    rate, channels, length = _HEAD.unpack_from(child.stdout)
    samples = np.frombuffer(child.stdout, np.float32, offset=_HEAD.size).reshape(-1, channels)
    if not np.isfinite(samples).all():
        raise DataError(f"{where}: broken sound of a video ({shown}): it has samples that are not finite")
    return SoundTrack(samples, rate, length)


def _write_sound(seconds: float, path: str) -> int:
    """Writes what ``SoundTrack`` holds to standard output; returns the exit code."""
    import av
    from av.error import FFmpegError

    lower_limit(resource.RLIMIT_CORE, 0)
    lower_limit(resource.RLIMIT_AS, MOST_BYTES)
    options = {"format_whitelist": CONTAINERS, "protocol_whitelist": "file"}
    try:
        # the options make FFmpeg open no file that another one names; bytes are read by a callback, which has none
        source = path or io.BytesIO(sys.stdin.buffer.read())
        limits = options if path else {"format_whitelist": CONTAINERS}
        with av.open(source, "r", container_options=limits) as container:
            if not container.streams.audio:
                return NO_SOUND
            stream = container.streams.audio[0]
            video = container.streams.video[0] if container.streams.video else None
            layout = stream.layout.name if stream.channels <= 2 else "stereo"
            resampler = av.AudioResampler(format="flt", layout=layout, rate=stream.rate)
            start = float(video.start_time * video.time_base) if video and video.start_time and video.time_base else 0.0
            parts: list[np.ndarray] = []
            missing = round(seconds * stream.rate)
            position = 0  # in samples from the moment of the first frame of the video
            for frame in container.decode(stream):
                begin = position if frame.time is None else round((frame.time - start) * stream.rate)
                if not parts:  # the sound may begin before or after the first frame
                    position = min(begin, 0)
                if begin - position > (LONGEST_GAP * stream.rate if parts else 0):
                    silence = np.zeros((min(begin - position, missing), min(stream.channels, 2)), np.float32)
                    parts.append(silence)
                    missing -= len(silence)
                    position = begin
                for converted in resampler.resample(frame):
                    samples = converted.to_ndarray().reshape(-1, len(converted.layout.channels))
                    parts.append(samples[max(-position, 0) :][:missing])
                    missing -= len(parts[-1])
                    position += len(samples)
                if missing <= 0:
                    break
            if not parts:
                return NO_SOUND
            length = float(stream.duration * stream.time_base) if stream.duration and stream.time_base else 0.0
            length = length or (container.duration or 0) / av.time_base
            sound = np.concatenate(parts)
            head = _HEAD.pack(stream.rate, sound.shape[1], length or len(sound) / stream.rate)
    except (FFmpegError, ValueError, MemoryError) as error:
        print(error, file=sys.stderr)
        return NOT_READ
    sys.stdout.buffer.write(head + np.ascontiguousarray(sound, np.float32).tobytes())
    return 0


if __name__ == "__main__":
    sys.exit(_write_sound(float(sys.argv[1]), sys.argv[2]))
