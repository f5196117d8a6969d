"""Scores of a batch's tokens by a language model: log-probabilities, entropies and predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from sfumato.parallel.loss import (
    IGNORED,
    LEAST,
    Tail,
    linear_cross_entropy,
    token_log_probs,
    token_log_probs_and_entropy,
    vocabulary_group,
)

if TYPE_CHECKING:
    from jaxtyping import Float32, Int64
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class RouterLogits:
    """The routers' logits from the forward pass of a micro-batch."""

    layers: tuple[Tensor, ...]
    """``[N, E]`` of each layer with experts, a row for each token, with graph."""
    places: Tensor | None = None
    """int64 ``[N]`` on the CPU: the index of each token among the ``B * T`` of the micro-batch, -1 for padding. None
    where the N tokens are exactly these, in order."""

    @classmethod
    def join_calls(cls, calls: Sequence[tuple[Tensor, ...]], places: Sequence[Tensor]) -> RouterLogits | None:
        """Joins the logits of all calls of the module for a micro-batch.

        Args:
            calls: of each call the logits of each layer. It is empty in passes without gradients, and for a model that
                is trained without the loss.
            places: of each call int64 ``[N, L]``, the indices of its tokens (``after_call`` of
                ``forward_per_document``). Calls beyond these have no tokens of the micro-batch. It is empty where a
                single call computes the whole micro-batch.
        """
        if not calls:
            return None
        if not places:
            return cls(calls[0])
        layers = tuple(torch.cat(layer) for layer in zip(*calls[: len(places)], strict=True))
        return cls(layers, torch.cat([place.flatten() for place in places]))


class TokenScores:
    """The model's output for a batch of ``[B, T]`` tokens, for all of them or for those that ``columns`` names.

    It holds logits, or the last hidden states from which logits are computed for some tokens at a time.
    """

    def __init__(
        self,
        output: Tensor,
        shape: tuple[int, int],
        columns: Tensor | None = None,
        head: nn.Linear | None = None,
        tail: Tail | None = None,
        router_logits: RouterLogits | None = None,
    ) -> None:
        """Made by ``LanguageModel``.

        Args:
            output: logits ``[1 or B, K, V]``, or with a head hidden states ``[1 or B, K, H]``.
            shape: B and T.
            columns: int64 ``[K]``, the columns of a single row that the output is for; None for all.
            head: the output layer, which makes logits from hidden states.
            tail: what the model does to the logits of that layer, such as a cap; None where it does nothing.
            router_logits: the routers' logits, of a model that is trained with their auxiliary loss.
        """
        self.router_logits = router_logits
        self._output = output
        self._shape = shape
        self._columns = columns
        self._head = head
        self._tail = tail

    def log_probs(
        self, labels: Int64[Tensor, "batch length"], temperature: float = 1.0
    ) -> Float32[Tensor, "batch length"]:
        """``log p(label)`` of each token in nats.

        Args:
            labels: int64 ``[B, T]``, already shifted; -100 gives 0.
            temperature: divides the logits.

        Returns:
            float32 ``[B, T]``.
        """
        picked = self._pick(labels)
        if self._head is not None:
            weight, bias = self._head.weight, self._head.bias
            settings = {"group": vocabulary_group(weight), "tail": self._tail}
            log_probs = token_log_probs(self._output, weight, picked, temperature, bias, **settings)
        else:
            logits = self._output.flatten(0, 1).float()
            logits = logits if temperature == 1.0 else logits / temperature
            log_probs = -functional.cross_entropy(logits, picked.flatten(), ignore_index=IGNORED, reduction="none")
        return self._fill_columns(log_probs.view(picked.shape))

    def cross_entropy(
        self, labels: Int64[Tensor, "batch length"]
    ) -> tuple[Float32[Tensor, ""], Float32[Tensor, "batch length"]]:
        """The sum of ``-log p(label)`` over tokens, with gradients, and ``-log p(label)`` of each token without.

        Where logits are made for some tokens at a time, this makes them once, since the gradients of the sum are
        computed in the forward pass; ``log_probs`` makes them in the forward pass and again in the backward pass.

        Args:
            labels: int64 ``[B, T]``, already shifted; -100 gives 0.

        Returns:
            float32 scalar, and float32 ``[B, T]``.
        """
        if self._head is None:
            losses = -self.log_probs(labels)
            return losses.sum(), losses.detach()
        weight = self._head.weight
        picked = self._pick(labels)
        settings = {"group": vocabulary_group(weight), "tail": self._tail}
        total, losses = linear_cross_entropy(self._output, weight, picked, self._head.bias, **settings)
        return total, self._fill_columns(losses)

    def log_probs_and_entropy(
        self, labels: Int64[Tensor, "batch length"], temperature: float = 1.0
    ) -> tuple[Float32[Tensor, "batch length"], Float32[Tensor, "batch length"]]:
        """``log_probs``, and the entropy in nats of each token's distribution; 0 where the label is -100."""
        picked = self._pick(labels)
        if self._head is not None:
            weight, bias = self._head.weight, self._head.bias
            settings = {"group": vocabulary_group(weight), "tail": self._tail}
            log_probs, entropy = token_log_probs_and_entropy(
                self._output, weight, picked, temperature, bias, **settings
            )
        else:
            logits = self._output.float() / temperature
            with torch.no_grad():  # logits so small have no gradient, and autograd would keep a copy
                logits.clamp_(min=LEAST)
            log_p = logits.log_softmax(-1)
            has_label = picked != IGNORED
            log_probs = log_p.gather(-1, picked.masked_fill(~has_label, 0)[..., None])[..., 0] * has_label
            log_probs = log_probs.masked_fill(log_probs <= LEAST / 2, -torch.inf)  # of a label that is ruled out
            entropy = -(log_p.exp() * log_p).sum(-1) * has_label
        return self._fill_columns(log_probs), self._fill_columns(entropy)

    @torch.no_grad()
    def predictions(self) -> Int64[Tensor, "batch length"]:
        """The likeliest next token after each token, int64 ``[B, T]``; -100 where there is no output."""
        logits = self._output
        if self._head is None:
            return self._fill_columns(logits.argmax(-1), IGNORED)
        weight = self._head.weight
        # under fsdp2 or tensor parallelism a rank has a shard of the weight
        weight = cast("DTensor", weight).full_tensor() if hasattr(weight, "full_tensor") else weight
        parts = self._output.flatten(0, 1).split(1024)  # so that few logits are in memory at a time
        best = [functional.linear(hidden, weight.to(hidden.dtype), self._head.bias).argmax(-1) for hidden in parts]
        return self._fill_columns(torch.cat(best).view(self._output.shape[:2]), IGNORED)

    def logits(self, wanted: Tensor) -> Tensor:
        """Logits of the N tokens that ``wanted``, bool ``[B, T]``, selects, row by row: float32 ``[N, V]``.

        Where logits are made for some tokens at a time, call it inside ``LanguageModel.whole_output``.
        """
        assert self._head is None, "use whole_output"
        return self._output[self._pick(wanted)].float()

    def hidden(self, wanted: Tensor) -> Tensor:
        """Last hidden states of the N tokens that ``wanted``, bool ``[B, T]``, selects, row by row: ``[N, H]``.

        Only of a model with ``chunked_loss``, whose output they are.
        """
        assert self._head is not None, "build the model with chunked_loss"
        return self._output[self._pick(wanted)]

    def _pick(self, labels: Tensor) -> Tensor:
        """Of ``[B, T]`` the columns that there is an output for."""
        return labels if self._columns is None else labels[:, self._columns]

    def _fill_columns(self, values: Tensor, fill: int = 0) -> Tensor:
        """``[B, T]`` with values in the columns that there is an output for, and ``fill`` in the others."""
        if self._columns is None:
            return values
        return values.new_full(self._shape, fill).index_copy(1, self._columns, values)
