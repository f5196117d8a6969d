"""GenEval (arXiv 2310.11513): whether an object detector finds in a picture what its prompt asks for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from sfumato.config.paths import ModelPath
from sfumato.errors import ConfigError, DataError
from sfumato.rewards.base import Reward, Sample
from sfumato.rewards.detections import Detection, is_correct, keep_confident, read_requirements

if TYPE_CHECKING:
    from sfumato.rewards.networks.detector import ColourClassifier, Detector


@dataclass(frozen=True, kw_only=True)
class GenEval(Reward):
    """1 where a detector finds the objects, numbers, colours and positions that GenEval's row asks for, else 0."""

    type: ClassVar[str] = "geneval"
    modality: ClassVar[str] = "image"

    detector: ModelPath
    """Folder of an object detector of transformers with COCO's classes, such as DETR or RT-DETR."""
    clip: ModelPath | None = None
    """Folder of a CLIP model, which tells colours; needed where rows ask for some."""
    threshold: float = 0.3
    """Confidence above which an object counts."""
    counting_threshold: float = 0.9
    """The same in rows of tag ``counting``."""
    position_threshold: float = 0.1
    """Share of both objects' extents by which one must be moved against the other."""
    max_objects: int = 16
    """Most objects of a class that count."""
    device: str = "auto"
    """Where the models run: cpu, cuda, cuda:1 and so on."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Names of the rows by the detector's name of the same class, such as ``{tvmonitor: tv}``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_positive("max_objects")
        for name in ("threshold", "counting_threshold", "position_threshold"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"{name} of reward {self.label!r} must be from 0 to below 1")

    def prepare(self) -> None:
        """Loads detector and CLIP. Raises ConfigError when one is not there."""
        self._load_detector()
        if self.clip is not None:
            self._load_colour_classifier()

    def check_installed(self) -> str:
        """See ``Reward``."""
        from sfumato.rewards.networks.folder import check_folder

        for folder in (self.detector, self.clip):
            if folder is not None:
                check_folder(Path(folder), "config.json")
        return "the weights of its models"

    def check_row(self, prompt: str, metadata: dict[str, object]) -> None:
        """See ``Reward``."""
        include, exclude = read_requirements(metadata)
        if self.clip is None and any(entry.colour is not None for entry in include):
            raise DataError("the row asks for a colour, which needs the field clip: give the folder of a CLIP model")
        names = self._load_detector().names | {*self.aliases.values()}
        unknown = [entry.name for entry in [*include, *exclude] if entry.name not in names]
        if unknown:
            raise DataError(f"the detector knows no {unknown[0]!r}: take one trained on COCO, or give aliases")

    def score(self, samples: list[Sample]) -> list[float]:
        """See ``Reward``."""
        detections = self._load_detector().detect([sample.pixels for sample in samples], self.threshold)
        return [float(self._is_correct(*pair)) for pair in zip(samples, detections, strict=True)]

    def _is_correct(self, sample: Sample, detections: Sequence[Detection]) -> bool:
        include, exclude = read_requirements(sample.metadata)
        renamed = [
            Detection(self.aliases.get(detection.name, detection.name), detection.score, detection.box)
            for detection in detections
        ]
        threshold = self.counting_threshold if sample.metadata.get("tag") == "counting" else self.threshold
        by_name = keep_confident(renamed, threshold, self.max_objects)

        def colour_of(detection: Detection) -> str:
            return self._load_colour_classifier().colour(sample.pixels, detection.name, detection.box)

        return is_correct(include, exclude, by_name, colour_of, self.position_threshold)

    def _load_detector(self) -> Detector:
        from sfumato.rewards.networks.detector import load_detector

        return load_detector(str(self.detector), self.device)

    def _load_colour_classifier(self) -> ColourClassifier:
        from sfumato.rewards.networks.detector import load_colours

        assert self.clip is not None
        return load_colours(str(self.clip), self.device)
