"""Images and videos from every kind of file, and what is said of broken ones."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sfumato.data.files.file_columns import find_file, find_frames
from sfumato.data.media.pictures import check_image, fit_image, frames_of, framing_of, read_image
from sfumato.data.media.videos import UNREADABLE, read_frames
from sfumato.errors import DataError

SHADES = np.arange(0, 240, 20, dtype=np.uint8)
"""Grey of each frame of the test's video."""


def frames() -> list[Image.Image]:
    return [Image.fromarray(np.full((48, 64, 3), shade, np.uint8)) for shade in SHADES]


def write_video(folder: Path, kind: str) -> Path:
    path = folder / f"video.{kind}"
    if kind == "mp4":
        cv2 = pytest.importorskip("cv2")
        writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), 16, (64, 48))
        for frame in frames():
            writer.write(np.asarray(frame))
        writer.release()
    elif kind == "folder":
        path.mkdir()
        for index, frame in enumerate(frames()):
            frame.save(path / f"{index:03d}.png")
        (path / "notes.txt").write_text("no image")
    else:
        first, *rest = frames()
        more = {"lossless": True} if kind == "webp" else {}
        first.save(path, format={"apng": "PNG"}.get(kind, kind), save_all=True, append_images=rest, duration=62, **more)
    return path


def shades(actual: list[Image.Image]) -> list[int]:
    assert all(image.size == (64, 48) and image.mode == "RGB" for image in actual)
    return [round(float(np.asarray(image).mean())) for image in actual]


@pytest.mark.parametrize("as_bytes", [False, True])
@pytest.mark.parametrize("kind", ["mp4", "gif", "webp", "apng", "folder"])
def test_frames_are_taken_at_even_distances(tmp_path: Path, kind: str, as_bytes: bool) -> None:
    source: Any = write_video(tmp_path, kind)
    if as_bytes:
        source = sorted(source.glob("*.png")) if kind == "folder" else source.read_bytes()
    assert shades(read_frames(source, 12, "row 1")) == pytest.approx(SHADES.tolist(), abs=5)
    assert shades(read_frames(source, 4, "row 1")) == pytest.approx([0, 80, 140, 220], abs=5)
    assert shades(read_frames(source, 1, "row 1")) == pytest.approx([0], abs=5)
    with pytest.raises(DataError, match=r"row 1: the video has 12 frames, 13 are wanted \(data.num_frames\)"):
        read_frames(source, 13, "row 1")


def test_numbers_in_the_names_of_frames_count_as_numbers(tmp_path: Path) -> None:
    names = ["9.png", "10.png", "100.png", "a9 1.png", "a10 1.png", "a10 02.png", "b.png"]
    for name in names:
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    assert [path.name for path in frames_of(tmp_path) if isinstance(path, Path)] == names


def test_broken_videos_are_named(tmp_path: Path) -> None:
    pytest.importorskip("cv2")
    path = tmp_path / "a.mp4"
    path.write_bytes(b"no video at all")
    for source, shown in ((path, str(path)), (path.read_bytes(), "its bytes")):
        with pytest.raises(DataError) as caught:
            read_frames(source, 2, "data.jsonl, line 3")
        assert str(caught.value) == f"data.jsonl, line 3: broken video ({shown}): {UNREADABLE}"
    (tmp_path / "a.gif").write_bytes(write_video(tmp_path, "gif").read_bytes()[:300])
    with pytest.raises(DataError, match=r"line 3: "):
        read_frames(tmp_path / "a.gif", 12, "line 3")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="the video has 0 frames"):
        read_frames(tmp_path / "empty", 2, "line 3")


def test_broken_images_are_named(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    Image.fromarray(noise).save(buffer, "PNG")
    cut = buffer.getvalue()[:2000]
    check_image(cut, "row 1")  # its head is whole
    with pytest.raises(DataError, match=r"row 1: broken image \(its bytes\)"):
        read_image(cut, "row 1")
    with pytest.raises(DataError, match=r"row 1: broken image \(its bytes\)"):
        check_image(b"junk", "row 1")


def test_columns_hold_paths_bytes_or_lists_of_them(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    frames()[3].save(path)
    content = path.read_bytes()
    for value in ("a.png", str(path), {"bytes": None, "path": "a.png"}):
        assert find_file({"x": value}, "x", tmp_path, "row 1") == path
    for value in (content, {"bytes": content, "path": "gone.png"}):
        assert find_file({"x": value}, "x", tmp_path, "row 1") == content
    assert find_frames({"x": ["a.png", content]}, "x", tmp_path, "row 1") == [path, content]
    with pytest.raises(DataError, match=r"row 1: image file not found: .*gone\.png"):
        find_file({"x": "gone.png"}, "x", tmp_path, "row 1")
    with pytest.raises(DataError, match=r"row 1, frame 2: image file not found"):
        find_frames({"x": ["a.png", "gone.png"]}, "x", tmp_path, "row 1")
    with pytest.raises(DataError, match=r"row 1: column 'x' holds no image path or bytes; its columns are y, z"):
        find_file({"y": "a", "z": 1}, "x", tmp_path, "row 1")


def test_an_image_is_cut_or_stretched_to_its_size() -> None:
    wide = np.zeros((10, 40, 3), np.uint8)
    wide[:, 15:25] = 255
    image = Image.fromarray(wide)
    assert (fit_image(image, 10, 10) == 255).all()
    assert 0 < fit_image(image, 10, 10, "none").mean() < 128


@pytest.mark.parametrize("size", [(10, 40), (40, 10), (37, 53), (16, 16), (200, 301)])
def test_the_framing_is_where_the_cut_picture_lies_in_the_scaled_one(size: tuple[int, int]) -> None:
    """Against diffusers' training script of SDXL: the shorter side is scaled, and the middle is cut out."""
    framing = framing_of(size, 16, 24)
    scale = max(16 / size[0], 24 / size[1])
    expected = [max(0, round((side * scale - target) / 2)) for side, target in zip(size, (16, 24), strict=True)]
    assert framing == (*size, *expected) and 0 in framing[2:]
    assert framing_of(size, 16, 24, "none") == (*size, 0, 0)
