"""What the tests know of each family that makes sound: one row of ``ROWS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests import tiny_sound

SEED, STEPS, SECONDS = 11, 4, 0.1
PROMPTS = ["a low tone", "tone"]


def call_stable_audio3(pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, kind: str) -> Any:
    return pipeline(
        prompt=prompts,
        duration=SECONDS,
        num_inference_steps=STEPS,
        guidance_scale=scale,
        latents=latents,
        output_type=kind,
    ).audios


@dataclass(frozen=True)
class SoundRow:
    """A family as these tests see it."""

    describe: Callable[[], dict[str, Any]]
    call: Callable[[Any, list[str], torch.Tensor, float, str], Any]
    latent_shape: tuple[int, int]
    scales: tuple[float, ...] = (1.0, 3.5)
    tokens: int = 256
    takes_lora: bool = True


ROWS = {"stable_audio3": SoundRow(tiny_sound.tiny_stable_audio3, call_stable_audio3, (8, 13), takes_lora=False)}
