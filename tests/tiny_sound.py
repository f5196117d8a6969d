"""Tiny pipelines of families that make sound, as descriptions that ``model.config_path`` takes, and files of tones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from sfumato.tracking.waveforms import FULL_SCALE, Waveform


def tiny_stable_audio3() -> dict[str, Any]:
    """Stable Audio 3: 0.1 s of 8 kHz are 8 x 13 latents."""
    return {
        "pipeline": "StableAudio3Pipeline",
        "transformer": {
            "embed_dim": 32,
            "depth": 2,
            "num_heads": 4,
            "timestep_features_dim": 16,
            "num_memory_tokens": 4,
        },
        "vae": {"latent_std": 0.3},
        "text_encoder": {"width": 16},
        "tokenizer": {"words": ["tone"]},
        "duration_embedder": {"longest_seconds": 4.0},
    }


def tiny_ace_step() -> dict[str, Any]:
    """ACE-Step 1.5 base: 0.1 s of 8 kHz are 8 x 13 latents; the first block attends to a window."""
    return {
        "pipeline": "AceStepPipeline",
        "transformer": {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 3,
        },
        "text_encoder": {"width": 16},
        "tokenizer": {"words": ["tone", "Instruction", "Caption", "Metas", "Languages", "Lyric"]},
    }


def tone(frequency: float, seconds: float = 0.4, rate: int = 4000, phase: float = 0.0, level: float = 0.5) -> Waveform:
    """A sine wave of one channel."""
    times = np.arange(int(seconds * rate)) / rate
    wave = level * np.sin(2 * np.pi * frequency * times + phase)
    return Waveform((wave * FULL_SCALE).round().astype(np.int16)[None], rate)


def write_tones(folder: Path, pitches: dict[str, float], copies: int = 4, **settings: Any) -> Path:
    """Files of tones with a table of captions: ``tone high``. Returns the table."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(7)
    rows = []
    for name, frequency in pitches.items():
        for copy in range(copies):
            file = f"{name}_{copy}.wav"
            sound = tone(frequency, phase=generator.uniform(0, 2 * np.pi), **settings)
            (folder / file).write_bytes(sound.wav())
            rows.append({"audio": file, "text": f"tone {name}"})
    table = folder / "metadata.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return table
