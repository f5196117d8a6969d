"""``tasks/rl_text.py`` with vLLM as its engine, for real: what reaches it and what it draws, and runs that lose it."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file, save_file

from sfumato.errors import RoleLostError, WeightSyncError
from sfumato.rollout.debug.dumps import dump_path, read_dump
from sfumato.rollout.engines.base import Completion, EngineError
from sfumato.rollout.engines.served.weight_files import WeightFiles
from sfumato.rollout.engines.vllm import VllmEngine
from sfumato.tracking.exit import ending_of
from sfumato.tracking.json_lines import read_jsonl
from tests.engines.served_model import CPU_ENVIRONMENT, NEEDS_VLLM, tokens_drawn, vllm_program, write_byte_model
from tests.tiny import (
    run_task_here,
    run_task_process,
    tiny_text_rl_config,
    write_config,
)

pytestmark = NEEDS_VLLM

SAMPLES = 16
"""That an iteration draws."""


def config_of(folder: Path, model: Path, name: str, **engine: Any) -> dict[str, Any]:
    """A run whose answers are long enough to be interrupted."""
    vllm = {
        "type": "vllm",
        "program": vllm_program(),
        "arguments": ["--enforce-eager"],
        "environment": CPU_ENVIRONMENT,
        "dtype": "float32",
        "max_model_len": 256,
        **engine,
    }
    settings = {
        "model": {"config_path": None, "tokenizer_path": None, "model_path": str(model)},
        "rollout": {
            "hybrid_engine": False,
            "engine": vllm,
            "tolerance": 1e-3,
            "temperature": 0.8,
            "max_new_tokens": 150,
            "dump": True,
        },
        "train": {"max_steps": 3, "lr": 1e-2, "output_dir": str(folder / name)},
    }
    return tiny_text_rl_config(folder, **settings)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in files."""
    return write_byte_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def undisturbed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of it."""
    folder = tmp_path_factory.mktemp("undisturbed")
    return run_task_here("rl_text", config_of(folder, model, "run"))


def test_a_run_draws_with_vllm(undisturbed: Path) -> None:
    lines = [line for line in read_jsonl(undisturbed / "metrics.jsonl") if "mismatch/log_ratio_max" in line]
    assert len(lines) == 3 and all(0 < line["mismatch/log_ratio_max"] < 3e-5 for line in lines)
    assert [line["staleness/max"] for line in lines] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("trained", ["all", "adapters"])
def test_two_engines_of_a_sampler_on_ray_load_what_one_of_them_was_sent(
    trained: str, model: Path, tmp_path: Path
) -> None:
    pools = {"actor": {"cpus": 0.5}, "sampler": {"processes": 2, "cpus": 0.5}, "scorer": {"cpus": 0.5}}
    config = config_of(tmp_path, model, "run")
    config["runtime"] = {"backend": "ray", "object_store_gb": 0.2, "heartbeat_s": 60.0, "pools": pools}
    config["train"]["max_steps"] = 4
    if trained == "adapters":
        config["model"]["lora"] = {"rank": 4, "alpha": 8}
    result = run_task_process("rl_text", write_config(config, tmp_path / "ray.yaml"), timeout_s=1100)
    assert result.returncode == 0, result.output
    folder = result.output_dir
    lines = [line for line in read_jsonl(folder / "metrics.jsonl") if "mismatch/log_ratio_max" in line]
    assert len(lines) == 4 and all(0 < line["mismatch/log_ratio_max"] < 3e-5 for line in lines)
    assert len(list(folder.glob("vllm-*.log"))) == 2
    versions = list((folder / "weights").glob("*/*/model-*"))
    assert len({path.parents[1] for path in versions}) <= 1, "one of the two had the weights for both"
    if trained == "all":
        assert not any(path.exists() for path in versions), "no memory is left of what was handed over"


class InTheMiddle:
    """Signals all processes of vLLM while it draws, some tokens before a request that ``at`` chooses by its number."""

    def __init__(self, patch: pytest.MonkeyPatch, what: signal.Signals, at: Callable[[int], bool]) -> None:
        self.what, self.at, self.num_requests, self.hit, self.lost = what, at, 0, 0, 0
        generate = VllmEngine.generate

        async def counted(engine: VllmEngine, *arguments: Any) -> Completion:
            self.num_requests += 1
            if self.at(self.num_requests):
                # The request waits, and so is lost even if a busy machine lets all others end first.
                await asyncio.to_thread(self._strike, engine, tokens_drawn(engine))
            try:
                return await generate(engine, *arguments)
            except EngineError:
                self.lost += 1
                raise

        patch.setattr(VllmEngine, "generate", counted)

    def _strike(self, engine: VllmEngine, before: float) -> None:
        while tokens_drawn(engine) < before + 20:
            time.sleep(0.005)
        for process in psutil.Process(engine.calls.http.process.pid).children(recursive=True):
            process.send_signal(self.what)
        self.hit += 1


def drawn_in(folder: Path, step: int) -> dict[int, list[list[int]]]:
    """The tokens of an iteration's samples."""
    rollout = read_dump(dump_path(folder, step)).rollout
    drawn = [[list(map(int, sequence.token_ids)) for sequence in some] for some in rollout.sequences]
    return dict(zip(map(int, rollout.sample_ids), drawn, strict=True))


def left_over() -> list[str]:
    """Processes of vLLM that are still there."""
    return [
        " ".join(child.cmdline())
        for child in psutil.Process().children(recursive=True)
        if child.status() != psutil.STATUS_ZOMBIE and "vllm" in " ".join(child.cmdline()).lower()
    ]


@pytest.mark.parametrize("fault", ["killed", "hangs"])
def test_vllm_that_is_lost_in_the_middle_of_a_batch_is_started_anew(
    fault: str,
    model: Path,
    undisturbed: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    in_the_middle = InTheMiddle(
        monkeypatch,
        signal.SIGKILL if fault == "killed" else signal.SIGSTOP,
        at=lambda number: number == SAMPLES + SAMPLES // 2,  # in the second iteration
    )
    more = {"timeout_s": 60.0} if fault == "hangs" else {}
    folder = run_task_here("rl_text", config_of(tmp_path, model, "run", **more))
    assert in_the_middle.hit == 1 and 0 < in_the_middle.lost <= SAMPLES
    assert "it is started anew, 1 of 3 times" in caplog.text
    assert left_over() == []
    ours, theirs = (read_jsonl(path / "metrics.jsonl") for path in (folder, undisturbed))
    for line, expected in zip(ours[:2], theirs[:2], strict=True):  # in which vLLM has batches of other sizes
        assert line == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert drawn_in(folder, 2) == drawn_in(undisturbed, 2)


def test_vllm_that_is_lost_in_every_batch_ends_the_run_with_what_was_done_saved(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_the_middle = InTheMiddle(monkeypatch, signal.SIGKILL, at=lambda number: number % SAMPLES == SAMPLES // 2)
    config = config_of(tmp_path, model, "run")
    with pytest.raises(RoleLostError, match=r"(?s)engine: .*ended with code.*3 times already") as caught:
        run_task_here("rl_text", config)
    assert ending_of(caught.value).code == 8 and in_the_middle.hit == 4
    assert (tmp_path / "run/checkpoints/global_step_0/manifest.json").is_file()
    assert left_over() == []


def test_vllm_with_other_weights_than_were_sent_ends_the_run(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = WeightFiles.write

    def write_others(files: WeightFiles, tensors: Any, version: int) -> Path:
        folder = write(files, tensors, version)
        if version == 2:
            path = folder / "model-00001.safetensors"
            weights = load_file(path)
            damaged = {name: tensor.clone() for name, tensor in weights.items()}
            damaged["model.layers.1.mlp.down_proj.weight"] *= -1
            path.unlink()  # a link to the memory of the run
            save_file(damaged, path, metadata={"format": "pt", "version": str(version)})
        return folder

    monkeypatch.setattr(WeightFiles, "write", write_others)
    with pytest.raises(WeightSyncError, match="version 2: the log-probs of fixed tokens") as caught:
        run_task_here("rl_text", config_of(tmp_path, model, "run"))
    assert ending_of(caught.value).code == 7
    assert (tmp_path / "run/checkpoints/global_step_2/manifest.json").is_file()
    assert left_over() == []
