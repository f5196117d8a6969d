"""Masks, which say where in a picture the loss counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from sfumato.data.media.kinds import File
from sfumato.data.media.pictures import describe_source, open_image, read_image
from sfumato.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

SAME_GREY = 32
"""By how much the channels of a grey mask may differ, as in a JPEG file."""

LABELS = 16
"""The largest value of a mask that is taken for the number of a label."""


def read_mask(source: File, where: str) -> Image.Image:
    """Reads a mask, in shades of grey: white is what counts.

    Args:
        source: the file.
        where: file and row, for messages.

    Raises:
        DataError: when it is broken, or does not say by light and dark what counts: it is transparent somewhere, which
            is shown as white; it is coloured; or it holds the numbers of labels.
    """
    with open_image(source, where) as opened:
        if opened.has_transparency_data and opened.convert("RGBA").getchannel("A").getextrema() != (255, 255):
            raise ValueError("a mask must not be transparent, which is shown as white: put it on black")
    image = read_image(source, where)
    red, green, blue = (np.asarray(image.getchannel(channel), np.int16) for channel in "RGB")
    if max(abs(red - green).max(), abs(green - blue).max()) > SAME_GREY:
        raise DataError(f"{where}: mask ({describe_source(source)}) with colours: paint white on black")
    if 0 < green.max() <= LABELS:
        raise DataError(
            f"{where}: mask ({describe_source(source)}) with no value above {green.max()} of 255, as if these were "
            "numbers of labels: white, 255, is what counts"
        )
    return image.convert("L")
