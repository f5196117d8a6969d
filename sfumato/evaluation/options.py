"""What may be asked of models besides their prompts; None leaves a setting to the run, or to the model's folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from sfumato.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Settings of sampling, whatever is sampled."""

    seed: int | None = None
    device: str = "auto"
    """auto takes a GPU where there is one."""
    dtype: str | None = None
    """Of folders of weights, fp32 or bf16: runs keep their own. None takes fp32 on CPUs, and bf16 on GPUs."""
    base: Path | None = None
    """Folder of the model that adapters belong to, where no run says so."""
    batch_size: int | None = None
    """Samples that are drawn together."""

    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    max_sequence_length: int | None = None

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    system_prompt: str | None = None
    chat_template: str | None = None
    """A Jinja file, `chatml`, or `none`."""

    say: Callable[[str], None] = print
    """Takes lines for the person who watches."""

    def find_device(self) -> torch.device:
        """The device. Raises ConfigError when there is no such one."""
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ConfigError("--device cuda: torch finds no GPU: install a CUDA build of torch, or take cpu")
        return torch.device("cuda" if torch.cuda.is_available() and self.device != "cpu" else "cpu")

    def dtype_on(self, device: torch.device) -> str:
        """The precision of folders of weights."""
        return self.dtype or ("bf16" if device.type == "cuda" else "fp32")
