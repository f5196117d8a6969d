"""The run folder at the start of a run: which run is in it, whether this run may begin there, and the id of this run.

Until the model, the data and the checkpoint have been opened, a start only reads: a run that is refused until then
leaves every file as it was. No run begins in a folder that holds another run.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import importlib.metadata
import json
import os
import platform
import secrets
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sfumato.config.base import Section, flatten
from sfumato.config.hub import describe_moved_names
from sfumato.config.open_mappings import JsonObject
from sfumato.config.writing import write_atomically
from sfumato.config.yaml_text import config_text, read_yaml
from sfumato.errors import ConfigError, FolderError
from sfumato.parallel.finite import list_first
from sfumato.parallel.mesh import Mesh
from sfumato.tracking.atomic_folders import (
    MANIFEST,
    flush,
    list_checkpoints,
    read_mapping,
    read_run_id,
    read_values,
    set_later_aside,
)
from sfumato.tracking.json_lines import read_jsonl
from sfumato.tracking.lock import FolderLock, lock_folder
from sfumato.tracking.next_steps import finished_lines, rerun_command
from sfumato.tracking.source_code import code_digest

if TYPE_CHECKING:
    from sfumato.config.sections import TrainConfig

PACKAGES = ("torch", "diffusers", "transformers", "peft", "numpy", "safetensors", "pillow", "rapidocr", "onnxruntime")


def environment_of(mesh: Mesh) -> dict[str, object]:
    """Versions, commit and hardware, for ``environment.json``."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    commit = ""
    if shutil.which("git"):
        command = ["git", "rev-parse", "HEAD"]
        result = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent, check=False)
        commit = result.stdout.strip()
    return {
        "python": platform.python_version(),
        "packages": versions,
        "git_commit": commit or None,
        "source_code": code_digest(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "cpu_kernels": {"torch": torch.backends.cpu.get_cpu_capability(), "MKL_CBWR": os.environ.get("MKL_CBWR")},
        "float32_products": torch.get_float32_matmul_precision(),
        "float32_convolutions_tf32": mesh.device.type == "cuda" and torch.backends.cudnn.allow_tf32,
        "device": torch.cuda.get_device_name() if mesh.device.type == "cuda" else "cpu",
        "num_processes": mesh.size,
        "command": sys.argv,
        "slurm_job": os.environ.get("SLURM_JOB_ID"),
    }


ENVIRONMENT = "environment.json"

DATE = "date"
"""Key of ``environment.json`` for the date of the run's first start."""

OWN_FOLDER = {"train.output_dir", "train.load_checkpoint_path"}
"""Fields in which a configuration may differ and still be the same run."""

CACHES = ("tokens", "processes.json")
"""Files that a run makes in its folder before it begins; they stay there when an earlier run is moved aside."""

LONGEST_VALUE = 40
"""Characters of a value that an error shows."""


@dataclass(frozen=True)
class Standing:
    """A run whose files are in a folder."""

    run_id: str | None
    """The run's id; None where neither ``environment.json`` nor the newest checkpoint holds one."""
    forked_from: str | None
    """The run whose checkpoint it began with."""
    finished: bool
    step: int
    """The last step with metrics."""
    total_steps: int | None
    newest: int | None
    """Step of the newest checkpoint."""
    config: JsonObject = field(repr=False)
    """Values of the configuration by dotted name."""


def look_at(folder: Path) -> Standing | None:
    """The run whose files are in a folder; None when there is none that has made a step or a checkpoint."""
    metrics = folder / "metrics.jsonl"
    checkpoints = list_checkpoints(folder / "checkpoints")
    has_metrics = metrics.is_file() and metrics.stat().st_size > 0
    if not has_metrics and not checkpoints:
        return None
    environment = read_environment(folder)
    lines = read_jsonl(metrics) if has_metrics else []
    newest = max(checkpoints, default=None)
    return Standing(
        run_id=environment.get("run_id") or (None if newest is None else read_run_id(checkpoints[newest])),
        forked_from=(environment.get("forked_from") or {}).get("run_id"),
        finished=bool(environment.get("finished")),
        step=max((line["step"] for line in lines), default=newest or 0),
        total_steps=environment.get("total_steps"),
        newest=newest,
        config=_read_config(folder),
    )


def _read_config(folder: Path) -> JsonObject:
    """The configuration in a run's folder by dotted name. One that is missing or damaged is empty: nothing is compared
    with it."""
    try:
        config = read_yaml(folder / "config.yaml")
    except ConfigError:
        return {}
    return flatten(config) if config else {}


def read_environment(folder: Path) -> JsonObject:
    """The content of a run folder's ``environment.json``; empty when it is missing or damaged."""
    return read_mapping(folder / ENVIRONMENT)


def run_date(train: TrainConfig) -> datetime.date:
    """The date of a run's first start, which chat templates show as today's in every resumed run, too.

    Args:
        train: the train section, with the folder and the checkpoint that the run goes on from.

    Returns:
        Today where the run begins now, or began before dates were stored.
    """
    wanted = train.load_checkpoint_path
    if wanted not in (None, "new"):
        folder = _folder_of_checkpoint(wanted, train.output_dir)
        with contextlib.suppress(TypeError, ValueError):
            return datetime.date.fromisoformat(read_environment(folder).get(DATE))  # type: ignore[arg-type]
    return _today(str(train.output_dir))


def _folder_of_checkpoint(wanted: str, output_dir: str | Path) -> Path:
    """The folder of the run that a value of ``train.load_checkpoint_path`` goes on from."""
    return Path(output_dir) if wanted == "auto" else Path(wanted).absolute().parent.parent


@functools.cache
def _today(_output_dir: str) -> datetime.date:
    """Today's date, asked once for each run folder of this process: a run may go on past midnight."""
    return datetime.date.today()


def describe_absent_checkpoint(config: Section) -> str:
    """Why ``train.load_checkpoint_path`` names no finished checkpoint; empty where it does, or names none."""
    wanted = config.train.load_checkpoint_path  # type: ignore[attr-defined]
    if wanted in (None, "auto", "new") or (Path(wanted) / MANIFEST).is_file():
        return ""
    problem = f"has no {MANIFEST}: not a finished checkpoint" if Path(wanted).exists() else "does not exist"
    return f"train.load_checkpoint_path: {wanted} {problem}"


class StartPlan:
    """What a start does in its run folder. Making one only reads."""

    def __init__(self, config: Section) -> None:
        """Looks at the folder and checks whether the run may begin there.

        Args:
            config: of the task.

        Raises:
            FolderError: when the folder holds a run that this one does not resume.
        """
        self.path = Path(config.train.output_dir)  # type: ignore[attr-defined]
        self.wanted: str | None = config.train.load_checkpoint_path  # type: ignore[attr-defined]
        self._config = config
        self.standing = look_at(self.path)
        self.names_checkpoint = self.wanted not in (None, "auto", "new")
        self.source_id = read_run_id(Path(str(self.wanted))) if self.names_checkpoint else None
        """Id of the run whose checkpoint the configuration names by its path."""
        self._moves = self.standing is not None and self._decide(self.standing)
        if self._moves:
            self._check_move()

    def describe(self) -> str:
        """What the start will do where a run stands or a checkpoint is named; empty where neither is so."""
        standing = self.standing
        if self._moves:
            return f"an earlier run stands in {self.path}: a start moves it to {self._kept_name()}"
        if self.wanted in (None, "new"):
            return ""
        if self.names_checkpoint:
            verb = "goes back to" if self._is_own_checkpoint else "begins, as a fork, from"
            return f"a start {verb} {self.wanted}"
        if standing is None or standing.newest is None:
            return f"{self.path} holds no checkpoint: load_checkpoint_path auto starts where the run began, or anew"
        if self.is_complete:
            return f"{self.path} holds this run, finished: nothing is left to do. A larger --train.max_steps goes on"
        others = f" with other settings: {', '.join(self.differences)}" if self.differences else ""
        return f"{self.path} holds {self._describe_standing(standing)}: a start goes on with it{others}"

    @property
    def from_step(self) -> int:
        """The step of the checkpoint that the start will probably go on from; 0 without one."""
        if self.names_checkpoint:
            step = read_values(Path(str(self.wanted))).get("step")
            return step if isinstance(step, int) else 0
        return (self.wanted == "auto" and self.standing is not None and self.standing.newest) or 0

    def check_steps(self, total_steps: int, from_step: int) -> None:
        """Raises FolderError when nothing is left to do, and the folder or the checkpoint is another run's.

        Args:
            total_steps: of the whole run.
            from_step: the step of the checkpoint that it goes on from; 0 without one.
        """
        if self.standing is not None and self.standing.finished and from_step >= total_steps and self.differences:
            raise FolderError(
                f"{self.path} holds a finished run ({self.standing.step} steps), so that nothing is left to do, but "
                f"this configuration differs in {list_first(self.differences)}: give it a folder of its own, "
                f"--train.output_dir {self._other_name()}{self._describe_fork(self.standing)}"
            )
        if self.names_checkpoint and not self._is_own_checkpoint and from_step >= total_steps:
            more = rerun_command(train__max_steps=2 * from_step)
            raise FolderError(
                f"{self.wanted} is of step {from_step}, and this run ends after {total_steps}: nothing is left to do. "
                f"A larger --train.max_steps goes on{f': {more}' if more else ''}"
            )

    @property
    def differences(self) -> list[str]:
        """Fields in which this configuration differs from that of the run in the folder, with both values."""
        return [] if self.standing is None else self._differences_from(self.standing.config)

    def _differences_from(self, other: JsonObject) -> list[str]:
        """Fields in which this configuration differs from another run's, with both values; none from an empty one."""
        config = flatten(self._config.model_dump(mode="json"))
        return list_differences(config, other, ("here", "there"), without=OWN_FOLDER) if other else []

    @property
    def is_complete(self) -> bool:
        """Whether ``auto`` would go on with a run that has finished with this configuration and left its weights."""
        standing = self.standing
        return (
            self.wanted == "auto"
            and standing is not None
            and standing.finished
            and standing.total_steps == standing.newest == self._config.train.max_steps  # type: ignore[attr-defined]
            and (self.path / "hf_ckpt").is_dir()
            and not self.differences
        )

    @property
    def _is_own_checkpoint(self) -> bool:
        """Whether the checkpoint that the configuration names is of the run in the folder."""
        return self.standing is not None and self.standing.run_id == self.source_id

    def _decide(self, standing: Standing) -> bool:
        """Whether the run in the folder is moved aside. Raises FolderError when this one may not begin here."""
        if self.wanted == "new":
            return True
        if self.wanted == "auto":
            return False
        if self.wanted is not None:
            if standing.run_id == self.source_id:
                return False
            if standing.newest is None:
                return not standing.finished and standing.forked_from != self.source_id
            raise FolderError(
                f"{self.path} holds {self._describe_standing(standing)}, and {self.wanted} is of another one: give "
                f"this run a folder of its own, --train.output_dir {self._other_name()}"
            )
        start_anew = f"--train.load_checkpoint_path new moves it to {self._kept_name()} and starts from the first step"
        elsewhere = f"--train.output_dir {self._other_name()} gives this one a folder of its own"
        differences = f" This one differs in {list_first(self.differences)}." if self.differences else ""
        if standing.finished:
            raise FolderError(
                f"{self.path} holds {self._describe_standing(standing)}, which stays.{differences} {elsewhere} and "
                f"starts from the first step; {start_anew}{self._describe_fork(standing)}"
            )
        if standing.newest is None:
            return True
        raise FolderError(
            f"{self.path} holds {self._describe_standing(standing)}.{differences} --train.load_checkpoint_path auto "
            f"goes on with it; {start_anew}; {elsewhere}"
        )

    def _describe_standing(self, standing: Standing) -> str:
        """How far the run in the folder is, for messages."""
        of = f" of {standing.total_steps}" if standing.total_steps is not None else ""
        if standing.finished:
            return f"a finished run ({standing.step} steps)"
        return f"an unfinished run (step {standing.step}{of}, newest checkpoint of step {standing.newest})"

    def _describe_fork(self, standing: Standing) -> str:
        """How to go on from a finished run with this configuration, as the end of a message."""
        if standing.newest is None:
            return ""
        wanted = {"train__load_checkpoint_path": self.path, "train__output_dir": self._other_name()}
        command = rerun_command(**wanted, train__max_steps=2 * standing.newest)
        return f". To go on from its step {standing.newest} with these settings: {command}" if command else ""

    def _check_move(self) -> None:
        """Raises FolderError when moving the folder aside would move other runs, or files that this run needs."""
        root = self.path.resolve()
        inner = [path.parent for level in ("*", "*/*") for path in root.glob(f"{level}/{ENVIRONMENT}")]
        if runs := sorted(str(folder.relative_to(root)) for folder in inner if (folder / "config.yaml").is_file()):
            raise FolderError(
                f"{self.path} holds an earlier run, which would be moved aside, and in folders of their own other runs "
                f"({list_first(runs)}), which would be moved with it: give this run a folder of its own, "
                f"--train.output_dir {self._other_name()}"
            )
        for name, path in self._configured_paths():
            if name != "data.cache_dir" and path.resolve().is_relative_to(root):
                raise FolderError(
                    f"{name} {path} lies in {self.path}, where an earlier run stands that would be moved aside: give "
                    f"this run a folder of its own, --train.output_dir {self._other_name()}"
                )
        if Path.cwd().is_relative_to(root):
            raise FolderError(
                f"an earlier run stands in train.output_dir {self.path}, which holds the working directory and cannot "
                "be moved aside: give another train.output_dir"
            )

    def _configured_paths(self) -> Iterator[tuple[str, Path]]:
        """Existing files and folders that the configuration names, with the names of the fields."""
        for name, value in flatten(self._config.model_dump(mode="json")).items():
            if name == "train.output_dir":
                continue
            for text in value if isinstance(value, list) else [value]:
                for part in text.split(",") if isinstance(text, str) else []:
                    with contextlib.suppress(OSError, ValueError):  # a text that is no path
                        if os.sep in part and (path := Path(part.strip())).exists():
                            yield name, path

    def _kept_name(self) -> Path:
        """The folder that an earlier run is moved to."""
        return self._free_name(".", 1)

    def _other_name(self) -> Path:
        """A folder to suggest for another run."""
        return self._free_name("_", 2)

    def _free_name(self, separator: str, number: int) -> Path:
        """The folder's name with the first number that is free, from ``number`` on, beside what a link leads to."""
        root = self.path.resolve()
        while root.with_name(f"{root.name}{separator}{number}").exists():
            number += 1
        parent = root.parent if self.path.is_symlink() else self.path.parent
        return parent / f"{root.name}{separator}{number}"


class RunFolder(StartPlan):
    """The folder of a run that has been started; only rank 0 has one."""

    def __init__(self, config: Section, say: Callable[[str], None]) -> None:
        """Locks the folder and checks whether this run may begin there. Nothing but the lock is written.

        Args:
            config: of the task.
            say: takes a line for the person who watches.

        Raises:
            FolderError: when another run is at work there, or the folder holds a run that this one does not resume.
        """
        self._say = say
        self.lock: FolderLock = lock_folder(Path(config.train.output_dir), say)  # type: ignore[attr-defined]
        try:
            super().__init__(config)
        except BaseException:
            self.lock.release()
            raise

    def begin(self, total_steps: int, from_step: int, environment: Mapping[str, object]) -> None:
        """Takes the folder for this run: moves an earlier run aside, and writes configuration and environment.

        Args:
            total_steps: of the whole run.
            from_step: the step of the checkpoint that it goes on from; 0 without one.
            environment: further entries of ``environment.json``.

        Raises:
            FolderError: when the lock was lost, or a finished run would get the configuration of another one.
        """
        self.lock.check()
        self.check_steps(total_steps, from_step)
        if self.wanted not in (None, "new") and from_step:
            if from_step > total_steps:
                self._say(
                    f"the checkpoint is of step {from_step}, and this run ends after {total_steps}: nothing is "
                    "trained. A larger --train.max_steps goes on"
                )
            elif from_step < total_steps:
                self._say_what_changed(from_step, environment.get("source_code"))
        if self._moves:
            self._move_aside()
        goes_back = self.names_checkpoint and self._is_own_checkpoint
        if goes_back and (aside := set_later_aside(self.path / "checkpoints", from_step)):
            self._say(f"of later steps, and removed by the next save: {', '.join(aside)}")
        if self.wanted not in (None, "new"):
            for line in describe_moved_names(flatten(self._config.model_dump(mode="json"))):
                self._say(line)
        date = run_date(self._config.train).isoformat()  # type: ignore[attr-defined]
        environment_file = {**environment, **self._identity_entries(from_step), "total_steps": total_steps, DATE: date}
        write_atomically(self.path / "config.yaml", config_text(self._config).encode())
        write_json(self.path / ENVIRONMENT, environment_file)

    def _say_what_changed(self, from_step: int, source_code: object) -> None:
        """Says of a resume with which source code and settings it goes on, where the steps before had others.

        Every setting that a resume may change is named, since some change the mathematics, such as ``dpo.beta``, and
        ``config.yaml`` holds those of the last start alone.
        """
        folder = _folder_of_checkpoint(str(self.wanted), self.path)
        before = read_environment(folder).get("source_code")
        if before not in (None, source_code):
            self._say(f"step {from_step + 1} and later run other source code of sfumato than the steps before")
        if differences := self._differences_from(_read_config(folder)):
            self._say(f"step {from_step + 1} and later have other settings than {folder}: {', '.join(differences)}")

    def add_environment(self, values: Mapping[str, object]) -> None:
        """Adds entries to ``environment.json`` that are known only after the run has begun."""
        write_json(self.path / ENVIRONMENT, {**read_environment(self.path), **values})

    def finish(self) -> None:
        """Marks the run as finished."""
        self.add_environment({"finished": datetime.datetime.now().astimezone().isoformat(timespec="seconds")})

    def say_next_steps(self, task: str, total_steps: int) -> None:
        """Says what people do with a finished run."""
        for line in finished_lines(self.path, task, total_steps, self._other_name()):
            self._say(line)

    def _identity_entries(self, from_step: int) -> dict[str, object]:
        """The entries of ``environment.json`` that identify the run: its id, and the run that it was forked from.

        A resumed run keeps both.
        """
        standing = self.standing if not self._moves else None
        fresh: dict[str, object] = {"run_id": secrets.token_hex(8)}
        if self.wanted in (None, "new"):
            return fresh
        if self.wanted == "auto" or (standing is not None and standing.run_id == self.source_id):
            origin = read_environment(self.path).get("forked_from")
            run_id = (standing and standing.run_id) or fresh["run_id"]
            return {"run_id": run_id, **({"forked_from": origin} if origin else {})}
        self._say(
            f"{self.wanted} is of another run ({self.source_id or 'without an id'}): this one is a fork of it, with an "
            f"id of its own ({fresh['run_id']}) and metrics from step {from_step + 1} on"
        )
        return {**fresh, "forked_from": {"run_id": self.source_id, "checkpoint": str(self.wanted)}}

    def _move_aside(self) -> None:
        """Renames the folder of the earlier run, and moves caches of this run back into the new folder."""
        root = self.path.resolve()
        moved_folder = self._kept_name()
        caches = {Path(cache) for cache in CACHES}
        caches |= {
            path.resolve().relative_to(root)
            for _, path in self._configured_paths()
            if path.resolve().is_relative_to(root)
        }
        self.lock.move_folder(root.with_name(moved_folder.name))
        for cache in caches:
            if (moved_folder / cache).exists():
                (self.path / cache).parent.mkdir(parents=True, exist_ok=True)
                (moved_folder / cache).rename(self.path / cache)
        self._say(f"an earlier run stood in {self.path}; it is now {moved_folder}")


def check_same_settings(config: Section, mesh: Mesh) -> None:
    """Checks that all processes of a run have the same configuration. Every rank must call it.

    Each would otherwise train its part with its own settings, or wait for steps that others do not take.

    Raises:
        ConfigError: on every rank; names the first rank that differs from rank 0, its host and its settings.
    """
    settings = flatten(config.model_dump(mode="json"))
    places = (f"on rank {mesh.rank}, {platform.node()}", "on rank 0")
    problem = list_first(list_differences(settings, mesh.first(settings, among="world"), places))
    if problems := [text for text in mesh.gather(problem, over="world") if text]:
        raise ConfigError(
            f"the processes of this run have different settings: {problems[0]}. Start it with the same configuration "
            "and options on every node"
        )


def list_differences(
    config: JsonObject, other: JsonObject, places: tuple[str, str], without: Collection[str] = frozenset()
) -> list[str]:
    """Names of the fields in which two configurations differ, with the values of both.

    Args:
        config: values by dotted name.
        other: the same of the other configuration, whose values are named first.
        places: what the places of the two are called.
        without: names that are left out.
    """
    differences = []
    for name in dict.fromkeys([*config, *other]):
        if name not in without and other.get(name) != config.get(name):
            there, here = _shorten_pair(other.get(name), config.get(name))
            differences.append(f"{name} ({there} {places[1]}, {here} {places[0]})")
    return differences


def write_json(path: Path, value: object) -> None:
    """Writes a JSON file atomically, so that it survives a power failure."""
    write_atomically(path, json.dumps(value, indent=1).encode())
    flush(path.parent)


def _shorten_pair(before: object, after: object) -> tuple[str, str]:
    """Two values of the configuration in at most 46 characters, around the first one in which they differ."""
    texts = [json.dumps(value, default=str) for value in (before, after)]
    letters = zip(*texts, strict=False)
    shared = next((place for place, (one, other) in enumerate(letters) if one != other), min(map(len, texts)))
    start = max(shared - LONGEST_VALUE // 2, 0) if max(map(len, texts)) > LONGEST_VALUE else 0
    stop = start + LONGEST_VALUE
    before_text, after_text = (
        f"{'...' if start else ''}{text[start:stop]}{'...' if len(text) > stop else ''}" for text in texts
    )
    return before_text, after_text
