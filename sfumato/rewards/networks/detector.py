"""Object detectors of transformers, and colours of what they found by CLIP, as GenEval takes them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from sfumato.rewards.detections import COLOURS, Detection
from sfumato.rewards.networks.embedder import Embedder
from sfumato.rewards.networks.folder import (
    Network,
    load_image_processor,
    load_model,
    load_once,
    load_tokenizer,
    pick_device,
)

BATCH = 8
"""Pictures in one forward pass."""

TEMPLATES = ("a photo of a {colour} {name}", "a photo of a {colour}-colored {name}", "a photo of a {colour} object")
"""GenEval's texts for colours."""


class Detector(Network):
    """An object detector of transformers."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Raises ConfigError when the folder holds none."""
        from transformers import AutoModelForObjectDetection

        super().__init__(device)
        self.processor = load_image_processor(folder)
        self.model: Any = load_model(AutoModelForObjectDetection, folder, torch.float32, device)
        labels: dict[int, str] = self.model.config.id2label
        self._labels = labels
        self.names = {*labels.values()}
        """The classes that it knows."""

    @torch.no_grad()
    def detect(self, images: Sequence[np.ndarray], threshold: float) -> list[list[Detection]]:
        """Objects of uint8 ``[H, W, 3]`` pictures with a confidence above ``threshold``."""
        detections: list[list[Detection]] = []
        with self.lock:
            for start in range(0, len(images), BATCH):
                batch = images[start : start + BATCH]
                inputs = self.processor(images=[Image.fromarray(image) for image in batch], return_tensors="pt")
                output = self.model(**{name: value.to(self.device) for name, value in inputs.items()})
                sizes = torch.tensor([image.shape[:2] for image in batch])
                outputs = self.processor.post_process_object_detection(output, threshold, target_sizes=sizes)
                detections += [self._read(of_image) for of_image in outputs]
        return detections

    def _read(self, output: dict[str, torch.Tensor]) -> list[Detection]:
        values = zip(output["labels"].tolist(), output["scores"].tolist(), output["boxes"].tolist(), strict=True)
        return [Detection(self._labels[label], score, tuple(box)) for label, score, box in values]


class ColourClassifier:
    """Tells the colour of an object by CLIP, among GenEval's ten."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        """Raises ConfigError when the folder holds no CLIP model."""
        self.embedder = Embedder(folder, device, torch.float32)
        self.embedder.tokenizer = load_tokenizer(folder)
        self._texts: dict[str, torch.Tensor] = {}

    @torch.no_grad()
    def colour(self, image: np.ndarray, name: str, box: tuple[float, float, float, float]) -> str:
        """The likeliest colour of the object in a box (left, top, right, bottom) of a uint8 ``[H, W, 3]`` picture."""
        left, top, right, bottom = (round(edge) for edge in box)
        height, width = image.shape[:2]
        left, top = min(max(left, 0), width - 1), min(max(top, 0), height - 1)
        crop = image[top : max(bottom, top + 1), left : max(right, left + 1)]
        with self.embedder.lock:
            cosines = self._embed_colours(name) @ self.embedder.images([np.ascontiguousarray(crop)])[0]
        return COLOURS[int(cosines.argmax())]

    def _embed_colours(self, name: str) -> torch.Tensor:
        """Embeddings of the colours of a class of objects, float32 ``[10, D]``, mean over the templates."""
        if name not in self._texts:
            texts = [template.format(colour=colour, name=name) for colour in COLOURS for template in TEMPLATES]
            embedded = self.embedder.texts(texts).view(len(COLOURS), len(TEMPLATES), -1).mean(1)
            self._texts[name] = torch.nn.functional.normalize(embedded, dim=-1)
        return self._texts[name]


load_detector = load_once(lambda folder, device: Detector(Path(folder), pick_device(device)))
load_colours = load_once(lambda folder, device: ColourClassifier(Path(folder), pick_device(device)))
