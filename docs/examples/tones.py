"""Tones to train a tiny model of sound on, and a reward that hears whether a sound is the wanted tone.

    python docs/examples/tones.py runs/sound/tones

writes WAV files of six keys with captions (``metadata.jsonl``), and ``prompts.jsonl`` and ``eval_prompts.jsonl``
with the frequency of each. Two captions of five name another key, as captions of collected files do: RL has to mend
what a model learns from them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from sfumato.rewards.base import Sample
from sfumato.tracking.waveforms import Waveform

KEYS = {"do": 300.0, "re": 450.0, "mi": 650.0, "fa": 850.0, "sol": 1100.0, "la": 1350.0}
"""Frequencies of the keys in hertz."""

RATE = 4000
SECONDS = 0.4
COPIES = 60
MISLABELLED = 24
"""How many of a key's files have a caption that names another key."""
EVALUATED = 16
"""How many sounds of each key an evaluation draws."""
WIDTH_HZ = 30.0
"""How far from the wanted frequency a sound still counts as the tone."""


def write_data(folder: Path) -> None:
    """Writes sounds, captions and prompts."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = np.random.default_rng(0)
    times = np.arange(int(RATE * SECONDS)) / RATE
    captions = []
    for key, frequency in KEYS.items():
        others = [other for other in KEYS if other != key]
        for copy in range(COPIES):
            phase = generator.uniform(0, 2 * np.pi)
            wave = generator.uniform(0.3, 0.6) * np.sin(2 * np.pi * frequency * times + phase)
            name = f"{key}_{copy:02d}.wav"
            sound = Waveform((32767 * wave).round().astype(np.int16)[None], RATE)
            (folder / name).write_bytes(sound.wav())
            named = others[copy % len(others)] if copy < MISLABELLED else key
            captions.append({"audio": name, "text": f"key {named}"})
    prompts = [{"prompt": f"key {key}", "hertz": frequency} for key, frequency in KEYS.items()]
    files = {"metadata.jsonl": captions, "prompts.jsonl": prompts, "eval_prompts.jsonl": prompts * EVALUATED}
    for name, rows in files.items():
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def hears_tone(sample: Sample) -> float:
    """The share of a sound's power that is near the frequency in the column ``hertz``, from 0 to 1."""
    sound = sample.waveform
    samples = sound.mono
    power = np.abs(np.fft.rfft(samples * np.hanning(len(samples)))) ** 2
    frequencies = np.fft.rfftfreq(len(samples), 1 / sound.rate)
    is_near = np.abs(frequencies - sample.metadata["hertz"]) <= WIDTH_HZ
    return float(power[is_near].sum() / max(power.sum(), 1e-12))


if __name__ == "__main__":
    write_data(Path(sys.argv[1]))
