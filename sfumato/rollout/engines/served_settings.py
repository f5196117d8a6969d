"""Settings that the engines outside of the library, vLLM and SGLang, have in common."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from sfumato.errors import ConfigError
from sfumato.rollout.engines.served.weight_files import DTYPES, WeightFiles, own_folder

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
    """Longest that an answer may take; of completions, since the last one ended, so that those that wait for room in
    the engine are not late."""
    start_timeout_s: float = 900.0
    """Longest that the start may take."""
    max_requests: int = 256
    """Requests that are drawn at a time; others wait."""
    weights_folder: str | None = None
    """Where weights are written to for the engine, which must see it; null: memory that an engine of the run shares,
    where there is room for it, else weights/ in the run folder."""
    api_key_env: str = ""
    """Environment variable with the key of the server at url; empty: it asks for none."""

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "max_requests", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"rollout.engine.{name} {value} must be at least 1")
        for name in ("timeout_s", "start_timeout_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"rollout.engine.{name} {value} must be a number of seconds above 0")
        share = self.gpu_memory_utilization
        if share is not None and not 0 < share <= 1:
            raise ConfigError(f"rollout.engine.gpu_memory_utilization {share} must be above 0 and at most 1")
        self._check_server()

    def _check_server(self) -> None:
        program = getattr(self, "program", "")  # a field of the subclasses
        if self.url and program:
            raise ConfigError("rollout.engine: url and program: the server runs already, or is started; remove one")
        if self.environment and not program:
            raise ConfigError("rollout.engine.environment is for the server that program starts: remove it")
        if self.arguments and self.url:
            raise ConfigError(
                "rollout.engine.arguments are for an engine that is started, not for the server at url: remove it"
            )
        if any(str(argument).startswith("--api-key") for argument in self.arguments):
            raise ConfigError("rollout.engine.arguments: everybody on the machine sees a key there: remove --api-key")
        if self.api_key_env and not self.url:
            raise ConfigError("rollout.engine.api_key_env is for the server at url: remove it")

    def check_installed(self) -> str:
        """Looks for the engine, as ``sfumato check`` does: starts nothing, and asks no server.

        Returns:
            What only a run finds out.

        Raises:
            UserError: says what is missing.
        """
        if self.url:
            _ = self.api_key  # raises where it is not set
            return f"whether the server at {self.url} answers"
        program = Path(getattr(self, "program", ""))
        if not program.is_file():
            raise ConfigError(f"rollout.engine.program {program} is not there, so the server cannot be started")
        if not os.access(program, os.X_OK):
            raise ConfigError(f"rollout.engine.program {program} may not be executed: chmod +x {program}")
        return "whether it takes the model and its arguments"

    @property
    def api_key(self) -> str:
        """The key of the server at url; empty where none is asked for. Raises ConfigError when it is not set."""
        key = os.environ.get(self.api_key_env, "") if self.api_key_env else ""
        if self.api_key_env and not key:
            raise ConfigError(f"rollout.engine.api_key_env: the variable {self.api_key_env} is not set")
        return key

    def weight_files(self, template: nn.Module, folder: Path, model_path: str) -> WeightFiles:
        """Hands weights over to the engine.

        Args:
            template: transformers' module as the actor has it, on meta.
            folder: the run folder.
            model_path: folder of the model's own files.
        """
        dtype = DTYPES[self.dtype]
        weights_folder = folder / "weights" if self.weights_folder is None else Path(self.weights_folder)
        # A server at url may be on another machine, or belong to somebody else: it sees folders alone.
        in_memory = self.weights_folder is None and not self.url
        return WeightFiles(template, dtype, own_folder(weights_folder), model_path, in_memory, folder)
