"""Files of images, videos and audio in text, each with the kind of medium that it is read as."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

from sfumato.data.media.clips import Clip
from sfumato.data.media.pictures import File, check_image, check_video
from sfumato.data.media.sounds import Sound, check_sound

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

    Drawn images come after all seen ones in ``Images``; their shape is 0, 0, 0, since no encoder sees them.
    """

    file: File


Medium = File | VideoFile | AudioFile | DrawnFile
"""A file of an image, a video or audio."""

KIND_OF = {VideoFile: "video", AudioFile: "audio", Clip: "video", Sound: "audio"}
"""The kind of a medium by its type, of files and of opened media; a medium of any other type is an image."""


def check_head(medium: Medium, where: str) -> None:
    """Reads the head of a file. Raises DataError when it is no image, no video or no audio."""
    check = {VideoFile: check_video, AudioFile: check_sound}.get(type(medium))
    if check is None:
        check_image(cast("File", medium), where)
    else:
        check(cast("VideoFile | AudioFile", medium).file, where)
