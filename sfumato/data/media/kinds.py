"""Files of images, videos and audio that stand in text: what each is read as."""

from __future__ import annotations

from dataclasses import dataclass

from sfumato.data.media.clips import Clip
from sfumato.data.media.pictures import File, check_image, check_video
from sfumato.data.media.sounds import Sound, check_sound

NAMES = {"image": "an image", "video": "a video", "audio": "audio"}
"""As messages call them."""


@dataclass(frozen=True)
class VideoFile:
    """A file that is read as a video, or what it holds; any other is an image."""

    file: File


@dataclass(frozen=True)
class AudioFile:
    """Likewise, of audio."""

    file: File


@dataclass(frozen=True)
class DrawnFile:
    """Likewise, of an image that is drawn, which stands after all that are seen; its shape is 0, 0, 0."""

    file: File


Medium = File | VideoFile | AudioFile | DrawnFile
"""A file of an image, a video or audio."""

KIND_OF = {VideoFile: "video", AudioFile: "audio", Clip: "video", Sound: "audio"}
"""Kinds of media, of files and of what has been opened; any other is an image."""


def check_head(medium: Medium, where: str) -> None:
    """Reads the head of a file. Raises DataError when it is no image, no video or no audio."""
    check = {VideoFile: check_video, AudioFile: check_sound}.get(type(medium))
    if check is None:
        check_image(medium, where)
    else:
        check(medium.file, where)
