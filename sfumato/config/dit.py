"""Configuration of the tasks that train diffusion models and autoencoders on given images or videos, or on pairs."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from sfumato.config.base import Section, refuse_needless
from sfumato.config.image_data import MASK, SOURCES, ImageTextDataConfig, PairDataConfig
from sfumato.config.parallel import world_size
from sfumato.config.sections import CHANGED_WEIGHTS, EpochTrainConfig, GuidanceScale, ModelConfig


class FlowConfig(Section):
    """Flow matching: which noise levels are trained, and how often without a prompt."""

    timestep_sampling: Literal["uniform", "logit_normal"] | None = None
    """Density from which sigma is drawn before the shift: null takes uniform for models that predict noise or v, as
    Stable Diffusion 1.5, 2 and XL and CogVideoX were trained, and logit_normal (SD3, arXiv 2403.03206) for flows, and
    where its mean or deviation is set."""
    logit_mean: float = 0.0
    """Mean of the normal distribution behind logit_normal."""
    logit_std: float = Field(1.0, gt=0)
    """Standard deviation of the normal distribution behind logit_normal."""
    shift: float | None = Field(None, gt=0)
    """sigma becomes shift sigma / (1 + (shift - 1) sigma); null takes the shift of the model's scheduler."""
    prompt_dropout: float = Field(0.1, ge=0, lt=1)
    """Share of captions that are replaced by the empty prompt, for classifier-free guidance."""

    def density(self, by_model: str) -> str:
        """The density of noise levels: the configured one, or else ``by_model``, which the model was trained with."""
        if self.timestep_sampling is None and self.non_defaults.keys() & {"logit_mean", "logit_std"}:
            return "logit_normal"
        return self.timestep_sampling or by_model

    @model_validator(mode="after")
    def _has_effect(self) -> FlowConfig:
        if self.timestep_sampling == "uniform":
            why = "with flow.timestep_sampling uniform: remove it, or take logit_normal"
            refuse_needless(self, "flow", ("logit_mean", "logit_std"), why)
        return self


class SampleConfig(Section):
    """Sample grids during training: fixed prompts and seeds, no noise after the first latent."""

    prompts: list[str] = []
    """Prompts of the grid, edits of the data's first source images; empty takes captions of the data."""
    num_prompts: int = Field(8, ge=1)
    """How many captions are taken when prompts is empty."""
    every_steps: int = Field(0, ge=0)
    """Steps between grids; 0 draws only the last one."""
    num_inference_steps: int = Field(28, ge=1)
    """Denoising steps."""
    guidance_scale: GuidanceScale = 4.5
    """Classifier-free guidance; 1 is none."""

    @model_validator(mode="after")
    def _has_effect(self) -> SampleConfig:
        if self.prompts:
            why = (
                f"beside the {len(self.prompts)} prompts of sample.prompts, all of which are drawn: remove one of them"
            )
            refuse_needless(self, "sample", ("num_prompts",), why)
        return self


class DitTrainConfig(EpochTrainConfig):
    """The optimiser, the batch, the run folder and the checkpoints."""

    @model_validator(mode="after")
    def _processes_fit(self) -> DitTrainConfig:
        if self.cfg_parallel_size > 1:
            raise ValueError(
                "train.cfg_parallel_size shares the two branches of classifier-free guidance, which training has not: "
                "both ranks would compute the same; leave it out (it is for tasks/rl_diffusion.py)"
            )
        num_ranks = max(world_size() // self.ranks_per_sample, 1)
        per_pass = self.micro_batch_size * num_ranks
        if self.global_batch_size is not None and self.global_batch_size % per_pass:
            raise ValueError(
                f"train.global_batch_size {self.global_batch_size} is not a multiple of train.micro_batch_size "
                f"{self.micro_batch_size} x {num_ranks} data-parallel processes = {per_pass}"
            )
        return self


class TrainDitConfig(Section):
    """Flow-matching pretraining and fine-tuning of diffusion transformers."""

    model: ModelConfig
    """Model."""
    data: ImageTextDataConfig
    """Data."""
    flow: FlowConfig = FlowConfig()  # pyright: ignore[reportCallIssue]
    """Flow matching."""
    train: DitTrainConfig
    """Training."""
    sample: SampleConfig = SampleConfig()  # pyright: ignore[reportCallIssue]
    """Sample grids."""

    @model_validator(mode="after")
    def _encoders_are_there(self) -> TrainDitConfig:
        if not self.model.keep_encoders and self.data.cache_dir is None:
            raise ValueError("model.keep_encoders: false needs data.cache_dir, where the embeddings are kept")
        return self


def check_trained_whole(data: ImageTextDataConfig, train: DitTrainConfig, what: str, why: str) -> None:
    """Raises ValueError for sections that do not fit a model which is trained on images, whole and in float32 in each
    process: ``what`` it is, and ``why`` settings of other models have no effect."""
    if train.ranks_per_sample > 1 or train.expert_parallel_size > 1:
        raise ValueError(f"train: {what} is trained with data parallelism only; set the other sizes to 1")
    data.refuse_sound(what)
    if data.num_frames > 1:
        raise ValueError(f"data.num_frames: {what} is trained on images; set it to 1")
    names = ["ema_decay", "mixed_precision", "init_device", "sequence_parallel", "expert_bias_rate"]
    names += ["compile"] if train.compile else []  # false is what happens
    names += ["activation_checkpointing", *(name for name in DitTrainConfig.model_fields if "enable_" in name)]
    refuse_needless(train, "train", names, why)


class TrainAutoencoderConfig(Section):
    """Training of the image autoencoder of a pipeline made from scratch."""

    model: ModelConfig
    """Model."""
    data: ImageTextDataConfig
    """Data."""
    train: DitTrainConfig
    """Training."""
    kl_coef: float = Field(0.02, ge=0)
    """Weight of the KL term (mean over latent elements) that keeps latents near a standard normal distribution."""

    @model_validator(mode="after")
    def _suits_autoencoders(self) -> TrainAutoencoderConfig:
        if self.model.offload_idle:
            raise ValueError("model.offload_idle would put the autoencoder aside, which is trained here: leave it out")
        why = "here, where the autoencoder alone is trained on images, whole and in float32 in each process: remove it"
        refuse_needless(self.model, "model", ("lora", "keep_encoders"), why)
        refuse_needless(self.data, "data", ("text_key", *SOURCES, "cache_dir", "buckets", *MASK), why)
        check_trained_whole(self.data, self.train, "an autoencoder", why)
        return self


class DitDpoConfig(Section):
    """Diffusion-DPO (arXiv 2311.12908) on existing pairs."""

    beta: float = Field(2000.0, gt=0)
    """Strength of the pull towards the reference. Published: 2000 to 5000."""
    loss: Literal["sigmoid", "hinge"] = "sigmoid"
    """sigmoid: DPO; hinge: SLiC, arXiv 2305.10425."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed share of pairs whose preference is the wrong way round (conservative DPO); for sigmoid."""


class PairEvalConfig(Section):
    """Evaluation on held-out pairs, before the first step, during training and at the end."""

    every_steps: int = Field(0, ge=0)
    """Steps between evaluations; 0 evaluates before the first step and after the last."""
    num_rows: int = Field(256, ge=1)
    """Most held-out pairs that are used, from their beginning."""


class TrainDitDpoConfig(TrainDitConfig):
    """Preference training of diffusion models from existing pairs."""

    data: PairDataConfig
    """Data."""
    dpo: DitDpoConfig = DitDpoConfig()  # pyright: ignore[reportCallIssue]
    """Objective."""
    eval: PairEvalConfig = PairEvalConfig()  # pyright: ignore[reportCallIssue]
    """Evaluation."""

    @model_validator(mode="after")
    def _has_effect(self) -> TrainDitDpoConfig:
        if self.model.lora is not None and self.model.lora.changes_weights:
            raise ValueError(f"model.lora.variant: {CHANGED_WEIGHTS}")
        if self.dpo.loss != "sigmoid":
            why = f"with dpo.loss {self.dpo.loss}: remove it, or take sigmoid"
            refuse_needless(self.dpo, "dpo", ("label_smoothing",), why)
        if self.data.eval_path is None and self.data.data_type != "glyphs":
            why = "without data.eval_path: remove it, or set data.eval_path"
            refuse_needless(self.eval, "eval", ("num_rows",), why)
        return self
