"""Files of images, videos and audio in text, each with the kind of medium that it is read as."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

VERSION = 4
"""Raise it when the same files become other pixels, so that stored latents are not used any more."""

File = Path | bytes
"""A file of a picture: its path, or its content."""

IMAGE_ENDINGS = {
    ".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".webp", ".bmp", ".dib", ".gif", ".tif", ".tiff", ".avif", ".apng"
}  # fmt: skip

VIDEO_ENDINGS = {
    ".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v", ".mpg", ".mpeg", ".ts", ".mts", ".m2ts", ".flv", ".wmv", ".asf",
    ".3gp", ".3g2", ".ogv"
}  # fmt: skip
"""Endings of files that OpenCV reads."""

SOUND_ENDINGS = {".wav", ".flac", ".mp3", ".ogg", ".opus", ".oga", ".aif", ".aiff", ".au", ".w64", ".rf64", ".caf"}
"""Endings of files that libsndfile reads."""

NAMES = {"image": "an image", "video": "a video", "audio": "audio"}
"""How errors call a medium of each kind."""


@dataclass(frozen=True)
class VideoFile:
    """A file that is read as a video, or its content; a bare path or bytes are an image."""

    file: File


@dataclass(frozen=True)
class AudioFile:
    """A file that is read as audio, or its content."""

    file: File


@dataclass(frozen=True)
class DrawnFile:
    """A file of an image that the assistant draws, or its content.

    Drawn images come after all seen ones in ``MediaRefs``; their shape is 0, 0, 0, since no encoder sees them.
    """

    file: File


Medium = File | VideoFile | AudioFile | DrawnFile
"""A file of an image, a video or audio."""
