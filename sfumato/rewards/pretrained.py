"""Rewards that run a pretrained model, and what they share: where it lies, where it runs, and in which batches."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sfumato.config.open_mappings import JsonObject
from sfumato.config.paths import ModelPath
from sfumato.config.user_functions import import_function
from sfumato.errors import ConfigError, DataError
from sfumato.rewards.base import Reward, Sample
from sfumato.rewards.differentiable import DifferentiableReward

if TYPE_CHECKING:
    import numpy as np
    import torch

    from sfumato.rewards.networks.classifier import Classifier, StepClassifier
    from sfumato.rewards.networks.embedder import AestheticNetwork, Embedder
    from sfumato.rewards.networks.hpsv3 import HpsV3Network
    from sfumato.rewards.networks.image_classifier import ImageClassifier
    from sfumato.rewards.networks.image_reward import ImageRewardNetwork

_DEVICE = re.compile(r"auto|cpu|cuda(:\d+)?")


@dataclass(frozen=True, kw_only=True)
class PretrainedReward(Reward):
    """Base of rewards with a model from a local folder, which is loaded once per process and setting.

    A subclass defines ``loader`` and ``score_batch``. Raises ConfigError without ``loader``, or when a setting
    is wrong.
    """

    loader: ClassVar[str]
    """Import path of the function that makes the network of a folder, a device and a type, one per process and
    arguments; the network has a ``lock``. It raises ConfigError for a wrong folder."""

    model_path: ModelPath
    """Folder of the model; docs/rewards.md says for each reward what must lie in it."""
    device: str = "auto"
    """Where the model runs: cpu, cuda, cuda:1 and so on; auto is this process's GPU, else the CPU."""
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Type of the model's weights."""
    batch_size: int = 16
    """Samples in one forward pass."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(getattr(self, "loader", None), str):
            raise ConfigError(
                f"{type(self).__name__} must set loader, the import path of the function that makes its network, such "
                f"as {type(self).__module__}:load"
            )
        if not _DEVICE.fullmatch(self.device):
            raise ConfigError(f"device of reward {self.label!r} must be auto, cpu, cuda or cuda:N, not {self.device!r}")
        self._check_positive("batch_size")

    @abstractmethod
    def score_batch(self, network: Any, samples: list[Sample]) -> torch.Tensor:
        """Scores of at most ``batch_size`` samples, a float tensor [B]. The caller holds the network's lock."""

    def prepare(self) -> None:
        """Loads the model. Raises ConfigError that names what the folder lacks."""
        self._network()

    def check_installed(self) -> str:
        """See ``Reward``."""
        from sfumato.rewards.networks.folder import check_folder

        check_folder(Path(self.model_path))
        return "the files of its model"

    def score(self, samples: list[Sample]) -> list[float]:
        """The model's score of each sample."""
        import torch

        network = self._network()
        values: list[float] = []
        for start in range(0, len(samples), self.batch_size):
            with network.lock, torch.inference_mode():
                values += self.score_batch(network, samples[start : start + self.batch_size]).tolist()
        return values

    def take_notes(self) -> list[str]:
        """As ``Reward.take_notes``, with a prompt that the model does not read to its end; none with ``process``."""
        cut_texts = None if self.process else getattr(self._network(), "cut_texts", None)
        return super().take_notes() + (cut_texts.take_notes() if cut_texts is not None else [])

    def _network(self) -> Any:
        try:
            return import_function(self.loader)(self.model_path, self.device, self.dtype)
        except ConfigError as error:
            raise ConfigError(f"reward {self.label!r}: {error}") from error


@dataclass(frozen=True, kw_only=True)
class _PixelNetworkReward(PretrainedReward, DifferentiableReward):
    """Base of rewards with a network that takes pixels. A subclass defines ``score_with`` besides ``score_batch``."""

    modality: ClassVar[str] = "image"

    @abstractmethod
    def score_with(self, network: Any, pixels: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        """As ``score_pixels`` with the network, whose lock the caller holds; its device may be another."""

    def score_pixels(self, pixels: torch.Tensor, prompts: Sequence[str]) -> torch.Tensor:
        """As ``DifferentiableReward.score_pixels``, in one forward pass whatever ``batch_size`` says."""
        network = self._network()
        with network.lock:
            return self.score_with(network, pixels, list(prompts)).float().to(pixels.device)


@dataclass(frozen=True, kw_only=True)
class _ClipReward(_PixelNetworkReward):
    """Base of rewards that are a function of the cosine between image and prompt."""

    loader: ClassVar[str] = "sfumato.rewards.networks.embedder:load_clip"

    @property
    def reads_prompt(self) -> bool:
        """See ``DifferentiableReward``."""
        return True

    def score_batch(self, network: Embedder, samples: list[Sample]) -> torch.Tensor:
        """Cosine of each image with its prompt, [B]."""
        return network.cosines([sample.pixels for sample in samples], [sample.prompt for sample in samples])

    def score_with(self, network: Embedder, pixels: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        """The same of pixels."""
        return network.pixel_cosines(pixels, prompts)


@dataclass(frozen=True, kw_only=True)
class ClipScore(_ClipReward):
    """Cosine of image and prompt times CLIP's own scale, divided by 30 as in Flow-GRPO."""

    type: ClassVar[str] = "clip_score"
    divisor: ClassVar[int] = 30

    def score_batch(self, network: Embedder, samples: list[Sample]) -> torch.Tensor:
        """``exp(logit_scale) · cos / divisor`` for each sample, [B]."""
        return network.scale * super().score_batch(network, samples) / self.divisor

    def score_with(self, network: Embedder, pixels: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        """The same of pixels."""
        return network.scale * super().score_with(network, pixels, prompts) / self.divisor


@dataclass(frozen=True, kw_only=True)
class PickScore(ClipScore):
    """Preference of people for an image given its prompt, by PickScore, divided by 26 as in Flow-GRPO."""

    type: ClassVar[str] = "pickscore"
    divisor: ClassVar[int] = 26


@dataclass(frozen=True, kw_only=True)
class HpsV2(_ClipReward):
    """Preference of people for an image given its prompt, by HPSv2: the cosine itself, of the whole image."""

    type: ClassVar[str] = "hpsv2"

    def score_batch(self, network: Embedder, samples: list[Sample]) -> torch.Tensor:
        """Cosine of each image, scaled to fit whole and not cut as CLIP's are, with its prompt, [B]."""
        images = [sample.pixels for sample in samples]
        prompts = [sample.prompt for sample in samples]
        return network.cosines(images, prompts, whole=True)

    def score_with(self, network: Embedder, pixels: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        """The same of pixels."""
        return network.pixel_cosines(pixels, prompts, whole=True)


@dataclass(frozen=True, kw_only=True)
class Aesthetic(_PixelNetworkReward):
    """Predicted rating of the image by people, about 1 to 10, by LAION's aesthetic predictor.

    It works on embeddings of CLIP ViT-L/14: https://github.com/christophschuhmann/improved-aesthetic-predictor.
    """

    type: ClassVar[str] = "aesthetic"
    loader: ClassVar[str] = "sfumato.rewards.networks.embedder:load_aesthetic"

    def score_batch(self, network: AestheticNetwork, samples: list[Sample]) -> torch.Tensor:
        """``head(embedding / |embedding|)`` of each image, [B]."""
        return network.head(network.embedder.images([sample.pixels for sample in samples]))

    def score_with(self, network: AestheticNetwork, pixels: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        """The same of pixels."""
        del prompts
        return network.head(network.embedder.pixels(pixels))


@dataclass(frozen=True, kw_only=True)
class ImageReward(_PixelNetworkReward):
    """Preference of people for an image given its prompt, about -2 to 2 and 0 on average, by ImageReward.

    A BLIP model reads the prompt while it looks at the image (Xu et al., 2023, https://arxiv.org/abs/2304.05977).
    """

    type: ClassVar[str] = "image_reward"
    loader: ClassVar[str] = "sfumato.rewards.networks.image_reward:load_image_reward"

    @property
    def reads_prompt(self) -> bool:
        """See ``DifferentiableReward``."""
        return True

    def score_batch(self, network: ImageRewardNetwork, samples: list[Sample]) -> torch.Tensor:
        """``(head(features) - 0.1672) / 1.0333`` for each sample, [B]."""
        return network([sample.pixels for sample in samples], [sample.prompt for sample in samples])

    def score_with(self, network: ImageRewardNetwork, pixels: torch.Tensor, prompts: list[str]) -> torch.Tensor:
        """The same of pixels."""
        return network.pixels(pixels, prompts)


_SPECIAL = re.compile(r"<\|\w+\|>")


@dataclass(frozen=True, kw_only=True)
class ChatModelReward(PretrainedReward):
    """A reward by a chat model, to which a prompt must not say what it takes for a token of its own."""

    def check_row(self, prompt: str, metadata: dict[str, object]) -> None:
        """Raises DataError for a prompt with a token of the model, such as ``<|Reward|>``."""
        del metadata
        special = _SPECIAL.search(prompt)
        if special:
            raise DataError(f"reward {self.label!r} cannot read prompt {prompt!r}: take {special.group()} out of it")


@dataclass(frozen=True, kw_only=True)
class HpsV3(ChatModelReward):
    """Preference of people for an image given its prompt, about 0 to 15, by HPSv3.

    A Qwen2-VL with a head that rates the image (Ma et al., 2025, https://arxiv.org/abs/2508.03789).
    """

    type: ClassVar[str] = "hpsv3"
    modality: ClassVar[str] = "image"
    loader: ClassVar[str] = "sfumato.rewards.networks.hpsv3:load_hpsv3"

    dtype: Literal["fp32", "bf16", "fp16"] = "bf16"
    """Type of the model's weights; the head's are float32."""
    batch_size: int = 4
    """Samples in one forward pass."""

    def score_batch(self, network: HpsV3Network, samples: list[Sample]) -> torch.Tensor:
        """The mean of the predicted distribution of the preference for each sample, [B]."""
        # samples of a reward server come without check_row
        for sample in samples:
            self.check_row(sample.prompt, sample.metadata)
        return network([sample.pixels for sample in samples], [sample.prompt for sample in samples])[:, 0]


def source_of(sample: Sample, label: str) -> np.ndarray:
    """The image that was edited, uint8 [H, W, 3]. Raises DataError without one."""
    if sample.source is None:
        raise DataError(
            f"reward {label!r} compares with the image that was edited, but the sample of prompt {sample.prompt!r} has "
            "none: it is for editing"
        )
    return sample.source


@dataclass(frozen=True, kw_only=True)
class ImageSimilarity(PretrainedReward):
    """Cosine of the embeddings of the image and of its source image, by CLIP, SigLIP or DINOv2."""

    type: ClassVar[str] = "image_similarity"
    modality: ClassVar[str] = "image"
    compares_source: ClassVar[bool] = True
    loader: ClassVar[str] = "sfumato.rewards.networks.embedder:load_embedder"

    def score_batch(self, network: Embedder, samples: list[Sample]) -> torch.Tensor:
        """``cos(embed(image), embed(source image))`` for each sample, [B]. Raises DataError without source image."""
        sources = network.images([source_of(sample, self.label) for sample in samples])
        return (network.images([sample.pixels for sample in samples]) * sources).sum(dim=-1)


@dataclass(frozen=True, kw_only=True)
class ImageClass(PretrainedReward):
    """Probability that a classifier gives one of its classes to the image; with ``evaluation_only`` a guard."""

    type: ClassVar[str] = "image_class"
    modality: ClassVar[str] = "image"
    loader: ClassVar[str] = "sfumato.rewards.networks.image_classifier:load_image_classifier"

    image_class: str
    """Name of the class, as ``id2label`` in the model's config.json has it, such as nsfw; its case does not matter."""

    def prepare(self) -> None:
        """As ``PretrainedReward.prepare``. Raises ConfigError that lists the model's classes when there is no such."""
        classes = self._network().classes
        if self.image_class.casefold() not in classes:
            raise ConfigError(
                f"image_class {self.image_class!r} of reward {self.label!r} is no class of {self.model_path}; there "
                f"are {', '.join(sorted(classes))}"
            )

    def score_batch(self, network: ImageClassifier, samples: list[Sample]) -> torch.Tensor:
        """The probability for each sample, [B]."""
        return network([sample.pixels for sample in samples], network.classes[self.image_class.casefold()])


@dataclass(frozen=True, kw_only=True)
class TextRewardModel(PretrainedReward):
    """Output of a reward model on the conversation that the generated text ends, such as Skywork-Reward."""

    type: ClassVar[str] = "text_reward_model"
    modality: ClassVar[str] = "text"
    loader: ClassVar[str] = "sfumato.rewards.networks.classifier:load_classifier"

    def score_batch(self, network: Classifier, samples: list[Sample]) -> torch.Tensor:
        """The single logit of each conversation, [B]; NaN for one that is longer than the model can read."""
        conversations = []
        for sample in samples:
            prompt, text = self._split_conversation(sample)
            conversations.append(sample.messages or [*prompt, {"role": "assistant", "content": text}])
        return network(conversations)

    def _split_conversation(self, sample: Sample) -> tuple[list[JsonObject], str]:
        """The messages before the last answer, and that answer."""
        if sample.text is None:
            raise DataError(f"reward {self.label!r} scores texts, but the sample of prompt {sample.prompt!r} has none")
        if sample.messages and sample.messages[-1].get("role") == "assistant":
            return sample.messages[:-1], sample.messages[-1].get("content") or ""
        question = sample.metadata.get("messages") or [{"role": "user", "content": sample.prompt}]
        return question, sample.text


@dataclass(frozen=True, kw_only=True)
class ProcessRewardModel(TextRewardModel):
    """Probabilities that the steps of the generated text are right, by a process reward model, as one number."""

    type: ClassVar[str] = "process_reward_model"
    loader: ClassVar[str] = "sfumato.rewards.networks.classifier:load_step_classifier"

    aggregation: Literal["min", "product", "mean", "last"] = "min"
    """Of the steps' probabilities: the smallest (arXiv 2312.08935), their product (arXiv 2305.20050), their mean, or
    that of the last step."""
    steps_by: Literal["paragraph", "line"] = "paragraph"
    """What parts steps, an empty line or a line break, as in the data that the model was trained on."""

    def score_batch(self, network: StepClassifier, samples: list[Sample]) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The aggregated probability of each answer, [B]; NaN for one without steps, or longer than the model reads."""
        import torch

        from sfumato.rewards.networks.classifier import aggregate_steps

        separator = {"paragraph": "\n\n", "line": "\n"}[self.steps_by]
        answers = []
        for sample in samples:
            prompt, text = self._split_conversation(sample)
            answers.append((prompt, [step for step in text.split(separator) if step.strip()]))
        no_steps = torch.tensor(torch.nan)
        rewards = []
        for probabilities in network(answers, separator):
            rewards.append(aggregate_steps(probabilities, self.aggregation) if len(probabilities) else no_steps)
        return torch.stack(rewards)
