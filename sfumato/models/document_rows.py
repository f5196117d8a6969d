"""A row a document: how packed rows reach a model that cannot tell documents apart in one row.

State and short convolutions of recurrent models run on from one document into the next, and some attention knows no
documents. With a row for each document, padded at its end, a model computes what it computes for the document alone:
no token of a causal model sees padding that comes after it. Where the length of the row itself counts (a choice of the
best keys, rotary positions that stretch), only documents of one length share a call.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby, pairwise

import torch
from torch import Tensor, nn

from sfumato.parallel.mesh import Mesh

WORTH_PADDING = 0.75
"""A document joins others as padded rows if it is at least so long, as a fraction of the longest of them."""

SHORT = 32
"""Documents of at most so many tokens join each other whatever their lengths."""


def apart(forward: Callable[[Tensor], Tensor], row: dict[str, Tensor], mesh: Mesh, same_length: bool) -> Tensor:
    """What a model says about the tokens of packed rows, computed for each document in a row of its own.

    Args:
        forward: from int64 ``input_ids`` ``[N, L]``, each row a document, to the model's output ``[N, L, V]``.
        row: ``input_ids`` and ``position_ids`` ``[B, T]``; a document begins where a position is not the one before
            plus 1.
        mesh: the ranks; those that share weights compute equally many times.
        same_length: only documents of one length share a call: what the model computes depends on the longest row.

    Returns:
        ``[B, T, V]``.
    """
    input_ids, device = row["input_ids"].flatten(), row["input_ids"].device
    groups = group_documents(document_lengths(row["position_ids"]), same_length)
    calls = round(mesh.max(len(groups), over="world"))  # before any of them, which may be collective operations
    outputs, places = [], []
    for starts, lengths in groups:
        columns = torch.arange(max(lengths))
        is_token = columns < torch.tensor(lengths)[:, None]  # [N, L]
        place = torch.where(is_token, torch.tensor(starts)[:, None] + columns, 0).to(device)
        output = forward(input_ids[place].masked_fill(~is_token.to(device), 0))
        outputs.append(output[is_token.to(device)])
        places.append(place[is_token.to(device)])
    joined = torch.cat(outputs)[torch.cat(places).argsort()]
    for _ in range(calls - len(groups)):
        nothing = torch.zeros(1, 1, dtype=torch.int64, device=device)
        joined = joined + 0.0 * forward(nothing).sum()  # keeps collective operations in step
    return joined.view(*row["input_ids"].shape, -1)


def forget_lengths(module: nn.Module) -> None:
    """Makes rotary positions that grow with the longest row so far (rope_type dynamic) depend on the next row alone."""
    for submodule in module.modules():
        for name in vars(submodule):
            if name.endswith("max_seq_len_cached"):
                setattr(submodule, name, 0)


def document_lengths(position_ids: Tensor) -> list[int]:
    """Tokens of each document of rows of position ids ``[B, T]``, padding among them, row after row."""
    starts = position_ids.diff(dim=1, prepend=position_ids[:, :1]) != 1
    starts[:, 0] = True
    bounds = [*starts.flatten().nonzero().flatten().tolist(), position_ids.numel()]
    return [stop - start for start, stop in pairwise(bounds)]


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
