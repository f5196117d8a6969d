"""Images and videos from files or bytes, brought to one size. Errors name the row and the file."""

from __future__ import annotations

import functools
import io
import re
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np

from sfumato.config.file_checks import file_problem
from sfumato.data.media.colours import check_code_points, significant_bits, to_srgb
from sfumato.data.media.kinds import IMAGE_ENDINGS, File
from sfumato.errors import DataError

if TYPE_CHECKING:
    from PIL import Image
    from PIL.Image import Transpose
    from PIL.ImageFile import ImageFile
    from PIL.TiffImagePlugin import TiffImageFile
    from torch import Tensor

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "AVIF")
"""Formats that Pillow may recognise. Its other formats include some that start a program, as EPS does."""


ANIMATION_ENDINGS = {".gif", ".webp", ".apng", ".png", ".avif"}
"""Endings of files of which Pillow reads several frames."""

OTHER_KINDS = {
    rb"....ftyp(hei[cxms]|hev[cx]|mif1|msf1)": "HEIC, which phones write: save it as JPEG or PNG (heif-convert does)",
    rb"\s*(<\?xml[^>]*>\s*)?(<!--.*?-->\s*)?(<!DOCTYPE svg|<svg)": "an SVG drawing: render it as PNG",
    rb"\s*<(!doctype html|html)": "a web page, such as of a failed download: fetch the picture again",
    rb"version https://git-lfs": "a pointer of Git LFS: `git lfs pull` fetches the picture",
    rb"(\xff\x0a|....JXL )": "JPEG XL: save it as JPEG or PNG",
    rb"II[*+]\0|MM\0[*+]": "a TIFF file of pixels that are not read, such as floats: save it with 8 or 16 bits",
    rb"v/1\x01|#\?R": "an HDR picture (OpenEXR or Radiance): save it as PNG or JPEG, as bright as it is to be",
    rb"\0{3}\x0cjP  |\xff\x4f\xff\x51": "JPEG 2000: save it as JPEG or PNG",
    rb"8BPS": "a Photoshop document: save it as PNG or JPEG",
    rb"%PDF": "a PDF: render its pages as PNG",
    rb"....ftyp": "a video or of a format that is not read: save it as PNG or JPEG",
}
"""Files that people take for pictures and that are not read: how they begin, what they are, and the remedy."""

HEAD = 2**16
"""Bytes at the beginning of a file in which its colours are described."""

ORIENTATION, QUARTER_TURNS = 0x0112, (5, 6, 7, 8)
"""EXIF's tag of an image's orientation, and the orientations that swap height and width."""

SUBFILE_TYPE, NO_PICTURE = 254, 1 | 4
"""TIFF's tag of the kind of an image in a file, and the bits that mark thumbnails and masks."""

MOST_ENLARGED, LEAST_SHOWN = 10, 0.1
"""The largest factor by which a picture may be enlarged in each direction; and the smallest share of it that may be
shown, or to which one side may be squeezed against the other."""

BROKEN = (
    OSError,
    ValueError,
    SyntaxError,
    EOFError,
    TypeError,
    LookupError,
    ArithmeticError,
    RuntimeError,
    struct.error,
)
"""Errors that Pillow raises for files that are damaged, or made to break it."""


class Picture(NamedTuple):
    """The pixels of a row of images or videos, and which part of the picture they show."""

    pixels: Tensor
    """uint8 ``[3, height, width]``; of a video ``[3, frames, height, width]``, of pairs ``[2, ...]``."""
    framing: Tensor
    """int32 ``[4]``, of pairs ``[2, 4]``: what ``framing_of`` says of the image, or of the first frame."""
    loss_weights: Tensor | None = None
    """float32 ``[height, width]``, from 0 to 1, of its mask; None where the loss counts everywhere alike."""
    sound: Tensor | None = None
    """int16 ``[channels, N]``, of a video with sound."""


def read_image(source: File, where: str) -> Image.Image:
    """Reads an image: upright by its EXIF orientation, RGB of 8 bits per channel in sRGB; what is transparent is white.

    Args:
        source: the file.
        where: file and row, for messages.

    Raises:
        DataError: when it is broken, has several frames, or is transparent everywhere.
    """
    with open_image(source, where) as opened:
        _check_still(opened)
        head = read_head(source, HEAD) if opened.format in {"PNG", "AVIF"} else b""
        check_code_points(head, opened.format)
        # Pillow brings PNG files of 16 bits to 8; only the tile, which load() empties, still tells their depth.
        is_deep = any(";16" in str(tile[3]) for tile in opened.tile)
        opened.load()  # after which Pillow has turned a TIFF, and read the chunks that a PNG has after its pixels
        if opened.getbands()[-1] == "A" and cast("tuple[int, int]", opened.getchannel("A").getextrema())[1] == 0:
            raise ValueError("all of it is transparent, so that it would be white: save it without transparency")
        transpose = _transposes_by_orientation().get(_read_orientation(opened))
        shown = to_srgb(opened, is_deep, significant_bits(head, opened.format))
        return shown if transpose is None else shown.transpose(transpose)


def check_image(source: File, where: str) -> None:
    """Reads the head of an image. Raises DataError when it is none, or has several frames."""
    with open_image(source, where) as opened:
        _check_still(opened)


def read_size(source: File, where: str) -> tuple[int, int]:
    """Height and width of an image as ``read_image`` gives it, by its head. Raises DataError when it is none."""
    with open_image(source, where) as opened:
        width, height = opened.size
        if opened.format == "TIFF":  # some versions of Pillow state the size of a TIFF after it is turned
            tags = cast("TiffImageFile", opened).tag_v2
            width, height = (tags[number] for number in (256, 257))
        turned = _read_orientation(opened, source) in QUARTER_TURNS
    return (width, height) if turned else (height, width)


def frames_of(folder: Path) -> list[File]:
    """The frames of a video that is a folder of images, without hidden files, in the order of their names.

    Numbers in them count as numbers: ``frame_10`` comes after ``frame_9``.
    """
    visible = (path for path in folder.iterdir() if not path.name.startswith("."))
    return [*sorted((path for path in visible if path.suffix.lower() in IMAGE_ENDINGS), key=_number_order)]


def _number_order(path: Path) -> tuple[list[tuple[str, int]], str]:
    """A key that sorts names by the numbers in them; names that differ in nothing but leading zeros by their text."""
    parts = re.findall(r"(\D*)(\d*)", path.name)
    return [(text, int(digits or -1)) for text, digits in parts], path.name


def fit_image(image: Image.Image, height: int, width: int, crop: str = "center") -> np.ndarray:
    """An image brought to another size: uint8 ``[height, width, 3]``.

    Args:
        image: red green blue; of a mask, in shades of grey, the result is uint8 ``[height, width]``.
        height, width: in pixels.
        crop: "center" scales the shorter side and cuts the rest; "none" stretches.
    """
    from PIL import Image, ImageOps

    if crop == "center":
        image = ImageOps.fit(image, (width, height), method=Image.Resampling.LANCZOS)
    else:
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    return np.array(image)


def framing_of(size: tuple[int, int], height: int, width: int, crop: str = "center") -> tuple[int, int, int, int]:
    """Which part of a picture ``fit_image`` shows, as SDXL is conditioned on it.

    Args:
        size: height and width of the picture, upright, before it is scaled.
        height, width, crop: see ``fit_image``.

    Returns:
        Original height and width, and how many rows and columns of the scaled picture are cut off at the top and left.
    """
    if crop != "center":
        return (*size, 0, 0)
    scale = max(height / size[0], width / size[1])
    top, left_edge = (round((side * scale - wanted) / 2) for side, wanted in zip(size, (height, width), strict=True))
    return (*size, top, left_edge)


def check_fit(size: tuple[int, int], height: int, width: int, crop: str, where: str) -> None:
    """Raises DataError for a picture of which little would be left at another size; arguments as of ``framing_of``."""
    scales = height / size[0], width / size[1]
    shown = min(scales) / max(scales)
    if max(scales) > MOST_ENLARGED or shown < LEAST_SHOWN:
        remainder = "shown" if crop == "center" else "left of its longer side against the shorter one"
        problem = f"{shown:.1%} would be {remainder}"
        if max(scales) > MOST_ENLARGED:
            problem = f"enlarged {max(scales):.0f} times"
        raise DataError(
            f"{where}: a picture of {size[0]} x {size[1]} pixels (height x width) for {height} x {width}: {problem}; "
            f"at most {MOST_ENLARGED} times, and at least {LEAST_SHOWN:.0%}, make sense: leave it out"
        )


def is_enlarged(framing: Tensor, size: Sequence[int]) -> Tensor:
    """Which pictures are enlarged: bool ``[...]``.

    Args:
        framing: of ``framing_of``, int ``[..., 4]``.
        size: height and width that the pictures are brought to.
    """
    return (framing[..., 0] < size[0]) | (framing[..., 1] < size[1])


def as_png(image: Image.Image) -> bytes:
    """The content of a PNG file of an image."""
    image.save(file := io.BytesIO(), "PNG")
    return file.getvalue()


@contextmanager
def open_image(source: File, where: str) -> Iterator[ImageFile]:
    """The image as Pillow opens it. What Pillow raises for it, here or inside the ``with``, becomes a DataError."""
    from PIL import Image, UnidentifiedImageError

    refuse_unreadable(source, where)
    try:
        with Image.open(
            io.BytesIO(source) if isinstance(source, bytes) else source, formats=_readable_formats()
        ) as opened:
            yield opened
    except DataError:
        raise
    except UnidentifiedImageError as error:
        raise DataError(f"{where}: broken image ({describe_source(source)}): {_describe_unknown(source)}") from error
    except MemoryError as error:
        raise DataError(f"{where}: broken image ({describe_source(source)}): it does not fit into memory") from error
    except BROKEN as error:
        raise DataError(f"{where}: broken image ({describe_source(source)}): {error}") from error
    except Image.DecompressionBombError as error:
        raise DataError(
            f"{where}: image ({describe_source(source)}) of more than "
            f"{2 * Image.MAX_IMAGE_PIXELS:,} pixels: scale it down"  # pyright: ignore[reportOperatorIssue]
        ) from error


@functools.cache
def _readable_formats() -> tuple[str, ...]:
    """The formats of ``FORMATS`` that this build of Pillow reads."""
    from PIL import Image

    Image.init()
    return tuple(name for name in FORMATS if name in Image.OPEN)


@functools.cache
def _transposes_by_orientation() -> dict[int, Transpose]:
    """The transpose that brings an image upright, by its EXIF orientation."""
    from PIL.Image import Transpose

    return {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }


def _read_orientation(opened: ImageFile, head_of: File | None = None) -> int:
    """The EXIF orientation of an image; 1 is upright.

    Args:
        opened: the image.
        head_of: its file, where the pixels should not be decoded for this: Pillow's ``getexif`` of a PNG decodes them,
            since the orientation may stand behind them.
    """
    from PIL import Image

    if opened.format == "PNG" and head_of is not None and not _says_more_after_pixels(head_of):
        return Image.Image.getexif(opened).get(ORIENTATION, 1)
    return opened.getexif().get(ORIENTATION, 1)


def _says_more_after_pixels(source: File) -> bool:
    """Whether a PNG file has chunks of text or EXIF behind its pixels, found without decoding them."""
    with io.BytesIO(source) if isinstance(source, bytes) else source.open("rb") as file:
        file.seek(8)
        are_read = False
        while len(head := file.read(8)) == 8:
            length, kind = struct.unpack(">I4s", head)
            are_read |= kind == b"IDAT"
            if are_read and kind in {b"eXIf", b"tEXt", b"zTXt", b"iTXt"}:
                return True
            file.seek(length + 4, 1)
    return False


def _check_still(opened: ImageFile) -> None:
    """Raises ValueError for a file that holds several pictures, or only a thumbnail."""
    # The further frames of an MPO file, which phones write, are a depth map or the view of the other eye.
    frames = 1 if opened.format == "MPO" else getattr(opened, "n_frames", 1)
    if opened.format == "TIFF":
        kinds = []
        for number in range(frames):
            opened.seek(number)
            kinds.append(cast("TiffImageFile", opened).tag_v2.get(SUBFILE_TYPE, 0))
        opened.seek(0)
        if kinds[0] & NO_PICTURE:
            raise ValueError("its first picture is a thumbnail, as in raw photographs: develop it, as PNG or JPEG")
        frames = sum(not kind & NO_PICTURE for kind in kinds)
    if frames > 1:
        contents = f"it has {frames} pages" if opened.format == "TIFF" else f"it is animated, with {frames} frames"
        raise ValueError(f"{contents}: give one of them")


def _describe_unknown(source: File) -> str:
    """What kind of file this is that Pillow does not read, and the remedy where there is one, for an error."""
    head = read_head(source, HEAD)
    if not head:
        return "it is empty, of 0 bytes: fetch it again"
    for pattern, description in OTHER_KINDS.items():
        if re.match(pattern, head, re.DOTALL | re.IGNORECASE):
            return f"it is {description}"
    return f"it is no {', '.join(FORMATS[:-1])} or {FORMATS[-1]}"


def describe_source(source: File) -> str:
    """The file's path, or words for content without one, for messages."""
    return str(source) if isinstance(source, Path) else "its bytes"


def refuse_unreadable(source: File, where: str) -> None:
    """Raises DataError for a path that cannot be read as a file; ``where`` names file and row."""
    if isinstance(source, Path) and (problem := file_problem(source)):
        raise DataError(f"{where}: {source} {problem}")


def read_head(source: File, num_bytes: int) -> bytes:
    """The first bytes of a file."""
    if isinstance(source, bytes):
        return source[:num_bytes]
    with source.open("rb") as file:
        return file.read(num_bytes)


def is_picture(content: bytes) -> bool:
    """Whether Pillow knows the format of this content; one that is too large for Pillow is of a known format, too."""
    from PIL import Image

    try:
        Image.open(io.BytesIO(content), formats=_readable_formats()).close()
    except Image.DecompressionBombError:
        return True
    except BROKEN:
        return False
    return True
