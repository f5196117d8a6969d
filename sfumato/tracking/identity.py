"""The identity of a run, which a resume must find unchanged: data, seed, the numbers that choose a step's samples, and
the scale of adapters.

A checkpoint holds a position in the data. With other data, or steps of another size, the position would mean other
samples: some would be trained twice and others never, without any sign of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from sfumato.config.base import flatten
from sfumato.config.open_mappings import JsonObject
from sfumato.config.paths import ADAPTER_FILES
from sfumato.errors import CheckpointError
from sfumato.tracking.atomic_folders import list_checkpoints, read_values
from sfumato.tracking.folder import read_environment

if TYPE_CHECKING:
    from sfumato.config.sections import TaskConfig

Identity = JsonObject
"""Values that JSON can hold, by the fields that they come from."""

_DIGEST = re.compile("[0-9a-f]{32,}")

KEY = "identity"
"""Key of the identity among a checkpoint's values."""

FREE = {"train_path", "eval_path", "cache_dir", "cache_media", "num_workers", "max_bad_rows", "train_size"}
"""Fields of ``data`` that may change: paths (the content is compared), how data are read, and when the run ends."""

EVALUATION = ("data.eval_path", "eval.")
"""Beginnings of fields that may change, too, but with a message, since curves of the evaluation break there."""

BEGUN_WITH = ("model.model_path (weights that the run began with)", "critic.")
"""Beginnings of fields of weights that may change with a message, since the checkpoint holds the trained ones."""

OWN_SOURCE = "(its source)"
"""The end of fields of functions in the user's own code, which may change with a message."""


def identify(config: TaskConfig, content: Mapping[str, str], numbers: Mapping[str, object] | None = None) -> Identity:
    """Computes the identity of a run, and refuses a resume with another one before anything is built or written.

    Args:
        config: of the task; the fields of ``data``, ``train.seed`` and the scale of ``model.lora`` count.
        content: digests of the data's content, by the field that names the data.
        numbers: the numbers that choose which samples a step takes, by field.

    Raises:
        CheckpointError: when the run goes on from a checkpoint with another identity.
    """
    data = config.data.model_dump(mode="json", exclude=FREE)
    if data.get("datasets_type") == "mapping":
        del data["shuffle_buffer"]  # streams alone use it
    train = config.train
    identity = flatten({"data": data}) | {"train.seed": train.seed} | dict(content) | dict(numbers or {})
    lora = getattr(getattr(config, "model", None), "lora", None)
    if lora is not None:  # the same adapters under another scale are another model
        identity |= {"model.lora.alpha": lora.alpha, "model.lora.variant": lora.variant}
    folder = _find_wanted(Path(train.output_dir), train.load_checkpoint_path)
    if folder is not None:
        compare_identity(read_values(folder).get(KEY), identity, folder)
    return identity


def compare_identity(saved: Identity | None, current: Identity, folder: Path) -> str:
    """Whether a run may go on from a checkpoint.

    Args:
        saved: identity in the checkpoint; None when it holds none.
        current: identity of this run; empty compares nothing.
        folder: the checkpoint.

    Returns:
        A line about permitted changes, for the person who watches; empty when there are none.

    Raises:
        CheckpointError: names the values that must not change, and the remedy.
    """
    both = {name: (value, current[name]) for name, value in (saved or {}).items() if name in current}
    changed = {name: pair for name, pair in both.items() if pair[0] != pair[1]}
    evaluation = {name for name in changed if name.startswith(EVALUATION)}
    remade = {name for name in changed if name.startswith(BEGUN_WITH) or name.endswith(OWN_SOURCE)} - evaluation
    watched = evaluation | remade
    fatal = [_describe(name, *changed[name]) for name in changed if name not in watched]
    if fatal:
        raise CheckpointError(
            f"{folder} cannot go on with this configuration, since it would go on with other samples (some trained "
            f"twice and others never), or other models: {'; '.join(fatal)}. Restore that, or start a new run from the "
            f"exported weights ({_describe_weights(folder)}) with another train.output_dir"
        )
    unknown = [name for name, value in current.items() if saved and name not in saved and _DIGEST.fullmatch(str(value))]
    lines = []
    for names, reason in (
        (evaluation, "the evaluation is another one than before the checkpoint"),
        (remade, "changed since the checkpoint, which is gone on with"),
    ):
        if names:
            lines.append(f"{reason}: {'; '.join(_describe(name, *changed[name]) for name in sorted(names))}")
    if unknown:
        lines.append(f"{folder} does not say what these held, so they are not compared: {', '.join(unknown)}")
    return "; ".join(lines)


def _describe_weights(checkpoint: Path) -> str:
    """How a new run begins with the weights of a checkpoint, with real paths."""
    run = checkpoint.parent.parent
    exported = run / "hf_ckpt"
    if exported.is_dir() and not any((exported / name).exists() for name in ADAPTER_FILES):
        return f"--model.model_path {exported}"
    return f"sfumato export {checkpoint} OUT --merge, then --model.model_path OUT"


def own_checkpoints(output_dir: Path) -> tuple[dict[int, Path], dict[int, str]]:
    """The checkpoints in a run folder that the folder's run wrote, and the run ids of the other ones, both by step.

    Checkpoints without a run id count as the run's own.
    """
    checkpoints = list_checkpoints(output_dir / "checkpoints")
    ids = {step: read_values(folder).get("run_id") for step, folder in checkpoints.items()}
    own_id = read_environment(output_dir).get("run_id") or next((ids[step] for step in reversed(ids)), None)
    foreign = {step: str(run_id) for step, run_id in ids.items() if own_id is not None and run_id not in (None, own_id)}
    return {step: folder for step, folder in checkpoints.items() if step not in foreign}, foreign


def _find_wanted(output_dir: Path, path: str | None) -> Path | None:
    """The checkpoint that a run will probably go on from; it is verified later, and may then be passed over."""
    if path in (None, "new"):
        return None
    if path != "auto":
        return Path(path)
    checkpoints, _ = own_checkpoints(output_dir)
    return checkpoints[max(checkpoints)] if checkpoints else None


def _describe(name: str, saved: object, current: object) -> str:
    if _DIGEST.fullmatch(str(saved)) and _DIGEST.fullmatch(str(current)):
        return f"{name} has another content"
    return f"{name} was {saved!r}, is {current!r}"
