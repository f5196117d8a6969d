"""Colours of pictures: depth, colour profile and transparency, brought to 8 bits of sRGB as browsers do."""

from __future__ import annotations

import functools
import io
import logging
import struct
from typing import TYPE_CHECKING, cast

import numpy as np

if TYPE_CHECKING:
    from PIL import Image, ImageCms

LOGGER = logging.getLogger(__name__)

MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK", "Lab": "LAB"}
"""Pillow's mode of an image, by the colour space that a profile is for."""

IS_SRGB = 2
"""A profile that changes no colour by more than this, of 255, counts as sRGB: programs write sRGB in several ways."""

GRID = 9
"""Levels of each channel at which a profile is compared with sRGB."""

PROFILES = 64
"""Profiles whose transforms are kept in memory."""

SRGB_GAMMA, SAME_GAMMA = 1 / 2.2, 0.01
"""The gamma that PNG files state for sRGB, and by how much a stated gamma may differ and still count as sRGB."""

DEEP_BITS = 12
"""A picture of 16 bits per channel whose values all fit into so many is black to the eye, or was never scaled to 16."""

PHOTOMETRIC, BITS_PER_SAMPLE, SAMPLE_FORMAT = 262, 258, 339
"""Numbers of TIFF tags: what 0 stands for, how many bits a value has, and of which kind of number it is."""

PLANAR, COMPRESSION = 284, 259
"""TIFF tags: 2 where each channel is stored apart; 1 where nothing is compressed."""

SIGNED = 2
"""The sample format of signed integers."""

SRGB_PRIMARIES, SRGB_TRANSFERS = {1, 2}, {1, 2, 6, 13, 14, 15}
"""Code points of ITU-T H.273 (coding-independent code points) that are shown as sRGB; 2 is "unspecified"."""


def to_srgb(image: Image.Image, is_deep: bool = False, significant_bits: int | None = None) -> Image.Image:
    """An opened image as RGB of 8 bits per channel in sRGB, by its colour profile; what is transparent becomes white.

    Args:
        image: as Pillow opens it.
        is_deep: whether its file has 16 bits per channel.
        significant_bits: bits of each value that carry information, where the file states them.

    Raises:
        ValueError: when the file does not tell how bright the picture is, or has values of another kind.
    """
    from PIL import Image

    profile = image.info.get("icc_profile")
    gamma = _stated_gamma(image)
    alpha = None
    image = _to_8_bits(image, is_deep, significant_bits)
    if image.has_transparency_data:  # the colours below it are not what anybody sees
        image = image.convert("LA" if image.mode in {"La", "LA", "L"} else "RGBA")
        alpha = image.getchannel("A")
        image = image.convert(image.mode.removesuffix("A"))
    if image.mode not in {"L", "RGB", "CMYK", "LAB"}:
        image = image.convert("L" if image.mode == "1" else "RGB")
    image = _apply_profile(image, profile) if profile else image
    image = _lab_transform().apply(image) if image.mode == "LAB" else image.convert("RGB")
    if gamma is not None:
        light = (np.arange(256) / 255) ** (1 / gamma)
        image = image.point(np.round(255 * srgb_of_light(light)).astype(int).tolist() * 3)
    if alpha is None:
        return image
    shown = Image.new("RGB", image.size, "white")
    shown.paste(image, mask=alpha)
    return shown


def srgb_of_light(light: np.ndarray) -> np.ndarray:
    """Values of sRGB, 0 to 1, from linear light, 0 to 1 (IEC 61966-2-1)."""
    return np.where(light <= 0.0031308, 12.92 * light, 1.055 * light ** (1 / 2.4) - 0.055)


def significant_bits(head: bytes, file_format: str | None) -> int | None:
    """The bits of the first channel that a PNG file states to be significant (chunk sBIT); None where it states none.

    Args:
        head: how the file begins.
        file_format: Pillow's name of it.
    """
    place = head.find(b"sBIT") if file_format == "PNG" else -1
    return head[place + 4] if 0 <= place < len(head) - 4 else None


def check_code_points(head: bytes, file_format: str | None) -> None:
    """Refuses PNG and AVIF files of other colours that Pillow would read as sRGB.

    Args:
        head: how the file begins.
        file_format: Pillow's name of it.

    Raises:
        ValueError: when the file says by code points that its colours are those of HDR or of a wider range.
    """
    mark, width = {"PNG": (b"cICP", "B"), "AVIF": (b"colrnclx", "H")}.get(str(file_format), (b"", ""))
    place = head.find(mark) + len(mark)
    if not mark or place < len(mark) or len(head) < place + 4:
        return
    primaries, transfer = struct.unpack_from(f">2{width}", head, place)
    if primaries not in SRGB_PRIMARIES or transfer not in SRGB_TRANSFERS:
        raise ValueError(
            f"its colours (primaries {primaries}, transfer {transfer} of H.273) are of HDR or of a wider range than "
            "sRGB: convert it to sRGB"
        )


def _to_8_bits(image: Image.Image, is_deep: bool, significant_bits: int | None) -> Image.Image:
    """The upper 8 bits of each value. Raises ValueError for other values, or when the picture would be all black."""
    from PIL import Image

    tags = getattr(image, "tag_v2", {})
    if image.mode in {"I", "F"}:
        raise ValueError(f"its pixel format {image.mode!r} is neither 8 nor 16 bits per channel")
    # Pillow reads signed values of 8 bits as if they were unsigned: what is below 0 would be the brightest.
    if SIGNED in tags.get(SAMPLE_FORMAT, ()):
        raise ValueError("its values are signed integers: save it with unsigned ones of 8 or 16 bits per channel")
    # Pillow takes the bytes of such channels for values of 8 bits, which gives stripes or one colour.
    if tags.get(PLANAR) == 2 and tags.get(COMPRESSION) == 1 and max(tags.get(BITS_PER_SAMPLE, (8,))) > 8:
        raise ValueError("its channels of 16 bits are stored one after the other: save it interleaved, or compressed")
    if image.mode.startswith("I;16"):
        values = np.asarray(image)
        hidden = image.info.get("transparency")
        bits = tags.get(BITS_PER_SAMPLE, (significant_bits or 16,))[0]
        # Values of 12 or fewer bits that neither Pillow nor the program that wrote the file has scaled to 16.
        if bits <= DEEP_BITS and values.max() < 2**bits:
            values = values << (16 - bits)
        if tags.get(PHOTOMETRIC) == 0:  # 0 is white, which Pillow minds for 8 bits only
            values = 65535 - values
        image = Image.fromarray((values >> 8).astype(np.uint8))
        if hidden is not None:
            # The value that PNG calls transparent has 16 bits, too; the alpha channel has to be made of it here.
            opacity = Image.fromarray(np.where(np.asarray(image) == hidden >> 8, 0, 255).astype(np.uint8))
            image = Image.merge("LA", (image, opacity))
    elif not is_deep:
        return image
    extrema = [image.getchannel(band).getextrema() for band in image.getbands() if band not in "Aa"]
    brightest = max(cast("tuple[int, int]", extreme)[1] for extreme in extrema)
    if brightest < 2 ** (DEEP_BITS - 8):
        raise ValueError(
            f"it has 16 bits per channel, and no value above {2**DEEP_BITS - 1} of 65535, so that it would be black: "
            f"scale it to 16 bits if its values have {DEEP_BITS} or fewer, and leave it out if it is dark"
        )
    return image


def _stated_gamma(image: Image.Image) -> float | None:
    """The gamma that a PNG file states instead of a profile; None where it is the gamma of sRGB, or not stated."""
    gamma = image.info.get("gamma")
    if not gamma or image.info.get("icc_profile") or "srgb" in image.info or abs(gamma - SRGB_GAMMA) < SAME_GAMMA:
        return None
    return gamma


def _apply_profile(image: Image.Image, profile: bytes) -> Image.Image:
    mode, transform = _profile_transform(profile, image.mode)
    return image if transform is None else transform.apply(image.convert(mode))


@functools.lru_cache(PROFILES)
def _profile_transform(profile: bytes, mode: str) -> tuple[str, ImageCms.ImageCmsTransform | None]:
    """The transform of a profile to sRGB, and the mode that an image is converted to before it.

    Args:
        profile: the content of an ICC profile.
        mode: Pillow's mode of the image.

    Returns:
        None as the transform where the profile is sRGB, or cannot be used.
    """
    from PIL import Image, ImageCms

    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        colour_space = opened.profile.xcolor_space.strip()  # pyright: ignore[reportAttributeAccessIssue]  # of the stubs
        wanted = MODES.get(colour_space, "")
        if wanted != mode and (mode, wanted) != ("L", "RGB"):
            raise ValueError(f"it is for {colour_space}, and the picture is {mode}")
        target = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB"))
        transform = ImageCms.buildTransform(opened, target, wanted, "RGB", ImageCms.Intent.PERCEPTUAL)
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError) as error:  # of lcms, and for bytes that are no profile
        LOGGER.warning(
            "a colour profile of %s bytes in a picture cannot be used (%s): its pictures are read as sRGB without it",
            f"{len(profile):,}",
            error,
        )
        return mode, None
    if wanted in {"RGB", "L"}:
        # Compared on a grid: several programs write a profile of their own that means sRGB, and a transform through
        # one of these would cost time and change pixels by rounding.
        levels = np.linspace(0, 255, GRID).round().astype(np.uint8)
        colours = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(1, -1, 3)
        colours = np.arange(256, dtype=np.uint8)[None] if wanted == "L" else colours
        before = Image.fromarray(colours)
        moved = np.asarray(transform.apply(before)).astype(int) - np.asarray(before.convert("RGB"))
        if abs(moved).max() <= IS_SRGB:
            return mode, None
    return wanted, transform


@functools.lru_cache(1)
def _lab_transform() -> ImageCms.ImageCmsTransform:
    from PIL import ImageCms

    lab, target = (ImageCms.ImageCmsProfile(ImageCms.createProfile(name)) for name in ("LAB", "sRGB"))
    return ImageCms.buildTransform(lab, target, "LAB", "RGB", ImageCms.Intent.RELATIVE_COLORIMETRIC)
