"""The folder that samples are written to: a file for each, their rows in samples.jsonl, and a page that shows them."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from html import escape
from pathlib import Path
from typing import cast

import numpy as np

from sfumato.config.characters import printable
from sfumato.config.writing import open_new, open_to_append, write_atomically
from sfumato.errors import ConfigError
from sfumato.rewards.base import Sample
from sfumato.tracking.json_lines import strict_json
from sfumato.tracking.page import render_page
from sfumato.tracking.progress import format_value
from sfumato.tracking.report_answers import fold_text
from sfumato.tracking.report_samples import audio_player, grid_table, picture_tag, prompt_rows
from sfumato.tracking.report_tables import render_section
from sfumato.tracking.samples import FRAME_MS, thumbnail_data_uri, write_picture
from sfumato.tracking.waveforms import VideoWithSound

PAGE = "index.html"
ROWS = "samples.jsonl"
MAX_PIXELS = 256
MOST_SHOWN = 64
"""Samples of each model on the page; all are in files."""
FRAMES_PER_S = 1000 // FRAME_MS
"""Of videos that do not say at which rate they are played."""
AAC_RATE = 48000
"""Samples per second of the sound in MP4 files; AAC knows few rates."""


@dataclass(frozen=True)
class NamedSample:
    """A sample of one of several models."""

    model: str
    """The label of its source."""
    prompt_id: int
    """Row of the prompt: it keys the noise, with the seed."""
    seed: int
    sample: Sample
    rewards: Mapping[str, float] = field(default_factory=dict)
    """Values by reward, NaN where it failed."""


def choose_folder(out: Path | None, default: str) -> Path:
    """The folder to write to, which is made: the one asked for, or the first of ``default-1``, ``default-2``, ... that
    does not exist.

    Raises:
        ConfigError: when it holds something, or cannot be made.
    """
    folder = out
    number = 1
    while folder is None:
        candidate = Path(f"{default}-{number}")
        folder = None if candidate.exists() else candidate
        number += 1
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir())):
        raise ConfigError(f"--out {folder} exists and is not empty: name another folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: cannot make the folder: {error}") from error
    return folder


SHOWN_AS = {".mp4": ".webp", ".wav": ".png"}
"""Endings of the pictures that stand beside files of a kind, which a page shows."""


@dataclass(frozen=True)
class _Written:
    """What the page needs of a sample once its content is in a file."""

    model: str
    prompt_id: int
    seed: int
    prompt: str
    file: str
    text: str | None
    damage: str
    rewards: Mapping[str, float]


class SamplesFolder:
    """Writes samples as they are drawn, so that an interrupted command leaves those that were finished."""

    def __init__(self, folder: Path) -> None:
        """``folder`` is empty."""
        self.folder = folder
        self.left_out = ""
        """What of the samples was not written, and what it needs."""
        self._written: list[_Written] = []
        self._sources: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self._written)

    def add(self, named: NamedSample) -> None:
        """Writes a sample's file and row; its pixels are not held on to. Raises OSError on a full disk."""
        file = self._write(named)
        with open_to_append(self.folder / ROWS) as rows:
            rows.write(strict_json(self._sample_row(named, file)).encode() + b"\n")
        sample = named.sample
        self._written.append(
            _Written(
                named.model,
                named.prompt_id,
                named.seed,
                sample.prompt,
                file,
                sample.text,
                sample.damage,
                named.rewards,
            )
        )

    def write_page(self, notes: Sequence[str]) -> Path:
        """Writes the page: a row for each prompt and seed, a column for each model, below lines of notes."""
        return write_sections(self.folder, "Samples", notes, [self.grid()])

    def grid(self) -> str:
        """The section of the page with the samples."""
        models = list(dict.fromkeys(written.model for written in self._written))
        cells: dict[tuple[int, int], dict[str, _Written]] = {}
        for written in self._written:
            cells.setdefault((written.prompt_id, written.seed), {})[written.model] = written
        shown = list(cells.items())[:MOST_SHOWN]
        head = "".join(f'<th scope="col">{escape(printable(model))}</th>' for model in models)
        body = []
        for (prompt_id, seed), by_model in shown:
            row = [
                self._render_sample(by_model[model]) if model in by_model else "<span class=gap>absent</span>"
                for model in models
            ]
            prompt = next(iter(by_model.values())).prompt
            body.append(prompt_rows(prompt, seed, self._render_source(prompt_id), row))
        hidden = f"{len(shown)} of {len(cells)} rows; all are in {ROWS}" if len(shown) < len(cells) else ""
        width = max(104, min(MAX_PIXELS, 1080 // max(len(models), 1) - 10))
        return render_section("Same prompts and seeds", hidden, grid_table(head, body, width))

    def _write(self, named: NamedSample) -> str:
        """Writes the content, and returns the path of its file within the folder."""
        sample = named.sample
        name = f"{folder_name(named.model)}/{named.prompt_id:04d}_seed{named.seed}"
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        content = sample.content
        if isinstance(content, VideoWithSound):
            return self._write_video_with_sound(content, path)
        if sample.sound is not None:
            write_picture(sample.shown, path.with_name(f"{path.name}.png"))  # which pages embed
            with open_new(path.with_name(f"{path.name}.wav")) as file:
                file.write(sample.sound.wav())
            return f"{name}.wav"
        if sample.image is None:
            with open_new(path.with_name(f"{path.name}.txt")) as file:
                file.write(cast(str, sample.text).encode("utf-8", "replace"))
            return f"{name}.txt"
        if sample.image.ndim == 3:
            write_picture(sample.image, path.with_name(f"{path.name}.png"))
            return f"{name}.png"
        frame_rate = sample.frame_rate or FRAMES_PER_S
        # which pages embed
        write_picture(sample.image, path.with_name(f"{path.name}.webp"), round(1000 / frame_rate))
        has_mp4 = write_video(sample.image, path.with_name(f"{path.name}.mp4"), frame_rate)
        return f"{name}{self._video_ending(has_mp4, 'OpenCV with VP9')}"

    def _write_video_with_sound(self, content: VideoWithSound, path: Path) -> str:
        """Writes an animation, which pages embed, a WAV file, and both as one MP4 file where PyAV is installed."""
        write_picture(content.frames, path.with_name(f"{path.name}.webp"), round(1000 / content.frame_rate))
        with open_new(path.with_name(f"{path.name}.wav")) as file:
            file.write(content.sound.wav())
        has_mp4 = write_sounding_video(content, path.with_name(f"{path.name}.mp4"))
        return f"{path.parent.name}/{path.name}{self._video_ending(has_mp4, 'PyAV')}"

    def _video_ending(self, has_mp4: bool, needed: str) -> str:
        """The ending of a video's file; one that is no MP4 is noted in ``left_out``."""
        if not has_mp4:
            self.left_out = (
                f"videos are written as WebP, not as MP4, which needs {needed}: pip install 'sfumato[video]'"
            )
        return ".mp4" if has_mp4 else ".webp"

    def _sample_row(self, named: NamedSample, file: str) -> dict[str, object]:
        sample = named.sample
        row: dict[str, object] = {
            "model": named.model,
            "prompt": sample.prompt,
            "seed": named.seed,
            "sample_id": named.prompt_id,
            "file": file,
        }
        if sample.text is not None:
            row |= {"text": sample.text, "num_tokens": sample.num_tokens, "is_truncated": sample.is_truncated}
        if sample.damage:
            row["damage"] = sample.damage
        if (source := self._source_file(named)) is not None:
            row["source"] = source
        return row | ({"rewards": dict(named.rewards)} if named.rewards else {})

    def _source_file(self, named: NamedSample) -> str | None:
        """The file of the prompt's image, written once for each prompt; None where there is none."""
        sample = named.sample
        pixels = sample.source if sample.images is None else sample.images.side_by_side()
        if pixels is None:
            return None
        if named.prompt_id not in self._sources:
            name = f"source_{named.prompt_id:04d}.png"
            write_picture(pixels, self.folder / name)
            self._sources[named.prompt_id] = name
        return self._sources[named.prompt_id]

    def _render_sample(self, written: _Written) -> str:
        """A sample on the page, with its rewards below."""
        if written.text is not None:
            content = f'<div class="text">{fold_text(written.text)}</div>'
        else:
            path = self.folder / written.file
            # browsers show the animation beside a video; there may be none of the other kinds
            content = _embed_picture(path.with_suffix(SHOWN_AS.get(path.suffix, path.suffix)), written.prompt)
            sound = path.with_suffix(".wav")
            if sound.is_file():
                content += audio_player(sound, str(Path(written.file).with_suffix(".wav")))
        damage = f'<span class="warn">{escape(written.damage)}</span>' if written.damage else ""
        rewards = "".join(
            f"<br><small>{escape(printable(name))} {'failed' if math.isnan(value) else format_value(value)}</small>"
            for name, value in written.rewards.items()
        )
        return f"{content}{damage}{rewards}"

    def _render_source(self, prompt_id: int) -> str:
        """The prompt's image on the page."""
        name = self._sources.get(prompt_id)
        if name is None:
            return ""
        return f'<div class="source">{_embed_picture(self.folder / name, "source")}<small>source</small></div>'


def write_sections(folder: Path, title: str, notes: Sequence[str], sections: Sequence[str]) -> Path:
    """Writes a folder's page of a heading, lines below it, and sections of HTML."""
    lines = "".join(f'<p class="state">{escape(printable(note))}</p>' for note in notes)
    header = f'<header><p class="brand">sfumato</p><h1>{escape(printable(title))}</h1>{lines}</header>'
    path = folder / PAGE
    write_atomically(path, render_page(title, [header, *sections]).encode("utf-8"))
    return path


def folder_name(label: str) -> str:
    """A label as the name of a folder."""
    return re.sub(r"[^\w.-]+", "_", label, flags=re.ASCII).strip("._") or "model"


def write_video(frames: np.ndarray, path: Path, frame_rate: float) -> bool:
    """Writes a video, uint8 ``[F, H, W, 3]``, as MP4 with VP9; without OpenCV (the extra ``video``) nothing.

    It has ``frame_rate`` frames per second.

    Returns:
        Whether it was written.
    """
    try:
        import cv2
    except ImportError:
        return False
    height, width = frames.shape[1:3]
    codec = cv2.VideoWriter.fourcc(*"vp09")
    writer = cv2.VideoWriter(str(path), codec, frame_rate, (width, height))
    if not writer.isOpened():
        return False
    for frame in frames:
        writer.write(np.ascontiguousarray(frame[..., ::-1]))  # OpenCV has blue first
    writer.release()
    return True


def write_sounding_video(content: VideoWithSound, path: Path) -> bool:
    """Writes a video with its sound as MP4 with H.264 and AAC; without PyAV (the extra ``video``) nothing.

    A side of an odd number of pixels loses one, which H.264 has no colours for.

    Returns:
        Whether it was written.
    """
    try:
        import av
    except ImportError:
        return False
    frames = content.frames if content.frames.ndim == 4 else content.frames[None]
    height, width = (side - side % 2 for side in frames.shape[1:3])
    content_of_file = io.BytesIO()
    with av.open(content_of_file, "w", format="mp4") as container:
        video = container.add_stream("libx264", rate=Fraction(content.frame_rate).limit_denominator(1001))
        video.width, video.height, video.pix_fmt = width, height, "yuv420p"
        layout = "stereo" if len(content.sound.samples) == 2 else "mono"
        audio = container.add_stream("aac", rate=AAC_RATE, layout=layout)
        for frame in frames:
            picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame[:height, :width]), format="rgb24")
            container.mux(video.encode(picture))
        container.mux(video.encode())
        interleaved = np.ascontiguousarray(content.sound.samples.T).reshape(1, -1)
        sound = av.AudioFrame.from_ndarray(interleaved, format="s16", layout=layout)
        sound.sample_rate = content.sound.rate
        for converted in av.AudioResampler(format="fltp", layout=layout, rate=AAC_RATE).resample(sound):
            container.mux(audio.encode(converted))
        container.mux(audio.encode())
    with open_new(path) as file:
        file.write(content_of_file.getvalue())
    return True


def _embed_picture(path: Path, alt: str) -> str:
    """An embedded picture; small ones with hard pixels."""
    return picture_tag(*thumbnail_data_uri(path, MAX_PIXELS), printable(alt))
