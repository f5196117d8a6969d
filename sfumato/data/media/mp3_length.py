"""How long an MP3 file is, by the heads of its frames.

A file of variable bit rate says its length in a table in its first frame (Xing, VBRI). Without the table libsndfile
takes the bit rate of the first frame for that of all, and reads no further than the length that follows from it.
"""

from __future__ import annotations

import mmap
import re

from sfumato.data.media.kinds import File

BIT_RATES = {
    1: (32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320),
    2: (8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160),
}
"""Thousands of bits per second of layer III, by the version of MPEG; the first has the number 1 (ISO 11172-3)."""

SAMPLE_RATES = {3: (44100, 48000, 32000), 2: (22050, 24000, 16000), 0: (11025, 12000, 8000)}
"""By the bits of the version: 3 is MPEG 1, 2 is MPEG 2, 0 is MPEG 2.5."""

FRAME = re.compile(rb"\xff[\xe2\xe3\xf2\xf3\xfa\xfb]")
"""How a frame of layer III begins."""

TABLES = (b"Xing", b"Info", b"VBRI")
"""Marks of a table that says how many frames there are."""


def count_mp3_samples(source: File) -> int | None:
    """Samples of each channel in the frames of an MP3 file; None where it has a table that says their number.

    Args:
        source: the file, or what it holds.
    """
    if isinstance(source, bytes):
        return _count_samples(source)
    with source.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _count_samples(content)


def _count_samples(content: bytes | mmap.mmap) -> int | None:
    position = 0
    if content[:3] == b"ID3":  # a tag before the sound, whose length has 7 bits in each byte
        high, middle, low, lowest = content[6:10]
        position = 10 + (high << 21 | middle << 14 | low << 7 | lowest)
    num_samples = 0
    while match := FRAME.search(content, position):
        position = match.start()
        length, samples = _read_head(content[position : position + 4])
        if length == 0:
            position += 1
            continue
        if num_samples == 0 and any(table in content[position : position + length] for table in TABLES):
            return None
        num_samples += samples
        position += length
    return num_samples


def _read_head(head: bytes) -> tuple[int, int]:
    """Bytes and samples of a frame by its first four bytes; 0 and 0 where they begin no frame."""
    if len(head) < 4:
        return 0, 0
    version = head[1] >> 3 & 3
    rate_number, bit_rate_number = head[2] >> 2 & 3, head[2] >> 4
    if rate_number == 3 or bit_rate_number in (0, 15):
        return 0, 0
    generation = 1 if version == 3 else 2
    samples = 1152 // generation
    bits_per_second = 1000 * BIT_RATES[generation][bit_rate_number - 1]
    padding = head[2] >> 1 & 1
    return samples // 8 * bits_per_second // SAMPLE_RATES[version][rate_number] + padding, samples
