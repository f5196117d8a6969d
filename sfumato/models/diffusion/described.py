"""Pipelines with random weights, made from a description (``model.config_path``) and a family's ``blueprint``."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sfumato.config.open_mappings import Keywords
from sfumato.models.diffusion.scratch import checked_section, section_of, start_at_zero, unknown_keys

if TYPE_CHECKING:
    from diffusers.pipelines.pipeline_utils import DiffusionPipeline


@dataclass(frozen=True)
class TextPart:
    """A text encoder with its tokenizer."""

    build_encoder: Callable[..., nn.Module]
    """Takes the tokenizer, and the section of the encoder."""
    build_tokenizer: Callable[..., Any]
    """Takes the arguments in the section ``tokenizer`` that it knows."""
    fixed: Mapping[str, object] = field(default_factory=dict)
    """Further arguments of the encoder, which a description cannot set."""
    tokenizer_fixed: Mapping[str, object] = field(default_factory=dict)
    """Further arguments of the tokenizer, which a description cannot set."""
    section: str = ""
    """Section of the encoder, where it has not the name of the component."""

    @property
    def tokenizer_arguments(self) -> list[str]:
        """Names of the tokenizer's arguments that a description can set."""
        parameters = inspect.signature(self.build_tokenizer).parameters
        return [name for name in parameters if name not in self.tokenizer_fixed]


@dataclass(frozen=True)
class Blueprint:
    """Of what a family's pipeline consists."""

    denoiser: str
    """Class of the component ``transformer``, by its name in diffusers."""
    vae: Callable[..., nn.Module]
    texts: Mapping[str, TextPart]
    """Text encoders by the name of the component; the tokenizer of ``text_encoder_2`` is ``tokenizer_2``."""
    infer: Callable[[Keywords], dict[str, object]]
    """Arguments of the denoiser that follow from the other components and ``settings``, by their names."""
    outputs: tuple[str, ...] = ("proj_out",)
    """Layers of the denoiser that start at zero, so that it predicts zero at first; ``*`` stands for any name."""
    scheduler: str = "FlowMatchEulerDiscreteScheduler"
    """Class of the scheduler, by its name in diffusers."""
    scheduler_settings: Mapping[str, object] = field(default_factory=dict)
    """Settings of the published scheduler, where a description gives no others."""
    settings: tuple[str, ...] = ()
    """Arguments of the pipeline that a description may set besides its sections."""
    further: Mapping[str, Callable[..., object]] = field(default_factory=dict)
    """Further components: functions of those that are made already, by name, and of the section."""
    unused: tuple[str, ...] = ()
    """Components of which others are made, and which the pipeline itself does not take."""


def build_pipeline(
    pipeline: Callable[..., DiffusionPipeline], blueprint: Blueprint, description: Mapping[str, object], seed: int
) -> DiffusionPipeline:
    """Makes a pipeline with random weights.

    Sections are ``transformer``, ``vae``, ``scheduler``, ``tokenizer`` (words, ... of all tokenizers), one for each
    text encoder, and those of further components.

    Args:
        pipeline: its class.
        blueprint: what the pipeline consists of.
        description: arguments of the components, by section.
        seed: seed of the weights.

    Raises:
        ValueError: for an unknown section or key.
    """
    import diffusers

    make_denoiser = getattr(diffusers, blueprint.denoiser)
    make_scheduler = getattr(diffusers, blueprint.scheduler)
    sections = {"pipeline", "transformer", "vae", "scheduler", "tokenizer"}
    text_sections = {text.section or name for name, text in blueprint.texts.items()}
    unknown_keys(description, {*sections, *text_sections, *blueprint.further, *blueprint.settings})
    known = dict.fromkeys(name for text in blueprint.texts.values() for name in text.tokenizer_arguments)
    words = checked_section(description, "tokenizer", [*known])
    denoiser = section_of(description, "transformer", make_denoiser)
    vae = section_of(description, "vae", blueprint.vae)
    scheduler = {**blueprint.scheduler_settings, **section_of(description, "scheduler", make_scheduler)}
    parts: Keywords = {name: description[name] for name in blueprint.settings if name in description}
    parts["scheduler"] = make_scheduler(**scheduler)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for name, text in blueprint.texts.items():
            _add_text_part(parts, name, text, description, words)
        parts["vae"] = blueprint.vae(**vae)
        for name, build in blueprint.further.items():
            parts[name] = build(parts, **section_of(description, name, build, reserved=["parts"]))
        parts["transformer"] = make_denoiser(**{**blueprint.infer(parts), **denoiser})
        for output in blueprint.outputs:
            layers = [layer for name, layer in parts["transformer"].named_modules() if fnmatchcase(name, output)]
            assert layers, f"{blueprint.denoiser} has no {output}"
            start_at_zero(*layers)
    return pipeline(**{name: part for name, part in parts.items() if name not in blueprint.unused})


def _add_text_part(
    parts: dict[str, object], name: str, text: TextPart, description: Mapping[str, object], words: Keywords
) -> None:
    """Adds a text encoder and its tokenizer, which takes what it knows of ``words``, to a pipeline's components."""
    reserved = [*text.fixed, next(iter(inspect.signature(text.build_encoder).parameters))]
    encoder = section_of(description, text.section or name, text.build_encoder, reserved=reserved)
    known = {key: value for key, value in words.items() if key in text.tokenizer_arguments}
    tokenizer = text.build_tokenizer(**known, **text.tokenizer_fixed)
    parts[name.replace("text_encoder", "tokenizer")] = tokenizer
    parts[name] = text.build_encoder(tokenizer, **{**text.fixed, **encoder})


def make_empty_pipeline(pipeline_type: Callable[..., Any]) -> Any:
    """A pipeline without components, of which attributes are read that it sets when it is made, such as templates."""
    parameters = inspect.signature(pipeline_type).parameters.values()
    return pipeline_type(**{each.name: None for each in parameters if each.default is inspect.Parameter.empty})
