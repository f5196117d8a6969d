"""A dataset of videos with their sound and captions, with random access."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from sfumato.config.image_data import ImageTextDataConfig
from sfumato.data.files.file_columns import find_file, find_frames
from sfumato.data.images.image_text import ImageTextDataset
from sfumato.data.media.kinds import IMAGE_ENDINGS, VIDEO_ENDINGS, File
from sfumato.data.media.pictures import Picture, frames_of, read_image
from sfumato.data.media.sound_tracks import read_sound_track
from sfumato.data.media.video_files import VideoHead
from sfumato.data.media.videos import frames_at, read_video
from sfumato.data.media.waveform_files import VERSION, read_waveform, to_waveform
from sfumato.errors import DataError

if TYPE_CHECKING:
    from PIL import Image


class VideoSoundDataset(ImageTextDataset):
    """The beginnings of videos with their sound and captions, from a file or folder, brought to one size and length.

    Frames are taken at the model's rate, and not at even distances over the whole video, so that they belong to the
    sound. The sound is that of the video, or a file in the column ``data.sound_key``.
    """

    def __init__(self, config: ImageTextDataConfig) -> None:
        """Opens the source. Raises DataError when it is missing or empty."""
        super().__init__(config)
        self._rate = 0
        self._channels = 0
        self._frame_rate = 0.0

    def take_format(self, rate: int, channels: int, frame_rate: float) -> None:
        """Sets samples per second and channels of the sound, and frames per second, which are those of the model."""
        self._rate = rate
        self._channels = channels
        self._frame_rate = frame_rate

    @property
    def _endings(self) -> set[str]:
        return VIDEO_ENDINGS

    def files(self, index: int, with_source: bool = False) -> list[File]:
        """As ``ImageTextDataset.files``, with that of the sound."""
        sound = self._sound_file(index)
        return [*super().files(index, with_source), *([] if sound is None else [sound])]

    def _sound_file(self, index: int) -> File | None:
        """The file in the column of the sound; None where the sound is that of the video."""
        row = self.rows[index]
        if row.get(self.config.sound_key) is None:
            return None
        return find_file(row, self.config.sound_key, self.rows.folder(index), self.describe(index), "sound")

    def picture(self, index: int, size: tuple[int, int] | None = None) -> Picture:
        """The frames of a row, uint8 ``[3, F, height, width]``, and their sound, int16 ``[channels, N]``.

        Raises:
            DataError: when a file is missing, broken, too short or silent; it names row and file.
        """
        del size
        assert self._frame_rate, "take_format was not called"
        row = self.rows[index]
        where = self.describe(index)
        source = find_frames(row, self._image_key(row), self.rows.folder(index), where)
        frames = self._read_frames(source, where)
        video, framing = self._fit_video(frames, where)
        return Picture(video, framing, sound=torch.from_numpy(self._read_sound(index, source, where)))

    def _read_frames(self, source: File | list[File], where: str) -> list[Image.Image]:
        """The first frames of a video at the model's rate; a folder or list of images has that rate.

        Raises DataError when it is broken or too short.
        """
        count = self.size[2]
        if isinstance(source, Path) and source.is_dir():
            source = frames_of(source)
        if isinstance(source, list):
            if len(source) < count:
                raise DataError(f"{where}: {len(source)} frames: {count} are needed (data.num_frames)")
            return [read_image(file, where) for file in source[:count]]
        if isinstance(source, Path) and source.suffix.lower() in IMAGE_ENDINGS:
            raise DataError(f"{where}: {source} is an image, which has no sound: give a video")

        def choose(head: VideoHead) -> list[int]:
            total, fps = head.num_frames, head.fps
            if not fps > 0:
                raise DataError(f"{where}: the video does not say how many frames it has per second")
            indices = [math.floor(number / self._frame_rate * fps + 0.5) for number in range(count)]
            if indices[-1] >= total:
                raise DataError(
                    f"{where}: a video of {total / fps:.2f} s for {count} frames of {self._frame_rate:g} per second, "
                    f"which are {count / self._frame_rate:.2f} s: leave it out, or set a smaller data.num_frames"
                )
            seconds = np.arange(count) / self._frame_rate
            return frames_at(head.times, seconds * fps, head.times[0] + 1000 * seconds) or indices

        return read_video(source, where, choose).read_all()

    def _read_sound(self, index: int, source: File | list[File], where: str) -> np.ndarray:
        """The sound of the frames: int16 ``[channels, N]``. Raises DataError as ``read_waveform``."""
        milliseconds = math.ceil(1000 * self.size[2] / self._frame_rate)
        file = self._sound_file(index)
        if file is not None:
            return read_waveform(file, self._rate, self._channels, milliseconds, where)[0]
        if isinstance(source, list) or (isinstance(source, Path) and source.is_dir()):
            raise DataError(f"{where}: images have no sound: give a file in the column {self.config.sound_key!r}")
        track = read_sound_track(source, milliseconds / 1000, where)
        return to_waveform(
            track.samples, track.rate, self._rate, self._channels, milliseconds, f"{where}: sound of the video"
        )

    def fingerprint(self) -> str:
        """As ``ImageTextDataset.fingerprint``, with the column of the sound."""
        return json.dumps([super().fingerprint(), self.config.sound_key])

    @property
    def settings(self) -> list[object]:
        """How files become frames and waveforms."""
        return [*super().settings, "sound", VERSION, self._rate, self._channels, self._frame_rate]
