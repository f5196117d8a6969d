"""The samples of a run, images or texts, kept with their prompts, seeds and rewards, and laid out as grids."""

from __future__ import annotations

import base64
import io
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sfumato.tracking.trackers import read_jsonl, strict_json


@dataclass(frozen=True)
class SampleRecord:
    """One generated sample and what is known about it.

    Attributes:
        content: an image, uint8 [H, W, 3], or a text.
        kind: "eval" samples keep sample_id, prompt and seed at every step, so they can be compared over training.
        sample_id: unique among the samples of one kind in one step.
        rewards: by reward name; NaN where scoring failed.
        total: the reward that training uses; NaN where scoring failed.
        advantage: None where there is none (evaluation).
        policy_version: number of finished optimisation steps of the weights that made the sample.
    """

    content: np.ndarray | str
    kind: Literal["eval", "train"]
    prompt: str
    seed: int
    sample_id: int
    rewards: dict[str, float] = field(default_factory=dict)
    total: float = float("nan")
    advantage: float | None = None
    policy_version: int = 0

    def __post_init__(self) -> None:
        if self.kind not in ("eval", "train"):
            raise ValueError(f'kind must be "eval" or "train", not {self.kind!r}')
        image = self.content
        if isinstance(image, str):
            return
        if image.dtype != np.uint8 or image.ndim != 3 or image.shape[-1] != 3:
            raise ValueError(f"image must be uint8 [H, W, 3], not {image.dtype} {list(image.shape)}")


def step_folder(folder: Path, step: int) -> Path:
    """Where a run folder keeps the samples of one step."""
    return Path(folder) / "samples" / f"step_{step:06d}"


def save_samples(folder: Path, step: int, samples: list[SampleRecord]) -> Path:
    """Writes all samples of one step: PNG files and ``samples.jsonl``, which also holds texts. NaN becomes null.

    The step's folder is complete or absent. Saving a step again, as a resumed run does, replaces it, so one call
    holds everything that the step shows, both kinds.

    Args:
        folder: the run folder; the samples go to ``samples/step_000010/`` below it.
        step: number of finished optimisation steps.
        samples: may be empty.

    Returns:
        The step's folder.

    Raises:
        ValueError: two samples of one kind have the same sample_id.
    """
    final = step_folder(folder, step)
    tmp, old = (final.with_name(final.name + suffix) for suffix in (".tmp", ".old"))
    for leftover in (tmp, old):
        shutil.rmtree(leftover, ignore_errors=True)
    names = [f"{sample.kind}_{sample.sample_id:04d}" for sample in samples]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two samples of step {step} would be {name}; sample_id must be unique for each kind")

    tmp.mkdir(parents=True)
    with (tmp / "samples.jsonl").open("w", encoding="utf-8", newline="\n") as file:
        for name, sample in zip(names, samples, strict=True):
            if not isinstance(sample.content, str):
                Image.fromarray(np.ascontiguousarray(sample.content)).save(tmp / f"{name}.png")
            file.write(strict_json(_row(name, sample)) + "\n")
    # A folder cannot be renamed over a full one. Between the two renames the step is absent, never half there.
    if final.exists():
        final.rename(old)
    tmp.rename(final)
    shutil.rmtree(old, ignore_errors=True)
    return final


def read_samples(output_dir: Path) -> dict[int, list[dict[str, Any]]]:
    """Reads the rows of every ``samples.jsonl`` of a run folder, by step in ascending order.

    The image of a row is ``step_folder(output_dir, step) / row["file"]``; one of a text has ``text`` instead.
    Unfinished folders are not looked at.
    """
    found = {}
    for folder in (Path(output_dir) / "samples").glob("step_*"):
        match = re.fullmatch(r"step_(\d+)", folder.name)
        if match and (folder / "samples.jsonl").is_file():
            found[int(match[1])] = read_jsonl(folder / "samples.jsonl")
    return dict(sorted(found.items()))


def drop_samples_after(output_dir: Path, step: int) -> None:
    """Removes the samples of later steps, which a run that resumes from ``step`` makes again."""
    for folder in (Path(output_dir) / "samples").glob("step_*"):
        match = re.fullmatch(r"step_(\d+)", folder.name)
        if match and int(match[1]) > step:
            shutil.rmtree(folder)


def image_grid(
    images: Sequence[np.ndarray],
    columns: int,
    captions: Sequence[str] | None = None,
    *,
    scale: int = 1,
    padding: int = 4,
    background: tuple[int, int, int] = (255, 255, 255),
) -> Image.Image:
    """Lays images out row by row.

    Args:
        images: uint8 [H, W, 3] each; sizes may differ, a cell is as large as the largest.
        columns: cells in a row, at least 1.
        captions: one per image, drawn below it and shortened to the width of the cell. The built-in font knows
            Latin letters only, others are shown as "?".
        scale: whole factor by which images are enlarged, without smoothing.
        padding: pixels between cells and around them.
        background: colour between the cells; captions are drawn in black or white, whichever can be read.

    Raises:
        ValueError: no images, no columns, or another number of captions than of images.
    """
    if not images or columns < 1 or scale < 1:
        raise ValueError(f"a grid needs images, columns and scale, not {len(images)}, {columns} and {scale}")
    if captions is not None and len(captions) != len(images):
        raise ValueError(f"{len(captions)} captions for {len(images)} images")
    font = ImageFont.load_default(size=12)
    line_height = 16 if captions is not None else 0
    cell_width = scale * max(image.shape[1] for image in images)
    cell_height = scale * max(image.shape[0] for image in images) + line_height
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    size = (columns * (cell_width + padding) + padding, rows * (cell_height + padding) + padding)
    grid = Image.new("RGB", size, background)
    draw = ImageDraw.Draw(grid)
    ink = (0, 0, 0) if sum(background) > 3 * 127 else (255, 255, 255)

    for index, image in enumerate(images):
        x = padding + (index % columns) * (cell_width + padding)
        y = padding + (index // columns) * (cell_height + padding)
        cell = Image.fromarray(np.ascontiguousarray(image))
        if scale > 1:
            cell = cell.resize((cell.width * scale, cell.height * scale), Image.Resampling.NEAREST)
        grid.paste(cell, (x, y))
        if captions is not None:
            text = _shorten(captions[index], cell_width, font)
            draw.text((x, y + cell_height - line_height + 1), text, fill=ink, font=font)
    return grid


def choose_evenly(items: list[int], count: int) -> list[int]:
    """At most ``count`` of the items at even distances, the first and the last among them."""
    if len(items) <= count:
        return items
    return [items[i] for i in sorted({round(i) for i in np.linspace(0, len(items) - 1, count)})]


def thumbnail_data_uri(path: Path, max_pixels: int) -> tuple[str, int, int]:
    """An image file as a data URI with its width and height; what is larger than ``max_pixels`` is made smaller.

    A file that is small enough is embedded byte for byte. A smaller copy is JPEG: as PNG, a page with a hundred
    photographs would be too large for a phone.
    """
    content, mime = path.read_bytes(), "png"
    with Image.open(io.BytesIO(content)) as opened:
        image: Image.Image = opened
        if max(image.size) > max_pixels:
            image = image.convert("RGB")
            image.thumbnail((max_pixels, max_pixels), Image.Resampling.LANCZOS)
            buffer = io.BytesIO()
            image.save(buffer, "JPEG", quality=90)
            content, mime = buffer.getvalue(), "jpeg"
        return f"data:image/{mime};base64,{base64.b64encode(content).decode('ascii')}", *image.size


def _shorten(text: str, width: int, font: Any) -> str:
    """Cuts a caption, with dots at its end, so that it is at most ``width`` pixels wide."""
    text = " ".join(text.encode("latin-1", "replace").decode("latin-1").split())
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "...") > width:
        text = text[:-1]
    return text.rstrip() + "..." if text else ""


def _row(name: str, sample: SampleRecord) -> dict[str, Any]:
    content = {"text": sample.content} if isinstance(sample.content, str) else {"file": f"{name}.png"}
    return {
        **content,
        "kind": sample.kind,
        "prompt": sample.prompt,
        "seed": sample.seed,
        "sample_id": sample.sample_id,
        "rewards": sample.rewards,
        "total": sample.total,
        "advantage": sample.advantage,
        "policy_version": sample.policy_version,
    }
