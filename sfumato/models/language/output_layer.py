"""The output layer of a causal model, taken out of its forward pass: logits are computed for some tokens at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sfumato.errors import ConfigError
from sfumato.parallel.loss import Tail


class OutputLayer:
    """Has a model's ``forward`` give its last hidden states instead of logits, and knows what it makes of logits.

    Some models scale logits, or cap them (Granite, Cohere, Gemma 2): that is found by giving ``forward`` a result of
    the output layer while the rest of the model stands still.
    """

    def __init__(self, module: nn.Module) -> None:
        """``module`` is transformers' causal model, before ``parallelize``."""
        self._module = module
        self._tail: Tail | None = None
        self._is_known = False
        self._hidden: Tensor | None = None

    def detach(self) -> tuple[nn.Linear, Tail | None]:
        """Takes the layer out. Returns it, for others to do its work, and what ``forward`` makes of its result."""
        head = self._module.get_output_embeddings()
        head.forward = self._hand_through
        if not self._is_known:
            logits = torch.linspace(-100.0, 100.0, head.out_features, device=head.weight.device)[None]
            self._tail = None if torch.equal(self._after(logits), logits) else self._after
            self._is_known = True
        return head, self._tail

    def hidden(self, output: Tensor) -> Tensor:
        """The last hidden states ``[B, T, H]``, of what ``forward`` has just returned."""
        hidden, self._hidden = self._hidden, None
        # fsdp waits for the gradient of what a module returns
        return output if self._tail is None else hidden + 0.0 * output

    def put_back(self) -> None:
        """Makes ``forward`` give logits again."""
        vars(self._module.get_output_embeddings()).pop("forward", None)

    def _hand_through(self, hidden: Tensor) -> Tensor:
        self._hidden = hidden
        return hidden

    def _after(self, logits: Tensor) -> Tensor:
        """What ``forward`` makes of the result of the output layer ``[..., V]``."""
        module, head = self._module, self._module.get_output_embeddings()
        embeddings = module.get_input_embeddings()
        base = next(child for child in module.children() if embeddings in child.modules())
        flat = logits.view(1, -1, logits.shape[-1])
        nothing = _Output(flat.new_zeros(1, flat.shape[1], head.in_features))
        tokens = torch.zeros(flat.shape[:2], dtype=torch.int64, device=flat.device)
        with _replaced(base, lambda *args, **kwargs: nothing), _replaced(head, lambda hidden: flat):
            try:
                return module.forward(input_ids=tokens, use_cache=False).logits.view_as(logits)
            except Exception as error:  # a layer between the two that knows another width, or the like
                raise ConfigError(
                    f"train.chunked_loss: what {type(module).__name__} makes of its logits cannot be found apart from "
                    f"the rest of it ({type(error).__name__}): set it to false"
                ) from error


class _Output(tuple):
    """What a model without its output layer returns: hidden states ``[B, T, H]``, and nothing else."""

    def __new__(cls, hidden: Tensor) -> _Output:
        found = super().__new__(cls, (hidden,))
        found.last_hidden_state = hidden
        return found

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


@contextmanager
def _replaced(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, a module computes something else."""
    own = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
