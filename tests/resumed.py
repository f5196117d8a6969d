"""Runs that are stopped in the middle and resumed, beside the run that was not."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest

from sfumato.config.load import merge
from tests.tiny import load_task, run_task_here, run_task_process, weights_in, write_config


def assert_same_run(left: Path, right: Path) -> None:
    """Metrics are equal byte by byte, and exported weights to the bit."""
    assert (left / "metrics.jsonl").read_bytes() == (right / "metrics.jsonl").read_bytes()
    assert weights_in(left / "hf_ckpt") == weights_in(right / "hf_ckpt")


def resume_after_kill(task: str, config: dict[str, Any], folder: Path) -> Path:
    """Runs a task in ``folder/run``, kills its process once step 3 is logged, and returns the run that went on."""
    train = {"output_dir": str(folder / "run"), "load_checkpoint_path": "auto"}
    config = merge(config, {"train": train})
    run_task_process(task, write_config(config, folder / "config.yaml"), kill_after=3)
    assert not (folder / "run" / "hf_ckpt").exists()
    return run_task_here(task, config)


def resume_after_interrupt(task: str | ModuleType, config: dict[str, Any], step: int) -> Path:
    """Runs a task of RL until Ctrl-C in the update of a step, and returns the run that went on."""
    module = load_task(task) if isinstance(task, str) else task
    update = module.update_policy

    def interrupt_at_step(actor: Any, part: Any, advantages: Any, parsed: Any, number: int, *more: Any) -> Any:
        if number == step:
            raise KeyboardInterrupt
        return update(actor, part, advantages, parsed, number, *more)

    with mock.patch.object(module, "update_policy", interrupt_at_step), pytest.raises(KeyboardInterrupt):
        run_task_here(module, config)
    return run_task_here(module, merge(config, {"train": {"load_checkpoint_path": "auto"}}))
