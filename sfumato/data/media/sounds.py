"""Audio in text: files of any sampling rate and number of channels, brought to one channel of the model's rate."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from sfumato.data.media.kinds import File
from sfumato.data.media.pictures import describe_source, read_head, refuse_unreadable
from sfumato.errors import DataError, MissingDependencyError

if TYPE_CHECKING:
    from soundfile import SoundFile


SAME_LENGTH = 0.02
"""Share by which the length that an MP3 file's reader tells may differ from that of its frames."""


HEAD_BYTES = 28
"""Of a file, in which it says its size."""

LARGEST_KNOWN = 0x7FFFF000
"""A size of 32 bits above this stands for one that is not known: ffmpeg writes all ones, SoX and arecord less."""


UNKNOWN_LENGTH = 2**63 - 1
"""Frames that libsndfile tells of a file that does not state them."""

NOT_RECOGNISED = "Format not recognised"
"""What libsndfile says of files of other kinds, as of AAC, AMR and WebM."""

LARGEST = 2.0
"""Largest sample that is clipped to 1.0, as MP3 decoders overshoot; a larger one is of a file of another scale."""


@dataclass(frozen=True)
class Sound:
    """Audio that has been read."""

    samples: np.ndarray
    """float32 ``[N]``, one channel, of the model's rate."""


@contextmanager
def open_sound(source: File, where: str) -> Iterator[SoundFile]:
    """The opened file. What soundfile raises for a broken file, here or inside the ``with``, becomes a DataError.

    So does an MP3 file of which libsndfile would read another length than it has.
    """
    try:
        import soundfile
        import soxr  # noqa: F401  (what is read is brought to another rate)
    except ImportError as error:
        raise MissingDependencyError(
            f"{where}: audio is read by soundfile and soxr, one of which is not installed: pip install 'sfumato[audio]'"
        ) from error
    refuse_unreadable(source, where)
    try:
        with soundfile.SoundFile(io.BytesIO(source) if isinstance(source, bytes) else str(source)) as file:
            if file.frames == UNKNOWN_LENGTH:
                raise DataError(
                    f"{where}: audio ({describe_source(source)}) that does not say how long it is, as FLAC files that "
                    "were written into a pipe: write it anew, such as by ffmpeg -i old.flac new.flac"
                )
            if file.subtype == "MPEG_LAYER_III":
                _check_length(source, file.frames, file.samplerate, where)
            yield file
    except DataError:
        raise
    except (soundfile.SoundFileError, OSError, ValueError, TypeError) as error:
        if read_head(source, 8)[4:] == b"ftyp":  # MP4, M4A or MOV, whose error depends on the ending of its name
            raise DataError(
                f"{where}: audio ({describe_source(source)}) of a kind that is not read, such as AAC in M4A: write it "
                "anew, such as by ffmpeg -i old.m4a new.flac"
            ) from error
        remedy = " If a player plays it, write it anew: ffmpeg -i old new.flac" if NOT_RECOGNISED in str(error) else ""
        raise DataError(f"{where}: broken audio ({describe_source(source)}): {error}{remedy}") from error


def _check_length(source: File, stated: int, rate: int, where: str) -> None:
    """Raises DataError for an MP3 file without a table of its frames whose bit rate is not that of its beginning.

    Args:
        source: the file, or what it holds.
        stated: samples that libsndfile would read.
        rate: samples per second.
        where: file and row, for messages.
    """
    from sfumato.data.media.mp3_length import count_mp3_samples

    counted = count_mp3_samples(source)
    if counted is not None and abs(counted - stated) > SAME_LENGTH * max(counted, stated):
        raise DataError(
            f"{where}: audio ({describe_source(source)}) of {counted / rate:.1f} s, of which {stated / rate:.1f} s "
            "would be read: it is an MP3 file of variable bit rate without a table of its length (Xing): write it "
            "anew, such as by ffmpeg -i old.mp3 new.flac"
        )


def check_sound(source: File, where: str) -> None:
    """Reads the head of a file of audio. Raises DataError when it is none, MissingDependencyError as ``read_sound``."""
    with open_sound(source, where):
        pass


def check_all_there(source: File, samples: np.ndarray, wanted: int, where: str) -> None:
    """Checks what was read of a file of audio.

    Args:
        source: the file, or what it holds.
        samples: float32 ``[N, channels]``.
        wanted: how many N should be.
        where: file and row, for messages.

    Raises:
        DataError: when the file is truncated, empty, or has samples that are not finite.
    """
    shown = describe_source(source)
    # libsndfile reads what there is of such a truncated file without an error
    size = len(source) if isinstance(source, bytes) else source.stat().st_size
    if size < (stated := _stated_size(read_head(source, HEAD_BYTES))):
        raise DataError(f"{where}: broken audio ({shown}): {size} of {stated} bytes are there; it is truncated")
    if len(samples) == 0 or len(samples) < wanted:
        raise DataError(f"{where}: broken audio ({shown}): {len(samples)} of {wanted} samples can be read")
    if not np.isfinite(samples).all():
        raise DataError(f"{where}: broken audio ({shown}): it has samples that are not finite")


def check_scale(samples: np.ndarray, named: str) -> None:
    """Raises DataError for samples of another scale than -1 to 1; ``named`` says which sound of which row it is."""
    largest = float(np.abs(samples).max())
    if largest > LARGEST:
        raise DataError(f"{named} with samples of up to {largest:g}: scale it to -1 to 1")


def _stated_size(head: bytes) -> int:
    """Bytes that a file says it has, by its head: of WAV, RF64, Wave64, AIFF or AU; 0 where it says none."""

    def number(start: int, size: int, order: Literal["little", "big"]) -> int:
        return int.from_bytes(head[start : start + size], order)

    kind = head[:4]
    if kind == b"RIFF":
        stated = number(4, 4, "little") + 8
    elif kind == b"FORM":
        stated = number(4, 4, "big") + 8
    elif kind == b".snd":
        stated = number(4, 4, "big") + number(8, 4, "big")
    elif kind == b"RF64":
        return number(20, 8, "little") + 8
    else:
        return number(16, 8, "little") if kind == b"riff" else 0
    # programs that write into a pipe do not know the size yet
    return 0 if stated > LARGEST_KNOWN else stated


def read_sound(source: File, rate: int, max_seconds: float, where: str) -> Sound:
    """Reads a file of audio: .wav, .flac, .mp3, .ogg or another format of libsndfile.

    Args:
        source: the file, or what it holds.
        rate: samples per second that are wanted.
        max_seconds: of the longest audio that the model takes.
        where: file and row, for messages.

    Raises:
        DataError: when it is broken, empty, truncated, or too long.
        MissingDependencyError: when soundfile or soxr is missing.
    """
    shown = describe_source(source)
    with open_sound(source, where) as file:
        stated = file.frames
        file_rate = file.samplerate
        if stated > max_seconds * file_rate:
            raise DataError(
                f"{where}: audio ({shown}) of {stated / file_rate:.1f} s: at most {max_seconds:.0f} s are taken; cut it"
            )
        samples = file.read(stated, dtype="float32", always_2d=True)  # GSM is not read without a number
    check_all_there(source, samples, stated, where)
    check_scale(samples, f"{where}: audio ({shown})")
    mono = samples.mean(axis=1)
    import soxr

    return Sound(np.ascontiguousarray(mono if file_rate == rate else soxr.resample(mono, file_rate, rate), np.float32))
