"""How ACE-Step 1.5 reads a prompt: a caption, and lyrics with their language.

Qwen3 reads the caption, and a condition encoder, which is frozen with it, makes one sequence of caption, lyrics and the
timbre of a reference, here silence. Lyrics stand in a prompt below a line ``# Lyric``, their language before it below
``# Languages``: the headings of ACE-Step's own format.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from sfumato.config.open_mappings import Keywords
from sfumato.models.diffusion.latents import embed_one_by_one, pad_embeds
from sfumato.models.diffusion.waveform_latents import WaveformLatents

LANGUAGE_HEADING = re.compile(r"^# Languages?[ \t\r]*$", re.MULTILINE)
LYRICS_HEADING = re.compile(r"^# Lyrics?[ \t\r]*$", re.MULTILINE)
TIMBRE_SECONDS = 30
"""Length of the reference from which the timbre is read."""


def _split_at(heading: re.Pattern[str], text: str) -> tuple[str, str]:
    """What is above the first line that is a heading, and what is below it; all of the text without such a line."""
    line = heading.search(text)
    return (text, "") if line is None else (text[: line.start()].rstrip(), text[line.end() :].strip())


class ACEStepText(WaveformLatents):
    """Base class of ACE-Step: embeddings of captions and lyrics."""

    encoder_names = ("text_encoder", "condition_encoder")
    shortest_prompt = 2

    def prompt_as_read(self, prompt: str) -> str:
        """Caption and lyrics in their templates, which count towards the limit together."""
        return "".join(self.pipeline._format_prompt(**self._pipeline_arguments(prompt))) if prompt else ""

    @torch.no_grad()
    def embed_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """``prompt_embeds`` ``[B, T, D]`` and ``prompt_mask``, bool ``[B, T]``; T is 1 more than
        ``max_sequence_length``, for the timbre."""
        return embed_one_by_one(
            prompts, lambda prompt: pad_embeds(self._embed_one(prompt), self.max_sequence_length + 1)
        )

    def _pipeline_arguments(self, prompt: str) -> Keywords:
        """What the pipeline is called with for a prompt."""
        caption, lyrics = _split_at(LYRICS_HEADING, prompt)
        caption, language = _split_at(LANGUAGE_HEADING, caption)
        seconds = self.milliseconds / 1000
        return {"prompt": caption, "lyrics": lyrics, "vocal_language": language or "en", "audio_duration": seconds}

    def _embed_one(self, prompt: str) -> Tensor:
        """The sequence ``[1, T, D]`` of a prompt; of the empty one the embedding that stands for no condition."""
        encoder = self.pipeline.condition_encoder
        if not prompt:
            return encoder.null_condition_emb
        limit = self.max_sequence_length
        arguments = self._pipeline_arguments(prompt)
        arguments |= {name: [arguments[name]] for name in ("prompt", "lyrics")}
        caption, caption_mask, lyrics, lyrics_mask = self.pipeline.encode_prompt(
            **arguments, device=self.device, max_text_length=limit - 1, max_lyric_length=limit
        )
        room = limit - caption.shape[1]
        timbre = encoder.silence_latent[:, : math.ceil(TIMBRE_SECONDS * self.pipeline.latents_per_second)]
        order = torch.zeros(1, dtype=torch.long, device=self.device)
        return encoder(caption, caption_mask, lyrics[:, :room], lyrics_mask[:, :room], timbre, order)[0]
