"""A row a document: how packed rows reach a model that cannot tell documents apart in one row.

State and short convolutions of recurrent models run on from one document into the next, and some attention knows no
documents. With a row for each document, padded at its end, a model computes what it computes for the document alone:
no token of a causal model sees padding that comes after it. Where the length of the row itself counts (a choice of the
best keys, rotary positions that stretch), only documents of one length share a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor, nn

from sfumato.algorithms.device import to_device
from sfumato.data.media.vision import MultimodalInputs, Tensors, join_media
from sfumato.data.text.token_batch import TokenBatch
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.positions import document_bounds, lengths_between

WORTH_PADDING = 0.75
"""A document joins others as padded rows if it is at least so long, as a fraction of the longest of them."""

SHORT = 32
"""Documents of at most so many tokens join each other whatever their lengths."""


@dataclass(frozen=True)
class IdleImage:
    """The small image that a call without images gets, as one more document in no loss."""

    input_ids: Tensor
    """int64 ``[I]``."""
    inputs: MultimodalInputs


def forward_per_document(
    forward: Callable[..., Tensor],
    batch: TokenBatch,
    mesh: Mesh,
    same_length: bool,
    idle: IdleImage | None = None,
    after_call: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """What a model says about the tokens of packed rows, computed for each document in a row of its own.

    Args:
        forward: from int64 ``input_ids`` ``[N, L]``, each row a document, to the model's output ``[N, L, V]``.
        batch: on the device; a document begins where a position is not the one before plus 1.
        mesh: the ranks; those that share weights compute equally many times.
        same_length: only documents of one length share a call: what the model computes depends on the longest row.
        idle: of a model that sees; ``forward`` is then given the ``MultimodalInputs`` of ``[N, L]`` tokens, too.
        after_call: is told after each call of ``forward`` where its ``[N, L]`` tokens stand among the ``B * T``, on the
            CPU, -1 for padding; not of a model that sees.

    Returns:
        ``[B, T, V]``.
    """
    input_ids, device = batch.input_ids.flatten(), batch.input_ids.device
    lengths = document_lengths(batch.position_ids)
    groups = group_documents(lengths, same_length)
    document_at = {start: number for number, start in enumerate(accumulate(lengths, initial=0))}
    calls = round(mesh.max(len(groups), over="world"))  # before any of them, which may be collective operations
    outputs, places = [], []
    for starts, sizes in groups:
        columns = torch.arange(max(sizes))
        counted = columns < torch.tensor(sizes)[:, None]  # [N, L]
        at = torch.where(counted, torch.tensor(starts)[:, None] + columns, 0)
        place, is_token = to_device(at, device), to_device(counted, device)
        ids = input_ids[place].masked_fill(~is_token, 0)
        if idle is None:
            output = forward(ids)
            if after_call is not None:
                after_call(torch.where(counted, at, -1))
        else:
            media = [batch.media[document_at[start]] for start in starts if document_at[start] < len(batch.media)]
            inputs = _gather_inputs(batch, place, is_token, join_media(media))
            output = forward(*_add_idle_image(ids, inputs, idle))[: len(starts), : max(sizes)]
        outputs.append(output.flatten(0, 1)[to_device(counted.flatten().nonzero()[:, 0], device)])
        places.append(at[counted])
    joined = torch.cat(outputs)[to_device(torch.cat(places).argsort(), device)]
    for _ in range(calls - len(groups)):
        nothing = torch.zeros(1, 1, dtype=torch.int64, device=device)
        if idle is None:
            output = forward(nothing)
        else:
            output = forward(*_add_idle_image(nothing, _gather_inputs(batch, nothing, nothing == 0, {}), idle))
        joined = joined + 0.0 * output.sum()  # keeps collective operations in step
    return joined.view(*batch.shape, -1)


def _gather_inputs(batch: TokenBatch, place: Tensor, is_token: Tensor, media: Tensors) -> MultimodalInputs:
    """What stands beside tokens ``[N, L]``, of all documents' tokens those at these places."""
    modality_ids = batch.modality_ids.flatten()[place].masked_fill(~is_token, 0)
    rope_positions = None if batch.rope_positions is None else batch.rope_positions.flatten(0, 1)[place]
    return MultimodalInputs(media, rope_positions, modality_ids)


def _add_idle_image(ids: Tensor, inputs: MultimodalInputs, idle: IdleImage) -> tuple[Tensor, MultimodalInputs]:
    """Tokens ``[N, L]`` and what stands beside them; those without images or videos get a row more with a small one."""
    if inputs.tensors.keys() >= idle.inputs.tensors.keys():
        return ids, inputs
    length = len(idle.input_ids)
    width = max(ids.shape[1], length)

    def add_row(tokens: Tensor, last: Tensor) -> Tensor:
        rows = tokens.new_zeros(len(tokens) + 1, width, *tokens.shape[2:])
        rows[:-1, : tokens.shape[1]] = tokens
        rows[-1, :length] = last.to(tokens.device)
        return rows

    rope_positions = inputs.rope_positions
    if rope_positions is not None:
        rope_positions = add_row(rope_positions, idle.inputs.rope_positions)
    return add_row(ids, idle.input_ids), MultimodalInputs(
        join_media([inputs.tensors, idle.inputs.tensors]),
        rope_positions,
        add_row(inputs.modality_ids, idle.inputs.modality_ids),
    )


def forget_lengths(module: nn.Module) -> None:
    """Makes rotary positions that grow with the longest row so far (rope_type dynamic) depend on the next row alone."""
    for submodule in module.modules():
        for name in vars(submodule):
            if name.endswith("max_seq_len_cached"):
                setattr(submodule, name, 0)


def document_lengths(position_ids: Tensor) -> list[int]:
    """Tokens of each document of rows of position ids ``[B, T]``, padding among them, row after row."""
    return [length for bounds in document_bounds(position_ids) for length in lengths_between(bounds)]


def group_documents(lengths: list[int], same_length: bool) -> list[tuple[list[int], list[int]]]:
    """Documents that share a call: those of about one length, so that little of it is padding.

    Args:
        lengths: of the documents, one after the other.
        same_length: only documents of exactly one length share a call.

    Returns:
        For each call the first token of each document, and its length; the longest come first.
    """
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    by_length = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if same_length:
        groups = [list(same) for _, same in groupby(by_length, key=lambda index: lengths[index])]
    else:
        groups = []
        for index in by_length:
            longest = lengths[groups[-1][0]] if groups else 0
            if groups and (longest <= SHORT or lengths[index] >= WORTH_PADDING * longest):
                groups[-1].append(index)
            else:
                groups.append([index])
    return [([starts[index] for index in group], [lengths[index] for index in group]) for group in groups]
