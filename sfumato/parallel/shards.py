"""Weights that lie in pieces, on many ranks or in many files: this rank's piece, and the whole."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from sfumato.errors import ConfigError

WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")
"""What wrappers put into parameter names."""

FILES = ("model", "diffusion_pytorch_model")
"""What transformers and diffusers call a weight file, without its ending."""

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def trainable_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that require gradients, by the names of the plain module."""
    return {name: parameter for name, parameter in all_parameters(module).items() if parameter.requires_grad}


def all_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by the names of the plain module, as they are between two steps.

    Weights that fsdp2 has gathered are put away first: while they are out, the module has other parameters.
    """
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()
    return {plain_name(name): parameter for name, parameter in module.named_parameters()}


def plain_name(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece; it shares memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole tensor, gathered from all ranks that hold a piece: every one of them must call this."""
    if not isinstance(tensor, DTensor):
        return tensor
    if not any(_cut_twice_in_blocks(tensor, dim) for dim in range(tensor.ndim)):
        return tensor.full_tensor()
    piece = local(tensor.detach())
    found = piece.new_zeros(tensor.shape)
    positions = [torch.cat([torch.arange(*each) for each in ranges]) for ranges in ranges_of(tensor)]
    found[torch.meshgrid(*(each.to(piece.device) for each in positions), indexing="ij")] = piece
    for axis, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            dist.all_reduce(found, group=tensor.device_mesh.get_group(axis))
    return found


def shard_of(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a whole tensor: what ``local(like)`` has when ``whole(like)`` is that tensor.

    Args:
        whole: plain tensor of the shape of ``like``, on any device.
        like: a DTensor, cut evenly or not; of a plain tensor the piece is the whole.

    Returns:
        Plain tensor; it may share memory with ``whole``.
    """
    for dim, ranges in enumerate(ranges_of(like)):
        parts = [whole.narrow(dim, start, stop - start) for start, stop in ranges]
        whole = parts[0] if len(parts) == 1 else torch.cat(parts, dim)
    return whole


def ranges_of(tensor: torch.Tensor) -> list[list[tuple[int, int]]]:
    """Where this rank's piece lies in the whole tensor.

    Returns:
        For each dimension one or more ranges ``(start, stop)``; joined in this order they make up the piece.
    """
    if not isinstance(tensor, DTensor):
        return [[(0, size)] for size in tensor.shape]
    found = []
    for dim, size in enumerate(tensor.shape):
        cuts = _cuts(tensor, dim)
        if _cut_twice_in_blocks(tensor, dim):
            (_, count, rank), *others = cuts
            cuts = [*others, (1, count, rank)]
        positions = torch.arange(size)
        for blocks, count, rank in cuts:
            positions = torch.cat([_chunk(each, count)[rank] for each in _chunk(positions, blocks)])
        found.append(_ranges(positions))
    return found


def _cuts(tensor: DTensor, dim: int) -> list[tuple[int, int, int]]:
    """How a dimension is cut, in the order of the mesh: blocks cut alike, pieces of each, and which is this rank's."""
    axes = zip(tensor.placements, tensor.device_mesh.shape, tensor.device_mesh.get_coordinate(), strict=True)
    return [
        (getattr(placement, "split_factor", 1), count, rank)
        for placement, count, rank in axes
        if not placement.is_replicate() and placement.dim == dim
    ]


def _cut_twice_in_blocks(tensor: DTensor, dim: int) -> bool:
    """Whether fsdp2 has cut what tensor parallelism had cut in blocks (a fused matrix) along the same dimension.

    DTensor has no placements for that; those that fsdp2 notes are of another order, and full_tensor mixes up rows.
    """
    return sum(blocks > 1 for blocks, _, _ in _cuts(tensor, dim)) > 1


def _chunk(positions: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Like torch.chunk, with empty pieces at the end where it gives fewer."""
    pieces = list(positions.chunk(count))
    return pieces + [positions[:0]] * (count - len(pieces))


def _ranges(positions: torch.Tensor) -> list[tuple[int, int]]:
    """Increasing positions as ranges; one empty range for none."""
    if not len(positions):
        return [(0, 0)]
    last = (positions.diff() != 1).nonzero().flatten()
    starts = positions[torch.cat([torch.zeros(1, dtype=torch.long), last + 1])].tolist()
    stops = positions[torch.cat([last, torch.tensor([len(positions) - 1])])].tolist()
    return [(start, stop + 1) for start, stop in zip(starts, stops, strict=True)]


Box = tuple[slice, ...]


class Source(Protocol):
    """A tensor of which a part can be had without the rest."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, box: Box) -> torch.Tensor:
        """The part within one slice (with start and stop) for each dimension."""


@dataclass
class Stored:
    """A tensor in a safetensors file."""

    file: Any
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, box: Box) -> torch.Tensor:
        if not box:
            return self.file.get_tensor(self.name)
        if any(each.start == each.stop for each in box):
            return torch.empty([each.stop - each.start for each in box], dtype=self.dtype)
        return self.file.get_slice(self.name)[box]


@dataclass
class Held:
    """A tensor in memory."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self, box: Box) -> torch.Tensor:
        return self.tensor[box]


class Stacked:
    """Tensors of one shape along a new dimension."""

    def __init__(self, parts: Sequence[Source], dim: int) -> None:
        _require_equal([each.shape for each in parts], "stacked")
        self.parts, self.dim, self.dtype = parts, dim, parts[0].dtype
        self.shape = (*parts[0].shape[:dim], len(parts), *parts[0].shape[dim:])

    def read(self, box: Box) -> torch.Tensor:
        inner = box[: self.dim] + box[self.dim + 1 :]
        parts = [each.read(inner) for each in self.parts[box[self.dim]]]
        if not parts:
            return torch.empty([each.stop - each.start for each in box], dtype=self.dtype)
        return torch.stack(parts, self.dim)


class Joined:
    """Tensors one after another along a dimension."""

    def __init__(self, parts: Sequence[Source], dim: int) -> None:
        _require_equal([each.shape[:dim] + each.shape[dim + 1 :] for each in parts], "joined")
        self.parts, self.dim, self.dtype = parts, dim, parts[0].dtype
        self.ends = list(accumulate((each.shape[dim] for each in parts), initial=0))
        self.shape = (*parts[0].shape[:dim], self.ends[-1], *parts[0].shape[dim + 1 :])

    def read(self, box: Box) -> torch.Tensor:
        wanted, found = box[self.dim], []
        for part, (start, stop) in zip(self.parts, pairwise(self.ends), strict=True):
            first, last = max(wanted.start, start), min(wanted.stop, stop)
            if first < last or not found:
                inside = slice(first - start, last - start) if first < last else slice(0, 0)
                found.append(part.read((*box[: self.dim], inside, *box[self.dim + 1 :])))
        return torch.cat(found, self.dim)


class Narrowed:
    """A range of a tensor along a dimension."""

    def __init__(self, whole: Source, dim: int, start: int, stop: int) -> None:
        self.whole, self.dim, self.start, self.dtype = whole, dim, start, whole.dtype
        self.shape = (*whole.shape[:dim], stop - start, *whole.shape[dim + 1 :])

    def read(self, box: Box) -> torch.Tensor:
        moved = slice(box[self.dim].start + self.start, box[self.dim].stop + self.start)
        return self.whole.read((*box[: self.dim], moved, *box[self.dim + 1 :]))


def cut(whole: Source, dim: int, count: int) -> list[Source]:
    """A tensor's equal parts along a dimension; the last may be shorter."""
    size = whole.shape[dim]
    length = -(-size // count)
    return [
        Narrowed(whole, dim, min(start, size), min(start + length, size)) for start in range(0, length * count, length)
    ]


class Swapped:
    """A tensor with two dimensions exchanged."""

    def __init__(self, whole: Source, first: int, second: int) -> None:
        self.whole, self.first, self.second, self.dtype = whole, first, second, whole.dtype
        self.shape = self._swap(whole.shape)

    def _swap(self, values: Sequence[Any]) -> tuple[Any, ...]:
        swapped = list(values)
        swapped[self.first], swapped[self.second] = swapped[self.second], swapped[self.first]
        return tuple(swapped)

    def read(self, box: Box) -> torch.Tensor:
        return self.whole.read(self._swap(box)).transpose(self.first, self.second)


def _require_equal(shapes: Sequence[tuple[int, ...]], how: str) -> None:
    if len(set(shapes)) > 1:
        raise ConfigError(f"tensors that are {how} have unequal shapes: {sorted(set(shapes))}")


def read_piece(source: Source, like: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor, reading nothing else.

    Args:
        source: the tensor, of the whole shape of ``like``.
        like: a plain tensor or a DTensor with any cut.

    Returns:
        Plain tensor of the shape of ``local(like)`` and the source's dtype.
    """
    return _read_ranges(source, ranges_of(like), ())


def _read_ranges(source: Source, ranges: list[list[tuple[int, int]]], box: Box) -> torch.Tensor:
    dim = len(box)
    if dim == len(ranges):
        return source.read(box)
    parts = [_read_ranges(source, ranges, (*box, slice(start, stop))) for start, stop in ranges[dim]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@contextmanager
def open_weights(files: Path | Sequence[Path]) -> Iterator[dict[str, Source]]:
    """The tensors of a weight folder, by the names in its files; they can be read inside the block.

    Args:
        files: a folder that transformers' or diffusers' ``save_pretrained`` wrote (one file, or several and an
            index), a file, or several files.

    Raises:
        ConfigError: when a file is missing, damaged or of an unknown dtype, or two hold the same tensor.
    """
    found: dict[str, Source] = {}
    with ExitStack() as stack:
        for path in _weight_files(files):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path} cannot be read: {error}; fetch the weights again") from error
            for name in file.keys():  # noqa: SIM118
                if name in found:
                    raise ConfigError(f"{path}: tensor {name!r} is in another file too: remove one of them")
                view = file.get_slice(name)
                if view.get_dtype() not in DTYPES:
                    raise ConfigError(f"{path}: tensor {name!r} has dtype {view.get_dtype()}, which is not supported")
                found[name] = Stored(file, name, tuple(view.get_shape()), DTYPES[view.get_dtype()])
        yield found


def _weight_files(files: Path | Sequence[Path]) -> list[Path]:
    if not isinstance(files, str | Path):
        return list(files)
    files = Path(files)
    if files.is_file():
        return [files]
    for stem in FILES:
        single, index = files / f"{stem}.safetensors", files / f"{stem}.safetensors.index.json"
        if single.is_file():
            return [single]
        if index.is_file():
            try:
                names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"{index} is not an index of weights: {error!r}; fetch it again") from error
            return [files / each for each in sorted(set(names))]
    wanted = " nor ".join(f"{stem}.safetensors[.index.json]" for stem in FILES)
    raise ConfigError(f"{files} has neither {wanted}: give a folder that save_pretrained wrote")
