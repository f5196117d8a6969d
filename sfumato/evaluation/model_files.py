"""Whether the files that a run's model is built of are here, and are those that its checkpoint was trained with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.checkpoint.parts import StoredCheckpoint
from sfumato.checkpoint.state import load_trained
from sfumato.config.base import flatten
from sfumato.config.paths import find_model_folder
from sfumato.data.files.named_files import content_of_named_files
from sfumato.data.identity import content_of_model_file
from sfumato.errors import CheckpointError, ConfigError
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.atomic_folders import read_values
from sfumato.tracking.identity import BEGUN_WITH, KEY

if TYPE_CHECKING:
    import torch
    from torch import nn

    from sfumato.evaluation.sources import ModelSource, SourceRun


MODEL_FILES = ("model_path", "config_path", "tokenizer_path", "image_tokenizer")
"""Fields of the section ``model`` and of its parts that name a folder or a file; a tokenizer may also be "bytes"."""


def check_model_is_here(run: SourceRun) -> None:
    """Raises ConfigError where the model that a run began with, or a part that it was put together of, is not here, as
    after a copy from another machine."""
    for name, path in flatten(run.config.model.model_dump(mode="json")).items():
        if name.rpartition(".")[2] not in MODEL_FILES or not isinstance(path, str) or path == "bytes":
            continue
        if not Path(find_model_folder(path)).exists():
            start = "" if Path(path).is_absolute() else f" (the path starts at {Path.cwd()})"
            raise ConfigError(
                f"model.{name} {path}, of which {run.folder} was trained, is not here{start}: write into "
                f"{run.folder / 'config.yaml'} where it lies"
            )


def load_checkpoint(trained: nn.Module, source: ModelSource, device: torch.device) -> None:
    """Gives a run's model the weights of one of its checkpoints.

    Raises:
        CheckpointError: as ``load_trained`` and ``check_model_files``.
    """
    assert source.run is not None
    load_trained(trained, StoredCheckpoint(source.folder), Mesh(Layout(), device), source.section)
    check_model_files(source.run, source.folder)


def check_model_files(run: SourceRun, checkpoint: Path) -> None:
    """Refuses to load the weights of a checkpoint into another model than its run's.

    Args:
        run: that is sampled or exported.
        checkpoint: of the run.

    Raises:
        CheckpointError: description or frozen weights have another content than when the checkpoint was written. The
            shapes may be the same all the same, so that the model would load, and answer something else.
    """
    saved = read_values(checkpoint).get(KEY)
    if not isinstance(saved, dict):
        return
    current = content_of_named_files(run.config, content_of_model_file, within="model.")
    changed = [
        name
        for name, digest in current.items()
        if not name.startswith(BEGUN_WITH) and saved.get(name, digest) != digest
    ]
    if changed:
        settings = run.folder / "config.yaml"
        raise CheckpointError(
            f"{checkpoint} was trained with another content of {' and '.join(changed)}, named in {settings}, and its "
            f"weights would be those of another model: restore that, or write into {settings} where it lies"
        )
