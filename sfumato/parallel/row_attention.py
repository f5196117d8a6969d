"""Attention of whole packed rows where only Ulysses shares the sequence: the model's attention of one process.

Each rank then has all tokens, for some heads. So windows, soft caps and sinks (arXiv 2309.17453) need no distributed
implementation: the attention of packed rows in transformers' registry computes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from torch import Tensor, nn

from sfumato.errors import ConfigError
from sfumato.parallel.attention import Schedule, attention_of_rows
from sfumato.parallel.packed_rows import SIZES

OFF = f"set {SIZES} to 1"
SEQUENCE_PARALLELISM = "sequence parallelism"

CHANGES = ("softcap", "s_aux")
"""Arguments that change the scores and are supported by an attention of whole rows only."""
WINDOWS = "sliding_attention"
"""The entry for layers with a window in ``layer_types`` of a model's configuration."""


@dataclass(frozen=True)
class RowAttention:
    """An attention of packed rows from transformers' registries."""

    attend: Callable[..., tuple[Tensor, None]]
    window_of: Callable[..., object]
    """The mask function that belongs to it; its result for a window takes the place of a mask."""

    @classmethod
    def find(cls, name: str) -> RowAttention | None:
        """The attention of this name; None where it does not support windows, soft caps and sinks in packed rows."""
        from transformers import AttentionInterface, AttentionMaskInterface

        attention = AttentionInterface().get(name)
        if not set(CHANGES) <= {*getattr(attention, "knows", ())}:  # ``packed_causal`` sets it
            return None
        return cls(cast("Callable[..., tuple[Tensor, None]]", attention), AttentionMaskInterface()[name])

    def __call__(
        self,
        module: nn.Module,
        inputs: tuple[Tensor, Tensor, Tensor],
        schedule: Schedule,
        position_ids: Tensor,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Attention of this rank's tokens.

        Args:
            module: whose attention it is.
            inputs: query ``[B, H, S, D]``, key ``[B, Hk, S, D]`` and value ``[B, Hk, S, Dv]``, this rank's part.
            schedule: where tokens lie.
            position_ids: ``[B or 1, S]`` of whole rows.
            scale: of the scores.
            window: number of tokens that a token sees, itself included.
            softcap: scores are ``softcap tanh(score / softcap)``.
            sinks: ``[H]``, a score of each head that takes weight from all others.

        Returns:
            ``[B, S, H, Dv]``, contiguous as transformers' own functions return it: some models take a view of it.
        """

        def attend(query: Tensor, key: Tensor, value: Tensor, heads: slice) -> Tensor:
            mask = None if window is None else self._window_mask(window, position_ids)
            settings = {"softcap": softcap, "s_aux": None if sinks is None else sinks[heads]}
            result = self.attend(module, query, key, value, mask, scale, position_ids=position_ids, **settings)
            return result[0].transpose(1, 2)

        return attention_of_rows(attend, *inputs, schedule).transpose(1, 2).contiguous()

    def _window_mask(self, size: int, position_ids: Tensor) -> object:
        def sees(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (key <= query) & (key > query - size)  # called for tokens of one document only

        length = position_ids.shape[1]
        device = position_ids.device
        return self.window_of(q_length=length, mask_function=sees, local_size=size, device=device)


def window_for_mask(
    *args: object,
    config: object = None,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    use_vmap: bool = False,
    **_: object,
) -> int | None:
    """A mask function for transformers' registry: it returns the window of a layer, or None.

    There is no mask, since documents follow from position ids.

    Raises:
        ConfigError: when the model asks for a padding mask, or for another mask of its own.
    """
    if attention_mask is not None and not attention_mask.all():
        raise ConfigError("sequence parallelism knows no padding mask: pack documents into rows, with position_ids")
    if use_vmap or local_size not in (None, getattr(config, "sliding_window", None)):
        raise ConfigError(f"the model has a mask of its own, unknown to {SEQUENCE_PARALLELISM}: {OFF}")
    return local_size
