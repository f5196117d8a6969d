"""Networks that hear: CLAP and Whisper, from folders of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from sfumato.config.open_mappings import Keywords
from sfumato.errors import ConfigError, MissingDependencyError
from sfumato.rewards.networks.folder import (
    CutTexts,
    Network,
    check_model_type,
    load_model,
    load_processor,
    load_tokenizer,
    loader_of,
)
from sfumato.tracking.waveforms import Waveform


def resample_sound(sound: Waveform, rate: int) -> np.ndarray:
    """One channel of a sound at another sampling rate, float32 ``[N]``."""
    mono = sound.mono
    if sound.rate == rate:
        return mono
    return require_soxr().resample(mono, sound.rate, rate).astype(np.float32)


def require_soxr() -> ModuleType:
    """The package soxr. Raises MissingDependencyError when it is not installed."""
    try:
        import soxr
    except ImportError as error:
        raise MissingDependencyError(
            "sound is brought to a network's rate by soxr, which is not installed: pip install 'sfumato[audio]'"
        ) from error
    return soxr


def windows_of(samples: np.ndarray, length: int) -> list[np.ndarray]:
    """Cuts samples ``[N]`` into windows of ``length``; a last one of less than a tenth is left out."""
    windows = [samples[start : start + length] for start in range(0, max(len(samples), 1), length)]
    return windows[:-1] if len(windows) > 1 and len(windows[-1]) < length / 10 else windows


def load_extractor(folder: Path) -> Any:
    """The feature extractor of a folder. Raises ConfigError."""
    from transformers import AutoFeatureExtractor

    return load_processor(AutoFeatureExtractor, folder, "feature extractor")


class ClapNetwork(Network):
    """CLAP: embeddings of sounds and texts in one space."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Raises ConfigError when the folder holds no CLAP model, MissingDependencyError without soxr."""
        from transformers import ClapModel

        require_soxr()
        super().__init__(device, dtype)
        check_model_type(folder, ("clap",))
        self.model: Any = load_model(ClapModel, folder, dtype, device)
        self.extractor = load_extractor(folder)
        self.tokenizer = load_tokenizer(folder)
        self.cut_texts = CutTexts()

    def cosines(self, sounds: Sequence[Waveform], prompts: Sequence[str]) -> torch.Tensor:
        """Cosine of each sound with its prompt, the mean over the sound's windows: float32 [B] on the CPU."""
        rate = self.extractor.sampling_rate
        windows = [windows_of(resample_sound(sound, rate), self.extractor.nb_max_samples) for sound in sounds]
        features = self.extractor(
            [window for parts in windows for window in parts], sampling_rate=rate, return_tensors="pt"
        )
        # of sounds none of which is longer than a window the extractor takes one at random for a longer one
        is_longer = torch.zeros_like(features["is_longer"], dtype=torch.bool)
        heard = self.model.get_audio_features(
            input_features=features["input_features"].to(self.device, self.model.dtype),
            is_longer=is_longer.to(self.device),
        ).pooler_output
        limit = self.model.config.text_config.max_position_embeddings - 2  # positions begin behind the padding's
        self.cut_texts.look(self.tokenizer, prompts, limit)
        tokens = self.tokenizer(list(prompts), padding=True, truncation=True, max_length=limit, return_tensors="pt")
        read = self.model.get_text_features(**tokens.to(self.device)).pooler_output
        counts = [len(parts) for parts in windows]
        rows = torch.repeat_interleave(torch.arange(len(sounds)), torch.tensor(counts)).to(self.device)
        cosines = (heard.float() * read.float()[rows]).sum(dim=-1)
        return torch.stack([part.mean() for part in cosines.split(counts)]).cpu()


class Transcriber(Network):
    """Whisper: the words of a sound."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Raises ConfigError when the folder holds no Whisper model, MissingDependencyError without soxr."""
        from transformers import WhisperForConditionalGeneration

        require_soxr()
        super().__init__(device, dtype)
        check_model_type(folder, ("whisper",))
        self.model: Any = load_model(WhisperForConditionalGeneration, folder, dtype, device)
        self.extractor = load_extractor(folder)
        self.tokenizer: Any = load_tokenizer(folder)

    def transcribe(self, sounds: Sequence[Waveform], language: str, max_new_tokens: int) -> list[str]:
        """The words of each sound, greedily; those of windows of 30 s follow each other.

        Raises:
            ConfigError: for a language that the model does not know.
        """
        rate = self.extractor.sampling_rate
        windows = [windows_of(resample_sound(sound, rate), self.extractor.n_samples) for sound in sounds]
        features = self.extractor(
            [window for parts in windows for window in parts], sampling_rate=rate, return_tensors="pt"
        ).input_features
        options: Keywords = {"language": language, "task": "transcribe"} if language else {}
        try:
            tokens = self.model.generate(
                features.to(self.device, self.model.dtype),
                do_sample=False,
                num_beams=1,
                max_new_tokens=max_new_tokens,
                **options,
            )
        except ValueError as error:
            raise ConfigError(f"heard_words: language {language!r}: {error}") from error
        texts = iter(self.tokenizer.batch_decode(tokens, skip_special_tokens=True))
        return [" ".join(next(texts).strip() for _ in parts) for parts in windows]


load_clap = loader_of(ClapNetwork)
load_whisper = loader_of(Transcriber)
