"""A dataset of sounds with captions, with random access."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from sfumato.config.image_data import ImageTextDataConfig
from sfumato.data.files.file_columns import find_file
from sfumato.data.images.image_text import ImageTextDataset, open_image_text
from sfumato.data.media.kinds import SOUND_ENDINGS
from sfumato.data.media.pictures import Picture
from sfumato.data.media.waveform_files import VERSION, read_waveform
from sfumato.data.synthetic.glyphs import GlyphDataset
from sfumato.errors import ConfigError


class SoundTextDataset(ImageTextDataset):
    """Sounds with captions from a file or folder, brought to one length, sampling rate and number of channels.

    The tables and folders are those of images, with files of sound in their place.
    """

    def __init__(self, config: ImageTextDataConfig) -> None:
        """Opens the source. Raises DataError when it is missing or empty."""
        super().__init__(config)
        self._rate = 0
        self._channels = 0

    def take_format(self, rate: int, channels: int) -> None:
        """Sets the sampling rate and the number of channels, which are those of the model.

        Raises:
            ConfigError: for a model that makes no sound.
        """
        if rate < 1:
            raise ConfigError("data.data_type sound_text: this model makes no sound: take image_text, or another model")
        self._rate = rate
        self._channels = channels

    @property
    def _key(self) -> str:
        return self.config.sound_key

    @property
    def _kind(self) -> str:
        return "sounds"

    @property
    def _endings(self) -> set[str]:
        return SOUND_ENDINGS

    def picture(self, index: int, size: tuple[int, int] | None = None) -> Picture:
        """The sound of a row: int16 ``[channels, N]``, and as framing 1, the milliseconds of its file, 0 and 0.

        Raises:
            DataError: when the file is missing or broken; it names row and file.
        """
        del size
        assert self._rate, "take_format was not called"
        row = self.rows[index]
        where = self.describe(index)
        file = find_file(row, self._image_key(row), self.rows.folder(index), where, "sound")
        waveform, milliseconds = read_waveform(file, self._rate, self._channels, self.size[1], where)
        return Picture(torch.from_numpy(waveform), torch.tensor([1, milliseconds, 0, 0], dtype=torch.int32))

    def source(self, index: int, pixels: torch.Tensor) -> np.ndarray:
        """Sounds have no source image."""
        raise ConfigError("data.data_type sound_text: this model starts from an image, which a sound does not have")

    @property
    def settings(self) -> list[object]:
        """How files become waveforms."""
        return ["sound", VERSION, self._rate, self._channels, self.size[1]]


def open_captioned(
    config: ImageTextDataConfig, seed: int, say: Callable[[str], None] | None = None
) -> ImageTextDataset | GlyphDataset:
    """The dataset of images, sounds or videos with sound that the configuration describes; arguments and errors of
    ``open_image_text``."""
    if config.data_type not in ("sound_text", "video_sound_text"):
        return open_image_text(config, seed, say)
    if config.data_type == "sound_text":
        dataset = SoundTextDataset(config)
    else:
        from sfumato.data.sounds.video_sound import VideoSoundDataset

        dataset = VideoSoundDataset(config)
    if say is not None:
        for line in dataset.unused_files():
            say(line)
    return dataset
