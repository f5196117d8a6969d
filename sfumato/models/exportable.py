"""What a model of any modality must be able to do so that its weights can be exported."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from torch import Tensor, nn


class Exportable(Protocol):
    """A model that knows the folders that other programs load.

    One whose adapters alone would be of no use has ``exports_merged = True``.
    """

    @property
    def trained(self) -> nn.Module:
        """What holds the trained parameters, as ``parallelize`` returned it."""

    def save_export(self, folder: Path, weights: dict[str, Tensor], merge: bool = False) -> None:
        """Writes the folder.

        Args:
            folder: an empty folder.
            weights: of ``trained``, whole, by the names of the plain module: the trainable ones when adapters are
                written, else all. The dictionary may be emptied.
            merge: write the model that computes the same without adapters, instead of the adapters.
        """


def has_adapters(module: nn.Module) -> bool:
    """Whether there are low-rank adapters in a module."""
    return any(getattr(submodule, "peft_config", None) for submodule in module.modules())
