"""Colour profiles: what is read is what littlecms makes of the picture, and sRGB stays to the bit."""

from __future__ import annotations

import io
import logging
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms

from sfumato.data.media import colours
from sfumato.data.media.colours import srgb_of_light
from sfumato.data.media.pictures import read_image
from sfumato.errors import DataError
from tests.unit.test_picture_formats import png_16, with_chunk, written

SRGB_CURVE = (2.4, 1 / 1.055, 0.055 / 1.055, 1 / 12.92, 0.04045)


def xyz(*values: float) -> bytes:
    return b"XYZ \0\0\0\0" + b"".join(struct.pack(">i", round(value * 65536)) for value in values)


def gamma(value: float) -> bytes:
    return b"curv\0\0\0\0" + struct.pack(">IH", 1, round(value * 256))


def parametric(*values: float) -> bytes:
    return b"para\0\0\0\0" + struct.pack(">HH", 3, 0) + b"".join(struct.pack(">i", round(v * 65536)) for v in values)


def profile(space: bytes, tags: dict[bytes, bytes], kind: bytes = b"mntr", pcs: bytes = b"XYZ ") -> bytes:
    """An ICC profile of version 2.4 of these tags (ICC.1:2001-04)."""
    description = b"desc\0\0\0\0" + struct.pack(">I", 2) + b"x\0" + b"\0" * 78
    tags = {b"desc": description, b"wtpt": xyz(0.9642, 1, 0.8249), **tags}
    body, table, start = b"", b"", 128 + 4 + 12 * len(tags)
    for name, data in tags.items():
        table += struct.pack(">4sII", name, start + len(body), len(data))
        body += data + b"\0" * (-len(data) % 4)
    head = struct.pack(">I4xI4s4s4s6H4s", start + len(body), 0x02400000, kind, space, pcs, 2024, 1, 1, 0, 0, 0, b"acsp")
    head = head.ljust(68, b"\0") + struct.pack(">3i", 63190, 65536, 54061)
    return head.ljust(128, b"\0") + struct.pack(">I", len(tags)) + table + body


def matrix_profile(colours_of: list[tuple[float, float, float]], curve: bytes) -> bytes:
    red, green, blue = (xyz(*colour) for colour in colours_of)
    tags = {b"rXYZ": red, b"gXYZ": green, b"bXYZ": blue}
    return profile(b"RGB ", tags | {b"rTRC": curve, b"gTRC": curve, b"bTRC": curve})


def cmyk_profile() -> bytes:
    """A table of Lab at the 16 corners, of inks that take away their colour."""
    corners = np.stack(np.meshgrid(*[[0, 1]] * 4, indexing="ij"), -1).reshape(-1, 4)
    light = 1 - np.minimum(1, 0.3 * corners[:, 0] + 0.55 * corners[:, 1] + 0.1 * corners[:, 2] + 0.85 * corners[:, 3])
    lightness = light * 255
    a = 128 + (-60 * corners[:, 0] + 70 * corners[:, 1]) * (1 - corners[:, 3])
    b = 128 + (-45 * corners[:, 0] + 85 * corners[:, 2]) * (1 - corners[:, 3])
    table = np.stack([lightness, a, b], -1).clip(0, 255).astype(np.uint8).tobytes()
    matrix = b"".join(struct.pack(">i", round(value * 65536)) for value in np.eye(3).reshape(-1))
    ramp = bytes(range(256))
    data = b"mft1\0\0\0\0" + struct.pack(">BBBB", 4, 3, 2, 0) + matrix + ramp * 4 + table + ramp * 3
    return profile(b"CMYK", {b"A2B0": data}, kind=b"prtr", pcs=b"Lab ")


P3 = matrix_profile(
    [(0.51512, 0.24120, -0.00105), (0.29198, 0.69225, 0.04189), (0.15710, 0.06657, 0.78407)], parametric(*SRGB_CURVE)
)
ADOBE = matrix_profile(
    [(0.60974, 0.31111, 0.01947), (0.20528, 0.62567, 0.06087), (0.14919, 0.06322, 0.74457)], gamma(563 / 256)
)
SRGB = matrix_profile(
    [(0.43607, 0.22249, 0.01392), (0.38515, 0.71687, 0.09708), (0.14307, 0.06061, 0.71410)], parametric(*SRGB_CURVE)
)
"""sRGB as other programs write it down: other bytes than littlecms'."""
GREY, GREY_SRGB = (profile(b"GRAY", {b"kTRC": curve}) for curve in (gamma(1.8), parametric(*SRGB_CURVE)))


def photograph() -> Image.Image:
    photographs = pytest.importorskip("sklearn.datasets").load_sample_images().images
    return Image.fromarray(photographs[1][100:300, 200:420])


def converted(image: Image.Image, icc: bytes) -> np.ndarray:
    """By littlecms, as GIMP and browsers use it or its like."""
    image_cms_profile, srgb = ImageCms.ImageCmsProfile(io.BytesIO(icc)), ImageCms.createProfile("sRGB")
    return np.asarray(ImageCms.profileToProfile(image, image_cms_profile, srgb, outputMode="RGB")).astype(int)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "AVIF"])
@pytest.mark.parametrize(("icc", "least"), [(P3, 2.0), (ADOBE, 3.0)], ids=["Display P3", "Adobe RGB"])
def test_profiles_are_converted_in_every_format(kind: str, icc: bytes, least: float) -> None:
    image = photograph()
    content = written(image, kind, icc_profile=icc)
    stored = Image.open(io.BytesIO(content)).convert("RGB")
    expected, actual = converted(stored, icc), np.asarray(read_image(content, "row 1")).astype(int)
    assert (actual == expected).all()
    assert abs(np.asarray(stored) - expected).mean() > least, "so it counts"


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "CMYK", "1"])
def test_profiles_of_other_modes(mode: str) -> None:
    """Of grey pictures, of palettes, of inks as Adobe writes them inverted, and beside transparency."""
    icc = {"L": GREY, "LA": GREY, "CMYK": cmyk_profile()}.get(mode, P3)
    image = photograph().convert(mode)
    if mode in {"LA", "RGBA"}:
        image.putalpha(Image.fromarray(np.tile(np.repeat([255, 0], 110).astype(np.uint8), (200, 1))))
    kind = "JPEG" if mode == "CMYK" else "PNG"
    content = written(image, kind, icc_profile=icc)
    stored = Image.open(io.BytesIO(content))
    base = {"L": "L", "LA": "L", "CMYK": "CMYK"}.get(mode, "RGB")
    expected, actual = converted(stored.convert(base), icc), np.asarray(read_image(content, "row 1")).astype(int)
    seen = slice(None, 110) if mode in {"LA", "RGBA"} else slice(None)
    assert abs(actual[:, seen] - expected[:, seen]).max() <= (0 if mode != "1" else 1)
    if mode in {"LA", "RGBA"}:
        assert (actual[:, 110:] == 255).all()
    if mode != "1":
        raw = np.asarray(stored.convert(base).convert("RGB")).astype(int)
        assert abs(raw[:, seen] - expected[:, seen]).mean() > 1.5


def test_a_grey_picture_with_a_profile_for_colours_is_grey_in_it() -> None:
    image = photograph().convert("L")
    result = np.asarray(read_image(written(image, "JPEG", icc_profile=ADOBE), "row 1")).astype(int)
    stored = Image.open(io.BytesIO(written(image, "JPEG"))).convert("RGB")
    assert (result == converted(stored, ADOBE)).all() and abs(result - np.asarray(stored)).max() >= 1


@pytest.mark.parametrize("icc", [SRGB, GREY_SRGB, ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()])
def test_srgb_stays_to_the_bit_and_is_recognised_once(icc: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    colours._profile_transform.cache_clear()
    image = photograph().convert("L" if icc == GREY_SRGB else "RGB")
    content = written(image, "PNG", icc_profile=icc)
    assert (np.asarray(read_image(content, "row 1")) == np.asarray(image.convert("RGB"))).all()
    monkeypatch.setattr(ImageCms, "buildTransform", None)
    read_image(content, "row 1")


@pytest.mark.parametrize(
    ("icc", "mode"), [(b"no profile", "RGB"), (P3[:200], "RGB"), (GREY, "RGB"), (P3, "CMYK"), (SRGB[:-90], "RGB")]
)
def test_a_profile_that_cannot_be_used_is_said_once_and_ignored(
    icc: bytes, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    colours._profile_transform.cache_clear()
    image = photograph().convert(mode)
    content = written(image, "TIFF", icc_profile=icc)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            result = np.asarray(read_image(content, "row 1"))
    said = [record for record in caplog.records if "colour profile" in record.getMessage()]
    assert len(said) == 1 and "read as sRGB without it" in said[0].getMessage()
    assert (result == np.asarray(image.convert("RGB"))).all()


def test_a_png_that_says_its_gamma_is_shown_so() -> None:
    values = np.arange(256, dtype=np.uint8).reshape(16, 16)
    content = written(Image.fromarray(values), "PNG")

    def shown(number: int, more: bytes = b"") -> Any:
        said = with_chunk(content, b"gAMA", struct.pack(">I", number))
        return np.asarray(read_image(with_chunk(said, b"sRGB", b"\0") if more else said, "row 1"))[..., 0]

    assert (shown(45455) == values).all() and (shown(100000, b"sRGB") == values).all()
    linear = np.round(255 * srgb_of_light(values / 255)).astype(int)
    assert (shown(100000) == linear).all() and linear[0, 60 % 16] >= 0
    assert abs(linear.reshape(-1)[60] - 133) <= 1, "18 % and more of the light is middle grey and more"


@pytest.mark.parametrize(("primaries", "transfer"), [(9, 16), (12, 13), (9, 18)])
def test_colours_of_hdr_and_wider_ranges_that_pillow_does_not_convert_are_refused(
    primaries: int, transfer: int
) -> None:
    content = written(Image.new("RGB", (8, 8), "red"), "PNG")
    assert read_image(with_chunk(content, b"cICP", bytes([1, 13, 0, 1])), "row 1").size == (8, 8)
    with pytest.raises(DataError, match=r"row 1: broken image .*primaries .* of H.273.*convert it to sRGB"):
        read_image(with_chunk(content, b"cICP", bytes([primaries, transfer, 0, 1])), "row 1")
    avif = written(Image.new("RGB", (64, 64), "red"), "AVIF")
    place = avif.index(b"colrnclx") + 8
    assert read_image(avif, "row 1").size == (64, 64)
    changed = avif[:place] + struct.pack(">2H", primaries, transfer) + avif[place + 4 :]
    with pytest.raises(DataError, match=rf"primaries {primaries}, transfer {transfer}"):
        read_image(changed, "row 1")


def test_deep_pictures_go_through_their_profile_too() -> None:
    values = np.linspace(0, 65535, 256).astype(np.uint16).reshape(16, 16)
    icc = with_chunk(png_16(values), b"iCCP", b"x\0\0" + zlib.compress(GREY))
    result = np.asarray(read_image(icc, "row 1")).astype(int)
    assert (result == converted(Image.fromarray((values >> 8).astype(np.uint8)), GREY)).all()


def test_signed_values_are_refused_which_pillow_reads_as_unsigned() -> None:
    values = Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8))
    assert read_image(written(values, "TIFF", tiffinfo={colours.SAMPLE_FORMAT: 1}), "row 1").size == (8, 8)
    signed = written(values, "TIFF", tiffinfo={colours.SAMPLE_FORMAT: colours.SIGNED})
    with pytest.raises(DataError, match=r"row 1: broken image .*signed integers: save it with unsigned ones"):
        read_image(signed, "row 1")


def test_channels_of_16_bits_stored_apart_are_refused_which_pillow_reads_as_bytes() -> None:
    """As Photoshop writes a TIFF "per channel" without compression; 4 x 2 pixels."""
    fields = {
        256: [4],
        257: [2],
        258: [16] * 3,
        259: [1],
        262: [2],
        273: [8, 24, 40],
        277: [3],
        279: [16] * 3,
        284: [2],
    }
    values = [b"".join(struct.pack("<H", value) for value in field) for field in fields.values()]
    ends = np.cumsum([len(value) for value in values]) + 8 + 48 + 2 + 12 * len(fields) + 4
    entries = [
        struct.pack("<HHI", tag, 3, len(value) // 2)
        + (value.ljust(4, b"\0") if len(value) <= 4 else struct.pack("<I", end - len(value)))
        for tag, value, end in zip(fields, values, ends.tolist(), strict=True)
    ]
    directory = struct.pack("<H", len(fields)) + b"".join(entries) + bytes(4) + b"".join(values)
    content = b"II*\0" + struct.pack("<I", 8 + 48) + np.full(24, 40000, "<u2").tobytes() + directory
    with pytest.raises(DataError, match="channels of 16 bits are stored one after the other: save it interleaved"):
        read_image(content, "row 1")
