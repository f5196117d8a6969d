"""Files of sound as waveforms to train on: of one sampling rate, number of channels and length."""

from __future__ import annotations

import numpy as np

from sfumato.data.media.kinds import File
from sfumato.data.media.pictures import describe_source
from sfumato.data.media.sounds import check_all_there, check_scale, open_sound
from sfumato.errors import DataError
from sfumato.tracking.waveforms import FULL_SCALE

VERSION = 3
"""Raise it when the same files become other waveforms, so that stored latents are not used any more."""

LEAST_FILLED = 0.1
"""Smallest share of the wanted length that a sound may have; the rest becomes silence."""

LONGEST_HEAD = 48 * 3600
"""Most seconds that a file may say it has: a damaged head says any number."""


def read_waveform(source: File, rate: int, channels: int, milliseconds: int, where: str) -> tuple[np.ndarray, int]:
    """Reads the beginning of a file of sound: .wav, .flac, .mp3, .ogg or another format of libsndfile.

    Args:
        source: the file, or what it holds.
        rate: samples per second that are wanted; another one is converted.
        channels: that are wanted: of two the mean becomes one, and one is repeated.
        milliseconds: that are wanted: the rest is cut off, and a shorter sound is filled up with silence.
        where: file and row, for messages.

    Returns:
        int16 ``[channels, N]``, and the milliseconds that the file has.

    Raises:
        DataError: when it is broken, empty, truncated, silent, too short, or has other channels.
        MissingDependencyError: when soundfile or soxr is missing.
    """
    with open_sound(source, where) as file:
        shown = describe_source(source)
        file_rate = file.samplerate
        stated = file.frames
        file_channels = file.channels
        if file_channels > 2 or (channels > 2 and file_channels != channels):
            raise DataError(f"{where}: sound ({shown}) of {file_channels} channels: mix it down to 1 or 2")
        if stated > LONGEST_HEAD * file_rate:
            raise DataError(f"{where}: broken audio ({shown}): its head says that it has {stated:,} samples")
        wanted = min(stated, -(-milliseconds * file_rate // 1000))
        samples = file.read(wanted, dtype="float32", always_2d=True)
    check_all_there(source, samples, wanted, where)
    waveform = to_waveform(samples, file_rate, rate, channels, milliseconds, f"{where}: sound ({shown})")
    return waveform, stated * 1000 // file_rate


def to_waveform(
    samples: np.ndarray, file_rate: int, rate: int, channels: int, milliseconds: int, named: str
) -> np.ndarray:
    """Samples of a file, brought to a rate, a number of channels and a length.

    Args:
        samples: float32 ``[N, C]``, 1 or 2 channels or as many as are wanted.
        file_rate: samples per second of the file.
        rate, channels, milliseconds: that are wanted, as of ``read_waveform``.
        named: row and file, for messages.

    Returns:
        int16 ``[channels, N]``.

    Raises:
        DataError: when it is silent, too short, or of another scale.
    """
    import soxr

    check_scale(samples, named)
    if not samples.any():
        raise DataError(f"{named} that is silent: its first {milliseconds / 1000:g} s are zeros")
    if len(samples) < LEAST_FILLED * milliseconds * file_rate / 1000:
        raise DataError(
            f"{named} of {len(samples) / file_rate:.2f} s for {milliseconds / 1000:g} s: at least "
            f"{LEAST_FILLED:.0%} must be there: leave it out, or set a smaller data.seconds"
        )
    waveform = _with_channels(samples, channels)
    if file_rate != rate:
        waveform = soxr.resample(waveform, file_rate, rate)
    length = milliseconds * rate // 1000
    waveform = np.pad(waveform[:length], ((0, max(length - len(waveform), 0)), (0, 0)))
    rounded = (waveform.clip(-1, 1) * FULL_SCALE).round().astype(np.int16)
    if not rounded.any():  # the file is not silent, or it would have been refused above
        reason = f"all of its samples are below 1/{2 * FULL_SCALE}"
        if channels == 1 and np.abs(samples).max() * FULL_SCALE > 1:
            reason = "its two channels are each other's opposite: take one of them"
        raise DataError(f"{named} that would become silent: {reason}")
    return np.ascontiguousarray(rounded.T)


def _with_channels(samples: np.ndarray, channels: int) -> np.ndarray:
    """Samples ``[N, C]`` with another number of channels."""
    if samples.shape[1] == channels:
        return samples
    return np.repeat(samples.mean(axis=1, keepdims=True), channels, axis=1)
