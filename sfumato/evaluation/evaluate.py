"""Evaluates models: by rewards of what they draw, by distances of pictures, or by benchmarks of a harness."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from sfumato.data.prompt_loader import check_prompts
from sfumato.errors import ConfigError
from sfumato.evaluation.generate import PromptChoice, draw_samples
from sfumato.evaluation.options import GenerationOptions
from sfumato.evaluation.results import Evaluation
from sfumato.evaluation.samples_folder import SamplesFolder, choose_folder
from sfumato.evaluation.scoring import (
    ModelCounts,
    SampleScorer,
    ScoredSample,
    add_fractions,
    add_rewards,
    choose_rewards,
)
from sfumato.evaluation.sources import ModelSource, is_picture_folder

if TYPE_CHECKING:
    from sfumato.evaluation.distances import PictureDistances
    from sfumato.rewards.base import Reward

RowCheck = Callable[[str, Mapping[str, object]], object]


def evaluate_samples(
    sources: Sequence[ModelSource],
    prompts: PromptChoice,
    options: GenerationOptions,
    *,
    rewards: Sequence[str] = (),
    num_samples: int = 1,
    by: str | None = None,
    reference: Path | None = None,
    features: Path | None = None,
    out: Path | None = None,
) -> tuple[Evaluation, SamplesFolder]:
    """Draws samples of all models for the same prompts and seeds, and scores them.

    Args:
        sources: models; the first is what the others are compared with.
        prompts: which prompts.
        options: how samples are drawn.
        rewards: as of ``choose_rewards``; none, with a ``reference``, scores distances alone.
        num_samples: of each prompt and model.
        by: column of the prompts; each of its values gets a mean of its own.
        reference: folder of pictures for FID and KID.
        features: of ``load_features``.
        out: as of ``choose_folder``; it is made when the first samples are there.

    Returns:
        The results, and the folder that the samples were written to.

    Raises:
        UserError: when something is missing or does not fit.
    """
    draws_pictures = sources[0].draws_pictures
    network = None if reference is None else _load_distances(draws_pictures, reference, features, options)
    scorer = None
    if rewards or network is None:
        scorer = SampleScorer(choose_rewards(rewards, sources))
        scorer.check_modality(sources[0].modalities)
    evaluation = Evaluation([source.label for source in sources])
    scored: list[ScoredSample] = []
    seen: list[Tensor] = []
    counted: list[ModelCounts] = []
    written: SamplesFolder | None = None

    def check(chosen: list[Any]) -> None:
        _check_rows(chosen, [] if scorer is None else scorer.rewards, by)

    try:
        for drawn in draw_samples(sources, prompts, options, num_samples, check):
            samples = drawn.samples
            label = drawn.source.label
            if written is None:
                written = SamplesFolder(choose_folder(out, "evaluation"))
                evaluation.notes.append(drawn.settings)
            if scorer is not None:
                samples, messages, counts = scorer.score(samples)
                counted.append((label, counts))
                for message in messages:
                    options.say(f"{label}: {message}")
                    evaluation.notes.append(f"{label}: {message}")
            if network is not None:
                seen.append(network.features_of([named.sample.pixels for named in samples if not named.sample.damage]))
            for named in samples:
                written.add(named)
                group = None if by is None else str(named.sample.metadata[by])
                scored.append(ScoredSample(label, (named.prompt_id, named.seed), named.rewards, group))
            if drawn.is_last:
                options.say(f"{label}: {sum(sample.model == label for sample in scored)} samples")
                for name, value in ({} if network is None else network.distances(torch.cat(seen))).items():
                    evaluation.add_value(label, name, value)
                seen = []
    finally:
        if scorer is not None:
            scorer.close()
    assert written is not None
    if written.left_out:
        options.say(written.left_out)
        evaluation.notes.append(written.left_out)
    add_rewards(evaluation, scored, by)
    add_fractions(evaluation, counted)
    evaluation.notes += [f"{source.label}: {source.folder}" for source in sources]
    if network is not None:
        evaluation.notes.append(network.describe())
    return evaluation, written


def _load_distances(
    draws_pictures: bool, reference: Path, features: Path | None, options: GenerationOptions
) -> PictureDistances:
    if not draws_pictures:
        raise ConfigError("--reference compares pictures, and these models answer in text: leave it out")
    from sfumato.evaluation.distances import PictureDistances

    assert features is not None
    return PictureDistances(reference, features, options.find_device())


def evaluate_pictures_in_folders(
    folders: Sequence[Path], reference: Path, features: Path, options: GenerationOptions
) -> Evaluation:
    """FID and KID of folders of pictures.

    Raises:
        ConfigError: when one is no folder of pictures, or the network cannot be loaded.
        DataError: when a picture is broken.
    """
    from sfumato.evaluation.distances import PictureDistances, read_pictures

    other = next((folder for folder in folders if not is_picture_folder(folder)), None)
    if other is not None:
        raise ConfigError(f"{other} is no folder of pictures: evaluate folders and models in two commands")
    network = PictureDistances(reference, features, options.find_device())
    evaluation = Evaluation([str(folder) for folder in folders])
    for folder in folders:
        for name, value in network.distances(network.features_of(read_pictures(folder))).items():
            evaluation.add_value(str(folder), name, value)
    evaluation.notes.append(network.describe())
    return evaluation


def evaluate_tasks(
    sources: Sequence[ModelSource],
    tasks: Sequence[str],
    options: GenerationOptions,
    *,
    task_folder: Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    with_chat_template: bool = False,
) -> Evaluation:
    """Benchmarks of language models by lm-evaluation-harness, through this library's forward passes and engine.

    Args:
        sources: models; the first is what the others are compared with.
        tasks: names of the harness.
        options: how models are loaded.
        task_folder: with YAML files of further tasks.
        num_fewshot: examples before each question; None: as each task says.
        limit: documents of each task.
        with_chat_template: show documents as messages of a chat.

    Raises:
        ConfigError: when there is no such task, its data is not here, a model draws pictures, or an option would have
            no effect.
        MissingDependencyError: when the harness is not installed.
    """
    options.refuse(("max_new_tokens", "temperature", "top_p", "top_k"), "on --tasks, which say how answers are drawn")
    if not with_chat_template:
        options.refuse(("system_prompt",), "on --tasks without --apply-chat-template")
    if any(source.is_diffusion for source in sources):
        raise ConfigError("--tasks is for language models, and one of these draws pictures")
    from sfumato.evaluation.harness import run_tasks
    from sfumato.evaluation.texts import text_models

    evaluation = Evaluation([source.label for source in sources])
    by_metric: dict[str, dict[str, dict[tuple[Hashable, int], float]]] = {}
    for source, model in text_models(sources, options):
        results = run_tasks(model, tasks, task_folder, num_fewshot, limit, with_chat_template)
        for metric, by_document in results.by_document.items():
            by_metric.setdefault(metric, {})[source.label] = by_document
        for metric, value in results.aggregated.items():
            evaluation.add_value(source.label, metric, value)
        options.say(f"{source.label}: {len(results.by_document) + len(results.aggregated)} metrics")
    for metric, by_model in by_metric.items():
        evaluation.add_metric(metric, by_model)
    evaluation.notes += [f"{source.label}: {source.folder}" for source in sources]
    return evaluation


def _check_rows(prompts: list[Any], rewards: Sequence[Reward], by: str | None) -> None:
    """Raises DataError or ConfigError when a prompt lacks what a reward, or ``by``, needs."""
    check_prompts(prompts, [cast(RowCheck, reward.check_row) for reward in rewards])
    lacking = next((prompt for prompt in prompts if by is not None and by not in prompt.metadata), None)
    if lacking is not None:
        names = ", ".join(lacking.metadata) or "none"
        raise ConfigError(f"--by {by}: {lacking.where} has no such column; it has {names}")
