"""The sections that several tasks share."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Protocol

from pydantic import AfterValidator, Field, model_validator

from sfumato.config.base import Section, refuse_needless
from sfumato.config.hub import download_model
from sfumato.config.parallel import ParallelConfig
from sfumato.config.paths import CheckpointPath, FilePath, ModelPath

Share = Annotated[float, Field(ge=0, lt=1)]

MAX_SIDE = 16_384
"""Most pixels of a picture's side."""

MOST_SOURCE_IMAGES = 16
"""Most images that one sample may be made from."""

MAX_PIXELS = 2**28
"""Most pixels of a sample, over all of its frames."""


CHANGED_WEIGHTS = (
    "pissa takes the largest singular values out of the frozen weights, so that the model without its adapters is not "
    "the reference: take lora"
)
"""Why adapters that change the frozen weights are refused where a run compares with the model without adapters."""


LONGEST_PROMPT = 1024
"""Most tokens of the embedding of a prompt."""


class LoraConfig(Section):
    """Low-rank adapters (peft) instead of full fine-tuning."""

    rank: int = Field(32, ge=1, le=65_536)
    """Rank r of the update; of variant oft the features of a block that is rotated."""
    alpha: float = Field(64.0, gt=0)
    """Scale: the update is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout in front of the adapter."""
    variant: Literal["lora", "rslora", "dora", "pissa", "lokr", "loha", "oft"] = "lora"
    """rslora scales by alpha / sqrt(rank) (arXiv 2312.03732); dora learns magnitudes too (arXiv 2402.09353). Of
    diffusion models also the largest singular values of each weight (pissa, arXiv 2404.02948), Kronecker products
    (lokr, arXiv 2309.14859), Hadamard products (loha, arXiv 2108.06098) and rotations (oft, arXiv 2306.07280)."""
    target_modules: list[str] | None = None
    """Names of the linear layers that get an adapter; null takes the model family's own list."""
    target_parameters: list[str] = []
    """Names of weights that hold all experts of a layer, such as mlp.experts.gate_up_proj, that get adapters."""
    init_weights: Literal["gaussian", "default"] = "gaussian"
    """Initialisation of the down projection: gaussian as flow_grpo does, or peft's default (Kaiming)."""

    @property
    def is_merged(self) -> bool:
        """Whether an export has the adapters merged into the weights: diffusers loads no others than LoRA's, and those
        of pissa fit changed weights alone."""
        return self.variant in ("pissa", "lokr", "loha", "oft")

    @property
    def changes_weights(self) -> bool:
        """Whether the frozen weights are others than the model's, so that it is no reference without its adapters."""
        return self.variant == "pissa"

    @model_validator(mode="after")
    def _has_effect(self) -> LoraConfig:
        if self.is_merged:
            names = ["target_parameters", "init_weights"]
            names += ["alpha"] if self.variant == "oft" else []
            names += [] if self.variant == "pissa" else ["dropout"]
            refuse_needless(self, "model.lora", names, f"with model.lora.variant {self.variant}: remove it")
        return self


class ModelConfig(Section):
    """The model: which folder or which description it comes from, and what of it is trained."""

    model_path: ModelPath | None = None
    """Folder of a diffusers pipeline (with model_index.json), or its name on the hub."""
    download: bool = False
    """Fetch a model_path that is a name on the hub and not in the local hub cache."""
    config_path: FilePath | None = None
    """YAML file that describes a pipeline to be made from scratch with random weights; instead of model_path."""
    family: str | None = None
    """Class of a model family that is not part of sfumato, my_module:MyFamily; null goes by the pipeline's class."""
    from_images: bool = False
    """Make samples from source images, of families that can do without: FLUX.2."""
    lora: LoraConfig | None = None
    """Train low-rank adapters; null trains all weights of the denoiser."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of what is frozen: text encoders, autoencoder, and with LoRA the denoiser's base weights."""
    max_sequence_length: int | None = Field(None, ge=0, le=LONGEST_PROMPT)
    """Tokens of the prompt embedding (T5, UMT5 or Qwen); null takes as many as the diffusers pipeline does, since some
    networks read the padding, too; 0 leaves T5 out of Stable Diffusion 3."""
    keep_encoders: bool = True
    """false: embed every prompt of the data before training, keep the embeddings, and free the text encoders."""
    offload_idle: bool = False
    """Keep text encoders and autoencoder in CPU memory except while they work, to and fro each time."""

    @model_validator(mode="before")
    @classmethod
    def _download(cls, fields: object) -> object:
        return download_model(fields)

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        if (self.model_path is None) == (self.config_path is None):
            raise ValueError(
                "set exactly one of model.model_path (a pipeline folder) and model.config_path (a description)"
            )
        if self.config_path is not None and self.lora is None and not self.keep_encoders:
            raise ValueError(
                "model.keep_encoders: false frees text encoders that model.config_path made, and the exported pipeline "
                "would lack them: leave it out, or save the pipeline once and give its folder as model.model_path"
            )
        return self


def check_guidance_scale(scale: float) -> float:
    """A guidance scale of at least 1. Raises ValueError for a smaller one.

    diffusers takes up to 1 for none; as a factor, 0 is the branch of the empty prompt alone.
    """
    if not scale >= 1:
        raise ValueError(f"{scale:g} would draw with less of the prompt, 0 without it; 1 is no guidance: set 1")
    return scale


GuidanceScale = Annotated[float, AfterValidator(check_guidance_scale)]
"""Classifier-free guidance, or the input of a model that embeds it."""


def _check_expression(match: str) -> str:
    try:
        re.compile(match)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"{match!r} is not a regular expression: {error}") from error
    return match


Expression = Annotated[str, AfterValidator(_check_expression)]
"""A regular expression."""


class ParamGroupConfig(Section):
    """Parameters with a rate or a decay of their own."""

    match: Expression
    """Regular expression that is searched for in parameter names."""
    lr_scale: float = Field(1.0, ge=0)
    """Factor of the learning rate."""
    weight_decay: float | None = Field(None, ge=0)
    """Weight decay; null keeps what the parameter would have."""


class TrainConfig(ParallelConfig):
    """The optimiser, the batch, the run folder and the checkpoints."""

    output_dir: FilePath
    """Run folder. A run that stands there is only gone on with, or moved aside: see load_checkpoint_path."""
    micro_batch_size: int = Field(1, ge=1)
    """Samples in one forward and backward pass of one process."""
    global_batch_size: int | None = Field(None, ge=1)
    """Samples of one optimiser step over all processes; null is the smallest (RL: all samples of the iteration)."""
    max_steps: int | None = Field(None, ge=1)
    """Optimiser steps (RL: iterations) after which the run ends; null runs num_train_epochs."""
    lr: float = Field(1e-4, gt=0)
    """Peak learning rate."""
    lr_min: float = Field(0.0, ge=0)
    """Learning rate at the end of a decay."""
    lr_warmup_steps: int = Field(0, ge=0)
    """Steps of linear warm-up; the first step already has lr / lr_warmup_steps."""
    lr_decay_style: Literal["constant", "linear", "cosine", "wsd"] = "constant"
    """Shape of the decay from lr to lr_min; wsd falls as 1 - sqrt(progress) (arXiv 2405.18392)."""
    lr_decay_ratio: float = Field(1.0, gt=0, le=1)
    """Share of all steps, at the end, over which the rate decays (below 1: warm-up, stable, decay)."""
    optimizer: Literal["adamw", "muon", "adamw8bit"] = "adamw"
    """muon orthogonalises the updates of hidden matrices (arXiv 2502.16982) and takes AdamW for the rest; adamw8bit
    keeps AdamW's state in 8 bits."""
    param_groups: list[ParamGroupConfig] = []
    """Rates and decay of some parameters; each parameter follows the first entry that matches its name."""
    betas: tuple[Share, Share] = (0.9, 0.999)
    """AdamW's averaging factors, from 0 to below 1."""
    eps: float = Field(1e-8, gt=0)
    """AdamW's epsilon; RL gradients can be as small as 1e-9, then lower it."""
    weight_decay: float = Field(0.0, ge=0)
    """Weight decay on matrices; norms and biases have none."""
    max_grad_norm: float = Field(1.0, gt=0, allow_inf_nan=True)
    """Gradients are scaled down to this total norm; .inf leaves them alone."""
    ema_decay: float = Field(0.0, ge=0, lt=1)
    """Upper limit of the decay of the exponential moving average of the weights; 0 keeps none."""
    ema_interval: int = Field(1, ge=1)
    """Optimiser steps between two updates of the moving average."""
    mixed_precision: Literal["no", "bf16"] = "no"
    """Autocast of the forward pass. Trained weights, gradients and optimiser stay float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to run; auto takes a GPU if there is one."""
    deterministic: bool = False
    """Take only kernels that add in the same order each time, so that a resumed run on GPUs has the bits of one that
    was not interrupted; slower there. An operation without such a kernel stops the run by name. CPUs need it not."""
    num_threads: int | None = Field(None, ge=1, le=1024)
    """CPU threads of each process; null leaves torch's choice (one per core, or 1 under torchrun)."""
    seed: int = Field(42, ge=0)
    """Seed of everything that is random."""
    load_checkpoint_path: CheckpointPath | None = None
    """Go on from this checkpoint, or from the newest one of this run folder; `auto` takes the newest intact one of
    output_dir, and `new` moves the run that stands in output_dir aside and starts from the first step."""
    ckpt_manager: Literal["dcp"] = "dcp"
    """Format of checkpoints: torch.distributed.checkpoint, which other numbers of processes can load."""
    save_steps: int = Field(0, ge=0)
    """Steps between checkpoints; 0 saves only at the end."""
    save_async: bool = False
    """Write periodic checkpoints in the background, from a copy in CPU memory."""
    max_checkpoints: int = Field(3, ge=1)
    """Newest checkpoints that are kept."""
    export_steps: int = Field(0, ge=0)
    """Steps between exports of the trained weights to hf_ckpt; 0 exports only at the end."""
    timeout_s: float = Field(900.0, gt=0)
    """Seconds after which a rank that waits for another one ends the run, with the stacks of all ranks; three times as
    many until the first step is done, for loading and compiling."""
    trackers: list[str] = ["tensorboard"]
    """Where metrics go besides metrics.jsonl: tensorboard, wandb, swanlab, mlflow, trackio."""
    peak_tflops: float | None = Field(None, gt=0)
    """Peak of one device in 10^12 operations a second, for MFU; null takes the known GPU's, and none on CPU."""
    profile_steps: tuple[int, int] | None = None
    """First and last step of which each process writes a profiler trace into the run folder."""

    @model_validator(mode="after")
    def _rates_and_steps_fit(self) -> TrainConfig:
        if self.lr_min > self.lr:
            raise ValueError(f"train.lr_min {self.lr_min} is above train.lr {self.lr}")
        if self.lr_decay_style == "constant":
            why = "with train.lr_decay_style constant: remove it, or set lr_decay_style to linear, cosine or wsd"
            refuse_needless(self, "train", ("lr_min", "lr_decay_ratio"), why)
        if self.lr_decay_style == "wsd" and "lr_decay_ratio" not in self.model_fields_set:
            raise ValueError(
                "train.lr_decay_style wsd (warm-up, stable, decay) needs train.lr_decay_ratio, the share of all steps "
                "that decays, such as 0.2: by its default of 1 the rate is never stable"
            )
        if not self.ema_decay:
            refuse_needless(self, "train", ("ema_interval",), "without train.ema_decay: remove it, or set ema_decay")
        first = 1 if self.profile_steps is None else self.profile_steps[0]
        if self.max_steps is not None and first > self.max_steps:
            raise ValueError(
                f"train.profile_steps begins with step {first}, after the last of train.max_steps {self.max_steps}"
            )
        if self.profile_steps is not None and not 1 <= self.profile_steps[0] <= self.profile_steps[1]:
            raise ValueError(
                f"train.profile_steps {list(self.profile_steps)} must be [first, last] with 1 <= first <= last"
            )
        return self


class EpochTrainConfig(TrainConfig):
    """The section train of tasks that go over a data set, perhaps several times."""

    num_train_epochs: int = Field(1, ge=1)
    """Passes over the data when nothing else says how long the run is (train.max_steps; text: data.train_size)."""

    @model_validator(mode="after")
    def _average_moves(self) -> EpochTrainConfig:
        if self.max_steps is not None and (problem := self.describe_unmoved_average(self.max_steps)):
            raise ValueError(problem)
        return self

    def describe_unmoved_average(self, total_steps: int) -> str:
        """What is wrong where a run of so many steps ends before its moving average has moved; else empty."""
        if not self.ema_decay or self.ema_interval <= total_steps:
            return ""
        return (
            f"train.ema_interval {self.ema_interval}: the run has {total_steps} steps, so that its moving average, "
            "which is exported, would be the weights that it began with: lower it"
        )


class TaskConfig(Protocol):
    """What the configurations of all tasks have."""

    @property
    def data(self) -> Section: ...
    @property
    def train(self) -> TrainConfig: ...


class GlyphConfig(Section):
    """Rendered words as images with captions, made in code: nothing is downloaded."""

    characters: str = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
    """Characters of which words are made."""
    length: int = Field(3, ge=1, le=16)
    """Characters in a word."""
    font_sizes: list[int] = [12, 13, 14]
    """Font sizes in pixels, chosen at random."""
    jitter: int = Field(2, ge=0)
    """Largest shift of the word from the centre, in pixels."""
    held_out: float = Field(0.1, gt=0, lt=1)
    """Share of all words, chosen by a hash, that training never shows."""
    num_images: int = Field(20_000, ge=1)
    """Images in one epoch."""
    template: str = 'write "{word}"'
    """Caption; {word} stands for the word."""

    @model_validator(mode="after")
    def _complete(self) -> GlyphConfig:
        if "{word}" not in self.template:
            raise ValueError(f"the template {self.template!r} must contain {{word}}")
        if not self.characters or not self.font_sizes:
            raise ValueError("characters and font_sizes must not be empty")
        return self


SOUND = 1
"""The height that stands for a sound in a size; its width is then the length in milliseconds, and its frames are 1."""

MAX_SECONDS = 3600.0
"""Most seconds of a sound that is trained on or drawn."""


def sound_size(seconds: float) -> tuple[int, int, int]:
    """The size that stands for a sound of so many seconds."""
    return SOUND, max(round(1000 * seconds), 1), 1


def check_size(path: str, height: int, width: int, num_frames: int) -> None:
    """Raises ValueError for samples that no memory holds."""
    if height * width * num_frames > MAX_PIXELS:
        raise ValueError(
            f"{path}.height {height} x {path}.width {width} x {path}.num_frames {num_frames} make samples of "
            f"{height * width * num_frames:,} pixels, more than {MAX_PIXELS:,}: lower one of them"
        )
