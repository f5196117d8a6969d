"""Layers under tensor parallelism: the shard of its weights that each rank keeps, and the exchange between ranks.

Weights are DTensors on the mesh axis ``tp``, so that sharding and checkpoints know where they lie. The layers compute
with this rank's plain shard: between them there are plain tensors only, of any length, and compiled code.

Inside a layer group that starts with cut outputs and ends with cut inputs (Megatron-LM, arXiv 1909.08053) there are
two conventions. Usually the group's input is whole on every rank, and its gradient is summed over ranks where it
enters. In a *partial* group (sequence parallelism, arXiv 2205.05198) the gather before it and the reduce-scatter after
it do all the sums: gradients inside, those of weights that are not cut included, are parts whose sum over ranks is the
gradient.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from sfumato.errors import ConfigError
from sfumato.parallel.shards import local_shard


@dataclass(frozen=True)
class TensorRanks:
    """The tensor-parallel ranks, as compiled code can hold them."""

    group: str
    """Name of the process group."""
    size: int
    rank: int

    @classmethod
    def from_device_mesh(cls, device_mesh: DeviceMesh) -> TensorRanks:
        """The ranks of a mesh with one axis."""
        return cls(device_mesh.get_group().group_name, device_mesh.size(), device_mesh.get_local_rank())


def copy(tensor: Tensor, ranks: TensorRanks) -> Tensor:
    """Returns a tensor that is whole on every rank; its gradient is summed over ranks."""
    return _Copy.apply(tensor, ranks) if torch.is_grad_enabled() and tensor.requires_grad else tensor


def reduce(tensor: Tensor, ranks: TensorRanks) -> Tensor:
    """The sum over ranks of tensors of one shape; the gradient, the same on every rank, goes to each."""
    return _Reduce.apply(tensor, ranks)


def gather_shards(tensor: Tensor, dim: int, total: int, ranks: TensorRanks, parts: bool = False) -> Tensor:
    """Joins shards ``[..., width, ...]`` of ``total`` along a dimension. ``parts``: gradients are summed over ranks."""
    return _Gather.apply(tensor, dim, total, ranks, parts)


def cut_shard(tensor: Tensor, dim: int, ranks: TensorRanks) -> Tensor:
    """This rank's shard ``[..., width, ...]`` of a whole tensor, filled up with zeros; the gradient is gathered."""
    return _Share.apply(tensor, dim, ranks, False)


def scatter(tensor: Tensor, dim: int, ranks: TensorRanks) -> Tensor:
    """This rank's shard ``[..., width, ...]`` of the sum over ranks, filled up with zeros; the gradient is gathered."""
    return _Share.apply(tensor, dim, ranks, True)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, ranks):
        ctx.ranks = ranks
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_reduce(gradient, ctx.ranks), None


class _Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, ranks):
        return _all_reduce(tensor, ranks)

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        return gradient, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, dim, total, ranks, parts):
        ctx.dim = dim
        ctx.width = tensor.shape[dim]
        ctx.ranks = ranks
        ctx.parts = parts
        return _all_gather(tensor, dim, total, ranks)

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        take = _reduce_scatter if ctx.parts else _shard
        return take(gradient, ctx.dim, ctx.ranks).narrow(ctx.dim, 0, ctx.width), None, None, None, None


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tensor, dim, ranks, sums):
        ctx.dim = dim
        ctx.total = tensor.shape[dim]
        ctx.ranks = ranks
        return (_reduce_scatter if sums else _shard)(tensor, dim, ranks)

    @staticmethod
    def backward(ctx, gradient):  # pyright: ignore[reportIncompatibleMethodOverride]
        return _all_gather(gradient, ctx.dim, ctx.total, ctx.ranks), None, None, None


def _all_reduce(tensor: Tensor, ranks: TensorRanks) -> Tensor:
    ops = torch.ops._c10d_functional
    # Functional collectives, which compiled code can hold; those of torch.distributed would break its graph.
    return ops.wait_tensor(ops.all_reduce(tensor.contiguous(), "sum", ranks.group))


def _all_gather(tensor: Tensor, dim: int, total: int, ranks: TensorRanks) -> Tensor:
    ops = torch.ops._c10d_functional
    # Collectives join along the first dimension alone.
    padded = _pad_dimension(tensor, dim, _shard_width(total, ranks)).movedim(dim, 0).contiguous()
    joined = ops.wait_tensor(ops.all_gather_into_tensor(padded, ranks.size, ranks.group))
    return joined.narrow(0, 0, total).movedim(0, dim).contiguous()


def _reduce_scatter(tensor: Tensor, dim: int, ranks: TensorRanks) -> Tensor:
    ops = torch.ops._c10d_functional
    width = _shard_width(tensor.shape[dim], ranks)
    padded = _pad_dimension(tensor, dim, width * ranks.size).movedim(dim, 0).contiguous()
    shard = ops.wait_tensor(ops.reduce_scatter_tensor(padded, "sum", ranks.size, ranks.group))
    return shard.movedim(0, dim).contiguous()


def _shard(tensor: Tensor, dim: int, ranks: TensorRanks) -> Tensor:
    """This rank's shard of a whole tensor, padded with zeros to the width of all shards."""
    total = tensor.shape[dim]
    width = _shard_width(total, ranks)
    start = min(ranks.rank * width, total)
    shard = tensor.narrow(dim, start, min(width, total - start))
    return _pad_dimension(shard, dim, width).clone(memory_format=torch.contiguous_format)


def _shard_width(total: int, ranks: TensorRanks) -> int:
    """Elements of each rank's shard along a dimension; the last shards may be shorter before they are padded."""
    return -(-total // ranks.size)


def _pad_dimension(tensor: Tensor, dim: int, width: int) -> Tensor:
    """Pads a dimension with zeros at its end."""
    missing = width - tensor.shape[dim]
    if not missing:
        return tensor
    return nn.functional.pad(tensor, (0, 0) * (tensor.ndim - 1 - dim % tensor.ndim) + (0, missing))


def blockwise_shard(tensor: Tensor, dim: int, blocks: int, ranks: TensorRanks) -> Tensor:
    """This rank's shard ``[..., size / ranks, ...]`` of a fused matrix: its chunks of all blocks, joined."""
    return torch.cat([block.chunk(ranks.size, dim)[ranks.rank] for block in tensor.chunk(blocks, dim)], dim)


class Cutter:
    """Replaces parameters of a model by DTensors of which this rank keeps a shard. One instance per model, so that tied
    weights stay tied."""

    def __init__(self, module: nn.Module, device_mesh: DeviceMesh) -> None:
        self.device_mesh = device_mesh
        self.ranks = TensorRanks.from_device_mesh(device_mesh)
        owners: dict[int, int] = {}
        for submodule in module.modules():
            for parameter in submodule.parameters(recurse=False):
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
        self._tied = {identity for identity, count in owners.items() if count > 1}
        self._cut_tied: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        """Tied parameters by id, and their DTensors. The original is kept alive, so that its id is not reused."""

    def cut(self, module: nn.Module, name: str, dim: int, where: str, blocks: int = 1, even: bool = True) -> None:
        """Replaces a parameter by its DTensor.

        Args:
            module: its owner; weights may be on the meta device.
            name: the parameter; one that is None is left alone.
            dim: dimension to cut.
            where: name of the module, for errors.
            blocks: equal blocks of a fused matrix, each of which is cut.
            even: whether all shards must be of one size.

        Raises:
            ConfigError: when the dimension does not divide, or a tied weight is to be cut in two ways.
        """
        parameter = getattr(module, name)
        if parameter is None:
            return
        dim %= parameter.ndim
        size = parameter.shape[dim]
        num_shards = blocks * self.ranks.size
        if (even or blocks > 1) and size % num_shards:
            raise ConfigError(
                f"{where}.{name}: dimension {dim} of {tuple(parameter.shape)} cannot be cut into {num_shards} equal "
                f"shards ({size} / {num_shards} = {size / num_shards:g}): lower train.tensor_parallel_size "
                f"{self.ranks.size}"
            )
        placement = Shard(dim) if blocks == 1 else _StridedShard(dim, split_factor=blocks)
        earlier = self._cut_tied.get(id(parameter))
        if earlier and cast("DTensor", earlier[1]).placements != (placement,):
            raise ConfigError(
                f"{where}.{name} is tied to a weight that is cut otherwise: give both the same style in the plan"
            )
        distributed = earlier[1] if earlier else self._distribute(parameter, placement)
        if id(parameter) in self._tied:
            self._cut_tied[id(parameter)] = (parameter, distributed)
        module.register_parameter(name, distributed)

    def _distribute(self, parameter: nn.Parameter, placement: Shard | _StridedShard) -> nn.Parameter:
        if isinstance(placement, Shard):
            # ``src_data_rank`` None: each rank cuts its own copy, and nothing is sent.
            tensor = distribute_tensor(parameter.data, self.device_mesh, [placement], src_data_rank=None)
        else:
            shard = blockwise_shard(parameter.data, placement.dim, cast("int", placement.split_factor), self.ranks)
            layout = {"shape": parameter.shape, "stride": parameter.contiguous().stride()}
            tensor = DTensor.from_local(shard, self.device_mesh, [placement], run_check=False, **layout)
        return nn.Parameter(tensor, requires_grad=parameter.requires_grad)


class Colwise(nn.Linear):
    """A linear layer whose outputs are cut: weight [out, in] and bias [out] along ``out``.

    With several blocks the bias, and the weight of an adapter, stay whole and are cut here: fsdp2 can cut a blockwise
    shard further only along ``in``.
    """

    tp_ranks: TensorRanks
    tp_parts: bool
    """Whether it is in a partial group."""
    tp_joined: bool
    """Whether outputs are gathered."""
    tp_blocks: int
    """Equal blocks of a fused matrix."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.tp_parts:
            input = copy(input, self.tp_ranks)
        bias = None if self.bias is None else self._rows(self.bias)
        output = nn.functional.linear(input, self._rows(self.weight), bias)
        return gather_shards(output, -1, self.out_features, self.tp_ranks) if self.tp_joined else output

    def _rows(self, parameter: Tensor) -> Tensor:
        if self.tp_blocks == 1 or isinstance(parameter, DTensor):
            return local_shard(parameter)
        return blockwise_shard(copy(parameter, self.tp_ranks), 0, self.tp_blocks, self.tp_ranks)


class Rowwise(nn.Linear):
    """A linear layer whose inputs are cut, and its weight [out, in] along ``in``; outputs are summed over ranks.

    The bias stays whole and is added once.
    """

    tp_ranks: TensorRanks
    tp_parts: bool
    """Whether it is in a partial group, after which outputs are summed."""
    tp_whole_input: bool
    """Whether inputs come whole and are cut here."""

    def forward(self, input: Tensor) -> Tensor:
        if self.tp_whole_input:
            input = cut_shard(input, -1, self.tp_ranks)
        output = nn.functional.linear(input, local_shard(self.weight))
        if not self.tp_parts:
            output = reduce(output, self.tp_ranks)
        if self.bias is None:
            return output
        # In a partial group every rank's output is summed later, so each adds its share of the bias.
        bias = copy(self.bias, self.tp_ranks) / self.tp_ranks.size if self.tp_parts else self.bias
        return output + bias.to(output.dtype)


class EmbeddingRowwise(nn.Embedding):
    """An embedding whose rows, the vocabulary, are cut; outputs, 0 for rows of other ranks, are summed over ranks."""

    tp_ranks: TensorRanks

    def forward(self, input: Tensor) -> Tensor:
        weight = local_shard(self.weight)
        start = min(self.tp_ranks.rank * _shard_width(self.num_embeddings, self.tp_ranks), self.num_embeddings)
        missing = (input < start) | (input >= start + len(weight))
        padding = None if self.padding_idx is None else self.padding_idx - start
        if padding is not None and not 0 <= padding < len(weight):
            padding = None
        if not len(weight):  # this rank has no rows; a lookup of index 0, which is masked, needs one
            weight = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
        with replace_attributes(self, weight=weight, padding_idx=padding):
            output = super().forward((input - start).masked_fill(missing, 0))
        return reduce(output.masked_fill(missing[..., None], 0), self.tp_ranks)


class EmbeddingColwise(nn.Embedding):
    """An embedding whose features are cut, and gathered after the lookup."""

    tp_ranks: TensorRanks

    def forward(self, input: Tensor) -> Tensor:
        with replace_attributes(self, weight=local_shard(self.weight)):
            output = super().forward(input)
        return gather_shards(output, -1, self.embedding_dim, self.tp_ranks)


class NormAcrossHeads(nn.Module):
    """An RMS norm over the features of all heads, which are cut: the mean of squares is taken over all ranks.

    The norm is torch's, or diffusers' without a bias, which names the features ``dim``.
    """

    tp_ranks: TensorRanks
    weight: Tensor | None
    eps: float | None

    def forward(self, input: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        values = input.float()
        # Every rank's output depends on the sum, so its gradient is summed over ranks, too.
        squares = copy(reduce(values.square().sum(-1, keepdim=True), self.tp_ranks), self.tp_ranks)
        eps = torch.finfo(input.dtype).eps if self.eps is None else self.eps
        features = getattr(self, "normalized_shape", None) or cast("Any", self).dim
        values = values * torch.rsqrt(squares / features[0] + eps)
        return (values if self.weight is None else values * local_shard(self.weight)).type_as(input)


class Local(nn.Module):
    """A role for a module that computes with this rank's shards of its own parameters."""

    tp_ranks: TensorRanks

    def forward(self, *args: object, **kwargs: object) -> Any:
        parameters = {name: parameter for name, parameter in self._parameters.items() if parameter is not None}
        with replace_attributes(self, **{name: self._of_rank(parameter) for name, parameter in parameters.items()}):
            return super().forward(*args, **kwargs)

    def _of_rank(self, parameter: Tensor) -> Tensor:
        return local_shard(parameter)


class Summed(Local):
    """A role for a module with whole parameters that each rank applies to a part of the data, such as some heads or
    tokens: gradients of the parameters are summed over ranks."""

    def _of_rank(self, parameter: Tensor) -> Tensor:
        return local_shard(parameter) if isinstance(parameter, DTensor) else copy(parameter, self.tp_ranks)


class Experts(Local):
    """Experts that compute with their shards; outputs are summed over ranks.

    Gradients of the tokens and of their routing weights are summed, too; the router stays whole.
    """

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        args = tuple(self._enter_experts(value) for value in args)
        kwargs = {name: self._enter_experts(value) for name, value in kwargs.items()}
        return reduce(super().forward(*args, **kwargs), self.tp_ranks)

    def _enter_experts(self, value: object) -> object:
        if isinstance(value, Tensor) and value.is_floating_point():
            return copy(value, self.tp_ranks)
        return value


class AllReduced(nn.Module):
    """A role for a module whose output is summed over ranks."""

    tp_ranks: TensorRanks

    def forward(self, *args: object, **kwargs: object) -> Tensor:
        return reduce(super().forward(*args, **kwargs), self.tp_ranks)


class IdentityExpert(nn.Module):
    """A role for an expert without weights: each rank puts in an equal share, so that the sum over ranks is whole."""

    tp_ranks: TensorRanks

    def forward(self, input: Tensor, *args: object) -> object:
        return super().forward(input / self.tp_ranks.size, *args)


class LatentKeyValue(nn.Module):
    """A latent projection whose last outputs (the rotary key) go to this rank's heads directly: their gradients are
    summed over ranks. The others pass through a cut layer, which sums theirs."""

    tp_ranks: TensorRanks
    tp_rotary: int
    """Number of these outputs."""

    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        latent, shared = output.split([output.shape[-1] - self.tp_rotary, self.tp_rotary], dim=-1)
        return torch.cat([latent, copy(shared, self.tp_ranks)], dim=-1)


class SeparateOutputs(nn.Module):
    """A role for a block that returns several views of one tensor, which compiled code with DTensors cannot do."""

    def forward(self, *args: object, **kwargs: object) -> object:
        output = super().forward(*args, **kwargs)
        return tuple(tensor.clone() for tensor in output) if torch.compiler.is_compiling() else output


class CutHeads(nn.Module):
    """A role for a module, such as one of rotary embeddings, whose outputs are for all heads: it returns those of this
    rank's, of tensors ``[B, heads, tokens, D]`` or ``[B, tokens, heads D]``."""

    tp_ranks: TensorRanks

    def forward(self, *args: object, **kwargs: object) -> tuple[Tensor, ...]:
        outputs: tuple[Tensor, ...] = super().forward(*args, **kwargs)
        ranks = self.tp_ranks
        return tuple(tensor.chunk(ranks.size, 1 if tensor.ndim == 4 else -1)[ranks.rank] for tensor in outputs)


def change_class(module: nn.Module, role: type[nn.Module], **settings: object) -> None:
    """Gives a module another forward, which may call the original one, by changing its class, as fsdp2 does.

    The new class, of the same name, derives from the role and the module's class. All modules of a class share it, so
    that compiled code of one block serves all; a method on each instance would prevent that.

    Args:
        module: changed in place.
        role: a class with that forward.
        settings: attributes that the role reads.
    """
    module.__class__ = _class_of(role, type(module))
    for name, value in settings.items():
        setattr(module, name, value)


@functools.cache
def _class_of(role: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    return type(base.__name__, (role, base), {"__module__": base.__module__})


@contextmanager
def replace_attributes(module: nn.Module, **values: object) -> Iterator[None]:
    """While it lasts, attributes of a module have other values. Parameters of these names stay registered.

    Values in the instance's dictionary are found before parameters.
    """
    overwritten = {name: module.__dict__[name] for name in values if name in module.__dict__}
    module.__dict__.update(values)
    try:
        yield
    finally:
        for name in values:
            del module.__dict__[name]
        module.__dict__.update(overwritten)
