"""Draws samples of several models for the same prompts and seeds, of whatever modality they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from sfumato.errors import ConfigError
from sfumato.evaluation.options import OF_PICTURES, OF_TEXTS, GenerationOptions
from sfumato.evaluation.samples_folder import NamedSample
from sfumato.evaluation.sources import ModelSource

if TYPE_CHECKING:
    from sfumato.evaluation.pictures import PictureModel
    from sfumato.evaluation.texts import TextModel


@dataclass(frozen=True)
class PromptChoice:
    """Which prompts are taken; without texts and file those of the run's evaluation."""

    texts: tuple[str, ...] = ()
    images: tuple[Path, ...] = ()
    """Images for ``texts``: none, one for all, or one for each."""
    file: str | None = None
    key: str | None = None
    """Column of the prompt in ``file``; None: prompt."""
    limit: int | None = None


@dataclass(frozen=True)
class ModelSamples:
    """Some samples of one model: all of some prompts."""

    source: ModelSource
    samples: list[NamedSample]
    settings: str
    """How they were drawn, as a line for people."""
    is_last: bool
    """Whether they are the model's last ones."""


def draw_samples(
    sources: Sequence[ModelSource],
    prompts: PromptChoice,
    options: GenerationOptions,
    num_samples: int = 1,
    check: Callable[[list[Any]], None] = lambda prompts: None,
) -> Iterator[ModelSamples]:
    """Draws one model after the other, some prompts at a time.

    Args:
        sources: models, all of diffusion or all of language.
        prompts: the same for all.
        options: replace settings of the run, or of the models' folders.
        num_samples: of each prompt and model; the n-th has the seed of the first plus n.
        check: is given the prompts before anything is drawn, and raises for those that cannot be used.

    Raises:
        ConfigError: when the models are of different kinds, or settings do not fit.
        UserError: as the data and the checkpoints do.
    """
    kinds = {source.is_diffusion for source in sources}
    if len(kinds) > 1:
        raise ConfigError("some of the models draw pictures, and others answer in text: take two commands")
    if kinds == {True}:
        options.refuse(OF_TEXTS, "on models that draw pictures")
    else:
        options.refuse((*OF_PICTURES, "max_sequence_length"), "on language models")
        if prompts.file is None and not prompts.texts:
            from sfumato.evaluation.texts import find_prompted_run  # not at the top: diffusion needs no transformers

            find_prompted_run(sources)
    models = _load_diffusion(sources, options) if kinds == {True} else _load_language(sources, options)
    chosen: list[Any] | None = None
    for source, model, choose in models:
        # language models have templates of their own
        if chosen is None or kinds == {False}:
            chosen = choose(prompts)
            if not chosen:
                raise ConfigError("there is no prompt: give --prompt TEXT or a file with prompts")
            check(chosen)
        for start in range(0, len(chosen), model.prompts_at_once):
            part = chosen[start : start + model.prompts_at_once]
            ids = list(range(start, start + len(part)))
            samples = []
            for repetition in range(num_samples):
                drawn = model.draw(part, ids, repetition)
                seed = model.settings.seed + repetition
                samples += [
                    NamedSample(source.label, prompt_id, seed, sample)
                    for prompt_id, sample in zip(ids, drawn, strict=True)
                ]
            is_last = start + len(part) == len(chosen)
            yield ModelSamples(source, samples, model.settings.describe(), is_last)


Models = Iterator[tuple[ModelSource, "PictureModel | TextModel", Callable[[PromptChoice], list[Any]]]]
"""Each source with its model, and a function that reads the prompts for it."""


def _load_diffusion(sources: Sequence[ModelSource], options: GenerationOptions) -> Models:
    """Diffusion models. Their modules are imported here: language models need no diffusers."""
    from sfumato.evaluation.pictures import make_prompts_of_words, picture_models, picture_prompts, read_prompts_file

    def choose(prompts: PromptChoice) -> list[Any]:
        if prompts.file is not None:
            return read_prompts_file(prompts.file, prompts.key, prompts.limit)
        if prompts.texts:
            return make_prompts_of_words(prompts.texts, prompts.images)
        return picture_prompts(sources, prompts.limit)

    for source, model in picture_models(sources, options):
        yield source, model, choose


def _load_language(sources: Sequence[ModelSource], options: GenerationOptions) -> Models:
    """Language models."""
    from sfumato.evaluation.texts import make_rows_of_words, read_text_prompts_file, text_models, text_prompts

    for source, model in text_models(sources, options):

        def choose(prompts: PromptChoice, model: TextModel = model) -> list[Any]:
            if prompts.file is not None:
                return read_text_prompts_file(model, prompts.file, prompts.key, prompts.limit)
            if prompts.texts:
                if prompts.images and not model.data_type.has_images:
                    raise ConfigError("--image: this model sees no images: its folder has no processor for them")
                return model.prompts_of(make_rows_of_words(prompts.texts, prompts.images))
            return text_prompts(model, sources, prompts.limit)

        yield source, model, cast("Callable[[PromptChoice], list[Any]]", choose)
