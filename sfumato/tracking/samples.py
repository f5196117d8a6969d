"""The samples of a run (images, videos, texts), stored with their prompts, seeds and rewards, and laid out as grids."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import math
import re
import shutil
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import NoneType
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageSequence

from sfumato.config.file_checks import file_problem, path_inside
from sfumato.config.open_mappings import JsonObject
from sfumato.config.writing import make_new_folder, open_new, remove, replace_file
from sfumato.errors import DataError
from sfumato.tracking.json_lines import is_number, read_jsonl, strict_json
from sfumato.tracking.waveforms import VideoWithSound, Waveform, spectrum_picture

FRAME_MS = 1000 // 16
"""Milliseconds for which a frame of a video is shown whose model does not say it: 16 a second."""

WEBP = {"quality": 90, "method": 0}
"""Settings of animations: 33 frames of 480 x 832 pixels take a seventh of a lossless file's size and a third of PNG's
time."""

FORMATS = ("PNG", "WEBP")
"""Formats that samples are written in, and the only ones that are read: a run folder may come from elsewhere."""

BROKEN = (OSError, ValueError, SyntaxError, EOFError, TypeError, LookupError, ArithmeticError, struct.error)
"""Errors that Pillow raises for files that are damaged, or made to break it."""

MOST_BYTES, MOST_PIXELS = 2**28, 2**30
"""Most bytes of a file that a page shows, and most pixels of all its frames together."""

EMBEDDED_BYTES = 600_000
"""Most bytes of an animation in a page; larger ones lose frames."""


@dataclass(frozen=True)
class SampleRecord:
    """One generated sample with its prompt, seed, rewards and file.

    Attributes:
        content: an image, uint8 [H, W, 3], a video, uint8 [F, H, W, 3], a text, a sound, or a video with its sound.
        source: the image that was edited or animated, uint8 [H, W, 3].
        kind: "eval" samples keep sample_id, prompt and seed at every step, so they can be compared over training;
            "watched" ones are of prompts that were asked for while the run was under way.
        sample_id: unique among the samples of one kind in one step.
        rewards: by reward name; NaN where scoring failed.
        total: the reward that training uses; NaN where scoring failed.
        advantage: None where there is none (evaluation).
        policy_version: number of finished optimisation steps of the weights that made the sample.
        damage: why the content is not what was sampled, such as NaN that became black; empty where it is.
        frame_rate: frames per second of a video; 0 where they are not known.
    """

    content: np.ndarray | str | Waveform | VideoWithSound
    kind: Literal["eval", "train", "watched"]
    prompt: str
    seed: int
    sample_id: int
    rewards: dict[str, float] = field(default_factory=dict)
    total: float = float("nan")
    advantage: float | None = None
    policy_version: int = 0
    source: np.ndarray | None = None
    damage: str = ""
    frame_rate: float = 0.0
    learned: dict[str, object] = field(default_factory=dict)
    """Further fields of a sample that an update learned from: its group, and what was made of its decisions."""

    def __post_init__(self) -> None:
        if self.kind not in ("eval", "train", "watched"):
            raise ValueError(f'kind must be "eval", "train" or "watched", not {self.kind!r}')
        if isinstance(self.content, str | Waveform):
            return
        image = self.picture
        if image.dtype != np.uint8 or image.ndim not in (3, 4) or image.shape[-1] != 3:
            raise ValueError(f"image must be uint8 [H, W, 3] or [F, H, W, 3], not {image.dtype} {list(image.shape)}")

    @property
    def file_ending(self) -> str:
        """The ending of the sample's picture; empty for a text, which has none."""
        if isinstance(self.content, str):
            return ""
        return ".webp" if self.picture.ndim == 4 else ".png"

    @property
    def picture(self) -> np.ndarray:
        """The image or video, or the spectrum of a sound."""
        assert not isinstance(self.content, str), "a text has no picture"
        if isinstance(self.content, VideoWithSound):
            return self.content.frames
        return spectrum_picture(self.content) if isinstance(self.content, Waveform) else self.content

    @property
    def sound(self) -> Waveform | None:
        """The sound, alone or of a video; None where there is none."""
        if isinstance(self.content, VideoWithSound):
            return self.content.sound
        return self.content if isinstance(self.content, Waveform) else None

    @property
    def frame_ms(self) -> int:
        """Milliseconds for which a frame of a video is shown."""
        frame_rate = self.content.frame_rate if isinstance(self.content, VideoWithSound) else self.frame_rate
        return round(1000 / frame_rate) if frame_rate else FRAME_MS

    @property
    def still(self) -> np.ndarray:
        """The image, uint8 [H, W, 3]; of a video the first, the middle and the last frame side by side."""
        content = self.picture
        return _join_still(content[None] if content.ndim == 3 else content)


def step_folder(folder: Path, step: int) -> Path:
    """Where a run folder keeps the samples of one step."""
    return Path(folder) / "samples" / f"step_{step:06d}"


def save_samples(folder: Path, step: int, samples: list[SampleRecord], *, add: bool = False) -> Path:
    """Writes all samples of one step, and ``samples.jsonl`` with their rows and texts. NaN becomes null.

    Images are PNG files, videos are animated WebP, which browsers show; equal source images share a file. A sound is a
    WAV file, with a picture of its spectrum beside it; that of a video lies beside the animation.

    The step's folder is complete or absent. Saving a step again, as a resumed run does, replaces the folder, so one
    call has to pass all samples of the step, of both kinds.

    Args:
        folder: the run folder; the samples go to ``samples/step_000010/`` below it.
        step: number of finished optimisation steps.
        samples: may be empty.
        add: the step's samples that are there stay, but for those of the same kind and id.

    Returns:
        The step's folder.

    Raises:
        ValueError: two samples of one kind have the same sample_id.
    """
    final = step_folder(folder, step)
    tmp, old = (final.with_name(final.name + suffix) for suffix in (".tmp", ".old"))
    for leftover in (tmp, old):
        remove(leftover)
    names = [f"{sample.kind}_{sample.sample_id:04d}" for sample in samples]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two samples of step {step} would be {name}; sample_id must be unique for each kind")

    make_new_folder(tmp)
    try:
        with open_new(tmp / "samples.jsonl") as file:
            for row in _copy_others(final, tmp, names) if add and final.is_dir() else ():
                file.write(strict_json(row).encode() + b"\n")
            for name, sample in zip(names, samples, strict=True):
                if sample.file_ending:
                    write_picture(sample.picture, tmp / f"{name}{sample.file_ending}", sample.frame_ms)
                if sample.sound is not None:
                    (tmp / f"{name}.wav").write_bytes(sample.sound.wav())
                if sample.source is not None:
                    write_picture(sample.source, tmp / _source_name(sample.source))
                file.write(strict_json(_sample_row(name, sample)).encode() + b"\n")
    except OSError:
        shutil.rmtree(tmp, ignore_errors=True)  # a full disk needs the room
        raise
    # A folder cannot be renamed over a full one. Between the two renames the step is absent, never half there.
    if final.exists():
        final.rename(old)
    tmp.rename(final)
    with contextlib.suppress(OSError):
        remove(old)
    return final


def _copy_others(final: Path, tmp: Path, names: list[str]) -> Iterator[JsonObject]:
    """Copies the files of a step's samples, but for those of ``names``, and yields their rows."""
    for row in _read_checked(final / "samples.jsonl"):
        if f"{row['kind']}_{row['sample_id']:04d}" in names:
            continue
        for field_name in ("file", "source", "sound"):
            path = path_inside(final, row[field_name]) if field_name in row else None
            if path is not None and path.is_file() and not (tmp / path.name).exists():
                shutil.copyfile(path, tmp / path.name)
        yield row


SHOWN = 16
"""Most pictures of a kind that are laid out in a grid and passed to trackers."""


def save_samples_and_grids(folder: Path, step: int, records: list[SampleRecord], *, add: bool = False) -> None:
    """``save_samples``, and for pictures of one size a grid of each kind."""
    grids = [] if not add else list(step_folder(folder, step).glob("grid_*.png"))
    content = {grid.name: grid.read_bytes() for grid in grids}
    path = save_samples(folder, step, records, add=add)
    for name, grid in content.items():
        with replace_file(path / name) as file:
            file.write(grid)
    for kind in dict.fromkeys(record.kind for record in records):
        shown = [record for record in records if record.kind == kind and not isinstance(record.content, str)][:SHOWN]
        images = [record.still for record in shown]
        if len({image.shape for image in images}) == 1:
            with replace_file(path / f"grid_{kind}.png") as file:
                image_grid(images, 4, [record.prompt for record in shown]).save(file, "PNG")


def read_stills(folder: Path, step: int) -> dict[str, np.ndarray]:
    """The pictures of a step's grids by kind: uint8 ``[N, H, W, 3]``; a video is three frames side by side.

    A kind whose pictures have several sizes has no grid, and is left out.
    """
    path = step_folder(folder, step)
    stills = {}
    rows = read_jsonl(path / "samples.jsonl") if path.is_dir() else []
    for kind in dict.fromkeys(row["kind"] for row in rows):
        files = [row["file"] for row in rows if row["kind"] == kind and "file" in row][:SHOWN]
        images = [_join_still(read_frames(path / file)) for file in files]
        if len({image.shape for image in images}) == 1:
            stills[kind] = np.stack(images)
    return stills


def _join_still(frames: np.ndarray) -> np.ndarray:
    """The image, or the first, the middle and the last frame side by side: ``[F, H, W, 3]`` to ``[H, W, 3]``."""
    if len(frames) == 1:
        return frames[0]
    return np.concatenate([frames[0], frames[len(frames) // 2], frames[-1]], axis=1)


def read_frames(path: Path) -> np.ndarray:
    """All frames of a picture's file: uint8 ``[F, H, W, 3]``."""
    with Image.open(path, formats=FORMATS) as opened:
        return np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(opened)])


def write_picture(content: np.ndarray, path: Path, frame_ms: int = FRAME_MS) -> None:
    """Writes an image, uint8 [H, W, 3], or a video [F, H, W, 3] as an endless animation, as the ending says.

    A frame is shown for ``frame_ms`` milliseconds.
    """
    frames = [Image.fromarray(frame) for frame in np.ascontiguousarray(content[None] if content.ndim == 3 else content)]
    if len(frames) == 1:
        frames[0].save(path)
    else:
        options = {"save_all": True, "append_images": frames[1:], "duration": frame_ms, "loop": 0, **WEBP}
        frames[0].save(path, **options)


def read_samples(output_dir: Path) -> dict[int, list[dict[str, object]]]:
    """Reads the rows of every ``samples.jsonl`` of a run folder, by step in ascending order.

    The image of a row is ``step_folder(output_dir, step) / row["file"]``; the row of a text has ``text`` instead.
    Unfinished folders are left out.

    Raises DataError when a row holds values that no run writes.
    """
    return {step: read_step(output_dir, step) for step in sample_steps(output_dir)}


def sample_steps(output_dir: Path) -> list[int]:
    """Steps of a run folder that have samples, ascending."""
    return sorted(step for step, path in _step_folders(output_dir) if (path / "samples.jsonl").exists())


def read_step(output_dir: Path, step: int) -> list[JsonObject]:
    """The rows of one step, which has samples. Raises DataError as ``read_samples``."""
    return _read_checked(step_folder(output_dir, step) / "samples.jsonl")


_TEXTS = ("kind", "prompt", "text", "file", "source", "sound", "damage")
_WHOLE = ("seed", "sample_id", "policy_version")
_VALUES = ("total", "advantage", "group_mean", "group_std")
_LISTS: dict[str, type | tuple[type, ...]] = {
    "trained_steps": int,
    "token_ids": int,
    "tokens": str,
    "clipped": (bool, NoneType),
    **dict.fromkeys(("log_ratio", "noise_levels", "log_probs", "token_advantages"), (int, float, NoneType)),
}
"""Fields of a sample's decisions, with the types of their values."""
_MOST_DECISIONS = 2**16
"""Far above what is saved of a sample: of a text its first 4,096 tokens."""
_MOST_DENOISING_STEPS = 10_000


def _read_checked(path: Path) -> list[JsonObject]:
    """Rows whose values are of the types that a run writes. Raises DataError that names file, row and value."""
    rows = read_jsonl(path)
    for number, row in enumerate(rows, start=1):
        wrong = find_wrong_field(row)
        if wrong is not None:
            raise DataError(
                f"{path}, row {number}: {wrong} is {str(row[wrong])[:60]!r}, which no run has written; remove the row, "
                "or restore the file"
            )
    return rows


def find_wrong_field(row: Mapping[str, object]) -> str | None:
    """Name of a field of a row of ``samples.jsonl`` that no run has written like this; None where all are right."""
    for name, value in row.items():
        if name in _TEXTS:
            is_right = isinstance(value, str)
        elif name in _WHOLE:
            is_right = type(value) is int and abs(value) < 2**64
        elif name in _VALUES:
            is_right = _is_value(value)
        elif name == "rewards":
            is_right = value is None or (isinstance(value, dict) and all(map(_is_value, value.values())))
        elif name in _LISTS:
            is_right = isinstance(value, list) and _are_decisions(name, value)
        else:
            is_right = True
        if not is_right:
            return name
    return None


def _are_decisions(name: str, values: list[object]) -> bool:
    """Whether a list of a row has the length and the types of what a run writes of a sample's decisions."""
    if len(values) > _MOST_DECISIONS or not all(isinstance(value, _LISTS[name]) for value in values):
        return False
    # a page lays out every step up to the last
    return name != "trained_steps" or all(
        isinstance(value, int) and 0 <= value < _MOST_DENOISING_STEPS for value in values
    )


def _is_value(value: object) -> bool:
    """Whether a value of a row is a finite number or null, which stands for one that is not finite."""
    return value is None or (is_number(value) and math.isfinite(value))


def drop_samples_after(output_dir: Path, step: int) -> None:
    """Removes the samples of later steps, which a run that resumes from ``step`` makes again."""
    for sample_step, path in _step_folders(output_dir):
        if sample_step > step:
            remove(path)


def _step_folders(output_dir: Path) -> list[tuple[int, Path]]:
    """Steps and folders of finished samples; folders that are links out of the run folder are left out."""
    paths = (Path(output_dir) / "samples").glob("step_*")
    folders = [(int(path.name[5:]), path) for path in paths if re.fullmatch(r"step_[0-9]{1,15}", path.name)]
    return [(step, path) for step, path in folders if path_inside(Path(output_dir), path.absolute()) == path.resolve()]


def image_grid(
    images: Sequence[np.ndarray],
    columns: int,
    captions: Sequence[str] | None = None,
    *,
    padding: int = 4,
) -> Image.Image:
    """Lays images out row by row.

    Args:
        images: uint8 [H, W, 3] each; sizes may differ, a cell is as large as the largest.
        columns: cells in a row, at least 1.
        captions: one per image, drawn below it and shortened to the width of the cell. The built-in font knows
            Latin letters only, others are shown as "?".
        padding: white pixels between cells and around them.

    Raises:
        ValueError: no images, no columns, or another number of captions than of images.
    """
    if not images or columns < 1:
        raise ValueError(f"a grid needs images and columns, not {len(images)} and {columns}")
    if captions is not None and len(captions) != len(images):
        raise ValueError(f"{len(captions)} captions for {len(images)} images")
    font = ImageFont.load_default(size=12)
    line_height = 16 if captions is not None else 0
    cell_width = max(image.shape[1] for image in images)
    cell_height = max(image.shape[0] for image in images) + line_height
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    size = (columns * (cell_width + padding) + padding, rows * (cell_height + padding) + padding)
    grid = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(grid)

    for index, image in enumerate(images):
        x = padding + (index % columns) * (cell_width + padding)
        y = padding + (index // columns) * (cell_height + padding)
        grid.paste(Image.fromarray(np.ascontiguousarray(image)), (x, y))
        if captions is not None:
            text = _shorten(captions[index], cell_width, font)
            draw.text((x, y + cell_height - line_height + 1), text, fill="black", font=font)
    return grid


def choose_evenly(items: list[int], count: int) -> list[int]:
    """At most ``count`` of the items at even distances, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[i] for i in sorted({round(i) for i in np.linspace(0, len(items) - 1, count)})]


def embedded_picture(output_dir: Path, step: int, name: str, max_pixels: int) -> tuple[str, int, int] | str:
    """A picture of a step for a page.

    Args:
        output_dir: the run folder.
        step: of the picture.
        name: of its file, as its row has it; a file outside of the step's folder is not read.
        max_pixels: width and height at most.

    Returns:
        What ``thumbnail_data_uri`` gives; or as text why the picture is not shown, to follow its name, perhaps empty.
    """
    path = path_inside(step_folder(output_dir, step), name)
    if path is None:
        return " lies outside of the samples"
    if path.suffix not in (".png", ".webp") or not path.is_file():
        return ""
    if file_problem(path, MOST_BYTES):
        return " is too large"
    try:
        return thumbnail_data_uri(path, max_pixels)
    except (*BROKEN, Image.DecompressionBombError, MemoryError):
        return " is broken"


def embedded_sound(path: Path | None, href: str) -> str:
    """The address of a sound for a page: its content where it is short, else ``href``; empty where there is none."""
    if path is None or path.suffix != ".wav" or not path.is_file() or file_problem(path, MOST_BYTES):
        return ""
    if path.stat().st_size > EMBEDDED_BYTES:
        return href
    return f"data:audio/wav;base64,{base64.b64encode(path.read_bytes()).decode('ascii')}"


def thumbnail_data_uri(path: Path, max_pixels: int) -> tuple[str, int, int]:
    """An image file as a data URI with its width and height, scaled down to at most ``max_pixels`` in each direction.

    A file that is small enough is embedded byte for byte. A scaled copy is JPEG, since as PNG a page with a hundred
    photographs would be too large for a phone; the copy of a video is WebP, with fewer frames where it would exceed
    ``EMBEDDED_BYTES``.

    Raises one of ``BROKEN`` for a file that cannot be read or is too large.
    """
    content = path.read_bytes()
    mime = path.suffix.removeprefix(".")
    with Image.open(io.BytesIO(content), formats=FORMATS) as opened:
        size = opened.size
        num_frames = getattr(opened, "n_frames", 1)
        if num_frames * math.prod(size) > MOST_PIXELS:
            raise ValueError(f"{num_frames} frames of {size} pixels")
        if max(size) > max_pixels or (num_frames > 1 and len(content) > EMBEDDED_BYTES):
            scale = min(max_pixels / max(size), 1.0)
            size = (max(round(size[0] * scale), 1), max(round(size[1] * scale), 1))
            content = _smaller_copy(opened, size)
            mime = "jpeg" if num_frames == 1 else "webp"
    return f"data:image/{mime};base64,{base64.b64encode(content).decode('ascii')}", *size


def _smaller_copy(image: Image.Image, size: tuple[int, int]) -> bytes:
    """A file of the image at another size; every second, fourth, ... frame of a video that is too large."""
    frame_ms = int(image.info.get("duration", FRAME_MS))
    iterator = ImageSequence.Iterator(image)
    frames = [frame.convert("RGB").resize(size, Image.Resampling.LANCZOS) for frame in iterator]
    buffer = io.BytesIO()
    if len(frames) == 1:
        frames[0].save(buffer, "JPEG", quality=90)
        return buffer.getvalue()
    step = 1
    while True:
        kept_frames = frames[::step]
        buffer = io.BytesIO()
        save_options = {"save_all": True, "append_images": kept_frames[1:], "duration": frame_ms * step, "loop": 0}
        kept_frames[0].save(buffer, "WEBP", quality=75, method=0, **save_options)
        if buffer.tell() <= EMBEDDED_BYTES or len(kept_frames) == 1:
            return buffer.getvalue()
        step *= 2


def _shorten(text: str, width: int, font: ImageFont.ImageFont | ImageFont.FreeTypeFont) -> str:
    """Cuts a caption, with dots at its end, so that it is at most ``width`` pixels wide."""
    text = " ".join(text.encode("latin-1", "replace").decode("latin-1").split())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text.rstrip() + "..." if text else ""


def _source_name(image: np.ndarray) -> str:
    """The name of a source image's file, by its pixels: samples of one prompt share the file."""
    pixels = np.ascontiguousarray(image)
    digest = hashlib.blake2b(pixels, digest_size=8).hexdigest()  # pyright: ignore[reportArgumentType]  # it is a buffer
    return f"source_{digest}.png"


def _sample_row(name: str, sample: SampleRecord) -> dict[str, object]:
    """The row of a sample in ``samples.jsonl``."""
    content = {"file": f"{name}{sample.file_ending}"} if sample.file_ending else {"text": sample.content}
    if sample.sound is not None:
        content["sound"] = f"{name}.wav"
    source = {} if sample.source is None else {"source": _source_name(sample.source)}
    return {
        **content,
        **source,
        **({"damage": sample.damage} if sample.damage else {}),
        "kind": sample.kind,
        "prompt": sample.prompt,
        "seed": sample.seed,
        "sample_id": sample.sample_id,
        "rewards": sample.rewards,
        "total": sample.total,
        "advantage": sample.advantage,
        "policy_version": sample.policy_version,
        **sample.learned,
    }
