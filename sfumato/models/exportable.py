"""The interface of a model, of any modality, whose weights can be exported."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor, nn


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


def has_adapters(module: nn.Module) -> bool:
    """Whether a module has low-rank adapters."""
    return any(getattr(submodule, "peft_config", None) for submodule in module.modules())
