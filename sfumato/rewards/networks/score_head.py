"""The head of the aesthetic predictor, which ImageReward took over: linear layers without activations between them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from sfumato.rewards.networks.folder import assign_tensors

WIDTHS = (1024, 128, 64, 16, 1)


class ScoreHead(nn.Module):
    """Features [B, D] to scores [B]. The names of its weights are those of the published files."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        places = (0, 2, 4, 6, 7)  # the published stack has dropout in between
        self.layers = nn.ModuleDict()
        for place, inputs, outputs in zip(places, (num_features, *WIDTHS), WIDTHS, strict=False):
            self.layers[str(place)] = nn.Linear(inputs, outputs)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            features = layer(features)
        return features.squeeze(-1)


def build_score_head(tensors: Mapping[str, torch.Tensor], num_features: int, folder: Path) -> ScoreHead:
    """A float32 head with these weights, frozen. Raises ConfigError when they are not those of such a head."""
    head = ScoreHead(num_features)
    assign_tensors(head, {name: tensor.float() for name, tensor in tensors.items()}, folder)
    return head.eval().requires_grad_(False)
