"""Sequence parallelism of tensor-parallel ranks (arXiv 2205.05198): between groups of cut layers tokens are cut."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from sfumato.config.open_mappings import Keywords
from sfumato.parallel import tensor_styles as styles
from sfumato.parallel.tensor_styles import TensorRanks

LayerOutput = Tensor | tuple[Tensor, *tuple[object, ...]]
"""The hidden states ``[B, S, C]``, alone or as the first of several outputs."""


class SharedSequence:
    """The length of the sequence in the current pass, and the hooks that cut and join it around the blocks."""

    def __init__(self, ranks: TensorRanks) -> None:
        self.ranks = ranks
        self.length = 0
        """Tokens of all ranks together."""

    def enter(
        self, block: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> tuple[tuple[object, ...], dict[str, object]]:
        """Hook before the first block: keeps this rank's part of the hidden states ``[B, S, H]``."""
        hidden, args, kwargs = _take_input(args, kwargs)
        self.length = hidden.shape[1]
        return (styles.cut_shard(hidden, 1, self.ranks), *args), kwargs

    def leave(self, block: nn.Module, args: object, output: LayerOutput) -> LayerOutput:
        """Hook after the last block: joins the parts of all ranks."""
        return _on_output(lambda hidden: styles.gather_shards(hidden, 1, self.length, self.ranks), output)


class SequenceGroup(nn.Module):
    """A role for a group of layers: it runs on the whole sequence, and takes and returns this rank's part."""

    tp_sequence: SharedSequence
    tp_sums: bool
    """Whether the group is partial: sums over ranks are done at its ends."""

    def forward(self, *args: object, **kwargs: Any) -> LayerOutput:
        sequence = self.tp_sequence
        ranks = self.tp_sequence.ranks
        # Read in each block: when it is recomputed, other sequences may have passed since.
        if kwargs.get("position_ids") is not None:
            sequence.length = kwargs["position_ids"].shape[-1]
        elif kwargs.get("position_embeddings") is not None:
            sequence.length = kwargs["position_embeddings"][0].shape[-2]
        hidden, args, kwargs = _take_input(args, kwargs)
        output = super().forward(styles.gather_shards(hidden, 1, sequence.length, ranks, self.tp_sums), *args, **kwargs)
        keep = styles.scatter if self.tp_sums else styles.cut_shard
        shape = (len(hidden), sequence.length, -1)  # some mixtures of experts flatten rows and tokens in their output
        return _on_output(lambda states: keep(states.reshape(shape), 1, ranks), output)


def _take_input(args: tuple[Any, ...], kwargs: Keywords) -> tuple[Tensor, tuple[Any, ...], Keywords]:
    """The hidden states, a layer's first input, and the other inputs."""
    if args:
        return args[0], args[1:], kwargs
    return kwargs["hidden_states"], args, {name: value for name, value in kwargs.items() if name != "hidden_states"}


def _on_output(change: Callable[[Tensor], Tensor], output: LayerOutput) -> LayerOutput:
    """Changes the hidden states in a layer's output, which is a tensor or a tuple that begins with one."""
    return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)


def share_sequence(
    module: nn.Module,
    blocks: Mapping[str, nn.Module],
    groups: dict[str, bool],
    handled: set[nn.Module],
    ranks: TensorRanks,
) -> None:
    """Cuts the sequence where the first block begins and joins it after the last, and around each group of layers."""
    sequence = SharedSequence(ranks)
    for name, block in blocks.items():
        for child, submodule in block.named_children():
            is_partial = groups.get(f"{name}.{child}")  # None outside of groups
            # There, and in partial groups, each rank sees some tokens only: gradients of whole weights must be summed.
            if is_partial is not False:
                for owner in submodule.modules():
                    if owner._parameters and owner not in handled:
                        styles.change_class(owner, styles.Summed, tp_ranks=ranks)
            if is_partial is not None:
                styles.change_class(submodule, SequenceGroup, tp_sequence=sequence, tp_sums=is_partial)
    ordered = list(blocks.values())
    ordered[0].register_forward_pre_hook(sequence.enter, with_kwargs=True)
    ordered[-1].register_forward_hook(sequence.leave)
