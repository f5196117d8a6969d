"""What may be asked of models besides their prompts; None leaves a setting to the run, or to the model's folder."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from pydantic import ValidationError

from sfumato.config.base import Section
from sfumato.config.rl import RLConfig
from sfumato.errors import ConfigError

if TYPE_CHECKING:
    from sfumato.config.sections import TaskConfig

OF_PICTURES = ("batch_size", "height", "width", "num_frames", "seconds", "num_inference_steps", "guidance_scale")
OF_TEXTS = ("max_new_tokens", "temperature", "top_p", "top_k", "system_prompt", "chat_template")
OF_FOLDERS = ("dtype", "max_sequence_length")
"""Settings that pictures, texts, and folders of weights alone have."""

OPTION_OF = {"num_inference_steps": "steps"}
"""Options whose names differ from those of the settings."""

PROMPT_OPTIONS = {
    "eval_path": "--prompts",
    "prompt_key": "--prompt-key",
    "chat_template": "--chat-template",
    "system_prompt": "--system-prompt",
}
"""Options by the fields of a run's data that they stand for."""


@dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """Settings of sampling, whatever is sampled."""

    seed: int | None = None
    device: str = "auto"
    """auto takes a GPU where there is one."""
    dtype: Literal["fp32", "bf16"] | None = None
    """Of folders of weights, fp32 or bf16: runs keep their own. None takes fp32 on CPUs, and bf16 on GPUs."""
    base: Path | None = None
    """Folder of the model that adapters belong to, where no run says so."""
    batch_size: int | None = None
    """Samples that are drawn together."""

    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    seconds: float | None = None
    num_inference_steps: int | None = None
    guidance_scale: float | None = None
    max_sequence_length: int | None = None
    from_images: bool = False
    """Whether the prompts come with source images, which some models make pictures from and can do without."""

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

    def refuse(self, names: Sequence[str], why: str) -> None:
        """Raises ConfigError for the first of these settings that is given, since it would have no effect."""
        for name in self.given(names):
            option = OPTION_OF.get(name, name).replace("_", "-")
            raise ConfigError(f"--{option} has no effect {why}: leave it out")

    def given(self, names: Sequence[str]) -> dict[str, Any]:
        """Those of these settings that are given."""
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    def dtype_on(self, device: torch.device) -> Literal["fp32", "bf16"]:
        """The precision of folders of weights."""
        return self.dtype or ("bf16" if device.type == "cuda" else "fp32")


SectionT = TypeVar("SectionT", bound=Section)


def build_section(section: type[SectionT], fields: Mapping[str, object]) -> SectionT:
    """A section of a configuration from fields, of which those of ``PROMPT_OPTIONS`` are options of a command.

    Raises:
        ConfigError: naming each option whose value is not valid.
    """
    try:
        return section.model_validate(fields)
    except ValidationError as error:
        texts = [
            f"{PROMPT_OPTIONS[field]} {part['input']!r}: {part['msg'].removeprefix('Value error, ')}; give another "
            "value, or leave the option out"
            for part in error.errors()
            if (field := str(part["loc"][0])) in PROMPT_OPTIONS
        ]
        if not texts:
            raise
        raise ConfigError("\n".join(texts)) from error


def ignore_line(text: str) -> None:
    """Takes lines of loaders of data: what the data of a run says was said when the run began."""


def follow_run(config: TaskConfig, device: torch.device) -> None:
    """Sets this process as a run with that configuration sets its own, so that kernels are the same."""
    if config.train.num_threads is not None:
        torch.set_num_threads(config.train.num_threads)
    if config.train.deterministic:
        torch.use_deterministic_algorithms(True)
    if device.type == "cuda" and isinstance(config, RLConfig):
        torch.backends.cuda.enable_cudnn_sdp(False)  # which RL does, since replays have gradients
