"""Numbers that stay on the device until they are needed, and are read together.

Reading a number from a GPU makes the host wait until all work so far is done. Losses and sums for the log of a step are
therefore kept in tensors and read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import torch

if TYPE_CHECKING:
    from torch import Tensor


class Numbers(Sequence[float]):
    """The elements of tensors as numbers, in the order in which the tensors were added. The first access reads all."""

    def __init__(self, *tensors: Tensor) -> None:
        """``tensors`` as in ``add``."""
        self._tensors: list[Tensor] = []
        self._names: list[str] = []
        self._values: list[float] = []
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: Tensor, name: str = "") -> None:
        """Adds the elements of a tensor of any shape, dtype and device, without its graph.

        Args:
            tensor: must not be changed until it is read.
            name: name of its elements, which ``named`` and ``sums`` give.
        """
        self._tensors.append(tensor.detach())
        self._names += [name] * tensor.numel()

    def add_all(self, **tensors: Tensor | float) -> None:
        """Adds tensors of one element, or numbers, by their names."""
        for name, value in tensors.items():
            self.add(value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=torch.float64), name)

    def sums(self) -> dict[str, float]:
        """The sum of the numbers of each name, in the order in which they were added."""
        sums: dict[str, float] = {}
        for name, value in self.named():
            sums[name] = sums.get(name, 0.0) + value
        return sums

    def named(self) -> list[tuple[str, float]]:
        """Name and value of each number."""
        read(self)
        return list(zip(self._names, self._values, strict=True))

    def __len__(self) -> int:
        return len(self._names)

    @overload
    def __getitem__(self, index: int) -> float: ...

    @overload
    def __getitem__(self, index: slice) -> list[float]: ...

    def __getitem__(self, index: int | slice) -> float | list[float]:
        read(self)
        return self._values[index]

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


def read(*numbers: Numbers) -> None:
    """Reads all numbers that have not been read, with one copy from each device that they are on."""
    # All tensors of a device are joined into one, so that the host waits for each device once.
    unread = [(entry, tensor.reshape(-1)) for entry in numbers for tensor in entry._tensors]
    by_device: dict[torch.device, list[Tensor]] = {}
    for _, tensor in unread:
        by_device.setdefault(tensor.device, []).append(tensor.double())
    values_on = {device: iter(torch.cat(tensors).tolist()) for device, tensors in by_device.items()}
    for entry, tensor in unread:
        entry._values += [next(values_on[tensor.device]) for _ in range(tensor.numel())]
    for entry in numbers:
        entry._tensors.clear()
