"""Rewards that hear: CLAP's similarity with the prompt, the words that Whisper hears, and signs of empty sound."""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from sfumato.errors import DataError
from sfumato.rewards.base import Reward, Sample
from sfumato.rewards.ocr import levenshtein, quoted_text
from sfumato.rewards.pretrained import PretrainedReward

if TYPE_CHECKING:
    import torch

    from sfumato.rewards.networks.hearing import ClapNetwork, Transcriber
    from sfumato.tracking.waveforms import Waveform

FRAME_SECONDS = 0.02
"""Length of the frames of which each is silent or not."""

LOWEST_DB = -100.0
"""Level of digital silence."""

_UNSPACED = re.compile(
    r"[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff]"
)
"""Characters of Thai, Lao, Burmese, Khmer, Japanese and Chinese, which are written without spaces between words."""


@dataclass(frozen=True, kw_only=True)
class Loudness(Reward):
    """Level of the sound in decibels against full scale, -100 (silence) to 0: a sign of sounds that grow or fade."""

    type: ClassVar[str] = "loudness"
    modality: ClassVar[str] = "sound"

    def score(self, samples: list[Sample]) -> list[float]:
        """``20 log10(rms)`` of each sound."""
        return [level_db(sample.waveform.mono) for sample in samples]


@dataclass(frozen=True, kw_only=True)
class Silence(Reward):
    """Share of the sound, 0 to 1, that is silent: frames of 20 ms whose level is below a threshold."""

    type: ClassVar[str] = "silence"
    modality: ClassVar[str] = "sound"

    below_db: float = -60.0
    """Level against full scale below which a frame is silent."""

    def score(self, samples: list[Sample]) -> list[float]:
        """The share of each sound."""
        return [silent_share(sample.waveform, self.below_db) for sample in samples]


@dataclass(frozen=True, kw_only=True)
class Clipping(Reward):
    """Share of the samples of the sound, 0 to 1, that are at full scale: a sign of sounds that are made too loud."""

    type: ClassVar[str] = "clipping"
    modality: ClassVar[str] = "sound"

    def score(self, samples: list[Sample]) -> list[float]:
        """The share of each sound."""
        return [float((np.abs(sample.waveform.samples.astype(np.int32)) >= 32767).mean()) for sample in samples]


@dataclass(frozen=True, kw_only=True)
class Clap(PretrainedReward):
    """Cosine of the sound and the prompt by CLAP (arXiv 2211.06687), from -1 to 1; of a long sound the mean over its
    windows."""

    type: ClassVar[str] = "clap"
    modality: ClassVar[str] = "sound"
    loader: ClassVar[str] = "sfumato.rewards.networks.hearing:load_clap"

    def score_batch(self, network: ClapNetwork, samples: list[Sample]) -> torch.Tensor:
        """Cosine of each sound with its prompt, [B]."""
        return network.cosines([sample.waveform for sample in samples], [sample.prompt for sample in samples])


@dataclass(frozen=True, kw_only=True)
class HeardWords(PretrainedReward):
    """How well Whisper (arXiv 2212.04356) hears the words that the prompt quotes, or the column ``target``: 1 minus the
    rate of wrong words, at least 0."""

    type: ClassVar[str] = "heard_words"
    modality: ClassVar[str] = "sound"
    loader: ClassVar[str] = "sfumato.rewards.networks.hearing:load_whisper"

    language: str = ""
    """Language that is spoken, such as en; empty lets a multilingual model find out."""
    max_new_tokens: int = 128
    """Most tokens of the words of a window of 30 s."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("max_new_tokens")

    def check_row(self, prompt: str, metadata: dict[str, object]) -> None:
        """Raises DataError when the row says no words."""
        spoken_words(prompt, metadata)

    def score_batch(self, network: Transcriber, samples: list[Sample]) -> torch.Tensor:
        """1 minus the word error rate of each sound, [B]."""
        import torch

        sounds = [sample.waveform for sample in samples]
        texts = network.transcribe(sounds, self.language, self.max_new_tokens)
        return torch.tensor(
            [
                max(1 - word_error_rate(text, spoken_words(sample.prompt, sample.metadata)), 0.0)
                for text, sample in zip(texts, samples, strict=True)
            ]
        )


def level_db(samples: np.ndarray) -> float:
    """Level of samples ``[N]`` in -1 to 1, in decibels against full scale."""
    power = float(np.square(samples, dtype=np.float64).mean()) if len(samples) else 0.0
    return max(10 * float(np.log10(power)), LOWEST_DB) if power > 0 else LOWEST_DB


def silent_share(sound: Waveform, below_db: float) -> float:
    """Share of the frames of a sound whose level is below a threshold; a frame cut short at the end counts as one."""
    length = max(int(FRAME_SECONDS * sound.rate), 1)
    mono = sound.mono
    levels = [level_db(mono[start : start + length]) for start in range(0, len(mono), length)]
    return float(np.mean([level < below_db for level in levels])) if levels else 1.0


def words_of(text: str) -> list[str]:
    """The words of a text, without case and punctuation; of writing without spaces, such as Chinese, its characters."""
    text = _UNSPACED.sub(r" \g<0> ", unicodedata.normalize("NFKC", text).replace("\u2019", "'").casefold())
    # marks are a part of words: vowels of Hindi and others are written by them
    letters = (letter if _is_of_word(letter) else " " for letter in text)
    return [word.strip("'") for word in "".join(letters).split() if word.strip("'")]


def _is_of_word(letter: str) -> bool:
    return letter.isalnum() or letter == "'" or unicodedata.category(letter).startswith("M")


def word_error_rate(text: str, target: str) -> float:
    """Insertions, deletions and replacements of words that turn a text into its target, per word of the target."""
    wanted = words_of(target)
    return levenshtein(words_of(text), wanted) / len(wanted)


def spoken_words(prompt: str, metadata: dict[str, object]) -> str:
    """The words that should be heard: the column ``target``, else the quoted part of the prompt.

    Raises:
        DataError: when there are none, or it is not clear which part is quoted.
    """
    target = metadata.get("target")
    if target is None:
        target = quoted_text(prompt)
    if not isinstance(target, str) or not words_of(target):
        raise DataError(
            f"the heard_words reward finds no words for prompt {prompt!r}: put them in double quotes into the prompt, "
            "or give the row a text 'target'"
        )
    return target
