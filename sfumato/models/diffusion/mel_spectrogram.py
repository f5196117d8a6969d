"""The logarithmic mel spectrograms of which autoencoders of sound make latents.

Shapes: B samples, A channels, N samples of sound, M frames of a spectrum.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

WINDOW = 1024
"""Samples of the Hann window of a spectrum."""

SMALLEST = 1e-5
"""Magnitude below which a spectrum counts as silent."""


def log_mel_spectrogram(sound: Tensor, rate: int, hop_length: int, bins: int) -> Tensor:
    """The logarithm of the magnitudes of a sound in bands of Slaney's mel scale, each of the same area.

    Args:
        sound: float32 ``[B, A, N]`` in [-1, 1]; N is more than half of ``WINDOW``.
        rate: samples per second.
        hop_length: samples from one frame to the next; the first is centred on the first sample.
        bins: bands from 0 Hz to half of the rate.

    Returns:
        float32 ``[B, A, M, bins]`` with M = 1 + N // hop_length.
    """
    spectrum = torch.stft(
        sound.flatten(0, 1),
        WINDOW,
        hop_length,
        window=torch.hann_window(WINDOW, device=sound.device),
        center=True,
        pad_mode="reflect",
        return_complex=True,
    ).abs()  # [B A, frequencies, M]
    filters = _mel_filters(WINDOW // 2 + 1, bins, rate).to(spectrum)
    return (spectrum.mT @ filters).clamp(min=SMALLEST).log().unflatten(0, sound.shape[:2])


@functools.cache
def _mel_filters(frequencies: int, bins: int, rate: int) -> Tensor:
    """Weights of the bands: float32 ``[frequencies, bins]``."""
    from transformers.audio_utils import mel_filter_bank

    filters = mel_filter_bank(frequencies, bins, 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney")
    return torch.from_numpy(filters).float()
