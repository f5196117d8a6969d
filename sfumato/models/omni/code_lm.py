"""Janus and Emu3 as causal language models over text and codes of images, with logits for both in one forward pass.

All modules and weights are those of transformers. There, ``forward`` of Janus gives logits of text alone, and the
modules that draw are called within ``generate``; here the same modules are called in the same order in ``forward``.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor
from transformers import Emu3ForConditionalGeneration, JanusForConditionalGeneration
from transformers.modeling_outputs import CausalLMOutputWithPast

from sfumato.models.language.row_cache import cache_argument

if TYPE_CHECKING:
    from transformers import Cache

CACHE = cache_argument(inspect.signature(Emu3ForConditionalGeneration.forward).parameters) or "cache"
"""What this version of transformers calls the cache that a model is given."""

IMPOSSIBLE = -1e9
"""Logit of a token that cannot follow. Its probability is 0; unlike -inf it gives no NaN when it is multiplied by 0."""


class Emu3OfCodes(Emu3ForConditionalGeneration):
    """Emu3 with the constraint that only codes can follow within an image, as in the examples of transformers' pages.

    At the beginning of an image or a line, and after a code, all tokens but codes have probability 0. Ends of lines are
    inserted, so the model need not predict them. The class is not for images that the model learns from
    (``tasks/train_omni.py``).
    """

    within_image: tuple[int, int, int, int]
    """First code, last code + 1, the token before an image's first code, and the token that ends a line."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: torch.LongTensor,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        """Logits ``[B, K, V]`` of tokens int64 ``[B, T]``; arguments as in transformers."""
        options |= {} if cache is None else {CACHE: cache}
        output = cast(
            "CausalLMOutputWithPast",
            super().forward(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=position_ids,
                use_cache=use_cache,
                logits_to_keep=logits_to_keep,
                **options,
            ),
        )
        assert output.logits is not None
        first, stop, begin, line_end = self.within_image
        # True where a code follows, or the end of a line, which is inserted whatever its logits are.
        draws = (input_ids >= first) & (input_ids < stop) | (input_ids == begin) | (input_ids == line_end)
        tokens = torch.arange(output.logits.shape[-1], device=input_ids.device)
        is_code = (tokens >= first) & (tokens < stop)
        output.logits = output.logits.masked_fill(draws[:, _kept_columns(logits_to_keep), None] & ~is_code, IMPOSSIBLE)
        return output


class JanusOfCodes(JanusForConditionalGeneration):
    """transformers' Janus with a ``forward`` that takes and predicts codes of images, too.

    Token V + c is code c, where V is the size of the vocabulary of text. Codes are embedded by
    ``generation_embeddings`` and ``generation_aligner``. What can follow a token depends on it:

    - the token that begins an image, or a code that is not the image's last: a code, by ``generation_head``;
    - the last code of an image: the token that ends an image, with certainty, since ``generate`` stops there;
    - any other token: a token of text, by the output layer.

    Probabilities are therefore those of transformers' own heads.
    """

    around_image: tuple[int, int]
    """The tokens that begin and end an image; set where the model is built."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        input_ids: torch.LongTensor,
        pixel_values: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **options: object,
    ) -> CausalLMOutputWithPast:
        """Logits ``[B, K, V + C]`` of tokens and codes int64 ``[B, T]``; arguments as in transformers."""
        options |= {} if cache is None else {CACHE: cache}
        size = self.lm_head.out_features
        is_code = input_ids >= size
        # Both embeddings are computed for all tokens, with id 0 in the places of the other kind.
        text = self.get_input_embeddings()(input_ids.masked_fill(is_code, 0))
        codes = self.prepare_embeddings_for_image_generation((input_ids - size).clamp(min=0))
        embeds = torch.where(is_code[..., None], codes.to(text.dtype), text)
        if pixel_values is not None:
            image_features = self.model.get_image_features(pixel_values, return_dict=True).pooler_output  # pyright: ignore[reportCallIssue]  (added by a decorator)
            image_features = image_features.reshape(-1, embeds.shape[-1]).to(embeds.dtype)
            embeds = embeds.masked_scatter(
                self.model.get_placeholder_mask(input_ids, embeds, image_features), image_features
            )
        output = self.model.language_model(
            inputs_embeds=embeds,
            attention_mask=attention_mask,
            position_ids=position_ids,
            use_cache=use_cache,
            **options,
        )
        columns = _kept_columns(logits_to_keep)
        hidden = output.last_hidden_state[:, columns]
        begin, end = self.around_image
        is_last = _run_lengths(is_code) == self.config.vision_config.num_image_tokens  # pyright: ignore[reportAttributeAccessIssue, reportOptionalMemberAccess]
        draws = (is_code & ~is_last | (input_ids == begin))[:, columns, None]
        certain = torch.arange(size, device=hidden.device) == end
        text_logits = self.lm_head(hidden).masked_fill(draws, IMPOSSIBLE)
        text_logits = torch.where(
            is_last[:, columns, None], text_logits.new_full((), IMPOSSIBLE) * ~certain, text_logits
        )
        code_logits = self.model.generation_head(hidden).masked_fill(~draws, IMPOSSIBLE)
        return CausalLMOutputWithPast(logits=cast("torch.FloatTensor", torch.cat([text_logits, code_logits], dim=-1)))


def _run_lengths(mask: Tensor) -> Tensor:
    """For each true element of a mask ``[B, T]`` the length of the run of true elements that ends there; else 0."""
    counts = mask.cumsum(dim=1)
    return counts - counts.masked_fill(mask, 0).cummax(dim=1).values


def _kept_columns(logits_to_keep: int | Tensor) -> slice | Tensor:
    """The columns of tokens for which logits are computed: the last ones, or those of a tensor of indices."""
    return slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
