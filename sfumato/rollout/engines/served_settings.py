"""What settings of engines outside of the library share: vLLM and SGLang."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from sfumato.errors import ConfigError
from sfumato.rollout.engines.weight_files import DTYPES, WeightFiles, own_folder

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class ServedSettings:
    """An engine with a process and weights of its own."""

    is_server: ClassVar[bool] = True

    url: str = ""
    """Server that runs already, http[s]://host[:port]; the page says how to start it."""
    arguments: tuple[str, ...] = ()
    """More arguments of the engine that is started, as its own help names them."""
    environment: dict[str, str] = field(default_factory=dict)
    """More environment variables of the server that is started."""
    tensor_parallel_size: int = 1
    """GPUs that share the model."""
    gpu_memory_utilization: float | None = None
    """Share of the memory of a GPU (or on CPU of the machine) that the engine takes; null: as it chooses."""
    max_model_len: int | None = None
    """Tokens of the longest prompt with its completion; null: what the run needs."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """That the engine computes in, and that weights are sent in."""
    sleep: bool = False
    """Give GPU memory to others while nothing is drawn (vLLM's sleep mode, SGLang's memory saver)."""
    timeout_s: float = 600.0
    """Longest that a completion, or any other answer, may take."""
    start_timeout_s: float = 900.0
    """Longest that the start may take."""
    max_requests: int = 256
    """Requests that are drawn at a time; others wait."""
    weights_folder: str | None = None
    """Where weights are written to for the engine, which must see it; null: weights/ in the run folder. In memory
    (/dev/shm) it is quicker."""
    api_key_env: str = ""
    """Environment variable with the key of the server at url; empty: it asks for none."""

    @property
    def api_key(self) -> str:
        """The key of the server at url; empty where none is asked for. Raises ConfigError when it is not set."""
        key = os.environ.get(self.api_key_env, "") if self.api_key_env else ""
        if self.api_key_env and not key:
            raise ConfigError(f"rollout.engine.api_key_env: the variable {self.api_key_env} is not set")
        return key

    def weight_files(self, template: nn.Module, folder: Path, model_path: str) -> WeightFiles:
        """Where weights are handed over.

        Args:
            template: transformers' module as the actor has it, on meta.
            folder: the run folder.
            model_path: folder of the model's own files.
        """
        where = folder / "weights" if self.weights_folder is None else Path(self.weights_folder)
        return WeightFiles(template, DTYPES[self.dtype], own_folder(where), model_path)
