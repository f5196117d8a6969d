"""Dropout whose masks belong to samples, not to ranks, micro-batches or a generator.

Whether an element is dropped is a hash of (seed, module, step, sample, token, feature): splitmix64, seeded for each
token and counted over its features. So a CPU and a GPU drop the same elements, however the batch is cut, and a block
that is recomputed drops them again.

Cost: about ten passes over an int64 tensor of the input's shape (fused into one under ``torch.compile``), and one byte
for each element until the backward pass, as with torch's own dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sfumato.errors import ConfigError
from sfumato.parallel.splitmix import GAMMA, key_of, mix


def _is_cut_along_input(weight: Tensor) -> bool:
    """Whether tensor parallelism has cut a weight ``[out, in]`` along ``in``."""
    if not isinstance(weight, DTensor):
        return False
    names = weight.device_mesh.mesh_dim_names or ()
    return any(name == "tp" and placement.is_shard(1) for name, placement in zip(names, weight.placements, strict=True))


class DropoutKeys:
    """The keyed dropout modules of a model, and the keys of the batch that goes through it."""

    def __init__(self, module: nn.Module, dropouts: Mapping[str, KeyedDropout], seed: int) -> None:
        self._module = module
        self._dropouts = list(dropouts.values())
        self._names = torch.tensor([key_of(f"{int(seed)}/dropout/{name}") for name in dropouts])
        self._active = False

    @classmethod
    def of_modules(cls, module: nn.Module, dropouts: Mapping[str, nn.Dropout], seed: int) -> DropoutKeys:
        """Makes dropout modules of a model, by their names, draw their masks from keys; they are changed in place."""
        keyed_by_name: dict[str, KeyedDropout] = {}
        for name, dropout in dropouts.items():
            # By its class, so that it stays the object that its owner and peft's tables refer to.
            dropout.__class__ = KeyedDropout
            keyed = cast("KeyedDropout", dropout)
            keyed.name = name
            keyed.row_keys = None
            keyed.positions = None
            keyed.features = _input_features(module, name)
            keyed_by_name[name] = keyed
        return cls(module, keyed_by_name, seed)

    def check_is_whole(self, module: nn.Module) -> None:
        """Checks the model, or this rank's stage of it, after ``parallelize``.

        Raises:
            ConfigError: when tensor parallelism has cut the input of an adapter's dropout, whose masks would then
                depend on the ranks.
        """
        for name, submodule in module.named_modules():
            adapters = getattr(submodule, "lora_dropout", None)
            if not isinstance(adapters, nn.ModuleDict):
                continue
            weights = [
                cast("Mapping[str, nn.Linear]", submodule.lora_A)[key].weight
                for key, dropout in adapters.items()
                if isinstance(dropout, KeyedDropout)
            ]
            if any(_is_cut_along_input(weight) for weight in weights):
                raise ConfigError(
                    f"model.lora.dropout and train.tensor_parallel_size: {name} gets a part of its input on each rank, "
                    "and what is dropped would depend on the ranks: set the dropout to 0, train.tensor_parallel_size "
                    "to 1, or leave such layers out of model.lora.target_modules"
                )

    @contextmanager
    def batch(self, step: int, sample_ids: Sequence[int] | Tensor, positions: Tensor | None = None) -> Iterator[None]:
        """Inside, the model's dropout belongs to these samples. Holds the forward *and* the backward pass.

        Inputs of dropout are ``[B, F]`` or ``[B, S, ..., F]``. A sequence that is cut over ranks needs ``positions``;
        then every dropout input must have that length, so a model whose dropouts see streams of different lengths
        (separate image and text streams) cannot be cut. Features must be whole: tensor parallelism over an adapter's
        input is refused.

        Args:
            step: the optimiser step; also count the pass in it if a batch is used several times.
            sample_ids: one integer for each row, B of them.
            positions: int ``[S]`` or ``[B, S]``: positions of this rank's tokens in the whole row; None for 0 to S - 1.

        Raises:
            RuntimeError: when a batch is open already; from the model's forward, when an input does not fit.
            ValueError: when ids or positions have a wrong shape.
        """
        if self._active:
            raise RuntimeError("keys.batch is open already: close one batch before the next, backward pass included")
        ids = torch.as_tensor(sample_ids, dtype=torch.int64, device="cpu")
        if ids.ndim != 1:
            raise ValueError(f"sample_ids must be one integer for each row, not of shape {tuple(ids.shape)}")
        if positions is not None and positions.ndim != 1 and positions.shape[:-1] != ids.shape:
            raise ValueError(f"positions {tuple(positions.shape)} must be [S] or [B, S] for {len(ids)} rows")
        rows = mix(self._names + (torch.tensor(int(step)) + 1) * GAMMA)[:, None]
        rows = mix(rows + (ids + 1)[None] * GAMMA)
        parameter = next(self._module.parameters(), None)
        if parameter is not None:
            rows = rows.to(parameter.device)
            positions = None if positions is None else positions.to(parameter.device)
        self._active = True
        try:
            for dropout, keys in zip(self._dropouts, rows, strict=True):
                dropout.row_keys = keys
                dropout.positions = positions
            yield
        finally:
            self._active = False
            for dropout in self._dropouts:
                dropout.row_keys = None
                dropout.positions = None


class KeyedDropout(nn.Dropout):
    """``nn.Dropout`` with masks from keys. ``keyed_dropout`` turns existing modules into these."""

    is_keyed: ClassVar[bool] = True
    name: str
    features: int | None
    """Size of the last dimension where it is known: an input with fewer features has been cut over ranks."""
    row_keys: Tensor | None
    positions: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        """Drops elements and scales the others by ``1 / (1 - p)``; same shape and dtype."""
        if not self.training or self.p == 0:
            return input
        self._check(input)
        row_keys = self.row_keys.to(input.device)  # pyright: ignore[reportOptionalMemberAccess]  # checked
        keep = keep_mask(row_keys, input.shape, self.p, self.positions)
        # Not a product with the mask, which would make NaN of an infinite element that is dropped.
        return torch.where(keep, input * (1 / (1 - self.p) if self.p < 1 else 0.0), 0.0)

    def _check(self, input: Tensor) -> None:
        shape = tuple(input.shape)
        rows = self.row_keys
        positions = self.positions
        if rows is None:
            raise RuntimeError(
                f"dropout {self.name} does not know its samples: run forward and backward pass inside of "
                "keys.batch(step, sample_ids), or call eval() on the model"
            )
        if isinstance(input, DTensor) or (self.features is not None and shape[-1] != self.features):
            raise RuntimeError(
                f"dropout {self.name} sees a part of its {self.features} features, {shape}: its masks would depend "
                "on the ranks; set the dropout to 0 or train.tensor_parallel_size to 1"
            )
        if input.ndim < 2 or shape[0] != len(rows):
            raise RuntimeError(
                f"dropout {self.name} got {shape}, but the batch has {len(rows)} sample ids: its inputs must be "
                "[B, F] or [B, ..., F]; set the dropout to 0 where tokens of several rows are mixed (experts)"
            )
        if positions is not None and input.ndim > 2 and shape[1] != positions.shape[-1]:
            raise RuntimeError(
                f"dropout {self.name} got {shape}, but the batch has positions of {positions.shape[-1]} tokens"
            )


def keep_mask(row_keys: Tensor, shape: Sequence[int], p: float, positions: Tensor | None = None) -> Tensor:
    """Which elements stay.

    Args:
        row_keys: int64 ``[B]``.
        shape: ``[B, F]`` or ``[B, S, ..., F]``.
        p: probability that an element is dropped.
        positions: int ``[S]`` or ``[B, S]``, counted over dimension 1; None for 0 to S - 1.

    Returns:
        bool of that shape.
    """
    device = row_keys.device
    keys = row_keys
    for axis in range(1, len(shape) - 1):  # a counter within a counter: one more hash for each dimension
        if axis == 1 and positions is not None:
            counter = positions.to(device, torch.int64)
        else:
            counter = torch.arange(shape[axis], device=device)
        keys = mix(keys[..., None] + (counter + 1) * GAMMA)
    bits = mix(keys[..., None] + (torch.arange(shape[-1], device=device) + 1) * GAMMA)
    threshold = min(int(p * 2**64), 2**64 - 1) - 2**63  # bits are signed: the smallest share p of them is dropped
    return bits >= threshold


def _input_features(module: nn.Module, name: str) -> int | None:
    """Size of the input features of an adapter's dropout ``LAYER.lora_dropout.ADAPTER`` (peft's names); else None."""
    layer, _, adapter = name.rpartition(".lora_dropout.")
    if not layer:
        return None
    projection = cast("Mapping[str, nn.Linear]", module.get_submodule(layer).lora_A)
    weight = projection[adapter].weight if adapter in projection else None
    return weight.shape[1] if weight is not None and weight.ndim == 2 else None  # a convolution has more dimensions
