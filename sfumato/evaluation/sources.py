"""What a path names: a run, one of its checkpoints, or a folder of weights that any program wrote."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

from sfumato.config.file_checks import read_json_object
from sfumato.config.load import load_config
from sfumato.config.parallel import ParallelConfig
from sfumato.config.paths import find_model_folder, hub_hint
from sfumato.config.sections import ModelConfig
from sfumato.config.tasks import TASKS, schema_of
from sfumato.errors import CheckpointError, ConfigError
from sfumato.tracking.atomic_folders import MANIFEST, list_checkpoints, newest_intact, verify_checkpoint

Kind = Literal["run", "checkpoint", "pipeline", "transformers", "diffusers_adapter", "peft_adapter"]
"""``run`` stands for the model that a run started from."""

DIFFUSION_TASKS = ("train_dit", "train_dit_dpo", "rl_diffusion", "rl_diffusion_forward", "rl_diffusion_direct")
TEXT_TASKS = ("train_text", "train_text_dpo", "train_text_kto", "rl_text")

FOLDERS: dict[str, Kind] = {
    "model_index.json": "pipeline",
    "pytorch_lora_weights.safetensors": "diffusers_adapter",
    "adapter_config.json": "peft_adapter",
    "config.json": "transformers",
}
"""The file by which a folder of weights is known, in the order in which they are looked for."""

UNDERSTOOD = (
    "a run folder, a checkpoints/global_step_N of one, a pipeline of diffusers, a model of transformers, or a folder "
    "of adapters"
)

Train = TypeVar("Train", bound=ParallelConfig)


@dataclass(frozen=True)
class SourceRun:
    """The folder of a run, and how it was configured."""

    folder: Path

    @cached_property
    def task(self) -> str:
        """The name of its task. Raises ConfigError where the folder does not say."""
        try:
            task = read_json_object(self.folder / "environment.json")["task"]
        except (OSError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{self.folder} is not a run folder: {self.folder / 'environment.json'} does not name the task"
            ) from error
        if task not in TASKS:
            raise ConfigError(f"{self.folder / 'environment.json'}: there is no task {task!r} in this version")
        return task

    @cached_property
    def config(self) -> Any:
        """The resolved configuration, of its task's class. Raises ConfigError where it cannot be read."""
        return load_config(schema_of(self.task), self.folder / "config.yaml")

    @property
    def is_diffusion(self) -> bool:
        """Whether it trained a diffusion model; the others here are language models."""
        return self.task in DIFFUSION_TASKS


@dataclass(frozen=True)
class ModelSource:
    """A model, by where its weights are."""

    kind: Kind
    folder: Path
    """Of the weights; of kind ``run`` the run folder."""
    label: str
    """What tables and pages call it."""
    run: SourceRun | None = None
    """The run that it belongs to, where that is known."""
    section: str | None = None
    """Tensors of a checkpoint that are taken; None: the moving average where there is one, else the trained ones."""

    @property
    def is_diffusion(self) -> bool:
        """Whether it is a diffusion model."""
        if self.kind in ("pipeline", "diffusers_adapter"):
            return True
        return self.kind in ("run", "checkpoint") and self.run is not None and self.run.is_diffusion

    @property
    def modalities(self) -> tuple[str, ...]:
        """What it draws, as rewards name it: "image", videos too, "text" or "sound"; of videos with sound both."""
        if not self.draws_pictures:
            return ("text",)
        if self.run is None and self.kind != "pipeline":
            return ("image",)
        if self.run is not None and not self.is_diffusion:
            return ("image",)
        from sfumato.models.diffusion.load import family_of

        model = (
            ModelConfig.model_validate({"model_path": str(self.folder)}) if self.run is None else self.run.config.model
        )
        family = family_of(model)
        if family.makes_video_with_sound:
            return ("image", "sound")
        return ("sound",) if family.makes_sound else ("image",)

    @property
    def draws_pictures(self) -> bool:
        """Whether its samples are pictures, or sounds: of diffusion models, and of language models that draw codes of
        images."""
        return self.is_diffusion or (self.run is not None and getattr(self.run.config, "modality", "") == "image")


def find_sources(names: Sequence[str], with_base: bool, say: Callable[[str], None]) -> list[ModelSource]:
    """The models that paths name, in their order, with labels that differ.

    Args:
        names: run folders, folders of checkpoints, single checkpoints, folders of weights, or names on the hub whose
            files are in the local cache.
        with_base: put the model that a run started from before the run's first one.
        say: takes lines about damaged checkpoints that were passed over.

    Raises:
        CheckpointError: for a checkpoint that is damaged.
        ConfigError: for anything that holds no model.
    """
    sources: list[ModelSource] = []
    for name in names:
        for source in _sources_of(name, say):
            base = None if source.run is None else ModelSource("run", source.run.folder, "base", source.run)
            if with_base and base is not None and base not in sources:
                check_task(base)
                sources.append(base)
            check_task(source)
            sources.append(source)
    return _with_different_labels(sources)


def first_run(sources: Sequence[ModelSource]) -> SourceRun | None:
    """The first run among the sources; None where all are folders of weights."""
    return next((source.run for source in sources if source.run is not None), None)


def run_with_prompts(sources: Sequence[ModelSource]) -> SourceRun:
    """The first run among the sources, whose evaluation has prompts. Raises ConfigError where there is none."""
    run = first_run(sources)
    if run is None:
        raise ConfigError("a folder of weights has no prompts of its own: give --prompt TEXT or --prompts FILE")
    return run


def one_process(train: Train) -> Train:
    """The section train of a run for a single process that only computes: no parallelism, nothing saved in memory.

    Precision and compilation stay, so that the bits are those of the run in one process.
    """
    fields = ParallelConfig.model_fields.items()
    defaults = {name: field.get_default() for name, field in fields if name != "compile"}
    return train.model_copy(update=defaults | {"data_parallel_mode": "ddp", "init_device": "cpu"})


def _sources_of(name: str, say: Callable[[str], None]) -> list[ModelSource]:
    """The sources that one path names."""
    try:
        folder = Path(find_model_folder(name))
    except ValueError as error:
        raise ConfigError(f"{name!r}: {error}") from error
    if not folder.is_dir():
        hint = hub_hint(name)
        problem = "is a file" if folder.is_file() else f"does not exist{hint}"
        raise ConfigError(f"{name} {problem}; give {UNDERSTOOD}")
    if folder.name == "checkpoints" and (folder.parent / "config.yaml").is_file():
        run = SourceRun(folder.parent)
        sources = []
        for step, checkpoint in sorted(list_checkpoints(folder).items()):
            verify_checkpoint(checkpoint)
            sources.append(ModelSource("checkpoint", checkpoint, f"step {step}", run))
        if not sources:
            raise CheckpointError(f"{folder} is empty: the run has saved nothing")
        return sources
    if (folder / "config.yaml").is_file() and (folder / "environment.json").is_file():
        return [_newest_of(SourceRun(folder), say)]
    if (folder / MANIFEST).is_file() or folder.name.startswith("global_step_"):
        verify_checkpoint(folder)
        step = folder.name.removeprefix("global_step_")
        return [ModelSource("checkpoint", folder, f"step {step}", SourceRun(folder.absolute().parent.parent))]
    return [_weights_in(folder)]


def _newest_of(run: SourceRun, say: Callable[[str], None]) -> ModelSource:
    """The newest intact checkpoint of a run, or where it has none its export."""
    newest = newest_intact(list_checkpoints(run.folder / "checkpoints"), say, remedy=describe_export_of(run.folder))
    if newest is not None:
        step, checkpoint = newest
        return ModelSource("checkpoint", checkpoint, f"step {step}", run)
    if (run.folder / "hf_ckpt").is_dir():
        return replace(_weights_in(run.folder / "hf_ckpt"), run=run)
    raise CheckpointError(f"{run.folder} has neither checkpoints nor hf_ckpt: the run has saved nothing yet")


def describe_export_of(run: Path) -> str:
    """What there is of a run none of whose checkpoints is intact, for messages."""
    exported = run / "hf_ckpt"
    return f"{exported} has the weights of its last export" if exported.is_dir() else "the run has no export, either"


def _weights_in(folder: Path) -> ModelSource:
    """A folder that another program could load. Raises ConfigError where it is none."""
    of_run = folder.name == "hf_ckpt" and (folder.parent / "environment.json").is_file()
    run = SourceRun(folder.parent) if of_run else None
    label = f"{folder.absolute().parent.name}/hf_ckpt" if of_run else folder.absolute().name
    for file, kind in FOLDERS.items():
        if (folder / file).is_file():
            return ModelSource(kind, folder, label, run)
    raise ConfigError(f"{folder} holds no model: give {UNDERSTOOD}")


def check_task(source: ModelSource) -> None:
    """Raises ConfigError for a checkpoint of a task whose models neither draw nor answer here."""
    run = source.run
    if source.kind not in ("run", "checkpoint") or run is None:
        return
    if run.task not in DIFFUSION_TASKS + TEXT_TASKS:
        why = {
            "train_text_reward": "a reward model gives one number for a text: score with the reward text_reward_model",
            "train_autoencoder": "an autoencoder has no prompts",
            "train_image_tokenizer": "an image tokenizer has no prompts",
            "train_omni": "its models answer and draw in tasks/rl_text.py and in transformers, from its hf_ckpt",
        }
        raise ConfigError(f"{run.folder}: models of tasks/{run.task}.py are not sampled: {why.get(run.task, run.task)}")


def _with_different_labels(sources: list[ModelSource]) -> list[ModelSource]:
    """Sources whose labels differ: equal ones get the name of their run, or their path."""

    def relabelled(sources: list[ModelSource], name_of: Callable[[ModelSource], str]) -> list[ModelSource]:
        labels = [source.label for source in sources]
        return [
            replace(source, label=name_of(source)) if labels.count(source.label) > 1 else source for source in sources
        ]

    def name_of_run(source: ModelSource) -> str:
        return source.label if source.run is None else f"{source.run.folder.absolute().name} {source.label}"

    sources = relabelled(sources, name_of_run)
    sources = relabelled(sources, lambda source: f"{source.folder} ({source.label})")
    labels = [source.label for source in sources]
    counts = [labels[: index + 1].count(label) for index, label in enumerate(labels)]  # of a model that is named twice
    return [
        replace(source, label=f"{source.label} #{count}") if count > 1 else source
        for source, count in zip(sources, counts, strict=True)
    ]


PICTURES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")


def is_picture_folder(folder: Path) -> bool:
    """Whether a folder holds pictures and no model."""
    if not folder.is_dir() or any((folder / name).exists() for name in (*FOLDERS, "config.yaml", "checkpoints")):
        return False
    return any(path.suffix.lower() in PICTURES for path in folder.rglob("*"))
