"""The spectrum of a sound file as the picture that reports show, too."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image

from sfumato.config.file_checks import file_problem
from sfumato.studio.thumbnails import BrokenPictureError
from sfumato.tracking.samples import MOST_BYTES
from sfumato.tracking.waveforms import FULL_SCALE, Waveform, spectrum_picture

MOST_SAMPLES = 2**26
"""Of all channels: 12 minutes of stereo at 44.1 kHz; of a longer sound the beginning is shown."""


def draw_spectrum(path: Path) -> bytes:
    """A PNG picture of the spectrum of a sound file, its channels averaged.

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
            # as floats: libsndfile would round those of a file of floats to -1, 0 and 1
            waves = opened.read(MOST_SAMPLES // max(opened.channels, 1), dtype="float32", always_2d=True)
            rate = opened.samplerate
    except (soundfile.LibsndfileError, RuntimeError, ValueError) as error:
        raise BrokenPictureError(f"{path.name} is no sound that can be read") from error
    samples = (FULL_SCALE * np.clip(np.nan_to_num(waves.T), -1, 1)).astype(np.int16)
    buffer = io.BytesIO()
    Image.fromarray(spectrum_picture(Waveform(samples, rate))).save(buffer, "PNG")
    return buffer.getvalue()
