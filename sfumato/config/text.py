"""Configuration of ``tasks/train_text.py`` and ``tasks/train_text_dpo.py``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from sfumato.config.base import Section, refuse_needless
from sfumato.config.hub import download_model
from sfumato.config.paths import FilePath, ModelPath
from sfumato.config.sections import Expression, LoraConfig
from sfumato.config.text_data import TextDataConfig, TextEvalConfig, TextTrainConfig
from sfumato.config.trust import check_trust


class LanguageModelConfig(Section):
    """The model: which folder or which description it comes from, and what of it is trained."""

    model_path: ModelPath | None = None
    """Folder of a transformers model (config.json, safetensors files, tokenizer), or its name on the hub when the
    local hub cache holds it."""
    download: bool = False
    """Fetch a model_path that is a name on the hub and not in the local hub cache."""
    config_path: FilePath | None = None
    """YAML file with the fields of a transformers configuration (model_type, hidden_size, ...): a model made from
    scratch with random weights; instead of model_path."""
    made_by: FilePath | None = None
    """YAML file of tasks/train_text.py that makes model_path; it is run first when that folder is missing."""
    tokenizer_path: ModelPath | None = None
    """Folder of the tokenizer; null takes model_path. `bytes` is one of 259 tokens that needs no folder."""
    lora: LoraConfig | None = None
    """Train low-rank adapters; null trains all weights."""
    freeze: list[Expression] = []
    """Regular expressions; weights whose names contain one are not trained, such as `visual` of Qwen-VL models."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Precision of what is frozen: with LoRA the base weights, and the reference of preference training."""
    attention: Literal[
        "packed", "sdpa", "eager", "flex_attention", "flash_attention_2", "flash_attention_3", "flash_attention_4"
    ] = "packed"
    """packed computes attention within each document of a packed row only, by torch's kernels on CPU and GPU; the
    others are transformers' own; flash_attention_2, 3 and 4 need the package of that version, or kernels."""
    rows: Literal["auto", "packed", "documents"] = "auto"
    """How packed rows reach the model. packed: as they are. documents: a row for each document, which is right for
    every causal model, recurrent ones too. auto: packed where the model keeps documents apart, else documents."""
    trust_remote_code: Annotated[bool, AfterValidator(check_trust)] = False
    """Whether Python code that lies in model_path may run."""

    @model_validator(mode="before")
    @classmethod
    def _download(cls, fields: object) -> object:
        return download_model(fields)

    @model_validator(mode="after")
    def _one_source(self) -> LanguageModelConfig:
        if (self.model_path is None) == (self.config_path is None):
            raise ValueError("set exactly one of model.model_path (a model folder) and model.config_path (a YAML file)")
        if self.config_path is not None and self.tokenizer_path is None:
            raise ValueError("model.config_path needs model.tokenizer_path, the folder of the tokenizer")
        if self.freeze and self.lora is not None:
            raise ValueError(
                "model.freeze has no effect with model.lora, which freezes all weights: remove one of them"
            )
        if self.lora is not None and self.lora.is_merged:
            raise ValueError(
                f"model.lora.variant {self.lora.variant} is for diffusion models: take lora, rslora or dora"
            )
        if self.made_by is not None and self.model_path is None:
            raise ValueError("model.made_by is the configuration that makes model.model_path: set both")
        return self


class TrainTextConfig(Section):
    """Pretraining and fine-tuning of language models."""

    model: LanguageModelConfig
    """Model."""
    data: TextDataConfig
    """Data."""
    train: TextTrainConfig
    """Training."""
    eval: TextEvalConfig = TextEvalConfig()  # pyright: ignore[reportCallIssue]
    """Evaluation."""

    @model_validator(mode="after")
    def _fits(self) -> TrainTextConfig:
        kind = self.data.data_type
        if kind.documents_per_sample == 2:
            raise ValueError(f"data.data_type {kind.type} is trained by tasks/train_text_dpo.py")
        if kind.numbers:
            raise ValueError(
                f"data.data_type {kind.type} is trained by tasks/train_text_reward.py or tasks/train_text_kto.py"
            )
        if self.model.lora is None:
            why = (
                "without model.lora, since nothing is frozen: remove it, or set train.mixed_precision to bf16, which "
                "computes in bf16"
            )
            refuse_needless(self.model, "model", ("dtype",), why)
        check_text(self.data, self.train, self.eval)
        return self


class DpoConfig(Section):
    """Direct preference optimisation (arXiv 2305.18290) and its relatives, on existing pairs."""

    beta: float = Field(0.1, gt=0)
    """Strength of the pull towards the reference; simpo: scale of the rewards; orpo: weight of the odds ratio."""
    loss: Literal["sigmoid", "ipo", "hinge", "simpo", "orpo"] = "sigmoid"
    """sigmoid: DPO; ipo: arXiv 2310.12036; hinge: SLiC, arXiv 2305.10425. Without a reference: simpo, arXiv 2405.14734;
    orpo, arXiv 2403.07691."""
    gamma: float = Field(0.0, ge=0)
    """simpo: target margin of the rewards."""
    label_smoothing: float = Field(0.0, ge=0, lt=0.5)
    """Assumed share of pairs whose preference is the wrong way round (conservative DPO)."""
    sft_coef: float = Field(0.0, ge=0)
    """Weight of the mean negative log-likelihood of the better answers, added to the loss (arXiv 2404.19733); orpo
    needs it, 1 in its paper."""

    @property
    def has_reference(self) -> bool:
        """Whether the loss compares with a reference."""
        return self.loss not in ("simpo", "orpo")

    @model_validator(mode="after")
    def _parameters_fit(self) -> DpoConfig:
        why = f"with dpo.loss {self.loss}: remove it, or take "
        if self.loss not in ("sigmoid", "simpo"):
            refuse_needless(self, "dpo", ("label_smoothing",), why + "sigmoid or simpo")
        if self.loss != "simpo":
            refuse_needless(self, "dpo", ("gamma",), why + "simpo")
        if self.loss == "orpo" and self.sft_coef == 0:
            raise ValueError(
                "dpo.loss orpo is added to the likelihood of the better answers: set dpo.sft_coef, to 1 as in its paper"
            )
        return self


class TrainTextDpoConfig(TrainTextConfig):
    """Preference training of language models from existing pairs."""

    dpo: DpoConfig = DpoConfig()  # pyright: ignore[reportCallIssue]
    """Objective."""

    @model_validator(mode="after")
    def _fits(self) -> TrainTextDpoConfig:
        if self.data.data_type.documents_per_sample != 2:
            raise ValueError(
                "data.data_type must be preference, image_preference, media_preference, or another format of two "
                "documents a sample"
            )
        if self.data.data_type.numbers:
            raise ValueError(
                f"data.data_type {self.data.data_type.type} is for tasks/train_text_reward.py: take preference"
            )
        if not self.dpo.has_reference and self.model.lora is None:
            why = "without a reference and adapters, since nothing is frozen: remove it"
            refuse_needless(self.model, "model", ("dtype",), why)
        check_scored_answers(self, "preference training")
        return self


class KtoConfig(Section):
    """Learning from answers that are good or bad (KTO, arXiv 2402.01306)."""

    beta: float = Field(0.1, gt=0)
    """Strength of the pull towards the reference."""
    desirable_weight: float = Field(1.0, gt=0)
    """Weight of good answers; with many more bad ones raise it until both weigh about the same."""
    undesirable_weight: float = Field(1.0, gt=0)
    """Weight of bad answers."""


class TrainTextKtoConfig(TrainTextConfig):
    """Preference training of language models from answers that are good or bad."""

    kto: KtoConfig = KtoConfig()  # pyright: ignore[reportCallIssue]
    """Objective."""

    @model_validator(mode="after")
    def _fits(self) -> TrainTextKtoConfig:
        if self.data.data_type.numbers != "labels":
            raise ValueError("data.data_type must be unpaired, or another format with labels of answers")
        check_scored_answers(self, "preference training")
        return self


def check_scored_answers(config: TrainTextConfig, training: str, scorer: str = "") -> None:
    """Checks the sections of a task that learns from the answers of its data, and writes none.

    Args:
        config: of the task.
        training: what it does, for messages.
        scorer: what scores the answers; empty is the training itself.

    Raises:
        ValueError: when a setting has no effect, or sections do not fit together.
    """
    if config.train.ema_decay:
        raise ValueError(f"train.ema_decay: {training} keeps no moving average; leave it at 0")
    if config.model.made_by is not None:
        raise ValueError("model.made_by is for tasks/train_text.py: run the configuration that makes the model first")
    why = f"here: {scorer or training} scores the answers of the data and writes none: remove it"
    refuse_needless(config.eval, "eval", ("num_samples", "max_new_tokens", "stop"), why)
    check_text(config.data, config.train, config.eval)


def check_text(data: TextDataConfig, train: TextTrainConfig, evaluation: TextEvalConfig) -> None:
    """Raises ValueError when sections of a task that learns from text do not fit together."""
    if data.eval_path is None and data.synthetic is None:
        names = [name for name in type(evaluation).model_fields if name != "every_steps"]  # how often nothing happens
        refuse_needless(evaluation, "eval", names, "without data.eval_path: remove it, or set data.eval_path")
    if data.datasets_type == "iterable" and train.max_steps is None and data.train_size is None:
        raise ValueError(
            "data.datasets_type iterable does not know how long the data is: set train.max_steps or data.train_size"
        )
    if train.dyn_bsz and not train.rmpad_with_pos_ids:
        raise ValueError("train.dyn_bsz needs train.rmpad_with_pos_ids, since it packs samples into rows")
