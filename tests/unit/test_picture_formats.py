"""Every format that is read, in every orientation and depth: what the head says is what the picture is."""

from __future__ import annotations

import io
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import sfumato
from sfumato.data.media.pictures import check_image, read_image, read_size
from sfumato.errors import DataError

HEIGHT, WIDTH = 24, 40

UPRIGHT = np.zeros((HEIGHT, WIDTH, 3), np.uint8)
UPRIGHT[:12, :20], UPRIGHT[:12, 20:], UPRIGHT[12:, :20] = (250, 10, 10), (10, 250, 10), (10, 10, 250)

TURNS = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: a.swapaxes(0, 1)[::-1],
    7: lambda a: a[::-1, ::-1].swapaxes(0, 1),
    8: lambda a: a.swapaxes(0, 1)[:, ::-1],
}
"""What is stored under EXIF's number so that the upright picture is seen."""

FORMATS = {"JPEG": {}, "PNG": {}, "WEBP": {"lossless": True}, "TIFF": {}, "AVIF": {"quality": 95}}


def exif_of(number: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = number
    return exif


def written(image: Image.Image, kind: str, **more: Any) -> bytes:
    image.save(file := io.BytesIO(), kind, **more)
    return file.getvalue()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def with_chunk(png: bytes, kind: bytes, data: bytes, before: bytes = b"IDAT") -> bytes:
    place = png.index(before) - 4
    return png[:place] + chunk(kind, data) + png[place:]


@pytest.mark.parametrize("kind", [*FORMATS, "TIFF compressed", "PNG late"])
def test_the_size_of_the_head_is_that_of_the_picture_however_it_is_turned(kind: str, tmp_path: Path) -> None:
    """Sizes decide the bucket before the picture is read."""
    for number, turn in TURNS.items():
        stored = Image.fromarray(np.ascontiguousarray(turn(UPRIGHT)))
        name = kind.split()[0]
        more = FORMATS[name] | ({"compression": "tiff_lzw"} if kind == "TIFF compressed" else {})
        if kind == "PNG late":  # which says behind its pixels how it is turned
            content = with_chunk(written(stored, "PNG"), b"eXIf", exif_of(number).tobytes()[6:], before=b"IEND")
        else:
            content = written(stored, name, exif=exif_of(number), **more)
        (path := tmp_path / f"{number}.jpg").write_bytes(content)  # whatever the name ends in
        for source in (content, path):
            image = read_image(source, "row 1")
            assert read_size(source, "row 1") == (image.height, image.width) == (HEIGHT, WIDTH), number
            far = abs(np.asarray(image).astype(int) - UPRIGHT).mean()
            assert far < (8 if name in {"JPEG", "AVIF"} else 1), (number, far)


@pytest.mark.parametrize(
    "mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16", "LAB", "YCbCr", "PA", "RGBa", "La"]
)
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "AVIF"])
def test_every_mode_of_every_format_is_read_or_named(kind: str, mode: str) -> None:
    """Random pictures: the size is that of the head, and colours are near what was meant."""
    smooth = np.linspace(40, 215, WIDTH)[None, :, None] * np.ones((HEIGHT, 1, 3)) - np.array([0, 20, 40])
    wanted = Image.fromarray(smooth.astype(np.uint8))
    if mode == "LAB":
        from PIL import ImageCms

        srgb, lab = ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB")
        image = ImageCms.profileToProfile(wanted, srgb, lab, outputMode="LAB")
    elif mode == "I;16":
        wanted = wanted.convert("L")
        image = Image.fromarray(np.asarray(wanted).astype(np.uint16) * 257)
    elif mode in {"RGBa", "La", "PA"}:
        image = wanted.convert({"RGBa": "RGBA", "La": "LA", "PA": "RGBA"}[mode])
        image = image.quantize(64, Image.Quantize.FASTOCTREE).convert("PA") if mode == "PA" else image.convert(mode)
    else:
        image = wanted.convert(mode)
    try:
        assert mode != "I;16" or kind in {"PNG", "TIFF"}, "Pillow cuts what is above 255 off when it writes others"
        content = written(image, kind)
    except (AssertionError, OSError, KeyError, ValueError):
        pytest.skip("Pillow does not write it")
    actual = read_image(content, "row 1")
    assert read_size(content, "row 1") == (actual.height, actual.width) == (HEIGHT, WIDTH)
    assert actual.mode == "RGB"
    expected = np.asarray(wanted.convert("L" if mode in {"1", "L", "LA", "I;16", "La"} else "RGB").convert("RGB"))
    far = abs(np.asarray(actual).astype(int) - expected).mean()
    assert far < {"1": 120, "P": 30, "PA": 30}.get(mode, 30 if kind == "GIF" else 6), far


def png_16(values: np.ndarray, **chunks: bytes) -> bytes:
    """A PNG file of 16 bits per channel: grey ``[h, w]`` or ``[h, w, 3]``."""
    height, width = values.shape[:2]
    colour = 0 if values.ndim == 2 else {2: 4, 3: 2, 4: 6}[values.shape[2]]
    raw = values.astype(">u2").reshape(height, -1)
    rows = b"".join(b"\0" + row.tobytes() for row in raw)
    head = struct.pack(">IIBBBBB", width, height, 16, colour, 0, 0, 0)
    parts = [chunk(b"IHDR", head), *(chunk(name.encode(), data) for name, data in chunks.items())]
    return b"\x89PNG\r\n\x1a\n" + b"".join([*parts, chunk(b"IDAT", zlib.compress(rows)), chunk(b"IEND", b"")])


@pytest.mark.parametrize("shape", [(16, 16), (16, 16, 2), (16, 16, 3), (16, 16, 4)])
def test_16_bits_that_only_use_12_are_refused_and_others_are_the_upper_8(shape: tuple[int, ...]) -> None:
    values = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    values = values if len(shape) == 2 else np.repeat(values[..., None], shape[2], 2)
    if len(shape) == 3 and shape[2] in (2, 4):
        values[..., -1] = 65535
    result = np.asarray(read_image(png_16(values), "row 1"))
    grey = values if values.ndim == 2 else values[..., 0]
    assert (result[..., 0] == grey >> 8).all()
    for shift in (4, 6, 8):  # 12, 10 and 8 bits in 16
        dark = values >> shift
        if len(shape) == 3 and shape[2] in (2, 4):
            dark[..., -1] = 65535
        with pytest.raises(DataError, match=r"row 1: broken image .*16 bits per channel.*scale it to 16 bits"):
            read_image(png_16(dark), "row 1")


def test_12_bits_that_the_file_says_are_scaled() -> None:
    values = np.linspace(0, 4095, 256).astype(np.uint16).reshape(16, 16)
    assert (np.asarray(read_image(png_16(values, sBIT=b"\x0c"), "row 1"))[..., 0] == values >> 4).all()
    scaled = values << 4  # as the standard has it: what says 12 bits and has 16 stays
    assert (np.asarray(read_image(png_16(scaled, sBIT=b"\x0c"), "row 1"))[..., 0] == values >> 4).all()


@pytest.mark.parametrize("order", ["<", ">"])
def test_deep_tiffs_are_read_in_either_order_of_bytes_and_white_may_be_0(order: str) -> None:
    values = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    for photometric, expected in ((1, values >> 8), (0, (65535 - values) >> 8)):
        if photometric == 0 and order == ">":
            continue  # Pillow reads none
        image = read_image(tiff(values.astype(f"{order}u2"), order, {262: photometric}), "row 1")
        assert (np.asarray(image)[..., 0] == expected).all()
    with pytest.raises(DataError, match=r"pixel format 'F' is neither 8 nor 16 bits"):
        read_image(written(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"), "row 1")
    with pytest.raises(DataError, match=r"pixel format 'I' is neither 8 nor 16 bits"):
        read_image(written(Image.fromarray(np.ones((4, 4), np.int32)), "TIFF"), "row 1")


def tiff(values: np.ndarray, order: str = "<", tags: dict[int, int] | None = None, bits: int = 16) -> bytes:
    """A grey TIFF file without compression."""
    height, width = values.shape
    data = values.tobytes()
    fields = {256: width, 257: height, 258: bits, 259: 1, 262: 1, 273: 8, 277: 1, 278: height, 279: len(data)}
    fields |= tags or {}
    entries = b"".join(struct.pack(f"{order}HHII", tag, 4, 1, value) for tag, value in sorted(fields.items()))
    start = b"II*\0" if order == "<" else b"MM\0*"
    head = start + struct.pack(f"{order}I", 8 + len(data))
    return head + data + struct.pack(f"{order}H", len(fields)) + entries + struct.pack(f"{order}I", 0)


def frames(count: int = 3) -> list[Image.Image]:
    return [Image.new("RGB", (WIDTH, HEIGHT), (80 * number, 90, 10)) for number in range(count)]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "AVIF", "TIFF"])
def test_what_has_several_frames_is_no_picture_and_one_frame_is(kind: str) -> None:
    first, *rest = frames()
    several = written(first, kind, save_all=True, append_images=rest)
    for read in (read_image, check_image):
        with pytest.raises(
            DataError, match=r"row 1: .*(it is animated, with 3 frames|it has 3 pages): give one of them"
        ):
            read(several, "row 1")
    assert read_image(written(first, kind, save_all=True), "row 1").size == (WIDTH, HEIGHT)


def test_of_a_phones_photograph_the_first_picture_counts_and_of_a_tiff_with_thumbnails_the_whole() -> None:
    photograph = Image.fromarray(UPRIGHT)
    phone = written(photograph, "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))], quality=95)
    assert Image.open(io.BytesIO(phone)).n_frames == 2
    assert abs(np.asarray(read_image(phone, "row 1")).astype(int) - UPRIGHT).mean() < 8
    small = Image.new("RGB", (8, 8))
    small.encoderinfo = {"tiffinfo": {254: 1}}
    with_thumbnail = written(photograph, "TIFF", save_all=True, append_images=[small])
    assert (np.asarray(read_image(with_thumbnail, "row 1")) == UPRIGHT).all()
    raw = written(Image.new("RGB", (8, 8)), "TIFF", tiffinfo={254: 1})
    with pytest.raises(DataError, match="first picture is a thumbnail, as in raw photographs"):
        read_image(raw, "row 1")


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "it is empty, of 0 bytes"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "HEIC, which phones write"),
        (b"II*\0\x08\0\0\0", "a TIFF file of pixels that are not read"),
        (b"v/1\x01\x02\0\0\0", "an HDR picture"),
        (b"\0\0\0\x0cjP  \r\n", "JPEG 2000: save it as"),
        (b'<?xml version="1.0"?>\n<svg xmlns="http://www.w3.org/2000/svg"/>', "an SVG drawing"),
        (b"<!DOCTYPE html><html>404</html>", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00", "a pointer of Git LFS"),
        (b"\xff\x0a\x00\x00", "JPEG XL"),
        (b"8BPS\0\x01", "a Photoshop document"),
        (b"%PDF-1.7", "a PDF"),
    ],
)
def test_what_is_no_picture_that_is_read_is_named_with_the_remedy(content: bytes, said: str) -> None:
    with pytest.raises(DataError, match=rf"row 1: broken image \(its bytes\): .*{said}"):
        read_image(content, "row 1")


def test_cut_off_and_progressive_and_transparent_pictures() -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8))
    progressive = written(noise, "JPEG", progressive=True)
    assert read_size(progressive, "row 1") == (64, 64) and read_image(progressive, "row 1").size == (64, 64)
    for content in (progressive, written(noise, "JPEG"), written(noise, "WEBP"), written(noise, "AVIF")):
        with pytest.raises(DataError, match="row 1: broken image"):
            read_image(content[: len(content) // 2], "row 1")
    grey = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    hidden = png_16(grey, tRNS=struct.pack(">H", int(grey[3, 3])))
    assert (np.asarray(read_image(hidden, "row 1"))[3, 3] == 255).all()


def test_pictures_of_data_are_opened_in_one_place() -> None:
    """So that colours, orientation and frames mean the same to every task; the others read what a run has written."""
    root = Path(sfumato.__file__).parent
    others = {path.relative_to(root).as_posix() for path in root.rglob("*.py") if "Image.open(" in path.read_text()}
    assert others == {"data/media/pictures.py", "rewards/http/wire.py", "tracking/samples.py", "studio/thumbnails.py"}
