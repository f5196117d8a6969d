"""Classifiers of pictures, such as detectors of what must not be shown."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from sfumato.errors import ConfigError
from sfumato.rewards.networks.folder import check_folder, load_image_processor, load_model, loader_of, read_json


class ImageClassifier:
    """Gives probabilities of classes to pictures."""

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype) -> None:
        """Raises ConfigError when the folder holds no classifier of images."""
        from transformers import AutoModelForImageClassification

        check_folder(folder, "config.json")
        architectures = read_json(folder / "config.json").get("architectures") or []
        if not any(str(architecture).endswith("ForImageClassification") for architecture in architectures):
            raise ConfigError(
                f"model_path {folder} holds {', '.join(map(str, architectures)) or 'no named architecture'}, but this "
                "reward needs a model for image classification"
            )
        self.lock = threading.Lock()
        self.device = device
        self.dtype = dtype
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
