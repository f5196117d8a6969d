"""Numbers as the tones of a telephone's keys, each of which is two sines (ITU-T Q.23), in noise, made in code."""

from __future__ import annotations

import io
import math
import wave

import numpy as np
import torch

RATE = 16_000
"""Samples per second."""

ROWS, COLUMNS = (697, 770, 852, 941), (1209, 1336, 1477)
"""Frequencies of the rows and columns of keys, in hertz."""

KEYS = ("123", "456", "789", " 0 ")

TONE, PAUSE = (0.06, 0.1), (0.02, 0.05)
"""Shortest and longest, in seconds."""

LOUDNESS, NOISE = (0.1, 0.3), (0.0, 0.15)
"""Amplitude of each sine, and standard deviation of the noise, at least and at most."""


def dialled(number: str, generator: torch.Generator) -> bytes:
    """A .wav file of the tones of a number, with pauses before, between and after them, of lengths of their own."""

    def between(bounds: tuple[float, float]) -> float:
        return bounds[0] + (bounds[1] - bounds[0]) * float(torch.rand((), generator=generator))

    loudness = between(LOUDNESS)
    noise = between(NOISE)
    parts = [np.zeros(round(between(PAUSE) * RATE))]
    for digit in number:
        row = next(index for index, keys in enumerate(KEYS) if digit in keys)
        times = np.arange(round(between(TONE) * RATE)) / RATE
        sines = (np.sin(2 * math.pi * hertz * times) for hertz in (ROWS[row], COLUMNS[KEYS[row].index(digit)]))
        parts += [loudness * sum(sines), np.zeros(round(between(PAUSE) * RATE))]
    heard = np.concatenate(parts)
    heard = heard + noise * torch.randn(len(heard), generator=generator, dtype=torch.float64).numpy()
    file = io.BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(RATE)
        written.writeframes((heard.clip(-1, 1) * 32767).round().astype("<i2").tobytes())
    return file.getvalue()
