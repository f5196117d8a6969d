"""LAION's aesthetic predictor: a CLIP model and a head on its image embeddings."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path

from sfumato.rewards.networks.embedder import Embedder, load_embedder
from sfumato.rewards.networks.folder import check_folder, check_model_type, iterate_tensors, load_once
from sfumato.rewards.networks.score_head import ScoreHead, build_score_head

HEAD_FILE = "aesthetic.safetensors"


@dataclasses.dataclass(frozen=True)
class AestheticNetwork:
    """The embedder may belong to other rewards, too; whoever uses it holds its lock."""

    embedder: Embedder
    head: ScoreHead

    @property
    def lock(self) -> threading.Lock:
        """That of the embedder."""
        return self.embedder.lock


@load_once
def load_aesthetic(folder: str, device: str, dtype: str) -> AestheticNetwork:
    """The network of a folder. Raises ConfigError when its CLIP model or its head is missing or does not fit."""
    check_model_type(Path(folder), ("clip",))
    check_folder(Path(folder), HEAD_FILE)
    embedder = load_embedder(folder, device, dtype)
    tensors = dict(iterate_tensors(Path(folder), HEAD_FILE))
    head = build_score_head(tensors, embedder.model.config.projection_dim, Path(folder))
    return AestheticNetwork(embedder, head.to(embedder.device))
