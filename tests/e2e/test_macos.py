"""Tasks on a machine that lacks what macOS lacks (``tests/macos``)."""

import os
import resource
import signal
import sys
from pathlib import Path

import pytest
import torch

from sfumato.config.process_limits import lower_limit
from sfumato.data.media.threads import MOST_THREADS, num_threads
from sfumato.rollout.engines import host_memory
from sfumato.rollout.engines.embedded.engine import free_bytes
from sfumato.tracking.meters import memory_in_use
from tests.tiny import ROOT, run_task_here, run_task_process, tiny_rl_config, weights_in, write_config
from tests.tiny_vision_rl import tiny_vision_rl_config

MACOS = {"PYTHONPATH": f"{ROOT / 'tests' / 'macos'}{os.pathsep}{ROOT}", "MKL_DYNAMIC": "FALSE"}
"""A variable of MKL has ``run_task_process`` start a new python, which imports ``sitecustomize``."""


def test_what_macos_does_not_tell_is_done_without(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(host_memory, "MEMINFO", tmp_path / "meminfo")
    assert 2**28 < free_bytes(torch.device("cpu")) <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2
    monkeypatch.delattr(os, "sched_getaffinity")
    assert 1 <= num_threads() <= MOST_THREADS
    on_linux = memory_in_use()["memory/process_peak_mib"]
    monkeypatch.setattr(sys, "platform", "darwin")
    assert memory_in_use()["memory/process_peak_mib"] < on_linux / 500, "macOS tells bytes"
    before = resource.getrlimit(resource.RLIMIT_AS)
    lower_limit(resource.RLIMIT_AS, 2**40)
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.slow
def test_a_run_without_what_macos_lacks_is_killed_and_goes_on(tmp_path: Path) -> None:
    config = tiny_rl_config(tmp_path, train={"save_steps": 1})
    path = write_config(config, tmp_path / "run.yaml")
    killed = run_task_process("rl_diffusion", path, kill_after=2, env=MACOS)
    assert killed.returncode == -signal.SIGKILL, killed.output
    resumed = run_task_process("rl_diffusion", path, "--train.load_checkpoint_path", "auto", env=MACOS)
    assert resumed.returncode == 0, resumed.output
    whole = run_task_here("rl_diffusion", tiny_rl_config(tmp_path, train={"output_dir": str(tmp_path / "whole")}))
    assert weights_in(resumed.output_dir / "hf_ckpt") == weights_in(whole / "hf_ckpt")


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 2])
def test_rl_of_a_model_that_sees_runs_without_what_macos_lacks(tmp_path: Path, num_processes: int) -> None:
    path = write_config(tiny_vision_rl_config(tmp_path, train={"max_steps": 1}), tmp_path / "run.yaml")
    result = run_task_process("rl_text", path, num_processes=num_processes, env=MACOS)
    assert result.returncode == 0, result.output
    assert result.metrics()[-1]["step"] == 1
