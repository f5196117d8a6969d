"""Runs only some of a model's equal blocks: what the others do is known from these.

For passes in which nothing is computed, such as those that count bytes on tensors without memory. A model of 61 layers
has two or three kinds of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

NUMBERS = ("layer_idx", "layer_index", "layer_id", "layer_number", "block_idx")
"""Names of attributes that tell one layer from another without changing what it does."""

RUNS = 2
"""Of a kind that run: the first also makes what the others share, the second is as all that follow."""


class _Kind:
    """Blocks that are equal, with inputs of the same kind."""

    def __init__(self) -> None:
        self.runs, self.left = 0, None
        """How many have run, and what the last one left."""
        self.outputs: list[Any] = []
        self.nested, self.can_repeat = None, False

    def remember(self, inputs: list[Any], output: Any) -> list[torch.Tensor]:
        """Keeps what a block that ran has returned; gives its tensors."""
        self.runs += 1
        leaves, self.nested = tree_flatten(output)
        places = {id(each): place for place, each in enumerate(inputs) if isinstance(each, torch.Tensor)}
        self.outputs = [places.get(id(each), each) for each in leaves]
        given = {_storage(each) for each in inputs if isinstance(each, torch.Tensor)}
        made = [each for each in self.outputs if isinstance(each, torch.Tensor)]
        self.can_repeat = not any(_storage(each) in given for each in made)  # a view of an input
        return made

    def again(self, inputs: list[Any]) -> tuple[Any, list[torch.Tensor]]:
        """The same for a block that does not run: what it returns, and the tensors of it that are new."""
        leaves: list[Any] = []
        made: list[torch.Tensor] = []
        for each in self.outputs:
            if isinstance(each, torch.Tensor):
                new = torch.empty_like(each).requires_grad_(each.requires_grad)
                made.append(
                    new.clone() if each.requires_grad else new
                )  # with a gradient function, as what it stands for
                leaves.append(made[-1])
            else:
                leaves.append(inputs[each] if isinstance(each, int) and not isinstance(each, bool) else each)
        return tree_unflatten(leaves, self.nested), made


@contextmanager
def run_some(
    blocks: Mapping[str, nn.Module],
    ran: Callable[[int, list[torch.Tensor]], Any],
    repeated: Callable[[int, list[torch.Tensor], Any], None],
) -> Iterator[None]:
    """Inside, a block is not run when ``RUNS`` blocks equal to it have, with inputs of the same kind.

    Its results are then new tensors of the same shapes. Blocks are equal when their classes, weights and settings are.

    Args:
        blocks: by name, in the order in which they run.
        ran: called after a block has run, with its number and the tensors that it made; returns what is to be known of
            it.
        repeated: called instead for a block that does not run, with its number, the tensors in the place of those that
            it would have made, and what ``ran`` returned for the last one equal to it.
    """
    kinds: dict[Any, _Kind] = {}

    def watched(index: int, settings: Any, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            inputs, nested = tree_flatten((args, kwargs))
            kind = kinds.setdefault((settings, str(nested), tuple(map(_look, inputs))), _Kind())
            if kind.can_repeat and kind.runs >= RUNS:
                output, made = kind.again(inputs)
                repeated(index, made, kind.left)
                return output
            output = forward(*args, **kwargs)
            kind.left = ran(index, kind.remember(inputs, output))
            return output

        return run

    own = {block: vars(block)["forward"] for block in blocks.values() if "forward" in vars(block)}
    for index, block in enumerate(blocks.values()):
        block.forward = watched(index, _settings(block), block.forward)
    try:
        yield
    finally:
        for block in blocks.values():
            del block.forward
            if block in own:
                block.forward = own[block]


def _settings(block: nn.Module) -> tuple[Any, ...]:
    """What makes two blocks equal: classes, plain attributes, shapes of weights and buffers."""
    found: list[Any] = []
    for name, each in block.named_modules():
        plain = {
            key: value
            for key, value in vars(each).items()
            if key not in NUMBERS and isinstance(value, (bool, int, float, str, tuple, type(None)))
        }
        found.append((name, type(each), repr(sorted(plain.items()))))
    tensors = [*block.named_parameters(), *block.named_buffers()]
    return (*found, *((name, _look(each)) for name, each in tensors))


def _look(value: Any) -> Any:
    """What matters of an input: of a tensor all but its numbers."""
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype, value.device, value.requires_grad
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else id(value)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
