"""Sounds as samples, alone or with a video: WAV files of 16 bits, and pictures of their spectrum."""

from __future__ import annotations

import io
import itertools
import wave
from dataclasses import dataclass

import numpy as np

FULL_SCALE = 32767
"""The largest value of a sample of 16 bits: 1.0 of a waveform in floating point."""

WINDOW_SECONDS = 0.032
"""Length of the windows whose spectra a picture shows."""

LOWEST_DB = -80.0
"""Level, against the loudest point of the picture, that is shown in black."""

MOST_COLUMNS = 512
"""Largest width of a picture of a spectrum, in pixels."""
NUM_ROWS = 128
"""Its height."""

COLOURS = np.array(
    [[0, 0, 0], [60, 10, 100], [150, 30, 110], [220, 70, 60], [250, 160, 30], [250, 250, 200]], np.float64
)
"""Colours of a spectrum, from silence to the loudest."""


@dataclass(frozen=True, eq=False)
class Waveform:
    """A sound."""

    samples: np.ndarray
    """int16 ``[channels, N]``."""
    rate: int
    """Samples per second."""

    def __post_init__(self) -> None:
        if self.samples.dtype != np.int16 or self.samples.ndim != 2 or self.rate < 1:
            raise ValueError(
                f"a sound must be int16 [channels, N] of a positive rate, not {self.samples.dtype} "
                f"{list(self.samples.shape)} of {self.rate}"
            )

    @property
    def mono(self) -> np.ndarray:
        """The mean of the channels, float32 ``[N]`` in -1 to 1."""
        return self.samples.astype(np.float32).mean(axis=0) / FULL_SCALE

    @property
    def seconds(self) -> float:
        """Length in seconds."""
        return self.samples.shape[1] / self.rate

    def wav(self) -> bytes:
        """The content of a WAV file."""
        buffer = io.BytesIO()
        with wave.open(buffer, "wb") as file:
            file.setnchannels(self.samples.shape[0])
            file.setsampwidth(2)
            file.setframerate(self.rate)
            file.writeframes(np.ascontiguousarray(self.samples.T).astype("<i2").tobytes())
        return buffer.getvalue()


@dataclass(frozen=True, eq=False)
class VideoWithSound:
    """A video and the sound that belongs to it."""

    frames: np.ndarray
    """uint8 ``[F, H, W, 3]``; a single frame may be ``[H, W, 3]``."""
    sound: Waveform
    frame_rate: float
    """Frames per second."""


def spectrum_picture(sound: Waveform) -> np.ndarray:
    """A picture of the spectrum over time: uint8 ``[NUM_ROWS, W, 3]``.

    Time runs to the right, and frequency upwards, from 0 to half of the sampling rate. Brightness is the level in
    decibels, from ``LOWEST_DB`` to the loudest point. Silence is black.
    """
    length = max(int(sound.rate * WINDOW_SECONDS), 2 * NUM_ROWS)
    samples = np.pad(sound.mono, (length // 2, length))
    starts = np.linspace(0, max(sound.samples.shape[1] - 1, 0), _picture_width(sound)).astype(int)
    windows = np.stack([samples[start : start + length] for start in starts]) * np.hanning(length)
    power = np.abs(np.fft.rfft(windows, axis=1)) ** 2  # [W, bins]
    edges = np.linspace(0, power.shape[1], NUM_ROWS + 1).astype(int)
    rows = np.stack([power[:, low:high].max(axis=1) for low, high in itertools.pairwise(edges)])
    levels = 10 * np.log10(np.maximum(rows, 1e-10) / max(float(rows.max()), 1e-10))
    brightness = np.clip(1 - levels / LOWEST_DB, 0, 1) if rows.max() > 1e-6 else np.zeros_like(rows)
    places = brightness[::-1] * (len(COLOURS) - 1)
    channels = [np.interp(places, np.arange(len(COLOURS)), COLOURS[:, channel]) for channel in range(3)]
    return np.stack(channels, axis=-1).round().astype(np.uint8)


def _picture_width(sound: Waveform) -> int:
    """Width of a picture: a column for each half of a window, within bounds."""
    return int(np.clip(2 * sound.seconds / WINDOW_SECONDS, 64, MOST_COLUMNS))
