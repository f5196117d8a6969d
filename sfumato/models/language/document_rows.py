"""One row for each document: how packed rows reach a model that cannot separate documents within one row.

State and short convolutions of recurrent models run on from one document into the next, and some attention has no
notion of documents. With a row for each document, padded at its end, a model computes what it computes for the document
alone: no token of a causal model sees padding that comes after it. Where the length of the row itself changes the
result (a choice of the best keys, rotary positions that stretch), only documents of equal length share a call.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor, nn

from sfumato.algorithms.device import to_device
from sfumato.data.media.document_media import MultimodalInputs, Tensors, join_media
from sfumato.data.text.token_batch import TokenBatch
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.positions import document_bounds, lengths_between

WORTH_PADDING = 0.75
"""A document shares a call with longer ones if its length is at least this fraction of the longest of them."""

SHORT = 32
"""Documents of at most this many tokens share a call whatever their lengths."""


@dataclass(frozen=True)
class IdleImage:
    """A small image that a call without images gets as one more document, which is in no loss.

    All ranks then compute the image encoder, whose forward and backward passes are collective operations.
    """

    input_ids: Tensor
    """int64 ``[I]``."""
    inputs: MultimodalInputs


def forward_per_document(
    forward: Callable[..., Tensor],
    batch: TokenBatch,
    mesh: Mesh,
    same_length: bool,
    idle: IdleImage | None = None,
    before_call: Callable[[Tensor], None] | None = None,
    after_call: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """The model's output for the tokens of packed rows, computed with a row for each document.

    Args:
        forward: takes int64 ``input_ids`` ``[N, L]``, each row a document, and returns the output ``[N, L, V]``.
        batch: on the device; a document begins where a position is not its predecessor plus 1.
        mesh: the ranks; all of them call ``forward`` the same number of times.
        same_length: only documents of equal length share a call, for models whose output depends on the longest row.
        idle: for a model that sees; ``forward`` then also takes the ``MultimodalInputs`` of the ``[N, L]`` tokens.
        before_call: called before each ``forward`` with what is a token in its ``[N, L]``, bool on the device; never
            called for a model that sees.
        after_call: called after each ``forward`` with the indices of its ``[N, L]`` tokens among the ``B * T`` tokens
            of the batch, int64 on the CPU, -1 for padding; never called for a model that sees.

    Returns:
        ``[B, T, V]``.
    """
    input_ids = batch.input_ids.flatten()
    device = batch.input_ids.device
    lengths = document_lengths(batch.position_ids)
    groups = group_documents(lengths, same_length)
    document_at = {start: number for number, start in enumerate(accumulate(lengths, initial=0))}
    # agreed on before the first forward pass, which may itself be a collective operation that ranks must enter together
    num_calls = round(mesh.max(len(groups), over="world"))
    outputs: list[Tensor] = []
    token_indices: list[Tensor] = []
    for starts, sizes in groups:
        columns = torch.arange(max(sizes))
        is_token_cpu = columns < torch.tensor(sizes)[:, None]  # [N, L]
        indices_cpu = torch.where(is_token_cpu, torch.tensor(starts)[:, None] + columns, 0)
        indices = to_device(indices_cpu, device)
        is_token = to_device(is_token_cpu, device)
        ids = input_ids[indices].masked_fill(~is_token, 0)
        if idle is None:
            if before_call is not None:
                # padding of the packed row is a document like others here
                before_call(is_token if batch.is_token is None else is_token & batch.is_token.flatten()[indices])
            output = forward(ids)
            if after_call is not None:
                after_call(torch.where(is_token_cpu, indices_cpu, -1))
        else:
            # padding at the end of the rows makes documents without media: there are more documents than entries
            media = [batch.media[document_at[start]] for start in starts if document_at[start] < len(batch.media)]
            inputs = _gather_inputs(batch, indices, is_token, join_media(media))
            output = forward(*_add_idle_image(ids, inputs, idle))[: len(starts), : max(sizes)]
        # an index, not a mask: a boolean mask would let the host wait for its number of tokens
        outputs.append(output.flatten(0, 1)[to_device(is_token_cpu.flatten().nonzero()[:, 0], device)])
        token_indices.append(indices_cpu[is_token_cpu])
    # documents were sorted by length; here their tokens return to the order of the packed rows
    joined = torch.cat(outputs)[to_device(torch.cat(token_indices).argsort(), device)]
    for _ in range(num_calls - len(groups)):
        single_token = torch.zeros(1, 1, dtype=torch.int64, device=device)
        if idle is None:
            if before_call is not None:
                before_call(single_token != 0)  # it is no token of the batch
            output = forward(single_token)
        else:
            inputs = _gather_inputs(batch, single_token, single_token == 0, {})
            output = forward(*_add_idle_image(single_token, inputs, idle))
        joined = joined + 0.0 * output.sum()  # the backward pass, too, has the collective operations of other ranks
    return joined.view(*batch.shape, -1)


def _gather_inputs(batch: TokenBatch, indices: Tensor, is_token: Tensor, media: Tensors) -> MultimodalInputs:
    """The multimodal inputs of tokens ``[N, L]``, whose ``indices`` count the ``B * T`` tokens of the batch."""
    assert batch.modality_ids is not None
    modality_ids = batch.modality_ids.flatten()[indices].masked_fill(~is_token, 0)
    rope_positions = None if batch.rope_positions is None else batch.rope_positions.flatten(0, 1)[indices]
    return MultimodalInputs(media, rope_positions, modality_ids)


def _add_idle_image(ids: Tensor, inputs: MultimodalInputs, idle: IdleImage) -> tuple[Tensor, MultimodalInputs]:
    """Tokens ``[N, L]`` with their inputs. Where a kind of media is missing, one more row brings the small image."""
    if inputs.tensors.keys() >= idle.inputs.tensors.keys():
        return ids, inputs
    length = len(idle.input_ids)
    width = max(ids.shape[1], length)

    def add_row(tokens: Tensor, last: Tensor) -> Tensor:
        """``[N, L, ...]`` with one more row, padded to the longer of the two lengths with zeros."""
        rows = tokens.new_zeros(len(tokens) + 1, width, *tokens.shape[2:])
        rows[:-1, : tokens.shape[1]] = tokens
        rows[-1, :length] = last.to(tokens.device)
        return rows

    rope_positions = inputs.rope_positions
    if rope_positions is not None:
        assert idle.inputs.rope_positions is not None
        rope_positions = add_row(rope_positions, idle.inputs.rope_positions)
    assert inputs.modality_ids is not None and idle.inputs.modality_ids is not None
    return add_row(ids, idle.input_ids), MultimodalInputs(
        join_media([inputs.tensors, idle.inputs.tensors]),
        rope_positions,
        add_row(inputs.modality_ids, idle.inputs.modality_ids),
    )


def forget_lengths(module: nn.Module) -> None:
    """Makes rotary frequencies that grow with the longest row so far (rope_type dynamic) depend on the next row only.

    transformers keeps that length in attributes such as ``max_seq_len_cached`` of its rotary embeddings.
    """
    for submodule in module.modules():
        for name in vars(submodule):
            if name.endswith("max_seq_len_cached"):
                setattr(submodule, name, 0)


def document_lengths(position_ids: Tensor) -> list[int]:
    """Lengths of the documents in rows of position ids ``[B, T]``, row after row; padding counts as documents."""
    return [length for bounds in document_bounds(position_ids) for length in lengths_between(bounds)]


def group_documents(lengths: list[int], same_length: bool) -> list[tuple[list[int], list[int]]]:
    """Groups documents of similar length, which share a call, so that little of it is padding.

    Args:
        lengths: of the documents, in the order of the packed rows.
        same_length: only documents of exactly equal length share a call.

    Returns:
        For each call the index of the first token of each document, and the length of each; the longest come first.
    """
    starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
    # ties by index: all ranks and runs group documents in the same way
    by_length = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    if same_length:
        groups = [list(group) for _, group in groupby(by_length, key=lambda index: lengths[index])]
    else:
        groups = []
        for index in by_length:
            longest = lengths[groups[-1][0]] if groups else 0
            # short documents cost more by another call than by padding
            if groups and (longest <= SHORT or lengths[index] >= WORTH_PADDING * longest):
                groups[-1].append(index)
            else:
                groups.append([index])
    return [([starts[index] for index in group], [lengths[index] for index in group]) for group in groups]
