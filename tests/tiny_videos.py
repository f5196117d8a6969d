"""Small video files with sound, made by PyAV."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path

import numpy as np

from sfumato.tracking.waveforms import FULL_SCALE


def write_video(
    path: Path,
    *,
    seconds: float = 0.5,
    frame_rate: int = 24,
    size: tuple[int, int] = (48, 64),
    frequency: float | None = 440.0,
    rate: int = 22050,
    channels: int = 1,
    level: float = 0.4,
    codecs: tuple[str, str] = ("mpeg4", "aac"),
) -> Path:
    """A moving bar with a tone; ``frequency`` None leaves the sound out, and ``level`` 0 makes it silent."""
    import av

    height, width = size
    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        video = container.add_stream(codecs[0], rate=Fraction(frame_rate))
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        layout = {1: "mono", 2: "stereo", 6: "5.1"}[channels]
        audio = None if frequency is None else container.add_stream(codecs[1], rate=rate, layout=layout)
        for number in range(round(seconds * frame_rate)):
            pixels = np.full((height, width, 3), 40, np.uint8)
            place = int(number / frame_rate * 40) % width  # the same at a moment, whatever the frame rate
            pixels[:, place : place + 8] = (230, 120, 60)
            container.mux(video.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(video.encode())
        if audio is not None and frequency is not None:
            times = np.arange(round(seconds * rate)) / rate
            wave = (level * FULL_SCALE * np.sin(2 * np.pi * frequency * times)).astype(np.int16)
            interleaved = np.repeat(wave[:, None], channels, axis=1).reshape(1, -1)
            sound = av.AudioFrame.from_ndarray(np.ascontiguousarray(interleaved), format="s16", layout=layout)
            sound.sample_rate = rate
            container.mux(audio.encode(sound))
            container.mux(audio.encode())
    return path


def write_videos(folder: Path, tones: dict[str, float], copies: int = 2) -> Path:
    """Files of videos with tones, and a table of captions. Returns the table."""
    rows = []
    for name, frequency in tones.items():
        for copy in range(copies):
            file = f"{name}_{copy}.mp4"
            write_video(folder / file, frequency=frequency, level=0.3 + 0.1 * copy)
            rows.append({"image": file, "text": f"write {name}"})
    table = folder / "metadata.jsonl"
    table.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return table
