"""A row a document: how packed rows reach a model that cannot tell documents apart in one row.

State and short convolutions of recurrent models run on from one document into the next, and some attention knows no
documents. With a row for each document, padded at its end, a model computes what it computes for the document alone:
no token of a causal model sees padding that comes after it. Where the length of the row itself counts (a choice of the
best keys, rotary positions that stretch), only documents of one length share a call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch
from torch import Tensor, nn

from sfumato.algorithms.device import to_device
from sfumato.data.vision import Beside, Tensors, join_media
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.positions import document_bounds, lengths_between

WORTH_PADDING = 0.75
"""A document joins others as padded rows if it is at least so long, as a fraction of the longest of them."""

SHORT = 32
"""Documents of at most so many tokens join each other whatever their lengths."""


@dataclass(frozen=True)
class Sight:
    """The images of packed rows."""

    media: Sequence[Tensors]
    """What ``forward`` takes for the images of each document."""
    idle_ids: Tensor
    """int64 ``[I]``: tokens of the small image that a call without images gets, as a document more."""
    idle: Beside
    """What stands beside these."""


def apart(
    forward: Callable[..., Tensor],
    row: dict[str, Tensor],
    mesh: Mesh,
    same_length: bool,
    sight: Sight | None = None,
    after_call: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """What a model says about the tokens of packed rows, computed for each document in a row of its own.

    Args:
        forward: from int64 ``input_ids`` ``[N, L]``, each row a document, to the model's output ``[N, L, V]``.
        row: ``input_ids`` and ``position_ids`` ``[B, T]``; a document begins where a position is not the one before
            plus 1.
        mesh: the ranks; those that share weights compute equally many times.
        same_length: only documents of one length share a call: what the model computes depends on the longest row.
        sight: of a model that sees; ``forward`` is then given a ``Beside`` of ``[N, L]`` tokens, too.
        after_call: is told after each call of ``forward`` where its ``[N, L]`` tokens stand among the ``B * T``, on the
            CPU, -1 for padding; not of a model that sees.

    Returns:
        ``[B, T, V]``.
    """
    input_ids, device = row["input_ids"].flatten(), row["input_ids"].device
    lengths = document_lengths(row["position_ids"])
    groups = group_documents(lengths, same_length)
    number_of = {start: number for number, start in enumerate(accumulate(lengths, initial=0))}
    calls = round(mesh.max(len(groups), over="world"))  # before any of them, which may be collective operations
    outputs, places = [], []
    for starts, sizes in groups:
        columns = torch.arange(max(sizes))
        counted = columns < torch.tensor(sizes)[:, None]  # [N, L]
        at = torch.where(counted, torch.tensor(starts)[:, None] + columns, 0)
        place, is_token = to_device(at, device), to_device(counted, device)
        ids = input_ids[place].masked_fill(~is_token, 0)
        if sight is None:
            output = forward(ids)
            if after_call is not None:
                after_call(torch.where(counted, at, -1))
        else:
            media = [sight.media[number_of[start]] for start in starts if number_of[start] < len(sight.media)]
            beside = _gather(row, place, is_token, join_media(media))
            output = forward(*_with_idle(ids, beside, sight))[: len(starts), : max(sizes)]
        outputs.append(output.flatten(0, 1)[to_device(counted.flatten().nonzero()[:, 0], device)])
        places.append(at[counted])
    joined = torch.cat(outputs)[to_device(torch.cat(places).argsort(), device)]
    for _ in range(calls - len(groups)):
        nothing = torch.zeros(1, 1, dtype=torch.int64, device=device)
        given = (nothing,) if sight is None else _with_idle(nothing, _gather(row, nothing, nothing == 0, {}), sight)
        joined = joined + 0.0 * forward(*given).sum()  # keeps collective operations in step
    return joined.view(*row["input_ids"].shape, -1)


def _gather(row: dict[str, Tensor], place: Tensor, is_token: Tensor, media: Tensors) -> Beside:
    """What stands beside tokens ``[N, L]``, of all documents' tokens those at these places."""
    kinds = row["kinds"].flatten()[place].masked_fill(~is_token, 0)
    positions = row["positions"].flatten(0, 1)[place] if "positions" in row else None
    return Beside(media, positions, kinds)


def _with_idle(ids: Tensor, beside: Beside, sight: Sight) -> tuple[Tensor, Beside]:
    """Tokens ``[N, L]`` and what stands beside them; those without images or videos get a row more with a small one."""
    if beside.tensors.keys() >= sight.idle.tensors.keys():
        return ids, beside
    width, own = max(ids.shape[1], len(sight.idle_ids)), len(sight.idle_ids)

    def with_row(tokens: Tensor, last: Tensor) -> Tensor:
        found = tokens.new_zeros(len(tokens) + 1, width, *tokens.shape[2:])
        found[:-1, : tokens.shape[1]], found[-1, :own] = tokens, last.to(tokens.device)
        return found

    idle = sight.idle
    positions = None if beside.positions is None else with_row(beside.positions, idle.positions)
    return with_row(ids, sight.idle_ids), Beside(
        join_media([beside.tensors, idle.tensors]), positions, with_row(beside.kinds, idle.kinds)
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
