"""What the tests know of each family that makes sound: one row of ``ROWS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from diffusers.guiders.adaptive_projected_guidance import MomentumBuffer

from tests import tiny_sound

SEED, STEPS, SECONDS = 11, 4, 0.1


def call_stable_audio3(pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, kind: str) -> Any:
    return pipeline(
        prompt=prompts,
        duration=SECONDS,
        num_inference_steps=STEPS,
        guidance_scale=scale,
        latents=latents,
        output_type=kind,
    ).audios


SUNG = "a low tone\n# Languages\nde\n\n# Lyric\n[verse]\nla la"


def call_ace_step(pipeline: Any, prompts: list[str], latents: torch.Tensor, scale: float, kind: str) -> Any:
    """Without the momentum of guidance, which makes a step depend on those before it."""
    parts = {SUNG: ("a low tone", "[verse]\nla la", "de")}
    captions, lyrics, languages = zip(*(parts.get(prompt, (prompt, "", "en")) for prompt in prompts), strict=True)
    with pytest.MonkeyPatch.context() as patch:
        module = "diffusers.pipelines.ace_step.pipeline_ace_step"
        patch.setattr(f"{module}.MomentumBuffer", lambda momentum: MomentumBuffer(0))
        sounds = pipeline(
            prompt=[*captions],
            lyrics=[*lyrics],
            vocal_language=[*languages],
            audio_duration=SECONDS,
            num_inference_steps=STEPS,
            guidance_scale=scale,
            latents=latents.mT,
            output_type=kind,
        ).audios
    return sounds.mT if kind == "latent" else sounds[..., : int(SECONDS * 8000)]


@dataclass(frozen=True)
class SoundRow:
    """A family as these tests see it."""

    describe: Callable[[], dict[str, Any]]
    call: Callable[[Any, list[str], torch.Tensor, float, str], Any]
    latent_shape: tuple[int, int]
    scales: tuple[float, ...] = (1.0, 3.5)
    tokens: int = 256
    takes_lora: bool = True
    straight: bool = True
    """Before the shift the schedule is 1, 1 - 1/n, ..., 0."""
    prompts: tuple[str, ...] = ("a low tone", "tone")
    longest: float = 4.0
    """Seconds of the longest sound."""
    size: tuple[int, int] = (1, int(1000 * SECONDS))
    from_images: bool = False
    needs: str = ""
    """A package that the family needs and not every installation has."""


ROWS = {
    "stable_audio3": SoundRow(
        tiny_sound.tiny_stable_audio3, call_stable_audio3, (8, 13), takes_lora=False, straight=False
    ),
    "ace_step": SoundRow(tiny_sound.tiny_ace_step, call_ace_step, (8, 13), prompts=(SUNG, "tone"), longest=120.0),
}
