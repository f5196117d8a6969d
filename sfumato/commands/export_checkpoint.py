"""``sfumato export``: the trained weights of a checkpoint as a folder that other programs load."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import torch

from sfumato.checkpoint.export import export_model
from sfumato.checkpoint.parts import StoredCheckpoint
from sfumato.checkpoint.state import load_trained
from sfumato.config.file_checks import read_json_object
from sfumato.config.load import load_config
from sfumato.config.paths import EXPORTED
from sfumato.config.tasks import schema_of
from sfumato.config.writing import make_new_folder
from sfumato.config.yaml_text import read_yaml
from sfumato.errors import CheckpointError, ConfigError
from sfumato.evaluation.model_files import check_model_files, check_model_is_here
from sfumato.evaluation.sources import DIFFUSION_TASKS, SourceRun, describe_export_of
from sfumato.models.exportable import Exportable
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.atomic_folders import MANIFEST, list_checkpoints, newest_intact, restore_folder, verify_checkpoint
from sfumato.tracking.progress import quiet_libraries

if TYPE_CHECKING:
    from sfumato.config.diffusion_rl import DiffusionRLConfig
    from sfumato.config.dit import TrainDitConfig
    from sfumato.config.omni import TrainOmniConfig
    from sfumato.config.text import TrainTextConfig
    from sfumato.config.text_data import TextDataConfig
    from sfumato.config.text_reward import TrainTextRewardConfig
    from sfumato.config.text_rl import TextRLConfig
    from sfumato.models.language.model import LanguageModel
    from sfumato.models.language.scalar_head import ScalarModel

    ModelT = TypeVar("ModelT", LanguageModel, ScalarModel)

LANGUAGE_TASKS = ("train_text", "train_text_dpo", "train_text_kto", "train_text_reward", "rl_text", "train_omni")
"""Tasks of language models whose checkpoints can be exported without their data."""


def export_checkpoint(checkpoint: Path, out: Path, merge: bool = False) -> str:
    """Writes the trained weights of a checkpoint, averaged ones where there are some, as the run itself would.

    Args:
        checkpoint: a checkpoint within its run folder, or the run folder, of which the newest intact one is taken.
        out: folder to write; it must not exist, or be empty.
        merge: write a whole model also when adapters were trained.

    Returns:
        What was written, as a line for the person who asked.

    Raises:
        CheckpointError: when there is no intact checkpoint, or it does not fit the run's configuration.
        ConfigError: when the run folder is none, or its model cannot be built.
    """
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty: name another folder")
    quiet_libraries()
    passed_over: list[str] = []
    run, folder = _find(checkpoint, passed_over)
    restore_folder(run / "hf_ckpt")
    if _task_of(run) not in (*LANGUAGE_TASKS, *DIFFUSION_TASKS):
        return _copy_of_run(run, folder, out)
    model = _build(run)
    averaged = load_trained(model.trained, StoredCheckpoint(folder), mesh := Mesh(Layout(), torch.device("cpu")))
    check_model_files(SourceRun(run), folder)
    export_model(model, None, out, mesh, merge)
    written = f"{'averaged' if averaged else 'trained'} weights of {folder}"
    return "\n".join([*passed_over, f"{out}: {written}"])


def is_export(folder: Path) -> bool:
    """Whether a folder holds exported weights, and is neither a run nor a checkpoint."""
    is_run = (folder / "checkpoints").is_dir() or (folder / MANIFEST).exists()
    return not is_run and any((folder / name).is_file() for name in EXPORTED)


def copy_export(folder: Path, out: Path) -> str:
    """Copies exported weights, so that they can be changed; returns what was written.

    Raises ConfigError where something lies at ``out``, or for a link in ``folder``: what it leads to need not be meant
    for those with whom the copy is shared.
    """
    if out.is_symlink() or out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise ConfigError(f"{out} exists and is not empty: name another folder")
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise ConfigError(f"{path} is a link: put the file itself there, if it is meant to be exported")
    shutil.copytree(folder, make_new_folder(out), dirs_exist_ok=True)
    return f"{out}: copy of {folder}"


def run_of(folder: Path) -> Path:
    """The run folder of a run, a checkpoint or an ``hf_ckpt``."""
    if (folder / "checkpoints").is_dir():
        return folder
    path = folder.absolute()
    return path.parent if is_export(folder) else path.parent.parent


def source_model(folder: Path) -> Path:
    """The folder of the model that a run began with. Raises ConfigError where its configuration names none."""
    config = read_yaml(run_of(folder) / "config.yaml")
    section = config.get("model")
    path = section.get("model_path") if isinstance(section, dict) else None
    if not isinstance(path, str):
        raise ConfigError(f"{run_of(folder) / 'config.yaml'} names no model.model_path, whose kind is needed")
    return Path(path)


def _find(checkpoint: Path, passed_over: list[str]) -> tuple[Path, Path]:
    """The run folder and an intact checkpoint in it; lines about damaged ones are added to ``passed_over``."""
    if not checkpoint.is_dir():
        raise CheckpointError(
            f"{checkpoint} {'is no folder' if checkpoint.exists() else 'does not exist'}: give the folder of a run "
            "(train.output_dir), or one of its checkpoints/global_step_N"
        )
    if not (checkpoint / "checkpoints").is_dir():
        if (checkpoint / "environment.json").is_file():
            raise CheckpointError(f"{checkpoint} has no checkpoints; {describe_export_of(checkpoint)}")
        verify_checkpoint(checkpoint)
        return checkpoint.absolute().parent.parent, checkpoint
    remedy = describe_export_of(checkpoint)
    newest = newest_intact(list_checkpoints(checkpoint / "checkpoints"), passed_over.append, remedy=remedy)
    if newest is None:
        raise CheckpointError(f"{checkpoint / 'checkpoints'} is empty: the run has saved nothing")
    return checkpoint, newest[1]


def _task_of(run: Path) -> str:
    """The task of a run. Raises ConfigError for a folder that is none."""
    try:
        return read_json_object(run / "environment.json")["task"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{run} is not a run folder: {run / 'environment.json'} does not name the task") from error


def _copy_of_run(run: Path, checkpoint: Path, out: Path) -> str:
    """Copies what a run wrote at its end, whose model is built with its data.

    Raises:
        ConfigError: when the run has not finished with this checkpoint.
    """
    environment = read_json_object(run / "environment.json")
    is_last = checkpoint.name == f"global_step_{environment.get('total_steps')}"
    if not (environment.get("finished") and is_last and is_export(run / "hf_ckpt")):
        raise ConfigError(
            f"{run}: {environment['task']} needs its data to export what it trained: run it again with "
            "train.load_checkpoint_path auto, which finishes it and writes hf_ckpt"
        )
    return copy_export(run / "hf_ckpt", out)


def _build(run: Path) -> Exportable:
    """The model of a run, in this process, with the weights that it started from.

    Modules of the tasks are imported in their branches: to export a language model needs no diffusers.
    """
    task = _task_of(run)
    check_model_is_here(SourceRun(run))
    overrides: dict[str, object] = {"train": {"init_device": "cpu"}}
    overrides |= {"model": {"attention": "sdpa"}} if task in LANGUAGE_TASKS else {}
    config = load_config(schema_of(task), run / "config.yaml", overrides)
    if task == "train_text_reward":
        from sfumato.models.language.scalar_head import build_scalar_model

        config = cast("TrainTextRewardConfig", config)
        return _with_template(build_scalar_model(config.model, config.train, config.model.head), config.data)
    if task == "train_omni":
        from sfumato.models.omni.load import build_omni_model

        config = cast("TrainOmniConfig", config)
        return _with_template(build_omni_model(config), config.data)
    if task == "rl_text":
        from sfumato.models.language.load import build_language_model
        from sfumato.rollout.text.policy import adopt_template, build_text_template

        config = cast("TextRLConfig", config)
        model = build_language_model(config.model, config.train, data_type=config.data.data_type)
        reader = None if model.vision is None else model.vision.reader
        adopt_template(build_text_template(config, model.tokenizer, reader))
        return model
    if task in LANGUAGE_TASKS:
        from sfumato.models.language.load import build_language_model

        config = cast("TrainTextConfig", config)
        model = build_language_model(config.model, config.train, False, config.data.data_type, with_router_loss=True)
        return _with_template(model, config.data)
    from sfumato.models.diffusion.load import build_diffusion_model

    config = cast("TrainDitConfig | DiffusionRLConfig", config)
    return build_diffusion_model(config.model, seed=config.train.seed)


def _with_template(model: ModelT, data: TextDataConfig) -> ModelT:
    """The model, whose tokenizer is exported with the chat template and the end of answers that its run trained on."""
    from sfumato.data.text.format import build_transform
    from sfumato.data.text.loader import adopt_answer_end

    vision = getattr(model, "vision", None)
    transform = build_transform(data, model.tokenizer, None if vision is None else vision.reader)
    adopt_answer_end(transform, model.tokenizer)
    return model
