"""A model that stays in memory and answers prompts with the weights of each checkpoint of a run, and of its start."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from sfumato.errors import CheckpointError, ConfigError
from sfumato.evaluation.options import OF_PICTURES, OF_TEXTS, GenerationOptions
from sfumato.evaluation.questions import Question
from sfumato.evaluation.sources import ModelSource, find_sources
from sfumato.rewards.base import Sample
from sfumato.tracking.atomic_folders import list_checkpoints, verify_checkpoint


@dataclass(frozen=True)
class PlaygroundAnswer:
    """What one model has drawn."""

    label: str
    """``base``, ``step 10``, or the name of the folder."""
    step: int | None
    """Of a checkpoint."""
    sample: Sample
    settings: str
    """How it was drawn, as a line for people."""
    seconds: float


class _Answerer(Protocol):
    """A model that is in memory."""

    @property
    def trained(self) -> nn.Module: ...

    def load_weights(self, source: ModelSource) -> None:
        """Loads the weights of a checkpoint."""

    def forget(self) -> None:
        """Drops what was computed with other weights."""

    def answer(self, question: Question) -> tuple[Sample, str]: ...


class Playground:
    """The model of a run, a checkpoint or an export, loaded once. One question is answered at a time."""

    def __init__(self, name: str, options: GenerationOptions) -> None:
        """Loads the model.

        Args:
            name: a run folder, whose checkpoints all answer; a single checkpoint; or a folder of weights.
            options: of the command line, such as the device.

        Raises:
            ConfigError, CheckpointError: as ``find_sources`` and the loaders do.
        """
        folder = Path(name)
        is_run = (folder / "config.yaml").is_file() and (folder / "environment.json").is_file()
        (source, *others) = find_sources([name], False, options.say)
        if others:
            raise ConfigError(f"{name} holds {1 + len(others)} checkpoints: give the run folder, or one of them")
        self.source = source
        self.draws_pictures = source.is_diffusion
        self._follows_run = is_run and source.kind == "checkpoint"
        self.has_base = source.kind == "checkpoint"
        if self.draws_pictures:
            options.refuse(OF_TEXTS, "on models that draw pictures")
        else:
            options.refuse((*OF_PICTURES, "max_sequence_length"), "on language models")
        self._first = source
        """What is loaded: of a checkpoint the model that its run started from, which takes the checkpoint's weights."""
        if self.has_base:
            assert source.run is not None
            self._first = ModelSource("run", source.run.folder, "base", source.run)
        # language models need no diffusers
        self._answerer: _Answerer = (_Pictures if self.draws_pictures else _Texts)(self._first, options)
        self._loaded = self._first.label
        self._start = _copy_weights(self._answerer.trained) if self.has_base else {}
        self._verified: set[Path] = set()

    @property
    def checkpoints(self) -> dict[int, ModelSource]:
        """Checkpoints by step that can be asked now, ascending."""
        if self.source.kind != "checkpoint":
            return {}
        assert self.source.run is not None
        if not self._follows_run:
            return {int(self.source.folder.name.removeprefix("global_step_")): self.source}
        run = self.source.run
        folders = list_checkpoints(run.folder / "checkpoints")
        return {step: ModelSource("checkpoint", path, f"step {step}", run) for step, path in sorted(folders.items())}

    def ask(self, question: Question) -> Iterator[PlaygroundAnswer]:
        """Answers of the models that are asked for, one after the other.

        Raises:
            ConfigError: for a value out of range, a step without a checkpoint, and as drawing does.
            CheckpointError: for a damaged checkpoint.
        """
        question.check_fits(self.draws_pictures)
        for step, source in self._sources_of_question(question):
            started = time.perf_counter()
            self._take(source)
            sample, settings = self._answerer.answer(question)
            yield PlaygroundAnswer(source.label, step, sample, settings, time.perf_counter() - started)

    def _sources_of_question(self, question: Question) -> list[tuple[int | None, ModelSource]]:
        choice = question.choice
        base: list[tuple[int | None, ModelSource]] = [(None, self._first)] if self.has_base else []
        if choice == "base":
            if not base:
                raise ConfigError(f"{self.source.folder}: the model that it started from is not known")
            return base
        checkpoints = self.checkpoints
        if self.source.kind != "checkpoint":
            if isinstance(choice, int):
                raise ConfigError(f"{self.source.folder} holds no checkpoints, but one model: leave checkpoint out")
            return [(None, self.source)]
        if not checkpoints:
            raise CheckpointError(f"{self.source.folder.parent} holds no checkpoint any more")
        if choice == "all":
            chosen = [*checkpoints]
        elif choice == "newest":
            chosen = [max(checkpoints)]
        elif choice in checkpoints:
            chosen = [choice]
        else:
            steps = ", ".join(map(str, [*checkpoints][-12:]))
            raise ConfigError(f"there is no checkpoint of step {choice}; there are those of {steps}")
        wants_base = question.with_base or choice == "all"
        return [*(base if wants_base else []), *((step, checkpoints[step]) for step in chosen)]

    def _take(self, source: ModelSource) -> None:
        """Gives the model other weights, where it has not these."""
        if source.label == self._loaded or source.kind not in ("run", "checkpoint"):
            return
        self._loaded = ""  # should loading fail half-way
        if source.kind == "run":
            _put_weights(self._answerer.trained, self._start)
            self._answerer.forget()
        else:
            if source.folder not in self._verified:
                verify_checkpoint(source.folder)
                self._verified.add(source.folder)
            self._answerer.load_weights(source)
        self._loaded = source.label


class _Pictures:
    """A diffusion model."""

    def __init__(self, source: ModelSource, options: GenerationOptions) -> None:
        from sfumato.evaluation.pictures import picture_models

        ((_, self._model),) = picture_models([source], options)
        self._settings = self._model.settings
        self._device = options.find_device()

    @property
    def trained(self) -> nn.Module:
        return self._model.model.trained

    def load_weights(self, source: ModelSource) -> None:
        from sfumato.evaluation.pictures import take_weights

        take_weights(self._model.model, source, self._device)

    def forget(self) -> None:
        """Nothing depends on the weights."""

    def answer(self, question: Question) -> tuple[Sample, str]:
        from sfumato.data.images.prompts import Prompt
        from sfumato.rollout.diffusion.evaluation import check_embeddable

        check_embeddable(self._model.model, [question.text])
        changes = {
            "seed": question.seed,
            "num_inference_steps": question.steps,
            "guidance_scale": question.guidance,
        }
        self._model.settings = replace(
            self._settings, **{name: value for name, value in changes.items() if value is not None}
        )
        (sample,) = self._model.draw([Prompt(question.text, {}, "playground")], [0])
        return sample, self._model.settings.describe()


class _Texts:
    """A language model."""

    def __init__(self, source: ModelSource, options: GenerationOptions) -> None:
        from sfumato.evaluation.texts import text_models

        ((_, self._model),) = text_models([source], options)
        self._options = options
        self._device = options.find_device()

    @property
    def trained(self) -> nn.Module:
        return self._model.model.trained

    def load_weights(self, source: ModelSource) -> None:
        from sfumato.evaluation.texts import take_weights

        take_weights(self._model, source, self._device)

    def forget(self) -> None:
        self._model.flush_engine()

    def answer(self, question: Question) -> tuple[Sample, str]:
        from sfumato.evaluation.texts import replaced_settings
        from sfumato.rollout.kinds.base import SampleKeys
        from sfumato.rollout.text.policy import EVALUATION

        asked = GenerationOptions(
            seed=question.seed, max_new_tokens=question.max_new_tokens, temperature=question.temperature
        )
        settings = replaced_settings(self._model.settings, asked)
        prompt = question.prompt if isinstance(question.prompt, str) else list(question.prompt)
        prompts = self._model.prompts_of([{"prompt": prompt}])
        (drawn,) = self._model.draw_texts(prompts, [SampleKeys(settings.seed, 0, 0, EVALUATION)], settings)
        return drawn.sample(prompts[0], 0), settings.describe()


def _copy_weights(module: nn.Module) -> dict[str, torch.Tensor]:
    """What training changes, in CPU memory: trained parameters, and buffers."""
    tensors = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    tensors |= dict(module.named_buffers())
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


@torch.no_grad()
def _put_weights(module: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    tensors = dict(module.named_parameters()) | dict(module.named_buffers())
    for name, tensor in weights.items():
        tensors[name].copy_(tensor)
