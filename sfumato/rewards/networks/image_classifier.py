"""Classifiers of pictures, such as detectors of what must not be shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from sfumato.rewards.networks.folder import Network, find_architecture, load_image_processor, load_model, loader_of


class ImageClassifier(Network):
    """Gives probabilities of classes to pictures."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Raises ConfigError when the folder holds no classifier of images."""
        from transformers import AutoModelForImageClassification

        find_architecture(folder, ("ImageClassification",), "this reward needs a model for image classification")
        super().__init__(device, dtype)
        self.processor = load_image_processor(folder)
        self.model: Any = load_model(AutoModelForImageClassification, folder, dtype, device)
        self.classes = {str(name).casefold(): int(index) for index, name in self.model.config.id2label.items()}
        """Numbers of the classes by their names in lower case."""

    def __call__(self, images: list[np.ndarray], index: int) -> torch.Tensor:
        """Probability of a class of uint8 [H, W, 3] images, float32 [B]."""
        pixels = self.processor(images=[Image.fromarray(image) for image in images], return_tensors="pt").pixel_values
        logits = self.model(pixel_values=pixels.to(self.device, self.dtype)).logits
        return logits.float().softmax(dim=-1)[:, index]


load_image_classifier = loader_of(ImageClassifier)
