"""Random weights of models that no machine holds whole: each rank draws the numbers of its own shards.

A model's own initialisation runs on weights without memory, and the operations on each weight are recorded. Where one
draws random numbers, element i of a weight gets a hash of (seed, name of the weight, operation, i). So the weights do
not depend on the ranks, and nobody draws, holds or sends others than its own.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sfumato.config.open_mappings import Keywords
from sfumato.parallel.shards import Chunk
from sfumato.parallel.splitmix import GAMMA, key_of, mix

if TYPE_CHECKING:
    from torch._ops import OpOverload

SMALL = 2**16
"""A weight of fewer elements is not drawn in parts: every rank initialises it, as the plain module does."""

LARGEST_VALUE = 2**24
"""Most elements of a table that the model computes and copies into a weight, such as one of positions."""

PIECE = 2**20
"""Elements that are drawn at a time, which bounds the memory beside the weights (about 110 bytes each)."""

OVERWRITES = ("normal_", "uniform_", "zero_", "fill_", "copy_")
"""Operations after which a tensor holds nothing of what it held before."""

ELEMENTWISE = ("erfinv_", "mul_", "add_", "sub_", "div_", "clamp_", "exp_", "log_", "neg_", "abs_", "sqrt_", "pow_")
"""Operations that change each element of a tensor by itself, given numbers alone."""


@dataclass(frozen=True)
class Operation:
    """What an initialisation did to a weight, or to a range of its elements."""

    name: str
    """torch's name of it."""
    run: Callable[..., Tensor]
    arguments: tuple[Any, ...] = ()
    """Those after the tensor."""
    options: Keywords = field(default_factory=dict)
    start: int = 0
    """First element that was changed, in the flattened weight."""
    stop: int = 0
    is_contiguous: bool = True
    """Whether the elements from ``start`` to ``stop`` were changed, and all of them."""

    def is_supported(self) -> bool:
        """Whether it can be repeated on a part of the weight."""
        tensors = [value for value in (*self.arguments, *self.options.values()) if isinstance(value, Tensor)]
        if self.name == "copy_":
            return self.is_contiguous and not tensors[0].is_meta
        return self.is_contiguous and not tensors and self.name in (*OVERWRITES, *ELEMENTWISE)


class Initialisation(TorchDispatchMode):
    """While it is active, records what happens to tensors on meta, by the storage that these share with weights."""

    def __init__(self) -> None:
        super().__init__()
        self._operations: dict[int, list[Operation]] = {}
        self._alive: list[Tensor] = []  # a storage that was freed could lend its address to another weight

    def __torch_dispatch__(
        self, func: OpOverload, types: object, args: tuple[object, ...] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        options = dict(kwargs or {})
        result = func(*args, **options)
        name = func._schema.name.removeprefix("aten::")
        by_name = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | options
        for argument in func._schema.arguments:
            changed = by_name.get(argument.name)
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(changed, Tensor) and changed.is_meta:
                is_method = bool(args) and changed is args[0] and name.endswith("_")
                operation = Operation(name, func, args[1:], options) if is_method else Operation(name, func)
                self.record(changed, operation)
        return result

    def record(self, tensor: Tensor, operation: Operation) -> None:
        """Notes an operation that has changed a tensor on meta."""
        start = cast("int", tensor.storage_offset())
        if operation.name == "copy_":
            values = operation.arguments[0].detach()
            values = values.clone() if not values.is_meta and values.numel() <= LARGEST_VALUE else values.to("meta")
            operation = replace(operation, arguments=(values.expand(tensor.shape),), options={})
        self._alive.append(tensor)
        place = {"start": start, "stop": start + tensor.numel(), "is_contiguous": tensor.is_contiguous()}
        self._operations.setdefault(tensor.untyped_storage()._cdata, []).append(replace(operation, **place))

    def operations_for(self, weight: Tensor) -> list[Operation]:
        """The operations that gave a weight on meta its values, from the last one that wrote all of it on."""
        operations = self._operations.get(weight.untyped_storage()._cdata, [])
        writes_all = [
            index
            for index, operation in enumerate(operations)
            if operation.name in OVERWRITES and (operation.start, operation.stop) == (0, weight.numel())
        ]
        return operations[writes_all[-1] :] if writes_all else []


@dataclass
class WeightRecipe:
    """How a weight gets its values."""

    name: str
    """The first of its names in the plain module."""
    shape: torch.Size
    operations: list[Operation] = field(default_factory=list)

    @property
    def problem(self) -> str | None:
        """Why the weight cannot be drawn in parts; None where it can."""
        wrong = [operation.name for operation in self.operations if not operation.is_supported()]
        if wrong:
            return f"{self.name} is initialised by {wrong[0]}"
        return None if self.operations else f"{self.name} is not initialised by numbers of its own"


def record_initialisation(build: Callable[[], nn.Module], seed: int) -> tuple[nn.Module, dict[str, WeightRecipe]]:
    """Builds a module on meta and records how each of its weights is initialised.

    Args:
        build: builds the module with weights of at least ``SMALL`` elements on meta.
        seed: torch's seed while it is built.

    Returns:
        The module, and the recipe of each parameter under each of its names.
    """
    initialisation = Initialisation()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        with initialisation, _watch_init_functions(initialisation):
            module = build()
    recipes: dict[int, WeightRecipe] = {}
    by_name: dict[str, WeightRecipe] = {}
    for name, weight in module.named_parameters(remove_duplicate=False):
        if id(weight) not in recipes:
            values = Operation("copy_", torch.Tensor.copy_, (weight.detach(),), {}, 0, weight.numel())
            operations = initialisation.operations_for(weight) if weight.is_meta else [values]
            recipes[id(weight)] = WeightRecipe(name, weight.shape, operations)
        by_name[name] = recipes[id(weight)]
    return module, by_name


NOT_ON_META = ("dirac_", "orthogonal_", "sparse_")
"""Functions of ``torch.nn.init`` that leave a tensor on meta as it is, and would go unnoticed."""


@contextmanager
def _watch_init_functions(initialisation: Initialisation) -> Iterator[None]:
    """Inside, functions of ``torch.nn.init`` do not pass over tensors on meta: truncated normal distributions are drawn
    element by element, where torch's own way rejects and repeats, and those of ``NOT_ON_META`` are recorded."""

    def draw(
        tensor: Tensor, mean: float, std: float, a: float, b: float, generator: torch.Generator | None = None
    ) -> Tensor:
        low, high = (math.erf((bound - mean) / (std * math.sqrt(2))) for bound in (a, b))
        with torch.no_grad():  # the inverse of the distribution function
            drawn = tensor.uniform_(low, high, generator=generator).erfinv_()
            return drawn.mul_(std * math.sqrt(2)).add_(mean).clamp_(a, b)

    def noticing(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
            if tensor.is_meta:
                initialisation.record(tensor, Operation(function.__name__, function))
            return function(tensor, *args, **kwargs)

        return call

    noticed = {name: noticing(getattr(nn.init, name)) for name in NOT_ON_META}
    replacements: list[tuple[Keywords, Keywords]] = [(nn.init.__dict__, {**noticed, "_no_grad_trunc_normal_": draw})]
    if (initialisations := sys.modules.get("transformers.initialization")) is not None:
        # it holds torch's functions in a table of its own
        replacements.append((initialisations.TORCH_INIT_FUNCTIONS, noticed))
    originals = [{name: names[name] for name in functions} for names, functions in replacements]
    try:
        for names, functions in replacements:
            names.update(functions)
        yield
    finally:
        for (names, _), functions in zip(replacements, originals, strict=True):
            names.update(functions)


def share_values(recipes: Mapping[str, WeightRecipe], share: Callable[[list[Tensor]], list[Tensor]]) -> None:
    """Gives all ranks the first one's values of the weights that the model computes itself.

    Args:
        recipes: of all weights, in an order that is the same on every rank.
        share: returns the first rank's argument on every rank.
    """
    copies = [
        (operations, index)
        for operations in {id(recipe): recipe.operations for recipe in recipes.values()}.values()
        for index, operation in enumerate(operations)
        if operation.name == "copy_"
    ]
    values = share([operations[index].arguments[0].contiguous() for operations, index in copies])
    for (operations, index), value in zip(copies, values, strict=True):
        operations[index] = replace(operations[index], arguments=(value,))


@torch.no_grad()
def draw_chunk(place: Tensor, chunk: Chunk, recipe: WeightRecipe, seed: int) -> None:
    """Draws a chunk of a weight.

    Args:
        place: where to, of the chunk's sizes.
        chunk: where it lies in the whole weight.
        recipe: of the weight.
        seed: of the run.
    """
    strides = [math.prod(recipe.shape[dim + 1 :]) for dim in range(len(recipe.shape))]
    for offsets, piece in _cut_into_pieces(place, chunk.offsets):
        index = torch.zeros((), dtype=torch.int64, device=place.device)
        for dim, (offset, size, stride) in enumerate(zip(offsets, piece.shape, strides, strict=True)):
            along = torch.arange(offset, offset + size, device=place.device) * stride
            index = index + along.reshape([-1 if other == dim else 1 for other in range(piece.ndim)])
        for number, operation in enumerate(recipe.operations):
            key = key_of(f"{int(seed)}/weight/{recipe.name}/{number}")
            _repeat(operation, piece, index, key, recipe.shape.numel())


def _cut_into_pieces(place: Tensor, offsets: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Tensor]]:
    """Cuts a chunk into views of at most ``PIECE`` elements, with the offsets of each in the whole."""
    if place.numel() <= PIECE:
        yield offsets, place
        return
    dim = next(dim for dim, size in enumerate(place.shape) if size > 1)
    middle = place.shape[dim] // 2
    for start, stop in pairwise((0, middle, place.shape[dim])):
        moved = (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :])
        yield from _cut_into_pieces(place.narrow(dim, start, stop - start), moved)


def _repeat(operation: Operation, piece: Tensor, index: Tensor, key: int, numel: int) -> None:
    """Repeats an operation on a part of a weight, ``index`` being its elements' places in the flattened weight."""
    if (operation.start, operation.stop) != (0, numel):  # a row of an embedding, such as that of padding
        whole = replace(operation, start=0, stop=numel)
        changed = piece.clone()
        _repeat(whole, changed, index - operation.start, key, numel)
        piece.copy_(torch.where((index >= operation.start) & (index < operation.stop), changed, piece))
    elif operation.name == "normal_":
        mean, std = _two_numbers(operation, "mean", "std", (0.0, 1.0))
        piece.copy_(mean + std * keyed_normals(index, key))
    elif operation.name == "uniform_":
        low, high = _two_numbers(operation, "from", "to", (0.0, 1.0))
        piece.copy_(low + (high - low) * _bits_to_uniforms(mix(key + (2 * index + 1) * GAMMA)))
    elif operation.name == "copy_":
        values = cast("Tensor", operation.arguments[0]).reshape(-1).to(piece.device)
        piece.copy_(values[index.clamp(0, values.numel() - 1)])
    else:
        operation.run(piece, *operation.arguments, **operation.options)


def _two_numbers(operation: Operation, first: str, second: str, defaults: tuple[float, float]) -> tuple[float, float]:
    """The two numbers that a distribution is given, by place or by name."""
    values = {**dict(zip((first, second), operation.arguments, strict=False)), **operation.options}
    return float(values.get(first, defaults[0])), float(values.get(second, defaults[1]))


def keyed_normals(index: Tensor, key: int) -> Tensor:
    """Standard normal numbers, float64 of the shape of ``index``, by the transform of Box and Muller (1958)."""
    radius, angle = (_bits_to_uniforms(mix(key + (2 * index + number) * GAMMA)) for number in (1, 2))
    # 1 - u lies above 0, where the logarithm is finite
    return (-2 * torch.log1p(-radius)).sqrt() * (2 * math.pi * angle).cos()


def _bits_to_uniforms(bits: Tensor) -> Tensor:
    """Numbers in [0, 1) of 53 bits, float64, of random bits in int64."""
    # The shift of an int64 copies its sign, which the mask removes.
    return ((bits >> 11) & (2**53 - 1)).double() * 2.0**-53


def problems_of(recipes: Mapping[str, WeightRecipe]) -> list[str]:
    """Why weights cannot be drawn in parts, one text for each such weight."""
    problems = [recipe.problem for recipe in {id(recipe): recipe for recipe in recipes.values()}.values()]
    return [problem for problem in problems if problem is not None]


def describe_problems(problems: list[str], limit: int) -> str:
    """The message where weights cannot be drawn in parts."""
    more = f" (and {len(problems) - 1} more weights)" if len(problems) > 1 else ""
    return (
        f"{problems[0]}{more}, which cannot be drawn in parts, as those of models of more than {limit:,} numbers are: "
        "start from a folder with weights (model.model_path)"
    )
