"""The spectrum of a sound as a picture: time from left to right, frequency upwards, loudness as brightness."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from sfumato.config.file_checks import file_problem
from sfumato.studio.thumbnails import BrokenPictureError

WIDTH, HEIGHT = 800, 256
WINDOW = 2 * HEIGHT
QUIETEST_DB = -90.0
MOST_BYTES = 2**28
MOST_SAMPLES = 2**26
"""Of all channels: 12 minutes of stereo at 44.1 kHz; of a longer sound the beginning is shown."""


def draw_spectrum(path: Path) -> bytes:
    """A WebP picture of the spectrum of a sound file, its channels averaged.

    Raises:
        BrokenPictureError: the file is no sound, is too large, or soundfile is not installed.
    """
    if problem := file_problem(path, MOST_BYTES):
        raise BrokenPictureError(f"{path.name} {problem}")
    try:
        import soundfile
    except ImportError as error:
        raise BrokenPictureError("a spectrum needs the package soundfile: pip install sfumato[audio]") from error
    try:
        with soundfile.SoundFile(path) as opened:
            waves = opened.read(MOST_SAMPLES // max(opened.channels, 1), dtype="float32", always_2d=True)
    except (soundfile.LibsndfileError, RuntimeError, ValueError) as error:
        raise BrokenPictureError(f"{path.name} is no sound that can be read") from error
    levels = spectrum_levels(np.nan_to_num(waves.mean(axis=1)))
    shades = np.uint8(255 * np.clip(1 - levels / QUIETEST_DB, 0, 1))
    coloured = np.stack([shades // 3, shades // 2 + shades // 4, np.maximum(shades, 24)], axis=-1)
    buffer = io.BytesIO()
    Image.fromarray(coloured[::-1]).save(buffer, "WEBP", quality=85)
    return buffer.getvalue()


def spectrum_levels(wave: np.ndarray) -> np.ndarray:
    """Loudness in dB below the loudest place, float ``[HEIGHT, WIDTH]``, the lowest frequency first.

    Args:
        wave: float ``[n]``.
    """
    wave = np.pad(wave, (0, max(WINDOW - len(wave), 0)))
    starts = np.linspace(0, len(wave) - WINDOW, WIDTH).astype(int)
    window = np.hanning(WINDOW)
    power = np.empty((HEIGHT, WIDTH))
    for column, start in enumerate(starts):
        power[:, column] = np.abs(np.fft.rfft(wave[start : start + WINDOW] * window)[:HEIGHT]) ** 2
    floor = 10 ** (QUIETEST_DB / 10)
    return 10 * np.log10(np.maximum(power / max(float(power.max()), 1e-12), floor))
