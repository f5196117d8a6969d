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
"""Shortest and longest length of a tone and of a pause, in seconds."""

LOUDNESS, NOISE = (0.1, 0.3), (0.0, 0.15)
"""Smallest and largest amplitude of each sine, and smallest and largest standard deviation of the noise."""


def dial_number(number: str, generator: torch.Generator) -> bytes:
    """A .wav file, mono and 16 bit, of the tones of a number.

    Pauses stand before, between and after the tones; every tone and every pause has a length of its own.
    """

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
    samples = np.concatenate(parts)
    samples = samples + noise * torch.randn(len(samples), generator=generator, dtype=torch.float64).numpy()
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setnchannels(1)
        wav.setsampwidth(2)
        wav.setframerate(RATE)
        wav.writeframes((samples.clip(-1, 1) * 32767).round().astype("<i2").tobytes())
    return file.getvalue()
