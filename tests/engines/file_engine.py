"""An engine that loads weights as vLLM does, from safetensors that other processes have written, and scores tokens.

It stands in for vLLM where several are needed: what is tested with it is how weights come to engines.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import nn

from sfumato.rollout.engines.base import EngineError, GenerationRequest, Sampling
from sfumato.rollout.engines.served.engine import DrawnTokens, ServedEngine
from sfumato.rollout.engines.served.weight_files import WeightFiles, own_folder
from tests.dist.cases import make_mesh
from tests.engines.served_model import MAX_LENGTH, log_probs, make_model, moved, template

DDP = {"data_parallel_mode": "ddp"}


class FileEngine(ServedEngine):
    """Computes in this process, by a model that it has itself."""

    def __init__(self, files: WeightFiles, build: Callable[[], nn.Module] = make_model) -> None:
        super().__init__("the engine", files, MAX_LENGTH)
        self.module = build().eval()
        self.losses: list[str] = []
        """What it is lost in, and then again: load or score."""
        self.is_lost = False

    def lose(self, where: str) -> None:
        """Loses the engine if it is time."""
        if self.is_lost or self.losses[:1] == [where]:
            del self.losses[:1]
            self.is_lost = True
            raise EngineError(f"the engine has died in {where}")

    @torch.no_grad()
    def load_files(self, folder: Path, version: int) -> None:
        self.lose("load")
        parameters = dict(self.module.named_parameters())
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                assert file.metadata()["version"] == str(version)
                for name in file.keys():  # noqa: SIM118
                    parameters[name].copy_(file.get_tensor(name))

    def flush(self) -> None:
        pass

    def release(self) -> None:
        pass

    def restore(self) -> None:
        pass

    def health(self) -> None:
        if self.is_lost:
            raise EngineError("the engine has died")

    async def _generate(self, request: GenerationRequest, sampling: Sampling) -> DrawnTokens:
        raise NotImplementedError

    def _score(self, tokens: list[int]) -> list[float]:
        self.lose("score")
        return log_probs(self.module, torch.tensor([tokens]))[0].tolist()

    def _pause(self, mode: Literal["keep", "abort"]) -> None:
        pass

    def _resume(self) -> None:
        pass

    def _restart(self) -> None:
        self.is_lost = False
        self.module = make_model()

    def _close(self) -> None:
        pass


class RankSampler:
    """Of each rank of a sampler: an engine of its own."""

    def __init__(self, folder: Path, in_memory: bool, build: Callable[[], nn.Module] | None = None) -> None:
        self.mesh, _ = make_mesh(**DDP)
        shape = template() if build is None else build().to("meta")
        files = WeightFiles(shape, torch.float32, own_folder(folder), in_memory=in_memory)
        self.engine = FileEngine(files, build or make_model)
        self.version, self.sync = 0, None


class RankActor:
    """Of each rank of an actor: the whole model."""

    def __init__(self, build: Callable[[], nn.Module] | None = None) -> None:
        self.mesh, _ = make_mesh(**DDP)
        self.build, self.sync = build, None

    @contextmanager
    def sent_weights(self, version: int) -> Iterator[nn.Module]:
        yield moved(version) if self.build is None else self.build()

    @torch.no_grad()
    def rescore(self, module: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        return log_probs(module, tokens)


def weights_held(state: Any) -> tuple[int, list[str]]:
    """Bytes of the versions that a rank's process has in memory, and the files in its folder."""
    files = state.engine.files
    num_bytes = sum(os.fstat(file.fileno()).st_blocks * 512 for memory in files._slots for file in memory)
    return num_bytes, sorted(f"{path.parent.name}/{path.name}" for path in files.folder.glob("*/*"))


def rescored(state: Any, tokens: torch.Tensor) -> tuple[int, torch.Tensor]:
    return state.version, state.engine.rescore(tokens)


def restarted(state: Any, tokens: torch.Tensor) -> torch.Tensor:
    """After the engine was lost, and loaded its weights again."""
    state.engine.restart()
    return state.engine.rescore(tokens)
