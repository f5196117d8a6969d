"""Packed rows of a micro-batch: padded to one shape, and cut into the parts of the ranks that share a sequence."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from sfumato.errors import ConfigError
from sfumato.parallel.mesh import Mesh, range_of_rank

if TYPE_CHECKING:
    from sfumato.config.sections import TrainConfig

Batch = Mapping[str, Tensor]

PADDING = {"labels": -100, "decision_index": -1, "targets": math.nan}
"""Values of padding by field; 0 in the others. Positions of padding start at 0: it is a document of its own."""

COMPILED_MULTIPLE = 256
"""Row lengths are multiples of this where blocks are compiled."""

SIZES = "train.context_parallel_size and train.ulysses_parallel_size"


def row_multiple(config: TrainConfig, mesh: Mesh) -> int:
    """The number of which row lengths are multiples; 1 under sequence and pipeline parallelism, whose parts are not
    padded."""
    if mesh.layout.cp > 1 or mesh.layout.pp > 1:
        return 1
    return getattr(config, "pad_to_multiple_of", None) or (
        COMPILED_MULTIPLE if config.compiles(mesh.device.type) else 1
    )


def pad_together(micro_batches: Sequence[Batch], multiple: int) -> list[dict[str, Tensor]]:
    """Pads micro-batches to one shape: the largest number of rows, and the longest length rounded up to a multiple.

    Args:
        micro_batches: fields of shape (rows, length, ...) are padded, as ``train_step`` says; others stay.
        multiple: the length becomes a multiple of it.

    Raises:
        ConfigError: for a field that stages would not see.
    """
    shapes = [batch["input_ids"].shape for batch in micro_batches]
    rows, longest = max(shape[0] for shape in shapes), max(shape[1] for shape in shapes)
    length = -(-longest // multiple) * multiple
    padded = []
    for batch, shape in zip(micro_batches, shapes, strict=True):
        if "attention_mask" in batch:
            raise ConfigError(
                "a pipeline's stages get no attention_mask: leave it out; position_ids separate packed documents, and "
                "padding on the right needs labels -100 only"
            )
        fields = {}
        for name, tensor in batch.items():
            if tensor.shape[:2] != shape:
                fields[name] = tensor
                continue
            if name == "position_ids":
                places = (torch.arange(length, device=tensor.device) - shape[1]) % length  # 0 after the row's end
                fields[name] = places.to(tensor.dtype).repeat(rows, 1)
                fields[name][shape[0] :] = torch.arange(length, device=tensor.device)
            else:
                fields[name] = tensor.new_full((rows, length, *tensor.shape[2:]), PADDING.get(name, 0))
            fields[name][: shape[0], : shape[1]] = tensor
        padded.append(fields)
    return padded


def head_tail_chunks(total: int, size: int) -> list[range]:
    """Twice as many chunks of a sequence as ranks; rank i holds chunks i and 2 size - 1 - i, so causal work is even.

    The parts of ranks differ by one token at most.
    """
    return [range_of_rank(total, index, 2 * size) for index in range(2 * size)]


def shard_sequence(batch: Mapping[str, Tensor], mesh: Mesh) -> dict[str, Tensor]:
    """This rank's part of packed rows: a chunk near the head and its mirror image near the tail.

    Args:
        batch: ``input_ids`` (or ``inputs_embeds``) [B, S, ...] and others; every tensor with S tokens in dimension 1
            is cut. Labels must be shifted already. Without ``position_ids`` each row is one document.
        mesh: the ranks.

    Returns:
        The batch with ``position_ids``. Parts differ by one token at most.

    Raises:
        ConfigError: when there are fewer tokens than ranks.
    """
    tokens = batch["input_ids"] if "input_ids" in batch else batch["inputs_embeds"]
    total = tokens.shape[1]
    size = mesh.layout.cp
    rank = mesh.rank_in("cp")
    positions = torch.arange(total, device=tokens.device)[None]
    batch = {"position_ids": positions} | dict(batch)
    if size == 1:
        return batch
    if total < size:
        raise ConfigError(f"{total} tokens cannot be shared by the {size} ranks of {SIZES}: pack longer rows")
    chunks = head_tail_chunks(total, size)
    rank_chunks = [chunks[rank], chunks[-1 - rank]]
    return {
        name: torch.cat([tensor[:, chunk.start : chunk.stop] for chunk in rank_chunks], dim=1)
        if tensor.ndim > 1 and tensor.shape[1] == total
        else tensor
        for name, tensor in batch.items()
    }
