"""The interface of a model, of any modality, whose weights can be exported."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from sfumato.parallel.mesh import Mesh


class Exportable(Protocol):
    """A model that can write folders that other programs load.

    A model whose adapters alone would be of no use sets ``exports_merged = True``.
    """

    @property
    def trained(self) -> nn.Module:
        """The module that holds the trained parameters, as ``parallelize`` returned it."""
        ...

    def save_export(self, folder: Path, weights: dict[str, Tensor], merge: bool = False) -> None:
        """Writes the folder.

        Args:
            folder: an empty folder.
            weights: whole weights of ``trained`` by the names of the plain module: the trainable ones when adapters are
                written, else all. The dictionary may be emptied.
            merge: write a model with its adapters merged, instead of the adapters.
        """


class StreamedExport(Protocol):
    """An export that takes the weights one at a time, so that nobody holds all of them."""

    def dtype_of(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which a weight is exported."""
        ...

    def write(self, folder: Path, weights: Iterable[tuple[str, Tensor | None]]) -> None:
        """Writes the folder, as ``Exportable.save_export`` does.

        Args:
            folder: an empty folder.
            weights: as of ``weights_on_first``.
        """


@runtime_checkable
class Streamable(Exportable, Protocol):
    """A model whose export may take the weights one at a time."""

    def streamed_export(self, mesh: Mesh) -> StreamedExport | None:
        """The export; None where this model's weights must be there together. Every rank of the mesh must call it."""


def has_adapters(module: nn.Module) -> bool:
    """Whether a module has low-rank adapters."""
    return any(getattr(submodule, "peft_config", None) for submodule in module.modules())
