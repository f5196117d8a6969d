"""Weights in safetensors files: tensors that can be read in parts, as stored or as transformers combines them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from sfumato.config.file_checks import read_json_object
from sfumato.errors import ConfigError
from sfumato.parallel.shards import ranges_of

if TYPE_CHECKING:
    from typing import TypeVar

    from transformers import PreTrainedModel

    Value = TypeVar("Value")

FILES = ("model", "diffusion_pytorch_model")
"""Names of weight files of transformers and diffusers, without their endings."""

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

Slices = tuple[slice, ...]
"""One slice, with start and stop, for each dimension."""


class TensorSource(Protocol):
    """A tensor that can be read in parts."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, slices: Slices) -> Tensor:
        """The part of the tensor within these slices."""
        ...


@dataclass
class FileTensor:
    """A tensor in a safetensors file."""

    file: Any
    """The open file, of ``safe_open``, which has no type of its own."""
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def read(self, slices: Slices) -> Tensor:
        # A scalar has no dimension to cut.
        if not slices:
            return self.file.get_tensor(self.name)
        if any(bounds.start == bounds.stop for bounds in slices):
            return torch.empty([bounds.stop - bounds.start for bounds in slices], dtype=self.dtype)
        return self.file.get_slice(self.name)[slices]


class Held:
    """A tensor in memory."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self.shape = tuple(tensor.shape)
        self.dtype = tensor.dtype

    def read(self, slices: Slices) -> Tensor:
        return self.tensor[slices]


class Stacked:
    """Tensors of one shape along a new dimension."""

    def __init__(self, parts: Sequence[TensorSource], dim: int) -> None:
        _require_equal([part.shape for part in parts], "stacked")
        self.parts = parts
        self.dim = dim
        self.dtype = parts[0].dtype
        self.shape = (*parts[0].shape[:dim], len(parts), *parts[0].shape[dim:])

    def read(self, slices: Slices) -> Tensor:
        inner = slices[: self.dim] + slices[self.dim + 1 :]
        parts = [part.read(inner) for part in self.parts[slices[self.dim]]]
        if not parts:
            return torch.empty([bounds.stop - bounds.start for bounds in slices], dtype=self.dtype)
        return torch.stack(parts, self.dim)


class Joined:
    """Tensors one after another along a dimension."""

    def __init__(self, parts: Sequence[TensorSource], dim: int) -> None:
        _require_equal([part.shape[:dim] + part.shape[dim + 1 :] for part in parts], "joined")
        self.parts = parts
        self.dim = dim
        self.dtype = parts[0].dtype
        self.ends = list(accumulate((part.shape[dim] for part in parts), initial=0))
        self.shape = (*parts[0].shape[:dim], self.ends[-1], *parts[0].shape[dim + 1 :])

    def read(self, slices: Slices) -> Tensor:
        bounds = slices[self.dim]
        pieces = []
        for source, (start, stop) in zip(self.parts, pairwise(self.ends), strict=True):
            first, last = max(bounds.start, start), min(bounds.stop, stop)
            if first < last or not pieces:  # an empty range still reads one empty piece, which has shape and dtype
                inside = slice(first - start, last - start) if first < last else slice(0, 0)
                pieces.append(source.read((*slices[: self.dim], inside, *slices[self.dim + 1 :])))
        return torch.cat(pieces, self.dim)


class Narrowed:
    """A range of a tensor along a dimension."""

    def __init__(self, whole: TensorSource, dim: int, start: int, stop: int) -> None:
        self.whole = whole
        self.dim = dim
        self.start = start
        self.dtype = whole.dtype
        self.shape = (*whole.shape[:dim], stop - start, *whole.shape[dim + 1 :])

    def read(self, slices: Slices) -> Tensor:
        moved = slice(slices[self.dim].start + self.start, slices[self.dim].stop + self.start)
        return self.whole.read((*slices[: self.dim], moved, *slices[self.dim + 1 :]))


def equal_parts(whole: TensorSource, dim: int, count: int) -> list[TensorSource]:
    """Parts of equal size of a tensor along a dimension; the last ones may be shorter, or empty."""
    size = whole.shape[dim]
    length = -(-size // count)
    return [
        Narrowed(whole, dim, min(start, size), min(start + length, size)) for start in range(0, length * count, length)
    ]


class Swapped:
    """A tensor with two dimensions exchanged."""

    def __init__(self, whole: TensorSource, first: int, second: int) -> None:
        self.whole = whole
        self.first = first
        self.second = second
        self.dtype = whole.dtype
        self.shape = self._swap(whole.shape)

    def _swap(self, values: Sequence[Value]) -> tuple[Value, ...]:
        swapped = list(values)
        swapped[self.first], swapped[self.second] = swapped[self.second], swapped[self.first]
        return tuple(swapped)

    def read(self, slices: Slices) -> Tensor:
        return self.whole.read(self._swap(slices)).transpose(self.first, self.second)


def _require_equal(shapes: Sequence[tuple[int, ...]], how: str) -> None:
    if len(set(shapes)) > 1:
        raise ConfigError(f"tensors that are {how} have unequal shapes: {sorted(set(shapes))}")


def read_shard(source: TensorSource, like: Tensor) -> Tensor:
    """Reads this rank's shard of a tensor, and no other part of it.

    Args:
        source: the tensor, of the whole shape of ``like``.
        like: a plain tensor or a DTensor with any cut.

    Returns:
        Plain tensor of the shape of ``local(like)`` and the source's dtype.
    """
    return _read_ranges(source, ranges_of(like), ())


def _read_ranges(source: TensorSource, ranges: list[list[tuple[int, int]]], slices: Slices) -> Tensor:
    """Reads the ranges of the dimensions after those that ``slices`` fixes, and joins them."""
    dim = len(slices)
    if dim == len(ranges):
        return source.read(slices)
    parts = [_read_ranges(source, ranges, (*slices, slice(start, stop))) for start, stop in ranges[dim]]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


@contextmanager
def open_weights(files: Path | Sequence[Path]) -> Iterator[dict[str, TensorSource]]:
    """The tensors of a weight folder, by the names in its files. They can be read while the context lasts.

    Args:
        files: a folder that transformers' or diffusers' ``save_pretrained`` wrote (one file, or several and an
            index), a file, or several files.

    Raises:
        ConfigError: when a file is missing, damaged or of an unknown dtype, or two hold the same tensor.
    """
    sources: dict[str, TensorSource] = {}
    with ExitStack() as stack:
        for path in _list_files(files):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (OSError, SafetensorError) as error:
                raise ConfigError(f"{path} cannot be read: {error}; fetch the weights again") from error
            for name in file.keys():  # noqa: SIM118
                if name in sources:
                    raise ConfigError(f"{path}: tensor {name!r} is in another file too: remove one of them")
                view = file.get_slice(name)
                if view.get_dtype() not in DTYPES:
                    raise ConfigError(f"{path}: tensor {name!r} has dtype {view.get_dtype()}, which is not supported")
                sources[name] = FileTensor(file, name, tuple(view.get_shape()), DTYPES[view.get_dtype()])
        yield sources


def _list_files(files: Path | Sequence[Path]) -> list[Path]:
    """Paths of the weight files that ``files`` of ``open_weights`` stands for.

    Raises:
        ConfigError: when a folder has no weights, or its index cannot be read.
    """
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
                names = read_json_object(index)["weight_map"].values()
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ConfigError(f"{index} is not an index of weights: {error!r}; fetch it again") from error
            return [files / name for name in sorted(set(names))]
    expected = " nor ".join(f"{stem}.safetensors[.index.json]" for stem in FILES)
    raise ConfigError(f"{files} has neither {expected}: give a folder that save_pretrained wrote")


def file_of(files: Path | Sequence[Path], name: str) -> Path | str:
    """The file that holds a tensor of that name, for a message; where none has it under that name, all files."""
    try:
        paths = (
            sorted(files.glob("*.safetensors")) if isinstance(files, Path) and files.is_dir() else _list_files(files)
        )
        for path in paths if len(paths) > 1 else ():
            with safe_open(path, framework="pt") as file:
                if name in file.keys():  # noqa: SIM118
                    return path
    except (OSError, SafetensorError, ConfigError):  # reading the weights reports it
        paths = []
    return paths[0] if len(paths) == 1 else files if isinstance(files, Path) else ", ".join(map(str, files))


def convert_names(
    stored: dict[str, TensorSource],
    model: nn.Module,
    shapes: dict[str, tuple[int, ...]],
    skip_others: bool = False,
) -> dict[str, TensorSource]:
    """Renames and combines tensors as transformers' conversion mapping of a model says.

    Args:
        stored: by the names in the files.
        model: a transformers model, whose class may be derived by fsdp2 or tensor parallelism.
        shapes: of the model's tensors.
        skip_others: leave out tensors that cannot be read in parts.

    Returns:
        Tensors by the model's names.

    Raises:
        ConfigError: when a tensor cannot be read in parts and is not left out, or two get the same name.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    with _plain_classes(model):
        mapping = get_model_conversion_mapping(cast("PreTrainedModel", model))
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    converter_of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    sources: dict[str, TensorSource] = {}
    groups: dict[str, dict[str, list[TensorSource]]] = {}
    # In numerical order, so that experts that are stored one by one are stacked in the order of their numbers.
    for name in sorted(
        stored, key=lambda key: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", key)]
    ):
        new, pattern = rename_source_key(name, renamings, converters, cast("str", model.base_model_prefix), shapes)
        if new not in shapes and name in shapes:  # the file has the model's own name already
            new = name
            pattern = None
        if pattern is not None:
            groups.setdefault(new, {}).setdefault(pattern, []).append(stored[name])
        elif new in sources:
            raise ConfigError(f"two tensors of the files are {new!r} in transformers")
        else:
            sources[new] = stored[name]
    for name, stored_parts in groups.items():
        with suppress(ConfigError) if skip_others else nullcontext():
            sources |= _apply_converter(name, stored_parts, converter_of_pattern[next(iter(stored_parts))], shapes)
    return sources


def _apply_converter(
    name: str, parts: dict[str, list[TensorSource]], converter: Any, shapes: dict[str, tuple[int, ...]]
) -> dict[str, TensorSource]:
    """Applies a transformers converter to the tensors that match its patterns, without reading them.

    Args:
        name: the model's name of the first target.
        parts: tensors by the pattern that they match.
        converter: a ``WeightConverter``.
        shapes: of the model's tensors.

    Raises:
        ConfigError: for an operation that cannot be done in parts.
    """
    first = converter.target_patterns[0]
    names = [name.replace(first, pattern) for pattern in converter.target_patterns]
    state = [parts[pattern] for pattern in converter.source_patterns if pattern in parts]
    for op in converter.operations:
        match type(op).__name__:
            case "MergeModulelist":
                state = [[Stacked(sources, op.dim)] for sources in state]
            case "Concatenate":
                state = [[Joined([source for sources in state for source in sources], op.dim)]]
            case "Chunk" if getattr(op, "num_shards_attribute", None) is None:
                state = [[chunk] for chunk in equal_parts(state[0][0], op.dim, len(names))]
            case "Transpose":
                tensor = state[0][0]
                keep = getattr(op, "check_dims", False) and tensor.shape == shapes.get(name)
                state = [[tensor if keep else Swapped(tensor, op.dim0, op.dim1)]]
            case other:
                raise ConfigError(
                    f"{name}: transformers converts it by {other}, which cannot be read in parts: load the model with "
                    "from_pretrained, write it with save_pretrained(folder, save_original_format=False), and take that"
                )
    if len(state) != len(names):
        raise ConfigError(f"{name}: {len(state)} tensors of the files for {len(names)} of the module")
    return {target: sources[0] for target, sources in zip(names, state, strict=True)}


@contextmanager
def _plain_classes(module: nn.Module) -> Iterator[None]:
    """While it lasts, modules have transformers' classes instead of the derived ones of fsdp2 and sfumato.

    transformers looks conversions up by class name.
    """
    plain_classes = {submodule: _plain_class(type(submodule)) for submodule in module.modules()}
    sharded = {submodule: type(submodule) for submodule, cls in plain_classes.items() if cls is not type(submodule)}
    for submodule in sharded:
        submodule.__class__ = plain_classes[submodule]
    try:
        yield
    finally:
        for submodule, cls in sharded.items():
            submodule.__class__ = cls


def _plain_class(cls: type) -> type:
    """The first class in the order of inheritance that neither fsdp2 nor sfumato has made."""
    return next(base for base in cls.__mro__ if not issubclass(base, FSDPModule) and "sfumato." not in base.__module__)
