"""Benchmarks of lm-evaluation-harness with this library's forward passes and engine (extra ``evaluation``)."""

from __future__ import annotations

import logging
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sfumato.config.open_mappings import JsonObject
from sfumato.errors import ConfigError, MissingDependencyError

if TYPE_CHECKING:
    from sfumato.evaluation.texts import TextModel

DATA_ERRORS = (OSError, ValueError, KeyError, RuntimeError, ImportError)
"""What loading a task raises when its data or a package of its metrics is not here."""


@dataclass
class HarnessResults:
    """What the harness found."""

    by_document: dict[str, dict[tuple[Hashable, int], float]] = field(default_factory=dict)
    """Values of each document by metric."""
    aggregated: dict[str, float] = field(default_factory=dict)
    """Metrics that are no mean of values of single documents, such as perplexity."""


def run_tasks(
    model: TextModel,
    tasks: Sequence[str],
    task_folder: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    with_chat_template: bool = False,
) -> HarnessResults:
    """Runs tasks of the harness on a model.

    Args:
        model: answers, and says how likely texts are.
        tasks: names.
        task_folder: with YAML files of further tasks.
        num_fewshot: examples before each question; None: as each task says.
        limit: documents of each task.
        with_chat_template: show documents as messages of a chat, behind the template's system prompt.

    Raises:
        ConfigError: when there is no such task, or its data is not here.
        MissingDependencyError: when the harness is not installed.
    """
    try:
        from lm_eval.evaluator import simple_evaluate
        from lm_eval.tasks import TaskManager

        from sfumato.evaluation.harness_model import HarnessModel
    except ImportError as error:
        raise MissingDependencyError(
            f"--tasks needs lm-evaluation-harness: pip install 'sfumato[evaluation]' ({error})"
        ) from error
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    if task_folder is not None and not task_folder.is_dir():
        raise ConfigError(f"--task-folder {task_folder} is no folder")
    names = [name.strip() for name in tasks if name.strip()]
    manager = None
    if task_folder is not None:  # to read the harness's own thousands of files takes half a minute
        manager = TaskManager(include_path=str(task_folder), include_defaults=False)
    if manager is None or not all(manager.match_tasks([name]) for name in names):
        manager = TaskManager(include_path=None if task_folder is None else str(task_folder))
    unknown = [name for name in names if not manager.match_tasks([name])]
    if unknown or not names:
        raise ConfigError(f"--tasks: the harness has no task {unknown[0] if unknown else 'without a name'!r}")
    try:
        manager.load(names)
    except DATA_ERRORS as error:
        raise ConfigError(
            f"--tasks {','.join(names)} cannot be loaded: {type(error).__name__}: {str(error)[:300]}; the data of a "
            "task must be in the local cache, or downloadable"
        ) from error
    if with_chat_template and model.template.chat is None:
        raise ConfigError("--apply-chat-template: the model's tokenizer has no chat template: leave it out")
    report = simple_evaluate(
        model=HarnessModel(model),
        tasks=cast(Any, names),
        num_fewshot=num_fewshot,
        limit=limit,
        apply_chat_template=with_chat_template,
        system_instruction=model.template.system_prompt if with_chat_template else None,
        task_manager=manager,
        bootstrap_iters=0,
    )
    assert report is not None  # this is the only process
    return _collect(cast("JsonObject", report))


def _collect(report: JsonObject) -> HarnessResults:
    """Values of documents where their mean is what the harness reports, else what it reports."""
    results = HarnessResults()
    for task, samples in report["samples"].items():
        values: dict[tuple[str, str], dict[tuple[Hashable, int], Any]] = {}
        for sample in samples:
            for metric in sample["metrics"]:
                values.setdefault((metric, sample["filter"]), {})[sample["doc_id"], 0] = sample[metric]
        for (metric, filter_name), by_document in values.items():
            name = f"{task} {metric}" if filter_name == "none" else f"{task} {metric} ({filter_name})"
            reported = float(report["results"][task][f"{metric},{filter_name}"])
            scalars = {key: float(value) for key, value in by_document.items() if isinstance(value, (int, float))}
            is_mean = len(scalars) == len(by_document) and math.isclose(
                sum(scalars.values()) / len(scalars), reported, rel_tol=1e-9, abs_tol=1e-12
            )
            if is_mean:
                results.by_document[name] = scalars
            else:
                results.aggregated[name] = reported
    return results
