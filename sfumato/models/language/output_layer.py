"""The output layer of a causal model, taken out of its forward pass so that logits can be made in chunks of tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from sfumato.errors import ConfigError
from sfumato.parallel.loss import Tail

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class OutputLayer:
    """Makes a model's ``forward`` return its last hidden states instead of logits, and finds how it changes logits.

    Some models scale logits, or cap them, behind their output layer (Granite, Cohere, Gemma 2). What a model does there
    (its tail) is found by a forward pass in which the decoder is skipped and the output layer returns given logits.
    """

    def __init__(self, module: PreTrainedModel) -> None:
        """``module`` is transformers' causal model, before ``parallelize``."""
        self._module = module
        self._tail: Tail | None = None
        self._has_probed_tail = False
        self._hidden: Tensor | None = None

    def detach(self) -> tuple[nn.Linear, Tail | None]:
        """Takes the output layer out of ``forward``.

        Returns:
            The layer, from which the caller makes logits, and the model's tail, or None where it leaves logits alone.

        Raises:
            ConfigError: when the tail cannot be found.
        """
        head = cast("nn.Linear", self._module.get_output_embeddings())
        head.forward = self._pass_through  # pyright: ignore[reportAttributeAccessIssue]
        if not self._has_probed_tail:
            # a wide range of logits: scaling shows in any of them, a cap in those far from 0
            logits = torch.linspace(-100.0, 100.0, head.out_features, device=head.weight.device)[None]
            self._tail = None if torch.equal(self._apply_tail(logits), logits) else self._apply_tail
            self._has_probed_tail = True
        return head, self._tail

    def hidden(self, output: Tensor) -> Tensor:
        """The last hidden states ``[B, T, H]`` of the forward pass that has just returned ``output`` as its logits."""
        hidden, self._hidden = self._hidden, None
        if self._tail is None:  # then ``forward`` has returned the hidden states themselves
            return output
        assert hidden is not None
        # fsdp waits for the gradient of what a module returns
        return hidden + 0.0 * output

    def put_back(self) -> None:
        """Makes ``forward`` return logits again."""
        vars(self._module.get_output_embeddings()).pop("forward", None)

    def _pass_through(self, hidden: Tensor) -> Tensor:
        """Stands in for the output layer's ``forward`` and keeps its input."""
        self._hidden = hidden
        return hidden

    def _apply_tail(self, logits: Tensor) -> Tensor:
        """What ``forward`` does to logits ``[..., V]`` after the output layer.

        Raises:
            ConfigError: when the model's ``forward`` fails without its decoder.
        """
        module = self._module
        head = cast("nn.Linear", module.get_output_embeddings())
        embeddings = module.get_input_embeddings()
        decoder = next(child for child in module.children() if embeddings in child.modules())
        flat = logits.view(1, -1, logits.shape[-1])
        decoder_output = _Output(flat.new_zeros(1, flat.shape[1], head.in_features))
        tokens = torch.zeros(flat.shape[:2], dtype=torch.int64, device=flat.device)
        with (
            _replace_forward(decoder, lambda *args, **kwargs: decoder_output),
            _replace_forward(head, lambda hidden: flat),
        ):
            try:
                return module.forward(input_ids=tokens, use_cache=False).logits.view_as(logits)
            except Exception as error:  # such as a layer between decoder and output layer with another width
                raise ConfigError(
                    f"train.chunked_loss: what {type(module).__name__} makes of its logits cannot be found apart from "
                    f"the rest of it ({type(error).__name__}): set it to false"
                ) from error


class _Output(tuple):
    """Stands in for the output of a decoder: hidden states ``[B, T, H]`` by name or index; other names give None."""

    last_hidden_state: Tensor

    def __new__(cls, hidden: Tensor) -> _Output:
        output = super().__new__(cls, (hidden,))
        output.last_hidden_state = hidden
        return output

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _replace_forward(module: nn.Module, forward: Callable[..., object]) -> Iterator[None]:
    """Inside, a module's ``forward`` is another function."""
    # the instance's own, such as ``_pass_through``; the class's needs no putting back
    instance_forward = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if instance_forward is None:
            del module.forward
        else:
            module.forward = instance_forward
