"""Janus and Emu3 as causal models of what they draw: which tokens can follow is what the model says.

All modules and weights are transformers' own. Janus' ``forward`` says logits of text alone, and what draws is called
from within ``generate``; here the same modules are called in the same order in one forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Emu3ForConditionalGeneration, JanusForConditionalGeneration
from transformers.modeling_outputs import CausalLMOutputWithPast

IMPOSSIBLE = -1e9
"""The logit of a token that cannot follow: its probability is 0, and finite times it is 0."""


class Emu3OfCodes(Emu3ForConditionalGeneration):
    """Emu3 whose images have codes alone within their lines, the constraint that transformers' pages of Emu3 draw with.

    Where an image or a line of it begins and after a code, other tokens than codes have no probability. Ends of lines
    are given, so it need not say them; it is not for images that are learned from (``tasks/train_omni.py``).
    """

    within_image: tuple[int, int, int, int]
    """The first code and the one after the last, the token before the first code, and the one that ends a line."""

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Logits ``[B, K, V]`` of tokens int64 ``[B, T]``; the rest as transformers' own."""
        output = super().forward(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **options,
        )
        first, stop, begin, line_end = self.within_image
        draws = (input_ids >= first) & (input_ids < stop) | (input_ids == begin) | (input_ids == line_end)
        tokens = torch.arange(output.logits.shape[-1], device=input_ids.device)
        is_code = (tokens >= first) & (tokens < stop)
        output.logits = output.logits.masked_fill(draws[:, _kept_columns(logits_to_keep), None] & ~is_code, IMPOSSIBLE)
        return output


class JanusOfCodes(JanusForConditionalGeneration):
    """transformers' Janus, all modules and weights of which are its own, whose ``forward`` knows codes, too.

    Token V + c is code c, V the size of the text's vocabulary. It goes in through ``generation_embeddings`` and
    ``generation_aligner``. After the token that begins an image, and after each code but the last of it,
    ``generation_head`` says what comes next, a code; after the last one the token that ends an image is certain, as
    ``generate`` stops there; after any other token the output layer of text says it. So probabilities are those of
    transformers' own heads.
    """

    around_image: tuple[int, int]
    """The tokens that begin and end an image; set where the model is built."""

    def forward(
        self,
        input_ids: Tensor,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Logits ``[B, K, V + C]`` of tokens and codes int64 ``[B, T]``; the rest as transformers' own."""
        size = self.lm_head.out_features
        is_code = input_ids >= size
        text = self.get_input_embeddings()(input_ids.masked_fill(is_code, 0))
        codes = self.prepare_embeddings_for_image_generation((input_ids - size).clamp(min=0))
        embeds = torch.where(is_code[..., None], codes.to(text.dtype), text)
        if pixel_values is not None:
            image_features = self.model.get_image_features(pixel_values, return_dict=True).pooler_output
            image_features = image_features.reshape(-1, embeds.shape[-1]).to(embeds.dtype)
            embeds = embeds.masked_scatter(
                self.model.get_placeholder_mask(input_ids, embeds, image_features), image_features
            )
        output = self.model.language_model(
            inputs_embeds=embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **options,
        )
        columns = _kept_columns(logits_to_keep)
        hidden = output.last_hidden_state[:, columns]
        begin, end = self.around_image
        is_last = _run_lengths(is_code) == self.config.vision_config.num_image_tokens
        draws = (is_code & ~is_last | (input_ids == begin))[:, columns, None]
        certain = torch.arange(size, device=hidden.device) == end
        text_logits = self.lm_head(hidden).masked_fill(draws, IMPOSSIBLE)
        text_logits = torch.where(
            is_last[:, columns, None], text_logits.new_full((), IMPOSSIBLE) * ~certain, text_logits
        )
        code_logits = self.model.generation_head(hidden).masked_fill(~draws, IMPOSSIBLE)
        return CausalLMOutputWithPast(
            logits=torch.cat([text_logits, code_logits], dim=-1), past_key_values=output.past_key_values
        )


def _run_lengths(wanted: Tensor) -> Tensor:
    """Of each token of ``[B, T]`` that is wanted how many follow each other up to it; 0 of others."""
    counts = wanted.cumsum(dim=1)
    return counts - counts.masked_fill(wanted, 0).cummax(dim=1).values


def _kept_columns(logits_to_keep: int | Tensor) -> slice | Tensor:
    return slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
