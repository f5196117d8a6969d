"""Random weights of a model, equal on any mesh: drawn in torch's order, or, of a large model, keyed by their places."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from sfumato.errors import ConfigError
from sfumato.parallel.finite import list_first
from sfumato.parallel.keyed_weights import (
    SMALL,
    WeightRecipe,
    describe_problems,
    draw_chunk,
    problems_of,
    record_initialisation,
    share_values,
)
from sfumato.parallel.mesh import Mesh
from sfumato.parallel.shards import (
    Shards,
    all_parameters,
    chunks_of,
    copy_into,
    local_shard,
    num_weights,
    persistent_buffers,
    whole_chunk,
    whole_shapes,
)
from sfumato.parallel.weights import NAMED, build_on_meta, load_whole, make_real, raise_everywhere, refuse_fsdp1

LARGEST_IN_SEQUENCE = 2**34
"""Most numbers of a model whose random weights torch's generator draws in sequence: 64 GiB in float32 on the host of
rank 0, and about two minutes. Larger models are drawn in parts, which gives other values at the same seed."""


def initialise_on_meta(
    module: nn.Module, build: Callable[[], nn.Module], mesh: Mesh, seed: int, device: torch.device | None = None
) -> None:
    """Gives a module on meta the random weights that one plain process would have, bit for bit, on any mesh.

    Up to ``LARGEST_IN_SEQUENCE`` numbers torch's generator draws them in the order of the plain module: rank 0 builds
    that in its CPU memory and sends one weight at a time. Weights of larger models are keyed (``keyed_weights``), and
    each rank draws its own shards. Every rank must call it.

    Args:
        module: the result of ``parallelize`` on ``build_on_meta(build)``.
        build: builds the plain module.
        mesh: the ranks.
        seed: torch's seed while it is built.
        device: see ``load_weights``.

    Raises:
        ConfigError: when the two modules' weights differ in names or shapes, the module is wrapped by fsdp1, or weights
            of a large model are initialised in a way that cannot be repeated on parts of them.
    """
    refuse_fsdp1(module)
    shapes = mesh.merge(dict(whole_shapes(module)), over="pp")
    # a weight that two stages hold counts twice here, and once where it matters
    if sum(shape.numel() for shape in shapes.values()) > LARGEST_IN_SEQUENCE:
        plain, recipes = record_initialisation(partial(build_on_meta, build, SMALL), seed)
        if num_weights(plain) > LARGEST_IN_SEQUENCE:
            _draw_shards(module, plain, recipes, mesh, seed, device or mesh.device)
            return
    names = mesh.merge(dict.fromkeys(all_parameters(module) | persistent_buffers(module)), over="pp")
    tensors: dict[str, Tensor] = {}
    problems = []
    if mesh.is_first:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            plain = build()
        tensors = dict(plain.named_parameters(remove_duplicate=False)) | persistent_buffers(plain)
        problems = _describe_missing(names, tensors)
    raise_everywhere(problems, mesh)
    make_real(module, device or mesh.device)
    load_whole(module, {name: tensors[name].detach() for name in names if name in tensors}, mesh, from_rank0=True)


def _draw_shards(
    module: nn.Module,
    plain: nn.Module,
    recipes: Mapping[str, WeightRecipe],
    mesh: Mesh,
    seed: int,
    device: torch.device,
) -> None:
    """Draws this rank's shards of a module's weights; ``plain`` is on meta, and its buffers have their values."""
    parameters = all_parameters(module)
    buffers = persistent_buffers(module)
    plain_buffers = persistent_buffers(plain)
    problems = _describe_missing([*parameters, *buffers], recipes.keys() | plain_buffers.keys())
    if reasons := problems_of(recipes):
        problems.append(describe_problems(reasons, LARGEST_IN_SEQUENCE))
    raise_everywhere(problems, mesh)
    # values that the model computes when it is built may come from memory that it never wrote
    share_values(recipes, partial(_from_first_rank, mesh=mesh))
    make_real(module, device)
    parameters = all_parameters(module)
    buffers = persistent_buffers(module)
    shards = Shards(module, mesh, parameters)
    for name, parameter in parameters.items():
        for chunk in chunks_of(shards, name):
            draw_chunk(local_shard(parameter.detach())[chunk.place], chunk, recipes[name], seed)
    for name, buffer in buffers.items():
        copy_into(buffer, plain_buffers[name])


def _from_first_rank(values: list[Tensor], mesh: Mesh) -> list[Tensor]:
    """Rank 0's tensors, on every rank, which has as many of the same shapes and dtypes on the CPU."""
    if mesh.size == 1 or not values:
        return values
    # One broadcast for all, as bytes, since dtypes differ.
    joined = torch.cat([value.contiguous().reshape(-1).view(torch.uint8) for value in values])
    dist.broadcast(joined, src=0)
    parts = joined.split([value.nbytes for value in values])
    return [part.clone().view(value.dtype).view(value.shape) for part, value in zip(parts, values, strict=True)]


def build_with_random_weights(build: Callable[[], nn.Module], seed: int) -> nn.Module:
    """A plain module in CPU memory with the random weights that ``initialise_on_meta`` gives it on any mesh."""
    on_meta = build_on_meta(build)
    if num_weights(on_meta) <= LARGEST_IN_SEQUENCE:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return build()
    module, recipes = record_initialisation(partial(build_on_meta, build, SMALL), seed)
    if reasons := problems_of(recipes):
        raise ConfigError(f"weights: {describe_problems(reasons, LARGEST_IN_SEQUENCE)}")
    make_real(module, torch.device("cpu"))
    for name, parameter in module.named_parameters():
        draw_chunk(parameter.detach(), whole_chunk(parameter.shape), recipes[name], seed)
    return module


def _describe_missing(names: Iterable[str], of_plain: Container[str]) -> list[str]:
    missing = [name for name in names if name not in of_plain]
    return [f"the module that was built has no {list_first(missing, NAMED)}"] if missing else []
