"""How often a step waits for the device, by the line that waits, and whether all tensors are on one device: tiny runs
of every task, eager and compiled, with recomputation and with what offloads.

On a GPU ``torch.cuda.set_sync_debug_mode`` warns at each operation that waits; ``torch.cuda.synchronize`` and waits for
events are counted besides. On a CPU eager runs have the device that the tests pretend, which counts the same waits and
refuses operations on tensors of both sides. Waits while samples are drawn, evaluated or saved are counted apart.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from benchmarks.gpu.cells import Bound, Cell, Setting
from benchmarks.gpu.results import ROOT
from benchmarks.gpu.watched import Steps, run_steps
from tests.pretended_device import BESIDE, pretend_device
from tests.tiny import (
    tiny_dit_config,
    tiny_dit_dpo_config,
    tiny_rl_config,
    tiny_text_config,
    tiny_text_rl_config,
)
from tests.tiny_vision import tiny_vision_config


@dataclass(frozen=True)
class TinyTask:
    """A tiny run."""

    task: str
    """Name in ``tasks/``."""
    config: Callable[[Path], dict[str, Any]]
    waits: int
    """Most waits of a step of one optimiser step; of a model that sees transformers makes nearly all, in each of four
    passes, where it reads the sizes of images."""


def encoded_before(make: Callable[..., dict[str, Any]], folder: Path) -> dict[str, Any]:
    """A run on images that are encoded before training: encoders of diffusers wait for the device themselves."""
    return make(folder, data={"cache_dir": str(folder / "cache")}, sample={"num_prompts": 2, "num_inference_steps": 2})


def text(folder: Path, **sections: Any) -> dict[str, Any]:
    return tiny_text_config(folder, **sections)


def autoencoder(folder: Path) -> dict[str, Any]:
    config = tiny_dit_config(folder)
    return {name: config[name] for name in ("model", "data", "train")}


def forward_rl(folder: Path) -> dict[str, Any]:
    return {**tiny_rl_config(folder), "algorithm": {"recipe": "diffusion_nft"}}


PREFERENCE, UNPAIRED = {"data_type": "preference"}, {"data_type": "unpaired"}
REWARD = partial(text, data=PREFERENCE, reward={"objective": "bradley_terry"})
TASKS = {
    "train_text": TinyTask("train_text", tiny_text_config, 1),
    "train_text_dpo": TinyTask("train_text_dpo", partial(text, data=PREFERENCE), 1),
    "train_text_kto": TinyTask("train_text_kto", partial(text, data=UNPAIRED), 2),
    "train_text_images": TinyTask("train_text", tiny_vision_config, 4 * 28 + 1),
    "train_text_reward": TinyTask("train_text_reward", REWARD, 1),
    "train_dit": TinyTask("train_dit", partial(encoded_before, tiny_dit_config), 1),
    "train_dit_dpo": TinyTask("train_dit_dpo", partial(encoded_before, tiny_dit_dpo_config), 1),
    "train_autoencoder": TinyTask("train_autoencoder", autoencoder, 1),
    "rl_diffusion": TinyTask("rl_diffusion", tiny_rl_config, 2),
    "rl_diffusion_forward": TinyTask("rl_diffusion_forward", forward_rl, 2),
    "rl_text": TinyTask("rl_text", tiny_text_rl_config, 2),
}

EAGER = ("train_autoencoder",)
"""Tasks that are neither compiled nor recomputed nor computed in bf16, and refuse such settings."""

OFFLOADED = {"activation_checkpointing": "full", "enable_activation_offload": True}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"compile": False},
    "eager, activations offloaded": {"compile": False, **OFFLOADED},
    "compile": {"compile": True},
    "eager, optimiser offloaded": {"compile": False, "enable_fsdp_offload": True},
    "compile, recomputed": {"compile": True, "activation_checkpointing": "selective"},
    "compile, activations offloaded": {"compile": True, **OFFLOADED},
}
"""Settings of ``train``."""

BOUNDS = (
    Bound(
        "too_many",
        0,
        "find the line in results.jsonl (lines); compute it on the device, or read it together with the norm",
        cells="/(eager|compile)(, activations offloaded)?$",
    ),
)

OWN = (str(ROOT / "sfumato"), str(ROOT / "tasks"))

WAIT = Setting.wait.__code__

MOST_LINES = 25
"""Lines that are written of a task; the others are counted together."""


def cells(setting: Setting) -> dict[str, Cell]:
    """By mode, since tensors on two devices are found sooner than many waits."""
    modes = ("eager", "eager, activations offloaded") if setting.tiny else MODES
    choices = [(name, mode) for mode in modes for name in TASKS if mode == "eager" or name not in EAGER]
    return {f"{name}/{mode}": partial(count, name=name, mode=mode) for name, mode in choices}


def count(setting: Setting, name: str, mode: str) -> dict[str, Any]:
    """Waits of a step after the second, in all and by line."""
    run = TASKS[name]
    config = run.config(setting.scratch / f"{name}_{mode}".replace(" ", "_"))
    settings = {"lr_warmup_steps": 0, "lr_decay_style": "constant"}
    config["train"] |= {"device": setting.device, **settings, **MODES[mode]}
    if setting.on_gpu and name not in EAGER and not run.task.startswith("rl_"):
        config["train"]["mixed_precision"] = "bf16"
    config["train"].pop("max_steps")
    if run.task.startswith("rl_"):
        config["train"].pop("global_batch_size", None)  # one optimiser step
    elif "eval" in config:
        config["eval"] |= {"every_steps": 0}
    if setting.on_gpu:
        with Waits() as waits:
            steps = run_steps(run.task, config, setting, 2, 2, each_step=waits.after_step)
        return per_step(waits.lines, steps, run)
    if MODES[mode]["compile"]:  # what the tests pretend cannot be compiled
        return {"step_ms": run_steps(run.task, config, setting, 2, 1).seconds * 1e3}
    with pretend_device() as device:
        steps = run_steps(run.task, config, setting, 2, 1)
    return per_step(Counter(wait.where[0] if wait.where else "elsewhere" for wait in device.in_step(3)), steps, run)


def per_step(lines: Counter[str], steps: Steps, run: TinyTask) -> dict[str, Any]:
    """Figures of the measured steps, of which ``lines`` have the waits."""
    most = dict(lines.most_common(MOST_LINES))
    by_line = {line: number / steps.count for line, number in most.items()}
    if others := lines.total() - sum(most.values()):
        by_line["others"] = others / steps.count
    waits = lines.total() / steps.count
    step_ms = steps.seconds / steps.count * 1e3
    return {"too_many": max(waits - run.waits, 0), "per_step": waits, "lines": by_line, "step_ms": step_ms}


class Waits:
    """Counts waits for a GPU from the end of the second step on, by the innermost line of sfumato that led to each."""

    def __init__(self) -> None:
        self.counting = False
        self.lines: Counter[str] = Counter()
        self._stack = contextlib.ExitStack()

    def after_step(self, step: int) -> None:
        """Called at the end of each step."""
        self.counting = step >= 2

    def add(self) -> None:
        """A wait of whoever is on the stack."""
        if self.counting and (line := own_line()):
            self.lines[line] += 1

    def __enter__(self) -> Waits:
        self._stack.enter_context(self._watching())
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def _watching(self) -> Iterator[None]:
        def showwarning(message: Warning | str, *args: Any, **named: Any) -> None:
            if "synchronizing CUDA operation" in str(message):
                self.add()

        def counted(function: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **named: Any) -> Any:
                self.add()
                return function(*args, **named)

            return call

        with warnings.catch_warnings(), contextlib.ExitStack() as stack:
            warnings.simplefilter("always")
            warnings.showwarning = showwarning
            for owner, name in (
                (torch.cuda, "synchronize"),
                (torch.cuda.Event, "synchronize"),
                (torch.cuda.Stream, "synchronize"),
            ):
                stack.enter_context(mock.patch.object(owner, name, counted(getattr(owner, name))))
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                torch.cuda.set_sync_debug_mode("default")


def own_line() -> str:
    """``file:line`` of the innermost frame of sfumato on this thread's stack; the caller's where there is none, and
    nothing for a wait of this suite, or beside a step."""
    frame = first = sys._getframe(2)
    line = ""
    while frame is not None:
        path, code = frame.f_code.co_filename, frame.f_code
        if path.startswith(OWN):
            line = line or f"{Path(path).relative_to(ROOT)}:{frame.f_lineno}"
            if code.co_name in BESIDE:
                return ""
        if code is WAIT:
            return ""
        frame = frame.f_back
    return line or f"{Path(first.f_code.co_filename).name}:{first.f_lineno}"
