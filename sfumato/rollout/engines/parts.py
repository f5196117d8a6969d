"""What engines that have weights of their own are built from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from sfumato.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """What a task gives an engine that has weights of its own."""

    folder: Path
    """The run folder."""
    max_length: int | None = None
    """Tokens of the longest prompt with its completion that the run will ask for; None: as many as the model takes."""
    model_path: str | None = None
    """Folder of the model's own files, as transformers loads it; the engine loads it, too."""
    template: Callable[[], nn.Module] | None = None
    """Makes transformers' module as the actor has it, on meta, with adapters if adapters alone are trained: its names
    are those that weights are sent by. ``build_language_model(...).module`` is one with ``train.init_device`` meta."""

    def outside(self, engine: str) -> tuple[str, nn.Module]:
        """``model_path`` and the template, for an engine that has weights of its own.

        Raises:
            ConfigError: when the model is not in a folder.
        """
        if self.model_path is None or self.template is None:
            raise ConfigError(
                f"rollout.engine: {engine} loads the model from a folder: set model.model_path to one that "
                "save_pretrained wrote, or take the embedded engine"
            )
        return str(Path(self.model_path).absolute()), self.template()
