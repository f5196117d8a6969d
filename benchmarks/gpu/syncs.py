"""How often a step waits for the device, by the line that waits: tiny runs of every task with several micro-batches.

On a GPU ``torch.cuda.set_sync_debug_mode`` warns at each operation that waits; ``torch.cuda.synchronize`` and waits for
events are counted besides. On a CPU, where nothing waits, operations are counted that would: those that bring a number
to Python, or whose result has a size that depends on values; also of what stays on the CPU beside a GPU, such as the
loader's tensors.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.gpu.cells import Cell, Setting
from benchmarks.gpu.results import ROOT
from benchmarks.gpu.watched import run_steps
from tests.tiny import (
    tiny_dit_config,
    tiny_dit_dpo_config,
    tiny_rl_config,
    tiny_text_config,
    tiny_text_rl_config,
)

TASKS: dict[str, Callable[..., dict[str, Any]]] = {
    "train_text": tiny_text_config,
    "train_dit": tiny_dit_config,
    "train_dit_dpo": tiny_dit_dpo_config,
    "rl_diffusion": tiny_rl_config,
    "rl_text": tiny_text_rl_config,
}

WAITING = ("_local_scalar_dense", "nonzero", "is_nonzero", "masked_select", "equal", "_unique2")
"""Operations of aten that wait for a GPU."""

OWN = (str(ROOT / "sfumato"), str(ROOT / "tasks"))

WAIT = Setting.wait.__code__

MOST_LINES = 25
"""Lines that are written of a task; the others are counted together."""


def cells(setting: Setting) -> dict[str, Cell]:
    return {task: lambda given, task=task: count(given, task) for task in TASKS}


def count(setting: Setting, task: str) -> dict[str, Any]:
    """Waits of a step after the second, in all and by line, and its micro-batches."""
    config = TASKS[task](setting.scratch / task)
    settings = {"lr_warmup_steps": 0, "lr_decay_style": "constant", "compile": False}
    config["train"] |= {"device": setting.device, **settings}
    if setting.on_gpu and not task.startswith("rl_"):
        config["train"]["mixed_precision"] = "bf16"
    config["train"].pop("max_steps")
    if task.startswith("rl_"):
        config["train"].pop("global_batch_size", None)  # one optimiser step
    elif "eval" in config:
        config["eval"] |= {"every_steps": 0}
    with Waits(setting.on_gpu) as waits:
        steps = run_steps(task, config, setting, 2, setting.size(2, 1), each_step=waits.after_step)
    lines = Counter({line: number / steps.count for line, number in waits.lines.items()})
    shown = dict(lines.most_common(MOST_LINES))
    rest = sum(lines.values()) - sum(shown.values())
    found = {"per_step": sum(lines.values()), "lines": shown | ({"others": rest} if rest else {})}
    return found | {"step_ms": steps.seconds / steps.count * 1e3}


class Waits:
    """Counts waits from the end of the second step on, by the innermost line of sfumato that led to each."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu, self.counting = on_gpu, False
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
        self._stack.enter_context(self._on_gpu() if self.on_gpu else Counted(self))
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    @contextlib.contextmanager
    def _on_gpu(self) -> Iterator[None]:
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


class Counted(TorchDispatchMode):
    """Counts ``WAITING`` operations of all tensors."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self.waits = waits

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in WAITING:
            self.waits.add()
        return function(*args, **(kwargs or {}))


def own_line() -> str:
    """``file:line`` of the innermost frame of sfumato on this thread's stack; the caller's where there is none, and
    nothing for a wait of this suite."""
    frame = first = sys._getframe(2)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(OWN):
            return f"{Path(path).relative_to(ROOT)}:{frame.f_lineno}"
        if frame.f_code is WAIT:
            return ""
        frame = frame.f_back
    return f"{Path(first.f_code.co_filename).name}:{first.f_lineno}"
