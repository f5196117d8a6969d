"""What a reward is: a frozen dataclass that scores samples and knows neither models nor algorithms."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import ClassVar, Literal, Protocol, TypeVar

import numpy as np

from sfumato.config.open_mappings import JsonObject
from sfumato.errors import ConfigError
from sfumato.tracking.waveforms import VideoWithSound, Waveform, spectrum_picture

Result = TypeVar("Result")


def load_once(
    function: Callable[..., Result], lock: AbstractContextManager[object] | None = None
) -> Callable[..., Result]:
    """Wraps a loader so that each set of arguments is loaded once per process, whichever threads ask for it.

    Args:
        function: the loader; its arguments must be hashable.
        lock: held during a call; loaders that share a lock run one after the other. None makes one.
    """
    cached = functools.cache(function)
    lock = lock or threading.RLock()

    @functools.wraps(function)
    def load(*args: object, **settings: object) -> Result:
        with lock:  # functools.cache alone would load twice when two threads ask at once
            return cached(*args, **settings)

    return load


class PromptImages(Protocol):
    """Images in a prompt, which stay files until they are decoded."""

    def find(self) -> Sequence[object]:
        """Their files in the order of the prompt: paths, or the bytes of the files."""
        ...

    def side_by_side(self) -> np.ndarray | None:
        """All images of the prompt in one picture, uint8 [H, W, 3]. Raises DataError when one is broken."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One finished sample, as rewards see it."""

    image: np.ndarray | None = None
    """The image, uint8 [H, W, 3], red green blue; for a reward that ``takes_video`` perhaps a video, [F, H, W, 3];
    None for a text."""
    prompt: str
    """The text that the sample was made from."""
    source: np.ndarray | None = None
    """The image that was edited or animated, uint8 [H, W, 3]; None where there was none."""
    images: PromptImages | None = None
    """The images that stand in the prompt of a language model; None without, and on a reward server."""
    metadata: JsonObject = dataclasses.field(default_factory=dict)
    """The other columns of the prompt's row in the data file, such as ``target``."""
    group_id: int
    """Samples of the same prompt in the same step share this number."""
    text: str | None = None
    """What a language model answered; None for an image."""
    sound: Waveform | None = None
    """The sound, int16 ``[channels, N]`` with its sampling rate, alone or of a video; None without, and on a reward
    server."""
    frame_rate: float = 0.0
    """Frames per second at which a video is meant to be played; 0 where that is not known, and of other samples."""
    messages: list[JsonObject] | None = None
    """The whole conversation with ``role`` and ``content``, tools included, where there were several turns."""
    num_tokens: int = 0
    """Tokens of the answer that the policy drew; 0 for an image."""
    is_truncated: bool = False
    """Whether the answer ended at the limit of its length."""
    damage: str = ""
    """Why it is not to be scored, such as a picture that was not finite before it was rounded; rewards never see it."""
    scores: dict[str, float] | None = None
    """Values of each reward by label, NaN where it failed, of a sample that was scored before and is not again; None
    for all others."""

    def __post_init__(self) -> None:
        contents = [part for part in (self.image, self.text, self.sound) if part is not None]
        with_sound = self.image is not None and self.sound is not None and self.frame_rate > 0
        assert len(contents) == 1 + with_sound, "a sample is an image, a text, a sound, or a video with sound"
        for image, dimensions in ((self.image, (3, 4)), (self.source, (3,))):
            assert image is None or (image.dtype == np.uint8 and image.ndim in dimensions and image.shape[-1] == 3), (
                f"a sample must be uint8 [H, W, 3] or [F, H, W, 3], not {image.dtype} {list(image.shape)}"
            )

    def copy(self) -> Sample:
        """A deep copy, whose pictures and metadata a reward may write into."""
        return copy.deepcopy(self)

    @property
    def pixels(self) -> np.ndarray:
        """The image, or the video, of a sample that is no text."""
        assert self.image is not None, "a text has no pixels"
        return self.image

    @property
    def content(self) -> np.ndarray | str | Waveform | VideoWithSound:
        """The image, the text or the sound, or the video with its sound."""
        if self.image is not None and self.sound is not None:
            return VideoWithSound(self.image, self.sound, self.frame_rate)
        return next(part for part in (self.image, self.text, self.sound) if part is not None)

    @property
    def waveform(self) -> Waveform:
        """The sound of a sample that is one."""
        assert self.sound is not None, "no sound"
        return self.sound

    @property
    def shown(self) -> np.ndarray:
        """The image or video, or the spectrum of a sound as a picture."""
        return self.pixels if self.image is not None or self.sound is None else spectrum_picture(self.sound)

    @property
    def frames(self) -> np.ndarray:
        """The frames of a sample that is no text, uint8 [F, H, W, 3]; an image is one frame."""
        return self.pixels if self.pixels.ndim == 4 else self.pixels[None]


@dataclass(frozen=True)
class Failure:
    """Stands in the place of a value: this sample could not be scored, for this reason."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class Reward(ABC):
    """Base of every reward. A subclass states ``type: ClassVar[str]`` and defines ``score``.

    Class attributes that a subclass may set:

    - ``groupwise``: ``score`` is given whole groups.
    - ``takes_video``: ``score`` is given whole videos. Otherwise it is given their frames as images, and the value of a
      video is the mean over its frames.
    - ``needs_video``: it cannot score single images.
    - ``cached``: equal samples (or groups) are scored once. Only for a reward whose value is the same to the bit
      whatever else is in the batch, and which costs more than hashing the sample.
    - ``compares_source``: it compares with the one image that was edited, and cannot with several.
    - ``memory_mib``: address space of each of its processes, where it has processes; 0 sets no limit.
    - ``modality``: what it can score: "image" (videos too), "text" or "sound"; empty: images and texts.

    Raises ConfigError when ``weight`` is not finite, ``timeout_s`` or ``frame_step`` is not positive, or the range of
    ``normalise`` is none. A subclass with a ``__post_init__`` of its own calls ``super().__post_init__()``.
    """

    type: ClassVar[str]
    modality: ClassVar[str] = ""
    groupwise: ClassVar[bool] = False
    takes_video: ClassVar[bool] = False
    needs_video: ClassVar[bool] = False
    cached: ClassVar[bool] = False
    compares_source: ClassVar[bool] = False
    memory_mib: ClassVar[int] = 0

    name: str = ""
    """Label in metrics and messages; empty: the type. Needed when two rewards have the same type."""
    weight: float = 1.0
    """Factor of this reward in what is optimised; may be negative."""
    normalise: Literal["none", "group", "batch"] | tuple[float, float] = "none"
    """Before it is weighted: none, standardise within its group or over all samples of the iteration, or map a range
    [low, high] to 0 to 1."""
    evaluation_only: bool = False
    """Scored and logged, but never part of what is optimised."""
    timeout_s: float = 120.0
    """Seconds that one call may take; after that the call is abandoned and its samples have no reward."""
    frame_step: int = 4
    """Distance in frames between those that are scored, where a reward scores single frames of a video."""
    process: bool = False
    """Score in processes of their own: a timeout then ends the call, and a crash costs its samples alone."""

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ConfigError(f"weight of reward {self.label!r} must be a finite number, not {self.weight}")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise ConfigError(f"timeout_s of reward {self.label!r} must be a positive number, not {self.timeout_s}")
        self._check_positive("frame_step")
        if not isinstance(self.normalise, str):  # a range that is mapped to 0 to 1
            low, high = self.normalise
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                raise ConfigError(
                    f"normalise of reward {self.label!r} must be a range [low, high] of finite numbers with low below "
                    f"high, not {list(self.normalise)}"
                )

    def _check_positive(self, *names: str) -> None:
        """Raises ConfigError when one of these fields is below 1."""
        for name in names:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of reward {self.label!r} must be at least 1, not {getattr(self, name)}")

    @property
    def kinds(self) -> str:
        """What it can score, for messages."""
        return self.modality or "image, text"

    def scores(self, modality: str) -> bool:
        """Whether it can score samples of a kind."""
        return self.modality == modality or (not self.modality and modality != "sound")

    @property
    def label(self) -> str:
        """The name of this reward in metrics and messages: ``name``, else the type, else the class's name."""
        return self.name or getattr(self, "type", self.__class__.__name__)

    def prepare(self) -> None:  # noqa: B027  (most rewards have nothing to load)
        """Loads what ``score`` needs, so that a missing package is found before the first step and not after it.

        Raises MissingDependencyError that holds the command that installs what is missing.
        """

    def check_installed(self) -> str:
        """Looks for what ``prepare`` needs, as ``sfumato check`` does: loads no model, and asks no server.

        Returns:
            What only a run finds out, such as whether a server answers; empty when nothing is left.

        Raises:
            UserError: says what is missing, as ``prepare`` would.
        """
        return "" if type(self).prepare is Reward.prepare else "what its prepare() loads"

    def check_row(self, prompt: str, metadata: dict[str, object]) -> None:  # noqa: B027  (most rewards take any prompt)
        """Whether a row of the data has what ``score`` needs; called on every row before anything is sampled.

        Raises DataError that says what is missing.
        """

    def check_video(self) -> None:
        """Raises ConfigError for a reward that can score no videos."""
        if self.groupwise and not self.takes_video:
            raise ConfigError(
                f"reward {self.label!r} compares the images of a group and takes no videos: remove it, or set "
                "rollout.num_frames to 1"
            )

    def check_picture(self) -> None:
        """Raises ConfigError for a reward that can score no single images."""
        if self.needs_video:
            raise ConfigError(
                f"reward {self.label!r} scores videos and no single images: remove it, or raise rollout.num_frames"
            )

    def take_notes(self) -> list[str]:
        """Messages for the log since the last call, such as an outage that was waited out and cost no value."""
        return []

    def take_counts(self) -> dict[str, tuple[int, int]]:
        """Metrics that are fractions, by name, as numerator and denominator since the last call."""
        return {}

    def seen(self, sample: Sample) -> list[Sample]:
        """The samples that ``score`` is given for one: itself, or every ``frame_step``-th frame of a video as image."""
        if self.modality == "sound" and sample.image is not None:
            return [dataclasses.replace(sample, image=None)]
        if self.takes_video or sample.image is None or sample.image.ndim == 3:
            return [sample]
        return [dataclasses.replace(sample, image=frame, sound=None) for frame in sample.frames[:: self.frame_step]]

    def plan_calls(self, samples: Sequence[Sample]) -> list[list[int]]:
        """Indices of the samples of each call of ``score``: all samples at once, or one group in each call."""
        if not self.groupwise:
            return [list(range(len(samples)))] if samples else []
        groups: dict[int, list[int]] = {}
        for index, sample in enumerate(samples):
            groups.setdefault(sample.group_id, []).append(index)
        return list(groups.values())

    def call_timeout_s(self, num_samples: int) -> float:
        """Seconds that a call with ``num_samples`` samples may take."""
        del num_samples
        return self.timeout_s

    @property
    def source_file(self) -> str | None:
        """The file to look into when ``score`` raises."""
        return getattr(sys.modules.get(type(self).__module__), "__file__", None)

    @abstractmethod
    def score(self, samples: list[Sample]) -> Sequence[float | Failure]:
        """Scores a batch, or one whole group when ``groupwise`` is true. Called from another thread.

        Args:
            samples: at least one sample; copies, which may be changed.

        Returns:
            One finite number per sample in the same order; NaN, or a Failure that says why, for a sample that
            could not be scored.

        Raises:
            UserError: a mistake that a person has to mend, such as a row without a target; it stops the run.
            Exception: anything else means that none of these samples could be scored.
        """
