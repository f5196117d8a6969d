"""Pictures and videos of diffusion models, drawn as the evaluation of a run draws them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from sfumato.config.diffusion_rl import DiffusionRLConfig
from sfumato.config.rl import PromptDataConfig
from sfumato.config.sections import MOST_SOURCE_IMAGES, SOUND, ModelConfig, check_guidance_scale, sound_size
from sfumato.data.images.image_text import open_image_pairs
from sfumato.data.images.prompts import Prompt, load_prompts
from sfumato.data.images.source_images import check_source_images, group_by_sources, read_source_images
from sfumato.data.sounds.sound_text import open_captioned
from sfumato.errors import ConfigError
from sfumato.evaluation.model_files import check_model_is_here, load_checkpoint
from sfumato.evaluation.options import OF_FOLDERS, GenerationOptions, build_section, follow_run, ignore_line
from sfumato.evaluation.sources import ModelSource, first_run, one_process, run_with_prompts
from sfumato.models.diffusion.adapter_files import load_from_diffusers
from sfumato.models.diffusion.base import DiffusionModel, set_output
from sfumato.models.diffusion.load import build_diffusion_model, family_of
from sfumato.parallel.layout import Layout
from sfumato.parallel.mesh import Mesh
from sfumato.rewards.base import Sample
from sfumato.rollout.diffusion.evaluation import choose_grid, sample_images
from sfumato.rollout.diffusion.step_cache import StepCache
from sfumato.rollout.diffusion.trajectory_sampler import sample_of

DEFAULT_SEED = 42
OTHER_GUIDANCE = 4.5
"""Guidance scale where the pipeline states none."""
WRITTEN_AT_ONCE = 16
"""Pictures that are in memory before they are written, unless a micro-batch has more."""


@dataclass(frozen=True)
class PictureSettings:
    """How pictures or videos are drawn."""

    height: int
    width: int
    num_frames: int
    num_inference_steps: int
    guidance_scale: float
    seed: int
    micro_batch_size: int
    guidance_scale_2: float | None = None
    step_cache: float = 0.0

    def __post_init__(self) -> None:
        try:
            check_guidance_scale(self.guidance_scale)
        except ValueError as error:
            raise ConfigError(f"--guidance-scale: {error}") from error

    @property
    def size(self) -> tuple[int, int, int]:
        """Height, width and frames."""
        return self.height, self.width, self.num_frames

    def describe(self) -> str:
        """One line for people."""
        frames = f" x {self.num_frames} frames" if self.num_frames > 1 else ""
        size = f"{self.height} x {self.width} pixels{frames}"
        if self.height == SOUND:
            size = f"{self.width / 1000:g} s of sound"
        return f"{size}, {self.num_inference_steps} steps, guidance {self.guidance_scale:g}, seed {self.seed}"


@dataclass(frozen=True)
class FileImages:
    """Source images of the command line, for ``Prompt.source``."""

    paths: Sequence[Path]

    def check(self, height: int, width: int) -> None:
        """Looks at the heads of the files. Raises DataError."""
        check_source_images(self.paths, height, width, self._where)

    def read(self, height: int, width: int) -> np.ndarray:
        """Scales the shorter side and cuts the rest: uint8 ``[height, width, 3]``, of several ``[S, ...]``.

        Raises DataError.
        """
        return read_source_images(self.paths, height, width, "center", self._where)

    @property
    def _where(self) -> str:
        return ", ".join(map(str, self.paths))


@dataclass(frozen=True)
class ReadImage:
    """A source image that was read before, for ``Prompt.source``."""

    pixels: np.ndarray

    def check(self, height: int, width: int) -> None:
        """Accepts any size: it is the data set's own."""

    def read(self, height: int, width: int) -> np.ndarray:
        """The image, uint8 ``[height, width, 3]``."""
        return self.pixels


class PictureModel:
    """A diffusion model with the weights of one source."""

    def __init__(self, model: DiffusionModel, settings: PictureSettings) -> None:
        """Sets the size of what is drawn. Raises ConfigError when the model cannot make it."""
        self.model = model
        self.settings = settings
        options = "--seconds" if settings.height == SOUND else "--height, --width, --num-frames: size"
        set_output(model, settings.size, options)
        if settings.guidance_scale_2 is not None:
            model.set_second_guidance(settings.guidance_scale_2)

    @property
    def prompts_at_once(self) -> int:
        """Prompts that are drawn before their pictures are written: whole micro-batches, so that bits stay the same."""
        if self.settings.step_cache > 0:  # whose error is measured once for all
            return 2**31
        return self.settings.micro_batch_size * max(WRITTEN_AT_ONCE // self.settings.micro_batch_size, 1)

    def draw(self, prompts: Sequence[Prompt], ids: Sequence[int], repetition: int = 0) -> list[Sample]:
        """One picture, or video, for each prompt.

        Args:
            prompts: B prompts.
            ids: B numbers that key the first latents, with the seed.
            repetition: which of several samples of a prompt; it is added to the seed.

        Returns:
            B samples, whose group ids are ``ids``. What is not finite is named in ``damage``.
        """
        settings = self.settings
        if not self.model.takes_image and any(isinstance(prompt.source, FileImages) for prompt in prompts):
            raise ConfigError(f"--image: this {self.model.pipeline_class} draws from texts alone: leave it out")
        sources = [prompt.source_image(*settings.size[:2]) for prompt in prompts] if self.model.takes_image else None
        groups = group_by_sources(sources, len(prompts))
        if len(groups) > 1:  # what is drawn together has equally many source images
            samples: dict[int, Sample] = {}
            for group in groups:
                drawn = self.draw(
                    [prompts[position] for position in group], [ids[position] for position in group], repetition
                )
                samples |= dict(zip(group, drawn, strict=True))
            return [samples[position] for position in range(len(prompts))]
        texts = [prompt.text for prompt in prompts]
        conditioning = self.model.encode_prompts(texts, settings.guidance_scale != 1.0, sources)
        cache = None
        if settings.step_cache > 0:
            cache = StepCache(self.model, settings.step_cache, settings.num_inference_steps)
        damage: list[str] = []
        images = sample_images(
            self.model,
            conditioning,
            ids,
            size=settings.size,
            num_steps=settings.num_inference_steps,
            guidance_scale=settings.guidance_scale,
            seed=settings.seed + repetition,
            micro_batch_size=settings.micro_batch_size,
            cache=cache,
            damage=damage,
        )
        return [
            sample_of(prompt, image, group_id, source, problem, self.model.frame_rate)
            for prompt, image, group_id, source, problem in zip(
                prompts, images, ids, sources or [None] * len(images), damage, strict=True
            )
        ]


def picture_models(
    sources: Sequence[ModelSource], options: GenerationOptions
) -> Iterator[tuple[ModelSource, PictureModel]]:
    """The models one after the other. Those of one run, and adapters of one model, share what is in memory.

    Raises:
        ConfigError, CheckpointError: when one cannot be loaded.
    """
    device = options.find_device()
    settings = picture_settings(sources, options)
    loaded_from: Path | None = None
    model: DiffusionModel | None = None
    drawn: PictureModel | None = None
    for source in sources:
        architecture = _architecture_folder(source, options)
        if model is None or drawn is None or architecture != loaded_from:
            model = drawn = None  # frees the memory before the next one is loaded
            model = _load(source, architecture, options, device)
            drawn = PictureModel(model, settings or default_settings(model, options))
            settings = drawn.settings  # all are compared by the same ones
            loaded_from = architecture
        take_weights(model, source, device)
        yield source, drawn


def picture_settings(sources: Sequence[ModelSource], options: GenerationOptions) -> PictureSettings | None:
    """The settings of the first run among the sources, with what the options replace; None where there is no run."""
    run = first_run(sources)
    if run is None:
        return None
    config = run.config
    if isinstance(config, DiffusionRLConfig):
        rollout = config.rollout
        evaluation = config.eval
        guidance_scale = rollout.guidance_scale if evaluation.guidance_scale is None else evaluation.guidance_scale
        height, width, num_frames = rollout.size
        settings = PictureSettings(
            height,
            width,
            num_frames,
            evaluation.num_inference_steps,
            guidance_scale,
            evaluation.seed,
            rollout.micro_batch_size,
            rollout.guidance_scale_2,
            evaluation.step_cache,
        )
    else:
        height, width, num_frames = config.data.size
        settings = PictureSettings(
            height,
            width,
            num_frames,
            config.sample.num_inference_steps,
            config.sample.guidance_scale,
            config.train.seed,
            config.train.micro_batch_size,
        )
    return _override_settings(settings, options)


def default_settings(model: DiffusionModel, options: GenerationOptions) -> PictureSettings:
    """Those of the pipeline's own call in diffusers, with what the options replace."""

    def default(name: str, otherwise: Any) -> Any:
        value = model.call_default(name)
        return otherwise if value is None else value

    if model.makes_sound:
        size = sound_size(float(default("duration", default("audio_duration", 10.0))))
        steps = default("num_inference_steps", 50)
        return _override_settings(
            PictureSettings(*size, steps, model.default_guidance or 1.0, DEFAULT_SEED, 1), options
        )
    scale = getattr(model.pipeline, "vae_scale_factor", 8)
    denoiser = getattr(model.denoiser, "config", {})  # which has the sizes of Stable Diffusion and CogVideoX
    side = getattr(model.pipeline, "default_sample_size", denoiser.get("sample_size"))
    side = side if isinstance(side, int) else 512 // scale
    # LTX-2's pipeline takes 121 frames where it is not told
    frames = 121 if model.makes_video_with_sound else denoiser.get("sample_frames", 1)
    return _override_settings(
        PictureSettings(
            default("height", denoiser.get("sample_height", side) * scale),
            default("width", denoiser.get("sample_width", side) * scale),
            default("num_frames", frames),
            default("num_inference_steps", 28),
            model.default_guidance or OTHER_GUIDANCE,
            DEFAULT_SEED,
            1,
        ),
        options,
    )


def _override_settings(settings: PictureSettings, options: GenerationOptions) -> PictureSettings:
    """Settings with what the options give in their place."""
    replacements = options.given(("height", "width", "num_frames", "num_inference_steps", "guidance_scale", "seed"))
    if options.batch_size is not None:
        replacements["micro_batch_size"] = options.batch_size
    if settings.height == SOUND:
        for name in ("height", "width", "num_frames"):
            if name in replacements:
                raise ConfigError(f"--{name.replace('_', '-')}: this model makes sound, whose length is --seconds")
        if options.seconds is not None:
            replacements["width"] = sound_size(options.seconds)[1]
    elif options.seconds is not None:
        raise ConfigError("--seconds: this model makes no sound: give --height and --width")
    return replace(settings, **replacements)


def picture_prompts(sources: Sequence[ModelSource], limit: int | None) -> list[Prompt]:
    """The prompts of the evaluation, or of the sample grid, of the first run among the sources.

    Args:
        sources: models.
        limit: most prompts; None: as many as the run evaluates.

    Raises:
        ConfigError: when no run is among them.
        DataError: when the run's data is missing or broken.
    """
    run = run_with_prompts(sources)
    config = run.config
    if isinstance(config, DiffusionRLConfig):
        count = config.eval.num_prompts if limit is None else min(limit, config.eval.num_prompts)
        return load_prompts(config.data, "eval", count)
    if run.task == "train_dit_dpo":
        dataset = open_image_pairs(config.data, config.train.seed, ignore_line)
    else:
        dataset = open_captioned(config.data, config.train.seed, ignore_line)
    texts, images = choose_grid(config.sample, dataset, family_of(config.model).takes_image)
    prompts = [
        Prompt(text, {}, f"{run.folder}: prompt {index}", cast(Any, None if image is None else ReadImage(image)))
        for index, (text, image) in enumerate(zip(texts, images or [None] * len(texts), strict=True))
    ]
    return prompts[:limit]


def make_prompts_of_words(texts: Sequence[str], images: Sequence[Path]) -> list[Prompt]:
    """Prompts of the command line.

    Args:
        texts: the prompts.
        images: source images: none, one for all of them, or one for each; of a single prompt perhaps several.

    Raises:
        ConfigError: for another number of images.
    """
    if len(images) not in (0, 1, len(texts)) and len(texts) > 1:
        raise ConfigError(f"{len(images)} times --image for {len(texts)} prompts: give one, or one for each prompt")
    if not images:
        paths: list[Sequence[Path] | None] = [None] * len(texts)
    elif len(images) == 1 or len(texts) == 1:
        paths = [images] * len(texts)
    else:
        paths = [[image] for image in images]
    return [
        Prompt(text, {}, f"--prompt {text[:40]!r}", cast(Any, None if of_prompt is None else FileImages(of_prompt)))
        for text, of_prompt in zip(texts, paths, strict=True)
    ]


def read_prompts_file(path: str, key: str | None, limit: int | None) -> list[Prompt]:
    """The prompts of a file; its other columns are metadata. Raises DataError as ``load_prompts``."""
    fields: dict[str, object] = {"train_path": path, "eval_path": path, "max_source_images": MOST_SOURCE_IMAGES}
    if key is not None:
        fields["prompt_key"] = key
    return load_prompts(build_section(PromptDataConfig, fields), "eval")[:limit]


def _architecture_folder(source: ModelSource, options: GenerationOptions) -> Path:
    """The folder of the run or of the pipeline that a model is built of."""
    if source.kind in ("run", "checkpoint"):
        assert source.run is not None
        return source.run.folder
    if source.kind == "pipeline":
        return source.folder
    if options.base is not None:
        return options.base
    if source.run is None:
        raise ConfigError(
            f"{source.folder} holds adapters, and nothing says of which model: give its pipeline folder as --base"
        )
    return source.run.folder / "config.yaml"  # the run's model without the adapters of its own


def _load(source: ModelSource, architecture: Path, options: GenerationOptions, device: torch.device) -> DiffusionModel:
    """The model before it takes the weights of a source."""
    if source.kind in ("run", "checkpoint"):
        assert source.run is not None
        check_model_is_here(source.run)
        config = source.run.config
        train = one_process(config.train)
        follow_run(config, device)
        options.refuse(OF_FOLDERS, "on a run, which keeps its own")
        model = build_diffusion_model(config.model, device, train.mixed_precision, train.seed, "cuda")
        model.parallelize(Mesh(Layout(), device), train)
    else:
        run = source.run if options.base is None else None
        if run is not None:  # its precision and length of prompts
            options.refuse(OF_FOLDERS, "on the export of a run, whose own are taken")
            section = run.config.model.model_copy(update={"lora": None})
            if source.kind == "pipeline":
                section = section.model_copy(update={"model_path": str(source.folder), "config_path": None})
        else:
            section = ModelConfig(
                model_path=str(architecture),
                dtype=options.dtype_on(device),
                max_sequence_length=options.max_sequence_length,
            )
            can_edit = options.from_images and family_of(section).image_family is not None
            section = section.model_copy(update={"from_images": can_edit})
        model = build_diffusion_model(section, device, init_device="cuda")
        if section.dtype == "bf16":
            model.denoiser.to(torch.bfloat16)
    model.say = options.say
    return model


def take_weights(model: DiffusionModel, source: ModelSource, device: torch.device) -> None:
    """Gives a model the weights of a source; those of the run's start, and of a pipeline, it has already."""
    if source.kind == "checkpoint":
        load_checkpoint(model.trained, source, device)
    if source.kind == "diffusers_adapter":
        load_from_diffusers(model.pipeline, source.folder)
    model.denoiser.eval()
