"""Pictures that are made to start a program, to hang, to fill memory, or to show what nobody sees."""

import io
import os
import socket
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import EpsImagePlugin, Image

from sfumato.config.image_data import ImageTextDataConfig
from sfumato.data.files.file_columns import find_file
from sfumato.data.images.image_text import open_image_text
from sfumato.data.loader import IndexBatch
from sfumato.data.media.pictures import read_image
from sfumato.data.media.videos import read_frames
from sfumato.errors import DataError
from sfumato.models.diffusion.encoded import BadRows, read_pixels

EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n%%EOF\n"


@pytest.fixture
def ghostscript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program gs that leaves a mark where it was started; returns the mark, which is not there yet."""
    mark, program = tmp_path / "gs-was-started", tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch {mark}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)  # Pillow looks once
    return mark


def test_a_file_that_would_start_ghostscript_starts_nothing(tmp_path: Path, ghostscript: Path) -> None:
    path = tmp_path / "a.png"
    path.write_bytes(EPS)
    for source in (path, EPS):
        with pytest.raises(
            DataError, match=r"row 1: broken image .*: it is no PNG, JPEG, WEBP, BMP, GIF, TIFF or AVIF"
        ):
            read_image(source, "row 1")
        with pytest.raises(DataError, match="row 1"):
            read_frames(source, 2, "row 1")
    assert not ghostscript.exists()
    with pytest.raises((OSError, ValueError)), Image.open(path) as opened:  # so Pillow alone does start it
        opened.load()
    assert ghostscript.exists()


def test_what_is_no_file_is_refused_by_name(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "link.png").symlink_to(tmp_path / "pipe.png")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket.png"))
        for name, what in (
            ("pipe.png", "a named pipe"),
            ("link.png", "a named pipe"),
            ("socket.png", "a socket"),
            ("/dev/zero", "a device"),
        ):
            with pytest.raises(DataError, match=f"row 1: .*{Path(name).name} is {what}, not a file"):
                find_file({"image": name}, "image", tmp_path, "row 1")
            with pytest.raises(DataError, match=f"row 1: .*{Path(name).name} is {what}, not a file"):
                read_image(tmp_path / name, "row 1")
    folder = find_file({"image": "folder.png"}, "image", tmp_path, "row 1")
    with pytest.raises(DataError, match=r"row 1: .*folder\.png is a folder, not a file"):
        read_image(folder, "row 1")
    os.mkfifo(tmp_path / "film.mp4")
    with pytest.raises(DataError, match=r"row 1: .*film\.mp4 is a named pipe, not a file"):
        read_frames(tmp_path / "film.mp4", 2, "row 1")
    with pytest.raises(DataError, match=r"row 1: .*File name too long"):
        find_file({"image": "x" * 300}, "image", tmp_path, "row 1")


def test_rows_of_pipes_are_left_out_and_counted(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.png")
    Image.new("RGB", (8, 8), "red").save(tmp_path / "a.png")
    rows = "".join(f'{{"image": "{name}", "text": "x"}}\n' for name in ("pipe.png", "a.png", "/dev/zero"))
    (tmp_path / "data.jsonl").write_text(rows)
    said: list[str] = []
    config = ImageTextDataConfig(train_path=str(tmp_path / "data.jsonl"), height=8, width=8)
    pixels = read_pixels(open_image_text(config, 0), IndexBatch([0, 1, 2], [0, 1, 2]), BadRows(2, said.append))
    assert pixels is not None and pixels[1] == [1]
    assert "line 1" in said[0] and "named pipe" in said[0] and "line 3" in said[1] and "a device" in said[1]


def png(width: int, height: int) -> bytes:
    """A PNG file of a few bytes that says it is of that size."""
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", head), (b"IDAT", zlib.compress(b"\0" * 100_000)), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("size", [(100_000, 100_000), (2**31 - 1, 2**31 - 1), (179_000_000, 1)])
def test_decompression_bombs_are_refused_before_they_are_read(size: tuple[int, int]) -> None:
    with pytest.raises(DataError, match=r"row 1: image \(its bytes\) of more than 178,956,970 pixels: scale it down"):
        read_image(png(*size), "row 1")


def test_text_that_unpacks_to_gigabytes_is_refused() -> None:
    bomb = zlib.compress(b"x" * 200_000_000)
    data = b"a\0\0" + bomb
    chunk = struct.pack(">I", len(data)) + b"zTXt" + data + struct.pack(">I", zlib.crc32(b"zTXt" + data))
    whole = png(8, 8)
    with pytest.raises(DataError, match="row 1: broken image"):
        read_image(whole[:33] + chunk + whole[33:], "row 1")


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_transparent_pixels_are_white(mode: str) -> None:
    """Half of the picture is red or grey and hidden, the other half black and seen."""
    pixels = np.zeros((4, 4, 4), np.uint8)
    pixels[:, :2] = (200, 10, 10, 0)
    pixels[:, 2:] = (0, 0, 0, 255)
    image, buffer, more = Image.fromarray(pixels, "RGBA"), io.BytesIO(), {}
    if mode == "P":
        image = Image.fromarray((pixels[..., 3] // 255).astype(np.uint8), "P")
        image.putpalette([200, 10, 10, 0, 0, 0])
        more = {"transparency": 0}
    elif mode == "RGB":
        image, more = image.convert("RGB"), {"transparency": (200, 10, 10)}
    elif mode == "LA":
        image = image.convert("LA")
    image.save(buffer, "PNG", **more)
    shown = np.array(read_image(buffer.getvalue(), "row 1"))
    assert (shown[:, :2] == 255).all() and (shown[:, 2:] == 0).all()


def test_a_picture_of_which_nothing_shows_is_broken() -> None:
    """Programs leave the fourth byte of BMP files of 32 bits empty, which a later header calls alpha."""
    image = Image.new("RGBA", (4, 4), (200, 30, 30, 0))
    image.putpixel((1, 2), (200, 30, 30, 1))
    image.save(shown := io.BytesIO(), "PNG")
    assert read_image(shown.getvalue(), "row 1").size == (4, 4)
    image.putpixel((1, 2), (200, 30, 30, 0))
    image.save(hidden := io.BytesIO(), "PNG")
    with pytest.raises(DataError, match=r"row 1: .*all of it is transparent"):
        read_image(hidden.getvalue(), "row 1")


def test_half_transparent_is_mixed_with_white_and_opaque_is_untouched() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (8, 8, 4), np.uint8)
    pixels[:4, :, 3], pixels[4:, :, 3] = 255, 128
    buffer = io.BytesIO()
    Image.fromarray(pixels, "RGBA").save(buffer, "PNG")
    shown = np.array(read_image(buffer.getvalue(), "row 1")).astype(float)
    assert (shown[:4] == pixels[:4, :, :3]).all()
    expected = pixels[4:, :, :3] * (128 / 255) + 255 * (127 / 255)
    assert abs(shown[4:] - expected).max() <= 1


def test_frames_of_an_animation_are_on_white_too() -> None:
    frames = [Image.new("RGBA", (4, 4), (0, 0, 0, 0)), Image.new("RGBA", (4, 4), (0, 0, 255, 255))]
    buffer = io.BytesIO()
    frames[0].save(buffer, "WEBP", save_all=True, append_images=frames[1:], lossless=True)
    first, second = (np.array(frame) for frame in read_frames(buffer.getvalue(), 2, "row 1"))
    assert (first == 255).all() and (second == (0, 0, 255)).all()
