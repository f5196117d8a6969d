"""Configuration of the tasks that make models which understand and draw images."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sfumato.config.base import Section, Variant, refuse_needless
from sfumato.config.dit import DitTrainConfig, check_trained_whole
from sfumato.config.image_data import SOURCES, ImageTextDataConfig
from sfumato.config.paths import FilePath, ModelPath
from sfumato.config.sections import Expression, GuidanceScale
from sfumato.config.text import check_text
from sfumato.config.text_data import TextDataConfig, TextEvalConfig, TextTrainConfig


class PartConfig(Section):
    """A part of a model: the folder that it comes from, or its description."""

    model_path: ModelPath | None = None
    """Folder of the part, as transformers or diffusers wrote it."""
    config_path: FilePath | None = None
    """YAML file with the fields of its configuration: random weights; instead of model_path."""

    @model_validator(mode="after")
    def _one_source(self) -> PartConfig:
        if (self.model_path is None) == (self.config_path is None):
            raise ValueError("set exactly one of model_path (a folder) and config_path (a YAML file)")
        return self


class TrainImageTokenizerConfig(Section):
    """Training of a VQ model, which turns images into codes and codes into images."""

    model: PartConfig
    """diffusers' VQModel."""
    data: ImageTextDataConfig
    """Data."""
    train: DitTrainConfig
    """Training."""
    commitment_coef: float = Field(1.0, gt=0)
    """Weight of the distance between latents and their codes (arXiv 1711.00937, the second and third term)."""

    @model_validator(mode="after")
    def _suits_image_tokenizers(self) -> TrainImageTokenizerConfig:
        why = "here, where a VQ model alone is trained on images, whole and in float32 in each process: remove it"
        refuse_needless(self.data, "data", ("text_key", *SOURCES, "cache_dir", "buckets"), why)
        check_trained_whole(self.data, self.train, "an image tokenizer", why)
        return self


class OmniModelConfig(Section):
    """A model that understands and draws images: its parts, and what of them is trained."""

    unified: PartConfig | None = None
    """A model of transformers that sees and draws by itself (Emu3, Janus); instead of foundation and encoder."""
    foundation: PartConfig | None = None
    """A causal language model of transformers; tokens of images are added to its vocabulary."""
    encoder: PartConfig | None = None
    """A vision encoder of transformers (CLIP, SigLIP, DINOv2, ...), whose patches are projected to tokens."""
    projector: FilePath | None = None
    """Folder `hf_ckpt` of a run of this task, whose projector is taken; null draws its weights."""
    image_tokenizer: ModelPath | None = None
    """Folder of diffusers' VQModel, the codes of which are tokens that are drawn, or with head of its AutoencoderKL,
    whose latents are; it is not trained. A unified model has its own; of one that is described, the folder of that."""
    head: PartConfig | None = None
    """diffusers' SD3Transformer2DModel, which draws latents by flow matching, told hidden states of the foundation."""
    image_tokenizer_made_by: FilePath | None = None
    """YAML file of tasks/train_image_tokenizer.py that makes image_tokenizer; it is run first when that is missing."""
    tokenizer_path: ModelPath | None = None
    """Folder of the tokenizer; null takes the model's. `bytes` is one of 259 tokens that needs no folder."""
    freeze: list[Expression] = []
    """Regular expressions; weights whose names contain one are not trained: `language_model|lm_head`, `vision_tower`,
    or both, which trains the projector alone."""
    attention: Literal["packed", "sdpa", "eager"] = "packed"
    """packed computes attention within each document of a packed row only; the others are transformers' own."""
    rows: Literal["auto", "packed", "documents"] = "auto"
    """How packed rows reach the model: as they are, or a row for each document; auto measures which is right."""

    @model_validator(mode="after")
    def _has_parts(self) -> OmniModelConfig:
        if self.unified is not None:
            refuse_needless(
                self,
                "model",
                ("foundation", "encoder", "projector", "head"),
                "with model.unified, which is whole: remove it",
            )
            if self.unified.model_path is not None and self.image_tokenizer is not None:
                raise ValueError("model.image_tokenizer: the folder of model.unified has one: remove it")
            if self.unified.config_path is not None and self.tokenizer_path is None:
                raise ValueError("model.unified.config_path needs model.tokenizer_path: bytes")
            return self
        for name in ("foundation", "encoder", "image_tokenizer"):
            if getattr(self, name) is None:
                raise ValueError(f"model.{name} is missing: give it, or a model.unified, which is whole")
        assert self.foundation is not None
        if self.foundation.model_path is None and self.tokenizer_path is None:
            raise ValueError("model.foundation.config_path needs model.tokenizer_path, the folder of the tokenizer")
        if self.head is not None and self.image_tokenizer_made_by is not None:
            raise ValueError(
                "model.image_tokenizer_made_by makes codes, which model.head does not draw: remove it, and make an "
                "autoencoder with tasks/train_autoencoder.py first"
            )
        return self


class DrawConfig(Section):
    """Images that are drawn: what training does for guidance, and how evaluation draws."""

    prompt_dropout: float = Field(0.1, ge=0, lt=1)
    """Share of the conversations that draw whose text is hidden, for classifier-free guidance."""
    guidance_scale: GuidanceScale = 1.0
    """Classifier-free guidance of the evaluation, on logits; 1 is none."""
    temperature: float = Field(1.0, ge=0)
    """Of the codes that the evaluation draws; 0 takes the likeliest."""
    size: tuple[int, int] | None = None
    """Height and width in pixels of what a unified model draws that draws any size (Emu3); null: its own."""
    num_prompts: int = Field(32, ge=1)
    """Most prompts of the validation set that are drawn."""
    reward: Annotated[Any, Variant("sfumato.rewards")] | None = None
    """What scores the images that evaluation draws, such as `{type: ocr, detect: false}`."""

    @model_validator(mode="after")
    def _fits(self) -> DrawConfig:
        if self.reward is not None and self.reward.modality not in ("", "image"):
            raise ValueError(f"draw.reward {self.reward.type} scores no images")
        if self.guidance_scale != 1 and self.prompt_dropout == 0:
            raise ValueError("draw.guidance_scale needs a model that draws without a prompt, too: set prompt_dropout")
        return self


class TrainOmniConfig(Section):
    """Training of models that understand and draw images."""

    model: OmniModelConfig
    """Model."""
    data: TextDataConfig
    """Data."""
    train: TextTrainConfig
    """Training."""
    text_coef: float = Field(1.0, ge=0)
    """Weight of loss/text, the mean over the text tokens of a step's loss mask."""
    image_coef: float = Field(1.0, ge=0)
    """Weight of loss/image, the mean over the codes of images of a step's loss mask."""
    draw: DrawConfig = DrawConfig()  # pyright: ignore[reportCallIssue]
    """Drawing."""
    eval: TextEvalConfig = TextEvalConfig()  # pyright: ignore[reportCallIssue]
    """Evaluation."""

    @model_validator(mode="after")
    def _fits(self) -> TrainOmniConfig:
        if not self.data.data_type.draws:
            raise ValueError("data.data_type must be omni_conversation; tasks/train_text.py trains on the others")
        if self.draw.size is not None and self.model.unified is None:
            raise ValueError("draw.size is of model.unified: an image tokenizer that has a folder knows its size")
        if self.train.init_device == "meta" and (self.model.unified is None or self.model.unified.model_path is None):
            raise ValueError("train.init_device meta is not for models that are put together here: take cpu")
        if self.model.head is not None and self.train.data_parallel_mode == "fsdp1":
            raise ValueError("train.data_parallel_mode fsdp1 cannot gather model.head apart: take fsdp2 or ddp")
        if self.model.head is not None and self.draw.temperature != 1:
            raise ValueError("draw.temperature is of codes; model.head draws latents: remove it")
        if self.text_coef == self.image_coef == 0:
            raise ValueError("text_coef and image_coef are both 0, so nothing would be learned")
        if self.train.pipeline_parallel_size > 1:
            raise ValueError("train.pipeline_parallel_size: a model that sees images has no stages: set it to 1")
        if self.model.head is not None and self.train.ranks_per_sample > 1:
            raise ValueError("train: model.head takes data parallelism only; set the other sizes to 1")
        check_text(self.data, self.train, self.eval)
        return self
